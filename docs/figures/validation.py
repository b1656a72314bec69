"""The KL that the stack measures on samples, against the true KL by enumeration.

A small GPT with random weights is the reference. The policies are copies of it that are moved
further and further away. The true KL of each is a sum over all 11^4 responses to each prompt.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from style import BLACK, ESTIMATORS, new_figure, save
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_kl import KLConstrainedTransform
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv
from torchrl_kl.exact import enumerate_kl
from torchrl_kl.language import GPT, CausalLMActor

DISTANCES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)


def moved(model: nn.Module, distance: float) -> nn.Module:
    """A copy with noise added to its matrices."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.add_(distance * torch.randn(weight.shape, generator=generator))
    return model


def main(folder: Path | None = None, samples: int = 1000, n_policies: int = 6) -> Path:
    """Draws the figure; prints how many standard errors each mean is from the truth."""
    torch.manual_seed(0)
    base = moved(GPT(vocab_size=11, block_size=9).eval(), 0.15)
    prompts = DigitLanguage().sample_prompts(4)
    contexts = nn.functional.pad(prompts, (0, 1), value=10)  # with the separator
    start = {"prompt": prompts.repeat_interleave(samples, 0)}
    env = DigitLanguageEnv(batch_size=(4 * samples,))
    rows: dict[str, list[tuple[float, float, float]]] = {"k1": [], "exact": []}
    for distance in DISTANCES[:n_policies]:
        gpt = moved(base, distance)
        true = enumerate_kl(
            lambda texts, gpt=gpt: gpt(texts)[:, -1], lambda texts: base(texts)[:, -1], contexts, 4
        )
        policy = CausalLMActor(gpt)
        stack = KLConstrainedTransform(
            policy, 0.0, reference=CausalLMActor(base), estimator="exact"
        )
        with set_exploration_type(ExplorationType.RANDOM):
            texts = env.rollout(4, policy, auto_reset=False, tensordict=env.reset(**start))
        step = stack(texts)["next"]
        for name, key in (("k1", "kl"), ("exact", "kl_estimate")):
            kl = step[key].sum(1).double().view(len(prompts), samples)  # nats per response
            error = (kl.var(1) / samples).sum().sqrt().item() / len(prompts)
            rows[name].append((true.sum().item(), kl.mean().item(), error))
    figure, axes = new_figure(height=3.6)
    for name, shift in (("k1", -0.02), ("exact", 0.02)):
        truth, mean, error = torch.tensor(rows[name]).unbind(1)
        away = ", ".join(f"{z:+.1f}" for z in (mean - truth) / error)
        print(f"{name:5} true KL {truth.min():.3f} to {truth.max():.3f} nats; off by {away} errors")
        bars = {"yerr": 2 * error, "fmt": "o", "color": ESTIMATORS[name], "capsize": 4}
        axes.errorbar(truth + shift, mean - truth, **bars, label=f"{name}, ± 2 standard errors")
    axes.axhline(0, linestyle=":", color=BLACK)
    axes.set_xlabel("true KL (nats per response)")
    axes.set_ylabel("measured - true (nats)")
    axes.set_title("The mean of what is measured is the true KL")
    axes.legend(frameon=False, loc="upper left")
    assert all(math.isfinite(value) for row in rows.values() for point in row for value in point)
    return save(figure, "validation", folder)


if __name__ == "__main__":
    main()
