"""What `reference=` may be; the policy itself as reference; steps of a random policy."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict.nn import InteractionType
from torch import nn
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.actors.kinds import act, agents, chain, choosing, observed
from tests.adapters import adapted_actor, base_of, memory_of_adapted
from tests.helpers import (
    WalkEnv,
    assert_same,
    make_actor,
    play,
    with_transforms,
    without_kl,
)
from torchrl_kl import FrozenActor, KLConstrainedTransform, TopKActor
from torchrl_kl.actors.policy import Acting
from torchrl_kl.actors.references import SwitchedActor, as_reference
from torchrl_kl.language import GPT, CausalLMActor


def score(reference: FrozenActor, batch: Any) -> torch.Tensor:
    return reference.score(batch, timed=False).log_prob


def switched() -> tuple[Any, Any, Any, Any]:
    """A policy, a reference that switches its adapter off, a copy of the base, and a batch."""
    actor, layer = adapted_actor()
    reference = as_reference(actor, layer.disable_adapter)
    batch = act(actor, observed(20).float())
    return actor, reference, FrozenActor(base_of(actor, layer)), batch


# What it may be.


def test_what_it_may_be():
    actor, other = make_actor(log_prob_keys=["logp"]), make_actor(seed=7, return_log_prob=False)
    batch = act(actor, observed(5).float())
    own, another = as_reference(actor, None), as_reference(actor, other, chunk_size=2)
    assert own.log_prob_key == another.log_prob_key == "logp"
    assert another.chunk_size == 2
    assert_close(score(own, batch), batch["logp"])
    assert_close(score(another, batch), other.log_prob(batch.clone()).detach())
    assert as_reference(actor, own) is own
    for reference in (None, other):
        assert as_reference(actor, reference, log_prob_key="mine").log_prob_key == "mine"
    same = as_reference(actor, nullcontext, log_prob_key="mine", chunk_size=2)
    assert isinstance(same, SwitchedActor)
    assert (same.log_prob_key, same.chunk_size) == ("mine", 2)
    assert_close(score(same, batch), batch["logp"])


def errors() -> dict[str, tuple[Any, Any, dict[str, Any], Any, str]]:
    actor, layer = adapted_actor()
    frozen = FrozenActor(actor)
    other = r"must have the actions of the policy, got \['action'\] for .*'agents'"
    no_actor = "`actor` must be a probabilistic actor .*, got Linear"
    given = r"that of the FrozenActor, 'action_log_prob', got 'logp'"
    context = "got _GeneratorContextManager: pass `model.disable_adapter`, not .*only once"
    rows = {"chunk_size": 2}
    return {
        "rows of a FrozenActor": (
            actor,
            frozen,
            rows,
            ValueError,
            "`chunk_size` needs a .*got a Froz",
        ),
        "another log-prob": (actor, frozen, {"log_prob_key": "logp"}, ValueError, given),
        "other actions": (agents(), make_actor(), {}, ValueError, other),
        "other actions of a FrozenActor": (agents(), frozen, {}, ValueError, other),
        "a context": (actor, layer.disable_adapter(), {}, TypeError, context),
        "a string": (actor, "base", {}, TypeError, "must be an actor or a callable .*, got str"),
        "a network": (actor, nn.Linear(2, 2), {}, TypeError, no_actor),
        "a policy without a distribution": (nn.Linear(2, 2), frozen, {}, TypeError, no_actor),
    }


@pytest.mark.parametrize("name", errors())
def test_what_it_may_not_be(name):
    actor, reference, options, error, message = errors()[name]
    with pytest.raises(error, match=message):
        as_reference(actor, reference, **options)


@pytest.mark.parametrize("wrap", [lambda actor: actor, FrozenActor], ids=["actor", "frozen"])
@pytest.mark.parametrize("top", [False, True])
def test_another_temperature_than_that_of_the_policy_is_said(wrap, top):
    """It measured another pair without a word."""
    gpt = GPT(vocab_size=11, block_size=8)
    actor = CausalLMActor(gpt, temperature=0.6)
    actor = TopKActor(actor, 2) if top else actor
    KLConstrainedTransform(actor, 0.1, reference=wrap(CausalLMActor(gpt, temperature=0.6)))
    text = r"has the temperature 1 and the policy 0\.6, .*with `temperature=0\.6`"
    with pytest.warns(UserWarning, match=text) as said:
        KLConstrainedTransform(actor, 0.1, reference=wrap(CausalLMActor(gpt)))
    assert len(said) == 1
    assert said[0].filename == __file__
    KLConstrainedTransform(actor, 0.1)  # and others that state none
    KLConstrainedTransform(make_actor(), 0.1, reference=make_actor(seed=1))


def test_a_switch_must_return_a_context():
    actor, _, _, batch = switched()
    with pytest.raises(TypeError, match="a context manager when called, got NoneType.*disable_ada"):
        score(as_reference(actor, lambda: None), batch)  # type: ignore[arg-type]


# The policy itself.


@pytest.mark.parametrize("kind", ["categorical", "lstm"])
def test_its_numbers_are_those_of_a_copy_of_the_base(kind):
    actor, layer = adapted_actor(kind)
    batches = []
    for reference in (layer.disable_adapter, base_of(actor, layer)):
        stack = KLConstrainedTransform(actor, 0.1, reference=reference)
        memory = memory_of_adapted(actor) if kind == "lstm" else []
        batches.append(play(with_transforms(WalkEnv((2,)), *memory, stack), actor))
        batches.append(stack(without_kl(batches[0])))
    for batch in batches:
        for name in ("ref_log_prob", "kl", "reward"):
            assert_same(batch["next", name], batches[-1]["next", name])
    assert batches[0]["next", "kl"].abs().max() > 0.05


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_the_policy_as_it_is(training):
    actor, reference, base, batch = switched()
    layer = actor[0].module
    actor.train(training)
    layer.up.eval()  # one part in another mode
    modes = [part.training for part in actor.modules()]
    for _ in range(2):  # with dropout two passes would differ
        assert_close(score(reference, batch), score(base, batch))
        assert not reference.get_dist(batch, timed=False).logits.requires_grad
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        score(reference, batch.clone().set("observation", torch.zeros(20, 2)))
    reference.to(torch.float64).to("meta").requires_grad_(False)
    assert [part.training for part in actor.modules()] == modes
    assert layer.enabled
    assert layer.up.weight.requires_grad
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in actor.parameters())
    assert not list(reference.parameters())
    assert not reference.state_dict()
    actor.double()
    assert reference.dtype == torch.float64  # that of the policy, whenever it is asked
    with pytest.raises(RuntimeError, match="the policy itself within a context: leave `reference`"):
        reference.update_reference(actor)


def test_deep_copies_share_the_policy_and_pickled_ones_do_not():
    actor, reference, base, batch = switched()
    expected = score(base, batch)
    copied, sent = copy.deepcopy(reference), pickle.loads(pickle.dumps(reference))
    assert copied.actor is actor is not sent.actor
    with torch.no_grad():
        actor[0].module.base.weight.mul_(-1.0)
    assert_close(score(sent, batch), expected)
    assert_close(score(copied, batch), score(reference, batch), rtol=0, atol=0)
    assert (score(copied, batch) - expected).abs().max() > 0.1


# The steps of the policy.


def test_whether_it_samples():
    drawn = make_actor(default_interaction_type=InteractionType.RANDOM)
    for policy, samples in ((drawn, True), (make_actor(), False)):
        acting = Acting.of(policy, FrozenActor(policy).recorded)
        assert acting.samples() is samples
        with set_exploration_type(ExplorationType.RANDOM):
            assert acting.samples()
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            assert not acting.samples()


@pytest.mark.parametrize(
    ("make", "traces"), [(choosing, ["logits"]), (chain, ["first_logits", "second_logits"])]
)
def test_random_steps(make, traces):
    """Collectors fill what the policy writes with zeros where a random one has acted."""
    policy = make()
    acting = Acting.of(policy, FrozenActor(policy).recorded)
    assert acting.trace_keys == traces
    batch = act(policy, observed(2, 4).float())
    log_prob = FrozenActor(policy).recorded.require(batch)
    acting.refuse_random_steps(batch, log_prob, None)
    log_prob[:, :3] = 0.0  # of a policy that is certain, and of a random one
    for key in traces:
        batch[key][:, 1:] = 0.0
    with pytest.raises(RuntimeError, match="in 4 of 8 steps .*into the env"):
        acting.refuse_random_steps(batch, log_prob, None)
    mask = torch.tensor([[True, True, False, True], [True, False, False, True]])
    with pytest.raises(RuntimeError, match="in 1 of 8 steps"):
        acting.refuse_random_steps(batch, log_prob, mask)
    acting.refuse_random_steps(batch, log_prob, torch.zeros_like(mask))
    acting.refuse_random_steps(batch.exclude(*traces), log_prob, None)
    acting.refuse_random_steps(batch[:0], log_prob[:0], None)
