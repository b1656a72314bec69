"""The examples run at a small size and leave behind what they promise."""

import json
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from tests.scripts import lanes, load, run_command, run_here
from torchrl_kl import GPT, PlannedKLController
from torchrl_kl.envs import DigitLanguage

TINY_MODEL = "--threads 1 --lm-iterations 2 --lm-batch 16 --heldout-prompts 2 --exact-prompts 1"
TINY_GYM = "--seeds 1 --envs 2 --epochs 1 --imitation-updates 2"
TINY_PPO = "--ppo-responses 16 --ppo-minibatch 16"

gym_run = lanes(
    "examples/finetune_gym.py",
    f"{TINY_GYM} --batches 3 --processes 1",
)


@pytest.fixture
def gym_script():
    return load("examples/finetune_gym.py")


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
        # Planned from the first rewards, whose KL is left out; moved by the KL of the second batch.
        assert 0 < adaptive[0] == adaptive[1] != adaptive[2]
        assert (gym_run.out / "finetune_gym.png").read_bytes().startswith(b"\x89PNG")

    def test_the_coefficient_is_planned_then_follows_the_kl(self, gym_script, tmp_path):
        batches = []

        class Recorded(gym_script.KLConstrainedTransform):
            def forward(self, tensordict):
                batches.append(super().forward(tensordict))
                return batches[-1]

        n_envs, n_batches, target = 2, 3, 0.3
        options = gym_script.Options(
            out=tmp_path, envs=n_envs, batches=n_batches, epochs=1, imitation_updates=2
        )
        gym_script.imitate(0, options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gym_script, "KLConstrainedTransform", Recorded)
            curves = gym_script.finetune("adaptive", 0, 0, options)["curves"]

        # Neighbouring steps are compared, 16 at a time; an episode has 200.
        blocks = torch.arange(n_envs)[:, None] * 200 + torch.arange(200) // 16
        controller = PlannedKLController(target, per="step")
        rewards = batches[0]["next", "task_reward"].flatten()
        expected = [controller.observe_rewards(rewards, groups=blocks.flatten())]
        for batch in batches[1:]:
            expected.append(controller.coeff.item())
            kl = batch["next", "kl"].flatten().double()
            error = (kl.std() / len(kl) ** 0.5).item()
            controller.update(kl.mean().item(), len(kl), standard_error=error)
        assert len(batches) == n_batches
        coeffs = [value for _, value in curves["coeff"]]
        assert coeffs == pytest.approx(expected, rel=1e-5)  # they are logged in float32
        assert coeffs[2] != pytest.approx(coeffs[1], rel=1e-3)

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
