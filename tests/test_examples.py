"""The examples run at a small size and leave behind what they promise."""

import csv
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from tests.scripts import lanes, load, run_command, run_here
from torchrl_kl import GPT, Enumeration
from torchrl_kl.envs import DigitLanguage

TINY_MODEL = "--threads 1 --lm-iterations 2 --lm-batch 16 --heldout-prompts 2 --exact-prompts 1"
TINY_PPO = "--ppo-responses 16 --ppo-minibatch 16"
TINY_REWARD = "--rm-iterations 2 --rm-batch 16 --rm-heldout-pairs 20"
TINY_RUNS = "--ppo-batches 1 --adaptive-batches 2 --adaptive-prompts 1"
TINY_JOB = f"{TINY_MODEL} {TINY_PPO} {TINY_REWARD} {TINY_RUNS}"
TINY_GYM = "--seeds 1 --envs 2 --epochs 1 --imitation-updates 2"
TINY_STUDY = "--ppo-batches 2 --eval-every 1 --budget-prompts 4 --budget-responses 32 --seeds 1"

digit_run = lanes(
    "examples/digit_rlhf.py",
    f"{TINY_JOB} --processes 1 --logger tensorboard",
    "--processes 2 --logger tensorboard",
    without="draw_attention",
)
gym_run = lanes(
    "examples/finetune_gym.py",
    f"{TINY_GYM} --batches 2 --processes 1",
)
study_run = lanes(
    "examples/adaptive_vs_static.py", f"{TINY_MODEL} {TINY_PPO} {TINY_STUDY}", "--threads 1"
)


@pytest.fixture
def script():
    return load("examples/digit_rlhf.py")


@pytest.fixture
def gym_script():
    return load("examples/finetune_gym.py")


@pytest.fixture
def study():
    return load("examples/adaptive_vs_static.py")


