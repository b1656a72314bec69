"""A cache is never stale: whatever changes of a model between two steps, log-probs follow."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.gpt_helpers import sharp
from tests.language.models import (
    KINDS,
    VOCAB,
    check_step,
    first_layer,
    make_actor,
    make_model,
    random_texts,
    seeded,
    step,
    true_logits,
    trust,
)
from torchrl_kl.language import GPT, CausalLMActor, sample_responses
from torchrl_kl.language.blocks import KeyValues


def matrix_of(model: nn.Module) -> torch.Tensor:
    """A weight that keys and values depend on."""
    return next(p for p in first_layer(model).parameters() if p.ndim == 2)


def optimizer_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(random_texts(2))
    output = output if isinstance(output, torch.Tensor) else output.logits
    output.logsumexp(-1).sum().backward()
    optimizer.step()


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        matrix_of(model).mul_(1.5)


def edit_data(model: Any) -> None:
    matrix_of(model).data.add_(0.1)


def set_data(model: Any) -> None:
    matrix_of(model).data = matrix_of(model).data * 1.5


def edit_row(model: Any) -> None:
    matrix_of(model).data[3] += 1.0


def edit_bias_like(model: Any) -> None:
    vector = next(p for p in first_layer(model).parameters() if p.ndim == 1)
    vector.data[5] += 1.0


def assign_weights(model: Any) -> None:
    model.load_state_dict({k: v * 1.2 for k, v in model.state_dict().items()}, assign=True)


def replace_module(model: Any) -> None:
    name, layer = next(
        (n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)
    )
    parent, _, last = name.rpartition(".")
    make: Any = type(layer)
    twin = make(*layer.weight.shape)
    setattr(model.get_submodule(parent), last, sharp(twin, seed=8))


def uneven(x: torch.Tensor) -> torch.Tensor:
    return x * torch.linspace(0.5, 2.0, x.shape[-1])  # one factor is undone by the next norm


def add_hook(model: Any) -> None:
    first_layer(model).register_forward_hook(
        lambda _, __, out: (
            uneven(out) if isinstance(out, torch.Tensor) else (uneven(out[0]), *out[1:])
        )
    )


def cast_and_back(model: Any) -> None:
    model.to(torch.bfloat16).float()


CHANGES: list[Callable[[Any], None]] = [
    *(optimizer_step, edit_in_place, edit_data, set_data, edit_row, edit_bias_like),
    *(assign_weights, replace_module, add_hook, cast_and_back),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_between_two_steps(kind, change):
    actor, texts = make_actor(kind), random_texts(4)
    model = actor.reader.lm.model
    for n in (3, 4):
        check_step(actor, texts, [n, n, n + 1, n])
    before = true_logits(model, texts, [5, 5, 6, 5])
    change(model)
    after = true_logits(model, texts, [5, 5, 6, 5])
    assert not torch.allclose(before, after, atol=1e-3), "the change does nothing"
    for n in (5, 6):
        check_step(actor, texts, [n, n, n + 1, n])


class TestModes:
    @pytest.mark.parametrize("kind", ["gpt", "gpt2"])
    def test_eval_after_steps_with_dropout(self, kind):
        actor, texts = CausalLMActor(make_model(kind, dropout=0.5)), random_texts(4)
        expected = true_logits(actor.reader.lm.model, texts, [5] * 4).log_softmax(-1)
        actor.train()
        noisy = [step(actor, texts, torch.full((4,), 5)) for _ in range(2)]
        assert not torch.equal(*noisy)
        assert ((noisy[0] - expected).abs().amax(-1) > 0.1).all()
        actor.eval()
        check_step(actor, texts, [6] * 4)
        check_step(actor, texts, [7] * 4)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [4, 6, 3, 5]], ids=["equal", "ragged"])
    def test_autocast(self, kind, lengths):
        actor, plain = make_actor(kind), make_actor(kind)
        plain.reader.lm.caches = False
        texts = random_texts(4)
        half = torch.autocast("cpu", torch.bfloat16)
        for n, context in enumerate([nullcontext(), half, half, nullcontext(), nullcontext()]):
            with context:
                got, expected = (step(a, texts, torch.tensor(lengths) + n) for a in (actor, plain))
            bound = 2e-5 if isinstance(context, nullcontext) else 0.5
            assert_close(got, expected, atol=bound, rtol=0.0)


class Moved(GPT):
    """From the second pass on, it numbers the positions of new tokens as if they were the first."""

    right = 0  # up to so many tokens, it is right

    def _embed(self, tokens, n_read=0):
        return super()._embed(tokens, n_read if n_read < self.right else 0)


class Late(Moved):
    right = 9


class Picky(GPT):
    def forward(self, tokens, *, cache=None):
        if cache is not None and tokens.shape[1] == 1:
            raise KeyError("no single tokens")
        return super().forward(tokens, cache=cache)


class Unread(GPT):
    def forward(self, tokens, *, cache=None):
        if cache is not None:
            raise AttributeError("no number of layers")
        return super().forward(tokens)


class Forgetful(GPT):
    """It takes a cache, and makes none."""

    def new_cache(self):
        return None


class Still(GPT):
    """Its rows cannot be moved."""

    def new_cache(self):
        cache = super().new_cache()
        cache.reorder_cache = lambda index: KeyValues.reorder_cache(cache, index.sort()[0] * 0)
        return cache


class Scaled(GPT):
    """It reads the first tokens of a text otherwise once there are more than eight."""

    def _embed(self, tokens, n_read=0):
        return super()._embed(tokens, n_read) * (1 + (n_read + tokens.shape[1] > 8))


class Foreseeing(GPT):
    """It reads texts otherwise if they have tokens from 5 on, which `check_causal` does not try."""

    def _embed(self, tokens, n_read=0):
        found = (tokens >= 5).any(-1)[:, None, None]
        return super()._embed(tokens, n_read) * (1 + found)


def made_of(kind: type[GPT]) -> CausalLMActor:
    return CausalLMActor(sharp(kind(VOCAB, 20)).eval())


def sampled(actor: CausalLMActor, prompts: torch.Tensor, n: int) -> Any:
    return sample_responses(actor, prompts, n, pad_token=0, generator=seeded())


def check_same(batch: Any, expected: Any) -> None:
    assert batch["tokens"].equal(expected["tokens"])
    assert_close(batch["action_log_prob"], expected["action_log_prob"], atol=2e-5, rtol=0.0)


class TestCompared:
    """Cached outputs are compared with those of one pass, again where texts are longer."""

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [(Moved, r"outputs of texts of 5 .* off by"), (Picky, "it raised KeyError: 'no single")],
    )
    @pytest.mark.parametrize("ragged", [False, True])
    def test_models_that_compute_something_else(self, kind, problem, ragged):
        actor, texts = made_of(kind), random_texts(3)
        check_step(actor, texts, [4, 4 + ragged, 4])
        with pytest.warns(UserWarning, match=f"is not used from now on, since {problem}"):
            check_step(actor, texts, [5, 5 + ragged, 5])
        for n in (6, 7):
            check_step(actor, texts, [n, n + 1, n])

    def test_a_fault_of_longer_texts_in_a_rollout(self):
        actor, texts = made_of(Late), random_texts(3)
        for n in range(4, 10):
            check_step(actor, texts, [n] * 3)
        with pytest.warns(UserWarning, match="texts of 10 tokens are off by"):
            check_step(actor, texts, [10] * 3)
        check_step(actor, texts, [11] * 3)

    @pytest.mark.parametrize("kind", [Moved, Picky, Unread, Late, Forgetful])
    def test_sampled_responses(self, kind):
        actor, right = made_of(kind), made_of(GPT)
        prompts = random_texts(3)[:, :4]
        if kind is Late:
            check_same(sampled(actor, prompts, 5), sampled(right, prompts, 5))
        with pytest.warns(UserWarning, match="is not used from now on"):
            batch = sampled(actor, prompts, 8)
        check_same(batch, sampled(right, prompts, 8))
        check_same(sampled(actor, prompts, 8), sampled(right, prompts, 8))  # no second warning

    def test_a_long_prompt_says_nothing_about_steps_after_a_short_one(self):
        actor, right = made_of(Late), made_of(GPT)
        vars(actor.reader.lm.model)["right"] = 19
        prompts = random_texts(3)
        check_same(sampled(actor, prompts[:, :16], 4), sampled(right, prompts[:, :16], 4))
        vars(actor.reader.lm.model)["right"] = 9
        with pytest.warns(UserWarning, match="is not used from now on"):
            batch = sampled(actor, prompts[:, :4], 8)
        check_same(batch, sampled(right, prompts[:, :4], 8))

    def test_rows_that_cannot_be_moved(self):
        actor, right = made_of(Still), made_of(GPT)
        prompts = random_texts(2)[:, :4]
        check_same(sampled(actor, prompts, 8), sampled(right, prompts, 8))
        groups = prompts.repeat_interleave(2, 0)
        with pytest.warns(UserWarning, match="is not used from now on"):
            batch = sampled(actor, groups, 8)
        check_same(batch, sampled(right, groups, 8))

    def test_prefixes_that_are_read_otherwise_in_longer_texts(self):
        prompts = random_texts(3)
        check_same(*(sampled(made_of(Scaled), prompts[:, :4], 5) for _ in range(2)))
        with pytest.raises(ValueError, match="those of the first 8 tokens .* where it has 16"):
            sampled(made_of(Scaled), prompts[:, :4], 8)
        actor = made_of(Scaled)
        for n in range(4, 9):
            check_step(actor, prompts, [n] * 3)
        with pytest.raises(ValueError, match="those of the first 8 tokens .* where it has 16"):
            step(actor, prompts, torch.tensor([9] * 3))

    @pytest.mark.parametrize("caches", [True, False])
    def test_prefixes_that_later_tokens_of_a_response_change(self, caches):
        actor, prompts = made_of(Foreseeing), torch.arange(4).expand(6, 4)
        actor.reader.lm.caches = caches
        with pytest.raises(ValueError, match="those of the first 4 tokens .* where it has 11"):
            sampled(actor, prompts, 8)
        assert actor.reader.lm.caches == caches

    def test_it_leaves_modes_and_random_numbers_alone(self):
        model = make_model("gpt", dropout=0.3).train()
        model.blocks[1].eval()
        modes = [m.training for m in model.modules()]
        actor = CausalLMActor(model)
        torch.manual_seed(1)
        first = [step(actor, random_texts(3), torch.tensor([n] * 3)) for n in (4, 5)]
        actor.clear_cache()
        trust(actor)
        torch.manual_seed(1)
        again = [step(actor, random_texts(3), torch.tensor([n] * 3)) for n in (4, 5)]
        assert torch.equal(torch.stack(first), torch.stack(again))
        assert [m.training for m in model.modules()] == modes
