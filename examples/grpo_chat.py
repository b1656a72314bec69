"""GRPO on chats with TorchRL's LLM API, and a coefficient that holds the KL at a target.

A tiny Llama with random weights answers questions, and is rewarded for the share of words of praise
in its answers. ResponseKLTransform scores each batch once: it writes the log-probs of policy and
reference, and the KL of each response. Its coefficient of 0 leaves the rewards as they are, since
GRPO would divide a penalty by the standard deviation of its group. KLPenaltyLoss adds the KL to
GRPOLoss, in one pass of the policy and none of the reference; its controller, which steers the
coefficient, needs neither. It prints means of the last quarter of the batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from running import Options, read_options
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose, InitTracker, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from torchrl_kl import KLPenaltyLoss, PlannedKLController
from torchrl_kl.language import CausalLMActor, ResponseKLTransform, as_steps

SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
PRAISE = ["good", "great", "fine", "lovely"]
QUESTIONS = ["how was the film", "is the book short", "how is the end", "was it a long dull story"]
# TorchRL uses a template only if it marks what was generated; ChatML if not.
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> "
    "{% generation %}{{ message['content'] }} <end> {% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
QUICK = {"batches": 4, "group": 4}


@dataclass(frozen=True)
class Args(Options):
    """What can be set from the command line."""

    batches: int = 100  # Batches of answers, with one update on each.
    group: int = 8  # Answers to each question, among which GRPO compares.
    lr: float = 1e-3  # Learning rate.
    target_kl: float = 1.0  # KL that the coefficient steers to, nats per response.


def make_tokenizer() -> Any:
    words = [*SPECIAL, *PRAISE, *sorted(set(" ".join(QUESTIONS).split()))]
    ids = dict(zip(words, range(len(words)), strict=True))
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    special: Any = {"pad_token": "<pad>", "eos_token": "<end>", "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_model(tokenizer: Any) -> LlamaForCausalLM:
    config: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 64}
    config |= {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


def make_collector(model, tokenizer: Any, measure: ResponseKLTransform, args: Args) -> LLMCollector:
    n = len(QUESTIONS) * args.group
    loader = DataLoader(
        QUESTIONS * args.batches,  # type: ignore[arg-type]
        batch_size=len(QUESTIONS),
        collate_fn=lambda items: TensorDict(query=list(items), batch_size=(len(items),)),
    )
    env = ChatEnv.from_dataloader(
        loader, tokenizer=tokenizer, input_mode="text", batch_size=(n,), repeats=args.group
    ).append_transform(Compose(InitTracker(), StepCounter(max_steps=1)))  # type: ignore[call-arg]
    # By default only the 50 most likely tokens can be drawn.
    generate = {"max_new_tokens": 6, "do_sample": True, "top_k": len(tokenizer)}
    options = {"tokenizer": tokenizer, "input_mode": "text", "generate_kwargs": generate}
    praise = torch.tensor(tokenizer.convert_tokens_to_ids(PRAISE))

    def reward_and_measure(batch: TensorDictBase) -> TensorDictBase:
        steps = as_steps(batch, pad_token=tokenizer.pad_token_id)
        counted = steps["collector", "mask"]  # (N, T)
        praised = torch.isin(steps["action"], praise) & counted
        share = praised.sum(1) / counted.sum(1).clamp(min=1)  # of the words of each answer
        return measure(batch.set(("next", "reward"), share[:, None, None]))

    return LLMCollector(
        env,
        policy=TransformersWrapper(model, pad_output=True, **options),
        dialog_turns_per_batch=n,
        total_dialog_turns=n * args.batches,
        flatten_data=True,
        postproc=reward_and_measure,
    )


@set_list_to_stack(True)
def main() -> None:
    args = read_options(Args, __doc__, quick=QUICK)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer()
    measure = ResponseKLTransform(model := make_model(tokenizer), 0.0)
    controller = PlannedKLController(args.target_kl)
    actor, reference = CausalLMActor(model), measure.reference
    objective: Any = GRPOLoss(actor, entropy_bonus=False)  # type: ignore[arg-type]
    objective.set_keys(action="action", sample_log_prob="action_log_prob")
    options: Any = {"gradient": "k2", "reference": reference, "loss": objective}
    penalty = KLPenaltyLoss(actor, controller, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    collector, seen = make_collector(model, tokenizer, measure, args), []
    for batch in (bar := tqdm(collector, total=args.batches, disable=None)):
        n, sampler = len(batch), SamplerWithoutReplacement()
        buffer = ReplayBuffer(storage=LazyStackStorage(n), sampler=sampler, batch_size=n)
        buffer.append_transform(MCAdvantage(grpo_size=args.group))
        buffer.extend(batch)
        data = buffer.sample()
        steps = as_steps(data, pad_token=tokenizer.pad_token_id)
        means = (float(batch["next", key].mean()) for key in ("reward", "kl"))
        seen.append((*means, penalty.update_controller(steps)))
        optimizer.zero_grad()
        losses = penalty(steps)
        (losses["loss_objective"] + losses["loss_kl"]).backward()
        optimizer.step()
        bar.set_postfix_str("reward {:.2f}, KL {:.2f} nats, coeff {:.3f}".format(*seen[-1]))
    last = torch.tensor(seen[-max(len(seen) // 4, 1) :]).mean(0).tolist()
    print("reward {:.3f}, KL {:.3f} nats per response, coefficient {:.3f}".format(*last))


if __name__ == "__main__":
    main()
