"""sample_responses: the layout, the numbers, and wrong arguments."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.modules import set_recurrent_mode

from tests.gpt_helpers import sharp
from tests.language.models import (
    EOS,
    LENGTH,
    PAD,
    VOCAB,
    Passes,
    T,
    checkpoint,
    equal,
    every_kind,
    make_actor,
    ragged,
    random_texts,
    sample,
    seeded,
    true_logits,
)
from torchrl_kl import KLConstrainedTransform
from torchrl_kl.language import GPT, CausalLMActor, sample_responses


def check_layout(batch: Any, prompts: Any, pad: int, eos: int | None, rewards: Any) -> None:
    """All keys, as a loop over texts and steps says that they must be."""
    length = max(map(len, prompts)) + T
    assert batch.shape == (len(prompts), T)
    assert batch.names == [None, "time"]
    expected = {"tokens", "position", "action", "action_log_prob", ("collector", "mask")}
    after = {"tokens", "position", "reward", "done", "terminated", "truncated"}
    assert set(batch.keys(True, True)) == expected | {("next", key) for key in after}
    assert batch["tokens"].shape == (*batch.shape, length)
    for row, prompt in enumerate(prompts):
        actions = batch["action"][row].tolist()
        n = actions.index(eos) + 1 if eos in actions[:T] else T
        text = [*prompt.tolist(), *actions[:n]]
        text += [pad] * (length - len(text))
        for t in range(T):
            step: Any = batch[row, t]
            assert step["tokens"].tolist() == step["next", "tokens"].tolist() == text
            assert step["position"] == len(prompt) + t
            assert step["next", "position"] == len(prompt) + t + 1
            assert step["collector", "mask"] == (t < n)
            if t >= n:
                assert step["action"] == pad
                assert step["action_log_prob"] == 0
            last = t == n - 1
            ended = eos is None or actions[n - 1] == eos
            assert step["next", "done"].tolist() == [last]
            assert step["next", "terminated"].tolist() == [last and ended]
            assert step["next", "truncated"].tolist() == [last and not ended]
            assert step["next", "reward"].tolist() == [float(rewards[row]) if last else 0.0]


class TestLayout:
    @pytest.mark.parametrize("prompts", [equal(20), ragged(20)], ids=["equal", "ragged"])
    @pytest.mark.parametrize(
        ("pad", "eos"), [(PAD, EOS), (EOS, EOS), (PAD, None)], ids=["eos", "pad is eos", "no eos"]
    )
    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_every_key(self, kind, pad, eos, prompts):
        rewards = torch.arange(1.0, 21.0)
        seen = []

        def reward_fn(texts):
            seen.append(texts)
            return rewards

        batch = sample(make_actor(kind), prompts, pad_token=pad, eos_token=eos, reward_fn=reward_fn)
        check_layout(batch, prompts, pad, eos, rewards)
        mask = batch["collector", "mask"]
        assert mask.all() == (eos is None)
        assert mask[:, -1].any()
        assert len(seen) == 1
        assert_close(seen[0], batch["tokens"][:, 0])

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_log_probs_have_the_dtype_that_a_step_has(self, dtype):
        actor = make_actor("llama").to(dtype)
        batch = sample(actor, eos_token=None)
        with set_recurrent_mode(True):
            scored = actor.log_prob(batch.select("tokens", "position", "action"))
        assert batch["action_log_prob"].dtype == scored.dtype
        bound = 1e-12 if dtype == torch.float64 else 0.5
        assert_close(batch["action_log_prob"], scored, atol=bound, rtol=0.0)

    def test_names_of_keys(self):
        actor = make_actor(
            "gpt", in_keys=[("obs", "text"), ("obs", "at")], action_key=("agent", "token")
        )
        batch, plain = sample(actor), sample(make_actor("gpt"))
        assert_close(batch["obs", "text"], plain["tokens"])
        assert_close(batch["next", "obs", "text"], plain["next", "tokens"])
        assert_close(batch["next", "obs", "at"], plain["next", "position"])
        assert_close(batch["agent", "token"], plain["action"])
        assert_close(batch["agent", "token_log_prob"], plain["action_log_prob"])
        assert KLConstrainedTransform(actor, 0.1)(batch)["next", "agent", "kl"].shape == (6, T, 1)


class TestNumbers:
    @every_kind
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    @pytest.mark.parametrize("prompts", [equal(), ragged()], ids=["equal", "ragged"])
    def test_log_probs_are_those_of_the_bare_model(self, kind, prompts, temperature):
        actor = make_actor(kind, temperature=temperature)
        batch = sample(actor, prompts)
        mask = batch["collector", "mask"]
        logits = true_logits(
            actor.reader.lm.model, batch["tokens"], batch["position"].clamp(max=LENGTH)
        )
        log_probs = (logits / temperature).log_softmax(-1)
        expected = log_probs.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        assert_close(batch["action_log_prob"], expected * mask, atol=2e-5, rtol=0.0)
        with set_recurrent_mode(True):
            scored = actor.log_prob(batch.select("tokens", "position", "action"))
        assert_close(batch["action_log_prob"], scored * mask, atol=2e-5, rtol=0.0)

    @pytest.mark.parametrize("off", ["switch", "train", "checkpointing"])
    def test_without_a_cache_the_texts_are_the_same(self, off):
        expected = sample(make_actor("llama"), ragged())
        actor = make_actor("llama")
        actor.reader.lm.caches = off != "switch"
        if off == "checkpointing":
            checkpoint(actor.reader.lm.model)
        actor.train(off != "switch")
        batch = sample(actor, ragged())
        assert_close(batch["tokens"], expected["tokens"])
        assert_close(batch["action_log_prob"], expected["action_log_prob"], atol=2e-5, rtol=0.0)

    @every_kind
    def test_one_position_per_token(self, kind):
        actor = make_actor(kind)
        passes = Passes(actor)
        sample(actor, eos_token=None)  # with a comparison
        passes.take()
        sample(actor, eos_token=None)
        assert passes.take() == [(6, 4)] + [(6, 1)] * (T - 1)
        sample(actor, eos_token=None, chunk_size=4)
        assert passes.take() == [(4, 4)] + [(4, 1)] * (T - 1) + [(2, 4)] + [(2, 1)] * (T - 1)

    def test_recorded_logits_are_those_of_the_policy_and_0_after_the_end(self):
        actor = make_actor("gpt", temperature=0.7)
        batch = sample(actor, return_logits=True, chunk_size=4)
        mask, lm = batch["collector", "mask"], actor.reader.lm.model
        expected = (true_logits(lm, batch["tokens"], batch["position"]) / 0.7).log_softmax(-1)
        got = batch["logits"]
        assert_close(got[mask].log_softmax(-1), expected[mask], atol=5e-5, rtol=0.0)
        assert not mask.all()
        assert (got[~mask] == 0).all()

    def test_the_generator_decides(self):
        actor = make_actor("llama")
        first = sample(actor)["tokens"]
        torch.rand(5)
        assert torch.equal(first, sample(actor)["tokens"])
        assert not torch.equal(first, sample(actor, generator=seeded(1))["tokens"])
        torch.manual_seed(3)
        default = sample(actor, generator=None)["tokens"]
        torch.manual_seed(3)
        assert torch.equal(default, sample(actor, generator=None)["tokens"])

    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_frequencies_of_two_tokens(self, kind):
        """Against the product of exact probabilities; 121 pairs, at most 5 standard errors."""
        actor, n = make_actor(kind), 20_000
        prompt = random_texts(1)[:, :3]
        batch = sample_responses(
            actor, prompt.expand(n, -1), 2, pad_token=PAD, generator=seeded(2), chunk_size=n
        )
        with torch.no_grad():
            model = actor.reader.lm.model
            texts = torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
            first = true_logits(model, prompt, [3]).softmax(-1)[0]
            second = true_logits(model, texts, [4] * VOCAB).softmax(-1)
        exact = (first[:, None] * second).flatten()
        pairs = batch["action"][:, 0] * VOCAB + batch["action"][:, 1]
        frequency = torch.bincount(pairs, minlength=VOCAB**2) / n
        error = (exact * (1 - exact) / n).sqrt()
        assert ((frequency - exact).abs() < 5 * error + 2 / n).all()


def hook(model):
    model.blocks[1].mlp_norm.register_forward_hook(lambda _, __, output: 3 * output)


def pre_hook(model):
    model.register_forward_pre_hook(lambda _, inputs: ((inputs[0] + 1) % VOCAB,))


def other_class(model):
    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.blocks[0].expand.__class__ = Twice


def parametrization(model):
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].expand)
    model.blocks[0].expand.parametrizations.weight.original0.data.mul_(2)


@pytest.mark.parametrize("change", [hook, pre_hook, other_class, parametrization])
def test_parts_that_do_more_than_their_class(change):
    actor = make_actor("gpt")
    before = sample(actor)
    change(actor.reader.lm.model)
    batch = sample(actor, eos_token=None)
    assert not before["tokens"].equal(batch["tokens"])
    logits = true_logits(actor.reader.lm.model, batch["tokens"], batch["position"])
    expected = logits.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    assert_close(batch["action_log_prob"], expected, atol=2e-5, rtol=0.0)


def returns(value):
    return lambda texts: value


class TestErrors:
    @pytest.mark.parametrize(
        ("prompts", "kwargs", "error", "text"),
        [
            (equal().float(), {}, TypeError, "`prompts` must be int64 or int32, got torch.float32"),
            ([[1, 2], [3]], {}, TypeError, "`prompts` must be a tensor, got list"),
            (
                equal()[0],
                {},
                ValueError,
                r"must be ids \(N, P\), or a list .*, got shapes \[\(4,\)\]",
            ),
            (equal()[:0], {}, ValueError, r"got shapes \[\(0, 4\)\]"),
            (equal()[:, :0], {}, ValueError, r"got shapes \[\(6, 0\)\]"),
            ([], {}, ValueError, r"got shapes \[\]"),
            ([equal()], {}, ValueError, r"got shapes \[\(6, 4\)\]"),
            ([equal()[0], equal()[0, :0]], {}, ValueError, r"got shapes \[\(4,\), \(0,\)\]"),
            (equal(), {"max_new_tokens": 0}, ValueError, "`max_new_tokens` must be .*, got 0"),
            (equal(), {"max_new_tokens": 2.0}, ValueError, "be an int of at least 1, got 2.0"),
            (equal(), {"chunk_size": 0}, ValueError, "`chunk_size` must be an int .*, got 0"),
            (
                equal(),
                {"max_new_tokens": 18},
                ValueError,
                "must leave at most 20 tokens to be read, .*, got 21: shorten them, or build",
            ),
            (equal(), {"pad_token": -100}, ValueError, "`pad_token` must lie .* of 11 tokens, got"),
            (
                equal(),
                {"eos_token": 11},
                ValueError,
                "`eos_token` must lie in .* 11 tokens, got 11",
            ),
            (
                equal(),
                {"reward_fn": returns(torch.ones(6, 1))},
                ValueError,
                r"`reward_fn` must return a tensor \(6,\), got \(6, 1\)",
            ),
            (equal(), {"reward_fn": returns([1.0] * 6)}, ValueError, r"\(6,\), got list"),
        ],
    )
    def test_bad_arguments(self, prompts, kwargs, error, text):
        kwargs = {"max_new_tokens": 4, "pad_token": PAD, **kwargs}
        with pytest.raises(error, match=text):
            sample_responses(make_actor("gpt"), prompts, **kwargs)

    def test_bad_actors(self):
        with pytest.raises(TypeError, match="`actor` must be a CausalLMActor, got GPT"):
            sample_responses(GPT(11, 8), equal(), 2, pad_token=0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="outputs: a critic's model cannot act"):
            CausalLMActor(sharp(GPT(11, 8, n_out=1)))
