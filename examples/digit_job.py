"""What the examples on the digit language share: settings, prompts, language model and PPO."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TypeVar

import torch
from tensordict import TensorDictBase
from torch.nn.functional import cross_entropy
from torchrl.collectors import Collector
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

from torchrl_kl import GPT, CausalLMActor, CausalLMCritic, KLConstrainedTransform, KLController
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

# The part of a learning rate that is left when a part of the batches is done.
DECAYS = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
Log = Callable[..., None]  # called as log(step, name=value, ...)
Settings = TypeVar("Settings", bound="JobArgs")


def arg(default, help, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class JobArgs:
    """What can be set from the command line of every example."""

    seed: int = arg(0, "Seed of the initial weights, the data and the sampled responses.")
    quick: bool = arg(
        False, "Run everything at a small size, in seconds; the results are then poor."
    )
    threads: int = arg(1, "Threads of each process. More of them slow down next to a busy process.")
    heldout_prompts: int = arg(1000, "Prompts that no stage trains on.")
    lm_iterations: int = arg(1200, "Updates of the language model.")
    lm_batch: int = arg(256, "Texts per update of the language model.")
    lm_lr: float = arg(2e-3, "Peak learning rate of the language model.")
    lm_beta2: float = arg(0.999, "AdamW's decay of squared gradients, language model.")
    lm_decay: float = arg(0.01, "AdamW's weight decay, language model.")
    ppo_responses: int = arg(512, "Responses per batch.")
    ppo_minibatch: int = arg(256, "Responses per update of policy and critic.")
    ppo_epochs: int = arg(2, "How often each batch is used.")
    ppo_lr: float = arg(1e-3, "Initial learning rate of the policy; it decays to zero.")
    critic_lr: float = arg(3e-3, "Initial learning rate of the critic; it decays to zero.")
    ppo_decay: str = arg("linear", "How the learning rates decay to zero.", list(DECAYS))


def parse_args(settings: type[Settings], description: str | None) -> Settings:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for f in fields(settings):
        flag = "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            parser.add_argument(flag, action="store_true", help=f.metadata["help"])
        else:
            text = f"{f.metadata['help']} (default: {f.default})"
            choices = f.metadata["choices"]
            parser.add_argument(
                flag, type=type(f.default), default=f.default, choices=choices, help=text
            )
    return settings(**vars(parser.parse_args()))


def next_token(gpt: GPT):
    """A GPT as torchrl_kl's exact values want a model: contexts to the logits of the next token."""
    return lambda tokens: gpt(tokens, logits_to_keep=1)[:, 0]


def true_next_token(language: DigitLanguage):
    """The language itself as such a model."""
    return lambda tokens: language.next_token_probs(tokens).log()


