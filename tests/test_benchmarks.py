"""The benchmarks run at a small size, their tables agree with themselves, and rivals are exact."""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

from tests.gpt_helpers import sharp
from tests.scripts import load, run_command, run_here

ROUNDING = 0.5e-5  # of a figure with five decimals


def rows_of(printed: str) -> dict[str, list[str]]:
    """Cells of all rows of all tables, by the first cell."""
    lines = [line.strip("|").split("|") for line in printed.splitlines() if "|" in line]
    return {first.strip(): [cell.strip() for cell in cells] for first, *cells in lines}


SMALL = "--batches 2 --responses 16 --lm-updates 2 --prompts 1"


def test_estimator_variance(tmp_path):
    """Every estimate has the mean of the exact values, and the tokens add up to the variances."""
    options = f"{SMALL} --samples 64"
    variance_run = run_here("benchmarks/estimator_variance.py", tmp_path, options)
    rows, kl = rows_of(variance_run), re.search(r"KL (\S+) nats", variance_run)
    assert kl
    assert float(kl[1]) > 0.01  # at the reference every estimate is zero
    for name in ("k1", "k3", "top-1", "top-2", "top-3", "exact"):
        assert float(rows[name][1]) == pytest.approx(float(kl[1]), abs=2 * ROUNDING)
        mean_off, variance_off = map(float, rows[name][5].split(","))
        assert abs(mean_off) < 5
        assert abs(variance_off) < 5
    for name, column in (("k1", 4), ("exact", 5)):
        variance = pytest.approx(float(rows[name][3]), abs=6 * ROUNDING)
        assert float(rows["all"][column]) == variance
        assert sum(float(rows[str(token)][column]) for token in range(1, 5)) == variance


report, rivals = load("benchmarks/bench_report.py"), load("benchmarks/rivals.py")
ours, generation = load("benchmarks/ours.py"), load("benchmarks/generation.py")


def job_of(n_texts, n_tokens):
    """A job whose policy and reference differ, and differ from uniform."""
    job = ours.Job.of_gpt(n_texts, n_tokens)
    sharp(job.policy)
    sharp(job.reference, seed=1)
    return job


@torch.no_grad()
def by_one_pass(gpt, texts, n_tokens):
    log_probs = gpt(texts[:, :-1])[:, -n_tokens:].log_softmax(-1)
    return log_probs.gather(-1, texts[:, -n_tokens:, None]).squeeze(-1)


class TestSamplerByHand:
    # Both caches; 300 texts are sampled, and scored, in several parts.
    @pytest.mark.parametrize(("n_texts", "n_tokens"), [(300, 4), (300, 20), (1, 1)])
    def test_its_figures_are_those_of_one_pass(self, n_texts, n_tokens):
        torch.manual_seed(0)
        job = job_of(n_texts, n_tokens)
        prompts, made = job.prompts(), generation.by_hand_of_gpt(job)()
        assert made.texts.shape == (n_texts, prompts.shape[1] + n_tokens)
        own = by_one_pass(job.policy, made.texts, n_tokens)
        reference = by_one_pass(job.reference, made.texts, n_tokens)
        assert (own - reference).abs().max() > 0.01
        assert_close(made.log_prob, own, atol=1e-5, rtol=0)
        assert_close(made.ref_log_prob, reference, atol=1e-5, rtol=0)
        assert_close(made.kl, own - reference, atol=2e-5, rtol=0)


