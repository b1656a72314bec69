"""The whole RLHF job on a language of digits, where every true value is known.

1. A language model learns the language: each digit is one of the last four, plus one.
2. A reward model learns a preference from pairs: the first response digit should be the last
   prompt digit plus one.
3. PPO improves the language model on that reward with a KL penalty: (a) with a constant coefficient
   of 1, (b) without a penalty, (c) with an adaptive coefficient that steers to 0.5 nats per
   response, on the {0, 1} preference as reward.

Every policy is then compared with the best possible one, which is known exactly. Results go to the
folder `--out`; the three runs of PPO are trained in processes of one thread each.

Glossary of the metrics of PPO (in log/<run>, one value per batch of responses):
    reward         mean task reward of a response, before the penalty
    kl_reference   mean of sum_t KL(pi || pi_ref) over a response, nats, the KL of each token being
                   that of the two distributions
    kl_old_policy  mean of log pi_old - log pi per token at the last update on a batch, nats
    coeff          the coefficient that the batch was penalized with, reward per nat
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from digit_exact import LANGUAGE, add_separator, last_outputs, next_token, true_next_token
from digit_rlhf_report import describe, draw_attention, draw_curves, draw_probabilities, print_table
from running import JobOptions, Run, open_folder, read_options, workers, write_json
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

from torchrl_kl import KLConstrainedTransform, KLController, PlannedKLController
from torchrl_kl.exact import Enumeration, enumerate_kl
from torchrl_kl.language import (
    GPT,
    CausalLMActor,
    CausalLMCritic,
    CausalLMRewardModel,
    minibatches,
    sample_responses,
)

END_TOKEN = LANGUAGE.n_tokens  # where the reward model's score is read; in no text of the language
COEFFS = {"constant": 1.0, "no_penalty": 0.0}  # of the runs that learn from the reward model
RUNS = ("adaptive", *COEFFS)
# The part of a learning rate that is left when a part of the batches is done.
DECAYS = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}
QUICK = {"lm_iterations": 80, "rm_iterations": 30, "ppo_batches": 3, "adaptive_batches": 4}
QUICK |= {"heldout_prompts": 50, "exact_prompts": 1, "adaptive_prompts": 1}


@dataclass(frozen=True)
class Args(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/digit_rlhf")  # Folder of the results, which must be new or empty.
    heldout_prompts: int = 1000  # Prompts that no stage trains on, at least 2.
    lm_iterations: int = 960  # Updates of the language model.
    lm_batch: int = 128  # Texts per update of the language model.
    lm_lr: float = 6e-3  # Peak learning rate of the language model.
    lm_beta2: float = 0.99  # AdamW's decay of squared gradients, language model.
    lm_decay: float = 0.0  # AdamW's weight decay, language model.
    rm_iterations: int = 400  # Updates of the reward model.
    rm_batch: int = 64  # Pairs per update of the reward model.
    rm_lr: float = 4e-3  # Peak learning rate of the reward model.
    rm_heldout_pairs: int = 10_000  # Held-out pairs that test the reward model.
    ppo_batches: int = 27  # Batches of responses with a constant coefficient and without a penalty.
    adaptive_batches: int = 75  # Batches of responses with the adaptive coefficient.
    ppo_responses: int = 512  # Responses per batch.
    ppo_minibatch: int = 128  # Responses per update of policy and critic.
    ppo_epochs: int = 2  # How often each batch is used.
    ppo_lr: float = 1e-3  # Initial learning rate of the policy; it decays to zero.
    critic_lr: float = 3e-3  # Initial learning rate of the critic; it decays to zero.
    ppo_decay: Literal["linear", "cosine"] = "cosine"  # How the learning rates decay to zero.
    target_kl: float = 0.5  # KL that the adaptive coefficient steers to, nats per response.
    exact_prompts: int = 8  # Held-out prompts for exact values of the learned reward.
    adaptive_prompts: int = 64  # Held-out prompts for exact values of the adaptive run.


# --- prompts --------------------------------------------------------------------------------------


def split_prompts(n_heldout: int) -> tuple[Tensor, Tensor]:
    """Training prompts, and held-out ones: the first two are those of the pictures and checks."""
    prompts = torch.cartesian_prod(*[torch.arange(LANGUAGE.vocab_size)] * LANGUAGE.prompt_length)
    shown = torch.tensor([[5, 7, 1, 5], [0, 2, 8, 6]])
    rest = prompts[~(prompts[:, None] == shown).all(-1).any(-1)]
    rest = rest[torch.randperm(len(rest))]
    n_rest = n_heldout - len(shown)
    return rest[n_rest:], torch.cat([shown, rest[:n_rest]])


def begin(args: Args) -> tuple[Tensor, Tensor]:
    """Seeds a part of the job, which then does not depend on those before it; the prompts."""
    torch.manual_seed(args.seed)
    return split_prompts(args.heldout_prompts)


def draw(prompts: Tensor, n: int) -> Tensor:
    return prompts[torch.randint(len(prompts), (n,))]


# --- the language model ---------------------------------------------------------------------------


def train_language_model(run: Run, prompts: Tensor, args: Args) -> GPT:
    """A GPT that learns the language from its texts; the loss is on the response alone."""
    # The last token of a text is predicted, never read: the block is one shorter.
    gpt, betas = GPT(LANGUAGE.n_tokens, LANGUAGE.text_length - 1), (0.9, args.lm_beta2)
    optimizer = AdamW(gpt.parameters(), args.lm_lr, betas, weight_decay=args.lm_decay, fused=True)
    schedule = OneCycleLR(optimizer, args.lm_lr, total_steps=args.lm_iterations)
    for step in run.steps(args.lm_iterations):
        texts = LANGUAGE.sample(draw(prompts, args.lm_batch))
        logits = gpt(texts[:, :-1])[:, LANGUAGE.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, LANGUAGE.context_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            run.log(step, "loss {loss:.3f} nats per token", loss=loss.item())
    gpt.save_pretrained(run.folder)
    return gpt.eval()


# --- the reward model -----------------------------------------------------------------------------


def preference_pairs(prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted and rejected texts: the same response but for its first digit."""
    original = LANGUAGE.sample(prompts)
    first, right = LANGUAGE.context_length, LANGUAGE.preferred_token(prompts)
    accepted, rejected = original.clone(), original.clone()
    accepted[:, first] = right
    # Where the original response was right already, a random wrong digit is rejected instead.
    wrong = (right + torch.randint(1, LANGUAGE.vocab_size, right.shape)) % LANGUAGE.vocab_size
    rejected[:, first] = torch.where(original[:, first] == right, wrong, original[:, first])
    return accepted, rejected


