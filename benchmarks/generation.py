"""How fast responses are sampled, scored and trained on, compared with the same work by hand.

Ours are the Collector with `KLConstrainedTransform` as its `postproc`, and `sample_responses`
followed by the stack. The rivals are in rivals.py: plain PyTorch with a cache of keys and values,
`generate` of transformers, and a hand-written update of PPO. All of them run in turns, in one run,
with one thread; every figure is a median. A ratio of speeds is the rival's time divided by ours.

    python benchmarks/generation.py
    python benchmarks/generation.py --parts exactness ppo
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_report import Result, arg, parse_args, quick_flag, race, table
from ours import COEFF, Job, gpt_of
from rivals import (
    HandWrittenPPO,
    PlainGPT,
    Responses,
    finished_texts,
    generate_and_score,
    llama,
    log_prob_at,
    sample_and_score,
    tiny_models,
)
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, step_mdp
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl.envs import DigitLanguage
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic

CLIP, ENTROPY, VALUE = 0.2, 0.01, 1.0  # of both updates of PPO


@dataclass
class Args:
    """What can be set from the command line."""

    parts: tuple[str, ...] = arg(
        ("digits", "transformers", "ppo", "growth", "env", "exactness", "frames"),
        "Which questions to answer.",
        choices=["digits", "transformers", "ppo", "growth", "env", "exactness", "frames"],
    )
    seconds: float = arg(6.0, "Seconds for the turns of each comparison.", quick=0.0)
    least: int = arg(5, "The least turns of each comparison.", quick=1)
    shrink: int = arg(1, "Divides the numbers of texts and tokens.", quick=8)
    seed: int = arg(0, "Seed of weights, prompts and responses.")
    quick: bool = quick_flag()

    def texts(self, n: int) -> int:
        """A number of texts at the chosen size."""
        return max(4, n // self.shrink)

    def tokens(self, n: int) -> int:
        """A length of responses at the chosen size."""
        return max(min(4, n), n // self.shrink)

    def race(self, **contestants: Callable[[], Any]) -> dict[str, float]:
        """Median seconds of each contestant."""
        runs = {name: _quietly(run) for name, run in contestants.items()}
        return race(runs, self.seconds, self.least)


def _quietly(run: Callable[[], Any]) -> Callable[[], float | None]:
    """A contestant whose batch is not taken for a time of its own."""

    def call() -> float | None:
        own = run()
        return own if isinstance(own, float) else None

    return call


def digit_results(args: Args) -> list[Result]:
    """Collector and sample_responses, both with the stack, against the sampler by hand."""
    found = []
    for n_texts, n_tokens, collector_bar, sampler_bar in (
        (64, 4, 0.60, 0.85),
        (1024, 4, 0.80, 0.9),
        (64, 64, 0.60, 0.9),
        (1024, 64, 0.85, None),
    ):
        job = Job.of_gpt(args.texts(n_texts), args.tokens(n_tokens))
        seconds = args.race(**_contestants(job, by_hand_of_gpt(job), sampler_bar is not None))
        size, rival = f"{job.n_texts} x {job.n_tokens} tokens", seconds["rival"]
        name = "stack against sampler + reference pass by hand"
        found.append(
            Result.speed(f"Collector + {name}, {size}", seconds["collector"], rival, collector_bar)
        )
        if "sampler" in seconds:
            name = f"sample_responses + {name}, {size}"
            found.append(Result.speed(name, seconds["sampler"], rival, sampler_bar))
    return found


def by_hand_of_gpt(job: Job) -> Callable[[], Any]:
    """The same batch by hand."""
    policy, reference = PlainGPT(job.policy), PlainGPT(job.reference)
    reward_fn = job.language.preference
    return lambda: sample_and_score(
        policy, reference, job.prompts(), job.n_tokens, reward_fn, COEFF
    )


def _contestants(job: Job, by_hand: Callable[[], Any], sampler: bool) -> dict[str, Callable]:
    batches, stack = job.collected(stack=job.stack()), job.stack()
    contestants = {"rival": by_hand, "collector": lambda: next(batches)}
    if sampler:
        contestants["sampler"] = torch.no_grad()(lambda: stack(job.sampled()))
    return contestants


def transformers_results(args: Args) -> list[Result]:
    """A Llama of 3.4 million parameters against `generate` of transformers."""
    language = DigitLanguage(
        vocab_size=3999, prompt_length=16, response_length=args.tokens(64), window=4
    )
    job = Job(language, llama(4000), llama(4000), args.texts(16))

    def by_hand() -> Any:
        prompts, reward_fn = job.prompts(), language.preference
        return generate_and_score(
            job.policy, job.reference, prompts, job.n_tokens, reward_fn, COEFF
        )

    seconds = args.race(**_contestants(job, by_hand, True))
    rival, size = seconds["rival"], f"{job.n_texts} x {job.n_tokens} tokens"
    name = f"stack against generate + reference pass, Llama, {size}"
    return [
        Result.speed(f"sample_responses + {name}", seconds["sampler"], rival, 0.9),
        Result.speed(f"Collector + {name}", seconds["collector"], rival, 0.5),
    ]


def ppo_results(args: Args) -> list[Result]:
    """An update with ClipPPOLoss against one by hand."""
    found = []
    for n_texts, n_tokens in ((1024, 4), (64, 64)):
        job = Job.of_gpt(args.texts(n_texts), args.tokens(n_tokens))
        critic = critic_gpt(job.language)
        batch, loss = ppo_batch(job, critic)
        by_hand = HandWrittenPPO(job.policy, critic, CLIP, ENTROPY, VALUE)
        responses = Responses.of(batch)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-4, fused=True)

        def update(batch=batch, loss=loss, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            total_loss(loss, batch).backward()
            optimizer.step()

        def update_by_hand(by_hand=by_hand, responses=responses) -> None:
            by_hand.update(responses)

        seconds = args.race(ours=update, rival=update_by_hand)
        question = f"PPO update against one by hand, [{job.n_texts}, {job.n_tokens}]"
        found.append(Result.speed(question, seconds["ours"], seconds["rival"], 0.85))
    return found


def critic_gpt(language: DigitLanguage) -> GPT:
    """The critic's GPT, which also reads finished texts."""
    return GPT(language.n_tokens, language.text_length, n_out=1)


