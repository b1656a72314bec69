"""The recurrent state of a frozen reference: under separate keys, carried across batches."""

import copy
from typing import Any

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs import SerialEnv
from torchrl.modules import set_recurrent_mode

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
    without_kl,
)
from torchrl_kl import (
    FrozenActor,
    KLConstrainedTransform,
    KLKeys,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)

recurrent = pytest.mark.parametrize("kind", ["lstm", "gru"])


def ref_log_prob(transform, batch) -> torch.Tensor:
    return transform(batch)["next", "ref_log_prob"]


def step_by_step(actor, batch) -> torch.Tensor:
    """log pi(a|s) of a batch (B, T), step by step, from a zero state where a trajectory begins."""
    rows = []
    for row in batch.unbind(0):
        state: dict[str, torch.Tensor] = {}
        log_probs = []
        for step in row.unbind(0):
            if step["is_init"]:
                state = {
                    key: torch.zeros_like(step[key]) for key in ("h", "c") if key in step.keys()
                }
            td = step.select("observation", "is_init", "action").update(state)
            log_probs.append(actor.log_prob(td))
            state = {key: td["next", key] for key in state}
        rows.append(torch.stack(log_probs))
    return torch.stack(rows).detach()


@recurrent
def test_identical_weights_give_no_kl_across_resets(kind):
    actor = make_actor(kind)
    env = with_transforms(
        SerialEnv(2, WalkEnv), *memory_of(actor), KLConstrainedTransform(actor, 0.1)
    )
    for batch in collect(env, copy.deepcopy(actor), frames=24, batches=3):
        assert batch["is_init"][:, 1:].any()
        assert batch["next", "kl"].abs().max() <= 1e-6


@recurrent
def test_the_state_in_the_env_is_its_own(kind):
    actor = make_actor(kind)
    policy = moved(actor)
    env = with_transforms(
        SerialEnv(2, WalkEnv), *memory_of(actor), ReferenceModelLogProbTransform(actor)
    )
    batch: Any = torch.cat(collect(env, policy, frames=24, batches=2), 1)
    assert (batch["next", "h"] - batch["next", "ref_h"]).abs().max() > 1e-2
    assert (batch["ref_h"][batch["is_init"].squeeze(-1)] == 0).all()
    assert_same(batch["next", "ref_log_prob"], step_by_step(actor, batch))


@recurrent
def test_batches_carried_on_from_the_last_call_equal_the_env(kind):
    actor = make_actor(kind)
    stack = KLConstrainedTransform(actor, 0.1)
    env = with_transforms(SerialEnv(2, lambda: WalkEnv(longest=9)), *memory_of(actor), stack)
    outside = KLConstrainedTransform(actor, 0.1)
    carried = False
    batches = collect(env, moved(actor), frames=12, batches=5)
    for batch in batches:
        carried |= bool((~batch["is_init"][:, 0]).any())
        after, inside = outside(without_kl(batch)), batch
        for name in ("ref_log_prob", "kl", "episode_kl", "reward"):
            assert_same(after["next", name], inside["next", name])
    assert carried
    whole: Any = torch.cat(batches, 1)
    assert_same(whole["next", "ref_log_prob"], step_by_step(actor, whole))


@recurrent
def test_rows_that_are_padded_are_carried_on_too(kind):
    """Each row is one trajectory: one that a batch leaves open has padding behind it."""
    actor = make_actor(kind)
    env = with_transforms(
        SerialEnv(2, lambda: WalkEnv(longest=9)),
        *memory_of(actor),
        KLConstrainedTransform(actor, 0.1),
    )
    outside = KLConstrainedTransform(actor, 0.1, time_dim=-1)
    carried = False
    for batch in collect(env, moved(actor), frames=12, batches=5):
        rows = split_trajectories(without_kl(batch), prefix="collector")
        mask = rows["collector", "mask"]
        carried |= bool((mask[:, 0] & ~mask[:, -1] & ~rows["is_init"][:, 0, 0]).any())
        after, inside = outside(rows), split_trajectories(batch, prefix="collector")
        for name in ("ref_log_prob", "kl", "episode_kl", "reward"):
            assert_same(after["next", name][mask], inside["next", name][mask])
    assert carried


@recurrent
def test_a_mask_with_holes_does_not_hide_where_rows_end(kind):
    actor = make_actor(kind)
    env = with_transforms(
        WalkEnv((2,), longest=9), *memory_of(actor), KLConstrainedTransform(actor, 0.1)
    )
    outside = KLConstrainedTransform(actor, 0.1)
    for batch in collect(env, moved(actor), frames=12, batches=5):
        rows, counted = without_kl(batch), torch.arange(6).expand(2, 6) != 2
        rows["collector", "mask"] = counted
        after = outside(rows)["next", "ref_log_prob"]
        assert_same(after[counted], batch["next", "ref_log_prob"][counted])


