"""Film reviews, a language model of them, and two rewards, for the example movie_reviews.py.

Both rewards are the log-odds of logistic regressions, of different reviews and different features.
The proxy counts single words, as often as they are written. The gold reward looks at pairs of
neighbouring words, each once; pairs that are repeated in a text, or that no review had, count too.
It tells passages of people who liked a film from others, and from words shuffled or repeated.
"""

from __future__ import annotations

import csv
import html
import importlib.metadata
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from running import Run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Passages = list[tuple[str, bool]]  # texts, and whether the film was liked
LEAST_WORDS, MOST_WORDS = 24, 30  # of a passage
NEW, AGAIN = "<new>", "<again>"  # a pair that is not in the vocabulary; one that is repeated


def read_reviews(file: str) -> Passages:
    """Texts and labels of a CSV file, that of `movie-reviews` if it is empty; each text once."""
    if not file:  # the package is not imported: that needs pandas
        package = importlib.metadata.distribution("movie-reviews")
        file = str(package.locate_file("movie_reviews/data/combined_movie_reviews.csv"))
    csv.field_size_limit(1 << 24)
    with open(file, newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return list({clean(row["text"]): float(row["label"]) > 0.5 for row in rows}.items())


def clean(text: str) -> str:
    """Without markup, and without the spaces that some texts have before punctuation."""
    text = re.sub(r"<[^>]*>", " ", html.unescape(text))
    return re.sub(r"\s+", " ", re.sub(r"\s+([.,!?;:'])", r"\1", text)).strip()


def passages(review: str) -> Iterator[str]:
    """Cuts a review into passages that begin with a sentence; too short ones are left out."""
    words: list[str] = []
    for sentence in re.split(r"(?<=[.!?])\s+", review):
        words += sentence.split()
        if len(words) >= LEAST_WORDS:
            yield " ".join(words[:MOST_WORDS])
            words = []


def split_reviews(file: str, heldout: float, seed: int) -> tuple[Passages, Passages, Passages]:
    """Passages of different reviews: for the proxy, for the gold reward, and held out."""
    reviews = read_reviews(file)
    reviews = random.Random(seed).sample(reviews, len(reviews))
    first = round(len(reviews) * heldout)
    middle = first + (len(reviews) - first) // 2

    def cut(part: Passages) -> Passages:
        return [(text, liked) for review, liked in part for text in passages(review)]

    return cut(reviews[first:middle]), cut(reviews[middle:]), cut(reviews[:first])


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of bytes, so that any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, **options)
    tokenizer.train_from_iterator(texts[:: max(len(texts) // 30_000, 1)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def encode(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    """The first `length` ids of each text that has so many, (N, length)."""
    ids = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=length)
    return torch.tensor([row for row in ids["input_ids"] if len(row) == length])


def make_language_model(vocab_size: int, layers: int, width: int, length: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": layers, "hidden_size": width}
    sizes |= {"intermediate_size": 4 * width, "max_position_embeddings": length}
    others: dict[str, Any] = {"num_attention_heads": max(width // 32, 1), "eos_token_id": None}
    others |= {"tie_word_embeddings": True, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **others))


def train_language_model(
    run: Run, model: Any, texts: Tensor, updates: int, batch: int, lr: float
) -> None:
    """Trains `model`, in place, to predict the tokens of texts (N, L).

    Muon, for the weights of the layers, needs half as many texts as Adam, for all others.
    """
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    known = {id(weight) for weight in (*tables, model.get_output_embeddings().weight)}
    layers = [p for p in model.parameters() if p.ndim == 2 and id(p) not in known]
    others = [p for p in model.parameters() if p.ndim != 2 or id(p) in known]
    muon = torch.optim.Muon(layers, lr=4 * lr, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), fused=True)
    cycle = {"total_steps": updates, "pct_start": 0.1, "cycle_momentum": False}
    schedules = [OneCycleLR(muon, 4 * lr, **cycle), OneCycleLR(adam, lr, **cycle)]
    model.train()
    for step in run.steps(updates):
        ids = texts[torch.randint(len(texts), (batch,))]
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (muon, adam, *schedules):
            part.step()
        if step % 10 == 0:
            run.log(step, "loss {loss:.2f} nats per token", loss=loss.item())
    model.eval()


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"[a-z']+", text.lower())


def pairs(text: str) -> list[str]:
    """Its pairs of neighbouring words or marks, each once; `AGAIN` for each repetition."""
    seen: set[str] = set()
    features = []
    for pair in map(" ".join, pairwise(re.findall(r"[a-z']+|[.,!?]", text.lower()))):
        features.append(AGAIN if pair in seen else pair)
        seen.add(pair)
    return features


class LinearReward(nn.Module):
    """The sum of the weights of a text's features, minus `mean`, divided by `std`.

    Features that are not in the vocabulary count as `NEW` if that is.
    """

    def __init__(self, features: Callable[[str], list[str]], vocabulary: Sequence[str]):
        super().__init__()
        self.features, self.mean, self.std = features, 0.0, 1.0
        self.index = {feature: i for i, feature in enumerate(vocabulary)}
        self.weights = nn.EmbeddingBag(len(vocabulary), 1, mode="sum")
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.weights.weight)

    def lookup(self, text: str) -> list[int]:
        """The indices of the features of a text."""
        found = (self.index.get(f, self.index.get(NEW)) for f in self.features(text))
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

    def normalise(self, texts: Sequence[str]) -> None:
        """Makes the rewards of these texts have mean 0 and standard deviation 1."""
        rewards = self(texts)
        self.mean, self.std = rewards.mean().item(), rewards.std().item()


def corrupt(text: str, chance: random.Random) -> str:
    """The words of a text in another order, or some of them again and again."""
    units = text.split()
    if chance.random() < 0.5:
        return " ".join(chance.sample(units, len(units)))
    start, length = chance.randrange(len(units) // 2), chance.randint(1, 3)
    n_words = chance.randint(6, len(units))
    repeated = (units[start : start + length] * n_words)[:n_words]
    return " ".join((units[:start] + repeated + units[start:])[: len(units)])


def fit_proxy(data: Passages, epochs: int, least: int = 10) -> LinearReward:
    """Liked or not, from single words that at least `least` passages have."""
    counts = Counter(word for text, _ in data for word in set(words(text)))
    reward = LinearReward(words, [word for word, n in counts.items() if n >= least])
    return fit(reward, data, epochs)


def fit_gold(data: Passages, epochs: int, seed: int, least: int = 3) -> LinearReward:
    """Liked and written by a person, from pairs of words that at least `least` passages have."""
    chance = random.Random(seed)
    bad = [(corrupt(text, chance), False) for text, _ in data if chance.random() < 0.5]
    counts = Counter(pair for text, _ in data for pair in set(pairs(text)))
    known = [pair for pair, n in counts.items() if n >= least and pair != AGAIN]
    return fit(LinearReward(pairs, [NEW, AGAIN, *known]), data + bad, epochs)


def fit(reward: LinearReward, data: Passages, epochs: int, batch: int = 256) -> LinearReward:
    """Maximum likelihood with a Gaussian prior on the weights, by Adam."""
    rows = [reward.lookup(text) for text, _ in data]
    targets = torch.tensor([liked for _, liked in data]).float()
    optimizer = torch.optim.Adam(reward.parameters(), lr=0.02)
    schedule = OneCycleLR(optimizer, 0.02, total_steps=epochs * (len(rows) // batch + 1))
    for _ in range(epochs):
        for chosen in torch.randperm(len(rows)).split(batch):
            log_odds = reward.log_odds([rows[i] for i in chosen.tolist()])
            prior = 1e-5 * reward.weights.weight.square().sum()
            loss = binary_cross_entropy_with_logits(log_odds, targets[chosen]) + prior
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return reward.requires_grad_(False)


def accuracy(reward: LinearReward, data: Passages) -> float:
    """How often the more likely label is right, for passages as they were written."""
    rewards = reward([text for text, _ in data])
    labels = torch.tensor([liked for _, liked in data])
    # The median, not 0: the gold reward was fitted on texts of which most are not good ones.
    return ((rewards > rewards.median()) == labels).float().mean().item()
