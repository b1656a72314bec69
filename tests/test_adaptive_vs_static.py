"""The study of controllers and constants, at a small size, and the exact frontier it measures."""

import json
from dataclasses import replace

import pytest
import torch

from tests.scripts import lanes, load
from torchrl_kl import Enumeration
from torchrl_kl.envs import DigitLanguage

TINY = (
    "--lm-iterations 2 --lm-batch 16 --heldout-prompts 2 --exact-prompts 1 --ppo-responses 16 "
    "--ppo-minibatch 16 --ppo-batches 2 --eval-every 1 --budget-prompts 4 --budget-responses 32 "
    "--seeds 1"
)

study_run = lanes("examples/adaptive_vs_static.py", TINY, "--threads 1")


@pytest.fixture
def study():
    return load("examples/adaptive_vs_static.py")


STUDY_RUNS = ["constant 0.1", "constant 0.3", "constant 1", "computed"]
STUDY_RUNS += [
    f"{rule} {start}" for start in ("0.05", "2") for rule in ("adaptive", "exponential", "PID")
]


class TestTheStudy:
    def test_it_leaves_a_result_for_each_run(self, study_run):
        settings = json.loads((study_run.out / "config.json").read_text())
        n_batches, every = settings["ppo_batches"], settings["eval_every"]
        for name in STUDY_RUNS:
            file = study_run.out / "seed0" / name.replace(" ", "_") / "result.json"
            result = json.loads(file.read_text())
            curves, final = result["curves"], result["final"]
            for curve in ("reward", "kl_reference", "coeff"):
                assert [step for step, _ in curves[curve]] == list(range(n_batches))
            batches = [batch for batch, _ in curves["perplexity"]]
            assert batches == list(range(every, n_batches + 1, every))
            assert curves["perplexity"][-1][1] == final["perplexity"]
            assert sum(final["kl_per_position"]) == pytest.approx(final["kl"])
            assert final["reward"] <= final["frontier"] + 1e-9
            if name.startswith("constant"):  # float32, as the reward
                coeffs = [coeff for _, coeff in curves["coeff"]]
                assert coeffs == pytest.approx([float(name.split()[1])] * n_batches, rel=1e-6)
            assert f"| {name} |" in study_run.printed
        assert (study_run.out / "adaptive_vs_static.png").read_bytes().startswith(b"\x89PNG")

    def test_it_does_not_repeat_what_is_there(self, study_run):
        file = study_run.out / "seed0" / "PID_2" / "result.json"
        lost = file.read_text()
        others = {
            path: path.stat().st_mtime_ns
            for path in file.parents[1].rglob("result.json")
            if path != file
        }
        file.unlink()
        again = study_run.repeat("--resume")
        assert {path: path.stat().st_mtime_ns for path in others} == others
        # The result does not depend on what ran before it in the process.
        before, after = (json.loads(text) for text in (lost, file.read_text()))
        assert {k: v for k, v in before.items() if not k.endswith("seconds")} == {
            k: v for k, v in after.items() if not k.endswith("seconds")
        }
        assert again.splitlines()[:13] == study_run.printed.splitlines()[:13]

    def test_seeds_share_a_folder_but_other_settings_do_not(self, study, tmp_path):
        study.open_folder(study.Options(out=tmp_path))
        options = {"out": tmp_path, "resume": True}
        study.open_folder(study.Options(**options, seed=3, seeds=2))
        with pytest.raises(SystemExit, match=r"results of other settings \(--gain, --horizon\)"):
            study.open_folder(study.Options(**options, gain=0.2, horizon=1e5))


def test_perplexity_of_the_language_to_itself(study):
    language = DigitLanguage()
    contexts = study.add_separator(language.sample_prompts(20), language)
    problem = study.Problem(language, None, None, contexts, None)
    # The next digits are spread like the window's: average the entropy over all possible texts.
    entropies, texts, probs = [], contexts, torch.full((20,), 1 / 20, dtype=torch.float64)
    for _ in range(language.response_length):
        entropies.append((probs * language.entropy(texts)).sum())
        joint = probs[:, None] * language.next_token_probs(texts)
        rows, tokens = joint.nonzero(as_tuple=True)
        texts, probs = torch.cat([texts[rows], tokens[:, None]], 1), joint[rows, tokens]
    expected = torch.stack(entropies).mean().exp().item()
    assert study.perplexity(study.true_next_token(language), problem) == pytest.approx(
        expected, rel=1e-12
    )
    uniform = study.perplexity(lambda tokens: torch.zeros(len(tokens), language.n_tokens), problem)
    assert uniform == pytest.approx(language.n_tokens, rel=1e-12)


class TestFrontier:
    """Every policy lies on or below the exact frontier, and the optima lie on it."""

    V, R = 3, 2
    PROMPTS = torch.tensor([[0], [1]])

    def table(self, seed, sharpness=1.0):
        """A model with random logits for each context."""
        logits = torch.randn(
            2,
            1 + self.V,
            self.V,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        return lambda texts: (
            sharpness * logits[texts[:, 0], 0 if texts.shape[1] == 1 else 1 + texts[:, 1]]
        )

    def problem(self, seed, fine=True):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.rand(2, self.V, self.V, generator=generator, dtype=torch.float64)
        rewards = rewards if fine else rewards.round()
        return Enumeration(
            self.table(seed + 1000),
            lambda t: rewards[t[:, 0], t[:, 1], t[:, 2]],
            self.PROMPTS,
            self.R,
        )

    @pytest.mark.parametrize("fine", [True, False], ids=["fine rewards", "rewards 0 or 1"])
    def test_no_policy_lies_above(self, study, fine):
        gaps = []
        for seed in range(40):
            exact = self.problem(seed, fine)
            for sharpness in (0.3, 1.0, 4.0):
                policy = exact.values(self.table(seed + 2000, sharpness), coeff=0.0)
                placed = study.place(policy, exact)
                gaps.append(placed["frontier"] - placed["reward"])
                assert placed["share_of_frontier_gain"] <= 1 + 1e-9
                assert placed["least_kl"] <= placed["kl"] + 1e-6
        assert min(gaps) > -1e-9
        assert (
            max(gaps) > 0.1
        )  # they are no optima: a frontier that follows the policy would not be one

    @pytest.mark.parametrize("coeff", [0.02, 0.1, 0.5, 3.0])
    def test_optima_lie_on_it(self, study, coeff):
        exact = self.problem(7)
        placed = study.place(exact.optimum(coeff), exact)
        assert placed["reward"] == pytest.approx(placed["frontier"], abs=1e-9)
        assert placed["least_kl"] == pytest.approx(placed["kl"], rel=1e-6)
        assert placed["share_of_frontier_gain"] == pytest.approx(1, abs=1e-8)

    def test_beyond_the_limit_more_divergence_buys_nothing(self, study):
        exact = self.problem(7)
        limit = exact.optimum(0.0)
        assert (
            study.frontier_reward(exact, limit.kl + 1)
            == limit.reward
            == pytest.approx(exact.rewards.amax(1).mean())
        )

    def test_a_policy_above_it_is_an_error(self, study):
        exact = self.problem(7)
        optimum = exact.optimum(0.5)
        impossible = replace(optimum, reward=optimum.reward + 1e-6)
        with pytest.raises(
            RuntimeError, match=r"above the frontier's 0\.\d{12}: the exact values are wrong"
        ):
            study.place(impossible, exact)