@recurrent
@pytest.mark.parametrize("evaluated_by", ["rollout", "collector"])
def test_batches_are_carried_on_past_evaluations_in_between(kind, evaluated_by):
    actor = make_actor(kind)
    env = with_transforms(SerialEnv(2, lambda: WalkEnv(longest=9)), *memory_of(actor))
    batches = collect(env, moved(actor), frames=12, batches=5)
    evaluation = play(env, moved(actor), 5).detach()
    if evaluated_by == "collector":  # its ids begin at 0 again
        evaluation = collect(env, moved(actor), frames=12, batches=1, seed=1)[0]
    alone, between = KLConstrainedTransform(actor, 0.1), KLConstrainedTransform(actor, 0.1)
    assert any((~batch["is_init"][:, 0]).any() for batch in batches)
    for batch in batches:
        between.eval()(evaluation)
        between.train()
        assert ref_log_prob(between, batch).equal(ref_log_prob(alone, batch))


@recurrent
@pytest.mark.parametrize("zero_states", [False, True])
def test_a_batch_that_was_refused_and_repaired_goes_on_with_the_same_state(kind, zero_states):
    actor = make_actor(kind)
    env = with_transforms(SerialEnv(2, lambda: WalkEnv(longest=9)), *memory_of(actor))
    batches = collect(env, moved(actor), frames=12, batches=5)
    assert (~batches[2]["is_init"][:, 0]).any()
    references = [FrozenActor(actor, zero_states=zero_states) for _ in range(2)]
    alone, again = (KLConstrainedTransform(actor, 0.1, reference=one) for one in references)
    for number, batch in enumerate(batches):
        if number == 2:
            broken = batch.clone()
            broken["next", "reward"][0, 0] = torch.nan
            with pytest.raises(ValueError, match="'reward'"):
                again(broken)
            again.eval()(play(env, moved(actor), 5).detach())  # an evaluation in between
            again.train()
        assert ref_log_prob(again, batch).equal(ref_log_prob(alone, batch))


@recurrent
def test_a_refused_mark_forgets_no_state(kind):
    actor = make_actor(kind)
    env = with_transforms(WalkEnv((2,), longest=20), *memory_of(actor))
    transform = ReferenceModelLogProbTransform(actor)
    first, second = (b.clone() for b in collect(env, moved(actor), frames=6, batches=2))
    assert not second["is_init"][:, 0].any()
    transform(first)
    log_prob = ref_log_prob(transform, second.clone())
    marked = second.clone()
    marked["is_init"].fill_(True)
    with pytest.raises(RuntimeError, match="SliceSampler"):
        transform(marked)
    assert ref_log_prob(transform, second).equal(log_prob)


@recurrent
@pytest.mark.parametrize("zero_states", [False, True])
def test_a_batch_that_begins_inside_a_trajectory(kind, zero_states):
    actor = make_actor(kind)
    env = with_transforms(
        WalkEnv((2,), longest=9), *memory_of(actor), ReferenceModelLogProbTransform(actor)
    )
    batch = next(
        b for b in collect(env, moved(actor), frames=24, batches=4) if not b["is_init"][:, 0].all()
    )
    transform = ReferenceModelLogProbTransform(actor, zero_states=zero_states)
    if not zero_states:
        with pytest.raises(
            RuntimeError, match="begins inside a trajectory .* into the env.*zero_states=True"
        ):
            transform(without_kl(batch))
    else:
        error = ref_log_prob(transform, without_kl(batch)) - batch["next", "ref_log_prob"]
        inside = ~batch["is_init"].squeeze(-1).cumsum(-1).bool()  # the steps before the first reset
        assert error[inside].abs().max() > 1e-3  # what a zero state costs
        assert (~inside).any()
        assert error[~inside].abs().max() <= 1e-5


def test_fake_data_needs_no_state():
    actor = make_actor("lstm")
    env = with_transforms(WalkEnv((2,)), *memory_of(actor))
    collector = Collector(
        env, moved(actor), frames_per_batch=8, total_frames=8, auto_register_policy_transforms=False
    )
    fake = collector.fake_tensordict()
    collector.shutdown()
    assert not fake["is_init"].any()
    assert ref_log_prob(ReferenceModelLogProbTransform(actor), fake).shape == (2, 4)


@recurrent
def test_a_flat_batch_without_its_state_is_refused(kind):
    actor = make_actor(kind)
    batch = play(with_transforms(WalkEnv((2,)), *memory_of(actor)), moved(actor)).reshape(-1)
    with pytest.raises(
        RuntimeError,
        match=r"recurrent and its state \['ref_h'.*into the env.*last dimension is time",
    ):
        ReferenceModelLogProbTransform(actor)(batch)


