"""What torchrl_kl is compared with: the same work by hand, in plain PyTorch, as fast as we can.

Nothing here uses the package's transforms, actors or cache; of a GPT only the weights are taken.

Axes: N texts, P tokens of a prompt, T tokens of a response, L = P + T, H heads, D width of a head,
C = H * D width of the model, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_kl.language import GPT

# Attention of one query over at most this many keys is faster as products and sums of whole
# tensors than as many tiny matrix products (measured at 64 and 1024 texts).
SHORT_TEXT = 16
# Work is split so that what a block computes stays in the processor's cache: texts that are sampled
# together, and tokens that are scored together.
SAMPLED_TEXTS, SCORED_TOKENS = 256, 2048

# Without an end of a text, all responses have the same length.
NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
NO_SPECIAL_TOKENS |= {"pad_token_id": None}


@dataclass
class Scored:
    """Sampled responses with their penalized rewards; all but `texts` are (N, T)."""

    texts: Tensor  # (N, L)
    log_prob: Tensor
    ref_log_prob: Tensor
    kl: Tensor  # k1 = log_prob - ref_log_prob, nats
    reward: Tensor  # the task reward, at the last token, minus coeff * kl at each token


@dataclass
class Layer:
    """The weights of one block."""

    norm1: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm2: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


class ShortCache:
    """Keys and values (T, N, H, D) of short texts: attention by products and sums."""

    def __init__(self, n_texts: int, length: int, heads: int, width: int):
        self.keys, self.values = torch.empty(2, length, n_texts, heads, width)

    def fill(self, key: Tensor, value: Tensor) -> None:
        """Takes those of a prompt, (N, H, P, D)."""
        for cache, new in ((self.keys, key), (self.values, value)):
            cache[: new.shape[2]] = new.permute(2, 0, 1, 3)

    def attend(self, qkv: Tensor, position: int) -> Tensor:
        """The mixed values (N, C) of one new position: qkv is (N, 3, H, D)."""
        query, self.keys[position], self.values[position] = qkv.unbind(1)
        end = position + 1
        scores = (self.keys[:end] * query).sum(-1).mul_(query.shape[-1] ** -0.5)
        return (scores.softmax(0).unsqueeze(-1) * self.values[:end]).sum(0).flatten(1)


class LongCache:
    """Keys and values (N * H, T, D): attention by batched matrix products.

    For one query they are faster than F.scaled_dot_product_attention on a CPU.
    """

    def __init__(self, n_texts: int, length: int, heads: int, width: int):
        self.keys, self.values = torch.empty(2, n_texts * heads, length, width)

    def fill(self, key: Tensor, value: Tensor) -> None:
        """Takes those of a prompt, (N, H, P, D)."""
        for cache, new in ((self.keys, key), (self.values, value)):
            cache[:, : new.shape[2]] = new.flatten(0, 1)

    def attend(self, qkv: Tensor, position: int) -> Tensor:
        """The mixed values (N, C) of one new position: qkv is (N, 3, H, D)."""
        query, key, value = qkv.transpose(0, 1).flatten(1, 2)
        self.keys[:, position], self.values[:, position] = key, value
        keys, values = self.keys[:, : position + 1], self.values[:, : position + 1]
        scale, query = query.shape[-1] ** -0.5, query.unsqueeze(1)
        scores = torch.baddbmm(query.new_empty(()), query, keys.mT, beta=0, alpha=scale)
        return torch.bmm(scores.softmax(-1), values).view(len(qkv), -1)


class PlainGPT:
    """The weights of a `GPT`, without dropout, as functions of tokens."""

    def __init__(self, gpt: GPT):
        def pair(module: Any) -> tuple[Tensor, Tensor]:
            return module.weight.detach(), module.bias.detach()

        blocks: Any = gpt.blocks
        self.layers = [
            Layer(
                norm1=pair(block.attention_norm),
                qkv=pair(block.attention.query_key_value),
                out=pair(block.attention.project),
                norm2=pair(block.mlp_norm),
                up=pair(block.expand),
                down=pair(block.project),
            )
            for block in blocks
        ]
        self.tokens = gpt.token_embedding.weight.detach()
        self.positions = gpt.position_embedding.weight.detach()
        self.norm, self.head = pair(gpt.norm), gpt.head.weight.detach()
        self.heads = int(gpt.config["n_head"])
        self.width = self.tokens.shape[1]

    def logits(self, texts: Tensor, first: int, caches: list | None = None) -> Tensor:
        """Logits (N, L - first, V) after each token from `first` on; fills the caches."""
        n_texts, length = texts.shape
        x = F.embedding(texts, self.tokens) + self.positions[:length]
        for index, layer in enumerate(self.layers):
            joint = F.linear(F.layer_norm(x, (self.width,), *layer.norm1), *layer.qkv)
            split = joint.view(n_texts, length, 3, self.heads, -1)
            query, key, value = split.permute(2, 0, 3, 1, 4)
            if caches is not None:
                caches[index].fill(key, value)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = self._finish(x, mixed.transpose(1, 2).flatten(2), layer)
        return F.linear(F.layer_norm(x[:, first:], (self.width,), *self.norm), self.head)

    def step(self, token: Tensor, position: int, caches: list) -> Tensor:
        """Logits (N, V) after the token (N,) at the position."""
        x = F.embedding(token, self.tokens) + self.positions[position]
        for layer, cache in zip(self.layers, caches, strict=True):
            joint = F.linear(F.layer_norm(x, (self.width,), *layer.norm1), *layer.qkv)
            mixed = cache.attend(joint.view(len(token), 3, self.heads, -1), position)
            x = self._finish(x, mixed, layer)
        return F.linear(F.layer_norm(x, (self.width,), *self.norm), self.head)

    def _finish(self, x: Tensor, mixed: Tensor, layer: Layer) -> Tensor:
        x = x + F.linear(mixed, *layer.out)
        hidden = F.linear(F.layer_norm(x, (self.width,), *layer.norm2), *layer.up)
        return x + F.linear(F.gelu(hidden, approximate="tanh"), *layer.down)


def draw(log_probs: Tensor) -> Tensor:
    """One token per row of log-probs (N, V): (N, 1), by inverting the cumulative distribution.

    It needs one random number per row where a race (`torch.multinomial`, Gumbel noise) needs V:
    half the time at 11 tokens, a tenth at 4000. In float64, so that rare tokens are drawn rightly.
    """
    cumulative = log_probs.double().exp_().cumsum_(-1)
    threshold = torch.rand(len(log_probs), 1, dtype=torch.float64) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    return drawn.clamp_(max=log_probs.shape[-1] - 1)


@torch.inference_mode()
def sample(gpt: PlainGPT, prompts: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Texts (N, L) that continue the prompts (N, P), and the log-probs (N, T) of their tokens."""
    parts = [_sample_part(gpt, part, n_tokens) for part in prompts.split(SAMPLED_TEXTS)]
    texts, log_probs = zip(*parts, strict=True)
    return torch.cat(texts), torch.cat(log_probs)


