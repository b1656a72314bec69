"""How much does each estimate of the KL of a response vary, given the prompt?

PPO on the digit language, rewarded by the number of even digits in the response, which spreads the
KL over all four positions, is stopped half-way: after half of the batches for which its learning
rates are planned. For prompts that neither the language model nor PPO has seen, each estimator's
sum over the response is then

    enumerated  over all 11^4 responses to a prompt, weighted by their probability under the policy:
                no sampling error
    sampled     on many responses to the same prompt, by the transforms, with standard errors

    python benchmarks/estimator_variance.py

Every figure is a mean over the prompts of a figure given the prompt. The second table shows where
the variance comes from. Token t moves the expected sum of the KL by n_t + f_t:

    n_t  its noise: log pi - log pi_ref of the token, minus the mean of that over all tokens (the
         exact KL of the step)
    f_t  its effect: by how much it changes the KL that is expected of the tokens after it

These are the increments of martingales, so that variances add up over t: that of k1 is
sum_t E (n_t + f_t)^2, that of exact is sum_t E f_t^2. The variance of exact is therefore lower by
sum_t E n_t^2 + 2 E n_t f_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_report import Result, arg, parse_args, quick_flag
from digit_ppo import count_even, language_model, next_token, train
from torch import Tensor
from torchrl.envs import ExplorationType, set_exploration_type

from torchrl_kl import KLConstrainedTransform, TopKActor
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv
from torchrl_kl.exact import Enumeration
from torchrl_kl.functional import kl_exact, kl_k1, kl_k3, kl_top_k
from torchrl_kl.language import GPT, CausalLMActor

TOP_KS = (1, 2, 3)


@dataclass
class Args:
    """What can be set from the command line."""

    out: str = arg(
        "runs/estimator_variance", "Folder of the language model, which is trained first."
    )
    reference: str = arg(
        "", "Folder of a trained language model to take instead; it may have seen every prompt."
    )
    seed: int = arg(
        0, "Seed of the split of the prompts, the initial weights, the data and the responses."
    )
    coeff: float = arg(1.0, "Coefficient of the KL that PPO trains with, reward per nat.")
    batches: int = arg(70, "Batches of responses that training is planned for.", quick=4)
    stop: float = arg(0.5, "The part of these batches after which training is stopped.")
    responses: int = arg(512, "Responses per batch.", quick=64)
    lm_updates: int = arg(1200, "Updates of the language model.", quick=20)
    prompts: int = arg(16, "Held-out prompts that the estimates are compared on.", quick=2)
    samples: int = arg(2048, "Responses sampled per prompt.", quick=512)
    quick: bool = quick_flag()


@dataclass
class Moments:
    """Mean, variance and fourth central moment of an estimate, one of each per prompt, (P,)."""

    mean: Tensor
    variance: Tensor
    fourth: Tensor

    @classmethod
    def of(cls, values: Tensor, probs: Tensor) -> Moments:
        """Of values (P, N) with their probabilities (P, N)."""
        mean = (probs * values).sum(1)
        centred = values - mean.unsqueeze(1)
        return cls(mean, (probs * centred**2).sum(1), (probs * centred**4).sum(1))

    def mean_error(self, n: int) -> float:
        """Standard error of the prompts' average mean, from n samples each."""
        return (self.variance / n).sum().sqrt().item() / len(self.mean)

    def variance_error(self, n: int) -> float:
        """Standard error of the prompts' average variance, from n samples each."""
        squared = (self.fourth - self.variance**2 * (n - 3) / (n - 1)) / n
        return squared.sum().sqrt().item() / len(self.mean)


def estimate_steps(log_probs: Tensor, ref_log_probs: Tensor) -> dict[str, Tensor]:
    """Each estimator's value after each action: log-probs (N, V) of both models to (N, V)."""
    n_actions = log_probs.shape[-1]
    estimates = {"k1": kl_k1(log_probs, ref_log_probs), "k3": kl_k3(log_probs, ref_log_probs)}
    for k in TOP_KS:
        top = log_probs.topk(k).indices
        drawn_is_top = (top.unsqueeze(1) == torch.arange(n_actions).view(-1, 1)).any(-1)
        # Each of the V actions that may be drawn meets the same top k of its state.
        own, ref = (
            x.gather(-1, top).unsqueeze(1).expand(-1, n_actions, -1)
            for x in (log_probs, ref_log_probs)
        )
        estimates[f"top-{k}"] = kl_top_k(own, ref, log_probs, ref_log_probs, drawn_is_top)
    estimates["exact"] = kl_exact(log_probs, ref_log_probs).unsqueeze(-1).expand_as(log_probs)
    return estimates


