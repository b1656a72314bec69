"""The benchmarks run at a small size, their tables agree with themselves, and rivals are exact."""

import json
import re
from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

from tests.gpt_helpers import sharp
from tests.scripts import lanes, load, run_here

ROUNDING = 0.5e-5  # of a figure with five decimals


def rows_of(printed: str) -> dict[str, list[str]]:
    """Cells of all rows of all tables, by the first cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if "|" in line
    ]
    return {row[0]: row[1:] for row in rows}


SMALL = "--batches 2 --responses 16 --lm-updates 2 --prompts 1"
variance_run = lanes("benchmarks/estimator_variance.py", f"{SMALL} --samples 64")
losses_run = lanes("benchmarks/reward_vs_loss.py", f"{SMALL} --seeds 0")


class TestEstimatorVariance:
    ESTIMATORS = ("k1", "k3", "top-1", "top-2", "top-3", "exact")

    def test_every_estimate_has_the_mean_of_the_exact_values(self, variance_run):
        printed = variance_run.printed
        kl = re.search(r"KL (\S+) nats", printed)
        assert kl
        assert float(kl[1]) > 0.01  # at the reference every estimate is zero
        for name in self.ESTIMATORS:
            assert float(rows_of(printed)[name][1]) == pytest.approx(float(kl[1]), abs=2 * ROUNDING)

    def test_samples_agree_with_the_enumeration(self, variance_run):
        for name in self.ESTIMATORS:
            mean_off, variance_off = map(float, rows_of(variance_run.printed)[name][5].split(","))
            assert abs(mean_off) < 5
            assert abs(variance_off) < 5

    def test_the_tokens_add_up_to_the_variances(self, variance_run):
        rows = rows_of(variance_run.printed)
        for name, column in (("k1", 4), ("exact", 5)):
            assert float(rows["all"][column]) == pytest.approx(
                float(rows[name][3]), abs=2 * ROUNDING
            )
            parts = [float(rows[str(token)][column]) for token in range(1, 5)]
            assert sum(parts) == pytest.approx(float(rows[name][3]), abs=6 * ROUNDING)

    def test_the_verdict_is_that_of_the_table(self, variance_run):
        rows = rows_of(variance_run.printed)
        exact, k1 = float(rows["exact"][3]), float(rows["k1"][3])
        verdict = re.search(
            r"The variance of exact is (\S+) of k1's: (at most|more than) half",
            variance_run.printed,
        )
        assert verdict
        # Four decimals of the ratio, and the rounding of both variances.
        bound = 0.5e-4 + ROUNDING * (1 + exact / k1) / k1
        assert float(verdict[1]) == pytest.approx(exact / k1, abs=1.1 * bound)
        assert verdict[2] == ("at most" if exact / k1 <= 0.5 else "more than")


def test_reward_vs_loss(losses_run):
    lines = losses_run.printed.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[2] for row in rows] == [
        "(the optimum)",
        "reward (k1)",
        "loss, sequence",
        "loss, sequence, step weights",
        "loss, step",
        "loss, k2",
    ]
    best = rows[0]
    for row in rows[1:]:
        objective, optimum = (float(r[3]) - 0.5 * float(r[5]) for r in (row, best))
        assert float(row[6]) >= 0
        assert float(row[6]) == pytest.approx(optimum - objective, abs=3e-4)


def test_step_overhead(tmp_path):
    options = "--blocks 1 --steps 2 --warmup 1 --batches 2 --frames 10"
    printed = run_here("benchmarks/step_overhead.py", tmp_path, options)
    times = re.search(r"plain step (\d+) us, bare call (\d+) us", printed)
    plain_rate = re.search(r"(\d+) frames per second without a stack", printed)
    assert times
    assert plain_rate
    plain, bare = map(int, times.groups())
    steps, frames = printed.split("frames per second")
    for name in ("constant", "adaptive, per trajectory", "adaptive, per step"):
        step, overhead, ratio = map(float, rows_of(steps)[name])
        assert overhead == pytest.approx(step - plain, abs=1.5)  # three rounded figures
        assert ratio == pytest.approx(overhead / bare, abs=0.01 + (0.5 + abs(ratio)) / bare)
        for cell in rows_of(frames)[name]:
            found = re.fullmatch(r"(\d+) \((\d+)%\)", cell)
            assert found
            share = int(found[1]) / int(plain_rate[1])
            assert int(found[2]) / 100 == pytest.approx(share, abs=0.005 + share / 10)


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

    def test_prompts_are_kept(self):
        job = job_of(8, 3)
        prompts = job.prompts()
        texts, _ = rivals.sample(rivals.PlainGPT(job.policy), prompts, 3)
        assert_close(texts[:, : prompts.shape[1]], prompts)

    def test_its_rewards_are_those_of_the_stack(self):
        torch.manual_seed(0)
        job = job_of(16, 4)
        batch = next(job.collected(stack=job.stack()))
        texts, log_prob = rivals.finished_texts(batch), batch["action_log_prob"]
        ref_log_prob = by_one_pass(job.reference, texts, 4)
        made = rivals.penalize(
            texts, log_prob, ref_log_prob, job.language.preference(texts), ours.COEFF
        )
        assert_close(texts, batch["next", "tokens"][:, -1])
        for name, own in (("kl", made.kl), ("reward", made.reward)):
            assert_close(batch["next", name].squeeze(-1), own, atol=2e-5, rtol=0)

    def test_tokens_are_drawn_with_their_probabilities(self):
        torch.manual_seed(0)
        probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
        drawn = rivals.draw(probs.log().expand(100_000, -1)).flatten()
        counts = torch.bincount(drawn, minlength=6)
        assert counts[1] == counts[5] == 0
        errors = (probs * (1 - probs) / 100_000).sqrt()
        assert ((counts / 100_000 - probs).abs() <= 5 * errors).all()


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
    for total in (generation.total_loss(loss, batch), by_hand.loss(responses)):
        total.backward()
        gradients = {
            (name, key): parameter.grad.clone()
            for name, gpt in (("policy", job.policy), ("critic", critic))
            for key, parameter in gpt.named_parameters()
        }
        found.append((total.detach(), gradients))
        by_hand.optimizer.zero_grad()
        loss.zero_grad()
    assert all(gradient.any() for gradient in found[0][1].values())
    assert_close(*found, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_generate_by_hand():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    for name, model in rivals.tiny_models().items():
        generation.sharpen(model)
        reference = rivals.tiny_models()[name]
        made = rivals.generate_and_score(
            model, reference, torch.randint(10, (3, 5)), 6, lambda texts: texts[:, 0] * 1.0, 0.5
        )
        logits = [m(made.texts[:, :-1]).logits[:, 4:].detach() for m in (model, reference)]
        own, ref = (rivals.log_prob_at(x, made.texts[:, 5:]) for x in logits)
        assert_close(made.log_prob, own, atol=2e-5, rtol=0)
        assert_close(made.kl, own - ref, atol=2e-5, rtol=0)
        rewards = made.texts[:, 0] - 0.5 * (own - ref).sum(1)
        assert_close(made.reward.sum(1), rewards, atol=1e-4, rtol=0)
    n_parameters = sum(parameter.numel() for parameter in rivals.llama(4000).parameters())
    assert n_parameters == pytest.approx(3.4e6, rel=0.02)


def assert_consistent(results):
    """Ratios and verdicts are those of the figures next to them."""
    assert len({result["question"] for result in results}) == len(results)
    for result in results:
        ours, rival, ratio, bar = (result[key] for key in ("ours", "rival", "ratio", "bar"))
        assert (rival is None) == (ratio is None)
        if ratio is not None:
            assert ratio == pytest.approx(ours / rival) or ratio == pytest.approx(rival / ours)
        if bar is None:
            assert result["ok"] is None
        else:
            value = ours if ratio is None else ratio
            reached = value >= bar if result["at_least"] else value <= bar
            assert result["ok"] == reached


@pytest.fixture(scope="module")
def results():
    """Those of generation.py, at the quick size."""
    pytest.importorskip("transformers")
    found = generation.results(report.make_args(generation.Args, quick=True))
    return [vars(result) for result in found]


class TestGeneration:
    def test_the_ratios_are_those_of_the_figures(self, results):
        assert_consistent(results)
        assert all(
            result["ours"] > 0 for result in results if "log-probs" not in result["question"]
        )

    def test_log_probs_are_exact(self, results):
        exact = [result for result in results if "teacher-forced" in result["question"]]
        assert exact
        assert all(result["ok"] for result in exact)

    def test_every_part_answers(self, results):
        questions = " ".join(result["question"] for result in results)
        for words in ("by hand", "PPO update", "time per token", "env step", "without the stack"):
            assert words in questions


class TestReport:
    @dataclass
    class Args:
        size: int = report.arg(100, "A size.", quick=3)
        names: tuple[str, ...] = report.arg(("a", "b"), "Names.", choices=("a", "b", "c"))
        quick: bool = report.quick_flag()

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("", Args(100)),
            ("--quick", Args(3, quick=True)),
            ("--quick --size 100", Args(100, quick=True)),
            ("--size 7 --quick", Args(7, quick=True)),
            ("--names c a", Args(100, ["c", "a"])),  # type: ignore[arg-type]
        ],
    )
    def test_quick_sets_defaults_only(self, line, expected, monkeypatch):
        monkeypatch.setattr("sys.argv", ["script", *line.split()])
        assert report.parse_args(self.Args, "") == expected

    def test_ratios_and_verdicts(self):
        speed = report.Result.speed("a", 2.0, 1.0, 0.5)
        slow = report.Result.speed("b", 2.0, 0.9, 0.5)
        cost = report.Result.cost("c", 3.0, 2.0, 1.5)
        dear = report.Result.cost("d", 3.1, 2.0, 1.5)
        error = report.Result.error("e", 3e-5, 2e-5)
        plain = report.Result("f", 5.0)
        assert (speed.ratio, slow.ratio, cost.ratio) == (0.5, 0.45, 1.5)
        verdicts = [r.ok for r in (speed, slow, cost, dear, error, plain)]
        assert verdicts == [True, False, True, False, False, None]
        assert "| e | 3.0e-05 |  | nats |  | ≤ 2e-05 | **no** |" in report.table([error])

    def test_a_race_is_run_in_turns(self):
        calls = []

        def run(name, seconds):
            calls.append(name)
            return seconds

        times = iter([9.0, 1.0, 5.0, 2.0])  # the first one is the warm-up
        contestants = {"a": lambda: run("a", next(times)), "b": lambda: run("b", 1.0)}
        assert report.race(contestants, 0.0, 3) == {"a": 2.0, "b": 1.0}
        assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]


run_of_all = lanes("benchmarks/run.py", "--quick --only step_overhead estimator_variance")


def test_run(run_of_all):
    results = json.loads((run_of_all.out / "results.json").read_text())
    assert_consistent(results)
    written = (run_of_all.out / "results.md").read_text()
    assert [row for row in rows_of(written) if row not in ("question", "---")] == [
        result["question"] for result in results
    ]
    assert written.splitlines()[-1] in run_of_all.printed
    assert (run_of_all.out / "results.png").read_bytes().startswith(b"\x89PNG")
    (deviation,) = (r for r in results if "largest deviation" in r["question"])
    assert deviation["ok"]
