"""KLPenaltyLoss and the loss that it is around make one pass of the policy: the numbers of two."""

from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import set_composite_lp_aggregate
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.modules import ActorValueOperator, SafeModule, ValueOperator
from torchrl.modules.tensordict_module import SafeProbabilisticTensorDictSequential
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    PPOLoss,
    ReinforceLoss,
    SoftUpdate,
    hold_out_net,
)

from tests.actors.kinds import KINDS, act, actor_of, draw, observed
from tests.adapters import adapted_actor
from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    make_actor,
    memory_of,
    moved,
    play,
    sharp,
    with_transforms,
)
from torchrl_kl import KLPenaltyLoss, ReferenceModelLogProbTransform
from torchrl_kl.actors.policy import evaluating

IN_TURN = ("one draw after another", "its own log-prob")
EXACT: Any = {"rtol": 1e-10, "atol": 1e-10}


def critic(read: Any = "observation", n: int = N_OBS) -> Any:
    return ValueOperator(nn.Linear(n, 1).double(), in_keys=[read])


def batch_of(actor: Any, *shape: int) -> Any:
    """Steps (*shape, T) with what losses read."""
    torch.manual_seed(1)
    batch = act(actor, observed(*shape))
    batch.names = [*[None] * (len(shape) - 1), "time"]
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    done[..., -1, :] = True
    following = TensorDict(done=done, terminated=done, reward=0.0 * done, batch_size=shape)
    batch["next"] = following
    batch["advantage"], batch["value_target"] = torch.randn(2, *shape, 1).double()
    return batch


class Count:
    """How often a part of a policy runs."""

    def __init__(self, part: Any):
        self.n = 0
        part.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.n += 1


def one_and_two(actor: Any, loss: Any, batch: Any, part: Any, **options: Any) -> Any:
    """Losses, gradients and passes of the policy: of one loss around the other, and next to it."""
    found = []
    for inner in (loss, None):
        penalty = KLPenaltyLoss(actor, 0.5, loss=inner, **options)
        count, parameters = Count(part), [p for p in loss.parameters() if p.requires_grad]
        out = dict(penalty(batch.copy()).items())
        out |= {} if inner is not None else dict(loss(batch.copy()).items())
        losses = {key: value for key, value in out.items() if key.startswith("loss")}
        total = torch.stack([value.sum() for value in losses.values()]).sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        found.append((losses, [g for g in grads if g is not None], count.n))
        assert "get_dist" not in vars(actor)
    return found


def check(*args: Any, passes: tuple[int, int] = (1, 2), **options: Any) -> None:
    (losses, grads, n), (expected, of_two, n_two) = one_and_two(*args, **options)
    assert (n, n_two) == passes
    assert_close(losses, expected, **EXACT)
    assert_close(grads, of_two, **EXACT)
    assert any(gradient.abs().max() > 1e-3 for gradient in grads)


@pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IN_TURN])
def test_any_actor(kind, gradient):
    actor, reference = actor_of(kind), actor_of(kind, 1)
    batch, options = batch_of(actor, 4, 6), {"gradient": gradient, "reference": reference}
    loss: Any = ClipPPOLoss(actor, None, entropy_bonus=kind not in ("composite", "TanhNormal"))
    if kind == "agents":
        batch["agents", "advantage"] = batch["advantage"][..., None, :].expand(4, 6, 3, 1)
        loss.set_keys(advantage=("agents", "advantage"))
    with set_composite_lp_aggregate(False):
        check(actor, loss, batch, actor.module[0], **options)


@pytest.mark.parametrize("cls", [ClipPPOLoss, PPOLoss, A2CLoss, ReinforceLoss])
@pytest.mark.parametrize("shape", [(4, 6), (24,)])
def test_any_loss(cls, shape):
    actor = actor_of("Categorical")
    batch = batch_of(actor, 4, 6).reshape(shape)
    loss = cls(actor, critic())
    check(actor, loss, batch, actor.module[0], reference=actor_of("Categorical", 1))