def ppo_batch(job: Job, critic: GPT) -> tuple[TensorDictBase, ClipPPOLoss]:
    """A collected batch [N, T] with advantages, and the loss that is computed on it."""
    value = CausalLMCritic(critic)
    batch = next(job.collected(stack=job.stack())).clone()
    gae = GAE(gamma=1.0, lmbda=1.0, value_network=value, deactivate_vmap=True, shifted=False)
    with torch.no_grad(), set_recurrent_mode(True):
        gae(batch)
    options: dict[str, Any] = {"clip_epsilon": CLIP, "entropy_coeff": ENTROPY}
    options |= {"critic_coeff": VALUE, "loss_critic_type": "l2"}
    return batch, ClipPPOLoss(job.actor, value, **options)


def total_loss(loss: ClipPPOLoss, batch: TensorDictBase) -> torch.Tensor:
    """The sum of the losses."""
    losses = loss(batch)
    return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]


def growth_results(args: Args) -> list[Result]:
    """The time per token of long responses as a multiple of that of short ones."""
    jobs = [Job.of_gpt(args.texts(64), args.tokens(n)) for n in (256, 16)]
    long, short = jobs
    batches = [job.collected(stack=job.stack()) for job in jobs]
    stacks = [job.stack() for job in jobs]
    runs: dict[str, Callable[[], Any]] = {
        "Collector, long": lambda: next(batches[0]),
        "Collector, short": lambda: next(batches[1]),
        "sample_responses, long": torch.no_grad()(lambda: stacks[0](long.sampled())),
        "sample_responses, short": torch.no_grad()(lambda: stacks[1](short.sampled())),
    }
    seconds = args.race(**runs)
    found = []
    for name in sorted({key.split(",")[0] for key in seconds}):
        question = f"{name} + stack, time per token at {long.n_tokens} tokens against "
        question += f"{short.n_tokens}, {long.n_texts} texts"
        own = seconds[f"{name}, long"] / long.n_tokens
        found.append(Result.cost(question, own, seconds[f"{name}, short"] / short.n_tokens, 1.6))
    return found


