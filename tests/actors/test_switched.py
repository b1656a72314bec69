"""A reference without a second model: the policy itself, its adapters off."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import SerialEnv
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.adapters import adapted_actor, base_of, memory_of_adapted
from tests.helpers import (
    N_OBS,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
    moved,
    play,
    with_transforms,
    without_kl,
)
from tests.laws.transform_laws import TransformLaws
from torchrl_kl import (
    KLConstrainedTransform,
    KLMonitor,
    KLPenaltyLoss,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)
from torchrl_kl.actors.policy import Borrowed, evaluating

RESULTS = ("ref_log_prob", "kl", "reward", "episode_kl", "kl_coeff")
any_kind = pytest.mark.parametrize("kind", ["categorical", "lstm"])
either = pytest.mark.parametrize("which", ["switched", "moved"])


def two_stacks(
    kind: str = "categorical", which: str = "switched", **kwargs
) -> tuple[Any, Any, Any]:
    """A policy, a stack that switches its adapter off (or was moved), one with a copy of that."""
    actor, layer = adapted_actor(kind)
    base = base_of(actor, layer)
    if which == "switched":
        switched: Any = KLConstrainedTransform(
            actor, 0.1, reference=layer.disable_adapter, **kwargs
        )
    else:
        target = moved(base)
        switched = KLConstrainedTransform(actor, 0.1, reference=base, **kwargs)
        switched.update_reference(target, 0.25)
        with torch.no_grad():
            for parameter, other in zip(base.parameters(), target.parameters(), strict=True):
                parameter.copy_(0.75 * parameter + 0.25 * other)
    return actor, switched, KLConstrainedTransform(actor, 0.1, reference=base, **kwargs)


def copied_stack(actor: Any) -> Any:
    """A stack with a copy of the base as it is now."""
    return KLConstrainedTransform(actor, 0.1, reference=base_of(actor, actor[0].module))


def env_for(kind: str, actor: Any, *transforms: Any) -> Any:
    return with_transforms(
        SerialEnv(2, WalkEnv), *(memory_of_adapted(actor) if kind == "lstm" else []), *transforms
    )


def compare(actual: Any, expected: Any) -> None:
    for name in RESULTS:
        if name in expected["next"].keys():
            assert_same(actual["next", name], expected["next", name])


class TestSwitchedKLConstrainedTransformLaws(TransformLaws):
    writes, penalizes = (
        frozenset({"ref_log_prob", "kl", "task_reward", "kl_coeff", "episode_kl"}),
        True,
    )

    def make(self, seed=0):
        return KLConstrainedTransform(self.reference(), 0.1 + seed, reference=nullcontext)

    # A switch calls the policy through a bound method, which Dynamo does not trace.
    test_its_step_compiles_without_a_graph_break: Any = None


# The numbers are those of a copy of the base, in every data path.


@any_kind
@either
@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_in_an_env(kind, which, estimator):
    actor, switched, copied = two_stacks(kind, which, estimator=estimator)
    inside = play(env_for(kind, actor, switched), actor, 20)
    expected = play(env_for(kind, actor, copied), actor, 20)
    compare(inside, expected)
    assert inside["next", "kl"].abs().max() > 0.1
    if estimator == "exact":
        assert_same(inside["next", "kl_estimate"], expected["next", "kl_estimate"])
        assert (inside["next", "kl_estimate"] > 0).any()


@any_kind
@either
@pytest.mark.parametrize("path", ["postproc", "module", "padded", "disk", "replay", "shuffled"])
def test_on_batches(kind, which, path, tmp_path):
    actor, switched, copied = two_stacks(kind, which)
    scored = (
        path in ("replay", "shuffled") and kind == "lstm"
    )  # flat batches carry the reference's state
    env = env_for(
        kind,
        actor,
        *([ReferenceModelLogProbTransform(actor, reference=copied.reference)] if scored else []),
    )
    if path == "postproc":
        stacked = [
            collect(env, actor, frames=12, batches=3, postproc=stack)
            for stack in (switched, copied)
        ]
        for actual, expected in zip(*stacked, strict=True):
            compare(actual, expected)
        return
    batch = play(env, actor, 20)
    if path in ("replay", "shuffled"):
        flat = batch.reshape(-1)
        order = torch.randperm(len(flat)) if path == "shuffled" else torch.arange(len(flat))
        expected = copied(batch).reshape(-1)[order]
        expected["next"].pop("episode_kl")
        actual = switched(flat[order]) if path == "shuffled" else sample_of(flat, switched)
    else:
        if path == "padded":
            batch = split_trajectories(batch, done_key="done")
            assert not batch["mask"].all()
            batch["collector", "mask"] = batch.pop("mask")
            batch.names = [None, "time"]
        elif path == "disk":
            batch.save(tmp_path)
            names, batch = batch.names, TensorDict.load(tmp_path)
            batch.names = names
        actual, expected = nn.Sequential(switched)(batch), copied(batch)
    compare(actual, expected)
    assert actual["next", "kl"].abs().max() > 0.1


def sample_of(batch: Any, transform: Any) -> Any:
    """All of a flat batch, from a replay buffer with the transform."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(len(batch)),
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=len(batch),
    )
    buffer.append_transform(transform)
    buffer.extend(batch)
    return buffer.sample()


