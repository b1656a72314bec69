"""How tokens are drawn: of which distribution, and with which random numbers."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.language.models import (
    make_actor,
    sample,
)
from torchrl_kl.language.distribution import NextToken, draw


def uniforms(monkeypatch, values: torch.Tensor) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: values[:, None].clone())


class TestDraw:
    def test_a_token_for_each_part_of_the_unit_interval(self, monkeypatch):
        """Rare tokens have their share too: 1e-6 and 1e-12, where float32 has no room."""
        shares = [0.0, 0.5, 1e-6, 0.3, 1e-12, 0.0, 0.2 - 1e-6 - 1e-12, 0.0]
        probs = torch.tensor(shares, dtype=torch.float64)
        edges = probs.cumsum(0).tolist()
        parts = [(edges[i - 1], edges[i], i) for i in range(len(probs)) if probs[i] > 0]
        values, expected = [], []
        for low, high, token in parts:
            inside = (high - low) * 1e-3
            values += [low + inside, (low + high) / 2, high - inside]
            expected += [token] * 3
        values += [0.0, 1 - 2**-53]
        expected += [1, 6]
        u = torch.tensor(values, dtype=torch.float64)
        uniforms(monkeypatch, u)
        log_probs = probs.log().expand(len(u), -1)
        assert draw(log_probs)[:, 0].tolist() == expected

    @pytest.mark.parametrize("value", [math.nan, -math.inf])
    def test_bad_logits(self, value):
        logits = torch.zeros(8, 5)
        logits[[2, 7]] = value
        text = r"got NaN, or infinity for all tokens, in rows \[2, 7\] \(2 of 8\): the model's"
        with pytest.raises(ValueError, match=text):
            draw(logits)
        actor = make_actor("gpt")
        actor.reader.lm.model.head.weight.data[:] = math.nan
        with pytest.raises(ValueError, match="weights may have diverged"):
            sample(actor)


class TestNextToken:
    def test_it_is_the_categorical(self):
        logits = 3 * torch.randn(4, 5, 7)
        ours, theirs = NextToken(logits), torch.distributions.Categorical(logits=logits)
        value = theirs.sample()
        assert_close(ours.log_prob(value), theirs.log_prob(value))
        for name in ("probs", "logits", "mode", "mean", "variance", "batch_shape", "event_shape"):
            got, expected = getattr(ours, name), getattr(theirs, name)
            if isinstance(got, torch.Tensor):
                assert_close(got, expected, equal_nan=True)
            else:
                assert got == expected
        assert_close(ours.entropy(), theirs.entropy())
        assert_close(ours.deterministic_sample, theirs.mode)
        assert_close(ours.enumerate_support(), theirs.enumerate_support())
        assert_close(torch.distributions.kl_divergence(ours, theirs), torch.zeros(4, 5))
        assert ours.sample().shape == (4, 5)
        assert ours.sample(torch.Size([3, 2])).shape == (3, 2, 4, 5)
        assert ours.expand((6, 4, 5)).batch_shape == (6, 4, 5)
        assert NextToken(torch.zeros(0, 7)).sample().shape == (0,)
        assert NextToken(torch.zeros(7)).sample().shape == ()
        assert NextToken(torch.zeros(7)).sample(torch.Size([3])).shape == (3,)