@recurrent
@pytest.mark.parametrize("recurrent_mode", [False, True])
def test_a_flat_shuffled_batch_is_scored_by_the_state_that_it_carries(kind, recurrent_mode):
    actor = make_actor(kind)
    env = with_transforms(WalkEnv((2,)), *memory_of(actor), ReferenceModelLogProbTransform(actor))
    batch = play(env, moved(actor), 20).reshape(-1)
    batch = batch[torch.randperm(len(batch))]
    with set_recurrent_mode(recurrent_mode):  # as inside a loss
        after = ref_log_prob(
            ReferenceModelLogProbTransform(actor), batch.exclude(("next", "ref_log_prob"))
        )
    assert_same(after, batch["next", "ref_log_prob"])


def test_a_shuffled_batch_that_kept_its_name_is_not_taken_for_a_trajectory():
    # Indexing keeps the names of dimensions: a shuffled batch still calls its rows "time".
    actor = make_actor("lstm")
    env = with_transforms(WalkEnv(()), *memory_of(actor), ReferenceModelLogProbTransform(actor))
    batch = play(env, moved(actor), 20)
    batch = batch[torch.randperm(len(batch))]
    assert batch.names == ["time"]
    assert_same(
        ref_log_prob(ReferenceModelLogProbTransform(actor), batch), batch["next", "ref_log_prob"]
    )


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("named", [False, True])
def test_a_slice_that_calls_itself_a_beginning_keeps_the_state_that_it_carries(kind, named):
    # A SliceSampler sets "is_init" wherever a slice begins.
    actor = make_actor(kind)
    env = with_transforms(
        WalkEnv((), longest=40), *memory_of(actor), ReferenceModelLogProbTransform(actor)
    )
    batch = play(env, moved(actor), 20)[7:]
    sliced = batch.clone()
    sliced["is_init"][0] = True
    assert not batch["is_init"][0].any()
    sliced.names = ["time" if named else None]
    assert_same(
        ref_log_prob(ReferenceModelLogProbTransform(actor), sliced), batch["next", "ref_log_prob"]
    )
    frozen: Any = FrozenActor(actor)
    logits = frozen.get_dist(sliced, timed=named).logits
    assert_close(logits, frozen.get_dist(batch, timed=named).logits, rtol=0, atol=0)


def test_the_last_call_is_carried_on_only_by_the_step_that_follows():
    # Two overlapping slices of one trajectory: the second does not begin where the first ended.
    actor = make_actor("lstm")
    env = with_transforms(
        WalkEnv((), longest=40), *memory_of(actor), ReferenceModelLogProbTransform(actor)
    )
    batch = collect(env, moved(actor), frames=9, batches=1, seed=3)[0]
    assert (batch["collector", "traj_ids"] == 0).all()
    transform = ReferenceModelLogProbTransform(actor)
    transform(without_kl(batch[:6]))
    with pytest.raises(RuntimeError, match="begins inside a trajectory and the state"):
        transform(without_kl(batch[3:9]))
    # The step that does follow is carried on.
    transform(without_kl(batch[:6]))
    assert_same(ref_log_prob(transform, without_kl(batch[6:])), batch["next", "ref_log_prob"][6:])


def test_a_nested_observation_tells_too_which_step_follows():
    actor, key = make_actor("lstm"), ("sensors", "observation")
    env = with_transforms(WalkEnv((), longest=40), *memory_of(actor))
    batch = collect(env, moved(actor), frames=9, batches=1, seed=3)[0]
    for step in (batch, batch["next"]):
        step[key] = step.pop("observation")
    reads = TensorDictModule(nn.Identity(), in_keys=[key], out_keys=["observation"])
    modules: list[Any] = [reads, *actor]
    nested = ProbabilisticTensorDictSequential(*modules)
    whole = ref_log_prob(ReferenceModelLogProbTransform(nested), batch.clone())
    transform = ReferenceModelLogProbTransform(nested)
    transform(batch[:6].clone())
    with pytest.raises(RuntimeError, match="begins inside a trajectory and the state"):
        transform(batch[3:9].clone())
    transform(batch[:6].clone())
    assert_same(ref_log_prob(transform, batch[6:].clone()), whole[6:])


@recurrent
@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("keys", [KLKeys.named("second"), KLKeys(ref_log_prob="other")])
def test_two_recurrent_references_do_not_share_a_state(kind, place, keys):
    one, two = make_actor(kind), make_actor(kind, seed=5)
    second = ReferenceModelLogProbTransform(two, keys=keys)
    inside = [ReferenceModelLogProbTransform(one), *([second] if place == "env" else [])]
    env = with_transforms(SerialEnv(2, WalkEnv), *memory_of(one), *inside)
    batch = play(env, moved(one))
    batch = batch if place == "env" else second(batch)
    assert_same(batch["next", "ref_log_prob"], step_by_step(one, batch))
    written = keys.resolve().ref_log_prob
    assert_same(batch["next", written], step_by_step(two, batch))
    states = {"second_ref_h", "other_h"} & {str(key) for key in batch.keys()}
    assert len(states) == (place == "env")