def _sample_part(gpt: PlainGPT, prompts: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
    n_texts, start = prompts.shape
    texts = torch.cat([prompts, prompts.new_empty(n_texts, n_tokens)], 1)
    log_prob = torch.empty(n_tokens, n_texts, 1)
    kind = ShortCache if texts.shape[1] <= SHORT_TEXT else LongCache
    size = (n_texts, texts.shape[1], gpt.heads, gpt.width // gpt.heads)
    caches = [kind(*size) for _ in gpt.layers]
    logits = gpt.logits(prompts, start - 1, caches).squeeze(1)
    for index in range(n_tokens):
        log_probs = logits.log_softmax(-1)
        token = draw(log_probs)
        torch.gather(log_probs, 1, token, out=log_prob[index])
        texts[:, start + index] = token.squeeze(1)
        if index < n_tokens - 1:
            logits = gpt.step(token.squeeze(1), start + index, caches)
    return texts, log_prob.squeeze(-1).T


@torch.inference_mode()
def sample_and_score(
    gpt: PlainGPT,
    reference: PlainGPT,
    prompts: Tensor,
    n_tokens: int,
    reward_fn: Callable[[Tensor], Tensor],
    coeff: float,
) -> Scored:
    """Samples responses, then scores them by one teacher-forced pass of the reference."""
    texts, log_prob = sample(gpt, prompts, n_tokens)
    start, n_texts = prompts.shape[1], max(1, SCORED_TOKENS // texts.shape[1])
    ref_log_prob = torch.cat(
        [
            log_prob_at(reference.logits(part[:, :-1], start - 1), part[:, start:])
            for part in texts.split(n_texts)
        ]
    )
    return penalize(texts, log_prob, ref_log_prob, reward_fn(texts), coeff)


def penalize(
    texts: Tensor, log_prob: Tensor, ref_log_prob: Tensor, task_reward: Tensor, coeff: float
) -> Scored:
    """k1 per token (N, T), and the reward: the task's (N,) at the last token, and the penalties."""
    kl = log_prob - ref_log_prob
    reward = -coeff * kl
    reward[:, -1] += task_reward
    return Scored(texts, log_prob, ref_log_prob, kl, reward)


def log_prob_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs (N, T) of tokens (N, T) under logits (N, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@dataclass
class Responses:
    """What a PPO update needs of a batch of N responses; all but `texts` are (N, T)."""

    texts: Tensor  # (N, P + T)
    log_prob: Tensor  # of the policy that drew them
    advantage: Tensor
    value_target: Tensor

    @classmethod
    def of(cls, batch: Any) -> Responses:
        """From a collected batch [N, T] that GAE has completed."""
        names = ("action_log_prob", "advantage", "value_target")
        log_prob, advantage, target = (batch[name].reshape(batch.batch_size) for name in names)
        return cls(finished_texts(batch), log_prob, advantage, target)


def finished_texts(batch: Any) -> Tensor:
    """The texts (N, L) of a batch [N, T] of responses that all have T tokens."""
    texts = batch["tokens"][:, -1].clone()  # before the last action
    texts[:, -1] = batch["action"][:, -1]
    return texts


class HandWrittenPPO:
    """Clipped PPO of a GPT and its critic: one pass of each over whole texts, and one Adam step.

    Its loss is that of ClipPPOLoss with `loss_critic_type="l2"` and without normalized advantages.
    """

    def __init__(self, policy: GPT, critic: GPT, clip: float, entropy: float, value: float):
        self.policy, self.critic = policy, critic
        self.clip, self.entropy_coeff, self.value_coeff = clip, entropy, value
        parameters = [*policy.parameters(), *critic.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)

    def loss(self, batch: Responses) -> Tensor:
        """The sum of the three losses, each a mean over all tokens of all responses."""
        start = batch.texts.shape[1] - batch.log_prob.shape[1]
        read, drawn = batch.texts[:, :-1], batch.texts[:, start:].unsqueeze(-1)
        log_probs = self.policy(read)[:, start - 1 :].log_softmax(-1)
        values = self.critic(read)[:, start - 1 :, 0]

        ratio = (log_probs.gather(-1, drawn).squeeze(-1) - batch.log_prob).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * batch.advantage, clipped * batch.advantage).mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        value_loss = F.mse_loss(values, batch.value_target)
        return self.value_coeff * value_loss - gain - self.entropy_coeff * entropy

    def update(self, batch: Responses) -> None:
        """One step of Adam."""
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()


def tiny_models() -> dict[str, Any]:
    """Untrained causal language models of transformers, tiny, in eval mode, vocabulary 11."""
    from transformers import GPT2Config, LlamaConfig, Qwen2Config

    rope: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    rope |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    gpt2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    configs = {
        "GPT-2": GPT2Config(vocab_size=11, **gpt2, **NO_SPECIAL_TOKENS),
        "Llama": LlamaConfig(vocab_size=11, **rope, **NO_SPECIAL_TOKENS),
        "Qwen2": Qwen2Config(vocab_size=11, **rope, **NO_SPECIAL_TOKENS),
    }
    return {name: untrained(config) for name, config in configs.items()}


def llama(vocab_size: int) -> Any:
    """An untrained Llama, of 3.4 million parameters with a vocabulary of 4000, in eval mode."""
    from transformers import LlamaConfig

    return untrained(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=192,
            intermediate_size=544,
            num_hidden_layers=4,
            num_attention_heads=6,
            max_position_embeddings=128,
            **NO_SPECIAL_TOKENS,
        )
    )


def untrained(config: Any) -> Any:
    """A causal language model of transformers with random weights, in eval mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config).eval()


@torch.inference_mode()
def generate_and_score(
    model: Any,
    reference: Any,
    prompts: Tensor,
    n_tokens: int,
    reward_fn: Callable[[Tensor], Tensor],
    coeff: float,
) -> Scored:
    """Samples by `generate` of transformers; then one teacher-forced pass of the reference."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        min_new_tokens=n_tokens,
        max_new_tokens=n_tokens,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,  # which is never needed: all texts have the same length
    )
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), generation_config=config
    )
    texts, response = made.sequences, made.sequences[:, -n_tokens:]
    log_prob = log_prob_at(torch.stack(made.logits, 1), response)
    ref_logits = reference(texts[:, :-1], use_cache=False, logits_to_keep=n_tokens).logits
    ref_log_prob = log_prob_at(ref_logits, response)
    return penalize(texts, log_prob, ref_log_prob, reward_fn(texts), coeff)
