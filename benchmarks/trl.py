"""Whole jobs of RL on a language model with KL control, against the trainers of TRL.

    pip install -e ".[trl]" && python benchmarks/trl.py
    python benchmarks/trl.py --vocab 4000 32000 --kl loss --shapes 16x128

With the KL in the reward, ours is `KLConstrainedTransform` with ClipPPOLoss, the rival RLOOTrainer;
with the KL in the loss, `KLPenaltyLoss(gradient="k2")` around ClipPPOLoss, and GRPOTrainer. Both
have the same Llama (4 layers, width 256), sizes of batches, rewards, coefficient and optimizer, and
learn from 16 responses at a time. `--check` compares their gradients on a batch of TRL's.
Seconds are of the processor, with one thread: medians over steps that both make in turns. MB are
the growth of resident memory (Linux) from construction to the peak. FLOPs are those that PyTorch
counts in a step, as a multiple of the floor: one generation, one pass of the reference and one with
gradients, each of whole texts. Ratios are TRL's figure divided by ours.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module, metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_report import Result, arg, parse_args, quick_flag, table
from large_vocabulary import resident
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.utils.flop_counter import FlopCounterMode
from torchrl.objectives import ClipPPOLoss

from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss, rescore
from torchrl_kl.language import CausalLMActor, as_steps, minibatches, sample_responses

HERE = str(Path(__file__).parent)
sys.path = [path for path in sys.path if path != HERE] + [HERE]  # so that `trl` is the library
COEFF, LR, MICRO_BATCH, PAD = 0.05, 1e-5, 16, 1
RIVALS = {"reward": "RLOO", "loss": "GRPO"}


SHAPES: dict[str, dict[str, int]] = {
    "32x32": {"responses": 32, "tokens": 32},
    "16x128": {"responses": 16, "tokens": 128},
    "prompts": {"responses": 16, "tokens": 128, "prompt": 512, "group": 8},
    "ends": {"responses": 64, "tokens": 128, "mean": 40},
}
BARS: dict[str, dict[str, tuple[float, float | None]]] = {  # least ratios of seconds and of MB
    "reward": {"32x32": (1.4, None), "16x128": (1.4, None), "prompts": (3.0, 2.5)},
    "loss": {"16x128": (1.25, 1.2), "prompts": (3.0, 2.5), "ends": (2.5, None)},
}


@dataclass
class Args:
    """What can be set from the command line."""

    vocab: tuple[int, ...] = arg((4000,), "Entries of the vocabulary.", quick=(168,))
    kl: tuple[str, ...] = arg(tuple(RIVALS), "Where the KL is.", choices=tuple(RIVALS))
    shapes: tuple[str, ...] = arg(tuple(SHAPES), "Sizes.", quick=("16x128",), choices=[*SHAPES])
    steps: int = arg(5, "Timed steps of both, after one to warm up.", quick=1)
    check: bool = arg(False, "Compare the gradients of a batch, and nothing else.")
    quick: bool = quick_flag()


@dataclass(frozen=True)
class Job:
    """What both sides do, with a model that is saved in a folder."""

    folder: str
    kl: str
    vocab: int
    responses: int
    tokens: int
    prompt: int = 16
    group: int = 4
    mean: int = 0  # tokens of a response that ends at random; 0: none ends before `tokens`

    @property
    def eos(self) -> list[int]:
        """Tokens that end a response: random weights draw one of them every 42 tokens."""
        return list(range(self.vocab - self.vocab // 42, self.vocab)) if self.mean else []

    def save(self) -> None:
        """Saves the model, and a tokenizer whose words are ids."""
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 256, "intermediate_size": 688, "vocab_size": self.vocab}
        sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "bos_token_id": None}
        config = transformers.LlamaConfig(**sizes, eos_token_id=self.eos or None, pad_token_id=PAD)
        transformers.LlamaForCausalLM(config).save_pretrained(self.folder)
        ids = {f"<{i}>": i for i in range(self.vocab + 1)}  # the last one is never drawn
        words: Any = Tokenizer(models.WordLevel(ids, unk_token=f"<{self.vocab}>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        end = max(self.eos, default=self.vocab)
        special: Any = {"pad_token": f"<{PAD}>", "eos_token": f"<{end}>"}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
        tokenizer.save_pretrained(self.folder)

    def model(self) -> Any:
        """A new copy of the model."""
        return transformers.LlamaForCausalLM.from_pretrained(self.folder).eval()

    def prompts(self, n_steps: int) -> tuple[Tensor, ...]:
        """The prompts of each step, one for each group."""
        n_groups, draws = self.responses // self.group, torch.Generator().manual_seed(1)
        size, end = (n_steps * n_groups, self.prompt), self.vocab - len(self.eos)
        return torch.randint(PAD + 1, end, size, generator=draws).split(n_groups)

    def rewards(self, texts: Tensor) -> Tensor:
        """The share of even tokens in the responses of whole texts."""
        responses = texts[:, self.prompt :].tolist()
        return torch.tensor(share_of_even([[i for i in ids if i != PAD] for ids in responses]))

    def floor(self) -> int:
        """FLOPs that a step needs, of plain PyTorch."""
        counter, n_tokens = counting(), self.mean or self.tokens
        texts = torch.zeros(self.responses, self.prompt + n_tokens - 1, dtype=torch.long)
        with torch.no_grad(), counter:
            self.model()(texts, logits_to_keep=n_tokens)
        return 5 * counter.get_total_flops()  # gradients take as much as two passes


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The rewards of responses."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def counting() -> Any:
    """A counter of FLOPs, without the hooks of modules, which change how these are called."""
    counter, tracker = FlopCounterMode(display=False), nullcontext()
    vars(tracker)["parents"] = {"Global"}
    vars(counter)["mod_tracker"] = tracker
    return counter


class Ours:
    """A job with this package."""

    def __init__(self, job: Job, n_steps: int):
        self.job, self.n_steps, self.model = job, n_steps, job.model()
        self.actor = CausalLMActor(self.model, return_logits=False)
        ppo: Any = ClipPPOLoss(self.actor, None, entropy_bonus=False)  # type: ignore[arg-type]
        if job.kl == "reward":
            self.stack, self.loss = KLConstrainedTransform(self.actor, COEFF), ppo
        else:
            self.loss = KLPenaltyLoss(self.actor, COEFF, gradient="k2", loss=ppo)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def run(self) -> None:
        """Makes all steps."""
        for prompts in self.job.prompts(self.n_steps):
            self.step(prompts)

    def step(self, prompts: Tensor) -> None:
        """Samples, scores and learns."""
        job, prompts = self.job, prompts.repeat_interleave(self.job.group, 0)
        options: Any = {"eos_token": job.eos or None, "reward_fn": job.rewards}
        batch: Any = sample_responses(self.actor, prompts, job.tokens, pad_token=PAD, **options)
        batch = self.stack(batch) if job.kl == "reward" else batch
        rewards = batch["next", "reward"].sum(1).view(-1, job.group)
        gain = rewards - rewards.mean(1, keepdim=True)
        if job.kl == "loss":
            gain = gain / (rewards.std(1, keepdim=True) + 1e-4)
        else:  # the baseline is the mean of the others
            gain = gain * (job.group / (job.group - 1))
        self.add_gradients(batch, gain.flatten())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def add_gradients(self, batch: Any, advantage: Tensor) -> None:
        """Those of the mean over all tokens of a batch."""
        batch["advantage"] = advantage.view(-1, 1, 1).expand(*batch.shape, 1)
        n_tokens = batch["collector", "mask"].sum()
        for part in minibatches(batch, MICRO_BATCH * batch["tokens"].shape[-1]):
            losses = self.loss(part)
            total = sum(losses[key] for key in losses.keys() if key.startswith("loss_"))
            (total * (part["collector", "mask"].sum() / n_tokens)).backward()


class Theirs:
    """The same job with TRL."""

    def __init__(self, job: Job, n_steps: int, **options: Any):
        trl, micro_batch = import_module("trl"), min(MICRO_BATCH, job.responses)
        options |= {"per_device_train_batch_size": micro_batch, "num_generations": job.group}
        options |= {"gradient_accumulation_steps": job.responses // micro_batch, "beta": COEFF}
        options |= {"max_steps": n_steps, "learning_rate": LR, "lr_scheduler_type": "constant"}
        options |= {"optim": "adamw_torch_fused", "bf16": False, "gradient_checkpointing": False}
        options |= {"use_cpu": True, "report_to": "none", "save_strategy": "no"}
        options |= {"logging_strategy": "no", "disable_tqdm": True, "output_dir": job.folder}
        prompts = torch.cat(job.prompts(n_steps)).tolist()
        texts = {"prompt": [" ".join(f"<{i}>" for i in prompt) for prompt in prompts]}
        config = getattr(trl, f"{RIVALS[job.kl]}Config")
        self.trainer: Any = getattr(trl, f"{RIVALS[job.kl]}Trainer")(
            model=job.model(),
            reward_funcs=share_of_even,
            args=config(max_completion_length=job.tokens, **options),
            train_dataset=import_module("datasets").Dataset.from_dict(texts),
            processing_class=transformers.AutoTokenizer.from_pretrained(job.folder),
        )
        self.trainer.remove_callback(transformers.PrinterCallback)

    def run(self, **calls: Any) -> None:
        """Makes all steps; calls are made at these events of a callback."""
        callback = transformers.TrainerCallback()
        for event, call in calls.items():
            setattr(callback, event, lambda *_, call=call, **__: call())
        self.trainer.add_callback(callback)
        self.trainer.train()


def time_turns(job: Job, n_steps: int) -> list[float]:
    """Median seconds of a step, theirs and ours, which are made in turns."""
    torch.set_num_threads(1)
    ours, theirs, prompts = Ours(job, 0), Theirs(job, n_steps + 1), iter(job.prompts(n_steps + 1))
    clock: list[float] = []  # before a step of theirs, after it, and after one of ours

    def end() -> None:
        clock.append(time.process_time())
        ours.step(next(prompts))
        clock.append(time.process_time())

    theirs.run(on_step_begin=lambda: clock.append(time.process_time()), on_step_end=end)
    seconds = torch.tensor(clock, dtype=torch.float64).view(-1, 3).diff(dim=1)
    return seconds[1:].median(0).values.tolist()


def measure(side: type[Ours] | type[Theirs], job: Job, count: bool) -> float:
    """The FLOPs of a step, after one to warm up, or the growth of memory over two, MB."""
    torch.set_num_threads(1)
    contestant, counter = side(job, 1 if count else 2), counting()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    contestant.run()
    if not count:
        return (resident("VmHWM") - before) / 1e6
    with counter:
        contestant.run()
    return counter.get_total_flops()


def gradient_error(job: Job) -> float:
    """The largest difference of gradients on a batch of TRL's, divided by the largest gradient."""
    ours, theirs = Ours(job, 0), Theirs(job, 1, max_grad_norm=0.0)
    seen, errors, compute_loss = [], [], theirs.trainer.compute_loss

    def watched(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    def compare() -> None:
        (inputs,) = seen
        prompts, mask = inputs["prompt_ids"], inputs["completion_mask"].bool()
        texts: Any = {"full": torch.cat([prompts, inputs["completion_ids"]], 1), "prompt": prompts}
        masks = {"all_attention_mask": torch.cat([inputs["prompt_mask"].bool(), mask], 1)}
        data = TensorDict({"tokens": texts, "masks": masks}, batch_size=len(mask))
        batch = rescore(ours.actor, as_steps(data, pad_token=PAD))
        ours.add_gradients(batch, inputs["advantages"])
        both = (ours.model, theirs.trainer.model)
        own, other = (parameters_to_vector(p.grad for p in each.parameters()) for each in both)
        if job.kl == "reward":  # RLOO adds up the tokens of a response
            own = own * (mask.sum() / len(mask))
        errors.append((own - other).abs().max() / other.abs().max())

    theirs.trainer.compute_loss = watched
    theirs.run(on_pre_optimizer_step=compare)
    return errors[0].item()


def results_of(args: Args, kl: str, name: str, vocab: int) -> list[Result]:
    """The answers about one job; each measurement has a process of its own."""
    sizes, bars = dict(SHAPES[name]), BARS[kl].get(name, (None, None))
    if args.quick:
        sizes, bars = {**sizes, "responses": 8, "tokens": 8}, (None, None)
    sizes |= {"responses": MICRO_BATCH} if args.check else {}
    options: Any = {"mp_context": get_context("spawn"), "max_tasks_per_child": 1}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, **options) as pool:
        job = Job(folder, kl, vocab, **sizes)
        job.save()
        size = f"{RIVALS[kl]}Trainer, V = {vocab}, {job.responses} x {job.tokens} tokens"
        size += f" (on average {job.mean})" if job.mean else ""
        size += f", prompts of {job.prompt}, groups of {job.group}"
        if args.check:
            error = pool.submit(gradient_error, job).result()
            return [Result.error(f"gradients, {size}", error, 1e-5, "")]
        sides, floor = (Ours, Theirs), job.floor()
        peak, their_peak = (pool.submit(measure, side, job, False).result() for side in sides)
        flops, their_flops = (pool.submit(measure, side, job, True).result() for side in sides)
        theirs, ours = pool.submit(time_turns, job, args.steps).result()
    return [
        Result.speed(f"seconds, {size}", ours, theirs, bars[0]),
        Result(f"peak, {size}", peak, their_peak, their_peak / peak, bars[1], unit="MB"),
        Result(
            f"FLOPs, {size}", flops / floor, their_flops / floor, their_flops / flops, unit="floor"
        ),
    ]


def main() -> None:
    """Measures and prints the table."""
    args = parse_args(Args, __doc__)
    names = ("torch", "torchrl", "transformers", "trl", "accelerate")
    print(", ".join(f"{name} {metadata.version(name)}" for name in names), flush=True)
    jobs = [(kl, name, vocab) for vocab in args.vocab for kl in args.kl for name in args.shapes]
    print(table([result for job in jobs for result in results_of(args, *job)]))


if __name__ == "__main__":
    main()
