"""Properties of the stack: a batch against plain Python, an env against a batch, a cut batch."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import assert_close
from torchrl.envs import InitTracker

from tests.helpers import (
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
from tests.trust.plain import Expected, Plain, drawn_batches, eps, nested, seeds
from torchrl_kl import KLConstrainedTransform, KLKeys


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


def near(found: torch.Tensor, expected: list[list[float]], slack: list[list[float]]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64).flatten()
    bound = torch.tensor(slack, dtype=torch.float64).flatten()
    error = (found.double().flatten() - wanted).abs()
    assert (error <= bound + 2 * eps(torch.float32) * wanted.abs()).all(), (error, bound)


@cases(400, drawn=drawn_batches())
def test_a_batch_has_the_numbers_of_plain_python(drawn):
    made, batch = drawn
    agents = made["n_agents"] is not None
    actor = make_actor(agents=agents).double()  # it can read the batch
    controller = SpyController(made["coeff"], per=made["per"])
    stack = make_stack(made, controller, actor)
    if made["dtype"] == torch.float64:  # that of the policy, which reads no other one
        for at in (batch, batch["next"]):
            at[nested(made, "observation")] = at[nested(made, "observation")].double()
    before = batch.clone()
    after = stack(batch)
    assert_close(batch, before, rtol=0, atol=0, equal_nan=True)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    expected = Expected(made, batch, Plain(stack.reference.actor))
    branch = () if made["sum_agents"] or not agents else ("agents",)
    step = after["next"]

    def written(name: str) -> torch.Tensor:
        return step[(*branch, name)]

    reward = before[("next", *branch, "reward")]
    reward = reward.to(torch.promote_types(reward.dtype, torch.float32))
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
    moved = not made["frozen"] and not made["evaluated"]
    values, slack = told(made, expected, totals, slacks)
    count, value = total(controller)
    assert count == (len(values) if moved else 0)
    assert abs(value - (math.fsum(values) if moved else 0.0)) <= slack + 1e-6 * sum(
        map(abs, values)
    )


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
    60,
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