@pytest.mark.parametrize("head", [True, False])
def test_a_critic_that_shares_the_trunk(head):
    """One that reads what the actor has written needs no pass of the trunk of its own."""
    trunk = SafeModule(nn.Linear(N_OBS, 8), in_keys=["observation"], out_keys=["hidden"])
    net = SafeModule(nn.Linear(8, N_ACTIONS), in_keys=["hidden"], out_keys=["logits"])
    policy = SafeProbabilisticTensorDictSequential(net, draw(Categorical, ["logits"]))
    value = ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    both: Any = sharp(ActorValueOperator(trunk, policy, value).double())
    actor = both.get_policy_operator()
    batch = batch_of(actor, 4, 6).exclude("hidden", "logits")
    read = both.get_value_head() if head else both.get_value_operator()
    loss = ClipPPOLoss(actor, read)
    passes = (1, 2) if head else (2, 3)
    check(actor, loss, batch, trunk, passes=passes, reference=moved(actor), gradient="k2")


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("timed", [True, False])
def test_memory(kind, timed):
    """Losses of TorchRL take any last dimension for time: without time, each makes its pass."""
    actor = make_actor(kind)
    batch = play(with_transforms(WalkEnv((4,)), *memory_of(actor)), actor).detach()
    batch["advantage"] = torch.randn(4, 12, 1)
    batch = batch.apply(lambda x: x.double() if x.is_floating_point() else x)
    actor.double()
    batch.names = [None, "time" if timed else None]
    options: Any = {"passes": (1, 2) if timed else (2, 2), "reference": actor_of("Categorical")}
    check(actor, ClipPPOLoss(actor, None), batch, actor.module[0], **options)


def test_an_adapter_that_is_off_in_the_reference():
    actor, layer = adapted_actor()
    batch, loss = batch_of(actor.double(), 4, 6), ClipPPOLoss(actor, None)
    check(actor, loss, batch, layer.base, reference=layer.disable_adapter, passes=(2, 3))


class Changed(ClipPPOLoss):
    """PPO that asks for a distribution of other data, or under other conditions."""

    change: Any = None

    def _get_cur_log_prob(self, tensordict: Any, params: Any = None) -> Any:
        with self.change(self, tensordict):
            return super()._get_cur_log_prob(tensordict, params)


@contextmanager
def other_data(_: Any, tensordict: Any) -> Any:
    tensordict["observation"] = tensordict["observation"] + 1
    yield


class TestWhereItIsAnother:
    """The loss makes its own pass."""

    def passes(self, loss: Any, passes: tuple[int, int] = (2, 2)) -> None:
        actor = actor_of("Categorical")
        loss = loss(actor)
        options: Any = {"passes": passes, "reference": actor_of("Categorical", 1)}
        check(actor, loss, batch_of(actor, 4, 6), actor.module[0], **options)

    def test_weights(self):
        self.passes(lambda actor: ClipPPOLoss(actor_of("Categorical", 2), None), (1, 1))

        def delayed(actor: Any) -> Any:  # with other weights for a second distribution
            loss = ClipPPOLoss(actor, None, delay_actor=True)
            SoftUpdate(loss, eps=0.9)
            return loss

        self.passes(delayed, (2, 3))

    def test_an_actor_of_the_same_weights(self):
        kind = type(KINDS["its own distribution"]())
        self.passes(lambda actor: ClipPPOLoss(kind(*actor.module), None))

    @pytest.mark.parametrize(
        "change",
        [
            other_data,
            lambda self, _: hold_out_net(self.actor_network),
            lambda self, _: evaluating(self.actor_network),
            lambda *_: torch.no_grad(),
        ],
    )
    def test_data_a_mode_or_a_graph(self, change):
        def changed(actor: Any) -> Any:
            loss = Changed(actor, None, entropy_bonus=False)
            loss.change = change
            return loss

        self.passes(changed)


def test_rows_that_are_stacked_each_time():
    actor = actor_of("Categorical")
    batch = lazy_stack([*batch_of(actor, 4, 6)])
    options: Any = {"reference": actor_of("Categorical", 1), "time_dim": 1}
    check(actor, ClipPPOLoss(actor, None), batch, actor.module[0], **options)


def test_the_actor_is_as_before_after_an_error_or_if_it_was_changed():
    actor = actor_of("Categorical")
    batch, options = batch_of(actor, 4, 6), {"reference": actor_of("Categorical", 1)}
    loss: Any = ClipPPOLoss(actor, None)
    with pytest.raises(KeyError, match="action_log_prob"):
        KLPenaltyLoss(actor, 0.1, loss=loss)(batch.exclude("action_log_prob"))
    assert "get_dist" not in vars(actor)
    actor.get_dist = held = partial(type(actor).get_dist, actor)
    KLPenaltyLoss(actor, 0.1, **options, loss=loss)(batch)
    assert actor.get_dist is held


