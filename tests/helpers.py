"""What the tests of the transforms share: an env, actors of every kind, bounds of rounding."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.data import Categorical as CategoricalSpec
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, Transform, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    ProbabilisticActor,
    TanhNormal,
)

from torchrl_kl import KLConstrainedTransform, KLController

N_OBS = 3
N_ACTIONS = 4
WRITTEN = (
    "ref_log_prob",
    "kl",
    "kl_estimate",
    "episode_kl",
    "task_reward",
    "kl_coeff",
    "not_drawn",
    "episode_sums",
    "ref_h",
    "ref_c",
)


# TorchRL annotates these more narrowly than it takes them.
compose: Any = Compose
probabilistic_actor: Any = ProbabilisticActor
sequence: Any = TensorDictSequential


class WalkEnv(EnvBase):
    """A short walk: an action moves `observation`, whose sum is the reward; 2 to `longest` steps.

    Stateless (everything is in the tensordict), any batch size. Only resets are random.

    Args:
        batch_size: batch size of the env.
        n_agents: with agents, everything but done is under "agents".
        discrete: 4 actions by number, else 2 real ones.
        longest: the length of the longest episode.
        truncates: whether episodes end by truncation; by termination if not.
        shared_reward: with agents, one reward at the root for all of them.
        dtype: of observations and real actions; the reward stays float32.
    """

    def __init__(
        self,
        batch_size: tuple[int, ...] = (),
        *,
        n_agents: int | None = None,
        discrete: bool = True,
        longest: int = 4,
        truncates: bool = False,
        shared_reward: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(device=None, batch_size=torch.Size(batch_size))
        self.longest, self.truncates = longest, truncates
        self.agents: tuple[int, ...] = () if n_agents is None else (n_agents,)
        generator = torch.Generator().manual_seed(0)
        self.moves = torch.randn(N_ACTIONS if discrete else 2, N_OBS, generator=generator).to(dtype)
        self.shared_reward = shared_reward
        batch, inner = torch.Size(batch_size), torch.Size((*batch_size, *self.agents))
        one = torch.Size((1,))
        left = Unbounded(batch + one, dtype=torch.int64)
        reward = Unbounded((batch if shared_reward else inner) + one)
        observation = Unbounded(inner + torch.Size((N_OBS,)), dtype=dtype)
        self.observation_spec = self._place({"observation": observation}, left=left)
        self.state_spec = self.observation_spec.clone()
        action = (
            CategoricalSpec(N_ACTIONS, shape=inner)
            if discrete
            else Unbounded(inner + torch.Size((2,)), dtype=dtype)
        )
        self.action_spec = self._place({"action": action})
        shared = Composite(reward=reward, shape=self.batch_size)
        self.reward_spec = shared if shared_reward else self._place({"reward": reward})
        flag = CategoricalSpec(2, dtype=torch.bool, shape=batch + one)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch_size
        )

    def key(self, name: str) -> Any:
        return ("agents", name) if self.agents else name

    def _place(self, entries: dict[str, Any], **root: Any) -> Composite:
        if self.agents:
            entries = {"agents": Composite(entries, shape=(*self.batch_size, *self.agents))}
        return Composite(entries, **root, shape=self.batch_size)

    def _flags(self, done: torch.Tensor) -> dict[str, torch.Tensor]:
        terminated = torch.zeros_like(done) if self.truncates else done
        return {"done": done, "terminated": terminated, "truncated": done & ~terminated}

    def _reset(self, tensordict=None, **_) -> TensorDictBase:
        out = self.observation_spec.zero()
        out["left"] = torch.randint(2, self.longest + 1, (*self.batch_size, 1))
        out[self.key("observation")] = torch.randn_like(out[self.key("observation")])
        return out.update(self._flags(torch.zeros_like(out["left"], dtype=torch.bool)))

    def _step(self, tensordict: Any) -> TensorDictBase:
        batch_size = tensordict.batch_size
        action = tensordict[self.key("action")]
        move = action.tanh() @ self.moves if action.is_floating_point() else self.moves[action]
        observation = 0.7 * tensordict[self.key("observation")] + move
        left = tensordict["left"] - 1
        out = TensorDict({"left": left, **self._flags(left == 0)}, batch_size=batch_size)
        if self.agents:
            out["agents"] = TensorDict(batch_size=(*batch_size, *self.agents))
        reward = observation.sum(-1, keepdim=True).float()
        out[self.key("observation")] = observation
        out["reward" if self.shared_reward else self.key("reward")] = (
            reward.mean(-2) if self.shared_reward else reward
        )
        return out

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


def sharp(module: Any, seed: int = 0, scale: float = 0.5) -> Any:
    """Weights so large that distributions are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return module


