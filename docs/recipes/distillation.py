"""On-policy distillation: a student learns from a teacher's distributions on its own texts."""

import torch

from torchrl_kl import KLPenaltyLoss
from torchrl_kl.language import GPT, CausalLMActor, sample_responses

torch.manual_seed(0)
size = {"vocab_size": 12, "block_size": 12, "n_layer": 2, "n_head": 2, "n_embd": 32}
student, teacher = CausalLMActor(GPT(**size)), CausalLMActor(GPT(**size))
with torch.no_grad():  # in practice: a trained model
    for weight in teacher.parameters():
        weight.mul_(4.0)


def no_reward(texts):  # (N, L)
    return torch.zeros(len(texts))


# Without another loss, the KL is the objective; "sequence" counts where a token leads, too.
loss = KLPenaltyLoss(student, 1.0, gradient="sequence", reference=teacher)
optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
for step in range(301):
    prompts = torch.randint(12, (64, 4))
    batch = sample_responses(student, prompts, 8, pad_token=0, reward_fn=no_reward)
    losses = loss(batch)
    optimizer.zero_grad()
    losses["loss_kl"].backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"KL(student || teacher) {8 * losses['kl']:.3f} nats per response")
