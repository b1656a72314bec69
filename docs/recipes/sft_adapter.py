"""LoRA after supervised fine-tuning: the reference is the SFT adapter, and not the bare model."""

from contextlib import contextmanager

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_kl import KLConstrainedTransform
from torchrl_kl.language import CausalLMActor, sample_responses

torch.manual_seed(0)
size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
base = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2, num_attention_heads=4))
lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(base, lora, adapter_name="sft")
for name, weight in model.named_parameters():
    if "lora_B" in name:  # in practice: PeftModel.from_pretrained(base, folder, "sft")
        torch.nn.init.normal_(weight, std=0.3)
model.add_adapter("policy", lora)
model.eval()  # adapters come in train mode
trained = dict(model.named_parameters())
for name in [name for name in trained if ".sft." in name]:  # the policy begins at the SFT model
    trained[name.replace(".sft.", ".policy.")].data.copy_(trained[name].data)
model.set_adapter("policy")


@contextmanager
def sft():
    model.set_adapter("sft")
    try:
        yield
    finally:
        model.set_adapter("policy")  # which also says what is trained


actor = CausalLMActor(model)
stacks = {
    "SFT adapter": KLConstrainedTransform(actor, 0.1, reference=sft),
    "bare model": KLConstrainedTransform(actor, 0.1, reference=model.disable_adapter),
}
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(3):
    prompts = torch.randint(64, (64, 6))
    even = lambda texts: (texts % 2 == 0).float().mean(-1)  # noqa: E731
    batch = sample_responses(actor, prompts, 12, pad_token=0, reward_fn=even)
    kls = {name: stack(batch)["next", "kl"].sum(1).mean() for name, stack in stacks.items()}
    print(", ".join(f"KL to the {name} {kl:+.3f}" for name, kl in kls.items()))
    batch = stacks["SFT adapter"](batch)
    returns = batch["next", "reward"].sum(1)
    log_prob = actor.log_prob(batch.copy())
    optimizer.zero_grad()
    (-(returns - returns.mean()) * log_prob).mean().backward()
    optimizer.step()
