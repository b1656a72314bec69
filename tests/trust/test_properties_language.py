"""Properties of the language room: the cache, sampled responses, batches of TorchRL's LLM API."""

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tensordict import TensorDict, lazy_stack

from tests.language.models import LENGTH, VOCAB, check_step, make_actor, random_texts, true_logits
from tests.trust.cases import Machine, cases, run
from torchrl_kl.language import as_steps, sample_responses

seeds = st.integers(0, 2**20)
kinds = st.sampled_from(["gpt", "gpt", "gpt2", "llama"])


class Cached(Machine):
    """Steps, resets, rollbacks, other batches and other weights in any order.

    After each of them, the log-probs are those of the bare model, which reads each text anew.
    """

    @initialize(kind=kinds, n=st.integers(1, 4), seed=seeds)
    def make(self, kind: str, n: int, seed: int) -> None:
        self.actor = make_actor(kind, seed % 4)
        self.texts = random_texts(n, seed=seed)
        self.position = torch.full((n,), 4)

    @property
    def parameters(self) -> list[Any]:
        return list(self.actor.reader.lm.model.parameters())

    @rule(which=st.integers(0, 15), how=st.integers(1, 3))
    def go_on(self, which: int, how: int) -> None:
        """Some rows, or all, read one token more, or several."""
        rows = torch.tensor([bool(which >> i & 1) for i in range(len(self.texts))])
        rows = torch.ones_like(rows) if which == 0 else rows
        self.position = torch.where(rows, self.position + how, self.position).clamp(max=LENGTH)

    @rule(row=st.integers(0, 3), position=st.integers(0, LENGTH), seed=seeds)
    def reset_a_row(self, row: int, position: int, seed: int) -> None:
        row %= len(self.texts)
        self.texts = self.texts.clone()
        self.texts[row] = random_texts(1, seed=seed)[0]
        self.position[row] = position

    @rule(back=st.integers(1, 6))
    def roll_back(self, back: int) -> None:
        self.position = (self.position - back).clamp(min=1)

    @rule(row=st.integers(0, 3), place=st.integers(0, LENGTH - 1), token=st.integers(0, VOCAB - 1))
    def another_token(self, row: int, place: int, token: int) -> None:
        """A token that was read, is read now, or is padding; in place, as buffers are written."""
        self.texts[row % len(self.texts), place] = token

    @rule(order=st.permutations(range(4)))
    def reorder(self, order: list[int]) -> None:
        rows = [row for row in order if row < len(self.texts)]
        self.texts, self.position = self.texts[rows], self.position[rows]

    @rule(n=st.integers(1, 5), seed=seeds)
    def another_batch(self, n: int, seed: int) -> None:
        self.texts = random_texts(n, seed=seed)
        self.position = 1 + seed % 7 + torch.arange(n)

    @rule(
        which=st.integers(0, 99),
        how=st.sampled_from(["data", "in place", "assign", "load", "replace", "optimizer"]),
    )
    def other_weights(self, which: int, how: str) -> None:
        model = self.actor.reader.lm.model
        parameter = self.parameters[which % len(self.parameters)]
        if how == "data":
            parameter.data += 0.05
        elif how == "in place":
            with torch.no_grad():
                parameter.mul_(1.05)
        elif how in ("assign", "load"):
            weights = {name: 1.05 * value for name, value in model.state_dict().items()}
            model.load_state_dict(weights, assign=how == "assign")
        elif how == "replace":
            name = next(n for n, p in model.named_parameters() if p is parameter)
            holder = model.get_submodule(name.rpartition(".")[0])
            setattr(holder, name.rpartition(".")[2], torch.nn.Parameter(1.05 * parameter.detach()))
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            state = TensorDict(tokens=self.texts, position=self.position.clamp(min=1))
            self.actor.get_dist(state.auto_batch_size_()).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    @rule(
        how=st.sampled_from(["deepcopy", "pickle", "train", "double", "clear", "grad", "refused"])
    )
    def carry(self, how: str) -> None:
        if how == "deepcopy":
            self.actor = copy.deepcopy(self.actor)
        elif how == "pickle":
            self.actor = pickle.loads(pickle.dumps(self.actor))
        elif how == "train":  # without dropout, which the models do not have
            self.actor.train(not self.actor.training)
        elif how == "double":
            self.actor.double().float()
        elif how == "clear":
            self.actor.clear_cache()
        elif how == "grad":
            state = TensorDict(tokens=self.texts, position=self.position.clamp(min=1))
            self.actor.get_dist(state.auto_batch_size_())
        else:
            with torch.no_grad():
                state = TensorDict(tokens=self.texts, position=self.position + 2 * LENGTH)
                with pytest.raises(ValueError, match="`position` must lie in"):
                    self.actor.get_dist(state.auto_batch_size_())

    @invariant()
    def log_probs_are_those_of_the_bare_model(self) -> None:
        if hasattr(self, "actor"):
            check_step(self.actor, self.texts, self.position)


