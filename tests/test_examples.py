"""The examples on Pendulum, collectors and chats run at a small size."""

import json
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from tests.scripts import load, run_command, run_here


@pytest.fixture(scope="module")
def gym_script():
    return load("examples/finetune_gym.py")


class TestFinetuneGym:
    @pytest.mark.slow
    def test_every_run_and_seed_has_its_figures(self, tmp_path):
        printed = run_command("examples/finetune_gym.py", tmp_path, "--quick --out out")
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert list(report) == ["imitated", "no_penalty", "constant", "adaptive"]
        for run, rows in report.items():
            assert len(rows) == 2
            for row in rows:
                assert -2000 < row["true_return"] < 0
                assert -1 < row["torque_reward"] < 0
                assert (row["kl_reference"] > 0) == (run != "imitated")
            assert f"\n{run} " in printed
        assert (tmp_path / "out" / "finetune_gym.png").read_bytes().startswith(b"\x89PNG")

    def test_the_temptation_rewards_rest_and_keeps_the_task(self, gym_script):
        step = TensorDict(reward=torch.full((3, 1), -5.0), batch_size=3)
        action = torch.tensor([[0.0], [1.0], [-9.0]])
        batch: Any = TensorDict(action=action, next=step, batch_size=3)
        tempted = gym_script.tempt(batch)["next"]
        assert tempted["reward"].flatten().tolist() == [0.0, -0.25, -1.0]
        assert tempted["true_reward"].flatten().tolist() == [-5.0] * 3
        assert set(batch["next"].keys()) == {"reward"}
        assert (batch["next", "reward"] == -5).all()

    def test_what_is_imitated_swings_up(self, gym_script):
        policy = TensorDictModule(gym_script.controller, ["observation"], ["action"])
        steps = gym_script.make_env(4, seed=0).rollout(200, policy)
        # Cosine of the angle: up, and held there.
        assert (steps["next", "observation"][:, -50:, 0] > 0.95).all()
        assert steps["next", "reward"].sum(1).mean() > -400  # hanging costs about 1200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collector", "where"),
    [("sync", "learner"), ("sync", "workers"), ("multi-async", "workers")],
)
def test_collectors(tmp_path, collector, where):
    options = f"--quick --collector {collector} --where {where} --out out"
    printed = run_command("examples/collectors.py", tmp_path, options)
    lines = [
        f"{collector}, reference with the {where}",
        "frames per second  [0-9]+",
        r"coefficients       0\.050 \.\.\. 0\.0[45][0-9]; several in [0-4] batches",
        r"KL                 0\.[0-9]*[1-9][0-9]* \(target 0\.5\)",  # the policy has moved
        r"exact regret       0\.[0-9]+ at coefficient 0\.[0-9]+",
    ]
    assert re.fullmatch("\n".join(lines) + "\n", printed), printed


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
class TestGRPOChat:
    def check(self, printed, least, most):
        found = re.fullmatch(
            r"reward (\S+), KL \S+ nats per response, coefficient (\S+)\n", printed
        )
        assert found
        assert 0 < float(found[1]) < 1
        assert least < float(found[2]) < most

    def test_the_coefficient_falls_while_the_kl_is_below_its_target(self, tmp_path):
        # It starts at 1.2 / sqrt(2), planned from advantages with a standard deviation of 1; those
        # of the rewards, shares of 6 words, are a fifth of that.
        self.check(run_here("examples/grpo_chat.py", tmp_path, "--quick"), 0.3, 0.8)

    @pytest.mark.slow
    def test_the_whole_run(self, tmp_path):
        self.check(run_command("examples/grpo_chat.py", tmp_path, ""), 0.1, 1.5)
