"""Steps of a rollout with cached keys and values against the bare model, and what they cost."""

import copy
import io
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torchrl.modules import set_recurrent_mode

from tests.gpt_helpers import sharp
from tests.language.models import (
    KINDS,
    LENGTH,
    N_HEAD,
    N_KEY_HEAD,
    N_LAYER,
    VOCAB,
    WIDTH,
    Passes,
    cache_of,
    cached_bytes,
    check_step,
    make_actor,
    make_critic,
    random_texts,
    states,
    step,
    true_logits,
)
from torchrl_kl.language import GPT, CausalLMActor, blocks

Stream = Iterator[tuple[Tensor, Tensor]]
every_kind = pytest.mark.parametrize("kind", KINDS)


def equal_prompts() -> Stream:
    texts = random_texts(4)
    for n in range(3, 11):
        yield texts, torch.full((4,), n)


def ragged_prompts() -> Stream:
    texts = random_texts(5)
    for n in range(8):
        yield texts, torch.tensor([1, 4, 2, 7, 4]) + n


def ragged_prompts_that_become_equal() -> Stream:
    texts = random_texts(2)
    for position in ([3, 4], [4, 5], [5, 5], [6, 6], [7, 8]):
        yield texts, torch.tensor(position)


def partial_resets() -> Stream:
    texts, position = random_texts(4), torch.tensor([3, 5, 6, 7])
    for n in range(8):
        if n % 3 == 1:
            row = n % 4
            texts = texts.clone()
            texts[row] = random_texts(seed=n)
            position = position.clone()
            position[row] = 2 + n % 2
        yield texts, position
        position = position + 1


def rollbacks() -> Stream:
    texts = random_texts(3)
    yield texts, torch.tensor([9, 9, 9])
    yield texts, torch.tensor([4, 9, 7])
    texts = texts.clone()
    texts[0, 3] = (texts[0, 3] + 1) % VOCAB  # another token in the slot of one that was read
    yield texts, torch.tensor([4, 10, 7])
    yield texts, torch.tensor([5, 11, 8])


def same_state_again() -> Stream:
    for _ in range(3):
        yield random_texts(3), torch.tensor([4, 5, 5])


def another_last_token() -> Stream:
    texts = random_texts(3)
    for token in range(4):
        texts = texts.clone()
        texts[:, 5] = token
        yield texts, torch.tensor([6, 6, 6])


def permuted_rows() -> Stream:
    texts = random_texts(4)
    yield texts, torch.tensor([3, 4, 5, 6])
    order = torch.tensor([2, 0, 3, 1])
    yield texts[order], torch.tensor([6, 4, 7, 5])
    yield texts[order], torch.tensor([7, 5, 8, 6])


def leading_dimensions() -> Stream:
    texts = random_texts(4, 16)
    for n in range(3, 7):
        yield texts, n + torch.arange(64).view(4, 16) % 3


def full_texts() -> Stream:
    texts = random_texts(3)
    for n in (LENGTH - 2, LENGTH - 1, LENGTH, LENGTH):
        yield texts, torch.tensor([n, LENGTH, LENGTH - 1])


def padded_rows() -> Stream:
    """Rows of split_trajs: all zeros, position 0."""
    texts = random_texts(3)
    texts[1] = 0
    for n in range(4, 8):
        yield texts, torch.tensor([n, 0, n + 1])


def alternating() -> Stream:
    one, other = random_texts(3), random_texts(3, seed=1)
    for n in range(4, 8):
        yield one, torch.tensor([n, n, n])
        yield other, torch.tensor([n, n + 1, n + 2])


def changing_batch_sizes() -> Stream:
    texts = random_texts(6)
    for n in (6, 3, 6, 1):
        yield texts[:n], torch.full((n,), 5)
        yield texts[:n], torch.full((n,), 6)
    yield texts[:, :12], torch.full((6,), 7)
    yield texts.int(), torch.full((6,), 8).int()


