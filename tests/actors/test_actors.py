"""Every way to write an actor: the same KL in env and batch, and none for identical weights."""

import copy
from typing import Any

import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs import SerialEnv, check_env_specs
from torchrl.modules import MLP, ActorValueOperator, ValueOperator

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sharp,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    GPT,
    CausalLMActor,
    KLConstrainedTransform,
    ReferenceModelLogProbTransform,
)
from torchrl_kl.envs import DigitLanguageEnv


def linear(n: int = N_ACTIONS, out: str = "logits", read: str = "observation") -> Any:
    return TensorDictModule(nn.Linear(N_OBS if read == "observation" else 8, n), [read], [out])


def draw(params: Any = ("logits",), out: str = "action", **kwargs) -> Any:
    make: Any = ProbabilisticTensorDictModule
    return make(
        in_keys=params if isinstance(params, dict) else list(params),
        out_keys=[out],
        distribution_class=Categorical,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
        **kwargs,
    )


def of_actor_value_operator() -> Any:
    common = TensorDictModule(
        nn.Sequential(nn.Linear(N_OBS, 8), nn.Tanh()), ["observation"], ["hidden"]
    )
    head = probabilistic_actor(
        linear(read="hidden"),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    value = ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    make: Any = ActorValueOperator
    return make(common, head, value).get_policy_operator()


def of_mlp() -> Any:
    net = TensorDictModule(MLP(N_OBS, N_ACTIONS, num_cells=[16, 16]), ["observation"], ["logits"])
    return probabilistic_actor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )


def of_sequential() -> Any:
    return ProbabilisticTensorDictSequential(linear(), draw())


class Twice(nn.Module):
    def forward(self, first, second):
        return (first + 2 * second) % N_ACTIONS


