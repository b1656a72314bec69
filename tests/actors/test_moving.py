"""The reference moves when told to: by a copy, or by an average that rounding does not stop."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.envs import SerialEnv

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_same,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    FrozenActor,
    KLConstrainedTransform,
    KLPenaltyLoss,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)

assert_equal = partial(assert_close, rtol=0, atol=0)
TAU = 0.125  # a power of two, so that what is computed here by hand is exact


def weights(module: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def normalised_actor(**kwargs) -> Any:
    """An actor with buffers: running means and variances, and an integer counter."""
    net = nn.Sequential(nn.BatchNorm1d(N_OBS), nn.Linear(N_OBS, N_ACTIONS))
    return probabilistic_actor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        **kwargs,
    )


# By a copy.


@pytest.mark.parametrize(
    "make", [ReferenceModelLogProbTransform, KLRewardTransform, KLConstrainedTransform]
)
def test_after_a_copy_the_kl_is_zero(make):
    actor = make_actor()
    policy = moved(actor)
    transform = make(actor, 0.1) if make is KLConstrainedTransform else make(actor)
    batch = play(WalkEnv((2,)), policy)
    before = transform(batch)["next"]
    transform.update_reference(policy)
    after = transform(batch)["next"]
    if make is KLRewardTransform:
        assert_same(after["reward"].detach(), batch["next", "reward"])
        assert (before["reward"] - batch["next", "reward"]).abs().max() > 0.1
    else:
        assert_same(after["ref_log_prob"], batch["action_log_prob"].detach())
        assert (before["ref_log_prob"] - after["ref_log_prob"]).abs().max() > 0.1


def test_the_loss_moves_its_own():
    actor = make_actor()
    loss, policy = KLPenaltyLoss(actor, 0.1, reference=moved(actor)), actor
    batch = play(WalkEnv((2,)), policy).detach()
    assert loss(batch)["kl"] > 1e-2
    loss.reference.update_reference(policy)
    assert loss(batch)["kl"].abs() <= 1e-6
    assert all(p.requires_grad for p in policy.parameters())


def test_a_copy_is_none_of_the_policy_and_none_of_its_gradients():
    actor = make_actor()
    policy = moved(actor)
    reference = FrozenActor(actor)
    reference.update_reference(policy)
    expected = weights(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert_equal(weights(reference), expected)
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in policy.parameters())


@pytest.mark.parametrize("tau", [1.0, TAU])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_it_keeps_its_gradients_and_its_place(tau, requires_grad):
    reference = FrozenActor(make_actor(), requires_grad=requires_grad)
    places = [p.data_ptr() for p in reference.parameters()]
    reference.update_reference(moved(make_actor()), tau)
    assert [p.data_ptr() for p in reference.parameters()] == places
    assert all(p.requires_grad == requires_grad and p.is_leaf for p in reference.parameters())


def test_the_part_in_an_env_and_its_clones_follow():
    actor = make_actor()
    policy = moved(actor)
    stack: Any = KLConstrainedTransform(actor, 0.1)
    clone = stack.clone()
    env = with_transforms(SerialEnv(2, WalkEnv), stack)
    assert play(env, policy)["next", "kl"].abs().max() > 0.1
    stack.update_reference(policy)
    assert play(env, policy)["next", "kl"].abs().max() <= 1e-6
    assert clone(play(WalkEnv((2,)), policy))["next", "kl"].abs().max() <= 1e-6


# By an average.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_average_against_its_definition(dtype):
    actor = make_actor().to(dtype)
    reference, policies = (
        FrozenActor(actor),
        [moved(make_actor(), seed=seed).double() for seed in (1, 2, 3)],
    )
    expected = [value.double() for value in weights(actor)]
    for policy in policies:
        reference.update_reference(policy.to(dtype), TAU)
        expected = [
            (1 - TAU) * old + TAU * new.double()
            for old, new in zip(expected, weights(policy), strict=True)
        ]
    eps = torch.finfo(dtype).eps
    assert_close([value.double() for value in weights(reference)], expected, rtol=0, atol=8 * eps)
    assert all(value.dtype == dtype for value in weights(reference))
    assert not list(reference.master.buffers())  # such weights need none behind them


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_is_kept_in_fp32(half):
    # A thousandth of the way, 500 times: in bfloat16 a step is less than half of the last bit.
    tau, steps = 1e-3, 500
    actor, policy = make_actor().to(half), make_actor(seed=5).to(half)
    reference, naive = FrozenActor(actor), [value.clone() for value in weights(actor)]
    for _ in range(steps):
        reference.update_reference(policy, tau)
        for old, new in zip(naive, weights(policy), strict=True):
            old.lerp_(new, tau)
    left = (1 - tau) ** steps
    for value, lost, old, new in zip(
        weights(reference), naive, weights(actor), weights(policy), strict=True
    ):
        exact = left * old.double() + (1 - left) * new.double()
        # fp32 adds one rounding per step; then there is one to half precision.
        bound = steps * torch.finfo(torch.float32).eps * 4 + torch.finfo(half).eps * exact.abs()
        assert ((value.double() - exact).abs() <= bound).all()
        assert value.dtype == half
        if half == torch.bfloat16:
            assert ((lost.double() - exact).abs() > bound).any()  # what the fp32 behind it is for


def test_a_source_of_more_precision_is_averaged_in_it():
    # Steps below the last bit of bfloat16 in the source itself.
    reference, policy = FrozenActor(make_actor().bfloat16()), make_actor().bfloat16().float()
    with torch.no_grad():
        policy[0].module.weight.add_(1e-4)
    reference.update_reference(policy, 0.5)
    (weight, _) = reference.master.buffers()
    expected = make_actor().bfloat16().float()[0].module.weight + 0.5e-4
    assert_close(weight, expected.detach(), rtol=0, atol=2 * torch.finfo(torch.float32).eps)


def test_equal_weights_stay_equal_to_the_bit_infinite_ones_too():
    actor = make_actor()
    with torch.no_grad():
        actor[0].module.bias[0] = -torch.inf
    reference = FrozenActor(actor)
    for _ in range(5):
        reference.update_reference(actor, 0.3)
    assert_equal(weights(reference), weights(actor))


@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_buffers_are_copied(tau):
    reference, policy = FrozenActor(normalised_actor()), normalised_actor()
    policy.train()
    for _ in range(3):
        policy(play(WalkEnv((2,))).reshape(-1).select("observation"))
    assert policy[0].module[0].num_batches_tracked == 3
    reference.update_reference(policy, tau)
    for name, value in policy.named_buffers():
        assert_equal(reference.actor.get_buffer(name), value)
    assert not reference.actor.training


def test_a_copy_forgets_the_average():
    reference, policy = FrozenActor(make_actor().bfloat16()), moved(make_actor()).bfloat16()
    reference.update_reference(policy, 0.5)
    assert len(list(reference.master.buffers())) == 2
    reference.update_reference(policy)
    assert not list(reference.master.buffers())
    assert_equal(weights(reference), weights(policy))


# Casts and saved states.


def averaged(half: torch.dtype = torch.bfloat16, steps: int = 3) -> tuple[FrozenActor, Any]:
    """A reference in half precision after some steps, and the policy that it follows."""
    reference, policy = FrozenActor(make_actor().to(half)), moved(make_actor()).to(half)
    for _ in range(steps):
        reference.update_reference(policy, 1e-3)
    return reference, policy


def test_casts_leave_the_fp32_weights_alone():
    reference, policy = averaged()
    before = [value.clone() for value in reference.master.buffers()]
    reference.to(torch.bfloat16)
    assert_equal(list(reference.master.buffers()), before)
    assert all(value.dtype == torch.float32 for value in before)
    reference.to(torch.float32)  # from now on the weights are their own
    reference.update_reference(policy.float(), 1e-3)
    assert not list(reference.master.buffers())
    assert all(value.device.type == "meta" for value in averaged()[0].to("meta").master.buffers())


def test_weights_that_were_set_otherwise_begin_anew():
    reference, policy = averaged()
    reference.actor.load_state_dict(make_actor(seed=9).bfloat16().state_dict())
    start = weights(reference)
    reference.update_reference(policy, TAU)
    for master, old, new in zip(reference.master.buffers(), start, weights(policy), strict=True):
        expected = (1 - TAU) * old.double() + TAU * new.double()
        assert_close(master.double(), expected, rtol=0, atol=1e-6)


def test_a_saved_average_goes_on_where_it_was():
    one, policy = averaged()
    stack = KLConstrainedTransform(make_actor().bfloat16(), 0.1, reference=one)
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    other: Any = KLConstrainedTransform(make_actor(seed=4).bfloat16(), 0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    for reference in (one, other.reference):
        reference.update_reference(policy, 1e-3)
    assert_equal(list(other.reference.master.buffers()), list(one.master.buffers()))
    assert_equal(weights(other), weights(one))
    assert len(list(one.master.buffers())) == 2


def test_a_saved_state_without_an_average_ends_one():
    reference, policy = averaged()
    fresh = FrozenActor(make_actor(seed=4).bfloat16())
    reference.load_state_dict(fresh.state_dict())
    assert not list(reference.master.buffers())
    for one in (reference, fresh):
        one.update_reference(policy, 0.25)
    assert_equal(list(reference.master.buffers()), list(fresh.master.buffers()))


def test_a_copied_average_goes_its_own_way():
    reference, policy = averaged()
    copied = copy.deepcopy(reference)
    reference.update_reference(policy, 0.5)
    with pytest.raises(AssertionError):
        assert_close(list(copied.master.buffers()), list(reference.master.buffers()))
    copied.update_reference(policy, 0.5)
    assert_equal(list(copied.master.buffers()), list(reference.master.buffers()))


# In training.


@pytest.mark.parametrize("place", ["env", "postproc"])
def test_in_the_middle_of_collecting(place):
    actor = make_actor()
    policy = moved(actor)
    stack: Any = KLConstrainedTransform(actor, 0.1)
    env: Any = SerialEnv(2, WalkEnv)
    torch.manual_seed(0)
    collector = Collector(
        with_transforms(env, stack) if place == "env" else env,
        policy,
        frames_per_batch=24,
        total_frames=96,
        postproc=None if place == "env" else stack,
        auto_register_policy_transforms=False,
    )
    before, kls = FrozenActor(actor), []
    for index, batch in enumerate(collector):
        kls.append(batch["next", "kl"].abs().max().item())
        expected = before.step(batch).log_prob  # the one that was valid in this batch
        assert_same(batch["next", "ref_log_prob"], expected)
        assert_same(
            batch["next", "reward"], without_kl(batch)["next", "reward"] - 0.1 * batch["next", "kl"]
        )
        stack.update_reference(policy, (TAU, 1.0, TAU, TAU)[index])
        before = copy.deepcopy(stack.reference)
    collector.shutdown()
    assert min(kls[:2]) > 0.1
    assert max(kls[2:]) <= 1e-6


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_memory_is_carried_on_by_the_new_weights(kind):
    # In the env and on batches alike: the state of the old weights, read by the new ones.
    actor = make_actor(kind)
    inside: Any = KLConstrainedTransform(actor, 0.1)
    outside: Any = KLConstrainedTransform(actor, 0.1)
    policy = moved(actor)
    env = with_transforms(SerialEnv(2, lambda: WalkEnv(longest=9)), *memory_of(actor), inside)
    torch.manual_seed(0)
    collector = Collector(
        env, policy, frames_per_batch=12, total_frames=48, auto_register_policy_transforms=False
    )
    carried = False
    for batch in collector:
        carried |= bool((~batch["is_init"][:, 0]).any())
        after = outside(without_kl(batch))
        assert_same(after["next", "ref_log_prob"], batch["next", "ref_log_prob"])
        for stack in (inside, outside):
            stack.update_reference(policy, 0.5)
    collector.shutdown()
    assert carried


def test_what_was_recorded_stays():
    actor = make_actor()
    transform = ReferenceModelLogProbTransform(actor)
    batch = play(with_transforms(WalkEnv((2,)), transform), moved(actor))
    before = batch["next", "ref_log_prob"].clone()
    transform.update_reference(moved(actor))
    assert_equal(batch["next", "ref_log_prob"], before)


# What is refused leaves the reference as it was.


@pytest.mark.parametrize("tau", [0, 0.0, -0.1, 1.5, float("nan"), True, "1"])
def test_a_share_that_cannot_be(tau):
    reference = FrozenActor(make_actor())
    with pytest.raises(ValueError, match=r"`tau` must be in \(0, 1\], got "):
        reference.update_reference(moved(make_actor()), tau)


def other_policies() -> dict[str, tuple[Any, type[Exception], str]]:
    wide = probabilistic_actor(
        TensorDictModule(nn.Linear(N_OBS + 1, N_ACTIONS), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
    )
    diverged = moved(make_actor())
    with torch.no_grad():
        diverged[0].module.bias[1] = torch.nan
    return {
        "state": (
            moved(make_actor()).state_dict(),
            TypeError,
            r"`source` must be a module, got OrderedDict: pass the",
        ),
        "wrapped": (
            nn.Sequential(make_actor()),
            ValueError,
            r"lacks \['module.*has \['0\.module.*what wraps it",
        ),
        "wide": (wide, ValueError, r"got \(4, 4\) for 'module.*weight', which has \(4, 3\) there"),
        "diverged": (
            diverged,
            ValueError,
            r"`source` has NaN in 'module.*bias': the policy has diverged",
        ),
    }


@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("name", ["state", "wrapped", "wide", "diverged"])
def test_a_source_that_cannot_be(name, tau):
    source, error, message = other_policies()[name]
    reference = FrozenActor(make_actor())
    with pytest.raises(error, match=message):
        reference.update_reference(source, tau)
    assert_equal(weights(reference), weights(make_actor()))
