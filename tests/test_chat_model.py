"""The example on a chat model: its rewards and advantages, and small runs of a tiny model."""

import json

import pytest
import torch
from tensordict import TensorDict

from tests.scripts import load, run_here
from torchrl_kl import KLConstrainedTransform
from torchrl_kl.language import CausalLMActor

for needed in ("transformers", "tokenizers", "peft", "vaderSentiment", "afinn"):
    pytest.importorskip(needed)

PATH = "examples/chat_model.py"
# 2026-11: peft 0.21.2 asks transformers 5.23 for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def script():
    return load(PATH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with random weights, whose answers have no words."""
    from tests.language.chats import make_model, make_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("tiny"), make_tokenizer()
    make_model("llama", tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def task(script, folder):
    return script.Task(script.Args(model=str(folder), requests=4, group=3, tokens=6))


@pytest.mark.slow
def test_figures_curves_and_answers(tmp_path, folder, script, monkeypatch):
    def letters(texts):
        return torch.tensor([float(len({*text})) for text in texts])

    # What a tiny model writes has no words of VADER's, and the rewards would be equal.
    monkeypatch.setattr(script.chat, "Proxy", lambda: letters)
    printed = run_here(PATH, tmp_path, f"--quick --model {folder} --seeds 2 --out out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["before"]["kl"] == pytest.approx(0, abs=1e-5)
    assert list(report["runs"]) == ["no_kl", "constant", "planned", "in_loss"]
    for name, seeds in report["runs"].items():
        assert len(seeds) == 2
        for seed, result in enumerate(seeds):
            assert {len(curve) for curve in result["curves"].values()} == {2}
            assert len(result["answers"]) == len(report["before"]["answers"]) == 3
            assert (tmp_path / "out" / f"{name}_{seed}" / "adapter_config.json").exists()
            coeffs = result["curves"]["coeff"]
            assert coeffs[0] == pytest.approx({"no_kl": 0, "constant": 0.02}.get(name, coeffs[0]))
            assert (min(coeffs) > 0) == (name != "no_kl")
        assert f"| {script.RUNS[name][0]} | " in printed
        assert printed.count(f"\n  {script.RUNS[name][0]}: ") == 3
    assert (tmp_path / "out" / "chat_model.png").read_bytes().startswith(b"\x89PNG")


class TestTask:
    def test_all_requests_come_before_one_comes_again(self, task):
        size, drawn = len(task.requests), []
        for step in range(2 * size // 4):
            batch = task.draw(step)
            assert all(a is b for a, b in zip(batch[::3], batch[1::3], strict=True))
            drawn += [id(prompt) for prompt in batch[::3]]
        assert sorted(drawn[:size]) == sorted(drawn[size:]) == sorted(map(id, task.requests))

    def test_relevance_is_what_the_request_adds_to_the_log_likelihood(self, task, folder, script):
        model = script.chat.load_model(str(folder))
        actor = CausalLMActor(model, temperature=0.7)
        stack = KLConstrainedTransform(actor, 0.0, estimator="exact")
        torch.manual_seed(0)
        batch = stack(task.sample(actor, task.draw(0)))
        lengths = batch["collector", "mask"].sum(1)
        assert 1 <= lengths.min() < lengths.max()
        found = task.judge(batch, stack)[:, 1]
        for row, prompt in enumerate(task.draw(0)):
            answer, likelihoods = batch["action"][row, : lengths[row]], []
            for before in (prompt, torch.tensor(task.header)):
                with torch.no_grad():
                    logits = model(torch.cat([before, answer])[None]).logits[0] / 0.7
                log_probs = logits.log_softmax(-1)[len(before) - 1 : -1]
                likelihoods.append(log_probs[range(len(answer)), answer].mean())
            expected = likelihoods[0] - likelihoods[1]
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0)


class TestRewards:
    def test_the_gold_reward_counts_a_few_kind_words_only(self, script):
        proxy, gold = script.chat.Proxy(), script.chat.Gold()
        texts = ["A good answer.", "Great help!", "Great help! Wonderful, great, superb, lovely!"]
        scores, parts = proxy(texts), gold.parts(texts, torch.tensor([1.0, 2.0, -1.0]))
        assert scores[0] < scores[1] < scores[2]
        assert parts.tolist() == [[3.0, 1.0], [4.0, 2.0], [4.0, -1.0]]
        gold.normalise(parts)
        torch.testing.assert_close(gold(parts).mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        assert gold(parts).argmax() == 1

    def test_distinct_pairs_are_those_of_tokens_that_count(self, script):
        ids, counts = torch.tensor([[1, 2, 1, 2], [1, 2, 0, 0]]), torch.ones(2, 4).bool()
        counts[1, 2:] = False
        assert script.chat.distinct_2(ids, counts) == 2 / 4  # 12 21 12, 12


class TestAdvantages:
    def advantages(self, script, rewards, penalties):
        paid = torch.zeros_like(penalties)
        paid[:, -1] = rewards
        step = {"task_reward": paid.unsqueeze(-1), "reward": (paid - penalties).unsqueeze(-1)}
        batch = TensorDict({"next": step}, batch_size=penalties.shape)
        return script.advantages(batch, 2).squeeze(-1)

    def test_without_a_penalty_they_are_rewards_less_those_of_the_group(self, script):
        found = self.advantages(script, torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.zeros(4, 3))
        assert found.tolist() == [[-1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]

    def test_of_penalties_only_those_to_come_count(self, script):
        penalties = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        found = self.advantages(script, torch.zeros(6), penalties)
        for row in range(6):
            other = row + 1 if row % 2 == 0 else row - 1
            for t in range(4):
                expected = (penalties[other, t:].sum() - penalties[row, t:].sum()) / 2
                torch.testing.assert_close(found[row, t], expected, atol=1e-6, rtol=0)