class TestDigitRLHF:
    def test_models_can_be_loaded(self, digit_run):
        policies = ("policy_beta1", "policy_beta0", "policy_adaptive")
        for name in ("language_model", "reward_model", *policies):
            assert isinstance(GPT.from_pretrained(digit_run.out / name), GPT)

    def test_report_has_its_figures(self, digit_run):
        report = json.loads((digit_run.out / "report.json").read_text())
        policies = ("beta1", "beta0", "adaptive")
        assert {"language_model", "reward_model", *policies} <= report["seconds"].keys()
        assert report["language_model"]["excess_nats_per_token"] > 0
        assert 0 <= report["reward_model"]["heldout_accuracy"] <= 1
        figures = {"reward", "kl", "kl_per_position", "objective", "optimum", "regret"}
        for policy in policies:
            assert figures | {"fraction_of_gain", "first_digit_right"} <= report[policy].keys()
            assert report[policy]["regret"] >= -1e-9
            assert sum(report[policy]["kl_per_position"]) == pytest.approx(report[policy]["kl"])
        adaptive = {"coeff_mean_last_quarter", "coeff_exact", "coeff_first_within_20_percent"}
        assert adaptive | {"batches", "target"} <= report["adaptive"].keys()

    def test_metrics_and_pictures(self, digit_run):
        with (digit_run.out / "metrics.csv").open() as stream:
            metrics = {row["metric"] for row in csv.DictReader(stream)}
        for policy in ("beta1", "beta0", "adaptive"):
            names = ("reward", "kl_reference", "kl_old_policy", "coeff")
            assert {f"{policy}/{name}" for name in names} <= metrics
        config = json.loads((digit_run.out / "config.json").read_text())
        pictures = ("reward_model", "curves", "probabilities")
        for name in (*pictures, "attention") if config["quick"] else pictures:
            assert (digit_run.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert list((digit_run.out / "tensorboard").glob("**/events.*"))

    def test_the_picture_of_the_attention(self, script, tmp_path):
        gpt = GPT(11, 8, n_layer=1, n_head=2)
        text = torch.tensor([5, 7, 1, 5, 10, 6, 2, 7, 3])
        models = {"base": gpt, "beta 1": gpt}
        script.draw_attention(models, text, DigitLanguage(), tmp_path / "attention.png")
        assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")

    def test_the_last_thing_printed_is_the_table(self, digit_run):
        printed = digit_run.printed
        parts = ("likely first digits", "for each first digit", "policy  ")
        assert sorted(parts, key=printed.index) == list(parts)

    def test_a_stage_says_beforehand_how_long_it_takes_and_then_what_came_out(self, digit_run):
        printed = digit_run.printed
        parts = ("language model: about ", "nats per token above", "reward model: about ", "PPO")
        assert sorted(parts, key=printed.index) == list(parts)

    @pytest.mark.slow
    def test_the_numbers_do_not_depend_on_the_number_of_processes(self, tmp_path):
        reports = []
        for processes in (1, 2):
            out = f"out{processes}"
            options = f"{TINY_JOB} --processes {processes} --out {out}"
            run_command("examples/digit_rlhf.py", tmp_path, options)
            report = json.loads((tmp_path / out / "report.json").read_text())
            metrics = (tmp_path / out / "metrics.csv").read_text()
            weights = [file.read_bytes() for file in sorted(tmp_path.glob(f"{out}/*/model.*"))]
            reports.append((report | {"seconds": 0}, metrics, weights))
        assert len(reports[0][2]) == 5
        assert reports[0] == reports[1]

    @pytest.mark.slow
    @pytest.mark.parametrize("processes", [1, 2])
    def test_an_error_in_a_run_ends_the_job(self, tmp_path, processes):
        options = f"{TINY_JOB} --processes {processes} --ppo-minibatch 0"
        with pytest.raises(AssertionError, match="split"):
            run_command("examples/digit_rlhf.py", tmp_path, options)


class TestFinetuneGym:
    def test_every_run_and_seed_has_its_figures(self, gym_run):
        report = json.loads((gym_run.out / "report.json").read_text())
        n_seeds = json.loads((gym_run.out / "config.json").read_text())["seeds"]
        assert list(report) == ["imitated", "no_penalty", "constant", "adaptive"]
        for run, rows in report.items():
            assert len(rows) == n_seeds
            for row in rows:
                assert -2000 < row["true_return"] < 0
                assert -1 < row["torque_reward"] < 0
                assert (row["kl_reference"] > 0) == (run != "imitated")

    def test_curves_and_picture(self, gym_run):
        config = json.loads((gym_run.out / "config.json").read_text())
        n_batches, last = config["batches"], config["seeds"] - 1

        def curve(run, name):
            (file,) = gym_run.out.glob(f"log/{run}/**/{name}.csv")
            return [float(line.split(",")[1]) for line in file.read_text().split()]

        for name in ("true_return", "torque_reward", "kl_reference", "kl_old_policy"):
            assert len(curve(f"constant_{last}", name)) == n_batches
        assert curve("no_penalty_0", "coeff") == [0.0] * n_batches
        assert curve("constant_0", "coeff") == pytest.approx([0.1] * n_batches)
        adaptive = curve("adaptive_0", "coeff")
        assert adaptive[0] == pytest.approx(0.05)
        assert adaptive[1] != adaptive[0]
        assert (gym_run.out / "finetune_gym.png").read_bytes().startswith(b"\x89PNG")

    def test_the_last_thing_printed_is_the_table(self, gym_run):
        printed = gym_run.printed
        parts = ("true return", "imitated", "adaptive", "of a processor")
        assert sorted(parts, key=printed.index) == list(parts)

    def test_stopped_and_resumed_is_bit_for_bit_the_same(self, gym_script, tmp_path):
        """Ctrl-C in the third batch of the run with the adaptive coefficient."""
        options = f"{TINY_GYM} --batches 4 --processes 1 --checkpoint-every 0"
        run_here("examples/finetune_gym.py", tmp_path, f"{options} --out whole")
        tempt, calls = gym_script.tempt, []

        def interrupt(batch):
            calls.append(1)
            if len(calls) == 13:  # one of the imitated policy, 5 of each run before it
                raise KeyboardInterrupt
            return tempt(batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gym_script, "tempt", interrupt)
            with pytest.raises(SystemExit, match="130"):
                run_here("examples/finetune_gym.py", tmp_path, f"{options} --out stopped")
        assert not (tmp_path / "stopped/adaptive_0/result.json").exists()
        run_here("examples/finetune_gym.py", tmp_path, f"{options} --out stopped --resume")
        results = []
        for out in ("whole", "stopped"):
            result = json.loads((tmp_path / out / "adaptive_0/result.json").read_text())
            policy = torch.load(tmp_path / out / "adaptive_0/policy.pt")
            results.append((result["curves"], result["figures"], policy))
        assert results[0][:2] == results[1][:2]
        torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=0)

    def test_the_temptation_pays_for_rest_and_keeps_the_task(self, gym_script):
        step = TensorDict(reward=torch.full((3, 1), -5.0), batch_size=3)
        batch: Any = TensorDict(
            action=torch.tensor([[0.0], [1.0], [-9.0]]), next=step, batch_size=3
        )
        tempted = gym_script.tempt(batch)["next"]
        assert tempted["reward"].flatten().tolist() == [0.0, -0.25, -1.0]
        assert tempted["true_reward"].flatten().tolist() == [-5.0] * 3
        assert set(batch["next"].keys()) == {"reward"}
        assert (batch["next", "reward"] == -5).all()

    def test_what_is_imitated_swings_up(self, gym_script):
        policy = TensorDictModule(gym_script.controller, ["observation"], ["action"])
        steps = gym_script.make_env(gym_script.Options(envs=4), seed=0).rollout(200, policy)
        assert (
            steps["next", "observation"][:, -50:, 0] > 0.95
        ).all()  # cosine of the angle: up, and held there
        assert steps["next", "reward"].sum(1).mean() > -400  # hanging costs about 1200


