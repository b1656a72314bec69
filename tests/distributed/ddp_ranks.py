"""Cases of two ranks: networks and losses in DistributedDataParallel, and the union in one."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrl.objectives import ClipPPOLoss

from tests.distributed.ranks import n_collectives
from tests.language.models import EOS, PAD, SIZES, make_actor, make_critic, make_model
from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.language import CausalLMActor, ResponseKLTransform, sample_responses

GRADIENTS = ("step", "sequence", "k2")
WAYS = ("loss", "network", "tiles", "unused")
N_RANKS, N_NEW = 2, 6


def sample(actor: Any, n_prompts: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 11, (n_prompts, 5), generator=generator)
    options = {"pad_token": PAD, "generator": generator} | options
    return sample_responses(actor, prompts, N_NEW, **options)


def wrapped_actor(model: Any, way: str) -> Any:
    """An actor, with DistributedDataParallel inside where the network is wrapped."""
    if way == "loss":
        return CausalLMActor(model)
    inside = DistributedDataParallel(model, find_unused_parameters=way == "unused")
    return CausalLMActor(inside, head_chunk=None if way == "network" else 3)


def gradients(rank: int, folder: Path) -> Any:
    """Those of a loss on a rank's rows, averaged by the wrapper, and of the union's, plain."""
    old, reference, found = make_actor("llama"), make_actor("llama", 1), {}
    batch = sample(old, 8)
    generator = torch.Generator().manual_seed(3)
    for key in ("advantage", "value_target"):
        batch[key] = torch.randn(8, N_NEW, 1, generator=generator)
    for way in WAYS:
        for gradient in GRADIENTS:
            pair = []
            for rows, kind in ((batch[rank::N_RANKS], way), (batch, "loss")):
                model = make_model("llama")
                with torch.no_grad():
                    for weight in model.parameters():
                        weight += 0.01 * weight.cos()  # off-policy
                actor = wrapped_actor(model, kind)
                ppo = ClipPPOLoss(actor, make_critic("llama"))
                options: Any = {"gradient": gradient, "reference": reference, "loss": ppo}
                loss: Any = KLPenaltyLoss(actor, 0.5, **options)
                if kind == "loss" and len(rows) < len(batch):
                    loss = DistributedDataParallel(loss)
                losses = loss(rows.clone())
                (losses["loss_kl"] + losses["loss_objective"] + losses["loss_critic"]).backward()
                pair.append([weight.grad for weight in model.parameters()])
            found[way, gradient] = pair
    return found


def positions(rank: int, folder: Path) -> Any:
    """What a wrapped model reads for a batch, and how many times; plain, and with the wrapper.

    Rank 1 has no prompts: sampling and scoring must not wait for it.
    """
    found = {}
    for kind in ("gpt", "llama"):
        for wrap in (False, True):
            model = make_model(kind)
            read: list[int] = []
            model.register_forward_pre_hook(lambda _, args, read=read: read.append(args[0].numel()))
            inside: Any = DistributedDataParallel(model) if wrap else model
            actor = CausalLMActor(inside)
            stack, before = KLConstrainedTransform(actor, 0.1), n_collectives()
            if rank == 0:
                batch = stack(sample(actor, 8, eos_token=EOS))
                found[kind, wrap] = sum(read), batch["tokens"], batch["next", "reward"]
            if n_collectives() != before:
                raise AssertionError("a rank waits for the others")
    return found


def messages(rank: int, folder: Path) -> Any:
    """What is refused."""
    actor = make_actor("llama")
    inside = CausalLMActor(DistributedDataParallel(make_model("gpt")))
    prompts, said = torch.full((2, 20), 5), []
    attempts: list[Any] = [
        lambda: KLConstrainedTransform(DistributedDataParallel(actor), 0.1),
        lambda: sample_responses(inside, prompts, 9, pad_token=PAD),
        lambda: sample_responses(inside, prompts, 1, pad_token=SIZES["vocab_size"]),
    ]
    for attempt in attempts:
        try:
            said.append(attempt())
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    model = make_model("llama")
    model.generation_config.eos_token_id = EOS
    return [*said, ResponseKLTransform(DistributedDataParallel(model), 0.1).eos_token]


CASES = (gradients, positions, messages)
