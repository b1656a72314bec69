"""KL between two checkpoints on fixed prompts, with its standard error, and the exact value."""

import tempfile

import torch

from torchrl_kl import KLConstrainedTransform, KLStatistics
from torchrl_kl.envs import DigitLanguage
from torchrl_kl.exact import enumerate_kl
from torchrl_kl.language import GPT, CausalLMActor, sample_responses

torch.manual_seed(0)
language, folder = DigitLanguage(), tempfile.mkdtemp()
gpt = GPT(vocab_size=11, block_size=8)
optimizer = torch.optim.Adam(gpt.parameters(), lr=2e-3)
for step in range(1, 201):
    texts = language.sample(language.sample_prompts(256))
    logits = gpt(texts[:, :-1])[:, 4:]  # (256, 4, 11): what follows the separator
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 5:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (100, 200):
        gpt.save_pretrained(f"{folder}/step_{step}")

early, late = (GPT.from_pretrained(f"{folder}/step_{step}").eval() for step in (100, 200))
actor, reference = CausalLMActor(late), CausalLMActor(early)
# With coefficient 0 the stack only measures.
measure = KLConstrainedTransform(actor, 0.0, reference=reference, estimator="exact")
prompts = language.sample_prompts(16)
contexts = torch.nn.functional.pad(prompts, (0, 1), value=language.separator)
pools = {"kl": KLStatistics(), "kl_estimate": KLStatistics()}
for _ in range(4):
    batch = sample_responses(
        actor, contexts.repeat_interleave(16, 0), 4, pad_token=10, return_logits=True
    )
    batch = measure(batch)
    for key, pool in pools.items():
        pool.add(batch["next", key].sum((1, 2)))  # (256,): nats per response

truth = enumerate_kl(
    lambda tokens: late(tokens)[:, -1], lambda tokens: early(tokens)[:, -1], contexts, 4
).sum()
print(f"KL(step 200 || step 100) in nats per response, of {pools['kl'].count} responses")
for name, pool in zip(("k1", "exact"), pools.values(), strict=True):
    off = (pool.mean - truth) / pool.standard_error
    print(f"{name:6} {pool.mean:.4f} +- {pool.standard_error:.4f}, {off:+.1f} standard errors off")
print(f"truth  {truth:.4f}")
k1, exact = (pool.variance for pool in pools.values())
print(f"k1 needs {k1 / exact:.0f} times as many responses as exact")