def reward_model_from(language_model: GPT) -> GPT:
    """A reward model that begins as the language model, which has learned about digits already."""
    gpt = GPT(LANGUAGE.n_tokens + 1, LANGUAGE.text_length + 1, n_out=1)  # one more: END_TOKEN
    weights = dict(gpt.named_parameters())
    with torch.no_grad():
        for name, value in language_model.named_parameters():
            if name != "head.weight":
                weights[name][tuple(slice(n) for n in value.shape)] = value
    return gpt


def train_reward_model(run: Run, gpt: GPT, prompts: Tensor, args: Args) -> None:
    score = CausalLMRewardModel(gpt, end_token=END_TOKEN)
    optimizer = AdamW(gpt.parameters(), args.rm_lr, fused=True)
    schedule = OneCycleLR(optimizer, args.rm_lr, total_steps=args.rm_iterations)
    for step in run.steps(args.rm_iterations):
        accepted, rejected = score(torch.stack(preference_pairs(draw(prompts, args.rm_batch))))
        # The second term centres the scores (Eisenstein et al. 2023): differences alone leave the
        # mean of every pair free, and the policy would be rewarded for what the later digits add.
        centring = 0.001 * (accepted + rejected).square().mean()
        loss = centring - logsigmoid(accepted - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)  # steadier: scores may jump without
        optimizer.step()
        schedule.step()
        scores = {"accepted": accepted.mean().item(), "rejected": rejected.mean().item()}
        run.log(step, "accepted {accepted:.2f}, rejected {rejected:.2f}", **scores)
    gpt.eval().save_pretrained(run.folder)


