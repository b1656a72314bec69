"""Small things the tests of the transforms share: an env, actors of every kind, ways to move and to compare them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical, Normal
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.data import Categorical as CategoricalSpec
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, Transform, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, TanhNormal

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
    "ref_h",
    "ref_c",
)


# TorchRL annotates these more narrowly than it takes them.
compose: Any = Compose
probabilistic_actor: Any = ProbabilisticActor
sequence: Any = TensorDictSequential


class WalkEnv(EnvBase):
    """A short walk: an action moves `observation`, the reward is its sum, the episode ends after 2 to `longest` steps.

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
    """A sharp actor for WalkEnv: "categorical", "normal" (a log-prob per dimension), "tanh_normal", "lstm" or "gru"."""
    kwargs = {"return_log_prob": True} | kwargs
    place: Callable[[str], Any] = (lambda name: ("agents", name)) if agents else (lambda name: name)
    if kind in ("normal", "tanh_normal"):
        net: Any = TensorDictModule(
            nn.Sequential(nn.Linear(N_OBS, 4), NormalParamExtractor()),
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
    """A batch of WalkEnv as it was before the transforms: their entries gone, the task's reward back."""
    batch = batch.clone()
    for step in (batch, batch["next"]):
        holder = step.get("agents", step)
        for name in WRITTEN:
            holder.pop(name, None)
        if "reward" in holder.keys():
            holder["reward"] = holder["observation"].sum(-1, keepdim=True).float()
    return batch


def assert_same(actual: Any, expected: Any) -> None:
    """What env, postproc and module calls promise: 1e-5."""
    assert_close(actual, expected, atol=1e-5, rtol=1e-5)


class SpyController(KLController):
    """A controller that never moves and remembers what it was told."""

    def __init__(self, init_coeff: float = 0.1, *, per: Any = "trajectory", step: float = 0.0):
        super().__init__(init_coeff, per=per)
        self.calls: list[tuple[float, int]] = []
        self.standard_errors: list[float] = []  # inf where it was told none
        self.step = step

    def _ignore_noise(self, kl: float, standard_error: float | None) -> float:
        self.standard_errors.append(math.inf if standard_error is None else standard_error)
        return kl

    def _next_coeff(self, kl: float, n_steps: int) -> float:
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
