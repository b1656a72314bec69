"""Steps of a rollout with cached keys and values against the bare model, and what they cost."""

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torchrl.modules import set_recurrent_mode

from tests.gpt_helpers import sharp
from tests.language.models import (
    KINDS,
    LENGTH,
    Passes,
    cache_of,
    check_step,
    make_actor,
    random_texts,
    states,
    step,
    true_logits,
    trust,
)

Stream = Iterator[tuple[Tensor, Tensor]]
every_kind = pytest.mark.parametrize("kind", KINDS)


def ragged_prompts() -> Stream:
    texts = random_texts(5)
    for n in range(8):
        yield texts, torch.tensor([1, 4, 2, 7, 4]) + n


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


def slots_of_a_longer_text() -> Stream:
    """What was in later slots must not be attended to, nor be taken for what was read."""
    texts = random_texts(2)
    yield texts, torch.tensor([12, 12])
    other = random_texts(2, seed=1)
    other[:, 8:] = texts[:, 8:]
    for n in range(3, 14):
        yield other, torch.tensor([n, min(n + 2, 13)])


def one_token() -> Stream:
    texts = random_texts(3)
    for n in (1, 2, 3):
        yield texts, torch.full((3,), n)


STREAMS = [
    *(one_token, ragged_prompts, partial_resets, full_texts, padded_rows, slots_of_a_longer_text),
]


class TestNumbers:
    @every_kind
    @pytest.mark.parametrize("stream", STREAMS)
    def test_steps_are_those_of_the_bare_model(self, kind, stream):
        actor = make_actor(kind)
        for tokens, position in stream():
            check_step(actor, tokens, position)
        assert cache_of(actor)._sets

    def test_outputs_can_be_used_in_a_loss(self):
        actor = make_actor("llama")
        for n in (4, 5):
            with torch.no_grad():
                out = actor(states(random_texts(3), torch.full((3,), n)))
            assert not out["logits"].is_inference()


class TestCost:
    @every_kind
    def test_one_position_per_step(self, kind):
        actor = trust(make_actor(kind))
        passes = Passes(actor)
        texts = random_texts(6)
        step(actor, texts, torch.full((6,), 4))
        assert passes.take() == [(6, 4)]
        for n in range(5, 8):
            step(actor, texts, torch.full((6,), n))
            assert passes.take() == [(6, 1)]
        step(actor, texts, torch.full((6,), 7))
        assert passes.take() == []  # the state is the same

    @every_kind
    def test_rows_are_rebuilt_alone(self, kind):
        actor = trust(make_actor(kind))
        passes = Passes(actor)
        texts, position = random_texts(6), torch.tensor([4, 5, 6, 4, 5, 6])
        step(actor, texts, position)
        assert passes.take() == [(2, 4), (2, 5), (2, 6)]
        texts, position = texts.clone(), position + 1
        texts[[1, 4]] = random_texts(2, seed=3)
        position[1], position[4] = 3, 7
        step(actor, texts, position)
        assert passes.take() == [(2, 1), (2, 1), (1, 3), (1, 7)]
        texts[0] = random_texts(1, seed=4)[0]  # and a row of two goes on alone
        step(actor, texts, position + 1)
        assert passes.take() == [(1, 1), (2, 1), (1, 1), (1, 1), (1, 6)]

    def test_rows_of_one_length_become_one_part_again(self):
        actor = trust(make_actor("gpt"))
        passes, texts = Passes(actor), random_texts(4)
        for n in range(3):  # rows begin one after the other
            texts[n] = random_texts(1, seed=9 + n)[0]
            step(actor, texts, torch.full((4,), 4 + n))
        passes.take()
        step(actor, texts, torch.full((4,), 7))
        assert passes.take() == [(4, 7)]
        check_step(actor, texts, torch.full((4,), 8))


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


class TestNothingIsKeptElsewhere:
    def test_in_batch_state_dict_pickle_or_copy(self):
        actor, texts = make_actor("llama"), random_texts(3)
        names = set(actor.state_dict())
        step(actor, texts, [3, 3, 3])
        actor.clear_cache()
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
