# %% [markdown]
# # RLHF you can check by hand
#
# A language model is fine-tuned on a reward, with a KL to the initial model of half a nat. In its
# language of digits the best possible policy can be computed.
#
# ## 1. A language
#
# A text has a prompt of 4 digits, a separator (token 10) and a response of 4 digits. Each digit of
# a response is one of the last 4 digits, chosen at random, plus 1 modulo 10.

# %%
import copy

import torch
from torchrl.collectors import Collector
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, PlannedKLController, coeff_for_budget
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv
from torchrl_kl.exact import Enumeration
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic, sample_responses

PRETRAINING = 300
BATCHES = 60

torch.manual_seed(0)
language = DigitLanguage()
texts = language.sample(language.sample_prompts(3))
for text in texts.tolist():
    print(text)

# %% [markdown]
# ## 2. A language model
#
# A small GPT learns the language by predicting the next token of the responses.

# %%
gpt = GPT(vocab_size=11, block_size=8)
optimizer = torch.optim.Adam(gpt.parameters(), lr=2e-3)
for _ in range(PRETRAINING):
    texts = language.sample(language.sample_prompts(256))
    logits = gpt(texts[:, :-1])[:, 4:]  # (256, 4, 11): what follows the separator
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 5:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
reference = copy.deepcopy(gpt).eval()
print(f"cross-entropy {loss:.3f} nats per token; the entropy of the language is 1.170")

# %% [markdown]
# ## 3. A reward, and everything that can be known about it
#
# The first digit of a response should be the last digit of the prompt, plus 1. The reward is 1 if
# it is, else 0. `Enumeration` goes through all 11^4 responses to each prompt.

# %%
prompts = language.sample_prompts(4)
contexts = torch.nn.functional.pad(prompts, (0, 1), value=language.separator)


def next_logits(model):
    return lambda tokens: model(tokens)[:, -1]


known = Enumeration(next_logits(reference), language.preference, contexts, response_length=4)
exact_coeff = known.solve_coeff(target=0.5)
best = known.optimum(exact_coeff)
print(f"language model: reward {known.reference_reward:.3f}")
print(f"best policy with KL {best.kl:.3f}: reward {best.reward:.3f}, coefficient {exact_coeff:.3f}")

# %% [markdown]
# By hand: the reward only sees the first digit, so the best policy changes the probability p of a
# right first digit, and nothing else. With q for its new value, the KL of one prompt is q log(q /
# p) + (1 - q) log((1 - q) / (1 - p)).

# %%
right = language.preferred_token(prompts)
p = reference(contexts)[:, -1].softmax(-1).gather(-1, right[:, None]).double()
q = p * torch.tensor(1 / exact_coeff).exp() / (1 - p + p * torch.tensor(1 / exact_coeff).exp())
by_hand = (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).mean()
print(f"KL by hand {by_hand.item():.6f}, by enumeration {best.kl:.6f}")

# %% [markdown]
# Nobody can enumerate the responses of a real model. `coeff_for_budget` needs samples of the
# language model and their rewards, and no training.

# %%
actor = CausalLMActor(gpt)
samples = sample_responses(
    actor, contexts.repeat_interleave(500, 0), 4, pad_token=10, reward_fn=language.preference
)
rewards = samples["next", "reward"].sum(1).view(4, 500)
print(f"from 500 samples per prompt: coefficient {coeff_for_budget(rewards, 0.5):.3f}")

# %% [markdown]
# ## 4. PPO with KL control
#
# The controller plans a first coefficient from the rewards of the first batch, and searches from
# there. The learning rate falls to 0.

# %%
critic = CausalLMCritic(GPT(vocab_size=11, block_size=9, n_out=1))
controller = PlannedKLController(target=0.5)
stack = KLConstrainedTransform(actor, controller)
ppo = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True, shifted=False)
optimizer = torch.optim.Adam(ppo.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES)
collector = Collector(
    DigitLanguageEnv(language, prompts=prompts, batch_size=(256,), seed=0),
    actor,
    frames_per_batch=1024,
    total_frames=1024 * BATCHES,
    postproc=stack,
    auto_register_policy_transforms=False,
)
for n, batch in enumerate(collector):
    gae(batch)
    for _ in range(2):
        for rows in torch.randperm(256).split(128):
            losses = ppo(batch[rows])
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimizer.step()
    schedule.step()
    if n % 10 == 9 or n == BATCHES - 1:
        step = batch["next"]
        reward, kl = (step[key].sum(1).mean() for key in ("task_reward", "kl"))
        coeff = controller.coeff
        print(f"batch {n + 1:2}: reward {reward:.3f}, KL {kl:+.3f}, coefficient {coeff:.3f}")

# %% [markdown]
# ## 5. How good is it?
#
# The regret is how much more the best policy has of E[reward] - coeff * KL, at the last
# coefficient; *gain* is the share of what could be gained.

# %%
final = known.values(next_logits(gpt), coeff=controller.coeff.item())
print(f"KL {final.kl:.3f} nats (target 0.5)")
print("per position:", [round(kl, 3) for kl in final.kl_per_position.tolist()])
print(f"reward {final.reward:.3f}, regret {final.regret:.4f}, gain {final.fraction_of_gain:.1%}")
print(f"coefficient {final.coeff:.3f}, that of the best policy {exact_coeff:.3f}")

# %% [markdown]
# Most of the KL is in the first position, the only one that the reward looks at. Without a penalty
# the rest would drift: see
# [digit_rlhf.py](../../examples/README.md), which
# also learns the reward from preferences.