def slots_of_a_longer_text() -> Stream:
    """What was in later slots must not be attended to, nor be taken for what was read."""
    texts = random_texts(2)
    yield texts, torch.tensor([12, 12])
    other = random_texts(2, seed=1)
    other[:, 8:] = texts[:, 8:]
    for n in range(3, 14):
        yield other, torch.tensor([n, min(n + 2, 13)])


STREAMS = [
    *(equal_prompts, ragged_prompts, ragged_prompts_that_become_equal, partial_resets),
    *(rollbacks, same_state_again, another_last_token, permuted_rows, leading_dimensions),
    *(full_texts, padded_rows, alternating, changing_batch_sizes, slots_of_a_longer_text),
]


class TestNumbers:
    @every_kind
    @pytest.mark.parametrize("stream", STREAMS)
    def test_steps_are_those_of_the_bare_model(self, kind, stream):
        actor = make_actor(kind)
        for tokens, position in stream():
            check_step(actor, tokens, position)
        assert cached_bytes(actor) > 0

    @every_kind
    @pytest.mark.parametrize("slots_first", [0, 96])
    @pytest.mark.parametrize("small_product", [0, 10**6])
    def test_in_each_layout(self, kind, slots_first, small_product, monkeypatch):
        monkeypatch.setattr(blocks, "SMALL_PRODUCT", small_product)
        actor, texts = make_actor(kind), random_texts(3)
        actor.reader.lm.slots_first = slots_first
        for n in range(13, 18):
            check_step(actor, texts, [n, n + 2, n - 9])
        for n in range(3, 11):
            check_step(actor, texts[:, :12], [n, n, n])
        first_buffer = next(iter(cache_of(actor)._sets.values()))._cache.buffers[0][0]
        assert first_buffer.is_contiguous() == (slots_first == 0)

    @pytest.mark.parametrize("length", [90, 120])
    def test_of_long_texts(self, length):
        actor = CausalLMActor(sharp(GPT(VOCAB, 128, n_embd=WIDTH, n_head=2)))
        texts = torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(0))
        for n in (3, 22, 24, 25, 60, length - 2):
            check_step(actor, texts, [n, n, n])
            check_step(actor, texts, [n + 1, n + 1, n + 1])

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    @every_kind
    def test_in_other_precisions(self, kind, dtype):
        actor, plain = make_actor(kind).to(dtype), make_actor(kind, cache_bytes=0).to(dtype)
        texts = random_texts(4)
        bound = 1e-12 if dtype == torch.float64 else 0.5  # bfloat16 has 8 bits: 60 * 2**-8 logits
        for n in range(3, 8):
            got, expected = (step(a, texts, [n, n, n + 1, n]) for a in (actor, plain))
            assert got.dtype == torch.promote_types(dtype, torch.float32)
            assert_close(got, expected, atol=bound, rtol=0.0)

    @every_kind
    def test_of_a_critic(self, kind):
        critic, texts = make_critic(kind), random_texts(4)
        for n in range(3, 9):
            with torch.no_grad():
                value = critic(states(texts, [n, n, n + 1, n]))["state_value"]
            expected = true_logits(critic.module.lm.model, texts, [n, n, n + 1, n])
            assert_close(value, expected, atol=2e-5, rtol=0.0)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [*["go on"] * 4, "reset", "roll back", "permute", "other", "resize", "edit", "mode"]
        ),
        st.integers(0, 10**6),
    ),
    min_size=3,
    max_size=14,
)