def test_the_update_by_hand_is_that_of_the_loss():
    torch.manual_seed(0)
    job = job_of(16, 4)
    critic = sharp(generation.critic_gpt(job.language), seed=2)
    batch, loss = generation.ppo_batch(job, critic)
    with torch.no_grad():  # the policy moves, so that some ratios are clipped and others are not
        for parameter in job.policy.parameters():
            parameter.mul_(1.1)
    clip, entropy, value = generation.CLIP, generation.ENTROPY, generation.VALUE
    by_hand = rivals.HandWrittenPPO(job.policy, critic, clip, entropy, value)
    responses = rivals.Responses.of(batch)
    ratio = (by_one_pass(job.policy, responses.texts, 4) - responses.log_prob).exp()
    clipped = (ratio - 1).abs() > clip
    assert clipped.any()
    assert not clipped.all()

    found = []
    parameters = [*job.policy.parameters(), *critic.parameters()]
    for total in (generation.total_loss(loss, batch), by_hand.loss(responses)):
        found.append([total.detach(), *torch.autograd.grad(total, parameters)])
    assert all(gradient.any() for gradient in found[0])
    assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_generation():
    pytest.importorskip("transformers")
    args = report.make_args(generation.Args, quick=True)
    results = [vars(result) for result in generation.results(args)]
    exact = [result for result in results if "teacher-forced" in result["question"]]
    assert exact
    assert all(result["ok"] for result in exact)
    questions = " ".join(result["question"] for result in results)
    for words in ("by hand", "PPO update", "time per token", "env step", "without the stack"):
        assert words in questions


def test_ratios_and_verdicts():
    speed = report.Result.speed("a", 2.0, 1.0, 0.5)
    slow = report.Result.speed("b", 2.0, 0.9, 0.5)
    cost = report.Result.cost("c", 3.0, 2.0, 1.5)
    error = report.Result.error("e", 3e-5, 2e-5)
    assert (speed.ratio, slow.ratio, cost.ratio) == (0.5, 0.45, 1.5)
    verdicts = [result.ok for result in (speed, slow, cost, error, report.Result("f", 5.0))]
    assert verdicts == [True, False, True, False, None]
    assert "| e | 3.0e-05 |  | nats |  | ≤ 2e-05 | **no** |" in report.table([error])


@pytest.mark.slow
def test_run(tmp_path):
    options = "--quick --only step_overhead estimator_variance --out out"
    printed = run_command("benchmarks/run.py", tmp_path, options)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    written = (tmp_path / "out" / "results.md").read_text()
    assert {result["question"] for result in results} <= rows_of(written).keys()
    assert written.splitlines()[-1] in printed
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    (deviation,) = (r for r in results if "largest deviation" in r["question"])
    assert deviation["ok"]


@pytest.mark.slow
def test_controllers(tmp_path):
    printed = run_command("benchmarks/controllers.py", tmp_path, "--quick --out out")
    rules = ("planned", "adaptive", "exponential", "PID")
    assert all(printed.count(f"| | {rule} |") == 2 for rule in rules)
    curves = json.loads((tmp_path / "out" / "results.json").read_text())["responses"]
    for name, ((kls, coeffs, rewards),) in curves.items():
        assert len(kls) == len(coeffs) == len(rewards) == 4
        assert name != "none" or not any(coeffs)
    assert (tmp_path / "out" / "controllers.png").read_bytes().startswith(b"\x89PNG")


def test_when_a_run_is_steady():
    judge, loop = load("benchmarks/controllers.py"), load("benchmarks/loops.py").LOOPS[0]
    kls = [0.0] * 3 + [2 * loop.target] + [loop.target] * 10
    curves = judge.Curves(kls, [], [])
    # The last five-batch mean outside 0.7 to 1.3 is that of batch 4: (0 + 0 + 0 + 2 + 1) / 5.
    assert judge.steady(curves, loop) == 5
    assert judge.end(curves, loop) == pytest.approx(1.0)
    assert judge.steady(judge.Curves([0.0] * 9, [], []), loop) is None


@pytest.mark.slow
def test_truncated_sampling(tmp_path):
    pytest.importorskip("transformers")
    printed = run_command("benchmarks/truncated_sampling.py", tmp_path, "--quick --out out")
    rows = rows_of(printed)
    assert float(rows["counted"][2]) > 0.1
    assert float(rows["ignored"][2]) > 0.1
    assert printed.count("| True |") == 4  # all ratios are 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is an extra of its own")
def test_gradients_are_those_of_trl(tmp_path):
    rows = rows_of(run_command("benchmarks/trl.py", tmp_path, "--quick --check"))
    verdicts = [cells[-1] for name, cells in rows.items() if name.startswith("gradients")]
    assert verdicts == ["yes", "yes"]
