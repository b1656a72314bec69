"""The two rewards of the example movie_reviews.py: a proxy that is optimised, and a gold reward.

Both are logistic regressions on features of a text, fitted on different reviews, and both return
log-odds. They have no feature in common:

- The proxy counts single words. A word that is written twice counts twice.
- The gold reward looks at pairs of neighbouring words. It is fitted to tell passages of people who
  liked a film from those of people who did not, and from passages whose words were shuffled or
  repeated. A pair counts once; pairs that are repeated in a text, or that no review had, are
  features too, and texts that have many of them get a low reward.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from movie_reviews_text import Passage
from running import replacing
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

NEW, AGAIN = "<new>", "<again>"  # a pair that is not in the vocabulary; one that is repeated


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def pairs(text: str) -> list[str]:
    """Its pairs of neighbouring words or marks, each once; `AGAIN` for each repetition."""
    units = re.findall(r"[a-z']+|[.,!?]", text.lower())
    seen: set[str] = set()
    features = []
    for left, right in pairwise(units):
        pair = f"{left} {right}"
        features.append(AGAIN if pair in seen else pair)
        seen.add(pair)
    return features


FEATURES: dict[str, Callable[[str], list[str]]] = {"words": words, "pairs": pairs}


class LinearReward(nn.Module):
    """A logistic regression: the sum of the weights of a text's features, (log-odds - mean) / std.

    Args:
        features: "words" or "pairs".
        vocabulary: the features that have a weight. Others count as `NEW` if that has one.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, features: str, vocabulary: Sequence[str]):
        super().__init__()
        self.features, self.vocabulary = features, list(vocabulary)
        self.index = {feature: i for i, feature in enumerate(self.vocabulary)}
        self.weights = nn.EmbeddingBag(len(self.vocabulary), 1, mode="sum")
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        nn.init.zeros_(self.weights.weight)

    def lookup(self, text: str) -> list[int]:
        """The indices of the features of a text."""
        index, new = self.index, self.index.get(NEW)
        found = (index.get(feature, new) for feature in FEATURES[self.features](text))
        return [i for i in found if i is not None]

    def log_odds(self, rows: Sequence[list[int]]) -> Tensor:
        """Log-odds (N,) of the features of N texts."""
        lengths = torch.tensor([0, *(len(row) for row in rows)])
        flat = torch.tensor([i for row in rows for i in row], dtype=torch.long)
        return self.weights(flat, lengths.cumsum(0)[:-1])[:, 0] + self.bias

    @torch.no_grad()
    def forward(self, texts: Sequence[str]) -> Tensor:
        """Rewards (N,) of N texts."""
        return (self.log_odds([self.lookup(text) for text in texts]) - self.mean) / self.std

    @torch.no_grad()
    def normalise(self, texts: Sequence[str]) -> None:
        """Makes the rewards of these texts have mean 0 and standard deviation 1."""
        log_odds = self.log_odds([self.lookup(text) for text in texts])
        self.mean.copy_(log_odds.mean())
        self.std.copy_(log_odds.std())

    def save(self, file: Path) -> None:
        with replacing(file) as part:
            torch.save((self.features, self.vocabulary, self.state_dict()), part)

    @classmethod
    def load(cls, file: Path) -> LinearReward:
        features, vocabulary, state = torch.load(file)
        reward = cls(features, vocabulary)
        reward.load_state_dict(state)
        return reward.requires_grad_(False)


def corrupt(text: str, chance: random.Random) -> str:
    """The words of a text in another order, or some of them again and again."""
    units = text.split()
    if chance.random() < 0.5:
        return " ".join(chance.sample(units, len(units)))
    start, length = chance.randrange(len(units) // 2), chance.randint(1, 3)
    phrase = units[start : start + length]
    n_words = chance.randint(6, len(units))
    repeated = (phrase * n_words)[:n_words]
    return " ".join((units[:start] + repeated + units[start:])[: len(units)])


def fit_proxy(passages: list[Passage], epochs: int, least: int = 10) -> LinearReward:
    """Liked or not, from single words that at least `least` passages have."""
    counts = Counter(word for text, _ in passages for word in set(words(text)))
    reward = LinearReward("words", [word for word, n in counts.items() if n >= least])
    fit(reward, [text for text, _ in passages], [liked for _, liked in passages], epochs)
    return reward


def fit_gold(passages: list[Passage], epochs: int, seed: int, least: int = 3) -> LinearReward:
    """Liked and written by a person, from pairs of words that at least `least` passages have."""
    chance = random.Random(seed)
    corrupted = [corrupt(text, chance) for text, _ in passages if chance.random() < 0.5]
    counts = Counter(pair for text, _ in passages for pair in set(pairs(text)))
    known = [pair for pair, n in counts.items() if n >= least and pair != AGAIN]
    reward = LinearReward("pairs", [NEW, AGAIN, *known])
    texts = [text for text, _ in passages] + corrupted
    fit(reward, texts, [liked for _, liked in passages] + [False] * len(corrupted), epochs)
    return reward


def fit(
    reward: LinearReward, texts: list[str], labels: list[bool], epochs: int, batch: int = 256
) -> None:
    """Maximum likelihood with a Gaussian prior on the weights, by Adam."""
    rows, targets = [reward.lookup(text) for text in texts], torch.tensor(labels).float()
    optimizer = torch.optim.Adam(reward.parameters(), lr=0.02)
    steps = epochs * (len(rows) // batch + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(rows)).split(batch):
            log_odds = reward.log_odds([rows[i] for i in chosen.tolist()])
            prior = 1e-5 * reward.weights.weight.square().sum()
            loss = binary_cross_entropy_with_logits(log_odds, targets[chosen]) + prior
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    reward.requires_grad_(False)


def accuracy(reward: LinearReward, passages: list[Passage]) -> float:
    """How often the more likely label is right, for passages as they were written."""
    log_odds = reward.log_odds([reward.lookup(text) for text, _ in passages])
    labels = torch.tensor([liked for _, liked in passages])
    # The median, not 0: the gold reward was fitted on texts of which most are not good ones.
    return ((log_odds > log_odds.median()) == labels).float().mean().item()
