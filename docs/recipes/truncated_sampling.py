"""Truncated sampling: top-p and min-p are part of the policy, and what was kept is recorded."""

import torch
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, PlannedKLController, rescore
from torchrl_kl.envs import DigitLanguage
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic, minibatches, sample_responses

torch.manual_seed(0)
language = DigitLanguage()
actor = CausalLMActor(GPT(vocab_size=11, block_size=8), top_p=0.9, min_p=0.05)
critic = CausalLMCritic(GPT(vocab_size=11, block_size=9, n_out=1))
stack = KLConstrainedTransform(actor, PlannedKLController(target=1.5))
loss = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
gae = GAE(gamma=1.0, lmbda=1.0, value_network=critic, deactivate_vmap=True, shifted=False)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)


def reward_fn(texts):  # (N, L) ids: how many of the four digits are even
    response = texts[:, -4:]
    return ((response % 2 == 0) & (response < 10)).sum(1).float()


def ratio(policy, batch):  # mean of pi / pi_sampler
    return (-rescore(policy, batch)["next", "sampler_kl"]).exp().mean()


for n in range(40):
    prompts = language.sample_prompts(256)
    prompts = torch.cat([prompts, torch.full((256, 1), language.separator)], 1)
    batch = stack(sample_responses(actor, prompts, 4, pad_token=10, reward_fn=reward_fn))
    ratios = f"ratio {ratio(actor, batch):.4f}, ignored {ratio(actor.whole(), batch):.4f}"
    with torch.no_grad(), set_recurrent_mode(True):
        gae(batch)
    for part in minibatches(batch, n_tokens=64 * 9):
        losses = loss(part)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
    # Without the record, the tokens kept are those of the policy that has moved.
    rescore(actor, batch.exclude("kept"))
    if n % 10 == 9:
        kl = batch["next", "kl"].sum(1).mean()
        print(f"KL {kl:.2f} nats per response; {ratios}; {actor.n_rescued} tokens left the policy")