def load_score(args: Args) -> CausalLMRewardModel:
    gpt = GPT.from_pretrained(args.out / "reward_model")
    return CausalLMRewardModel(gpt, end_token=END_TOKEN).requires_grad_(False)


# --- PPO ------------------------------------------------------------------------------------------


class PPO:
    """Improves `policy`, in place, with batches of responses whose rewards are penalized.

    The learning rates decay to zero over `n_batches`. `actor` is the policy for samplers.
    """

    def __init__(self, policy: GPT, n_batches: int, args: Args):
        # A critic, not a mean over responses: after the first digit it knows whether that digit was
        # right, so that the later digits are not blamed for it. One layer is enough. It reads one
        # token more than the policy: the last one, in the final state.
        critic = GPT(LANGUAGE.n_tokens, LANGUAGE.text_length, n_layer=1, n_out=1)
        self.args = args
        self.actor, value = CausalLMActor(policy), CausalLMCritic(critic)
        # gamma = lambda = 1: a token is penalized for all of the KL that it brings about later.
        self.gae = GAE(
            gamma=1.0, lmbda=1.0, value_network=value, deactivate_vmap=True, shifted=False
        )
        self.loss = ClipPPOLoss(self.actor, value, entropy_bonus=False, loss_critic_type="l2")
        groups = ((policy, args.ppo_lr), (critic, args.critic_lr))
        parameters = [{"params": model.parameters(), "lr": lr} for model, lr in groups]
        self.optimizer = Adam(parameters, betas=(0.9, 0.95), fused=True)
        decay = DECAYS[args.ppo_decay]
        self.schedule = LambdaLR(self.optimizer, lambda batch: decay(batch / n_batches))

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learns from a batch of responses (N, T), time last; returns what to log."""
        losses = {}
        with torch.no_grad(), set_recurrent_mode(True):  # a response in one pass of the critic
            self.gae(batch)
        for _ in range(self.args.ppo_epochs):
            for part in minibatches(batch, self.args.ppo_minibatch * batch["tokens"].shape[-1]):
                losses = self.loss(part)
                self.optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                self.optimizer.step()
        self.schedule.step()
        step = batch.get("next")
        return {
            "reward": step["task_reward"].sum(1).mean().item(),
            "kl_reference": step.get("kl_estimate", step.get("kl")).sum(1).mean().item(),
            "kl_old_policy": losses["kl_approx"].mean().item(),
            "coeff": step["kl_coeff"].mean().item(),
        }


def train_policy(
    run: Run,
    policy: GPT,
    controller: KLController | float,
    reward_fn: Callable[[Tensor], Tensor],
    n_batches: int,
    prompts: Tensor,
    args: Args,
    after_batch: Callable[[int], None] = lambda n_done: None,
) -> None:
    """PPO, in place, on the task reward minus the coefficient times the KL to the given policy."""
    ppo = PPO(policy, n_batches, args)
    # The exact KL of each step scatters much less than its log-ratio, and the controller with it.
    stack = KLConstrainedTransform(ppo.actor, controller, estimator="exact")
    text = "reward {reward:.2f}, KL {kl_reference:.2f} nats, coeff {coeff:.3f}"
    for step in run.steps(n_batches):
        batch = sample_responses(
            ppo.actor,
            add_separator(draw(prompts, args.ppo_responses)),
            max_new_tokens=LANGUAGE.response_length,
            pad_token=LANGUAGE.separator,
            reward_fn=reward_fn,
            return_logits=True,
        )
        run.log(step, text, **ppo.update(stack(batch)))
        after_batch(step + 1)
    policy.save_pretrained(run.folder)


# --- the job --------------------------------------------------------------------------------------


def train(name: str, args: Args) -> dict[str, list[float]]:
    """PPO from the models in the folder `out` to a policy there; its curves."""
    run, (prompts, _) = Run(name, args, RUNS.index(name) + 1), begin(args)
    if name == "adaptive":  # its reward is the preference itself, not the reward model
        controller: KLController | float = PlannedKLController(args.target_kl)
        reward_fn, n_batches = LANGUAGE.preference, args.adaptive_batches
    else:
        controller, reward_fn = COEFFS[name], load_score(args)
        n_batches = args.ppo_batches
    policy = GPT.from_pretrained(args.out / "language_model")
    train_policy(run, policy, controller, reward_fn, n_batches, prompts, args)
    return run.curves


def main() -> None:
    start, args = time.perf_counter(), read_options(Args, __doc__, quick=QUICK)
    out, n_tokens = open_folder(args), LANGUAGE.response_length
    torch.set_num_threads(args.threads)
    with workers(args) as pool:
        prompts, heldout = begin(args)
        contexts = add_separator(heldout)
        language_model = train_language_model(Run("language_model", args), prompts, args)
        reference = next_token(language_model)
        excess = enumerate_kl(true_next_token, reference, contexts[:256], n_tokens).mean().item()
        tqdm.write(f"language model: {excess:.4f} nats per token above the true language")
        jobs = {"adaptive": pool.submit(train, "adaptive", args)}

        begin(args)
        reward_model = reward_model_from(language_model)
        train_reward_model(Run("reward_model", args), reward_model, prompts, args)
        score = load_score(args)
        with torch.no_grad():
            pairs = preference_pairs(draw(heldout, args.rm_heldout_pairs))
            accepted, rejected = score(torch.stack(pairs))
        accuracy = (accepted > rejected).double().mean().item()
        tqdm.write(f"reward model: {accuracy:.1%} of held-out pairs in order")
        jobs |= {run: pool.submit(train, run, args) for run in COEFFS}

        def learned_reward(texts: Tensor) -> Tensor:
            return last_outputs(reward_model, texts, END_TOKEN)[:, 0]

        learned = Enumeration(reference, learned_reward, contexts[: args.exact_prompts], n_tokens)
        # The KL that a controller steers to is a mean over all prompts, which differ much in it.
        shown = contexts[: args.adaptive_prompts]
        preference = Enumeration(reference, LANGUAGE.preference, shown, n_tokens)
        coeffs = COEFFS | {"adaptive": preference.solve_coeff(args.target_kl)}
        report: dict[str, Any] = {"language_model": {"excess": excess}}
        report["reward_model"] = {"accuracy": accuracy}
        models = {"true language": true_next_token, "language_model": reference}
        for run in RUNS:
            curves = jobs[run].result()
            models[run] = next_token(GPT.from_pretrained(out / run))
            exact = preference if run == "adaptive" else learned
            values = exact.values(models[run], coeffs[run])
            report[run] = describe(values, LANGUAGE.preferred_token(heldout), curves)
    report["adaptive"]["target"] = args.target_kl
    report["seconds"] = time.perf_counter() - start
    write_json(out / "report.json", report)
    draw_curves([report], out / "curves.png")
    text = torch.tensor([5, 7, 1, 5, LANGUAGE.separator, 6, 2, 7, 3])
    draw_probabilities(models, text, out / "probabilities.png")
    gpts = {name: GPT.from_pretrained(out / name) for name in ("language_model", *COEFFS)}
    draw_attention(gpts, text, out / "attention.png")
    texts = torch.cat([contexts[1], torch.tensor([0, 3, 9, 7])]).repeat(LANGUAGE.vocab_size, 1)
    texts[:, LANGUAGE.context_length] = torch.arange(LANGUAGE.vocab_size)
    scores = "  ".join(f"{digit}: {value:+.1f}" for digit, value in enumerate(score(texts)))
    print(f"Scores of 0 2 8 6 → ? 3 9 7 for each first digit (7 is right): {scores}")
    print_table({f"seed {args.seed}": report})
    print(f"Models, metrics, pictures and the report are in {out}.")


if __name__ == "__main__":
    main()
