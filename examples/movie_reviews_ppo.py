"""What the runs of movie_reviews.py are made of: its options, what they begin with, and PPO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from movie_reviews_rewards import LinearReward
from peft import LoraConfig, get_peft_model
from running import Count, Index, JobOptions, NonNegative, Positive, Share
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from torchrl_kl import (
    CausalLMActor,
    CausalLMCritic,
    ConstantKLController,
    KLConstrainedTransform,
    KLController,
    KLPenaltyLoss,
    sample_responses,
)

SHOWN = 6  # prompts in the report


@dataclass(frozen=True)
class Options(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/movie_reviews")
    """Folder of the results. A folder that is in use is refused, or continued with --resume."""
    processes: Count = 2
    """Processes for the stages and runs that do not depend on each other."""
    data: str = ""
    """CSV file with the columns text and label; default: that of the package movie-reviews."""
    model: str = ""
    """A Hugging Face causal language model, name or folder; default: one is trained."""
    lora: bool = False
    """Train LoRA adapters; the model without them is the reference."""
    lora_rank: Count = 8
    """Rank of the adapters."""
    vocab_size: Count = 2048
    """Tokens of the tokenizer that is trained."""
    layers: Count = 4
    """Layers of the language model that is trained."""
    width: Count = 128
    """Its width; heads are 32 wide."""
    lm_updates: Index = 1200
    """Updates of the language model."""
    lm_batch: Count = 32
    """Passages per update of the language model."""
    lm_lr: Positive = 5e-3
    """Peak learning rate of the embeddings; that of the layers is four times as high."""
    heldout: Share = 0.1
    """Share of the reviews that give prompts and are not trained on."""
    reward_passages: Count = 100_000
    """Most passages that each of the two rewards is fitted to."""
    reward_epochs: Count = 3
    """How often each of them is used."""
    prompt_tokens: Count = 6
    """Tokens of a prompt, the beginning of a passage."""
    response_tokens: Count = 24
    """Tokens of a response; all have the same length."""
    temperature: Positive = 0.7
    """Of the policy and of its reference."""
    eval_responses: Count = 512
    """Responses by which each final policy is measured."""
    batches: Count = 120
    """Batches of responses per run."""
    responses: Count = 64
    """Responses per batch."""
    minibatch: Count = 32
    """Responses per update of policy and critic."""
    epochs: Count = 1
    """How often each batch is used."""
    lr: Positive = 3e-4
    """Learning rate of the policy."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critic."""
    coeff: NonNegative = 0.2
    """The constant coefficient, reward per nat."""
    target: Positive = 3.0
    """KL that the adaptive coefficients steer to, nats per response."""


