"""The picture of a sweep: what is drawn, and what is refused."""

import builtins
import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from torchrl_kl import plot_frontier
from torchrl_kl.exact import Enumeration, PolicyValues

plt: Any = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def drawn(line: Any) -> list[list[float]]:
    return [list(map(float, values)) for values in line.get_data()]


def test_runs_are_drawn_at_sqrt_kl_and_joined_in_its_order():
    axes = plot_frontier([0.25, 0.04, 1.0], [0.5, 0.3, 0.6], names=["b", "a", "c"], label="runs")
    joined, points = axes.lines
    assert_close(drawn(joined), [[0.2, 0.5, 1.0], [0.3, 0.5, 0.6]])
    assert_close(drawn(points), [[0.5, 0.2, 1.0], [0.5, 0.3, 0.6]])
    assert {text.get_text(): text.xy for text in axes.texts} == {
        "b": (0.5, 0.5),
        "a": (pytest.approx(0.2), pytest.approx(0.3)),
        "c": (1.0, pytest.approx(0.6)),
    }
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["runs"]


def test_seeds_are_points_and_their_mean_is_on_the_line():
    kl, reward = torch.tensor([[0.01, 0.07], [1.0, 1.0]]), torch.tensor([[0.1, 0.3], [0.8, 1.0]])
    _, given = plt.subplots()
    axes = plot_frontier(kl, reward.requires_grad_(), ax=given)
    assert axes is given
    joined, points = axes.lines
    assert_close(drawn(joined), [[0.2, 1.0], [0.2, 0.9]], rtol=1e-6, atol=0)
    expected = [[0.1, math.sqrt(0.07), 1.0, 1.0], [0.1, 0.3, 0.8, 1.0]]
    assert_close(drawn(points), expected, rtol=1e-6, atol=0)
    assert axes.get_legend() is None


def test_no_runs_are_an_empty_picture():
    assert [drawn(line) for line in plot_frontier([], []).lines] == [[[], []]] * 2


def test_the_exact_frontier_is_that_of_the_optima():
    """Of a coin with the reward of heads: KL q log 2q + (1 - q) log 2(1 - q), reward q."""

    def coin(tokens):
        return torch.zeros(len(tokens), 2)

    known = Enumeration(coin, lambda texts: texts[:, -1].double(), torch.tensor([[0]]), 1)
    axes = plot_frontier([0.1], [0.6], optima=[known.optimum(coeff) for coeff in (0.5, 2.0, 1.0)])
    shares = [1 / (1 + math.exp(-1 / coeff)) for coeff in (2.0, 1.0, 0.5)]
    kls = [q * math.log(2 * q) + (1 - q) * math.log(2 - 2 * q) for q in shares]
    assert_close(drawn(axes.lines[0]), [list(map(math.sqrt, kls)), shares])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["exact frontier"]


def test_all_that_is_drawn_on_the_same_axes_is_seen():
    kl = torch.tensor([-1e-17])  # by rounding
    reference = PolicyValues(math.inf, 0.0, kl_per_position=kl, token_probs=torch.ones(1, 1, 2) / 2)
    axes = plot_frontier([0.1], [0.6], optima=[reference])
    assert plot_frontier([4.0], [0.9], ax=axes) is axes
    left, right = axes.get_xlim()
    assert left == 0
    assert right >= 2


@pytest.mark.parametrize(
    ("kl", "reward", "names", "message"),
    [
        ([0.1], [0.1, 0.2], None, r"same shape, .*got \(1,\) and \(2,\): pass one number"),
        (0.1, 0.1, None, r"same shape, .*got \(\) and \(\)"),
        ([0.1, -0.01], [0.1, 0.2], None, "at least 0.* from -0.01 to 0.1 and .*: a mean of few k1"),
        ([0.1], [math.nan], None, "all numbers finite, .* rewards from nan to nan"),
        ([math.inf], [0.1], None, "all numbers finite"),
        ([0.1, 0.2], [0.1, 0.2], ["a"], r"one text for each of 2 runs, got \['a'\]"),
    ],
)
def test_what_cannot_be_drawn_is_refused(kl, reward, names, message):
    with pytest.raises(ValueError, match=message):
        plot_frontier(kl, reward, names=names)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="plot_frontier needs matplotlib: `pip install"):
        plot_frontier([0.1], [0.2])