class TestAnyOrder:
    @every_kind
    @settings(max_examples=12)
    @given(operations=OPERATIONS)
    def test_of_operations(self, kind, operations):
        """Whatever happens to texts, rows, weights and modes between the steps."""
        actor = make_actor(kind)
        model = actor.reader.lm.model
        texts, position = random_texts(3), torch.tensor([2, 3, 5])
        for name, seed in operations:
            generator = torch.Generator().manual_seed(seed)
            rows = torch.rand(len(texts), generator=generator) < 0.5
            if name == "go on":
                position = (position + 1).clamp(max=LENGTH)
            elif name == "reset":
                fresh = torch.randint(VOCAB, texts.shape, generator=generator)
                texts = torch.where(rows[:, None], fresh, texts)
                position = torch.where(rows, seed % 6, position)
            elif name == "roll back":
                position = torch.where(rows, (position - 1 - seed % 3).clamp(min=0), position)
            elif name == "permute":
                order = torch.randperm(len(texts), generator=generator)
                texts, position = texts[order], position[order]
            elif name == "other":
                step(actor, random_texts(len(texts), seed=seed), position)
            elif name == "resize":
                texts, position = random_texts(1 + seed % 4, seed=seed), torch.arange(1 + seed % 4)
            elif name == "edit":
                parameters = list(model.parameters())
                parameters[seed % len(parameters)].data[seed % 4] += 0.1
            else:
                actor.train(not actor.training)
            check_step(actor, texts, position)


