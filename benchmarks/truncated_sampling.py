"""A policy that is sampled with top-p: whose KL is held at the target?

PPO on the number of even digits, with a controller that is told the target alone. Responses are
sampled with `top_p`, and

    counted  the truncated policy is the policy: its log-probs, ratios and KL are used
    ignored  log-probs, ratios and KL are those of the whole policy, of all tokens

At the end the KL of the policy that sampled, the truncated one, to the whole reference is taken by
enumerating all responses to the prompts of training, next to what the controller was fed: the mean
of the last ten batches.

    python benchmarks/truncated_sampling.py

The KL of the truncated reference to the whole one, -log of the kept mass, is not 0: the target must
lie above it. A language model is trained first and kept in the folder `--out`.

The second table is about rounding: tokens are sampled with a cache and scored in one pass.
`rescued` are tokens that would not have been kept without the record, and `1` is whether all ratios
are 1 after `rescore`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_report import Result, arg, parse_args, quick_flag
from digit_ppo import count_even, language_model, next_token, train
from torchrl.modules import set_recurrent_mode
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_kl import PlannedKLController, rescore
from torchrl_kl.envs import DigitLanguage
from torchrl_kl.exact import Enumeration
from torchrl_kl.language import GPT, CausalLMActor, sample_responses

VARIANTS = {"counted": False, "ignored": True}


class Watched(PlannedKLController):
    """Remembers what it was fed."""

    def __init__(self, target: float):
        super().__init__(target)
        self.kls: list[float] = []

    def next_coeff(self, kl: float, n_steps: int) -> float:
        """The next coefficient."""
        self.kls.append(kl)
        return super().next_coeff(kl, n_steps)


@dataclass
class Args:
    """What can be set from the command line."""

    out: str = arg("runs/truncated_sampling", "Folder of the language model.")
    top_p: float = arg(0.9, "Probability of the tokens that are kept.")
    target: float = arg(1.0, "Target of the controller, nats per response.")
    seeds: tuple[int, ...] = arg((0, 1, 2), "One run of each variant per seed.", quick=(0,))
    batches: int = arg(80, "Batches of responses per run.", quick=2)
    responses: int = arg(512, "Responses per batch.", quick=32)
    lr: float = arg(3e-4, "Initial learning rate of the policy.")
    lm_updates: int = arg(1200, "Updates of the language model.", quick=20)
    prompts: int = arg(64, "Prompts of training and of the exact KL.", quick=1)
    tokens: int = arg(10_240, "Tokens for each row of the second table.", quick=64)
    quick: bool = quick_flag()


def truncated(gpt: GPT, top_p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A GPT that is sampled with top-p, as a model of the exact values."""
    whole = next_token(gpt)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        values, ids = whole(tokens).sort(descending=True)
        probs = values.softmax(-1)
        cut = probs.cumsum(-1) - probs >= top_p  # what is more likely is enough
        return torch.empty_like(values).scatter(-1, ids, values.masked_fill(cut, -torch.inf))

    return logits


def results(args: Args) -> list[Result]:
    """Prints one row per run, and returns the exact KLs."""
    torch.set_num_threads(1)
    language = DigitLanguage()
    reference = language_model(language, Path(args.out) / "language_model", args.lm_updates)
    prompts = language.sample_prompts(args.prompts, generator=torch.Generator().manual_seed(0))
    contexts = torch.cat([prompts, torch.full((args.prompts, 1), language.separator)], 1)
    exact = Enumeration(next_token(reference), count_even, contexts, language.response_length)
    at_start = exact.values(truncated(reference, args.top_p), 0.0).kl
    print(f"KL of the truncated reference: {at_start:.4f} nats; the target: {args.target}")
    print("| truncation is | seed | KL, fed | exact KL | / target | E[reward] | seconds |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for seed in args.seeds:
        for name, whole in VARIANTS.items():
            torch.manual_seed(seed)
            began, controller = time.perf_counter(), Watched(args.target)
            policy = train(
                reference,
                language,
                count_even,
                controller,
                batches=args.batches,
                responses=args.responses,
                top_p=args.top_p,
                whole=whole,
                prompts=prompts,
                lr=args.lr,
            )
            seconds = time.perf_counter() - began
            own = exact.values(truncated(policy, args.top_p), controller.coeff)
            last = controller.kls[-10:]
            fed = sum(last) / len(last)
            print(
                f"| {name} | {seed} | {fed:.3f} | {own.kl:.3f} | {own.kl / args.target:.3f} "
                f"| {own.reward:.3f} | {seconds:.0f} |",
                flush=True,
            )
            question = f"exact KL with top_p {args.top_p}, which is {name}, seed {seed}"
            found.append(Result(question, own.kl, args.target, own.kl / args.target, unit="nats"))
    return found


def sharp_llama() -> LlamaForCausalLM:
    """A Llama of four layers with random weights, and an output layer that is sure of something."""
    torch.manual_seed(0)
    size: Any = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_hidden_layers=4, **size))
    with torch.no_grad():
        model.lm_head.weight *= 15
    return model.eval()


def passes(args: Args) -> None:
    """Prints how far cached generation and one pass over its texts are from each other."""
    language = DigitLanguage()
    gpt = language_model(language, Path(args.out) / "language_model", args.lm_updates)
    print("| model | dtype | log-ratio, at most | outside 0.9 to 1.1 | sampler_kl | rescued | 1 |")
    print("|---|---|---|---|---|---|---|")
    rows: list[Any] = [(gpt, language.vocab_size, 4), (sharp_llama(), 2048, 32)]
    for model, size, n_tokens in rows:
        for dtype in (torch.float32, torch.bfloat16):
            model, name = copy.deepcopy(model).to(dtype), type(model).__name__
            actor = CausalLMActor(model, top_p=args.top_p, min_p=0.05, return_logits=False)
            torch.manual_seed(0)
            prompts = torch.randint(size, (args.tokens // n_tokens, 5))
            prompts[:, -1] = language.separator  # to a Llama a token like others
            batch = rescore(actor, sample_responses(actor, prompts, n_tokens, pad_token=0))
            ratio = (batch["action_log_prob"] - batch["sampler_log_prob"]).double()
            far = ((ratio.exp() - 1).abs() > 0.1).double().mean().item()
            kl = batch["next", "sampler_kl"].double().sum(1)
            with torch.no_grad(), set_recurrent_mode(True):
                again = actor.get_dist(batch.copy()).log_prob(batch["action"])
            first = bool((again == batch["action_log_prob"]).all())
            rescore(actor, batch.exclude("kept"))
            print(
                f"| {name} | {dtype} | {ratio.abs().max():.1e} | {far:.2%} | {kl.mean():.1e} ± "
                f"{kl.std() / math.sqrt(len(kl)):.1e} | {int(actor.n_rescued)} | {first} |"
            )


def main() -> None:
    """Prints one row per run, and the second table."""
    args = parse_args(Args, __doc__)
    results(args)
    passes(args)


if __name__ == "__main__":
    main()