class Walk:
    """Writes responses in an env; only the steps of the env are timed, and a bare call by hand."""

    def __init__(self, job: Job, env: EnvBase, reference: Any = None):
        self.job, self.env, self.reference = job, env, reference

    @torch.no_grad()
    def __call__(self) -> float:
        """Seconds per step, over one response per row."""
        seconds, state = 0.0, self.env.reset()
        with set_exploration_type(ExplorationType.RANDOM):
            for _ in range(self.job.n_tokens):
                step = self.job.actor(state)
                read = step.select("tokens", "position")
                start = time.perf_counter()
                step = self.env.step(step)
                if self.reference is not None:
                    self.reference.get_dist(read).log_prob(step["action"])
                seconds += time.perf_counter() - start
                state = step_mdp(step)
        return seconds / self.job.n_tokens


def env_results(args: Args) -> list[Result]:
    """A step of the env with the stack against a step and a bare call of the reference."""
    job = Job.of_gpt(args.texts(64), 4)
    bare = CausalLMActor(job.reference).requires_grad_(False)
    seconds = args.race(ours=Walk(job, job.env(job.stack())), rival=Walk(job, job.env(), bare))
    question = f"env step with the stack against step + bare reference call, {job.n_texts} rows"
    return [Result.cost(question, seconds["ours"], seconds["rival"], 1.1)]


def exactness_results(args: Args) -> list[Result]:
    """Log-probs recorded while texts are written against one teacher-forced pass over them."""
    language = DigitLanguage(response_length=args.tokens(64))
    models: dict[str, Any] = {"GPT": gpt_of(language), **tiny_models()}
    found = []
    for name, model in models.items():
        job = Job(language, sharpen(model), model, args.texts(32))
        batches = {"Collector": next(job.collected())}
        with torch.no_grad():
            batches["sample_responses"] = job.sampled()
        for writer, batch in batches.items():
            question = f"{writer}, {name}: log-probs against one teacher-forced pass, fp32"
            found.append(Result.error(question, largest_difference(model, batch), 2e-5))
    return found


def sharpen(model: Any) -> Any:
    """Larger matrices, in place: small random ones predict all tokens alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


@torch.no_grad()
def largest_difference(model: Any, batch: TensorDictBase) -> float:
    """The largest difference of log-probs, nats."""
    texts, n_tokens = finished_texts(batch), batch.shape[1]
    logits = model(texts[:, :-1])
    logits = getattr(logits, "logits", logits)[:, -n_tokens:]
    expected = log_prob_at(logits, texts[:, -n_tokens:])
    return (batch["action_log_prob"] - expected).abs().max().item()


def frame_results(args: Args) -> list[Result]:
    """Frames per second of a Collector without the stack, with it as postproc, and in the env."""
    found = []
    for n_texts, n_tokens in ((1024, 4), (64, 64)):
        job = Job.of_gpt(args.texts(n_texts), args.tokens(n_tokens))
        kinds = {
            "without the stack": job.collected(),
            "with the stack as postproc": job.collected(stack=job.stack()),
            "with the stack in the env": job.collected(job.env(job.stack())),
        }
        runs = {name: lambda batches=batches: next(batches) for name, batches in kinds.items()}
        seconds = args.race(**runs)
        frames = job.n_texts * job.n_tokens
        rates = {name: frames / own for name, own in seconds.items()}
        plain = rates["without the stack"]
        for name, rate in rates.items():
            question = f"Collector {name}, {job.n_texts} x {job.n_tokens} tokens"
            if name == "without the stack":
                found.append(Result(question, rate, unit="frames/s"))
            else:
                found.append(Result(question, rate, plain, rate / plain, unit="frames/s"))
    return found


PARTS: dict[str, Callable[[Args], list[Result]]] = {
    "digits": digit_results,
    "transformers": transformers_results,
    "ppo": ppo_results,
    "growth": growth_results,
    "env": env_results,
    "exactness": exactness_results,
    "frames": frame_results,
}


def results(args: Args) -> list[Result]:
    """Answers all questions of the chosen parts."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    return [result for part in args.parts for result in PARTS[part](args)]


def main() -> None:
    """Prints the table."""
    print(table(results(parse_args(Args, __doc__))))


if __name__ == "__main__":
    main()