def moved(actor, seed: int = 1, scale: float = 0.3):
    """A copy of an actor with other weights: the policy, when the actor is the reference."""
    actor = copy.deepcopy(actor)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return actor


def make_actor(kind: str = "categorical", *, agents: bool = False, seed: int = 0, **kwargs) -> Any:
    """A sharp actor for WalkEnv: "categorical", "normal", "tanh_normal", "lstm" or "gru"."""
    kwargs = {"return_log_prob": True} | kwargs
    place: Callable[[str], Any] = (lambda name: ("agents", name)) if agents else (lambda name: name)
    if kind in ("normal", "tanh_normal"):
        # Bounded, as a TanhNormal far from 0 rounds its actions to the bound.
        layers = [nn.Linear(N_OBS, 4), *([nn.Tanh()] if kind == "tanh_normal" else [])]
        net: Any = TensorDictModule(
            nn.Sequential(*layers, NormalParamExtractor()),
            in_keys=[place("observation")],
            out_keys=[place("loc"), place("scale")],
        )
        params, distribution = ["loc", "scale"], Normal if kind == "normal" else TanhNormal
    else:
        net = _recurrent_net(kind) if kind in ("lstm", "gru") else None
        net = net or TensorDictModule(
            nn.Linear(N_OBS, N_ACTIONS), [place("observation")], [place("logits")]
        )
        params, distribution = ["logits"], Categorical
    actor = probabilistic_actor(
        net,
        in_keys={name: place(name) for name in params}
        if agents
        else [place(name) for name in params],
        out_keys=[place("action")],
        distribution_class=distribution,
        **kwargs,
    )
    return sharp(actor, seed)


def _recurrent_net(kind: str) -> Any:
    module, states = (LSTMModule, ["h", "c"]) if kind == "lstm" else (GRUModule, ["h"])
    core = module(
        input_size=N_OBS,
        hidden_size=8,
        in_keys=["observation", *states],
        out_keys=["features", *(("next", state) for state in states)],
    )
    return sequence(core, TensorDictModule(nn.Linear(8, N_ACTIONS), ["features"], ["logits"]))


def memory_of(actor) -> list[Transform]:
    """What a recurrent policy needs in its env: marks of first steps, and a place for its state."""
    return [InitTracker(), actor[0][0].make_tensordict_primer()]


def with_transforms(env: EnvBase, *transforms: Transform) -> TransformedEnv:
    return TransformedEnv(env, compose(*transforms))


def play(env: EnvBase, policy=None, steps: int = 12, *, seed: int = 0, **kwargs) -> Any:
    """A rollout with actions drawn at random, through the ends of episodes."""
    torch.manual_seed(seed)
    kwargs = {"break_when_any_done": False} | kwargs
    with set_exploration_type(ExplorationType.RANDOM):
        return env.rollout(steps, policy, **kwargs)


def collect(
    env: EnvBase, policy, *, frames: int, batches: int, seed: int = 0, **kwargs
) -> list[Any]:
    """Clones of a collector's batches."""
    torch.manual_seed(seed)
    collector = Collector(
        env,
        policy,
        frames_per_batch=frames,
        total_frames=frames * batches,
        auto_register_policy_transforms=False,
        **kwargs,
    )
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def without_kl(batch: Any) -> Any:
    """A batch of WalkEnv as it was before the transforms, with the reward of the task."""
    batch = batch.clone()
    for step in (batch, batch["next"]):
        holder = step.get("agents", step)
        for name in WRITTEN:
            holder.pop(name, None)
        if "reward" in holder.keys():
            holder["reward"] = holder["observation"].sum(-1, keepdim=True).float()
    return batch


