"""Cases of two ranks with models of `fully_shard`, per layer and root, and of one process."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torchrl.objectives import ClipPPOLoss
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.distributed.fsdp_box import gathered, shard
from tests.distributed.ranks import n_collectives
from tests.gpt_helpers import sharp
from tests.language.models import EOS, PAD, make_critic, make_model
from torchrl_kl import (
    ExponentialKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLPenaltyLoss,
)
from torchrl_kl.language import GPT, CausalLMActor, sample_responses
from torchrl_kl.language.blocks import Block

N_RANKS, N_NEW = 2, 5
LLAMA = (LlamaDecoderLayer, LlamaForCausalLM)


def whole(module: Any) -> dict[str, Any]:
    """The weights of all ranks, by name; all ranks call it."""
    for part in module.modules():
        getattr(part, "reshard", int)()
    state = {name: weight.detach() for name, weight in module.named_parameters()}
    return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in state.items()}


def sample(actor: Any, rank: int, n_prompts: int = 4, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(10 + rank)
    prompts = torch.randint(4, 11, (n_prompts, 4), generator=generator)
    return sample_responses(actor, prompts, N_NEW, pad_token=PAD, generator=generator, **options)


class Learner:
    """A policy with a penalty in the reward and in the loss, of one process or of all ranks."""

    def __init__(self, sharded: bool):
        self.actor = CausalLMActor(make_model("llama"))
        self.model = self.actor.reader.lm.model
        self.frozen = FrozenActor(CausalLMActor(make_model("llama", 1)))
        if sharded:
            shard(self.actor, *LLAMA)
            shard(self.frozen, *LLAMA)
        self.stack = KLConstrainedTransform(
            self.actor, ExponentialKLController(1.0, target=0.5), reference=self.frozen
        )
        ppo = ClipPPOLoss(self.actor, make_critic("llama"), functional=False)
        self.loss = KLPenaltyLoss(
            self.actor,
            ExponentialKLController(1.0, target=0.5),
            gradient="sequence",
            reference=self.frozen,
            loss=ppo,
            functional=False,
        )
        self.optimizer = torch.optim.Adam(self.actor.parameters(), 1e-2, eps=1e-4)

    def train(self, batch: Any) -> Any:
        batch = batch.copy()
        batch["advantage"] = batch["value_target"] = (7.0 * batch["action"]).sin().unsqueeze(-1)
        coeff = self.loss.update_controller(batch)
        for _ in range(3):
            losses = self.loss(batch.clone())
            self.optimizer.zero_grad()
            (losses["loss_kl"] + losses["loss_objective"]).backward()
            self.optimizer.step()
        return coeff


def learners(rank: int, folder: Path) -> Any:
    """Batches, coefficients and weights of sharded learners, and of one process."""
    plain, learner, found = Learner(sharded=False), Learner(sharded=True), {}
    expected = [sample(plain.actor, each) for each in range(N_RANKS)]
    own = sample(learner.actor, rank)
    found["sampled"] = own, expected[rank]
    with gathered(learner.model):  # rank 1 has fewer texts, and texts end at different steps
        before = n_collectives()
        free = sample(learner.actor, rank, n_prompts=6 - 3 * rank, eos_token=EOS)
        if n_collectives() != before:
            raise AssertionError("a rank waits for the others")
    found["free"] = free, sample(plain.actor, rank, n_prompts=6 - 3 * rank, eos_token=EOS)
    found["stack"] = learner.stack(own.clone())["next"], plain.stack(expected[rank].clone())["next"]
    coeff = learner.train(own)
    # The controller of one process is fed this rank's rows, and its loss the union.
    found["coeff"] = coeff, plain.loss.update_controller(expected[rank])
    plain.loss.update_controller = lambda _: None  # type: ignore[method-assign, assignment]
    plain.train(torch.cat(expected))
    found["weights"] = whole(learner.actor), whole(plain.actor)
    found["again"] = sample(learner.actor, rank), sample(plain.actor, rank)
    found["names"] = len([*learner.loss.named_parameters(remove_duplicate=False)])
    return found


def references(rank: int, folder: Path) -> Any:
    """References after they were moved, between sharded and plain ones."""
    found = {}
    for own in (True, False):
        for other in (True, False):
            actor = CausalLMActor(make_model("llama"))
            frozen = FrozenActor(CausalLMActor(make_model("llama", 1)))
            shard(actor, *(LLAMA if other else ()))
            shard(frozen, *(LLAMA if own else ()))
            for _ in range(2):  # the second time, weights of the roots are gathered
                batch = sample(actor, rank)
                frozen.score(batch, timed=True)
                frozen.update_reference(actor, tau=0.5)
            found[own, other] = whole(frozen.actor)
    return found


def adapters(rank: int, folder: Path) -> Any:
    """A sharded model with adapters, which are off in its reference, and a plain one."""
    found = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model: Any = get_peft_model(make_model("llama"), LoraConfig(r=2, init_lora_weights=False))
        shard(model, *(LLAMA if sharded else ()))
        actor = CausalLMActor(model)
        options: Any = {"reference": model.disable_adapter}
        stack, loss = (
            KLConstrainedTransform(actor, 0.1, **options),
            KLPenaltyLoss(actor, 10.0, functional=False, **options),
        )
        batch = stack(sample(actor, 0))
        loss.eval()(batch.exclude(("next", "kl_coeff")))["loss_kl"].backward()
        names = [name for name, weight in model.named_parameters() if weight.grad is not None]
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        found.append((batch["next", "kl"], names, grads))
    return found


def coeffs(learner: Learner) -> Any:
    return learner.stack.controller.coeff, learner.loss.controller.coeff


def checkpoints(rank: int, folder: Path) -> Any:
    """Weights and coefficients before a save, and after a load into others."""
    first, second = Learner(sharded=True), Learner(sharded=True)
    first.train(sample(first.actor, 0))
    first.frozen.update_reference(first.actor, tau=0.5)
    first.stack(sample(first.actor, 0))
    for learner, act in ((first, save), (second, load)):
        state = {"loss": learner.loss.state_dict(), "stack": learner.stack.state_dict()}
        act(state, checkpoint_id=folder / "checkpoint")
        learner.loss.load_state_dict(state["loss"])
        learner.stack.load_state_dict(state["stack"])
    return [(whole(each.actor), whole(each.frozen), *coeffs(each)) for each in (first, second)]


def meta(rank: int, folder: Path) -> Any:
    """A reference that is built, sharded and only then loaded."""
    plain = FrozenActor(CausalLMActor(sharp(GPT(11, 20))))
    with torch.device("meta"):
        frozen = FrozenActor(CausalLMActor(GPT(11, 20)))
    shard(frozen, Block, GPT)
    frozen.to_empty(device="cpu")
    state = plain.actor.state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(frozen.actor, state, options=options)
    batch = sample(plain.actor, 0)
    shares = [weight.to_local().numel() / weight.numel() for weight in frozen.parameters()]  # type: ignore[operator]
    return *(each.score(batch, timed=True).log_prob for each in (frozen, plain)), max(shares)


def messages(rank: int, folder: Path) -> Any:
    """What is refused of a sharded model, and what is warned of."""
    plain = CausalLMActor(make_model("llama"))
    actor = CausalLMActor(copy.deepcopy(plain.reader.lm.model), head_chunk=2)
    shard(actor, *LLAMA)
    said = []
    attempts: list[Any] = [
        lambda: KLConstrainedTransform(actor, 0.1),
        lambda: KLPenaltyLoss(actor, 0.1, reference=plain),
    ]
    for attempt in attempts:
        try:
            said.append(attempt())
        except ValueError as error:
            said.append(str(error))
    batch = sample(actor, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log_probs = [
            each.get_dist(batch.clone()).log_prob(batch["action"]) for each in (actor, plain)
        ]
    dist.barrier()
    return *said, [str(each.message) for each in caught], *(each.detach() for each in log_probs)


CASES = (learners, references, adapters, checkpoints, meta, messages)
