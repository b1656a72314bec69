"""The study of controllers and constants, at a small size, and the exact frontier it measures."""

import json
from dataclasses import replace

import pytest
import torch

from tests.scripts import load, run_command
from torchrl_kl.exact import Enumeration

PATH = "examples/adaptive_vs_static.py"


@pytest.fixture(scope="module")
def study():
    return load(PATH)


@pytest.mark.slow
def test_every_run_has_its_figures(tmp_path):
    printed = run_command(PATH, tmp_path, "--quick --seeds 2 --out out")
    runs = ["constant 0.1", "constant 0.3", "constant 1", "computed", "planned"]
    rules = ("adaptive", "exponential", "PID")
    runs += [f"{rule} {start}" for start in ("0.05", "2") for rule in rules]
    for seed in (0, 1):
        report = json.loads((tmp_path / "out" / f"seed{seed}" / "report.json").read_text())
        assert sorted(report["runs"]) == sorted(runs)
        for name, result in report["runs"].items():
            curves, final = result["curves"], result["final"]
            assert final["reward"] <= final["frontier"] + 1e-9
            assert curves["perplexity"][1:] == [final["perplexity"]]
            assert len(curves["coeff"]) == 4
            assert f"| {name} |" in printed
    assert (tmp_path / "out" / "adaptive_vs_static.png").read_bytes().startswith(b"\x89PNG")


class TestFrontier:
    """Every policy lies on or below the exact frontier, and the optima lie on it."""

    V, R = 3, 2
    PROMPTS = torch.tensor([[0], [1]])

    def table(self, seed, sharpness=1.0):
        """A model with random logits for each context."""
        torch.manual_seed(seed)
        logits = sharpness * torch.randn(2, 1 + self.V, self.V, dtype=torch.float64)
        return lambda texts: logits[texts[:, 0], 0 if texts.shape[1] == 1 else 1 + texts[:, 1]]

    def problem(self, seed, fine=True):
        torch.manual_seed(seed)
        rewards = torch.rand(2, self.V, self.V, dtype=torch.float64)
        rewards = rewards if fine else rewards.round()
        reward_fn = lambda t: rewards[t[:, 0], t[:, 1], t[:, 2]]  # noqa: E731
        return Enumeration(self.table(seed + 1000), reward_fn, self.PROMPTS, self.R)

    @pytest.mark.parametrize("fine", [True, False], ids=["fine rewards", "rewards 0 or 1"])
    def test_no_policy_lies_above(self, study, fine):
        gaps = []
        for seed in range(20):
            exact = self.problem(seed, fine)
            policy = exact.values(self.table(seed + 2000, sharpness=4.0), coeff=0.0)
            gaps.append(study.frontier_reward(exact, policy.kl) - policy.reward)
        assert min(gaps) > -1e-9
        assert max(gaps) > 0.1  # they are not optima

    def test_optima_lie_on_it_up_to_its_limit(self, study):
        exact = self.problem(7)
        for coeff in (0.02, 0.5, 3.0):
            optimum = exact.optimum(coeff)
            frontier = study.frontier_reward(exact, optimum.kl)
            assert optimum.reward == pytest.approx(frontier, abs=1e-9)
        limit = exact.optimum(0.0)
        frontier = study.frontier_reward(exact, limit.kl + 1)
        assert frontier == limit.reward == pytest.approx(exact.rewards.amax(1).mean())

    def test_a_policy_above_it_is_an_error(self, study):
        optimum = self.problem(7).optimum(0.5)
        impossible = replace(optimum, reward=optimum.reward + 1e-6)
        with pytest.raises(RuntimeError, match="above the frontier: the exact values are"):
            study.check_frontier(impossible, optimum.reward)
