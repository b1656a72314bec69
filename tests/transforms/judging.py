"""A judge of the stack in an env: it recomputes all entries of a batch from bare networks."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NestedKey
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs import (
    EnvBase,
    Transform,
    TransformedEnv,
    check_env_specs,
)
from torchrl.modules import OneHotCategorical

from tests.helpers import (
    WRITTEN,
    assert_within,
    compose,
    moved,
    play,
    probabilistic_actor,
    rounding,
    sequence,
    sharp,
    ulps,
)
from torchrl_kl import KLConstrainedTransform, KLKeys
from torchrl_kl._tensordict import as_tuple

COEFF = 0.5


class Net(nn.Module):
    """A linear layer on the last `dims` dimensions of whatever comes, scaled down: counts grow."""

    def __init__(self, n_in: int, n_out: int, *, dims: int = 1, tail: nn.Module | None = None):
        super().__init__()
        self.linear, self.dims, self.tail = nn.Linear(n_in, n_out), dims, tail or nn.Identity()

    def forward(self, observation):
        return self.tail(self.linear(0.1 * observation.float().flatten(-self.dims)))


def actor_on(
    n_in: int,
    n_out: int,
    *,
    observation: NestedKey = "observation",
    action: NestedKey = "action",
    distribution: Any = Categorical,
    seed: int = 0,
    **kwargs,
) -> Any:
    """A sharp actor: "logits" of a discrete action, or "loc" and "scale" of `n_out` real ones."""
    place: Any = action[:-1] if isinstance(action, tuple) else ()
    params = ["logits"] if distribution in (Categorical, OneHotCategorical) else ["loc", "scale"]
    if len(params) == 2:
        kwargs["tail"] = NormalParamExtractor()
        n_out = 2 * n_out
    keys: dict[str, Any] = {name: (*place, name) if place else name for name in params}
    actor = probabilistic_actor(
        TensorDictModule(Net(n_in, n_out, **kwargs), [observation], list(keys.values())),
        in_keys=keys if place else params,
        out_keys=[action],
        distribution_class=distribution,
        return_log_prob=True,
    )
    return sharp(actor, seed)


def binary(**kwargs) -> Any:
    """A switch: one action dimension of two choices."""
    return actor_on(1, 2, tail=nn.Unflatten(-1, (1, 2)), **kwargs)


def without_penalty(batch: Any, reward_key: NestedKey) -> Any:
    """A batch as it was before the stack, wherever its entries are."""
    batch = batch.clone()
    for key in [
        key for key in batch["next"].keys(True, True) if as_tuple(key)[-1] == "task_reward"
    ]:
        batch["next"][reward_key] = batch["next"][key]
    for key in [key for key in batch.keys(True, True) if as_tuple(key)[-1] in WRITTEN]:
        del batch[key]  # type: ignore[arg-type]
    return batch


def bound_of(actor: Any, batch: Any, **kwargs) -> torch.Tensor:
    """The rounding of a reference's log-prob, which reads the state of its memory."""
    for name in ("h", "c"):
        if f"ref_{name}" in batch.keys():
            batch = batch.copy().set(name, batch[f"ref_{name}"])
            kwargs["steps"] = batch.shape[-1]
    return rounding(actor, batch, **kwargs)


def judge(
    make_env: Callable[[], EnvBase],
    actor: Any,
    *,
    place: Any = (),
    reward: NestedKey = "reward",
    sum_agents: bool = False,
    rest: tuple[Any, ...] = (),
    memory: Callable[[], list[Transform]] = list,
    steps: int = 12,
) -> Any:
    """Everything that holds in any env; returns a penalized rollout of a policy that moved.

    Args:
        make_env: the env.
        actor: the reference.
        place: the nested tensordict of the actor's action and of all that is made of it.
        reward: the reward that is penalized.
        sum_agents: whether the KL of all agents is summed, at the root.
        rest: the actors of the other actions.
        memory: what a recurrent policy needs in its env.
        steps: of the rollout, through the ends of episodes.
    """
    penalized_at = () if sum_agents else place

    def at(step, name):
        return step[(*(place if name == "ref_log_prob" else penalized_at), name)]

    def stack():
        return KLConstrainedTransform(
            actor, COEFF, sum_agents=sum_agents, keys=KLKeys(reward=reward)
        )

    def penalized_env():
        env = make_env()
        transforms = compose(*memory(), stack())
        return TransformedEnv(env, transforms, auto_unwrap=type(env) is TransformedEnv)

    def of_agents(values):
        return values.sum(-1, keepdim=True) if sum_agents else values.unsqueeze(-1)

    env = penalized_env()
    check_env_specs(env)
    env.set_seed(0)
    batch = play(env, sequence(moved(actor), *rest), steps)
    step = batch["next"]
    ref_log_prob = at(step, "ref_log_prob")
    bound = bound_of(actor, batch)
    # Against the distributions themselves, on what was seen and done.
    if not memory():
        seen = batch.select(*actor.in_keys, *actor.dist_sample_keys)
        with torch.no_grad():
            expected = actor.log_prob(seen)
        expected = expected.reshape(*ref_log_prob.shape, -1).sum(-1)
        assert_within(ref_log_prob, expected, bound)
    log_prob = batch[actor.log_prob_keys[0]].detach()
    log_prob = log_prob.reshape(*ref_log_prob.shape, -1).sum(-1)
    kl, terms = of_agents(log_prob - ref_log_prob), of_agents(log_prob.abs() + ref_log_prob.abs())
    assert_within(at(step, "kl"), kl, ulps(terms))
    assert at(step, "kl").abs().max() > 1e-3
    # What is subtracted, and when the sum begins anew.
    task_reward, penalty = at(step, "task_reward"), COEFF * at(step, "kl")
    assert_within(step[reward], task_reward - penalty, ulps(task_reward, penalty))
    before = at(batch, "episode_kl")
    assert_within(at(step, "episode_kl"), before + at(step, "kl"), ulps(before, at(step, "kl")))
    # Outside as inside.
    outside = stack()(without_penalty(batch, reward))["next"]
    assert_within(at(outside, "ref_log_prob"), ref_log_prob, bound)
    assert_within(at(outside, "kl"), at(step, "kl"), of_agents(bound) + ulps(terms))
    for name in ("task_reward", "kl_coeff"):
        assert_close(at(outside, name), at(step, name), rtol=0, atol=0)
    moved_by = COEFF * (of_agents(bound) + ulps(terms)) + ulps(task_reward, penalty)
    assert_within(outside[reward], step[reward], moved_by)
    # The reference itself has no divergence.
    own = play(penalized_env(), sequence(actor, *rest), steps)
    bound = bound_of(actor, own, actions=True)
    kl = at(own["next"], "kl")
    assert_within(kl, torch.zeros_like(kl), of_agents(bound))
    return batch


def assert_sums_restart(batch: Any, place: Any = (), done: NestedKey = "done") -> None:
    """After a done the running sum is that of the next step alone."""
    ends = batch["next"][done][..., :-1, :]
    assert ends.any()
    sums, kl = (batch["next"][(*place, name)][..., 1:, :] for name in ("episode_kl", "kl"))
    assert_within(sums[ends], kl[ends], ulps(kl[ends]))
