"""Small causal language models with sharp weights, texts that grow, and what is true of them."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.modules import set_recurrent_mode
from torchrl.objectives.value import GAE
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.gpt_helpers import sharp
from torchrl_kl import KLConstrainedTransform
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic, sample_responses

# The other families run with `-m slow`.
KINDS: list[Any] = [
    *("gpt", "llama"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "llama-eager", "qwen2")),
]
every_kind = pytest.mark.parametrize("kind", KINDS)
PAD, EOS, T = 0, 3, 8  # of sampled responses: two tokens, and the most steps
VOCAB, LENGTH = 11, 20  # those of DigitLanguageEnv; the longest text
N_LAYER, N_HEAD, N_KEY_HEAD, WIDTH = 2, 4, 2, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": N_HEAD,
    "num_key_value_heads": N_KEY_HEAD,
    "max_position_embeddings": LENGTH,
}


def make_model(kind: str, seed: int = 0, dropout: float = 0.0) -> Any:
    if kind == "gpt":
        model = GPT(VOCAB, LENGTH, n_layer=N_LAYER, n_head=N_HEAD, n_embd=WIDTH, dropout=dropout)
    elif kind == "gpt2":
        drop: dict[str, Any] = {
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
        }
        sizes: dict[str, Any] = {
            "n_layer": N_LAYER,
            "n_head": N_HEAD,
            "n_embd": WIDTH,
            "n_positions": LENGTH,
        }
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, **drop))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, attention_dropout=dropout))
    else:
        config = LlamaConfig(**SIZES, attention_dropout=dropout)
        config._attn_implementation = "eager" if kind == "llama-eager" else "sdpa"
        model = LlamaForCausalLM(config)
    return sharp(model, seed).eval()


def checkpoint(model: Any) -> None:
    """Recomputes activations in the backward pass; transformers before 5.23 call it otherwise."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


def make_actor(kind: str, seed: int = 0, **kwargs) -> Any:
    return CausalLMActor(make_model(kind, seed), **kwargs).eval()


def make_critic(kind: str) -> Any:
    if kind == "gpt":
        return CausalLMCritic(sharp(GPT(VOCAB, LENGTH, n_out=1, n_embd=WIDTH, n_head=N_HEAD), 5))
    options: dict[str, Any] = {"num_labels": 1, "classifier_dropout": 0.0}
    config = LlamaConfig(**SIZES, **options)
    return CausalLMCritic(sharp(LlamaForTokenClassification(config), 5).eval())


def first_layer(model: torch.nn.Module) -> torch.nn.Module:
    """The first block, in whatever it is wrapped."""
    names = ("blocks.0", "transformer.h.0", "model.layers.0", "backbone.layers.0")
    return next(m for name, m in model.named_modules() if name.endswith(names))


class Passes(list[tuple[int, int]]):
    """The texts and tokens of each pass through a model, (rows, tokens)."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        # Hooks belong to what a cache is checked against: it is added before the first step.
        first_layer(model).register_forward_pre_hook(self._note)

    def _note(self, _, inputs) -> None:
        self.append((inputs[0].shape[0], inputs[0].shape[1]))

    def take(self) -> list[tuple[int, int]]:
        """Those since the last call."""
        taken = list(self)
        self.clear()
        return taken


def trust(actor: Any) -> Any:
    """As if the outputs of all texts had been compared, so that none is read for that."""
    lm = actor.reader.lm
    lm.causal, lm.compared = LENGTH, {moved: [(0, LENGTH)] for moved in (False, True)}
    return actor


def random_texts(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (*shape, LENGTH), generator=torch.Generator().manual_seed(seed))


def states(tokens: torch.Tensor, position: Any) -> Any:
    position = torch.as_tensor(position)
    return TensorDict(tokens=tokens, position=position, batch_size=position.shape)


@torch.no_grad()
def true_logits(model: Any, tokens: torch.Tensor, position: Any) -> torch.Tensor:
    """By the bare model, from each text without what follows `position`: (*B, V)."""
    position = torch.as_tensor(position).clamp(min=1)
    rows, lengths = tokens.reshape(-1, tokens.shape[-1]), position.flatten()
    found: list[Any] = [None] * len(rows)
    for n in lengths.unique().tolist():
        output = model(rows[lengths == n, :n])
        output = output if isinstance(output, torch.Tensor) else output.logits
        for row, logits in zip((lengths == n).nonzero(), output[:, -1], strict=True):
            found[row] = logits
    return torch.stack(found).view(*position.shape, -1)


def step(actor: Any, tokens: torch.Tensor, position: Any) -> torch.Tensor:
    """The log-probs of a step of a rollout: (*B, V)."""
    with torch.no_grad():
        return actor.get_dist(states(tokens, position)).logits.log_softmax(-1)


def check_step(actor: Any, tokens: torch.Tensor, position: Any, model: Any = None) -> None:
    """A step of a rollout has the log-probs of the bare model, to 2e-5 nats."""
    model = actor.reader.lm.model if model is None else model
    expected = true_logits(model, tokens, position).log_softmax(-1)
    assert_close(step(actor, tokens, position), expected, atol=2e-5, rtol=0.0)


def cache_of(actor: Any) -> Any:
    return actor.reader._cache


def equal(n: int = 6) -> torch.Tensor:
    return random_texts(n)[:, :4]


def ragged(n: int = 6) -> list[torch.Tensor]:
    return [row[: 1 + i % 5] for i, row in enumerate(random_texts(n))]


def sample(actor: Any, prompts: Any = None, **kwargs) -> Any:
    kwargs = {"pad_token": PAD, "eos_token": EOS, "generator": seeded(), **kwargs}
    return sample_responses(actor, equal() if prompts is None else prompts, T, **kwargs)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scored(actor: Any, critic: Any, reference: Any, prompts: Any) -> Any:
    batch = sample(actor, prompts, reward_fn=lambda texts: (texts == 5).sum(1).float())
    batch = KLConstrainedTransform(actor, 0.1, reference=reference)(batch)
    with torch.no_grad(), set_recurrent_mode(True):
        GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True)(batch)
    return batch