def test_a_cache_in_any_order():
    run(Cached, 50, steps=12)


def prefix_log_prob(model: Any, text: list[int], n: int, temperature: float) -> float:
    """The log-prob of token n of a text, by the bare model on the tokens before it."""
    logits = true_logits(model, torch.tensor([text]), [n]).double()[0] / temperature
    return logits.log_softmax(-1)[text[n]].item()


@cases(
    60,
    seed=seeds,
    kind=st.sampled_from(["gpt", "gpt", "gpt2"]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    n_new=st.integers(1, 6),
    eos=st.sampled_from([None, 3]),
    pad=st.sampled_from([3, 7]),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    chunk_size=st.integers(1, 4),
)
def test_sampled_responses(seed, kind, lengths, n_new, eos, pad, temperature, chunk_size):
    rng = random.Random(seed)
    actor = make_actor(kind, seed % 4, temperature=temperature)
    model = actor.reader.lm.model
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]

    def reward(texts: torch.Tensor) -> torch.Tensor:
        return texts.double().sum(1) + 0.5

    batch = sample_responses(
        actor,
        [torch.tensor(p) for p in prompts],
        n_new,
        pad_token=pad,
        eos_token=eos,
        reward_fn=reward,
        generator=torch.Generator().manual_seed(seed),
        chunk_size=chunk_size,
    )
    assert batch.shape == (len(prompts), n_new)
    assert batch.names == [None, "time"]
    texts = batch["tokens"][:, 0].tolist()
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert text[: len(prompt)] == prompt
        assert len(text) == max(lengths) + n_new
        said = text[len(prompt) : len(prompt) + n_new]
        n_said = said.index(eos) + 1 if eos in said else n_new
        end = len(prompt) + n_said
        assert set(text[end:]) <= {pad}
        for t in range(n_new):
            step: Any = batch[i, t]
            counts, last = t < n_said, t == n_said - 1
            assert step["tokens"].tolist() == text
            assert step["position"].item() == len(prompt) + t
            assert step["next", "position"].item() == len(prompt) + t + 1
            assert step["action"].item() == text[len(prompt) + t]
            assert step["collector", "mask"].item() == counts
            assert step["next", "done"].item() == last
            assert step["next", "terminated"].item() == (last and (eos is None or eos in said))
            assert step["next", "truncated"].item() == (
                last and eos is not None and eos not in said
            )
            assert step["next", "reward"].item() == (sum(text) + 0.5 if last else 0.0)
            expected = prefix_log_prob(model, text, len(prompt) + t, temperature) if counts else 0.0
            # Logits to 2e-5 nats, as for the cache, divided by the temperature.
            assert abs(step["action_log_prob"].item() - expected) <= 4e-5 / min(temperature, 1.0)