def test_no_stage_trains_on_a_heldout_prompt(script):
    train, heldout = script.split_prompts(DigitLanguage(), script.Args(heldout_prompts=100))
    assert len(train) == 9900
    assert len(heldout) == 100
    assert len(torch.cat([train, heldout]).unique(dim=0)) == 10_000
    assert heldout[:2].tolist() == [
        [5, 7, 1, 5],
        [0, 2, 8, 6],
    ]  # those that the pictures and checks show


@pytest.mark.parametrize("heldout_prompts", [1, 10_000])
def test_a_split_without_prompts_on_both_sides_is_refused(script, heldout_prompts):
    with pytest.raises(SystemExit, match="--heldout-prompts must be from 2 to 9999"):
        script.split_prompts(DigitLanguage(), script.Args(heldout_prompts=heldout_prompts))


def test_pairs_differ_in_the_first_digit_alone(script):
    language = DigitLanguage()
    prompts = language.sample_prompts(2000)
    accepted, rejected = script.preference_pairs(language, prompts)
    first = language.context_length
    assert (accepted[:, first] == language.preferred_token(prompts)).all()
    assert (rejected[:, first] != accepted[:, first]).all()
    assert ((rejected[:, first] >= 0) & (rejected[:, first] < language.vocab_size)).all()
    others = [i for i in range(language.text_length) if i != first]
    assert torch.equal(accepted[:, others], rejected[:, others])


STUDY_RUNS = ["constant 0.1", "constant 0.3", "constant 1", "budget"]
STUDY_RUNS += [
    f"{rule} {start}" for start in ("0.05", "2") for rule in ("adaptive", "exponential", "PID")
]