class TestRecorded:
    """What the policy and the stack of the reference have recorded takes the place of passes."""

    def prepared(self, gradient: Any, recorded: bool) -> Any:
        """A loss, a batch, counts of the passes of policy and reference, and log-ratios (4, 6)."""
        actor, other = actor_of("Categorical"), actor_of("Categorical", 1)
        batch = batch_of(actor, 4, 6)
        stack = ReferenceModelLogProbTransform(other)
        log_ratio = batch["action_log_prob"] - stack(batch)["next", "ref_log_prob"]
        options: Any = {"gradient": gradient, "reference": stack.reference}
        loss = KLPenaltyLoss(actor, SpyController(per="step"), **options)
        counts = Count(actor.module[0]), Count(stack.reference.actor.module[0])
        return loss, stack(batch) if recorded else batch, counts, log_ratio

    @pytest.mark.parametrize("recorded", [True, False])
    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    def test_the_controller_is_fed_k1_of_the_policy_that_acted(self, gradient, recorded):
        loss, batch, counts, log_ratio = self.prepared(gradient, recorded)
        exact = loss(batch)["kl"].item()
        n = [count.n for count in counts]
        loss.update_controller(batch)
        passes = [count.n - before for count, before in zip(counts, n, strict=True)]
        k1 = gradient == "k2" or (recorded and gradient == "sequence")
        assert passes == ([0, 0 if recorded else 1] if k1 else [1, 1])
        fed = log_ratio.mean().item() if k1 else exact
        assert loss.controller.calls == [(pytest.approx(fed, rel=1e-10), 24)]
        with torch.no_grad():
            next(loss.parameters()).mul_(2.0)  # the policy moves on
        loss.update_controller(batch)
        same = loss.controller.calls[1][0] == loss.controller.calls[0][0]
        assert same == k1

    def test_a_loss_of_the_actions_alone_needs_no_reference(self):
        found = []
        for recorded in (True, False):
            loss, batch, counts, _ = self.prepared("k2", recorded)
            n = counts[1].n
            out = loss(batch)
            assert counts[1].n - n == (0 if recorded else 1)
            parameters = list(loss.parameters())
            found.append([out["loss_kl"], *torch.autograd.grad(out["loss_kl"], parameters)])
        assert_close(*found, **EXACT)

    def test_the_record_of_another_reference_is_not_read(self):
        loss, batch, _, _ = self.prepared("k2", True)
        expected = loss(batch)["loss_kl"]
        batch["next", "ref_log_prob"] = torch.zeros(4, 6)
        assert loss(batch)["loss_kl"] != expected
        own = KLPenaltyLoss(
            loss.actor_network, 0.1, gradient="k2", reference=actor_of("Categorical", 1)
        )
        assert_close(own(batch)["loss_kl"], expected, **EXACT)

    def test_a_record_of_weights_that_have_moved_is_not_read(self):
        loss, batch, counts, log_ratio = self.prepared("k2", True)
        loss.reference.update_reference(actor_of("Categorical", 2))
        expected = loss(batch.exclude(("next", "ref_log_prob")))["loss_kl"]
        assert_close(loss(batch)["loss_kl"], expected, **EXACT)
        loss.update_controller(batch)
        assert loss.controller.calls[0][0] != pytest.approx(log_ratio.mean().item(), rel=1e-3)
        batch["next", "ref_log_prob"] = loss.reference.score(batch, timed=True).log_prob
        n = counts[1].n
        assert_close(loss(batch)["loss_kl"], expected, **EXACT)
        assert counts[1].n == n
        loss.reference.load_state_dict(loss.reference.state_dict())
        assert_close(loss(batch)["loss_kl"], expected, **EXACT)
        assert counts[1].n == n + 1

    def test_padding_of_the_record_does_not_count(self):
        loss, batch, _, _ = self.prepared("k2", True)
        batch["collector", "mask"] = torch.arange(6).expand(4, 6) < 4
        expected = loss(batch)["loss_kl"]
        batch["next", "ref_log_prob"][:, 4:] = torch.nan
        assert_close(loss(batch)["loss_kl"], expected, rtol=0, atol=0)
