"""Properties of the stack: a batch against plain Python, an env against a batch, a cut batch."""

import math
import random
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDict, assert_close
from torchrl.envs import InitTracker

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    make_actor,
    memory_of,
    moved,
    play,
    total,
    with_transforms,
    without_kl,
)
from tests.trust.cases import cases
from torchrl_kl import KLConstrainedTransform, KLKeys

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
    reward_dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    entries = {"observation": observation, "logits": logits, "action": action.reshape(inner)}
    entries["action_log_prob"] = log_prob.to(draw(floating))
    after = {"observation": shuffled}
    reward = real(*reward_shape, 1, dtype=reward_dtype)
    batch = TensorDict(batch_size=shape)
    flag = done.unsqueeze(-1)
    batch["next"] = TensorDict(done=flag, terminated=flag.clone(), batch_size=shape)
    if n_agents is None:
        batch.update(entries)
        batch["next"].update(after)
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


def make_stack(made: dict[str, Any], controller: SpyController, actor: Any) -> Any:
    agents = made["n_agents"] is not None and not made["sum_agents"]
    stack = KLConstrainedTransform(
        actor,
        controller,
        estimator=made["estimator"],
        update_every=1,
        sum_agents=made["sum_agents"],
        keys=KLKeys(reward=("agents", "reward") if agents else "reward"),
        time_dim=-1 if made["timed"] == "given" else None,
        chunk_size=made["chunk_size"],
    )
    stack.reference.to(made["dtype"])
    if made["frozen"]:
        stack.freeze()
    return stack.train(not made["evaluated"])


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

    def running(self, batch: TensorDict) -> tuple[list[list[float]], list[list[float]], list[float]]:
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


def near(found: torch.Tensor, expected: list[list[float]], slack: list[list[float]]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64).flatten()
    bound = torch.tensor(slack, dtype=torch.float64).flatten()
    error = (found.double().flatten() - wanted).abs()
    assert (error <= bound + 2 * eps(torch.float32) * wanted.abs()).all(), (error, bound)


@cases(320, drawn=drawn_batches())
def test_a_batch_has_the_numbers_of_plain_python(drawn):
    made, batch = drawn
    agents = made["n_agents"] is not None
    actor = make_actor(agents=agents)
    controller = SpyController(made["coeff"], per=made["per"])
    stack = make_stack(made, controller, actor)
    before = batch.clone()
    after = stack(batch)
    assert_close(batch, before, rtol=0, atol=0, equal_nan=True)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    expected = Expected(made, batch, Plain(stack.reference.actor))
    branch = () if made["sum_agents"] or not agents else ("agents",)
    step = after["next"]

    def written(name: str) -> torch.Tensor:
        return step[(*branch, name)]

    reward = before["next", *branch, "reward"]
    for name in ("kl", "task_reward", "kl_coeff", "reward"):
        assert written(name).shape == reward.shape
    near(written("kl"), expected.kl, expected.slack)  # that of k1 is the least of all
    if made["estimator"] != "k1":
        near(written("kl_estimate"), expected.measured, expected.slack)
    assert written("task_reward").equal(reward)
    coeff = torch.tensor(made["coeff"], dtype=torch.float64).to(reward.dtype)
    assert (written("kl_coeff") == coeff).all()
    check_reward(made, expected, reward, written("reward"))
    sums, slacks, totals = expected.running(batch)
    if made["timed"] != "no":
        near(written("episode_kl"), sums, slacks)
    moved = made["coeff"] >= 0 and not made["frozen"] and not made["evaluated"]
    values, slack = told(made, expected, totals, slacks)
    count, value = total(controller)
    assert count == (len(values) if moved else 0)
    assert abs(value - (math.fsum(values) if moved else 0.0)) <= slack + 1e-6 * sum(map(abs, values))


def check_reward(
    made: dict[str, Any], expected: Expected, reward: torch.Tensor, found: torch.Tensor
) -> None:
    coeff = float(torch.tensor(made["coeff"], dtype=torch.float64).to(reward.dtype))
    flat = reward.double().reshape(-1, len(expected.kl[0]) if expected.kl else 1).tolist()
    wanted, slack = [], []
    for rewards, kls, slacks in zip(flat, expected.kl, expected.slack, strict=True):
        wanted.append([r - coeff * kl for r, kl in zip(rewards, kls, strict=True)])
        slack.append(
            [
                coeff * s + 4 * eps(reward.dtype) * (abs(r) + coeff * abs(kl))
                for r, kl, s in zip(rewards, kls, slacks, strict=True)
            ]
        )
    if made["coeff"] == 0:
        assert found.equal(reward)
    near(found, wanted, slack)


def told(
    made: dict[str, Any], expected: Expected, totals: list[float], slacks: list[list[float]]
) -> tuple[list[float], float]:
    """The values that the controller is told, and how far their sum may be off."""
    if made["per"] == "trajectory":
        return totals, sum(map(sum, slacks))
    pairs = zip(expected.measured, expected.mask, strict=True)
    return [v for values, counts in pairs if counts for v in values], sum(map(sum, expected.slack))


