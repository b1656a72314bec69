"""Memory and time of scoring and of losses over a large vocabulary, in tiles and whole.

    python benchmarks/large_vocabulary.py --head-chunk 64
    python benchmarks/large_vocabulary.py --vocab 151936 --only sequence --ways tiles
    python benchmarks/large_vocabulary.py --device cuda

Each case has a process of its own, with one thread. Memory is the growth of what is resident
(Linux), or on a GPU of what PyTorch has allocated, from before the call to its peak, in MB and in
bytes per logit, a logit being one position times one entry of the vocabulary. Seconds are of the
processor, or on a GPU of the clock, the least of three calls. The rival is by hand: `log_softmax`
with `gather`, of all logits or in a loop over tiles.
"""

from __future__ import annotations

import copy
import ctypes
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bench_report import arg, parse_args
from tensordict import TensorDict
from torchrl.objectives import ClipPPOLoss

from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.language import GPT, CausalLMActor, ResponseKLTransform, as_steps

CASES = ("k1", "exact", "sequence", "k2", "ppo", "by hand")
PROMPT = 4


@dataclass
class Args:
    """What can be set from the command line."""

    vocab: int = arg(32_768, "Entries of the vocabulary.")
    responses: int = arg(8, "Responses.")
    tokens: int = arg(128, "Tokens of a response.")
    width: int = arg(64, "Width of the model, a GPT with two layers.")
    head_chunk: int = arg(64, "Positions of a tile.")
    device: str = arg("cpu", "Where it runs.", choices=("cpu", "cuda"))
    only: tuple[str, ...] = arg(CASES, "Which calls.", choices=CASES)
    ways: tuple[str, ...] = arg(("whole", "tiles"), "Which ways.", choices=("whole", "tiles"))


def make_batch(args: Args, responses: int) -> TensorDict:
    """Random responses, as TorchRL's LLM API has them."""
    full = torch.randint(args.vocab, (responses, PROMPT + args.tokens))
    batch = TensorDict(tokens={"full": full, "prompt": full[:, :PROMPT]}, batch_size=responses)
    batch["next"] = TensorDict(reward=torch.zeros(responses, 1), batch_size=responses)
    return batch.to(args.device)


def make_steps(args: Args, batch: TensorDict) -> TensorDict:
    """The same, one step per token, with log-probs."""
    steps = as_steps(batch, pad_token=None)
    drawn = torch.zeros_like(steps["action"], dtype=torch.float32)
    steps["action_log_prob"] = drawn - math.log(args.vocab)  # about what fresh weights say
    return steps


def make_call(args: Args, case: str, chunk: int | None) -> Callable[[TensorDict], Any]:
    """What is measured, a function of a batch."""
    sizes: dict[str, int] = {"n_layer": 2, "n_head": 4, "n_embd": args.width}
    model = GPT(args.vocab, PROMPT + args.tokens, **sizes).eval().to(args.device)
    other = copy.deepcopy(model)
    actor, reference = (CausalLMActor(each, head_chunk=chunk) for each in (model, other))
    if case == "k1":
        stack = KLConstrainedTransform(actor, 0.1, reference=reference)
        return lambda batch: stack(make_steps(args, batch))
    if case == "exact":
        options: Any = {"estimator": "exact", "head_chunk": chunk}
        return ResponseKLTransform(model, 0.1, reference=other, **options)
    loss: Any = None
    if case == "ppo":
        loss = ClipPPOLoss(actor, None)  # type: ignore[arg-type]
    elif case != "by hand":
        loss = KLPenaltyLoss(actor, 0.1, reference=reference, gradient=case)  # type: ignore[arg-type]

    def train(batch: TensorDict) -> None:
        steps = make_steps(args, batch)
        steps["advantage"] = torch.randn_like(steps["action_log_prob"]).unsqueeze(-1)
        found = loss(steps)
        total: Any = sum(value for key, value in found.items() if key.startswith("loss_"))
        total.backward()
        model.zero_grad()

    @torch.no_grad()
    def by_hand(batch: TensorDict) -> torch.Tensor:
        texts = batch["tokens", "full"]
        places = torch.arange(PROMPT - 1, texts.shape[1] - 1, device=texts.device)
        hidden = model.hidden(texts[:, :-1], None, places).flatten(0, 1)
        size, actions = chunk or len(hidden), texts[:, PROMPT:].reshape(-1, 1)
        parts = zip(hidden.split(size), actions.split(size), strict=True)
        return torch.cat([model.head(h).log_softmax(-1).gather(-1, a) for h, a in parts])

    return by_hand if case == "by hand" else train


def resident(name: str) -> int:
    """Bytes: VmRSS, those now, or VmHWM, the most since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def seconds_now(on_gpu: bool) -> float:
    """Of the processor, or of the clock once the GPU has done all its work."""
    if not on_gpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(args: Args, case: str, chunk: int | None) -> tuple[float, float]:
    """The growth of memory in bytes, and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    call = make_call(args, case, chunk)
    call(make_batch(args, 1))
    batch = make_batch(args, args.responses)
    on_gpu, seconds = args.device == "cuda", []
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(batch)
        growth = torch.cuda.max_memory_allocated() - before
    else:
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        call(batch)
        growth = resident("VmHWM") - before
    for _ in range(3):
        start = seconds_now(on_gpu)
        call(batch)
        seconds.append(seconds_now(on_gpu) - start)
    return growth, min(seconds)


def main() -> None:
    """Measures and prints the table."""
    args = parse_args(Args, __doc__)
    n_logits = args.responses * args.tokens * args.vocab
    print("| call | way | MB | bytes per logit | seconds |\n|---|---|---|---|---|")
    for case in args.only:
        for way in args.ways:
            chunk = args.head_chunk if way == "tiles" else None
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                growth, seconds = pool.submit(measure, args, case, chunk).result()
            cells = f"{growth / 1e6:.0f} | {growth / n_logits:.2f} | {seconds:.2f}"
            print(f"| {case} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
