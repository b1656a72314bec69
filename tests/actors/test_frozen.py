"""The frozen copy: what never reaches it, what it casts, its state, and when it moves."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.testing import assert_close

from tests.actors.kinds import act, choosing, linear, observed
from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    make_actor,
    moved,
    probabilistic_actor,
    sharp,
)
from torchrl_kl import FrozenActor

assert_equal = partial(assert_close, rtol=0, atol=0)
EPS = torch.finfo(torch.float32).eps
TAU = 0.125  # a power of two, so that what is computed here by hand is exact


def weights(module: Any) -> list[Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def score(reference: FrozenActor, batch: Any) -> Tensor:
    return reference.score(batch, timed=False).log_prob


def policy_and_batch(net: Any = None) -> tuple[Any, Any]:
    actor = choosing()
    actor[0].module = actor[0].module if net is None else net
    return sharp(actor), act(actor, observed(20).float())


# What never reaches it.


def test_it_is_a_copy_in_eval_mode_without_gradients():
    net = nn.Sequential(nn.Linear(N_OBS, 64), nn.Dropout(0.5), nn.Linear(64, N_ACTIONS))
    actor, batch = policy_and_batch(net)
    reference = FrozenActor(actor)
    assert not any(part.training for part in reference.actor.modules())
    assert not any(part.training for part in reference.train().modules())
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert actor.training
    expected = score(reference, batch)
    loss = actor(batch.clone())["action_log_prob"].sum()
    loss.backward()
    reference.requires_grad_(True)  # even so
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(-3.0)
    assert_equal(score(reference, batch), expected)
    assert not expected.requires_grad
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert all(p.requires_grad and p.grad is not None for p in actor.parameters())


# What it casts.


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_reference_of_another_dtype_reads_the_data_of_the_policy(dtype):
    actor, batch = policy_and_batch()
    given = FrozenActor(copy.deepcopy(actor).to(dtype))
    given.read_for(actor)
    for reference in (FrozenActor(actor).to(dtype), given):
        log_prob = score(reference, batch)
        assert log_prob.dtype == reference.dtype == torch.promote_types(dtype, torch.float32)
        tolerance = 100 * torch.finfo(dtype).eps + 100 * EPS
        assert_close(log_prob.float(), batch["action_log_prob"], rtol=0, atol=tolerance)
    assert batch["observation"].dtype == torch.float32


class Relative(nn.Linear):
    """Reads numbers far from 0 in float64, by weights in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input - 1e6).float())


def test_with_the_dtype_of_the_policy_it_reads_what_the_policy_reads():
    actor = sharp(choosing())
    actor[0].module = Relative(N_OBS, N_ACTIONS)
    data = observed(20)
    batch = act(actor, data.set("observation", data["observation"] + 1e6))
    assert_equal(score(FrozenActor(actor), batch), batch["action_log_prob"])


# Its state.


def test_its_state_and_its_version():
    actor, batch = policy_and_batch()
    reference, other = FrozenActor(actor), FrozenActor(moved(actor))
    saved = reference.state_dict()
    assert [key.removeprefix("actor.") for key in saved] == list(actor.state_dict())
    stack = nn.Sequential(other)
    assert other.version == 0
    stack.load_state_dict({f"0.{key}": value for key, value in saved.items()})
    assert other.version == 1
    assert_equal(score(other, batch), score(reference, batch))
    other.update_reference(moved(actor), 0.5)
    with pytest.raises(ValueError, match="tau"):
        other.update_reference(moved(actor), 2.0)
    assert (other.version, copy.deepcopy(other).version, reference.version) == (2, 2, 0)
    assert all(p.device.type == "meta" for p in reference.to("meta").parameters())


# When it moves.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_average_against_its_definition(dtype):
    actor = make_actor().to(dtype)
    reference = FrozenActor(actor)
    expected, places = weights(actor), [p.data_ptr() for p in reference.parameters()]
    for seed, tau in ((1, TAU), (2, 1.0), (3, TAU)):
        policy = moved(make_actor(), seed=seed).to(dtype)
        reference.update_reference(policy, tau)
        pairs = zip(expected, weights(policy), strict=True)
        expected = [(1 - tau) * old.double() + tau * new.double() for old, new in pairs]
        eps = torch.finfo(dtype).eps
        assert_close([w.double() for w in weights(reference)], expected, rtol=0, atol=8 * eps)
        assert all(p.requires_grad for p in policy.parameters())
    assert all(value.dtype == dtype for value in weights(reference))
    assert not list(reference.master.buffers())  # such weights need none behind them
    assert [p.data_ptr() for p in reference.parameters()] == places


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_is_in_fp32(half):
    # A thousandth of the way, 200 times: in bfloat16 a step is less than half of the last bit.
    tau, steps = 1e-3, 200
    actor, policy = make_actor().to(half), make_actor(seed=5).to(half).float()
    with torch.no_grad():  # steps below the last bit of half precision, in the source, too
        policy[0].module.weight.add_(1e-4)
    reference = FrozenActor(actor)
    for _ in range(steps):
        reference.update_reference(policy, tau)
    left, masters = (1 - tau) ** steps, list(reference.master.buffers())
    given = zip(weights(reference), masters, weights(actor), weights(policy), strict=True)
    for value, master, old, new in given:
        exact = left * old.double() + (1 - left) * new.double()
        # fp32 adds one rounding per step; then there is one to half precision.
        bound = steps * EPS * 4 + torch.zeros_like(exact)
        assert ((master.double() - exact).abs() <= bound).all()
        bound = bound + torch.finfo(half).eps * exact.abs()
        assert ((value.double() - exact).abs() <= bound).all()
        assert (value.dtype, master.dtype) == (half, torch.float32)