def split_prompts(language: DigitLanguage, args: JobArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Training prompts, and held-out ones: the first two are those of the pictures and checks."""
    prompts = torch.cartesian_prod(*[torch.arange(language.vocab_size)] * language.prompt_length)
    shown = torch.tensor([[5, 7, 1, 5], [0, 2, 8, 6]])
    if not len(shown) <= args.heldout_prompts < len(prompts):
        raise SystemExit(
            f"--heldout-prompts must be from {len(shown)} to {len(prompts) - 1}, "
            f"got {args.heldout_prompts}."
        )
    is_shown = (prompts[:, None] == shown).all(-1).any(-1)
    rest = prompts[~is_shown]
    rest = rest[torch.randperm(len(rest))]
    n_rest = args.heldout_prompts - len(shown)
    return rest[n_rest:], torch.cat([shown, rest[:n_rest]])


def draw(prompts: torch.Tensor, n: int) -> torch.Tensor:
    return prompts[torch.randint(len(prompts), (n,))]


def train_language_model(
    language: DigitLanguage, prompts: torch.Tensor, args: JobArgs, log: Log
) -> GPT:
    # The last token of a text is predicted, never read: the block is one shorter than the text.
    gpt = GPT(language.n_tokens, language.text_length - 1)
    optimizer = torch.optim.AdamW(
        gpt.parameters(),
        lr=args.lm_lr,
        betas=(0.9, args.lm_beta2),
        weight_decay=args.lm_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lm_lr, total_steps=args.lm_iterations
    )
    bar = tqdm(range(args.lm_iterations), desc="language model")
    for step in bar:
        texts = language.sample(draw(prompts, args.lm_batch))
        logits = gpt(texts[:, :-1])[:, language.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, language.context_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            log(step, loss=loss.item())
            bar.set_postfix_str(f"loss {loss.item():.3f} nats per token")
    return gpt.eval()


class PPO:
    """Improves `policy`, in place, with batches of responses whose rewards are penalized.

    Args:
        policy: the policy; `actor` is it as collectors want it.
        language: what the responses are written in.
        n_batches: how many batches there will be; the learning rates decay to zero over them.
        args: learning rates and sizes.
    """

    def __init__(self, policy: GPT, language: DigitLanguage, n_batches: int, args: JobArgs):
        # A critic, not a mean over responses: after the first digit it knows whether that digit was
        # right, so that the later digits are not blamed for it. One layer is enough. It reads one
        # token more than the policy: the last one, in the final state.
        critic = GPT(language.n_tokens, language.text_length, n_layer=1, n_out=1)
        self.args = args
        self.actor, value = CausalLMActor(policy), CausalLMCritic(critic)
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
                {"params": policy.parameters(), "lr": args.ppo_lr},
                {"params": critic.parameters(), "lr": args.critic_lr},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        decay = DECAYS[args.ppo_decay]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda batch: decay(batch / n_batches)
        )

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """One batch of responses (N, T), time last; returns what to log."""
        losses = {}
        with torch.no_grad(), set_recurrent_mode(True):  # a trajectory in one pass of the critic
            self.gae(batch)
        for _ in range(self.args.ppo_epochs):
            for minibatch in batch[torch.randperm(len(batch))].split(self.args.ppo_minibatch):
                losses = self.loss_module(minibatch)
                self.optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                self.optimizer.step()
        self.schedule.step()
        return {
            "reward": batch["next", "task_reward"].sum(1).mean().item(),
            "kl_reference": batch["next", "kl"].sum(1).mean().item(),
            "kl_old_policy": losses["kl_approx"].mean().item(),
            "coeff": batch["next", "kl_coeff"].mean().item(),
        }


def train_policy(
    run: str,
    policy: GPT,
    controller: KLController,
    reward_fn: Callable[[torch.Tensor], torch.Tensor],
    n_batches: int,
    language: DigitLanguage,
    prompts: torch.Tensor,
    args: JobArgs,
    log: Log,
    row: int | None = None,
) -> None:
    """PPO, in place, on the task reward minus the coefficient times the KL to the given policy.

    `row` is where the progress bar goes, if others are shown at the same time.
    """
    ppo = PPO(policy, language, n_batches, args)
    stack = KLConstrainedTransform(ppo.actor, controller)
    env = DigitLanguageEnv(
        language,
        prompts=prompts,
        reward_fn=reward_fn,
        batch_size=(args.ppo_responses,),
        seed=args.seed,
    )
    frames = args.ppo_responses * language.response_length
    collector = Collector(
        env,
        ppo.actor,
        frames_per_batch=frames,
        total_frames=frames * n_batches,
        postproc=stack,
        auto_register_policy_transforms=False,
    )
    bar = tqdm(collector, desc=f"PPO, {run}", total=n_batches, position=row)
    for step, batch in enumerate(bar):
        values = ppo.update(batch)
        log(step, **values)
        bar.set_postfix_str(
            "reward {reward:.2f}, KL {kl_reference:.2f} nats, coeff {coeff:.3f}".format(**values)
        )
    collector.shutdown()
