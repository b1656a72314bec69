"""The example on film reviews: its rewards, its texts, and small runs on invented reviews."""

import csv
import json
import random

import pytest
import torch

from tests.scripts import load, run_here

for needed in ("transformers", "tokenizers", "peft"):
    pytest.importorskip(needed)

PATH = "examples/movie_reviews.py"
TINY = "--quick --vocab-size 300 --width 8 --lm-updates 2 --lm-batch 4 --heldout 0.5 --batches 3"
TINY += " --responses 16 --minibatch 8 --eval-responses 8 --response-tokens 6"
RUNS = ["no_kl", "constant", "adaptive", "in_loss"]

GOOD = "I loved this wonderful film . The acting is superb and I think that the story is great ."
BAD = "I hated this awful film . The acting is terrible and I think that the story is a bore ."


@pytest.fixture(scope="module")
def text():
    return load("examples/movie_reviews_text.py")


def invented(n):
    """Sentences of praise and of complaint, n of each, in which other words differ."""
    chance, others = random.Random(0), list("abcdefghijklmnopqrst")
    for label, sentence in ((1, GOOD), (0, BAD)):
        for _ in range(n):
            yield f"{' '.join(chance.sample(others, 10))}, {sentence}<br />", label


def write_reviews(folder, rows=None):
    with (folder / "reviews.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "label"), *(rows or invented(60))])


@pytest.mark.slow
class TestRuns:
    def test_figures_curves_and_texts(self, tmp_path):
        write_reviews(tmp_path)
        printed = run_here(PATH, tmp_path, f"--data reviews.csv --out out {TINY}")
        out = tmp_path / "out"
        results = json.loads((out / "report.json").read_text())
        assert list(results) == ["language_model", *RUNS]
        assert results["language_model"]["kl"] == pytest.approx(0, abs=1e-5)
        for name in RUNS:
            assert {len(curve) for curve in results[name]["curves"].values()} == {3}
        coeffs = {name: results[name]["curves"]["coeff"] for name in RUNS}
        assert coeffs["no_kl"] == [0.0] * 3
        assert coeffs["constant"] == pytest.approx([0.2] * 3)
        for name in ("adaptive", "in_loss"):
            assert min(coeffs[name]) > 0
        report = (out / "report.md").read_text()
        assert report[: report.index("\n\n")] in printed
        assert report.count("```") == 2 * (1 + len(RUNS))
        assert (out / "movie_reviews.png").read_bytes().startswith(b"\x89PNG")

    # 2026-11: peft 0.21.2 asks transformers 5.23 for it.
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_adapters_of_a_given_model(self, tmp_path, text):
        """In half precision, in which small updates would be rounded away."""
        write_reviews(tmp_path)
        tokenizer = text.train_tokenizer([passage for passage, _ in invented(5)], 300)
        base = text.make_language_model(len(tokenizer), 1, 8, 12).bfloat16()
        base.save_pretrained(tmp_path / "half")
        tokenizer.save_pretrained(tmp_path / "half")
        run_here(
            PATH,
            tmp_path,
            f"--data reviews.csv --out lora --model half --lora {TINY} --lm-updates 0 --batches 2",
        )
        copy = load(PATH).AutoModelForCausalLM.from_pretrained(tmp_path / "lora/language_model")
        torch.testing.assert_close(copy.state_dict(), base.float().state_dict(), rtol=0, atol=0)
        assert (tmp_path / "lora" / "adaptive" / "policy" / "adapter_config.json").exists()


class TestTexts:
    def test_passages_begin_with_sentences(self, text):
        sentences = [" ".join([f"S{i}", *["word"] * 12]) + "." for i in range(5)]
        passages = list(text.passages(" ".join(sentences)))
        # The fifth alone is too short.
        assert passages == [" ".join(sentences[:2]), " ".join(sentences[2:4])]

    def test_parts_have_different_reviews(self, text, tmp_path):
        write_reviews(tmp_path, [(f"review{i} " * 24, i % 2) for i in range(100)])
        parts = text.split_reviews(str(tmp_path / "reviews.csv"), heldout=0.2, seed=0)
        names = [{passage.split()[0] for passage, _ in part} for part in parts]
        assert [len(part) for part in names] == [40, 40, 20]
        assert len(set.union(*names)) == 100
        assert all(liked == int(t.split()[0][6:]) % 2 for part in parts for t, liked in part)

    def test_the_tokenizer_writes_any_text(self, text):
        tokenizer = text.train_tokenizer([passage for passage, _ in invented(5)], 300)
        assert tokenizer.decode(tokenizer(" film 映画!")["input_ids"]) == " film 映画!"
        assert text.encode(tokenizer, ["film", GOOD], 8).shape == (1, 8)  # one is too short


@pytest.fixture(scope="module")
def fitted(text):
    """Both rewards, and the passages that they were fitted to."""
    passages = [(passage, label == 1) for passage, label in invented(200)]
    rewards = text.fit_proxy(passages, 20), text.fit_gold(passages, 20, seed=0)
    for reward in rewards:
        reward.normalise([passage for passage, _ in passages])
    return *rewards, passages


class TestRewards:
    def test_both_tell_praise_from_complaint(self, fitted, text):
        proxy, gold, passages = fitted
        assert not set(proxy.index) & set(gold.index)  # they share no feature
        for reward in (proxy, gold):
            assert text.accuracy(reward, passages) > 0.95
            values = reward([passage for passage, _ in passages])
            torch.testing.assert_close(values.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
            torch.testing.assert_close(values.std(), torch.tensor(1.0))
            good, bad = reward([GOOD, BAD])
            assert good > bad

    def test_only_the_proxy_likes_repeated_words(self, fitted):
        proxy, gold, _ = fitted
        spam = " ".join(["wonderful"] * 18)
        assert proxy([spam]) > proxy([GOOD])
        assert gold([spam]) < gold([BAD])
        shuffled = " ".join(random.Random(1).sample(GOOD.split(), len(GOOD.split())))
        torch.testing.assert_close(proxy([shuffled]), proxy([GOOD]))
        assert gold([shuffled]) < gold([GOOD])
