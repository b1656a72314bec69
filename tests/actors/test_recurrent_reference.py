"""The state of a recurrent reference: its own, recorded step by step or begun with each row."""

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.modules import set_recurrent_mode

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sequence,
    with_transforms,
)
from torchrl_kl import FrozenActor, KLConstrainedTransform
from torchrl_kl.actors.log_probs import policy_log_prob

# float32: 8 terms a dot product, four gates, at most 20 steps in a row.
CLOSE = {"rtol": 0, "atol": 256 * torch.finfo(torch.float32).eps}


every_kind = pytest.mark.parametrize("kind", ["lstm", "gru"])


def walk(kind: str, policy: Any = None, steps: int = 10) -> tuple[Any, Any]:
    """An actor, and a batch (2, T) of a policy that has, if not given, other weights."""
    actor = make_actor(kind)
    env = with_transforms(WalkEnv((2,), longest=6), *memory_of(actor))
    batch = play(env, policy or moved(actor), steps).detach()
    assert batch["is_init"][:, 1:].any(1).all()
    return actor, batch


def in_steps(reference: FrozenActor, batch: Any) -> tuple[torch.Tensor, Any]:
    """log pi(a|s) of a batch (2, T), step by step, and the batch with the states that it had."""
    log_probs, steps = [], []
    states: dict[Any, Any] = {}
    for step in batch.clone().unbind(1):
        for key, spec in reference.state_specs().items():
            zero: Any = spec.expand(torch.Size((2, *spec.shape))).zero()
            begins = step["is_init"].view(2, *(1,) * (zero.ndim - 1))
            step[key] = torch.where(begins, zero, states.get(key, zero))
        score = reference.score(step, timed=False)
        states = dict(zip(reference.own_state_keys, score.states, strict=True))
        log_probs.append(score.log_prob)
        steps.append(step)
    recorded: Any = torch.stack(steps, 1)
    recorded.names = [None, "time"]
    return torch.stack(log_probs, 1), recorded


@every_kind
def test_one_pass_equals_step_by_step(kind):
    actor, batch = walk(kind)
    reference = FrozenActor(actor)
    before = batch.clone()
    once, dist = reference.score(batch, timed=True).log_prob, reference.get_dist(batch, timed=True)
    assert_close(batch, before, rtol=0, atol=0)
    expected, recorded = in_steps(reference, batch)
    assert_close(once, expected, **CLOSE)
    assert_close(dist.log_prob(batch["action"]), expected, **CLOSE)
    assert (expected - batch["action_log_prob"]).abs().max() > 1e-2
    # Recorded states are exact in any order, even where the name "time" was kept.
    order = torch.randperm(10)
    with torch.no_grad(), set_recurrent_mode(True):  # as inside a loss
        flat = reference.score(recorded.reshape(-1), timed=False).log_prob
        shuffled = reference.score(recorded[:, order], timed=True).log_prob
        dist = reference.get_dist(recorded[:, order], timed=True)
    assert_close(flat.view(2, -1), expected, **CLOSE)
    assert_close(shuffled, expected[:, order], **CLOSE)
    assert_close(dist.log_prob(recorded["action"][:, order]), expected[:, order], **CLOSE)


@every_kind
def test_identical_weights_give_no_kl_across_resets(kind):
    actor = make_actor(kind)
    _, batch = walk(kind, policy=actor)
    for log_prob in (
        FrozenActor(actor).score(batch, timed=True).log_prob,
        policy_log_prob(actor, batch, True)[0],
        policy_log_prob(actor, batch.reshape(-1), False)[0].view(2, -1),
    ):
        assert_close(log_prob, batch["action_log_prob"], **CLOSE)
    env = with_transforms(WalkEnv((2,)), *memory_of(actor), KLConstrainedTransform(actor, 0.1))
    assert play(env, actor)["next", "kl"].abs().max() <= CLOSE["atol"]