class TestTheStudy:
    def test_it_leaves_a_result_for_each_run(self, study_run):
        settings = json.loads((study_run.out / "settings.json").read_text())
        n_batches, every = settings["ppo_batches"], settings["eval_every"]
        for name in STUDY_RUNS:
            file = study_run.out / "seed0" / f"{name.replace(' ', '_')}.json"
            result = json.loads(file.read_text())
            curves, final = result["curves"], result["final"]
            assert [len(curves[curve]) for curve in ("reward", "kl", "coeff")] == [n_batches] * 3
            batches = [batch for batch, _ in curves["perplexity"]]
            assert batches == list(range(every, n_batches + 1, every))
            assert curves["perplexity"][-1][1] == final["perplexity"]
            assert sum(final["kl_per_position"]) == pytest.approx(final["kl"])
            assert final["reward"] <= final["frontier"] + 1e-9
            if name.startswith("constant"):  # float32, as the reward
                coeff = float(name.split()[1])
                assert curves["coeff"] == pytest.approx([coeff] * n_batches, rel=1e-6)
            assert f"| {name} |" in study_run.printed
        assert (study_run.out / "adaptive_vs_static.png").read_bytes().startswith(b"\x89PNG")

    def test_it_does_not_repeat_what_is_there(self, study_run):
        file = study_run.out / "seed0" / "PID_2.json"
        lost = file.read_text()
        others = {
            path: path.stat().st_mtime_ns for path in file.parent.rglob("*.*") if path != file
        }
        file.unlink()
        again = study_run.repeat()
        assert {path: path.stat().st_mtime_ns for path in others} == others
        before, after = json.loads(lost), json.loads(file.read_text())
        # The result does not depend on what ran before it in the process.
        assert before | {"seconds": 0} == after | {"seconds": 0}
        assert again.splitlines()[:13] == study_run.printed.splitlines()[:13]


def test_the_study_refuses_results_of_other_settings(study, tmp_path):
    study.check_settings(tmp_path, study.Args())
    study.check_settings(tmp_path, study.Args(seed=3, seeds=2, threads=2))
    with pytest.raises(
        SystemExit, match=r"holds results of other settings \(gain, horizon\): choose another --out"
    ):
        study.check_settings(tmp_path, study.Args(gain=0.2, horizon=1e5))


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


COLLECTED = f"{TINY_MODEL} {TINY_PPO} --batches 4"


class TestCollectors:
    def check(self, printed, collector, where):
        expected = rf"""{collector}, reference with the {where}
frames per second  [0-9]+
coefficients       0\.050 \.\.\. 0\.0[45][0-9]; several in [0-4] of 4 batches
KL                 ([0-9.]+) \(target 0\.5\)
exact regret       ([0-9.]+) at coefficient 0\.[0-9]+
"""
        found = re.fullmatch(expected, printed)
        assert found, printed
        assert float(found[1]) > 0  # the policy has moved
        assert 0 <= float(found[2]) < 1

    @pytest.mark.parametrize("where", ["learner", "workers"])
    def test_they_tell_what_they_did(self, tmp_path, monkeypatch, where):
        monkeypatch.setenv("RAY_worker_niceness", "0")  # the script sets it
        printed = run_here("examples/collectors.py", tmp_path, f"{COLLECTED} --where {where}")
        self.check(printed, "sync", where)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_with_workers_from_the_command_line(self, tmp_path):
        options = "--quick --threads 1 --collector multi-async --where workers"
        self.check(
            run_command("examples/collectors.py", tmp_path, options), "multi-async", "workers"
        )
        assert list(tmp_path.iterdir()) == []

    def test_they_begin_with_a_language_model_that_is_there(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("RAY_worker_niceness", "0")
        language = DigitLanguage()
        GPT(language.n_tokens, language.text_length - 1).save_pretrained(tmp_path / "model")
        run_here("examples/collectors.py", tmp_path, f"{COLLECTED} --reference model")
        assert "language model" not in capsys.readouterr().err  # none was trained


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
class TestGRPOChat:
    LINE = r"reward (\S+), KL (\S+) nats per response, coefficient (\S+)\n"

    def test_it_trains_and_moves_the_coefficient(self, tmp_path):
        found = re.fullmatch(self.LINE, run_here("examples/grpo_chat.py", tmp_path, "--quick"))
        assert found
        reward, kl, coeff = map(float, found.groups())
        assert 0 < reward < 1
        assert abs(kl) < 1
        assert 0.1 < coeff < 0.5  # it falls while the KL is below its target
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_the_kl_settles_at_the_target(self, tmp_path):
        found = re.fullmatch(self.LINE, run_command("examples/grpo_chat.py", tmp_path, ""))
        assert found
        reward, kl, coeff = map(float, found.groups())
        assert reward > 0.25
        assert kl == pytest.approx(1.0, rel=0.15)
        assert 0.3 < coeff < 1.5
