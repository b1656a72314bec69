"""The frozen reference: what never reaches it, and its own recurrent state."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs import check_env_specs
from torchrl.modules import Actor, MaskedCategorical

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
    sequence,
    with_transforms,
)
from torchrl_kl import (
    GPT,
    CausalLMActor,
    FrozenActor,
    KLConstrainedTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)
from torchrl_kl.envs import DigitLanguageEnv


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def ref_log_prob(transform, batch) -> torch.Tensor:
    return transform(batch)["next", "ref_log_prob"]


# What never reaches it.


def test_it_is_a_deep_copy():
    actor, batch = make_actor(), play(WalkEnv((2,)), make_actor())
    transform = ReferenceModelLogProbTransform(actor)
    expected = ref_log_prob(transform, batch)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(-3.0)
    assert_close(ref_log_prob(transform, batch), expected, rtol=0, atol=0)


def test_identical_weights_give_the_log_prob_of_the_policy():
    batch = play(WalkEnv((2,)), make_actor())
    expected = batch["action_log_prob"].detach()
    assert_close(
        ref_log_prob(ReferenceModelLogProbTransform(make_actor()), batch),
        expected,
        rtol=0,
        atol=1e-6,
    )


def test_it_stays_in_eval_mode_for_ever():
    net = TensorDictModule(
        nn.Sequential(nn.Linear(N_OBS, 64), nn.Dropout(0.5), nn.Linear(64, N_ACTIONS)),
        ["observation"],
        ["logits"],
    )
    actor = probabilistic_actor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    actor.train()
    transform = ReferenceModelLogProbTransform(actor)
    env = with_transforms(WalkEnv((2,)), transform)
    env.train()
    transform.train()
    transform.reference.train()
    assert not any(module.training for module in transform.reference.modules())
    batch = play(WalkEnv((2,)), actor)
    assert_close(ref_log_prob(transform, batch), ref_log_prob(transform, batch), rtol=0, atol=0)
    assert actor.training  # the policy is left as it was


def test_no_gradient_reaches_it_and_no_optimizer_moves_it():
    actor = make_actor()
    transform = KLConstrainedTransform(actor, 0.1)
    before = weights(transform)
    batch = play(WalkEnv((2,)), moved(actor))
    assert batch["action_log_prob"].requires_grad
    transform.requires_grad_(True)  # even so
    after = transform(batch)["next"]
    assert not any(
        after[name].requires_grad for name in ("ref_log_prob", "kl", "reward", "episode_kl")
    )
    optimizer = torch.optim.Adam([*transform.parameters(), *actor.parameters()], lr=1.0)
    batch["action_log_prob"].sum().backward()
    optimizer.step()
    assert_close(weights(transform), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in transform.parameters())


def test_the_policy_of_a_reference_without_gradients_keeps_its_own():
    actor = make_actor()
    ReferenceModelLogProbTransform(actor)
    assert all(parameter.requires_grad for parameter in actor.parameters())


def test_it_is_in_the_state_dict_and_moves_with_the_transform():
    actor = make_actor()
    transform = ReferenceModelLogProbTransform(actor)
    saved = transform.state_dict()
    assert saved.pop("reference.fingerprint").shape == (32,)
    assert len(saved) == len(actor.state_dict())
    for value, expected in zip(saved.values(), actor.state_dict().values(), strict=True):
        assert_close(value, expected, rtol=0, atol=0)
    assert all(p.dtype == torch.float64 for p in transform.to(torch.float64).parameters())
    assert all(p.device.type == "meta" for p in transform.to("meta").parameters())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_in_half_precision_its_log_probs_and_their_sums_are_float32(half):
    actor = make_actor()
    stack: Any = KLConstrainedTransform(actor, 0.1, reference=FrozenActor(actor).to(half))
    assert stack.reference.dtype == torch.float32
    env = with_transforms(WalkEnv((2,), longest=400), stack)
    check_env_specs(env)
    step = play(env, moved(actor), 300)["next"]
    for name in ("ref_log_prob", "kl", "episode_kl"):
        assert step[name].dtype == env.observation_spec[name].dtype == torch.float32
    expected, total = torch.zeros(2, 1, dtype=torch.float64), []
    for t in range(300):
        expected = expected + step["kl"][:, t].double()
        total.append(expected)
        expected = torch.where(step["done"][:, t], 0.0, expected)
    magnitude = step["kl"].abs().sum(1).max()
    bound = 300 * torch.finfo(torch.float32).eps * magnitude.item()
    assert_close(step["episode_kl"].double(), torch.stack(total, 1), rtol=0, atol=bound)


def test_attaching_it_leaves_the_policy_where_and_as_it_is():
    actor = make_actor()
    with_transforms(WalkEnv((2,)), ReferenceModelLogProbTransform(actor))
    assert actor.training
    assert all(parameter.requires_grad for parameter in actor.parameters())


# What cannot be a reference.


class HasDistOnly(nn.Module):
    def get_dist(self, tensordict):
        return Categorical(tensordict["logits"])


@pytest.mark.parametrize(
    "policy",
    [
        nn.Linear(3, 2),
        Actor(nn.Linear(3, 2)),
        sequence(TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])),
        lambda td: td,
        HasDistOnly(),
    ],
    ids=["module", "deterministic", "sequential", "function", "no-log-prob"],
)
@pytest.mark.parametrize("make", [FrozenActor, ReferenceModelLogProbTransform, KLRewardTransform])
def test_what_has_no_distribution_is_refused(make, policy: Any):
    said = r"`actor` must be a probabilistic actor .*, got \w+: .*ProbabilisticActor.*CausalLMActor"
    with pytest.raises(TypeError, match=said):
        make(policy)


@pytest.mark.parametrize("layer", [nn.LazyLinear(N_ACTIONS), nn.LazyBatchNorm1d(affine=False)])
def test_a_lazy_actor_is_refused(layer):
    net = TensorDictModule(layer, ["observation"], ["logits"])
    actor = probabilistic_actor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    with pytest.raises(
        ValueError, match=r"`actor` has uninitialised weights \(module.*run it once on data first"
    ):
        ReferenceModelLogProbTransform(actor)
    actor(TensorDict(observation=torch.zeros(2, N_OBS), batch_size=2))
    ReferenceModelLogProbTransform(actor)


def test_a_reference_needs_not_record_its_own_log_prob():
    batch = play(WalkEnv((2,)), make_actor())
    silent = ReferenceModelLogProbTransform(make_actor(return_log_prob=False))
    assert_close(ref_log_prob(silent, batch), batch["action_log_prob"].detach(), rtol=0, atol=1e-6)


def test_inputs_of_the_distribution_are_read_too():
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"])
    actor = probabilistic_actor(
        net,
        in_keys={"logits": "logits", "mask": "action_mask"},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )
    mask = torch.tensor([[True, True, False, False], [False, True, True, True]]).repeat(8, 1)
    batch = TensorDict(
        observation=torch.randn(16, N_OBS), action_mask=mask, next=TensorDict(batch_size=16)
    )
    batch = actor(batch.auto_batch_size_(1))
    expected = batch["action_log_prob"].detach()
    assert_close(
        ref_log_prob(ReferenceModelLogProbTransform(actor), batch), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_what_the_actor_reads_must_be_there(kind):
    actor = make_actor() if kind == "mlp" else make_actor(kind)
    env = with_transforms(WalkEnv((2,)), *([] if kind == "mlp" else memory_of(actor)))
    batch = collect(env, moved(actor), frames=8, batches=1)[0]
    with pytest.raises(KeyError, match="action"):
        ReferenceModelLogProbTransform(actor)(batch.exclude("action"))
    with pytest.raises(KeyError, match="observation"):
        ReferenceModelLogProbTransform(actor)(batch.exclude("observation"))


def test_an_agent_reference_may_read_the_root_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(N_OBS + 1, N_ACTIONS)

        def forward(self, observation, left):
            return self.linear(
                torch.cat([observation, left.unsqueeze(-2).expand(*observation.shape[:-1], 1)], -1)
            )

    actor = probabilistic_actor(
        TensorDictModule(Net(), [("agents", "observation"), "left"], [("agents", "logits")]),
        in_keys={"logits": ("agents", "logits")},
        out_keys=[("agents", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    env = with_transforms(WalkEnv((2,), n_agents=3), ReferenceModelLogProbTransform(actor))
    batch = play(env, copy.deepcopy(actor))
    expected = batch["agents", "action_log_prob"].detach()
    assert_close(batch["next", "agents", "ref_log_prob"], expected, rtol=0, atol=1e-6)


# A transformer as reference.


def test_a_gpt_scores_trajectories_and_shuffled_states_alike():
    actor = CausalLMActor(GPT(11, 8))
    policy = moved(actor, scale=0.2)
    batch = play(DigitLanguageEnv(batch_size=(4,)), policy, 10)
    timed = ref_log_prob(ReferenceModelLogProbTransform(actor), batch)
    order = torch.randperm(batch.numel())
    shuffled = ref_log_prob(ReferenceModelLogProbTransform(actor), batch.reshape(-1)[order])
    assert_same(shuffled, timed.reshape(-1)[order])
    inside = play(
        with_transforms(DigitLanguageEnv(batch_size=(4,)), ReferenceModelLogProbTransform(actor)),
        policy,
        10,
    )
    assert_same(
        ref_log_prob(ReferenceModelLogProbTransform(actor), inside), inside["next", "ref_log_prob"]
    )
    assert (timed - batch["action_log_prob"].detach()).abs().max() > 1e-2
