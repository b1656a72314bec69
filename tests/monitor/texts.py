"""Batches of TorchRL's LLM API, as a sampler without faults would record them."""

from typing import Any

import torch
from tensordict import TensorDict, lazy_stack

from torchrl_kl import GPT, CausalLMActor, ConstantKLController, KLMonitor, sample_responses
from torchrl_kl.monitor.messages import KLMessage

PAD, END, N_TOKENS = 0, 1, 12


def make_gpt(seed: int = 0, scale: float = 8.0) -> GPT:
    """A model whose next token depends on all tokens before it, far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(vocab_size=N_TOKENS, block_size=64, n_layer=1, n_head=2, n_embd=16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    return model.eval()


def texts_of(prompts: list[Any], responses: list[Any], log_probs: list[Any]) -> Any:
    """A batch of TorchRL's LLM API from the tokens and the recorded log-probs of each element."""
    rows = [
        TensorDict(
            tokens=TensorDict(full=torch.cat([prompt, response]), prompt=prompt, response=response),
            log_probs=TensorDict(response=recorded),
        )
        for prompt, response, recorded in zip(prompts, responses, log_probs, strict=True)
    ]
    return lazy_stack(rows)


def sample_texts(
    model: GPT, n: int = 16, n_tokens: int = 30, *, temperature: float = 1.0, shortest: int = 2
) -> Any:
    """Prompts, responses that end with the end token or are cut off, and their log-probs."""
    actor = CausalLMActor(model, temperature=temperature)
    sizes = torch.randint(shortest, shortest + 4, (n,)).tolist()  # of the prompts
    starts = [torch.randint(2, N_TOKENS, (size,)) for size in sizes]
    steps = sample_responses(actor, starts, n_tokens, pad_token=PAD, eos_token=END)
    mask = steps["collector", "mask"]
    responses = [row[keep] for row, keep in zip(steps["action"], mask, strict=True)]
    recorded = [row[keep] for row, keep in zip(steps["action_log_prob"], mask, strict=True)]
    return starts, responses, recorded


def texts_monitor(model: GPT, **options: Any) -> KLMonitor:
    tokens = {"pad_token": PAD, "eos_token": END}
    options = {"actor": CausalLMActor(model), "check_every": 1, **tokens, **options}
    return KLMonitor(ConstantKLController(0.1), **options)


def of_samples(messages: list[KLMessage]) -> dict[str, str]:
    """The texts of the conditions on samples."""
    return {message.condition: message.text for message in messages}