def test_in_one_piece():
    actor, layer = adapted_actor()
    batch = play(WalkEnv((2,)), actor)
    switched, copied = (
        KLRewardTransform(actor, 0.5, reference=reference)
        for reference in (layer.disable_adapter, base_of(actor, layer))
    )
    assert_same(switched(batch)["next", "reward"], copied(batch)["next", "reward"])
    assert (switched(batch)["next", "reward"] != batch["next", "reward"]).any()


@pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
def test_in_the_loss(gradient: Any):
    actor, layer = adapted_actor()
    batch = play(WalkEnv((2,)), actor).detach()
    switched, copied = (
        KLPenaltyLoss(actor, 0.3, gradient=gradient, reference=reference)
        for reference in (layer.disable_adapter, base_of(actor, layer))
    )
    gradients = []
    for loss in (switched, copied):
        terms = loss(batch)
        terms["loss_kl"].backward()
        gradients.append(
            [terms["loss_kl"].detach(), terms["kl"], layer.up.weight.grad, layer.down.weight.grad]
        )
        actor.zero_grad()
    assert_same(*gradients)
    assert gradients[0][1] > 0.01
    assert gradients[0][2].abs().max() > 1e-4
    assert not [name for name in switched.state_dict() if name.startswith("reference")]


def test_in_the_monitor():
    actor, layer = adapted_actor()
    texts = []
    for reference in (layer.disable_adapter, base_of(actor, layer)):
        stack = KLConstrainedTransform(actor, 0.1, reference=reference)
        batch = stack(play(WalkEnv((2,)), actor, 4, seed=2))
        batch["next", "kl"] = (
            -batch["next", "kl"].abs() * 0.01
        )  # as chance may have it: the exact KL is looked up
        monitor = KLMonitor(stack.controller, actor=actor, reference=stack.reference)
        texts += [
            str(message) for message in monitor(batch) if message.condition == "negative_noise"
        ]
    assert texts[0] == texts[1]
    assert "the exact KL on the same states is" in texts[0]


# The policy is left alone.


def test_the_stack_holds_nothing_of_the_policy():
    _, switched, copied = two_stacks()
    assert not list(switched.parameters())
    assert set(copied.state_dict()) - set(switched.state_dict()) == {
        name for name in copied.state_dict() if name.startswith("reference.")
    }
    assert len(switched.state_dict()) < len(copied.state_dict())


def test_attaching_and_casting_leave_the_policy_where_and_as_it_is():
    actor, switched, _ = two_stacks()
    actor.train()
    env = with_transforms(WalkEnv((2,)), switched)
    env.eval()
    switched.to(torch.float64).to("meta")
    switched.requires_grad_(False)
    assert actor.training
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in actor.parameters())
    assert actor[0].module.up.weight.requires_grad
    actor.double()
    assert switched.reference.dtype == torch.float64  # that of the policy, whenever it is asked


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_is_in_eval_mode_without_gradients_and_leaves_the_mode(training):
    actor, switched, copied = two_stacks()
    batch = play(WalkEnv((2,)), actor)
    actor.train(training)
    actor[0].module.up.eval()  # one part in another mode
    modes = [part.training for part in actor.modules()]
    for _ in range(2):  # with dropout two passes would differ
        after = switched(batch)["next"]
        assert_same(after["ref_log_prob"], copied(batch)["next", "ref_log_prob"])
        assert not after["ref_log_prob"].requires_grad
    assert [part.training for part in actor.modules()] == modes
    assert actor[0].module.enabled


def test_an_error_in_a_pass_leaves_the_policy_as_it_was():
    actor, switched, _ = two_stacks()
    batch = play(WalkEnv((2,)), actor)
    batch["observation"] = batch["observation"][..., :2]
    actor.train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        switched(batch)
    assert actor.training
    assert actor[0].module.enabled


