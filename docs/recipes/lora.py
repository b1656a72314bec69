"""LoRA: the model with its adapters switched off is the reference, and no second model is kept."""

import torch
from peft import LoraConfig, get_peft_model
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform
from torchrl_kl.language import CausalLMActor, CausalLMCritic, minibatches, sample_responses

torch.manual_seed(0)
# In practice: AutoModelForCausalLM.from_pretrained(...)
size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
config = LlamaConfig(**size, num_hidden_layers=2, num_attention_heads=4, num_labels=1)
lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(LlamaForCausalLM(config), lora).eval()
actor = CausalLMActor(model)
critic = CausalLMCritic(LlamaForTokenClassification(config).eval())
stack = KLConstrainedTransform(
    actor, AdaptiveKLController(0.1, target=0.5, horizon=500), reference=model.disable_adapter
)
print("weights that the reference holds:", sum(p.numel() for p in stack.reference.parameters()))

loss = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True, shifted=False)
trained = [weight for weight in loss.parameters() if weight.requires_grad]  # adapters and critic
optimizer = torch.optim.Adam(trained, lr=1e-2)


def reward_fn(texts):  # (N, L) ids, whole texts: the share of even tokens
    return (texts % 2 == 0).float().mean(-1)


for _ in range(4):
    prompts = torch.randint(64, (32, 6))
    batch = stack(sample_responses(actor, prompts, 12, pad_token=0, reward_fn=reward_fn))
    with torch.no_grad(), set_recurrent_mode(True):
        gae(batch)
    for part in minibatches(batch, n_tokens=16 * 18):  # whole responses
        losses = loss(part)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
    print(f"KL {batch['next', 'kl'].sum(1).mean():+.4f} nats per response")
