"""PPO on the digit language by two ranks: how far apart their coefficients go."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, PIDKLController
from torchrl_kl.envs import DigitLanguage
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic, sample_responses

LANGUAGE = DigitLanguage()
N_BATCHES, N_RESPONSES = 30, 16


def language_model() -> GPT:
    """The same on all ranks."""
    torch.manual_seed(0)
    gpt = GPT(LANGUAGE.n_tokens, LANGUAGE.text_length - 1)
    optimizer = torch.optim.AdamW(gpt.parameters(), 2e-3)
    for _ in range(200):
        texts = LANGUAGE.sample(LANGUAGE.sample_prompts(64))
        logits = gpt(texts[:, :-1])[:, LANGUAGE.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, LANGUAGE.context_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return gpt.eval()


def drift(rank: int, folder: Path) -> Any:
    """The coefficient of each batch, without a group and with one."""
    start = language_model()
    return {kind: train(start, kind == "group", rank) for kind in ("alone", "group")}


def train(start: GPT, group: bool, rank: int) -> list[float]:
    controller = PIDKLController(1.0, target=0.5)
    controller.group = dist.group.WORLD if group else None
    torch.manual_seed(1)
    actor = CausalLMActor(copy.deepcopy(start))
    critic = CausalLMCritic(GPT(LANGUAGE.n_tokens, LANGUAGE.text_length, n_layer=1, n_out=1))
    stack = KLConstrainedTransform(actor, controller)
    gae = GAE(gamma=1.0, lmbda=1.0, value_network=critic, deactivate_vmap=True, shifted=False)
    wrapped: Any = DistributedDataParallel(ClipPPOLoss(actor, critic))
    optimizer, coeffs = torch.optim.Adam(wrapped.parameters(), 1e-3), []
    torch.manual_seed(100 + rank)
    for _ in range(N_BATCHES):
        prompts = LANGUAGE.sample_prompts(N_RESPONSES)
        contexts = torch.cat([prompts, torch.full((N_RESPONSES, 1), LANGUAGE.separator)], 1)
        batch: Any = sample_responses(
            actor,
            contexts,
            max_new_tokens=LANGUAGE.response_length,
            pad_token=LANGUAGE.separator,
            reward_fn=LANGUAGE.preference,
        )
        batch = stack(batch)
        coeffs.append(controller.coeff.item())
        with torch.no_grad():
            gae(batch)
        for _ in range(2):
            losses = wrapped(batch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimizer.step()
    return coeffs