@pytest.mark.parametrize("place", ["env", "postproc"])
def test_ten_ppo_updates_of_the_adapter_leave_the_reference_where_it_was(place):
    actor, stack, copied = two_stacks()
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    probe = play(WalkEnv((4,)), actor)
    expected = copied(probe)["next", "ref_log_prob"]
    critic = ValueOperator(nn.Linear(N_OBS, 1), in_keys=["observation"])
    env: Any = SerialEnv(4, WalkEnv)
    collector = Collector(
        with_transforms(env, stack) if place == "env" else env,
        actor,
        frames_per_batch=64,
        total_frames=320,
        postproc=None if place == "env" else stack,
        auto_register_policy_transforms=False,
    )
    advantage = GAE(gamma=1.0, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=0.02)
    for batch in collector:
        assert (batch["next", "kl"] != 0).any()
        for _ in range(2):
            advantage(batch)
            terms = loss(batch.reshape(-1))
            optimizer.zero_grad()
            (terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]).backward()
            optimizer.step()
    collector.shutdown()
    after = actor.state_dict()
    moved_weights = {name for name in before if (before[name] != after[name]).any()}
    assert {name.split(".")[-2] for name in moved_weights} == {"up", "down"}
    assert_close(stack(without_kl(probe))["next", "ref_log_prob"], expected, rtol=0, atol=1e-6)


def test_its_step_compiles_without_a_graph_break():
    actor, switched, _ = two_stacks()
    env = with_transforms(WalkEnv((2,)), switched.freeze())

    def step(given: Any, following: Any) -> Any:
        return switched._step(switched._inv_call(given), following)

    with torch.no_grad():
        td = actor(env.reset())
        following = WalkEnv((2,))._step(td)
        actor.train()
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        actual = compiled(td.clone(), following.clone())
        expected = step(td.clone(), following.clone())
    for name in RESULTS:
        assert_same(actual[name], expected[name])
    assert actor.training


@pytest.mark.parametrize("training", [True, False])
def test_weights_that_tensordict_puts_into_the_policy(training):
    actor = make_actor()
    old = copy.deepcopy(actor)
    own: Any = TensorDict.from_module(actor)
    weights = own.data.clone()
    stack = KLConstrainedTransform(actor, 0.1, reference=lambda: weights.to_module(actor))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(torch.randn_like(parameter))
    actor.train(training)
    before = [*actor.parameters()]
    batch = play(WalkEnv((2,)), actor)
    for _ in range(2):
        expected = KLConstrainedTransform(actor, 0.1, reference=old)(batch)["next"]
        assert_same(stack(batch)["next", "ref_log_prob"], expected["ref_log_prob"])
    assert all(one is other for one, other in zip(actor.parameters(), before, strict=True))
    assert all(parameter.requires_grad for parameter in before)


def test_it_cannot_be_moved():
    actor, switched, _ = two_stacks()
    with pytest.raises(
        RuntimeError,
        match="this one is the policy itself within a context: leave `reference` out",
    ):
        switched.update_reference(actor)


# Copies.


def test_deep_copies_score_with_the_same_policy():
    actor, switched, _ = two_stacks()
    in_env: Any = copy.deepcopy(with_transforms(WalkEnv(), switched)).transform
    copies = [copy.deepcopy(switched), switched.clone(), in_env[-1]]
    assert all(stack.reference.actor is actor for stack in copies)
    batch = play(WalkEnv((2,)), actor)
    with torch.no_grad():
        actor[0].module.base.weight.mul_(-1.0)
    for stack in copies:
        compare(stack(batch), copied_stack(actor)(batch))


def test_a_pickled_one_has_a_policy_of_its_own_and_switches_that():
    actor, switched, _ = two_stacks()
    batch = play(WalkEnv((2,)), actor)
    expected = switched(batch)
    other = pickle.loads(pickle.dumps(switched))
    assert other.reference.actor is not actor
    with (
        torch.no_grad()
    ):  # training moves the adapter, which the copy does not see and does not need
        actor[0].module.up.weight.mul_(-2.0)
    compare(other(batch), expected)
    compare(switched(batch), expected)


def test_what_must_not_be_pickled_says_why():
    borrowed = Borrowed(nn.Linear(2, 2), refusal="the policy learns here only.")
    assert copy.deepcopy(borrowed) is borrowed
    with pytest.raises(pickle.PicklingError, match="learns here only"):
        pickle.dumps(borrowed)
    assert pickle.loads(pickle.dumps(Borrowed(3))).held == 3


def test_eval_mode_by_flag_alone():
    class Merging(nn.Linear):
        def train(self, mode: bool = True):
            raise AssertionError("some modules merge their adapters here")

    module = nn.Sequential(nn.Dropout(), Merging(2, 2))
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert all(part.training for part in module.modules())