@st.composite
def dialogs(draw: Any) -> tuple[dict[str, Any], TensorDict, list[dict[str, Any]]]:
    """A batch as TorchRL's LLM API makes it, and the texts in it as lists."""
    rng = random.Random(draw(seeds))
    n = draw(st.integers(1, 4))
    layout = draw(st.sampled_from(["left", "right", "lazy", "masks"]))
    pad, eos = draw(st.sampled_from([(0, 1), (0, None), (1, 1)]))
    turns = draw(st.booleans()) and layout in ("lazy", "masks")
    rows = []
    for _ in range(n):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 4))]
        said = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 5))]
        # Where the pad token is the end token, what is padded has ended.
        if eos is not None and (pad == eos or rng.random() < 0.6):
            said[-1] = eos
        counted = [False] * len(prompt) + [True] * len(said)
        if turns and rng.random() < 0.6:
            user = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 3))]
            again = [rng.randrange(2, VOCAB) for _ in range(rng.randint(0, 2))] + said[-1:]
            said = said + user + again
            counted += [False] * len(user) + [True] * len(again)
        log_probs = [-rng.random() for _ in counted]
        reward = rng.randint(-20, 20) / 4
        rows.append(
            {
                "prompt": prompt,
                "text": prompt + said,
                "counted": counted,
                "log_probs": log_probs,
                "reward": reward,
            }
        )
    made = {"pad_token": pad, "eos_token": eos}
    recorded = draw(st.booleans())
    return (
        made,
        make_llm_batch(rows, layout, pad, turns, recorded),
        [{**row, "recorded": recorded} for row in rows],
    )


def make_llm_batch(
    rows: list[dict[str, Any]], layout: str, pad: int, turns: bool, recorded: bool
) -> TensorDict:
    """Unpadded rows, or prompts padded on the left ("left") or at the common width ("right")."""
    n_prompt = max(len(row["prompt"]) for row in rows)
    n_said = max(len(row["text"]) - len(row["prompt"]) for row in rows)
    parts = []
    for row in rows:
        prompt, said = row["prompt"], row["text"][len(row["prompt"]) :]
        before, after = n_prompt - len(prompt), n_said - len(said)
        if layout == "right":  # responses begin anywhere, and all padding is at the end
            before, after = 0, before + after
        if layout == "lazy":
            before = after = 0
        widths = before, after

        def padded(values: list[Any], fill: Any, widths: tuple[int, int] = widths) -> torch.Tensor:
            return torch.tensor([fill] * widths[0] + values + [fill] * widths[1])

        part = TensorDict(next=TensorDict(reward=torch.tensor([row["reward"]])))
        part["tokens", "full"] = padded(row["text"], pad)
        attended = padded([True] * len(row["text"]), False)
        if layout != "lazy":
            part["masks", "all_attention_mask"] = attended
        if turns:
            part["masks", "all_assistant_mask"] = padded(row["counted"], False)
        if not turns or layout == "lazy":
            part["tokens", "prompt"] = torch.tensor([pad] * before + prompt)
        if recorded:
            part["log_probs", "full"] = padded(row["log_probs"], 0.0)
        parts.append(part)
    return lazy_stack(parts)


@cases(160, drawn=dialogs())
def test_dialogs_as_steps(drawn):
    made, batch, rows = drawn
    steps = as_steps(batch, **made)
    longest = max(sum(row["counted"]) for row in rows)
    assert steps.shape == (len(rows), longest)
    for i, row in enumerate(rows):
        text, places = row["text"], [j for j, c in enumerate(row["counted"]) if c]
        assert steps["tokens"][i, 0, : len(text)].tolist() == text
        for t in range(longest):
            step: Any = steps[i, t]
            counts, last = t < len(places), t == len(places) - 1
            assert step["collector", "mask"].item() == counts
            assert step["next", "done"].item() == last
            assert step["next", "reward"].item() == (row["reward"] if last else 0.0)
            if not counts:
                continue
            j = places[t]
            eos = made["eos_token"]
            assert step["position"].item() == j
            assert step["action"].item() == text[j]
            assert step["next", "position"].item() == (j + 1 if last else places[t + 1])
            assert step["next", "truncated"].item() == (last and eos is not None and text[j] != eos)
            assert step["next", "terminated"].item() == (last and (eos is None or text[j] == eos))
            if row["recorded"]:
                found = step["action_log_prob"].item()
                assert found == torch.tensor(row["log_probs"][j]).item()
