"""What the benchmarks on the digit language share: language model, a reward, and PPO."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torchrl.collectors import Collector
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, KLController, KLPenaltyLoss, rescore
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic

EPOCHS, MINIBATCH = 2, 256


def language_model(
    language: DigitLanguage,
    folder: Path,
    n_updates: int,
    *,
    prompts: torch.Tensor | None = None,
    seed: int = 0,
) -> GPT:
    """Trained on texts of the language, or read from the folder of a former run.

    `prompts` are those to draw from; None: all prompts there are.
    """
    if folder.is_dir():
        return GPT.from_pretrained(folder)
    torch.manual_seed(seed)
    gpt = GPT(language.n_tokens, language.text_length - 1)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=n_updates)
    for _ in range(n_updates):
        drawn = (
            language.sample_prompts(256)
            if prompts is None
            else prompts[torch.randint(len(prompts), (256,))]
        )
        texts = language.sample(drawn)
        logits = gpt(texts[:, :-1])[:, language.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, language.context_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    gpt.save_pretrained(folder)
    return gpt.eval()


def next_token(gpt: GPT) -> Callable[[torch.Tensor], torch.Tensor]:
    """A GPT as a model of the exact values: contexts to the logits of the next token."""
    return lambda tokens: gpt(tokens)[:, -1]


def count_even(texts: torch.Tensor) -> torch.Tensor:
    """How many of the four response digits are even; the separator is an odd token."""
    response = texts[:, -4:]
    return ((response % 2 == 0) & (response < 10)).sum(1).float()


def train(
    reference: GPT,
    language: DigitLanguage,
    reward_fn: Callable[[torch.Tensor], torch.Tensor],
    coeff: KLController | float,
    *,
    batches: int,
    responses: int,
    loss_args: dict[str, Any] | None = None,
    top_p: float | None = None,
    whole: bool = False,
    lr: float = 1e-3,
    prompts: torch.Tensor | None = None,
    stop: int | None = None,
) -> GPT:
    """PPO from the reference, with the KL penalty in the reward or in the loss.

    Args:
        reference: the initial policy, against which the KL is measured.
        language: the language of the prompts.
        reward_fn: whole texts to rewards.
        coeff: reward per nat, or a controller.
        batches: how many batches of responses training is planned for: the learning rates reach
            zero after them.
        responses: responses per batch.
        loss_args: the arguments of KLPenaltyLoss; None penalizes the reward.
        top_p: that of the sampler.
        whole: whether all but the sampler ignores it: log-probs, ratios and KL are those of the
            whole policy.
        lr: initial learning rate of the policy.
        prompts: those to draw from; None: all prompts there are.
        stop: after how many batches to stop; None: after all of them.
    """
    policy = copy.deepcopy(reference)
    critic = GPT(language.n_tokens, language.text_length, n_layer=1, n_out=1)
    sampler, value = CausalLMActor(policy, top_p=top_p), CausalLMCritic(critic)
    actor = sampler.whole() if whole else sampler
    stack = KLConstrainedTransform(actor, coeff if loss_args is None else 0.0)  # 0 only measures
    loss = ClipPPOLoss(
        actor, value, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=1.0, loss_critic_type="l2"
    )
    if loss_args is not None:
        loss = KLPenaltyLoss(actor, coeff, loss=loss, **loss_args)
    optimizer = torch.optim.Adam(
        [{"params": policy.parameters(), "lr": lr}, {"params": critic.parameters(), "lr": 3e-3}],
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: 1 - batch / batches)
    frames = responses * language.response_length
    seed = torch.initial_seed()
    collector = Collector(
        DigitLanguageEnv(
            language, prompts=prompts, reward_fn=reward_fn, batch_size=(responses,), seed=seed
        ),
        sampler,
        frames_per_batch=frames,
        total_frames=frames * (batches if stop is None else stop),
        postproc=(lambda batch: stack(rescore(actor, batch))) if whole else stack,
        auto_register_policy_transforms=False,
    )
    gae = GAE(gamma=1.0, lmbda=1.0, value_network=value, deactivate_vmap=True, shifted=False)
    for batch in collector:
        with torch.no_grad(), set_recurrent_mode(True):
            gae(batch)
        for _ in range(EPOCHS):
            for minibatch in batch[torch.randperm(len(batch))].split(MINIBATCH):
                optimizer.zero_grad()
                losses = [
                    value for key, value in loss(minibatch).items() if key.startswith("loss_")
                ]
                torch.stack(losses).sum().backward()
                optimizer.step()
        schedule.step()
    collector.shutdown()
    return policy.eval()
