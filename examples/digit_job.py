"""What the examples on the digit language share: options, prompts, language model and PPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from running import Count, JobOptions, NonNegative, Options, Positive, Run, Share
from tensordict import TensorDictBase
from torch.nn.functional import cross_entropy
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import (
    GPT,
    CausalLMActor,
    CausalLMCritic,
    KLConstrainedTransform,
    KLController,
    sample_responses,
)
from torchrl_kl.envs import DigitLanguage

# The part of a learning rate that is left when a part of the batches is done.
DECAYS = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True)
class DigitOptions(Options):
    """Options of every example on the digit language."""

    heldout_prompts: Count = 1000
    """Prompts that no stage trains on."""
    lm_iterations: Count = 1200
    """Updates of the language model."""
    lm_batch: Count = 256
    """Texts per update of the language model."""
    lm_lr: Positive = 2e-3
    """Peak learning rate of the language model."""
    lm_beta2: Share = 0.999
    """AdamW's decay of squared gradients, language model."""
    lm_decay: NonNegative = 0.01
    """AdamW's weight decay, language model."""
    ppo_responses: Count = 512
    """Responses per batch."""
    ppo_minibatch: Count = 256
    """Responses per update of policy and critic."""
    ppo_epochs: Count = 2
    """How often each batch is used."""
    ppo_lr: Positive = 1e-3
    """Initial learning rate of the policy; it decays to zero."""
    critic_lr: Positive = 3e-3
    """Initial learning rate of the critic; it decays to zero."""
    ppo_decay: Literal["linear", "cosine"] = "linear"
    """How the learning rates decay to zero."""


@dataclass(frozen=True)
class DigitJobOptions(DigitOptions, JobOptions):
    """Options of the examples on the digit language that write to a folder."""


class SharedPrefixes:
    """Keys and values of prefixes, which a second pass reads for each text that begins with one."""

    def __init__(self, group: torch.Tensor):
        self.group, self.held = group, []

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (N, heads, T, width) of a layer, as attention is to read them."""
        if layer == len(self.held):
            self.held.append((key, value))
            return key, value
        keys, values = self.held[layer]
        return torch.cat([keys[self.group], key], 2), torch.cat([values[self.group], value], 2)


def last_outputs(gpt: GPT, texts: torch.Tensor, *after: int) -> torch.Tensor:
    """The outputs (N, n_out) of a GPT at the end of texts (N, T), each followed by some tokens.

    What neighbouring texts share, all but their last token, is read once. Where all texts are
    enumerated in order, this is several times faster than reading each of them, and the same up to
    the rounding of float32.
    """
    prefixes, group = texts[:, :-1].unique_consecutive(dim=0, return_inverse=True)
    cache, n_read = SharedPrefixes(group), prefixes.shape[1]
    gpt(prefixes, past_key_values=cache, logits_to_keep=1)
    rest = torch.cat([texts[:, -1:], *(texts.new_full((len(texts), 1), t) for t in after)], 1)
    n_rest = rest.shape[1]
    dtype = gpt.head.weight.dtype
    future = torch.full((n_rest, n_read + n_rest), -math.inf, dtype=dtype).triu(n_read + 1)
    return gpt(
        rest,
        past_key_values=cache,
        position_ids=torch.arange(n_read, n_read + n_rest)[None],
        attention_mask=future[None, None],
        logits_to_keep=1,
    )[:, 0]


def next_token(gpt: GPT):
    """A GPT as torchrl_kl's exact values want a model: contexts to the logits of the next token."""
    return partial(last_outputs, gpt)


def true_next_token(language: DigitLanguage):
    """The language itself as such a model."""
    return lambda tokens: language.next_token_probs(tokens).log()