def averaged() -> tuple[FrozenActor, Any]:
    """A reference in half precision after some steps, and the policy that it follows."""
    reference, policy = FrozenActor(make_actor().bfloat16()), moved(make_actor()).bfloat16()
    for _ in range(3):
        reference.update_reference(policy, 1e-3)
    assert len(list(reference.master.buffers())) == 2
    return reference, policy


def test_weights_that_were_set_otherwise_begin_anew():
    reference, policy = averaged()
    reference.actor.load_state_dict(make_actor(seed=9).bfloat16().state_dict())
    start = weights(reference)
    reference.update_reference(policy, TAU)
    for master, old, new in zip(reference.master.buffers(), start, weights(policy), strict=True):
        assert_close(master, (1 - TAU) * old.float() + TAU * new.float(), rtol=0, atol=1e-6)


def test_equal_weights_stay_equal_to_the_bit_infinite_ones_too():
    for dtype in (torch.float32, torch.bfloat16):
        actor = make_actor().to(dtype)
        with torch.no_grad():
            actor[0].module.bias[0] = -torch.inf
        reference = FrozenActor(actor)
        for _ in range(5):
            reference.update_reference(actor, 0.3)
        assert_equal(weights(reference), weights(actor))


@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_buffers_are_copied(tau):
    actor, batch = policy_and_batch(nn.Sequential(nn.BatchNorm1d(N_OBS), nn.Linear(N_OBS, 4)))
    reference = FrozenActor(actor)
    for _ in range(3):
        actor(batch.clone())
    reference.update_reference(actor, tau)
    assert actor[0].module[0].num_batches_tracked >= 3
    for name, value in actor.named_buffers():
        assert_equal(reference.actor.get_buffer(name), value)


def test_a_saved_average_goes_on_where_it_was():
    one, policy = averaged()
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other = FrozenActor(make_actor(seed=4).bfloat16())
    without_average = other.state_dict()
    other.load_state_dict(torch.load(file, weights_only=True))
    for reference in (one, other):
        reference.update_reference(policy, 1e-3)
    assert_equal(list(other.master.buffers()), list(one.master.buffers()))
    other.load_state_dict(without_average)
    assert not list(other.master.buffers())


def other_policies() -> dict[str, tuple[Any, float, type[Exception], str]]:
    wide = probabilistic_actor(linear(n=7), in_keys=["logits"], distribution_class=Categorical)
    diverged = moved(make_actor())
    with torch.no_grad():
        diverged[0].module.bias[1] = torch.nan
    policy = moved(make_actor())
    got = r"got '{}' of shape {}, where the reference has {}: pass the policy"
    rows: dict[str, tuple[Any, Any, type[Exception], str]] = {
        "state": (policy.state_dict(), 1.0, TypeError, "must be the policy, a module, got Ord"),
        "wide": (wide, 0.5, ValueError, got.format("module.*bias", r"\(7,\)", r"\(4,\)")),
        "wrapped": (nn.Sequential(policy), 1.0, ValueError, got.format("0.*", r"\(4,\)", "None")),
        "diverged": (diverged, 1.0, ValueError, "NaN in 'module.*bias': the policy has diverged"),
    }
    for tau in (0, -0.1, 1.5, float("nan")):
        rows[f"tau {tau}"] = policy, tau, ValueError, "`tau` must be .* above 0 and at most 1, got "
    for tau in (True, "1"):
        rows[f"tau {tau}"] = policy, tau, TypeError, "`tau` must be a number, got "
    return rows


@pytest.mark.parametrize("name", other_policies())
def test_what_is_refused_changes_nothing(name):
    source, tau, error, message = other_policies()[name]
    reference = FrozenActor(make_actor())
    with pytest.raises(error, match=message):
        reference.update_reference(source, tau)
    assert_equal(weights(reference), weights(make_actor()))
    assert reference.version == 0


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_number_of_rows_that_cannot_be(size):
    with pytest.raises(ValueError, match=rf"`chunk_size` must be an int of at least 1.*got {size}"):
        FrozenActor(make_actor(), chunk_size=size)
