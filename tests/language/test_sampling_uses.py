"""Who takes the batches of sample_responses: stacks, losses, buffers, the monitor."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from transformers import LlamaConfig, LlamaForCausalLM

from tests.gpt_helpers import sharp
from tests.language.models import (
    SIZES,
    VOCAB,
    Passes,
    T,
    equal,
    every_kind,
    make_actor,
    make_critic,
    make_model,
    ragged,
    sample,
    scored,
    true_logits,
)
from torchrl_kl import (
    CausalLMActor,
    ConstantKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLMonitor,
    KLPenaltyLoss,
)


class TestWhoTakesIt:
    @every_kind
    @pytest.mark.parametrize("prompts", [equal(), ragged()], ids=["equal", "ragged"])
    def test_k1_of_a_policy_against_itself(self, kind, prompts):
        actor = make_actor(kind)
        batch = KLConstrainedTransform(actor, 0.1)(sample(actor, prompts))
        assert batch["next", "kl"].abs().max() < 1e-5
        assert not batch["next", "kl"][~batch["collector", "mask"]].any()

    @every_kind
    def test_k1_against_another(self, kind):
        actor, other = make_actor(kind), make_actor(kind, seed=1)
        passes = Passes(other)
        stack = KLConstrainedTransform(actor, 0.1, reference=other)
        batch = sample(actor, ragged())
        after = stack(batch)["next"]
        mask = batch["collector", "mask"]
        logits = true_logits(other.reader.lm.model, batch["tokens"], batch["position"])
        expected = batch["action_log_prob"] - logits.log_softmax(-1).gather(
            -1, batch["action"].unsqueeze(-1)
        ).squeeze(-1)
        assert_close(after["kl"].squeeze(-1), expected * mask, atol=5e-5, rtol=0.0)
        assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])
        assert passes is not None

    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_a_training_step(self, kind):
        actor, critic = make_actor(kind), make_critic(kind)
        batch = scored(actor, critic, make_actor(kind, seed=1), ragged())
        steps = batch[batch["collector", "mask"]]
        loss = ClipPPOLoss(actor, critic, normalize_advantage=False)
        penalty = KLPenaltyLoss(actor, 0.1, reference=make_actor(kind, seed=1))
        for part in (batch, steps):
            for module in (loss, penalty):
                module.zero_grad()
            out = loss(part)
            kl = penalty(part.exclude(("next", "kl_coeff")))["loss_kl"]
            total = out["loss_objective"] + out["loss_critic"] + kl
            total.backward()
            assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)
            assert sum(p.grad.abs().sum() for p in loss.parameters() if p.grad is not None) > 0.1
        # The first ratios are 1: none is clipped, and the policy is where it was.
        assert out["clip_fraction"] == 0
        assert abs(out["kl_approx"]) < 1e-5
        KLMonitor(ConstantKLController(0.1), window=1)(batch)

    @pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
    def test_replay_buffers(self, storage, tmp_path):
        options: dict[str, Any] = (
            {"scratch_dir": str(tmp_path)} if storage is LazyMemmapStorage else {}
        )
        actor = make_actor("llama")
        batch = sample(actor, ragged(8))
        buffer = ReplayBuffer(
            storage=storage(8, **options),
            sampler=SamplerWithoutReplacement(shuffle=True),
            batch_size=4,
        )
        buffer.extend(batch)
        drawn: Any = torch.cat([buffer.sample(), buffer.sample()])
        assert drawn.shape == (8, T)
        with set_recurrent_mode(True):
            scores = actor.log_prob(drawn.select("tokens", "position", "action"))
        mask = drawn["collector", "mask"]
        assert_close(scores * mask, drawn["action_log_prob"], atol=2e-5, rtol=0.0)

    @every_kind
    def test_each_text_is_read_once(self, kind):
        """By policy, critic and reference, in whatever layout."""
        actor, critic = make_actor(kind), make_critic(kind)
        passes, values = Passes(actor), Passes(critic)
        stack = KLConstrainedTransform(actor, 0.1)
        references = Passes(stack)
        batch = sample(actor)
        stack(batch)  # the first time, it looks at the weights in a pass of its own
        for one in (passes, values, references):
            one.take()
        stack(batch)
        assert rows(passes, references) == 6
        with torch.no_grad(), set_recurrent_mode(True):
            GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True)(batch)
        assert rows(values) == 12  # of states and of next states
        loss = ClipPPOLoss(actor, critic)
        layouts = {
            "whole": (batch, 6),
            "rows": (batch[2:4], 2),
            "chosen rows": (batch[torch.tensor([5, 0, 2])], 3),
            "flat": (batch.reshape(-1), 6),
            "cloned": (batch.clone(), 6),
            "masked": (batch[batch["collector", "mask"]], 6),
        }
        for name, (part, expected) in layouts.items():
            loss(part)
            assert rows(passes) == expected, name
            assert rows(values) == expected, name


def rows(*passes: Passes) -> int:
    return sum(n for one in passes for n, _ in one.take())


def test_a_reference_in_bfloat16():
    """It differs from that in float32 by rounding: 8 bits of logits of at most 8."""
    actor = make_actor("llama")
    batch = sample(actor)
    exact, half = FrozenActor(actor), FrozenActor(actor).to(torch.bfloat16)
    assert half.dtype == torch.float32
    stack = [
        KLConstrainedTransform(actor, 0.1, reference=reference)(batch)
        for reference in (exact, half)
    ]
    difference = (stack[0]["next", "kl"] - stack[1]["next", "kl"]).abs()
    size = true_logits(make_model("llama"), batch["tokens"], batch["position"]).abs().max().item()
    # Each of about 20 roundings moves a logit by at most 2**-9 of its size.
    assert 1e-4 < difference.max() < 2 * 20 * size * 2**-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_leaves_the_frequencies_of_rotary_positions(dtype):
    """Rounded ones would rotate by other angles, the more so the longer the text is."""
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 512})
    actor = CausalLMActor(sharp(LlamaForCausalLM(config)).eval())
    tokens, position = torch.randint(VOCAB, (2, 512)), torch.tensor([400, 512])
    state = TensorDict(tokens=tokens, position=position, batch_size=2)
    expected = copy.deepcopy(actor)
    for weight in expected.parameters():
        weight.data = weight.data.to(dtype)
    half = FrozenActor(actor).to(dtype)
    got: Any = half.get_dist(state, timed=False)
    assert got.logits.equal(expected.get_dist(state).logits)
    # Back again, they are what they were.
    frequencies = {name: b for name, b in half.float().named_buffers() if "inv_freq" in name}
    for name, buffer in actor.named_buffers():
        assert frequencies[f"actor.{name}"].equal(buffer)


def test_empty_batches_are_scored():
    for kind in ("gpt", "llama"):
        actor = make_actor(kind)
        batch = sample(actor)
        for empty in (batch[:0], batch[:, :0], batch.reshape(-1)[:0]):
            state: Any = empty.select("tokens", "position")
            for recurrent in (False, True):
                with torch.no_grad(), set_recurrent_mode(recurrent):
                    logits = actor.get_dist(TensorDict(state)).logits
                assert logits.shape == (*empty.shape, VOCAB)
