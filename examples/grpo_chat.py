"""GRPO on chats with TorchRL's LLM API, and a coefficient that holds the KL at a target.

A tiny Llama with random weights (nothing is downloaded) answers questions. Answers are rewarded for
words of praise: the share of their tokens that are such words. ChatEnv, TransformersWrapper,
LLMCollector, MCAdvantage and GRPOLoss are TorchRL's; the KL is this package's:

- ResponseKLTransform scores policy and reference once per batch, writes the log-probs that GRPOLoss
  reads and ("next", "kl") of each response, and with a coefficient of 0 leaves the rewards alone.
- KLPenaltyLoss adds the KL to the loss. In the reward it would be divided by the standard deviation
  of its group. Its controller steers the coefficient to a KL of `--target-kl` nats per response.

Printed at the end, as means over the last quarter of the batches:
    reward       share of words of praise, in [0, 1]
    KL           of the policy to the model that it began as, nats per response
    coefficient  of the KL in the loss
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from digit_job import arg, parse_args
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

from torchrl_kl import (
    AdaptiveKLController,
    CausalLMActor,
    KLPenaltyLoss,
    ResponseKLTransform,
    as_steps,
)

SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
PRAISE = ["good", "great", "fine", "lovely"]
WORDS = "how was is the a film story book end bad dull long short odd slow and".split()
QUESTIONS = ["how was the film", "is the book short", "how is the end", "was the story a long film"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


@dataclass
class Args:
    """What can be set from the command line."""

    seed: int = arg(0, "Seed of the weights and of the sampled answers.")
    quick: bool = arg(False, "Run at a small size, in seconds; the results are then poor.")
    threads: int = arg(1, "Threads that PyTorch may use.")
    batches: int = arg(120, "Batches of answers, with one update on each.")
    group: int = arg(16, "Answers to each question, among which GRPO compares.")
    tokens: int = arg(6, "Tokens of an answer, at most.")
    lr: float = arg(3e-3, "Learning rate.")
    target_kl: float = arg(1.0, "KL that the coefficient steers to, nats per response.")
    init_coeff: float = arg(0.3, "Where the coefficient starts.")
    horizon: float = arg(512.0, "Responses in which the coefficient can grow by a factor of e.")


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *PRAISE, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    end, size = tokenizer.eos_token_id, 64
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size,
            intermediate_size=2 * size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=end,
            bos_token_id=None,
        )
    )
    return model.eval()


def make_collector(model, tokenizer, measure: ResponseKLTransform, args: Args) -> LLMCollector:
    n = len(QUESTIONS) * args.group
    loader = DataLoader(
        QUESTIONS * args.batches,  # type: ignore[arg-type]
        batch_size=len(QUESTIONS),
        collate_fn=lambda items: TensorDict(query=list(items), batch_size=(len(items),)),
    )
    env = ChatEnv.from_dataloader(
        loader, tokenizer=tokenizer, input_mode="text", batch_size=(n,), repeats=args.group
    )
    env = env.append_transform(Compose(InitTracker(), StepCounter(max_steps=1)))
    praise = torch.tensor(tokenizer.convert_tokens_to_ids(PRAISE))

    def reward_and_measure(batch: TensorDictBase) -> TensorDictBase:
        responses = batch.get(("tokens", "response"))  # (N, T), padded
        share = torch.isin(responses, praise).float().mean(-1)
        return measure(batch.set(("next", "reward"), share[:, None, None]))

    sampler = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="text",
        pad_output=True,
        generate_kwargs={
            **{"max_new_tokens": args.tokens, "do_sample": True, "temperature": 1.0},
            "top_k": len(tokenizer),  # by default only 50 tokens can be drawn
        },
    )
    return LLMCollector(
        env,
        policy=sampler,
        dialog_turns_per_batch=n,
        total_dialog_turns=n * args.batches,
        flatten_data=True,
        postproc=reward_and_measure,
    )


@set_list_to_stack(True)
def main() -> None:
    args = parse_args(Args, __doc__)
    if args.quick:
        args.batches, args.group = 3, 4
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    measure = ResponseKLTransform(model, 0.0)
    controller = AdaptiveKLController(args.init_coeff, args.target_kl, args.horizon, clip=1.0)
    actor = CausalLMActor(model)
    penalty = KLPenaltyLoss(actor, controller, gradient="sequence", reference=measure.reference)
    scorer = TransformersWrapper(
        *(model,), tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    objective = GRPOLoss(scorer, kl_to_ref_coeff=None, entropy_bonus=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    collector = make_collector(model, tokenizer, measure, args)
    n, seen, start = len(QUESTIONS) * args.group, [], time.perf_counter()
    bar = tqdm(collector, desc="GRPO", total=args.batches)
    for batch in bar:
        buffer = ReplayBuffer(
            storage=LazyStackStorage(n), sampler=SamplerWithoutReplacement(), batch_size=n
        )
        buffer.append_transform(MCAdvantage(grpo_size=args.group))
        buffer.extend(batch)
        data = buffer.sample()
        steps = as_steps(data, pad_token=0, eos_token=1)
        seen.append(
            (batch["next", "reward"].mean(), batch["next", "kl"].mean(), controller.coeff.clone())
        )
        penalty.update_controller(steps)
        losses = objective(data)
        loss = losses.loss_objective + penalty(steps)["loss_kl"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix_str("reward {:.2f}, KL {:.2f} nats, coeff {:.3f}".format(*seen[-1]))
    last = torch.tensor(seen[-max(len(seen) // 4, 1) :]).mean(0)
    print("reward {:.3f}  KL {:.3f}  coeff {:.3f}".format(*last.tolist()))
    for i in range(0, len(seen), 10):
        print(*(f"{float(v):.3f}" for v in seen[i]))
    print(f"seconds      {time.perf_counter() - start:.0f}")


if __name__ == "__main__":
    main()
