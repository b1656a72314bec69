"""Tiny models with random weights, a tokenizer and chats, all made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from torchrl_kl.keys import get_stored

TEXTS = [
    "system\nuser\nassistant\n",
    "the film was good and the story was strange",
    "a bad film with a good story and a strange end",
    "tell me of the film and I tell you of the story",
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAD, END = "<|pad|>", "<|im_end|>"
QUESTIONS = ["tell me of the film", "was it good", "a strange story with a bad end"]
MODELS: list[Any] = [
    "llama",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "qwen2")),
]
MODES = ["history", "text", "tokens"]
COEFF = 0.3
# TorchRL 0.14.1 calls cross_entropy with arguments that are deprecated, PEFT 0.21 transformers.
DEPRECATED = [
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def make_tokenizer(*, pad_is_eos: bool = False, before_texts: str = "") -> Any:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = [PAD, END, "<|im_start|>"]
    trainer = BpeTrainer(vocab_size=48, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if before_texts:
        ids = [(before_texts, special.index(before_texts))]
        tokenizer.post_processor = TemplateProcessing(f"{before_texts} $A", special_tokens=ids)  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END if pad_is_eos else PAD,
        chat_template=TEMPLATE,
    )


def make_model(kind: str, tokenizer: Any, seed: int = 0) -> Any:
    """A model in eval mode whose predictions are far from uniform."""
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": None}
    size |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    if kind == "gpt2":
        config: Any = GPT2Config(n_positions=128, n_embd=32, n_layer=2, n_head=2, **size)
    else:
        size |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = (LlamaConfig if kind == "llama" else Qwen2Config)(
            max_position_embeddings=128, **size
        )
    classes = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}
    generator = torch.Generator().manual_seed(seed)
    model = classes[kind](config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.25 * noise)
    return model.eval()


def make_wrapper(model: Any, tokenizer: Any, mode: str = "text", **options: Any) -> Any:
    """A sampler that draws from the whole vocabulary."""
    generate = {"max_new_tokens": 10, "do_sample": True, "top_k": len(tokenizer)}
    generate |= options.pop("generate_kwargs", {})
    given = {"generate": True, "return_log_probs": True, **options}
    return TransformersWrapper(
        model, tokenizer=tokenizer, input_mode=mode, generate_kwargs=generate, **given
    )


def make_env(tokenizer: Any, mode: Any = "text", n: int = 3) -> Any:
    return ChatEnv(batch_size=(n,), input_mode=mode, tokenizer=tokenizer)


def sample_chats(
    model: Any,
    tokenizer: Any,
    mode: str = "text",
    questions: list[str] | None = None,
    *,
    reward: float = 1.0,
    wrapper: Any = None,
    **options: Any,
) -> Any:
    """A step of ChatEnv for each question, with a reward for each response."""
    if questions is None:  # TorchRL's env needs prompts of one length in tokens mode
        questions = QUESTIONS[:1] * 3 if mode == "tokens" else QUESTIONS
    env = make_env(tokenizer, mode, len(questions))
    start = env.reset(TensorDict(query=questions, batch_size=(len(questions),)))
    batch = (wrapper or make_wrapper(model, tokenizer, mode, **options))(start)
    if mode == "tokens":  # in which TorchRL's env cannot step with ragged texts
        batch["next"] = TensorDict(batch_size=batch.batch_size)
    else:
        batch = env.step(batch)
    batch["next", "reward"] = torch.full((len(questions), 1, 1), reward)
    return batch


def make_dialogs(tokenizer: Any, **options: Any) -> Any:
    """Whole dialogs of several turns, as TransformersWrapper reads them without generating."""
    chats: list[Any] = [
        [("user", "was it good"), ("assistant", "a good film")],
        [
            *[("user", "tell me"), ("assistant", "the story was bad")],
            *[("user", "and the end"), ("assistant", "strange")],
        ],
    ]
    histories = [
        History.from_chats([{"role": role, "content": text} for role, text in chat])  # type: ignore[list-item]
        for chat in chats
    ]
    batch = TensorDict(history=ChatHistory(full=lazy_stack(histories)), batch_size=(2,))
    scorer = make_wrapper(
        make_model("llama", tokenizer), tokenizer, "history", generate=False, **options
    )
    batch = scorer(batch)
    batch["next"] = TensorDict(reward=torch.ones(2, 1), batch_size=(2,))
    return batch


def rows_of(batch: Any, *key: str) -> Any:
    """An entry of each element of a batch (N,)."""
    value = get_stored(batch, key)
    return value if value is None else list(value)


def rows_of_log_probs(actor, steps):
    with torch.no_grad():
        dist = actor.get_dist(steps.select("tokens", "position").contiguous())
        return dist.log_prob(steps["action"])
