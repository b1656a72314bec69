"""A vocabulary of 152,000: PPO with the exact KL in the loss, its logits never there at once."""

import resource

import torch
from peft import LoraConfig, get_peft_model
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from torchrl_kl import AdaptiveKLController, KLPenaltyLoss
from torchrl_kl.language import CausalLMActor, CausalLMCritic, sample_responses

torch.manual_seed(0)
# In practice: AutoModelForCausalLM.from_pretrained(...)
size = {"vocab_size": 151_936, "hidden_size": 128, "intermediate_size": 256}
config = LlamaConfig(**size, num_hidden_layers=2, num_attention_heads=4, num_labels=1)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "lm_head"])
model = get_peft_model(LlamaForCausalLM(config), lora).eval()
actor = CausalLMActor(model, return_logits=False, head_chunk=128)
critic = CausalLMCritic(LlamaForTokenClassification(config).eval())
loss = KLPenaltyLoss(
    actor,
    AdaptiveKLController(0.1, target=1.0, horizon=100),
    gradient="sequence",
    weights="step",
    reference=model.disable_adapter,
    loss=ClipPPOLoss(actor, critic),
)
gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True, shifted=False)
trained = [weight for weight in loss.parameters() if weight.requires_grad]  # adapters and critic
optimizer = torch.optim.Adam(trained, lr=1e-2)


def reward_fn(texts):  # (N, L) ids, whole texts: the share of even tokens
    return (texts % 2 == 0).float().mean(-1)


for _ in range(3):
    prompts = torch.randint(size["vocab_size"], (8, 8))
    batch = sample_responses(actor, prompts, 64, pad_token=0, reward_fn=reward_fn)
    loss.update_controller(batch)
    with torch.no_grad(), set_recurrent_mode(True):
        gae(batch)
    losses = loss(batch)
    optimizer.zero_grad()
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # in KiB on Linux
    print(f"KL {losses['kl']:.4f} nats per token, {peak:.2f} GiB at most")