@every_kind
def test_a_mark_inside_a_trajectory_is_not_its_beginning(kind):
    """A SliceSampler sets `is_init` wherever a slice begins."""
    actor, batch = walk(kind)
    reference = FrozenActor(actor)
    expected, recorded = in_steps(reference, batch)
    inside = 1 + int((~batch["is_init"][:, 1:]).all(0).nonzero()[0, 0])
    for each in (batch, recorded):  # by the policy's state, and by that of the reference
        each["is_init"][:, inside] = True
        assert_close(reference.score(each, timed=True).log_prob, expected, **CLOSE)
    sliced = reference.score(recorded[:, inside:], timed=False).log_prob
    assert_close(sliced, expected[:, inside:], **CLOSE)
    for score in (reference.score, reference.get_dist):
        with pytest.raises(RuntimeError, match="begins inside a traj.*SliceSampler.*into the env"):
            score(batch[:, inside:], timed=True)


@every_kind
def test_padding_does_not_hide_where_trajectories_begin(kind):
    actor, batch = walk(kind)
    reference = FrozenActor(actor)
    expected = reference.score(batch, timed=True).log_prob
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 7:], mask[1, :3] = False, False  # behind a row; a prompt, which is read
    batch["collector", "mask"] = mask
    rows: Any = torch.cat([batch, batch.clone().zero_()])  # rows of nothing but padding
    rows["observation"][0, 8:] += 1.0
    assert_close(reference.score(rows, timed=True).log_prob[:2][mask], expected[mask], **CLOSE)
    rows["is_init"][1, :4] = False
    with pytest.raises(RuntimeError, match="begins inside a trajectory"):
        reference.score(rows, timed=True)


def test_what_a_recurrent_reference_cannot_score():
    actor, batch = walk("lstm")
    reference = FrozenActor(actor)
    with pytest.raises(
        RuntimeError, match=r"its state \['ref_h', 'ref_c'\] is not in.*into the env"
    ):
        reference.score(batch.reshape(-1), timed=False)
    with pytest.raises(RuntimeError, match="do not follow one another: 'observation'.*recurrent"):
        reference.score(batch[:, [0, 2, 1, *range(3, 10)]], timed=True)
    with pytest.raises(RuntimeError, match="begins inside a trajectory"):
        reference.score(batch.exclude("is_init"), timed=True)
    with pytest.raises(RuntimeError, match=r"forgets its state at each step. Put .*primer"):
        reference.score(batch.exclude("c"), timed=True)
    fake = batch.clone().zero_()
    assert reference.score(fake, timed=True, fake=True).log_prob.shape == (2, 10)

    class Memory(nn.Module):
        def forward(self, observation, h):
            return observation + h, h + 1

    memory = TensorDictModule(Memory(), ["observation", "h"], ["features", ("next", "h")])
    head = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["features"], ["logits"])
    other = probabilistic_actor(
        sequence(memory, head), in_keys=["logits"], distribution_class=Categorical
    )
    with pytest.raises(ValueError, match=r"state \['h'\] but no `make_tensordict_primer`"):
        FrozenActor(other).state_specs()
    with pytest.raises(ValueError, match=r"None for a recurrent actor, got 8 .*\['h', 'c'\]"):
        FrozenActor(actor, chunk_size=8)


def test_its_states_are_named_by_the_first_stack():
    reference = FrozenActor(make_actor("lstm"))
    assert reference.own_state_keys == ["ref_h", "ref_c"]
    for first, second in (("second_ref_log_prob", "ref_log_prob"), ("other", "ref_log_prob")):
        named = FrozenActor(make_actor("lstm"))
        named.name_states(first)
        named.name_states(second)
        prefix = first.removesuffix("_log_prob")
        assert named.own_state_keys == [f"{prefix}_h", f"{prefix}_c"]
        assert list(named.state_specs()) == named.own_state_keys
    assert {spec.dtype for spec in reference.double().state_specs().values()} == {torch.float64}
