"""The same KL price in the reward and in the loss: do both end at the same policy?

PPO on the digit language at a constant price per nat of KL to the language model. The price is either charged to the
reward (`KLConstrainedTransform`) or a term of the loss (`KLPenaltyLoss` around ClipPPOLoss; the transform then only
measures). Every policy is judged by its exact regret, what its objective E[reward] - coeff * KL lacks to that of the
best policy there is, by enumerating all responses.

    python benchmarks/reward_vs_loss.py
    python benchmarks/reward_vs_loss.py --reward even

The first reward (1 where the response begins with the last prompt digit plus one) asks nothing of the later digits: at
the optimum they carry no KL, so that an action has none to answer for but its own. The second (the number of even
digits) spreads the KL over all positions. A language model is trained first and kept in the folder `--out`.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchrl.collectors import Collector
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import GPT, Enumeration, GPTActor, GPTCritic, KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

# Where the price is: None is the reward, else the arguments of KLPenaltyLoss.
VARIANTS: dict[str, dict | None] = {
    "reward (k1)": None,
    "loss, sequence": {"gradient": "sequence"},
    "loss, sequence, step weights": {"gradient": "sequence", "weights": "step"},
    "loss, step": {"gradient": "step"},
    "loss, k2": {"gradient": "k2"},
}
EPOCHS, MINIBATCH = 2, 256


def language_model(language: DigitLanguage, folder: Path, n_updates: int) -> GPT:
    """Trained on texts of the language, or read from where a former run has left it."""
    if folder.is_dir():
        return GPT.from_pretrained(folder)
    torch.manual_seed(0)
    gpt = GPT(language.n_tokens, language.text_length - 1)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=n_updates)
    for _ in range(n_updates):
        texts = language.sample(language.sample_prompts(256))
        logits = gpt(texts[:, :-1])[:, language.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, language.context_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    gpt.save_pretrained(folder)
    return gpt.eval()


def count_even(texts: torch.Tensor) -> torch.Tensor:
    """How many of the four response digits are even (the separator, an ordinary wrong token, is not)."""
    response = texts[:, -4:]
    return ((response % 2 == 0) & (response < 10)).sum(1).float()


def train(reference: GPT, language: DigitLanguage, reward_fn, coeff: float, kl_args: dict | None, args) -> GPT:
    """PPO from the reference, with the price in the reward (`kl_args` None) or in the loss."""
    policy = copy.deepcopy(reference)
    critic = GPT(language.n_tokens, language.text_length, n_layer=1, n_out=1)
    actor, value = GPTActor(policy), GPTCritic(critic)
    stack = KLConstrainedTransform(actor, coeff if kl_args is None else 0.0)  # 0 only measures
    loss = ClipPPOLoss(actor, value, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=1.0, loss_critic_type="l2")
    if kl_args is not None:
        loss = KLPenaltyLoss(actor, coeff, loss=loss, **kl_args)
    optimizer = torch.optim.Adam(
        [{"params": policy.parameters(), "lr": 1e-3}, {"params": critic.parameters(), "lr": 3e-3}],
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: 1 - batch / args.batches)
    frames = args.responses * language.response_length
    collector = Collector(
        DigitLanguageEnv(language, reward_fn=reward_fn, batch_size=(args.responses,), seed=torch.initial_seed()),
        actor,
        frames_per_batch=frames,
        total_frames=frames * args.batches,
        postproc=stack,
        auto_register_policy_transforms=False,
    )
    gae = GAE(gamma=1.0, lmbda=1.0, value_network=value, deactivate_vmap=True, shifted=False)
    for batch in collector:
        with torch.no_grad(), set_recurrent_mode(True):
            gae(batch)
        for _ in range(EPOCHS):
            for minibatch in batch[torch.randperm(len(batch))].split(MINIBATCH):
                optimizer.zero_grad()
                losses = [value for key, value in loss(minibatch).items() if key.startswith("loss_")]
                torch.stack(losses).sum().backward()
                optimizer.step()
        schedule.step()
    collector.shutdown()
    return policy.eval()


def next_token(gpt: GPT):
    """A GPT as a model of the exact values: contexts to the logits of the next token."""
    return lambda tokens: gpt.head(gpt.hidden_states(tokens)[:, -1])


def main() -> None:
    """Prints one row per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reward_vs_loss"), help="Folder of the language model.")
    parser.add_argument("--reward", choices=["first", "even"], default="first", help="What is rewarded.")
    parser.add_argument("--coeffs", type=float, nargs="+", default=[0.5], help="Prices, reward per nat.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="One run of each variant per seed.")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="Where the price is.")
    parser.add_argument("--batches", type=int, default=70, help="Batches of responses per run.")
    parser.add_argument("--responses", type=int, default=512, help="Responses per batch.")
    parser.add_argument("--lm-updates", type=int, default=1200, help="Updates of the language model.")
    parser.add_argument("--prompts", type=int, default=16, help="Prompts over which the exact values are taken.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    language = DigitLanguage()
    reference = language_model(language, args.out / "language_model", args.lm_updates)
    prompts = language.sample_prompts(args.prompts, generator=torch.Generator().manual_seed(0))
    contexts = torch.cat([prompts, torch.full((args.prompts, 1), language.separator)], 1)
    reward_fn = language.preference if args.reward == "first" else count_even
    exact = Enumeration(next_token(reference), reward_fn, contexts, language.response_length)
    print("| coeff | seed | the price is in | E[reward] | KL, nats per position | KL | regret | gain | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for coeff in args.coeffs:
        best = exact.optimum(coeff)
        print(f"| {coeff} | | (the optimum) | {best.reward:.4f} | {positions(best)} | {best.kl:.4f} | 0 | 100 % | |")
        for seed in args.seeds:
            for name in args.variants:
                torch.manual_seed(seed)
                start = time.perf_counter()
                policy = train(reference, language, reward_fn, coeff, VARIANTS[name], args)
                seconds = time.perf_counter() - start
                own = exact.values(next_token(policy), coeff)
                print(
                    f"| {coeff} | {seed} | {name} | {own.reward:.4f} | {positions(own)} | {own.kl:.4f} "
                    f"| {own.regret:.4f} | {own.fraction_of_gain:.2%} | {seconds:.0f} |",
                    flush=True,
                )


def positions(values) -> str:
    """The KL at each response position, nats."""
    return " ".join(f"{kl:.4f}" for kl in values.kl_per_position.tolist())


if __name__ == "__main__":
    main()