def rounding(actor: Any, batch: Any) -> Tensor:
    """How far apart two evaluations of the log-prob of the actions of a batch may be, nats.

    A matrix product is added up in an order that depends on the shape of the batch and on the
    machine. In any order, a dot product of n terms is the exact one of weights that are each moved
    by a share of at most n * eps / 2 (Higham, "Accuracy and Stability of Numerical Algorithms",
    section 3.1). A value v of an elementary function, such as a scale, is off by a share of at most
    2 * eps, and so is each term of log p. One evaluation is then, to first order, within

        sum_w (n eps / 2) |w| |d log p / dw| + sum_v 2 eps |v| |d log p / dv| + 2 eps (|log p| + 10)

    of the truth, and two of them are within twice that of each other. The 10 bounds the terms of
    log p that may cancel, such as the logarithm of a sum of exponentials.

    Args:
        actor: a probabilistic actor of one action.
        batch: what it read, and the actions, shape (*B). Rows must not depend on each other.

    Returns:
        The bound, float64, (*B).
    """
    eps = torch.finfo(next(actor.parameters()).dtype).eps
    with torch.enable_grad():
        inputs = batch.select(*actor.in_keys, *actor.dist_sample_keys).detach().clone()
        known = actor.get_dist_params(inputs)
        dist, action = actor.build_dist_from_params(known), known[actor.dist_sample_keys[0]]
        value = dist.log_prob(action)
    values = [v for v in known.values(True, True) if v.requires_grad]
    weights = list(actor.parameters())
    shares = [eps / 2 * (1 + (w.shape[-1] if w.ndim > 1 else 1)) for w in weights]
    shares += [2 * eps] * len(values)
    rows = value.flatten()
    eye = torch.eye(len(rows)).to(rows)
    slopes = torch.autograd.grad(rows, weights + values, eye, is_grads_batched=True)
    bound = 2 * eps * (rows.detach().abs().double() + 10)
    for share, v, slope in zip(shares, weights + values, slopes, strict=True):
        bound += share * (v.detach() * slope).abs().flatten(1).sum(1)
    return (2 * bound).reshape(value.shape)


def ulps(*terms: Tensor | float) -> Tensor:
    """How far a sum of a few recorded terms may be from the same sum in another order, float64."""
    sizes = [torch.as_tensor(term).detach() for term in terms]
    eps = max(torch.finfo(size.dtype).eps for size in sizes if size.is_floating_point())
    return 2 * eps * sum((size.double().abs() for size in sizes), torch.zeros(()))


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Each number of `actual` is within its bound, (*B) or (*B, 1), of `expected`, (*B, 1)."""
    assert actual.shape == expected.shape
    error = (actual.detach().double() - expected.detach().double()).abs()
    bound = torch.as_tensor(bound, dtype=torch.float64)
    if bound.ndim and bound.ndim < error.ndim:
        bound = bound.reshape(*bound.shape, *(1,) * (error.ndim - bound.ndim))
    assert (error <= bound).all(), f"{error.max()} apart, {(error / bound).max()} of the bound"


def assert_same(actual: Any, expected: Any) -> None:
    """What env, postproc and module calls of the same numbers promise: 1e-5."""
    assert_close(actual, expected, atol=1e-5, rtol=1e-5)


class SpyController(KLController):
    """A controller that never moves and remembers what it was told."""

    def __init__(self, init_coeff: float = 0.1, *, per: Any = "trajectory", step: float = 0.0):
        super().__init__(init_coeff, per=per)
        self.calls: list[tuple[float, int]] = []
        self.step = step

    def next_coeff(self, kl: float, n_steps: int) -> float:
        self.calls.append((kl, n_steps))
        return self.coeff.item() + self.step


def spied(per: Any = "trajectory", *, update_every: int = 1, step: float = 0.0, **kwargs):
    """A stack and the controller that it calls."""
    controller = SpyController(per=per, step=step)
    return KLConstrainedTransform(
        make_actor(), controller, update_every=update_every, **kwargs
    ), controller


def policy() -> Any:
    return moved(make_actor())


def total(controller: SpyController) -> tuple[int, float]:
    """How many values a controller was told of, and their sum."""
    return sum(n for _, n in controller.calls), sum(kl * n for kl, n in controller.calls)


def step_of(**entries) -> Any:
    """A batch (1, T) of steps, time last, from lists of T numbers for "next"."""
    values = {name: torch.tensor(value)[None, :, None] for name, value in entries.items()}
    n_steps = next(iter(values.values())).shape[1]
    batch = TensorDict(next=TensorDict(values, batch_size=(1, n_steps)), batch_size=(1, n_steps))
    batch["observation"] = torch.ones(1, n_steps, 1)
    batch.names = [None, "time"]
    return batch