class Sees(nn.Module):
    """Logits of the second draw, which depend on the first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS + N_ACTIONS, N_ACTIONS)

    def forward(self, observation, first):
        first = nn.functional.one_hot(first, N_ACTIONS).to(observation)
        return self.linear(torch.cat([observation, first], -1))


def of_chain() -> Any:
    """Two draws, the second after seeing the first; what is done depends on both."""
    make: Any = ProbabilisticTensorDictSequential
    return make(
        linear(out="first_logits"),
        draw({"logits": "first_logits"}, "first"),
        TensorDictModule(Sees(), ["observation", "first"], ["second_logits"]),
        draw({"logits": "second_logits"}, "second"),
        TensorDictModule(Twice(), ["first", "second"], ["action"]),
        return_composite=True,
    )


ACTORS = {
    "MLP": of_mlp,
    "ProbabilisticTensorDictSequential": of_sequential,
    "policy of an ActorValueOperator": of_actor_value_operator,
    "one draw after another": of_chain,
}
every_actor = pytest.mark.parametrize("make", ACTORS.values(), ids=ACTORS)


def log_prob_of(actor, batch) -> torch.Tensor:
    """From the networks alone: the log-softmax of what was drawn, over all draws."""
    batch = batch.copy()
    total = torch.zeros(())
    with torch.no_grad():
        flat = [
            m
            for m in actor.modules()
            if isinstance(m, TensorDictModule | ProbabilisticTensorDictModule)
        ]
        for module in flat:
            if isinstance(module, ProbabilisticTensorDictModule):
                logits, drawn = batch[module.in_keys[0]], batch[module.dist_sample_keys[0]]
                total = total + logits.log_softmax(-1).gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
            elif not hasattr(module, "get_dist"):
                outs = module.module(*(batch[key] for key in module.in_keys))
                batch[module.out_keys[0]] = outs
    return total


@every_actor
def test_every_actor_is_measured_in_env_and_batch(make):
    actor = sharp(make())
    policy = moved(actor)
    env = with_transforms(
        SerialEnv(2, lambda: WalkEnv(longest=5)), KLConstrainedTransform(actor, 0.5)
    )
    check_env_specs(env)
    for batch in collect(env, policy, frames=24, batches=2):
        assert batch["next", "done"].any()
        expected = log_prob_of(policy, batch) - log_prob_of(actor, batch)
        assert expected.abs().max() > 1e-2
        assert_close(batch["next", "kl"].squeeze(-1), expected, atol=1e-5, rtol=1e-4)
        after = KLConstrainedTransform(actor, 0.5)(without_kl(batch))
        flat = KLConstrainedTransform(actor, 0.5)(without_kl(batch).reshape(-1))
        for name in ("kl", "reward"):
            assert_same(after["next", name], batch["next", name])
            assert_same(flat["next", name], batch["next", name].flatten(0, 1))


@every_actor
def test_identical_weights_have_no_kl(make):
    actor = sharp(make())
    env = with_transforms(WalkEnv((2,)), KLConstrainedTransform(actor, 0.5))
    batch = play(env, copy.deepcopy(actor))
    assert batch["next", "kl"].abs().max() <= 1e-6
    assert KLConstrainedTransform(actor, 0.5)(without_kl(batch))["next", "kl"].abs().max() <= 1e-6


def test_a_gpt_has_no_kl_from_itself_anywhere():
    actor = sharp(CausalLMActor(GPT(11, 8)), scale=0.1)
    env = with_transforms(DigitLanguageEnv(batch_size=(4,)), KLConstrainedTransform(actor, 0.5))
    for batch in collect(env, copy.deepcopy(actor), frames=40, batches=2):
        assert batch["next", "done"].any()
        assert batch["next", "kl"].abs().max() <= 1e-5
        written = [
            ("next", name)
            for name in ("ref_log_prob", "kl", "kl_coeff", "episode_kl", "task_reward")
        ]
        after = KLConstrainedTransform(actor, 0.5)(batch.exclude(*written))
        assert after["next", "kl"].abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_recurrent_reference_in_recurrent_mode_equals_the_env(kind):
    # One batch from the first step on, with ends of episodes inside: the state begins at zero.
    actor = make_actor(kind)
    env = with_transforms(
        SerialEnv(2, WalkEnv), *memory_of(actor), KLConstrainedTransform(actor, 0.5)
    )
    batch = collect(env, moved(actor), frames=40, batches=1)[0]
    assert batch["is_init"][:, 1:].any()
    after = KLConstrainedTransform(actor, 0.5)(without_kl(batch))
    for name in ("kl", "reward", "episode_kl"):
        assert_same(after["next", name], batch["next", name])
    same = KLConstrainedTransform(moved(actor), 0.5)(without_kl(batch))["next", "kl"]
    assert same.abs().max() <= 1e-5 < batch["next", "kl"].abs().max()


def test_draws_that_share_a_key_are_refused():
    with set_composite_lp_aggregate(True):
        actor = of_chain()
        with pytest.raises(
            ValueError,
            match=r"under another key, got \['sample_log_prob', 'sample_log_prob'\]",
        ):
            ReferenceModelLogProbTransform(actor)


@pytest.mark.parametrize("kind", ["categorical", "lstm"])
def test_a_reference_in_another_dtype_reads_the_policys_data(kind):
    actor = make_actor(kind)

    def env(stack: Any) -> Any:
        return with_transforms(WalkEnv((2,)), *(memory_of(actor) if kind == "lstm" else []), stack)

    doubled: Any = KLConstrainedTransform(actor, 0.5)
    wide = env(doubled.to(torch.float64))
    check_env_specs(wide)
    batch = play(wide, moved(actor))
    assert batch["observation"].dtype == torch.float32
    assert batch["next", "ref_log_prob"].dtype == torch.float64
    expected = play(env(KLConstrainedTransform(actor, 0.5)), moved(actor))
    assert_same(batch["next", "kl"].float(), expected["next", "kl"])


def test_a_random_policy_leaves_no_trace_of_an_actor_that_makes_its_action_from_its_draws():
    actor = of_chain()
    batch = play(with_transforms(WalkEnv((2,)), ReferenceModelLogProbTransform(actor)))
    assert (batch["next", "ref_log_prob"] == 0).all()