@torch.no_grad()
def enumerate_steps(
    policy: GPT, reference: GPT, contexts: Tensor, length: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Probability (P, V**R) of each response; each estimator's value at its steps, (P, V**R, R)."""
    n_prompts, n_tokens = len(contexts), policy.n_out
    probs, steps = torch.ones(n_prompts, 1, dtype=torch.float64), []
    for position in range(length):
        own, ref = (
            torch.cat(
                [next_token(gpt)(chunk).double().log_softmax(-1) for chunk in contexts.split(4096)]
            )
            for gpt in (policy, reference)
        )
        probs = (probs.unsqueeze(-1) * own.exp().view(n_prompts, -1, n_tokens)).flatten(1)
        later = n_tokens ** (length - position - 1)
        estimates = estimate_steps(own, ref)
        # In lexicographic order, all responses that begin alike are neighbours.
        steps.append(
            {
                name: x.reshape(n_prompts, -1).repeat_interleave(later, 1)
                for name, x in estimates.items()
            }
        )
        tokens = torch.arange(n_tokens).repeat(len(contexts))
        contexts = torch.cat([contexts.repeat_interleave(n_tokens, 0), tokens.unsqueeze(1)], 1)
    return probs, {name: torch.stack([step[name] for step in steps], -1) for name in steps[0]}


@torch.no_grad()
def sample_totals(policy: GPT, reference: GPT, prompts: Tensor, args: Args) -> dict[str, Tensor]:
    """Each estimator's sum over sampled responses, by the transforms, (P, samples)."""
    actor, ref_actor = CausalLMActor(policy), CausalLMActor(reference)
    # Each policy, and the estimators that what it records is enough for.
    recorders: list[tuple[CausalLMActor | TopKActor, dict[str, Any]]]
    recorders = [(actor, {"k1": "k1", "k3": "k3", "exact": "exact"})]
    recorders += [(TopKActor(actor, k), {f"top-{k}": "top_k"}) for k in TOP_KS]
    env = DigitLanguageEnv(DigitLanguage(), batch_size=(args.samples,))
    totals: dict[str, list[Tensor]] = {
        name: [] for _, estimators in recorders for name in estimators
    }
    for recorder, estimators in recorders:
        stacks = {
            name: KLConstrainedTransform(recorder, 0.0, estimator=estimator, reference=ref_actor)
            for name, estimator in estimators.items()
        }
        for index, prompt in enumerate(prompts):
            torch.manual_seed(args.seed * len(prompts) + index)  # the same responses for all
            with set_exploration_type(ExplorationType.RANDOM):
                start = env.reset(prompt=prompt)
                rollout = env.rollout(
                    env.language.response_length, recorder, tensordict=start, auto_reset=False
                )
            for name, stack in stacks.items():
                kl = stack(rollout)["next"].get(stack.measured_key)
                totals[name].append(kl.double().sum((1, 2)))
    return {name: torch.stack(rows) for name, rows in totals.items()}


def print_estimators(
    probs: Tensor, steps: dict[str, Tensor], sampled: dict[str, Tensor]
) -> tuple[dict[str, Moments], float]:
    """Prints a row per estimator.

    Returns the enumerated moments, and the largest deviation of a sampled one, in standard errors.
    """
    largest = 0.0
    truth = {name: Moments.of(values.sum(-1), probs) for name, values in steps.items()}
    k1 = truth["k1"].variance.mean()
    print(
        "\n| estimator | mean, sampled | mean | variance, sampled | variance | of k1's "
        "| sampled - true, in se |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, true in truth.items():
        n = sampled[name].shape[1]
        own = Moments.of(sampled[name], torch.full_like(sampled[name], 1 / n))
        own.variance *= n / (n - 1)
        mean_off = (own.mean - true.mean).mean() / true.mean_error(n)
        variance_off = (own.variance - true.variance).mean() / true.variance_error(n)
        largest = max(largest, abs(mean_off.item()), abs(variance_off.item()))
        print(
            f"| {name} | {own.mean.mean():.5f} ± {own.mean_error(n):.5f} | {true.mean.mean():.5f} "
            f"| {own.variance.mean():.5f} ± {own.variance_error(n):.5f} "
            f"| {true.variance.mean():.5f} | {true.variance.mean() / k1:.4f} "
            f"| {mean_off:+.1f}, {variance_off:+.1f} |"
        )
    return truth, largest


def print_positions(probs: Tensor, steps: dict[str, Tensor], n_tokens: int) -> None:
    """Prints where the variances of k1 and of exact come from, token by token."""
    kl, rows = steps["exact"], []

    def expect(values: Tensor, length: int) -> Tensor:
        """Mean of values (P, V**R) over all responses with the same first `length` tokens."""
        weights, weighted = (x.view(len(x), n_tokens**length, -1) for x in (probs, probs * values))
        return (
            (weighted.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True))
            .expand_as(weights)
            .flatten(1)
        )

    for t in range(kl.shape[-1]):
        later = kl[..., t + 1 :].sum(-1)
        noise = steps["k1"][..., t] - kl[..., t]
        effect = expect(later, t + 1) - expect(later, t)
        parts = torch.stack([kl[..., t], noise**2, effect**2, 2 * noise * effect])
        mean, n2, f2, nf = (probs * parts).sum(-1).mean(-1)
        rows.append(torch.stack([mean, n2, f2, nf, n2 + f2 + nf, f2]))
    print("\n| token | KL | noise, E n^2 | effect, E f^2 | 2 E n f | adds to k1 | adds to exact |")
    print("|---|---|---|---|---|---|---|")
    for name, row in zip(
        [*range(1, len(rows) + 1), "all"], [*rows, torch.stack(rows).sum(0)], strict=True
    ):
        print(f"| {name} | " + " | ".join(f"{x:.5f}" for x in row.tolist()) + " |")


def split_prompts(language: DigitLanguage, args: Args) -> tuple[Tensor, Tensor]:
    """Held-out prompts, and all others."""
    everything = torch.cartesian_prod(*[torch.arange(language.vocab_size)] * language.prompt_length)
    generator = torch.Generator().manual_seed(args.seed)
    shuffled = everything[torch.randperm(len(everything), generator=generator)]
    return shuffled[: args.prompts], shuffled[args.prompts :]


def results(args: Args) -> list[Result]:
    """Trains, measures, prints the tables and the verdict, and returns what they say."""
    torch.set_num_threads(1)
    language = DigitLanguage()
    heldout, prompts = split_prompts(language, args)
    contexts = torch.cat([heldout, torch.full((args.prompts, 1), language.separator)], 1)
    folder = Path(args.reference or f"{args.out}/language_model_{args.seed}")
    reference = language_model(language, folder, args.lm_updates, prompts=prompts, seed=args.seed)
    torch.manual_seed(args.seed)
    stop = round(args.stop * args.batches)
    plan = {"batches": args.batches, "responses": args.responses, "prompts": prompts, "stop": stop}
    policy = train(reference, language, count_even, args.coeff, **plan)

    exact = Enumeration(next_token(reference), count_even, contexts, language.response_length)
    values = exact.values(next_token(policy), args.coeff)
    print(
        f"coeff {args.coeff}, seed {args.seed}, stopped after {stop} of {args.batches} batches: "
        f"reward {values.reward:.4f}, KL {values.kl:.5f} nats "
        f"(reference {values.reference_reward:.4f}, 0; "
        f"optimum {values.optimum.reward:.4f}, {values.optimum.kl:.4f})"
    )
    probs, steps = enumerate_steps(policy, reference, contexts, language.response_length)
    sampled = sample_totals(policy, reference, heldout, args)
    truth, largest = print_estimators(probs, steps, sampled)
    print_positions(probs, steps, language.n_tokens)
    print_verdict(truth)
    variances = {name: moments.variance.mean().item() for name, moments in truth.items()}
    found = [
        Result.cost(
            f"variance of the KL of a response, {name} against k1",
            variance,
            variances["k1"],
            0.5 if name == "exact" else None,
            unit="nats^2",
        )
        for name, variance in variances.items()
        if name != "k1"
    ]
    question = "sampled mean or variance of an estimate against enumeration, largest deviation"
    return [*found, Result.error(question, largest, 5.0, unit="standard errors")]


def print_verdict(truth: dict[str, Moments]) -> None:
    """Prints how the variance of exact compares with that of k1."""
    by_prompt = truth["exact"].variance / truth["k1"].variance
    ratio = (truth["exact"].variance.mean() / truth["k1"].variance.mean()).item()
    verdict = "at most" if ratio <= 0.5 else "more than"
    print(f"\nThe variance of exact is {ratio:.4f} of k1's: {verdict} half.")
    n_half = int((by_prompt <= 0.5).sum())
    print(
        f"By prompt: {by_prompt.min():.4f} to {by_prompt.max():.4f}, at most half in {n_half} of "
        f"{len(by_prompt)}."
    )


def main() -> None:
    """Prints the tables and the verdict."""
    results(parse_args(Args, __doc__))


if __name__ == "__main__":
    main()
