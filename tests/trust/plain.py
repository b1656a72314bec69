"""Batches of any kind, and the numbers of a KL stack on them in plain Python, step by step."""

import math
import random
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.helpers import N_ACTIONS, N_OBS

seeds = st.integers(0, 2**20)
floating = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


class Plain:
    """A linear policy and its KL to another, number by number; `slack`: what rounding may change.

    `weights`, `bias`, and all that is read, are numbers of the dtype in which the reference works.
    """

    def __init__(self, actor: Any):
        linear = next(m for m in actor.modules() if isinstance(m, torch.nn.Linear))
        self.weights, self.bias = linear.weight.tolist(), linear.bias.tolist()
        self.dtype = linear.weight.dtype

    def log_probs(self, observation: list[float]) -> tuple[list[float], float]:
        terms = [
            [b, *(w * x for w, x in zip(row, observation, strict=True))]
            for row, b in zip(self.weights, self.bias, strict=True)
        ]
        logits = [math.fsum(each) for each in terms]
        most = max(sum(map(abs, each)) for each in terms)
        # The sum of n terms, the shift by the largest, exp, log and the result: each rounds.
        return log_softmax(logits), eps(self.dtype) * ((len(terms[0]) + 6) * most + 8)


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    norm = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - norm for x in logits]


def estimate(kind: str, lr: float, policy: list[float], reference: list[float]) -> float:
    if kind == "exact":
        pairs = zip(policy, reference, strict=True)
        return math.fsum(math.exp(p) * (p - q) for p, q in pairs)
    return {"k1": lr, "k2": lr * lr / 2, "k3": math.exp(-lr) - 1 + lr}[kind]