class Base(NamedTuple):
    """What every run begins with."""

    folder: Path  # of the language model
    tokenizer: Any
    proxy: LinearReward
    gold: LinearReward
    prompts: Tensor  # (N, P)
    eval_prompts: Tensor  # (M, P)

    @classmethod
    def load(cls, out: Path) -> Base:
        prepared = out / "base"
        proxy, gold = (LinearReward.load(prepared / f"{name}.pt") for name in ("proxy", "gold"))
        tokenizer = AutoTokenizer.from_pretrained(out / "language_model")
        prompts, eval_prompts = torch.load(prepared / "prompts.pt")
        return cls(out / "language_model", tokenizer, proxy, gold, prompts, eval_prompts)

    def decode(self, ids: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def sample(
        self, actor: CausalLMActor, prompts: Tensor, length: int, *, return_logits: bool = False
    ) -> TensorDictBase:
        """Responses with the proxy as reward; the padding is never used."""
        return sample_responses(
            actor,
            prompts,
            length,
            pad_token=0,
            reward_fn=lambda ids: self.proxy(self.decode(ids)),
            return_logits=return_logits,
        )

    def describe(self, batch: TensorDictBase) -> dict[str, float]:
        """The metrics of penalized responses (N, T)."""
        texts, action, step = batch["tokens"][:, 0], batch["action"], batch.get("next")
        return {
            "proxy": batch["next", "task_reward"].sum(1).mean().item(),
            "gold": self.gold(self.decode(texts)).mean().item(),
            "kl": step.get("kl_estimate", step.get("kl")).sum(1).mean().item(),
            "coeff": batch["next", "kl_coeff"].mean().item(),
            "perplexity": batch["next", "ref_log_prob"].mean().neg().exp().item(),
            "distinct_2": distinct_2(action),
        }


def distinct_2(ids: Tensor) -> float:
    """Different pairs of neighbouring tokens of responses (N, T), per pair (Li et al. 2016)."""
    pairs = torch.stack([ids[:, :-1].flatten(), ids[:, 1:].flatten()], -1)
    return len(pairs.unique(dim=0)) / len(pairs)


def draw(prompts: Tensor, n: int) -> Tensor:
    return prompts[torch.randint(len(prompts), (n,))]


def evaluate(
    base: Base, actor: CausalLMActor, measure: KLConstrainedTransform, options: Options
) -> dict[str, Any]:
    """The metrics of responses to held-out prompts, and the first of these texts."""
    torch.manual_seed(options.seed + 1)
    batch = measure(base.sample(actor, base.eval_prompts, options.response_tokens))
    texts = batch["tokens"][:SHOWN, 0]
    prompts, responses = texts[:, : options.prompt_tokens], texts[:, options.prompt_tokens :]
    samples = list(zip(base.decode(prompts), base.decode(responses), strict=True))
    return {"final": base.describe(batch), "samples": samples}


class PPO:
    """Improves a language model on the proxy; the KL to what it was is penalized.

    Args:
        base: the language model, the rewards and the prompts.
        controller: of the coefficient.
        in_loss: whether the KL is penalized in the loss, instead of the reward.
        options: learning rates and sizes.
    """

    def __init__(self, base: Base, controller: KLController, in_loss: bool, options: Options):
        self.base, self.controller, self.options = base, controller, options
        self.policy: Any = AutoModelForCausalLM.from_pretrained(base.folder)
        # The critic begins as the language model, but for its head.
        self.critic: Any = AutoModelForTokenClassification.from_pretrained(
            base.folder, num_labels=1
        )
        if options.lora:
            self.policy = with_adapters(self.policy, "CAUSAL_LM", options.lora_rank)
            self.critic = with_adapters(self.critic, "TOKEN_CLS", options.lora_rank)
        for model in (self.policy, self.critic):
            model.eval()  # without dropout
        self.actor = CausalLMActor(self.policy, temperature=options.temperature)
        value = CausalLMCritic(self.critic)
        self.stack = KLConstrainedTransform(
            self.actor,
            ConstantKLController(0.0) if in_loss else controller,  # 0 only measures
            estimator="exact",
            reference=self.policy.disable_adapter if options.lora else None,
        )
        self.gae = GAE(
            gamma=1.0, lmbda=0.95, value_network=value, deactivate_vmap=True, shifted=False
        )
        self.loss = ClipPPOLoss(
            self.actor, value, entropy_bonus=False, loss_critic_type="l2", normalize_advantage=True
        )
        self.penalty = None
        if in_loss:
            self.penalty = self.loss = KLPenaltyLoss(
                self.actor,
                controller,
                gradient="sequence",
                weights="step",
                reference=self.stack.reference,
                loss=self.loss,
            )
        groups = ((self.policy, options.lr), (self.critic, options.critic_lr))
        self.optimizer = torch.optim.Adam(
            [
                {"params": [p for p in model.parameters() if p.requires_grad], "lr": lr}
                for model, lr in groups
            ],
            betas=(0.9, 0.95),
        )

    def save(self, folder: Path) -> None:
        self.policy.save_pretrained(folder / "policy")

    def collect(self) -> TensorDictBase:
        """A batch of responses (N, T), scored and penalized."""
        prompts = draw(self.base.prompts, self.options.responses)
        length = self.options.response_tokens
        return self.stack(self.base.sample(self.actor, prompts, length, return_logits=True))

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Updates policy and critic with a batch; its metrics."""
        metrics = self.base.describe(batch)
        if self.penalty is not None:
            metrics["coeff"] = self.penalty.update_controller(batch)
        with torch.no_grad(), set_recurrent_mode(True):  # a response in one pass of the critic
            self.gae(batch)
        losses = {}
        for _ in range(self.options.epochs):
            for rows in torch.randperm(len(batch)).split(self.options.minibatch):
                losses = self.loss(batch[rows])
                total = losses["loss_objective"] + losses["loss_critic"]
                if self.penalty is not None:
                    total = total + losses["loss_kl"]
                self.optimizer.zero_grad()
                total.backward()
                for group in self.optimizer.param_groups:
                    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
                self.optimizer.step()
        return metrics | {"kl_old_policy": losses["kl_approx"].mean().item()}


def with_adapters(model: Any, task: str, rank: int) -> Any:
    """The model with LoRA in all its layers but the output, which a critic learns anew."""
    config = LoraConfig(
        task_type=task,
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=["score", "classifier"] if task == "TOKEN_CLS" else None,
    )
    return get_peft_model(model, config)