def test_a_reference_that_two_stacks_use_has_one_state():
    actor = make_actor("lstm")
    frozen = FrozenActor(actor)
    first = ReferenceModelLogProbTransform(actor, reference=frozen)
    second = ReferenceModelLogProbTransform(actor, reference=frozen, keys=KLKeys.named("second"))
    batch = play(with_transforms(WalkEnv((2,)), *memory_of(actor), first), moved(actor))
    batch = batch.reshape(-1)  # where only the recorded state tells what was before
    assert_same(second(batch)["next", "second_ref_log_prob"], batch["next", "ref_log_prob"])
    both = (first.clone(), second)
    with pytest.raises(
        RuntimeError, match=r"\['ref_h', 'ref_c'\].* a recurrent reference of its own"
    ):
        with_transforms(WalkEnv((2,)), *memory_of(actor), *both).reset()


@recurrent
def test_a_mark_inside_a_trajectory_is_not_taken_for_its_beginning(kind):
    # A SliceSampler sets "is_init" wherever a slice begins.
    actor = make_actor(kind)
    env = with_transforms(WalkEnv((2,), longest=9), *memory_of(actor))
    batch = play(env, moved(actor), 20)
    whole = ref_log_prob(ReferenceModelLogProbTransform(actor), batch)
    for start in (0, 3):  # of the rows, or inside of them
        sliced = batch[:, 7 - start :].clone()
        sliced["is_init"][:, start] = True
        assert not batch["is_init"][:, 7].any()
        refused = pytest.raises(RuntimeError, match="SliceSampler .*`init_key=None`.* is unknown")
        with refused:
            ReferenceModelLogProbTransform(actor)(sliced)
        frozen: Any = FrozenActor(actor)
        with refused:
            frozen.get_dist(sliced, timed=True)
        ReferenceModelLogProbTransform(actor, zero_states=True)(sliced)
    padded = batch.clone()
    padded["is_init"][:, 7] = True
    padded["collector", "mask"] = (torch.arange(20) < 7).expand(2, 20)
    after = ref_log_prob(ReferenceModelLogProbTransform(actor), padded)
    assert_same(after[:, :7], whole[:, :7])


@recurrent
def test_where_observations_repeat_the_state_of_the_policy_tells_collectors_apart(kind):
    class Corridor(WalkEnv):
        """Looks the same everywhere but where it begins."""

        def _step(self, tensordict):
            out = super()._step(tensordict)
            out["observation"] = torch.ones_like(out["observation"])
            return out

    actor, policy = make_actor(kind), moved(make_actor(kind))
    frozen = FrozenActor(actor)
    stacks = [KLConstrainedTransform(actor, 0.1, reference=frozen) for _ in range(2)]
    env = with_transforms(Corridor((), longest=40), *memory_of(actor))
    streams = [collect(env, policy, frames=5, batches=2, seed=seed) for seed in (3, 4)]
    for number in range(2):
        for stack, stream in zip(stacks, streams, strict=True):
            assert (stream[number]["collector", "traj_ids"] == 0).all()
            after = ref_log_prob(stack, stream[number])
            whole: Any = torch.cat(stream).unsqueeze(0)
            expected = step_by_step(actor, whole)[0].unflatten(0, (2, 5))[number]
            assert_same(after, expected)


def test_gradients_of_one_batch_do_not_run_into_the_next():
    actor = make_actor("lstm")
    env = with_transforms(WalkEnv((2,), longest=9), *memory_of(actor))
    transform = KLRewardTransform(actor, requires_grad=True)
    batches = collect(env, moved(actor), frames=6, batches=3)
    assert not all(batch["is_init"][:, 0].all() for batch in batches)
    for batch in batches:
        transform(batch)["next", "reward"].sum().backward()


def test_a_recurrent_actor_needs_a_primer():
    class Memory(nn.Module):
        def forward(self, observation, h):
            return observation + h, h + 1

    net = sequence(
        TensorDictModule(Memory(), ["observation", "h"], ["features", ("next", "h")]),
        TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["features"], ["logits"]),
    )
    actor = probabilistic_actor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    with pytest.raises(ValueError, match=r"state \['h'\] but no `make_tensordict_primer`"):
        with_transforms(WalkEnv((2,)), ReferenceModelLogProbTransform(actor)).reset()