@st.composite
def drawn_batches(draw: Any) -> tuple[dict[str, Any], TensorDict]:
    """What a stack is made with, and a batch as a collector gives it."""
    rng = random.Random(draw(seeds))
    lead = draw(st.sampled_from([(1,), (3,), (2, 2), (0,)]))
    n_steps, n_agents = draw(st.integers(1, 6)), draw(st.sampled_from([None, None, 2]))
    timed = draw(st.sampled_from(["named", "given", "no"]))
    made: dict[str, Any] = {
        "n_agents": n_agents,
        "timed": timed,
        "estimator": draw(st.sampled_from(["k1", "k1", "k2", "k3", "exact"])),
        "coeff": draw(st.sampled_from([0.0, 0.1, 1.0, 3.7])),
        "per": draw(st.sampled_from(["trajectory", "step"])) if timed != "no" else "step",
        "sum_agents": n_agents is not None and draw(st.booleans()),
        "dtype": draw(floating),
        "frozen": draw(st.sampled_from([False, False, True])),
        "evaluated": draw(st.sampled_from([False, False, True])),
        "chunk_size": draw(st.sampled_from([None, 1, 2])),
    }
    shape = (*lead, n_steps)
    inner = shape if n_agents is None else (*shape, n_agents)

    def real(*size: int, dtype: Any, scale: float = 1.0) -> torch.Tensor:
        numbers = [scale * rng.gauss(0, 1) for _ in range(math.prod(size))]
        return torch.tensor(numbers, dtype=torch.float64).reshape(size).to(dtype)

    def flags(probability: float) -> torch.Tensor:
        drawn = [rng.random() < probability for _ in range(math.prod(shape))]
        return torch.tensor(drawn, dtype=torch.bool).reshape(shape)

    done = flags(draw(st.sampled_from([0.0, 0.3, 1.0])))
    observation = real(*inner, N_OBS, dtype=draw(floating))
    following = observation.roll(-1, len(lead))
    last = following.select(len(lead), -1)
    last.copy_(real(*last.shape, dtype=observation.dtype))
    shuffled = torch.where(
        done.reshape(*shape, *(1,) * (following.ndim - len(shape))), -following, following
    )
    logits = real(*inner, N_ACTIONS, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    action = torch.tensor([rng.randrange(N_ACTIONS) for _ in range(math.prod(inner))]).long()
    log_prob = logits.log_softmax(-1).gather(-1, action.reshape(*inner, 1)).squeeze(-1)
    reward_shape = shape if made["sum_agents"] else inner
    reward_dtype = draw(floating)
    entries = {"observation": observation, "logits": logits, "action": action.reshape(inner)}
    entries["action_log_prob"] = log_prob.to(draw(floating))
    after = {"observation": shuffled}
    reward = real(*reward_shape, 1, dtype=reward_dtype)
    batch = TensorDict(batch_size=shape)
    flag = done.unsqueeze(-1)
    batch["next"] = TensorDict(done=flag, terminated=flag.clone(), batch_size=shape)
    if n_agents is None:
        batch.update(entries)
        batch.get("next").update(after)
    else:
        batch["agents"] = TensorDict(entries, batch_size=inner)
        batch["next", "agents"] = TensorDict(after, batch_size=inner)
    shared = n_agents is None or made["sum_agents"]
    batch["next", "reward" if shared else ("agents", "reward")] = reward
    if draw(st.booleans()):
        mask = flags(0.6)
        batch["collector", "mask"] = mask
        hidden = draw(st.sampled_from([0.0, math.nan, -math.inf]))
        held = entries["action_log_prob"]
        held[~mask] = hidden
    if timed == "named":
        batch.names = [*(None for _ in lead), "time"]
    return made, batch


def nested(made: dict[str, Any], name: str) -> Any:
    return name if made["n_agents"] is None else ("agents", name)


class Expected:
    """All numbers of a batch, from loops over its steps."""

    def __init__(self, made: dict[str, Any], batch: TensorDict, reference: Plain):
        self.made, self.reference = made, reference
        n_agents = made["n_agents"] or 1
        steps = batch.batch_size.numel()

        def rows(key: Any, width: int | None = None) -> list[Any]:
            value = batch[key].double() if batch[key].is_floating_point() else batch[key]
            size = (steps, n_agents) if width is None else (steps, n_agents, width)
            return value.reshape(size).tolist()

        # Observations are read in the reference's dtype.
        own = batch[nested(made, "observation")].to(reference.dtype).double()
        observations = own.reshape(steps, n_agents, N_OBS).tolist()
        actions, log_probs = (rows(nested(made, n)) for n in ("action", "action_log_prob"))
        logits = rows(nested(made, "logits"), N_ACTIONS)
        mask = batch.get(("collector", "mask"), None)
        self.mask = [True] * steps if mask is None else mask.flatten().tolist()
        self.recorded_eps = eps(torch.float32)
        self.kl, self.measured, self.slack = [], [], []
        for i in range(steps):
            values = [
                self._step(observations[i][a], logits[i][a], actions[i][a], log_probs[i][a])
                if self.mask[i]
                else (0.0, 0.0, 0.0)
                for a in range(n_agents)
            ]
            if made["sum_agents"]:
                values = [tuple(map(math.fsum, zip(*values, strict=True)))]  # type: ignore[list-item]
            self.kl.append([v[0] for v in values])
            self.measured.append([v[1] for v in values])
            self.slack.append([v[2] for v in values])

    def _step(
        self, observation: list[float], logits: list[float], action: int, log_prob: float
    ) -> tuple[float, float, float]:
        log_probs, slack = self.reference.log_probs(observation)
        lr = log_prob - log_probs[action]
        slack += 2 * self.recorded_eps * (abs(log_prob) + abs(log_probs[action]) + 1)
        kind = self.made["estimator"]
        value = estimate(kind, lr, log_softmax(logits), log_probs)
        # The slope of each estimate in the log-ratio; of the exact one in all of them.
        if kind == "k2":
            slack *= 1 + abs(lr) + slack
        elif kind == "k3":
            slack *= 2 + math.exp(-lr + slack)
        elif kind == "exact":
            slack = 3 * slack + 8 * self.recorded_eps * (4 + max(map(abs, log_probs)))
        return lr, value, slack

    def running(
        self, batch: TensorDict
    ) -> tuple[list[list[float]], list[list[float]], list[float]]:
        """Sums up to each step and their slack; the totals of the trajectories that end."""
        n_steps, done = batch.batch_size[-1], batch["next", "done"].flatten().tolist()
        sums, slacks, totals = [], [], []
        total, slack, counted = [0.0], [0.0], False
        for i, values in enumerate(self.measured):
            if i % n_steps == 0 or done[i - 1]:
                total, slack, counted = [0.0] * len(values), [0.0] * len(values), False
            total = [a + b for a, b in zip(total, values, strict=True)]
            slack = [a + b for a, b in zip(slack, self.slack[i], strict=True)]
            counted |= self.mask[i]
            sums.append(total)
            slacks.append(slack)
            if done[i] and counted:
                totals += total
        return sums, slacks, totals
