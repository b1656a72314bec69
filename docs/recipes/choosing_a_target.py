"""Choosing a target: a sweep, the reward against sqrt(KL), and the exact frontier next to it."""

import copy

import torch

from torchrl_kl import KLConstrainedTransform, PlannedKLController, plot_frontier
from torchrl_kl.envs import DigitLanguage
from torchrl_kl.exact import Enumeration
from torchrl_kl.language import GPT, CausalLMActor, sample_responses

torch.manual_seed(0)
language = DigitLanguage()
gpt = GPT(vocab_size=11, block_size=8, n_layer=1)
optimizer = torch.optim.Adam(gpt.parameters(), lr=3e-3)
for _ in range(150):
    texts = language.sample(language.sample_prompts(256))
    logits = gpt(texts[:, :-1])[:, 4:]  # (256, 4, 11): what follows the separator
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 5:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
prompts = torch.nn.functional.pad(language.sample_prompts(4), (0, 1), value=language.separator)


def train(target):
    actor = CausalLMActor(policy := copy.deepcopy(gpt))
    stack = KLConstrainedTransform(actor, PlannedKLController(target))
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    for _ in range(60):
        batch = sample_responses(
            actor, prompts.repeat(64, 1), 4, pad_token=10, reward_fn=language.preference
        )
        returns = stack(batch)["next", "reward"].sum((1, 2)).view(64, 4)  # 4 prompts
        advantage = (returns - returns.mean(0)).view(-1, 1)
        optimizer.zero_grad()
        (-advantage * actor.log_prob(batch.copy())).sum(1).mean().backward()
        optimizer.step()
        schedule.step()
    return known.values(last(policy), stack.controller.coeff)


def last(model):
    return lambda tokens: model(tokens)[:, -1]


known = Enumeration(last(gpt.eval()), language.preference, prompts, response_length=4)
print(f"reference: reward {known.reference_reward:.3f}")
runs = {target: train(target) for target in (0.03, 0.1, 0.3, 0.8)}
for target, run in runs.items():
    best = known.optimum(known.solve_coeff(run.kl)).reward
    print(f"target {target:4}: KL {run.kl:.3f}, reward {run.reward:.3f}, best for it {best:.3f}")
kls, rewards = zip(*((run.kl, run.reward) for run in runs.values()), strict=True)
names = [f"target {target}" for target in runs]
optima = [known.optimum(1.2**n) for n in range(-15, 15)]
axes = plot_frontier(kls, rewards, names=names, label="trained", optima=optima)
axes.figure.savefig("frontier.png")