def split_prompts(
    language: DigitLanguage, options: DigitOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Training prompts, and held-out ones: the first two are those of the pictures and checks."""
    prompts = torch.cartesian_prod(*[torch.arange(language.vocab_size)] * language.prompt_length)
    shown = torch.tensor([[5, 7, 1, 5], [0, 2, 8, 6]])
    if not len(shown) <= options.heldout_prompts < len(prompts):
        raise SystemExit(
            f"--heldout-prompts must be from {len(shown)} to {len(prompts) - 1}, "
            f"got {options.heldout_prompts}."
        )
    is_shown = (prompts[:, None] == shown).all(-1).any(-1)
    rest = prompts[~is_shown]
    rest = rest[torch.randperm(len(rest))]
    n_rest = options.heldout_prompts - len(shown)
    return rest[n_rest:], torch.cat([shown, rest[:n_rest]])


def add_separator(prompts: torch.Tensor, language: DigitLanguage) -> torch.Tensor:
    """Prompts (N, P) to contexts (N, P + 1), which a response follows."""
    return torch.cat([prompts, prompts.new_full((len(prompts), 1), language.separator)], 1)


def draw(prompts: torch.Tensor, n: int) -> torch.Tensor:
    return prompts[torch.randint(len(prompts), (n,))]


class LanguageModelTraining:
    """A GPT that learns the language from its texts; the loss is on the response alone."""

    def __init__(self, language: DigitLanguage, prompts: torch.Tensor, options: DigitOptions):
        self.language, self.prompts, self.options = language, prompts, options
        # The last token of a text is predicted, never read: the block is one shorter.
        self.gpt = GPT(language.n_tokens, language.text_length - 1)
        self.optimizer = torch.optim.AdamW(
            self.gpt.parameters(),
            lr=options.lm_lr,
            betas=(0.9, options.lm_beta2),
            weight_decay=options.lm_decay,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, options.lm_lr, total_steps=options.lm_iterations
        )

    def update(self) -> float:
        """One update; its loss, nats per token."""
        language = self.language
        texts = language.sample(draw(self.prompts, self.options.lm_batch))
        logits = self.gpt(texts[:, :-1])[:, language.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, language.context_length :].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def train_language_model(
    run: Run, language: DigitLanguage, prompts: torch.Tensor, options: DigitOptions
) -> GPT:
    """A language model, trained from the last checkpoint on and saved in the folder of the run."""
    training = LanguageModelTraining(language, prompts, options)
    for step in run.steps(
        options.lm_iterations,
        training.gpt.save_pretrained,
        gpt=training.gpt,
        optimizer=training.optimizer,
        schedule=training.schedule,
    ):
        loss = training.update()
        if step % 10 == 0:
            run.log(step, "loss {loss:.3f} nats per token", loss=loss)
    return training.gpt.eval()


class PPO:
    """Improves `policy`, in place, with batches of responses whose rewards are penalized.

    Args:
        policy: the policy; `actor` is it as collectors want it.
        language: what the responses are written in.
        n_batches: how many batches there will be; the learning rates decay to zero over them.
        options: learning rates and sizes.
    """

    def __init__(self, policy: GPT, language: DigitLanguage, n_batches: int, options: DigitOptions):
        # A critic, not a mean over responses: after the first digit it knows whether that digit was
        # right, so that the later digits are not blamed for it. One layer is enough. It reads one
        # token more than the policy: the last one, in the final state.
        self.critic = GPT(language.n_tokens, language.text_length, n_layer=1, n_out=1)
        self.options = options
        self.actor, value = CausalLMActor(policy), CausalLMCritic(self.critic)
        # gamma = lambda = 1: a token is penalized for all of the KL that it brings about later.
        self.gae = GAE(
            gamma=1.0, lmbda=1.0, value_network=value, deactivate_vmap=True, shifted=False
        )
        self.loss_module = ClipPPOLoss(
            self.actor,
            value,
            clip_epsilon=0.2,
            entropy_bonus=False,
            critic_coeff=1.0,
            loss_critic_type="l2",
        )
        self.optimizer = torch.optim.Adam(
            [
                {"params": policy.parameters(), "lr": options.ppo_lr},
                {"params": self.critic.parameters(), "lr": options.critic_lr},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        decay = DECAYS[options.ppo_decay]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda batch: decay(batch / n_batches)
        )

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """One batch of responses (N, T), time last; returns what to log."""
        losses = {}
        with torch.no_grad(), set_recurrent_mode(True):  # a trajectory in one pass of the critic
            self.gae(batch)
        for _ in range(self.options.ppo_epochs):
            for minibatch in batch[torch.randperm(len(batch))].split(self.options.ppo_minibatch):
                losses = self.loss_module(minibatch)
                self.optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                self.optimizer.step()
        self.schedule.step()
        step = batch.get("next")
        measured = step.get("kl_estimate", step.get("kl"))
        return {
            "reward": batch["next", "task_reward"].sum(1).mean().item(),
            "kl_reference": measured.sum(1).mean().item(),
            "kl_old_policy": losses["kl_approx"].mean().item(),
            "coeff": batch["next", "kl_coeff"].mean().item(),
        }


def train_policy(
    run: Run,
    policy: GPT,
    controller: KLController,
    reward_fn: Callable[[torch.Tensor], torch.Tensor],
    n_batches: int,
    language: DigitLanguage,
    prompts: torch.Tensor,
    options: DigitOptions,
    after_batch: Callable[[int], None] = lambda n: None,
) -> None:
    """PPO, in place, on the task reward minus the coefficient times the KL to the given policy.

    The policy is saved in the folder of the run. `after_batch` is called with the number of
    batches that are done.
    """
    ppo = PPO(policy, language, n_batches, options)
    # The exact KL of each step scatters much less than its log-ratio, and the controller with it.
    stack = KLConstrainedTransform(ppo.actor, controller, estimator="exact")
    write = partial(
        sample_responses,
        ppo.actor,
        max_new_tokens=language.response_length,
        pad_token=language.separator,
        reward_fn=reward_fn,
        return_logits=True,
    )
    for step in run.steps(
        n_batches,
        policy.save_pretrained,
        policy=policy,
        critic=ppo.critic,
        optimizer=ppo.optimizer,
        schedule=ppo.schedule,
        stack=stack,  # the reference, the controller and the trajectories that are not finished
    ):
        contexts = add_separator(draw(prompts, options.ppo_responses), language)
        values = ppo.update(stack(write(contexts)))
        run.log(
            step, "reward {reward:.2f}, KL {kl_reference:.2f} nats, coeff {coeff:.3f}", **values
        )
        after_batch(step + 1)