class TestCost:
    @every_kind
    def test_one_position_per_step(self, kind):
        actor = make_actor(kind)
        passes = Passes(actor)
        texts = random_texts(6)
        step(actor, texts, torch.full((6,), 4))
        assert passes.take()[-1] == (6, 4)  # after the trial of the model
        for n in range(5, 8):
            step(actor, texts, torch.full((6,), n))
            assert passes.take() == [(6, 1)]

    @every_kind
    def test_rows_are_rebuilt_alone(self, kind):
        actor = make_actor(kind)
        passes = Passes(actor)
        texts, position = random_texts(6), torch.tensor([4, 5, 6, 4, 5, 6])
        step(actor, texts, position)
        passes.take()
        texts, position = texts.clone(), position + 1
        texts[[1, 4]] = random_texts(2, seed=3)
        position[1], position[4] = 3, 7
        step(actor, texts, position)
        assert passes.take() == [(2, 7), (6, 1)]
        step(actor, texts, position + 1)
        step(actor, texts, position)  # a rollback needs nothing anew
        assert passes.take() == [(6, 1), (6, 1)]

    @every_kind
    def test_bytes(self, kind):
        actor = make_actor(kind)
        step(actor, random_texts(5), torch.full((5,), 4))
        heads = N_HEAD if kind.startswith("gpt") else N_KEY_HEAD
        per_token = 2 * N_LAYER * heads * (WIDTH // N_HEAD) * 4
        assert cached_bytes(actor) == 5 * LENGTH * per_token
        step(actor.to(torch.bfloat16), random_texts(5), torch.full((5,), 4))
        assert cached_bytes(actor) == 5 * LENGTH * per_token // 2

    def test_at_most_two_sets(self):
        actor = make_actor("llama")
        texts, blocks = random_texts(3), list(actor.reader.lm.model.modules())
        for n in range(4):
            blocks[n].training = True
            check_step(actor, texts, [4, 4, 4])
            assert len(cache_of(actor)._sets) == min(n + 1, 2)


class TestOff:
    # Torch has no batching rule for this kernel and loops; the numbers are what counts here.
    @pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
    def test_where_it_must_be(self):
        actor, texts = make_actor("gpt"), random_texts(3)
        batch = states(texts, [4, 5, 6])
        actor.get_dist(batch.clone())  # gradients
        with torch.no_grad(), set_recurrent_mode(True):
            actor.get_dist(batch.clone())
        with torch.no_grad():
            reader = actor.reader
            torch.vmap(reader)(texts[:, None], batch["position"][:, None])
            compiled = torch.compile(reader, backend="eager", fullgraph=True)
            expected = true_logits(reader.lm.model, texts, batch["position"])
            assert_close(compiled(texts, batch["position"]), expected, atol=2e-5, rtol=0.0)
        assert cache_of(actor) is None
        off = make_actor("gpt", cache_bytes=0)
        check_step(off, texts, [4, 5, 6])
        assert cache_of(off) is None

    @every_kind
    def test_beyond_the_bytes_that_are_allowed(self, kind):
        allowed = make_actor(kind)
        texts = random_texts(3)
        check_step(allowed, texts, [4, 5, 6])
        n_bytes = cached_bytes(allowed)
        exact, less = (make_actor(kind, cache_bytes=n) for n in (n_bytes, n_bytes - 1))
        check_step(exact, texts, [4, 5, 6])
        assert cached_bytes(exact) == n_bytes
        passes = Passes(less)
        message = rf"of 3 texts of 20 tokens need more than `cache_bytes` = {n_bytes - 1}: each"
        with pytest.warns(UserWarning, match=message):
            check_step(less, texts, [4, 5, 6])
        passes.take()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(less, texts, torch.tensor([5, 6, 7]))
        assert passes.take() == [(3, 7)]
        assert cached_bytes(less) == 0
        check_step(less, texts[:2], [4, 5])  # fewer texts fit
        assert 0 < cached_bytes(less) < n_bytes

    @pytest.mark.parametrize(
        ("value", "error", "text"),
        [
            (-1, ValueError, "`cache_bytes` must be at least 0, got -1"),
            (True, TypeError, "`cache_bytes` must be an int or None, got True"),
            (1e9, TypeError, "`cache_bytes` must be an int or None, got 1000000000.0"),
        ],
    )
    def test_bad_bytes(self, value, error, text):
        with pytest.raises(error, match=text):
            make_actor("gpt", cache_bytes=value)

    def test_an_error_in_a_pass_leaves_no_cache(self):
        actor, texts = make_actor("llama"), random_texts(3)
        check_step(actor, texts, [4, 4, 4])
        model = actor.reader.lm.model
        layer = model.model.layers[1]
        forward = layer.forward

        def fail(*args, **kwargs):
            raise RuntimeError("out of memory")

        layer.forward = fail
        with pytest.raises(RuntimeError, match="out of memory"):
            step(actor, texts, torch.tensor([5, 5, 5]))
        layer.forward = forward
        check_step(actor, texts, [5, 5, 5])
        check_step(actor, texts, [6, 6, 6])


class TestNothingIsKeptElsewhere:
    def test_in_batch_state_dict_pickle_or_copy(self):
        actor, texts = make_actor("llama"), random_texts(3)
        names = set(actor.state_dict())
        size = len(pickle.dumps(actor))
        with torch.no_grad():
            out = actor(states(texts, [4, 4, 4]))
        assert set(out.keys()) == {"tokens", "position", "logits", "action", "action_log_prob"}
        assert set(actor.state_dict()) == names
        assert len(pickle.dumps(actor)) == size
        buffer = io.BytesIO()
        torch.save(actor, buffer)
        buffer.seek(0)
        for twin in (copy.deepcopy(actor), torch.load(buffer, weights_only=False)):
            assert cache_of(twin) is None
            check_step(twin, texts, [5, 5, 5])
        sharp(twin, seed=4)
        check_step(actor, texts, [6, 6, 6])
        check_step(twin, texts, [6, 6, 6])

    def test_clear_cache_and_casts_free_the_memory(self):
        actor = make_actor("llama")
        for drop in (actor.clear_cache, actor.double, actor.float, lambda: actor.to("cpu")):
            check_step(actor, random_texts(3), [4, 4, 4])
            assert cache_of(actor) is not None
            drop()
            assert cache_of(actor) is None

    @pytest.mark.parametrize("inference", [False, True])
    def test_outputs_can_be_used_in_a_loss(self, inference):
        actor = make_actor("llama")
        for n in (4, 5):
            with torch.inference_mode(inference), torch.no_grad():
                out = actor(states(random_texts(3), [n, n, n]))
            assert out["logits"].is_inference() == inference
            if not inference:
                weight = torch.ones(VOCAB, requires_grad=True)
                (out["logits"] * weight).sum().backward()
                assert_close(weight.grad, out["logits"].sum(0))
