"""How responses are decoded: what is read of which rows, in families with caches of all kinds."""

from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

from tests.gpt_helpers import sharp
from tests.language.models import (
    EOS,
    LENGTH,
    PAD,
    SIZES,
    VOCAB,
    Passes,
    T,
    equal,
    every_kind,
    make_actor,
    ragged,
    random_texts,
    sample,
    seeded,
    true_logits,
    trust,
)
from torchrl_kl.language import CausalLMActor, sample_responses

# Attention with learned and with rotary positions, windows shorter than the texts, and states.
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": LENGTH},
    "Llama": SIZES,
    "Mistral": {**SIZES, "sliding_window": 4},
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def make_family(name: str) -> Any:
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": VOCAB, **FAMILIES[name], **tokens}
    config = getattr(transformers, f"{name}Config")(**sizes)
    return sharp(transformers.AutoModelForCausalLM.from_config(config)).eval()


def check_numbers(actor: Any, batch: Any) -> None:
    """Recorded log-probs are those of each text alone."""
    mask = batch["collector", "mask"]
    states = batch[mask]
    logits = true_logits(actor.reader.lm.model, states["tokens"], states["position"])
    expected = logits.log_softmax(-1).gather(-1, states["action"][:, None])[:, 0]
    assert_close(states["action_log_prob"], expected, atol=2e-5, rtol=0.0)
    assert (batch["action_log_prob"][~mask] == 0).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    actor = CausalLMActor(make_family(name))
    groups = random_texts(3)[:, :4].repeat_interleave(4, 0)
    for prompts in (groups, ragged(12), [*ragged(4), *ragged(4)]):
        batch = sample(actor, prompts)
        assert not batch["collector", "mask"].all()  # some rows have left
        check_numbers(actor, batch)
    passes = Passes(actor)
    trust(actor)
    sample(actor, eos_token=None)
    assert passes.take() == [(6, 4)] + [(6, 1)] * (T - 1)


class TestWhatIsRead:
    @every_kind
    def test_equal_prompts_once(self, kind):
        actor = trust(make_actor(kind))
        passes, some = Passes(actor), torch.tensor([0, 1, 0, 2, 1, 0])
        batch = sample(actor, equal(3)[some], eos_token=None)
        assert passes.take() == [(3, 4)] + [(6, 1)] * (T - 1)
        check_numbers(actor, batch)
        expected = sample(make_actor(kind), equal(3)[some], eos_token=None, chunk_size=1)
        assert batch["tokens"].equal(expected["tokens"])

    @every_kind
    def test_rows_that_have_ended_leave(self, kind):
        actor = trust(make_actor(kind))
        passes, prompts = Passes(actor), random_texts(32)[:, :4]
        batch = sample(actor, prompts)
        live = batch["collector", "mask"].sum(0).tolist()
        rows = [n for n, _ in passes.take()]
        # A text is not read further than its last token but one; a few that ended may be.
        assert rows[0] == 32
        for t, n in enumerate(rows):
            assert live[t] <= n <= max(live[t] * 8 / 7, 1)
        assert rows[-1] < 32
        check_numbers(actor, batch)

    @every_kind
    def test_longer_prompts_are_given_their_own_tokens(self, kind):
        actor = trust(make_actor(kind))
        passes, texts = Passes(actor), random_texts(3)
        batch = sample(actor, [texts[0, :3], texts[1, :5], texts[2, :5]], eos_token=None)
        assert passes.take() == [(3, 3)] + [(3, 1)] * (T - 1) + [(2, 1)] * 2
        check_numbers(actor, batch)

    def test_members_of_a_group_wait_for_the_end_of_their_prompt(self):
        actor = trust(make_actor("gpt"))
        passes, texts = Passes(actor), random_texts(2)
        batch = sample(actor, [texts[1, :6], *[texts[0, :4]] * 2, texts[1, :6]], eos_token=None)
        assert passes.take()[:4] == [(2, 4), (3, 1), (3, 1), (4, 1)]
        check_numbers(actor, batch)

    def test_prompts_of_very_different_lengths_apart(self):
        """A pass for each of 11 tokens of 16 rows costs more than the second prompts at once."""
        actor = trust(make_actor("gpt"))
        passes, texts = Passes(actor), random_texts(32)
        prompts = [row[: 2 if i % 2 else 16] for i, row in enumerate(texts)]
        batch = sample_responses(actor, prompts, 3, pad_token=PAD, generator=seeded())
        assert passes.take() == [(16, 2), (16, 1), (16, 1), (16, 16), (16, 1), (16, 1)]
        check_numbers(actor, batch)

    @pytest.mark.parametrize("prompts", [equal(20), ragged(20)], ids=["equal", "ragged"])
    def test_what_is_sampled_together_does_not_matter(self, prompts):
        batches = [sample(make_actor("llama"), prompts, chunk_size=n) for n in (1, 7, 256)]
        for batch in batches[1:]:
            assert batch["tokens"].equal(batches[0]["tokens"])
            assert batch["collector", "mask"].equal(batches[0]["collector", "mask"])


def test_records_of_rows_that_leave():
    """Kept ids and logits belong to their steps, with groups, ends and prompts of all lengths."""
    actor = make_actor("gpt", top_k=3)
    prompts = [*ragged(8), *ragged(8)]
    batch = sample(actor, prompts, return_logits=True, eos_token=EOS)
    mask = batch["collector", "mask"]
    states = batch[mask]
    logits = true_logits(actor.reader.lm.model, states["tokens"], states["position"])
    assert states["kept", "ids"].long().equal(logits.topk(3)[1])
    kept = torch.full_like(logits, -torch.inf).scatter(1, logits.topk(3)[1], logits.topk(3)[0])
    assert_close(states["logits"].softmax(-1), kept.softmax(-1), atol=1e-5, rtol=0.0)
    assert (batch["kept", "ids"][~mask] == 0).all()
    assert (batch["logits"][~mask] == 0).all()
