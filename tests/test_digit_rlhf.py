"""The RLHF job on the digit language, at a small size."""

import json

import pytest
import torch

from tests.scripts import load, run_command, run_here
from torchrl_kl.language import GPT

PATH = "examples/digit_rlhf.py"
RUNS = ("constant", "no_penalty", "adaptive")
TINY = (
    "--lm-iterations 2 --lm-batch 16 --heldout-prompts 2 --exact-prompts 1 --adaptive-prompts 1 "
    "--rm-iterations 2 --rm-batch 16 --rm-heldout-pairs 20 "
    "--ppo-batches 1 --adaptive-batches 6 --ppo-responses 16 --ppo-minibatch 16"
)


@pytest.fixture(scope="module")
def script():
    return load(PATH)


@pytest.fixture(scope="module", params=["tiny", pytest.param("quick", marks=pytest.mark.slow)])
def job(request, tmp_path_factory):
    """The folder of a job, and what it printed: in this process, and with workers."""
    folder = tmp_path_factory.mktemp("digit_rlhf")
    if request.param == "quick":
        return folder / "out", run_command(PATH, folder, "--quick --out out --logger tensorboard")
    return folder / "out", run_here(PATH, folder, f"{TINY} --out out")


class TestJob:
    def test_report(self, job):
        report = json.loads((job[0] / "report.json").read_text())
        config = json.loads((job[0] / "config.json").read_text())
        assert report["language_model"]["excess"] > 0
        assert 0 <= report["reward_model"]["accuracy"] <= 1
        for run in RUNS:
            assert isinstance(GPT.from_pretrained(job[0] / run), GPT)
            row = report[run]
            assert row["regret"] >= -1e-9
            assert sum(row["kl_per_position"]) == pytest.approx(row["kl"])
            assert row["curves"].keys() == {"reward", "kl_reference", "kl_old_policy", "coeff"}
            n_batches = config["adaptive_batches" if run == "adaptive" else "ppo_batches"]
            assert {len(curve) for curve in row["curves"].values()} == {n_batches}
        assert set(report["constant"]["curves"]["coeff"]) == {1.0}
        assert set(report["no_penalty"]["curves"]["coeff"]) == {0.0}
        coeffs = report["adaptive"]["curves"]["coeff"]
        assert min(coeffs) > 0
        assert len(set(coeffs[-3:])) == 3  # planned first, it then moves with each batch

    def test_pictures_and_table_of_several_seeds(self, job, tmp_path):
        out, printed = job
        assert "coefficient 1: gain" in printed
        for name in ("attention", "curves", "probabilities"):
            assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        report = load("examples/digit_rlhf_report.py")
        report.main((out, out), tmp_path / "both.png")
        assert (tmp_path / "both.png").exists()


@pytest.mark.parametrize("after", [(), (11,)])
def test_shared_prefixes_give_the_outputs_of_whole_texts(script, after):
    gpt = GPT(12, 10, n_layer=2).double()
    texts = script.LANGUAGE.sample(torch.randint(10, (4, 4))).repeat_interleave(3, 0)
    texts[:, -1] = torch.arange(12) % 11
    whole = torch.cat([texts, torch.full((12, len(after)), 11)], 1)
    outputs = script.last_outputs(gpt, texts, *after)
    # Sums of some hundred products of numbers of about 1, in float64.
    torch.testing.assert_close(outputs, gpt(whole)[:, -1], rtol=0, atol=1e-12)


def test_no_stage_trains_on_a_heldout_prompt(script):
    train, heldout = script.split_prompts(100)
    assert (len(train), len(heldout)) == (9900, 100)
    assert len(torch.cat([train, heldout]).unique(dim=0)) == 10_000
    assert heldout[:2].tolist() == [[5, 7, 1, 5], [0, 2, 8, 6]]  # those that are shown


def test_pairs_differ_in_the_first_digit_alone(script):
    prompts = script.LANGUAGE.sample_prompts(2000)
    accepted, rejected = script.preference_pairs(prompts)
    assert (script.LANGUAGE.preference(accepted) == 1).all()
    assert (script.LANGUAGE.preference(rejected) == 0).all()
    first, digits = script.LANGUAGE.context_length, script.LANGUAGE.vocab_size
    assert ((rejected[:, first] >= 0) & (rejected[:, first] < digits)).all()
    assert (accepted != rejected).sum() == len(prompts)