KINDS = ["categorical", "normal", "tanh_normal", "lstm", "gru"]


@cases(
    40,
    kind=st.sampled_from(KINDS),
    batch_size=st.sampled_from([(), (1,), (3,), (2, 2)]),
    longest=st.integers(2, 6),
    truncates=st.booleans(),
    steps=st.integers(1, 9),
    estimator=st.sampled_from(["k1", "k3"]),
    seed=seeds,
)
def test_an_env_has_the_numbers_of_a_batch(
    kind, batch_size, longest, truncates, steps, estimator, seed
):
    recurrent = kind in ("lstm", "gru")
    dtype = torch.float32 if recurrent else torch.float64  # that of the primers of TorchRL
    actor = make_actor(kind, seed=seed).to(dtype)
    policy = moved(actor, seed=seed + 1)
    env_kinds: dict[str, Any] = {"discrete": kind in ("categorical", "lstm", "gru")}
    base = WalkEnv(batch_size, longest=longest, truncates=truncates, dtype=dtype, **env_kinds)
    controllers = [SpyController(0.3), SpyController(0.3)]
    stacks = [
        KLConstrainedTransform(actor, c, update_every=1, estimator=estimator) for c in controllers
    ]
    before = memory_of(actor) if recurrent else [InitTracker()]
    env = with_transforms(base, *before, stacks[0])
    inside = play(env, policy, steps, seed=seed)
    bare = without_kl(inside)
    outside = stacks[1](bare)
    bound = 2e-5 if recurrent else 1e-9
    names = ["ref_log_prob", "kl", "episode_kl", "task_reward", "kl_coeff", "reward"]
    for name in [*names, *(["kl_estimate"] if estimator == "k3" else [])]:
        found, wanted = outside["next", name], inside["next", name]
        # Rewards are float32.
        near_1 = bound if found.dtype == torch.float64 else 2e-5
        torch.testing.assert_close(found, wanted, atol=near_1, rtol=near_1)
    measured = inside["next", "kl_estimate" if estimator == "k3" else "kl"]
    # The loop over each row; in an env a truncation in the last step is known to be one.
    rows = measured.reshape(-1, steps).tolist(), inside["next", "done"].reshape(-1, steps).tolist()
    totals, open_now = [], 0.0
    for values, ends in zip(*rows, strict=True):
        open_now = 0.0
        for value, end in zip(values, ends, strict=True):
            open_now += value
            if end:
                totals.append(open_now)
                open_now = 0.0
    assert total(controllers[0])[0] == len(totals)
    assert abs(total(controllers[0])[1] - math.fsum(totals)) <= bound * (1 + sum(map(abs, totals)))
    assert total(controllers[1])[0] == len(totals)
    assert abs(total(controllers[1])[1] - math.fsum(totals)) <= bound * (1 + sum(map(abs, totals)))


@cases(
    60,
    seed=seeds,
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    rows=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
    estimator=st.sampled_from(["k1", "k3"]),
    by_row=st.booleans(),
)
def test_pieces_of_a_batch_in_time_and_rows_tell_the_same(
    seed, lengths, rows, order, estimator, by_row
):
    """Pieces in the order of time; those of one time may come in any order of rows."""
    actor = make_actor()
    n_steps = sum(lengths)
    whole = play(WalkEnv((rows,), longest=5), moved(actor), n_steps, seed=seed)
    ends = whole["next", "done"].squeeze(-1)
    # Numbered as a collector does, in the order in which they begin.
    begins = torch.cat([torch.ones(rows, 1, dtype=torch.bool), ends[:, :-1]], 1)
    number = begins.T.flatten().long().cumsum(0).reshape(n_steps, rows).T - 1
    latest = torch.where(begins, number, -1).cummax(1).values
    whole["collector", "traj_ids"] = latest
    controllers = [SpyController(0.2), SpyController(0.2)]
    stacks = [
        KLConstrainedTransform(actor, c, update_every=1, estimator=estimator) for c in controllers
    ]
    expected = stacks[0](whole)
    start = 0
    for length in lengths:
        groups = [list(range(rows))]
        if by_row:
            shuffled = order.sample(range(rows), rows)
            split = order.randint(1, rows)
            groups = [g for g in (shuffled[:split], shuffled[split:]) if g]
        for group in groups:
            piece = whole[group][:, start : start + length]
            piece.names = [None, "time"]
            after = stacks[1](piece)
            for name in ("kl", "episode_kl", "reward"):
                wanted = expected["next", name][group][:, start : start + length]
                torch.testing.assert_close(after["next", name], wanted, atol=2e-5, rtol=2e-5)
        start += length
    (n, value), (n_pieces, value_of_pieces) = map(total, controllers)
    assert n == n_pieces == int(ends.sum())
    assert abs(value - value_of_pieces) <= 2e-5 * (1 + n_steps * rows)
