"""Tools and several turns: what the model wrote is penalized, and not what a tool answered."""

import torch
from tensordict import TensorDict

from torchrl_kl import KLConstrainedTransform, rescore
from torchrl_kl.language import GPT, CausalLMActor, ResponseKLTransform, as_steps, sample_responses

N_DIALOGS, TURN = 64, 4  # each turn of the model has 4 tokens, an answer of the tool has 3

torch.manual_seed(0)
size = {"vocab_size": 12, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
model, reference = GPT(**size).eval(), GPT(**size).eval()
with torch.no_grad():  # in practice: the model before training, `reference=None`
    for weight in [*model.parameters(), *reference.parameters()]:
        weight.mul_(3.0)
actor = CausalLMActor(model)


def turn_of_the_model(texts):  # (N, L) -> (N, L + 4)
    return sample_responses(actor, texts, TURN, pad_token=0)["tokens"][:, 0]


def answer_of_the_tool(texts):  # (N, L) -> (N, L + 3): the last three tokens plus 1
    return torch.cat([texts, (texts[:, -3:] + 1) % 12], 1)


prompts = torch.randint(12, (N_DIALOGS, 5))
dialogs = turn_of_the_model(answer_of_the_tool(turn_of_the_model(prompts)))  # (N, 5 + 4 + 3 + 4)
wrote = torch.tensor([0] * 5 + [1] * TURN + [0] * 3 + [1] * TURN).bool().expand_as(dialogs)
batch = TensorDict(
    tokens=TensorDict(full=dialogs, prompt=prompts, batch_size=N_DIALOGS),
    masks=TensorDict(all_assistant_mask=wrote, batch_size=N_DIALOGS),
    next=TensorDict(reward=torch.ones(N_DIALOGS, 1), batch_size=N_DIALOGS),
    batch_size=N_DIALOGS,
)

# Whole dialogs: one KL and one reward for each.
penalized = ResponseKLTransform(model, 0.1, reference=reference)(batch)
# One step for each token that the model wrote, for PPO, GAE and losses.
steps = rescore(actor, as_steps(batch, pad_token=None))  # (N, 8)
stack = KLConstrainedTransform(actor, 0.1, reference=CausalLMActor(reference))
by_step = stack(steps)["next", "kl"].sum((1, 2))

by_hand = torch.zeros(N_DIALOGS)
for n, text in enumerate(dialogs):
    own, other = (gpt(text[None])[0].detach().log_softmax(-1) for gpt in (model, reference))
    for place in range(1, len(text)):
        if wrote[n, place]:  # the logits of the token before say what comes next
            by_hand[n] += (own - other)[place - 1, text[place]]
kls = {"by hand": by_hand, "ResponseKLTransform": penalized["next", "kl"], "as_steps": by_step}
print(f"nats per dialog, {steps.shape[1]} of {dialogs.shape[1] - 5} tokens count")
for name, kl in kls.items():
    off = (kl.flatten() - by_hand).abs().max()
    print(f"{name:22}{kl.mean():.4f}, largest difference {off:.0e}")
unmasked = ResponseKLTransform(model, 0.1, reference=reference)(batch.exclude("masks"))
print(f"{'without the mask':22}{unmasked['next', 'kl'].mean():.4f}")
