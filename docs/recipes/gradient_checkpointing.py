"""Gradient checkpointing and bfloat16: what `backward` needs in memory, and the KL at the start."""

from contextlib import nullcontext

import torch
from torchrl.objectives import ClipPPOLoss
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss, rescore
from torchrl_kl.language import CausalLMActor, sample_responses

# In practice: AutoModelForCausalLM.from_pretrained(..., attention_dropout=0.0)
size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "attention_dropout": 0.0}
config = LlamaConfig(**size, num_hidden_layers=4, num_attention_heads=4)


def run(name, dtype, autocast):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).train()  # checkpointing needs train mode
    actor = CausalLMActor(model)
    stack = KLConstrainedTransform(actor, 0.0)  # only measures; its reference is in eval mode
    ppo = ClipPPOLoss(actor, None, entropy_bonus=False)
    loss = KLPenaltyLoss(actor, 0.1, loss=ppo, reference=stack.reference)
    weights = {weight.data_ptr() for weight in loss.parameters()}

    def update(batch):
        held = {}

        def pack(tensor):
            held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with autocast(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses = loss(batch)
        (losses["loss_objective"] + losses["loss_kl"]).backward()
        grads = [weight.grad for weight in loss.parameters() if weight.requires_grad]
        loss.zero_grad()
        sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in held.items()}
        return sum(sizes[place] for place in {*sizes} - weights) / 1e6, losses["kl"], grads

    with autocast():  # what scores actions needs the precision of the loss
        prompts = torch.randint(64, (32, 6))
        sampled = sample_responses(actor, prompts, 12, pad_token=0)
        cached, batch = stack(sampled), stack(rescore(actor, sampled))
    batch["advantage"] = torch.randn(*batch.shape, 1)
    full, kl, grads = update(batch)
    model.activation_checkpointing_enable()  # in transformers 5, with use_reentrant=False
    less, _, other_grads = update(batch)
    gap = max((a - b).abs().max() for a, b in zip(grads, other_grads, strict=True))
    k1 = [each["next", "kl"].abs().max() for each in (cached, batch)]
    print(f"{name}: |k1| up to {k1[0]:.0e}, rescored {k1[1]:.0e}, exact KL {kl:.0e}")
    print(f"  held {full:.1f} MB, checkpointed {less:.1f} MB; gradients {gap:.0e} apart")


run("float32", torch.float32, nullcontext)
run("bfloat16", torch.bfloat16, nullcontext)
run("autocast", torch.float32, lambda: torch.autocast("cpu", torch.bfloat16))
