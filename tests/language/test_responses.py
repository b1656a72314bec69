"""ResponseKLTransform against the logits of models: KL, rewards, references, wrong uses."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close

from tests.gpt_helpers import sharp
from tests.language.chats import (
    COEFF,
    DEPRECATED,
    MODELS,
    MODES,
    QUESTIONS,
    make_dialogs,
    make_model,
    make_tokenizer,
    make_wrapper,
    rows_of,
    sample_chats,
)
from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, KLKeys, PlannedKLController
from torchrl_kl.language import (
    GPT,
    CausalLMActor,
    CausalLMCritic,
    ResponseKLTransform,
    as_steps,
    response_kl,
)

pytestmark = [pytest.mark.usefixtures("lists_are_stacked"), *DEPRECATED]


def expected_kl(model, reference, text, places, temperature=1.0):
    """k1 and the exact KL, nats, of the tokens of one text at `places`, one prefix at a time."""
    k1 = exact = 0.0
    with torch.no_grad():
        for place in places:
            prefix = text[None, :place]
            one, other = (
                (lm(prefix).logits[0, -1].double() / temperature).log_softmax(-1)
                for lm in (model, reference)
            )
            k1 += float(one[text[place]] - other[text[place]])
            exact += float((one.exp() * (one - other)).sum())
    return k1, exact


def expected_of(batch, model, reference, temperature=1.0, *, eos=None):
    """Of each response of a batch, read with TorchRL's own masks and prompts, row by row."""
    fulls, prompts = (rows_of(batch, "tokens", name) for name in ("full", "prompt"))
    masks = rows_of(batch, "masks", "all_assistant_mask")
    attended = rows_of(batch, "masks", "all_attention_mask")
    results = []
    for i, full in enumerate(fulls):
        first = int(attended[i].nonzero()[0])
        if masks is not None:
            places = masks[i].bool().nonzero()[:, 0].tolist()
        else:
            last = int(attended[i].nonzero()[-1])
            cut = last + 1 < len(full) and eos is not None and full[last + 1] == eos
            places = list(range(len(prompts[i]), last + 1 + cut))
        text = full[first:]
        results.append(
            expected_kl(model, reference, text, [p - first for p in places], temperature)
        )
    return torch.tensor(results).T


def make_batch(kind, tokenizer, model, **options):
    """One prompt for all, prompts of several lengths, or dialogs of several turns."""
    if kind == "dialogs":
        return make_dialogs(tokenizer, **options)
    questions = QUESTIONS[:1] * 3 if kind == "single" else QUESTIONS
    return sample_chats(model, tokenizer, "text", questions, **options)


class TestAgainstLogits:
    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("form", ["single", "ragged", "dialogs", "pad_is_eos"])
    @pytest.mark.parametrize("padded", [False, True])
    def test_k1_and_exact_are_those_of_single_tokens(self, kind, form, padded):
        tokenizer = make_tokenizer(pad_is_eos=form == "pad_is_eos")
        model, reference = (make_model(kind, tokenizer, seed) for seed in (0, 1))
        batch = make_batch(form, tokenizer, model, pad_output=padded)
        k1, exact = expected_of(batch, model, reference, eos=tokenizer.eos_token_id)
        transform = ResponseKLTransform(model, COEFF, reference=reference, estimator="exact")
        result = transform(batch)["next"]
        assert_close(result["kl"].flatten(), k1, atol=1e-4, rtol=0)
        assert_close(result["kl_estimate"].flatten(), exact, atol=1e-4, rtol=0)
        assert k1.abs().min() > 0.1

    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("padded", [False, True])
    def test_a_policy_does_not_diverge_from_itself(self, kind, mode, padded):
        tokenizer = make_tokenizer()
        model = make_model(kind, tokenizer)
        batch = sample_chats(model, tokenizer, mode, pad_output=padded)
        for estimator in ("k1", "exact", "top_k"):
            result = ResponseKLTransform(model, COEFF, estimator=estimator)(batch)["next"]
            measured = result["kl" if estimator == "k1" else "kl_estimate"]
            assert measured.abs().max() < 1e-5

    def test_temperature_is_that_of_policy_and_reference(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, generate_kwargs={"temperature": 0.7})
        transform = ResponseKLTransform(model, COEFF, reference=reference, temperature=0.7)
        k1, _ = expected_of(batch, model, reference, 0.7)
        assert_close(transform(batch)["next", "kl"].flatten(), k1, atol=1e-4, rtol=0)

    def test_texts_whose_end_tokens_torchrl_cut_out_of_the_prompt(self):
        tokenizer = make_tokenizer(pad_is_eos=True)
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, "history")
        prompts, fulls, responses = (
            rows_of(batch, "tokens", name) for name in ("prompt", "full", "response")
        )
        assert not fulls[0][: len(prompts[0])].equal(prompts[0])
        result = ResponseKLTransform(model, COEFF, reference=reference)(batch)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            text = torch.cat([prompt, response])
            k1, _ = expected_kl(model, reference, text, range(len(prompt), len(text)))
            assert_close(result["next", "kl"][i].item(), k1, atol=1e-4, rtol=0)
            scored = rows_of(result, "log_probs", "full")[i].isfinite()
            assert scored.sum() == len(response)
            assert scored[len(scored) - len(response) :].all()

    def test_top_k_is_exact_on_k_tokens_and_k1_on_the_others(self, monkeypatch):
        monkeypatch.setattr(response_kl, "_TOP_K", 2)
        model, reference = (sharp(GPT(11, 8), seed).eval() for seed in (0, 1))
        full = torch.randint(11, (6, 8))
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :3]}, batch_size=6)
        batch["next"] = TensorDict(reward=torch.ones(6, 1), batch_size=6)
        transform = ResponseKLTransform(
            model, COEFF, reference=reference, estimator="top_k", temperature=0.7
        )
        with torch.no_grad():
            one, other = (
                (lm(full[:, :-1])[:, 2:] / 0.7).log_softmax(-1) for lm in (model, reference)
            )
        said, expected = full[:, 3:], torch.zeros(6, 1)
        for i in range(6):
            for t in range(5):
                top, token = one[i, t].topk(2).indices.tolist(), int(said[i, t])
                ratio = one[i, t] - other[i, t]
                expected[i] += sum(one[i, t, k].exp() * ratio[k] for k in top)
                expected[i] += 0.0 if token in top else ratio[token]
        assert_close(transform(batch)["next", "kl_estimate"], expected, atol=1e-4, rtol=0)


class TestReward:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
    def test_penalty_is_subtracted_once(self, padded, shape):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, pad_output=padded)
        batch["next", "reward"] = torch.arange(3.0).reshape(shape)
        result = ResponseKLTransform(model, COEFF, reference=reference)(batch)["next"]
        assert result["kl"].shape == result["reward"].shape == shape
        assert_close(result["reward"], result["task_reward"] - COEFF * result["kl"])
        assert result["task_reward"].equal(batch["next", "reward"])
        assert (result["kl_coeff"] == COEFF).all()
        assert "kl" not in batch["next"]
        assert batch.get("log_probs").get("full", None) is None

    def test_rewards_of_half_precision_become_float32(self):
        full = torch.arange(16).reshape(4, 4) % 11
        tokens = TensorDict(full=full, prompt=full[:, :2], batch_size=4)
        transform = ResponseKLTransform(GPT(11, 8), 1e-3, reference=GPT(11, 8), pad_token=0)
        exact, narrow = (
            transform(
                TensorDict(
                    tokens=tokens,
                    log_probs={"full": -torch.ones(4, 4)},
                    next={"reward": torch.ones(4, 1, dtype=dtype)},
                    batch_size=4,
                )
            )["next"]
            for dtype in (torch.float32, torch.bfloat16)
        )
        for name in ("reward", "task_reward", "kl_coeff", "kl", "sampler_kl"):
            assert_close(narrow[name], exact[name], rtol=0, atol=0)
        assert (exact["reward"] != 1).all()
        assert (exact["reward"].bfloat16() == 1).all()  # what would be left of it

    @pytest.mark.parametrize("chunk_size", [None, 1])
    @pytest.mark.parametrize("estimator", ["k1", "exact", "top_k"])
    @pytest.mark.parametrize("size", [(2, 0), (0,), (0, 4), (0, 0), (2, 0, 4), (0, 2, 4)], ids=str)
    def test_batches_without_a_token(self, size, estimator, chunk_size):
        texts, shape = torch.zeros(size, dtype=torch.long), size[:-1]
        tokens = TensorDict(full=texts, prompt=texts, batch_size=shape)
        following = TensorDict(reward=torch.ones(*shape, 1), batch_size=shape)
        batch = TensorDict(tokens=tokens, next=following, batch_size=shape)
        model = GPT(vocab_size=11, block_size=8)
        controller = AdaptiveKLController(0.1, target=1.0, horizon=100)
        options = {"estimator": estimator, "chunk_size": chunk_size, "pad_token": 0}
        transform = ResponseKLTransform(model, controller, **options)
        result = transform(batch)
        assert result["next", "reward"].equal(following["reward"])
        assert result["next", "kl"].equal(torch.zeros(*shape, 1))
        assert result["log_probs", "full"].shape == texts.shape
        assert controller.coeff == 0.1
        steps = as_steps(result, pad_token=0)
        assert steps.shape == (batch.batch_size.numel(), 1)
        assert not steps["collector", "mask"].any()


class TestReference:
    def test_policy_learns_and_reference_stays(self):
        tokenizer = make_tokenizer()
        model = make_model("qwen2", tokenizer)
        batch = sample_chats(model, tokenizer)
        transform = ResponseKLTransform(model, COEFF)
        before = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        k1, _ = expected_of(batch, model, before)
        assert_close(transform(batch)["next", "kl"].flatten(), k1, atol=1e-4, rtol=0)
        transform.update_reference(model)
        assert transform(batch)["next", "kl"].abs().max() < 1e-5

    def test_policy_is_scored_in_eval_mode_and_left_as_it_was(self):
        tokenizer = make_tokenizer()
        model = make_model("gpt2", tokenizer)
        model.train()  # GPT-2 has dropout
        batch = sample_chats(model, tokenizer)
        transform = ResponseKLTransform(model, COEFF)
        assert transform(batch)["next", "kl"].abs().max() < 1e-5
        assert model.training
        assert not any(p.grad is not None for p in model.parameters())
        names = set(dict(transform.named_parameters()))
        assert all(name.startswith("scorer.reference.") for name in names)

    def test_responses_to_equal_prompts_are_a_group_of_a_plan(self, monkeypatch):
        full = torch.tensor([[1, 2, 3, 4], [5, 2, 6, 7], [1, 2, 8, 9], [1, 2, 0, 0]])
        rewards = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        tokens = TensorDict(full=full, prompt=full[:, :2], batch_size=4)
        batch = TensorDict(tokens=tokens, next={"reward": rewards}, batch_size=4)
        transform = ResponseKLTransform(
            GPT(11, 8), PlannedKLController(0.5), reference=GPT(11, 8), pad_token=0
        )
        given = {}
        monkeypatch.setattr(
            transform.penalty.feed,
            "plan_from",
            lambda _, rewards, **rest: given.update(rest, r=rewards),
        )
        result = transform(batch)["next"]
        assert given["r"].tolist() == [1.0, 2.0, 3.0]  # the last response is empty
        assert given["groups"].tolist() == [0.0, 1.0, 0.0]
        assert given["lengths"].tolist() == [2, 2, 2]
        assert_close(given["log_ratios"], result["kl"][:3, 0])


class TestErrors:
    def make_batch(self, **next_entries):
        tokens = TensorDict(full=torch.tensor([[5, 6, 7, 8]]), prompt=torch.tensor([[5, 6]]))
        following = TensorDict(reward=torch.ones(1, 1), batch_size=1).update(next_entries)
        return TensorDict(tokens=tokens, next=following, batch_size=1)

    def make_transform(self, **options):
        return ResponseKLTransform(GPT(vocab_size=11, block_size=8), 0.1, **options)

    def test_wrappers_are_refused_where_models_are_due(self):
        tokenizer = make_tokenizer()
        wrapper = make_wrapper(make_model("llama", tokenizer), tokenizer)
        for build in (partial(ResponseKLTransform, controller=0.1), CausalLMActor, CausalLMCritic):
            with pytest.raises(TypeError, match=r"Wrapper: pass the model in it, such as `wrapper"):
                build(wrapper)
        text = r"step by step, got .* whole responses, use ResponseKLTransform\(wrapper"
        with pytest.raises(TypeError, match=text):
            KLConstrainedTransform(wrapper, 0.1)

    @pytest.mark.parametrize("name", ["my_task_reward", "my_kl_coeff"])
    def test_entries_of_an_env_take_no_log_probs_away(self, name):
        batch = self.make_batch(**{name: torch.ones(1, 1)})
        batch["log_probs", "full"] = torch.full((1, 4), -2.0)
        for scored in (
            self.make_transform()(batch),
            self.make_transform(keys=KLKeys.named("a"))(batch),
        ):
            assert scored["sampler_log_probs", "full"][0, 2:].tolist() == [-2.0, -2.0]
            own = scored["log_probs", "full"][0, 2:]
            assert_close(scored["next", "sampler_kl"], (-2.0 - own).sum().reshape(1, 1))

    def test_log_probs_of_another_transform_are_not_those_of_a_sampler(self):
        batch = self.make_batch()
        for name in ("first", "second"):
            batch = self.make_transform(keys=KLKeys.named(name))(batch)
        assert "sampler_kl" not in batch["next"].keys()
        assert "sampler_log_probs" not in batch.keys()

    def test_a_second_penalty_is_refused(self):
        transform = self.make_transform()
        with pytest.raises(RuntimeError, match="a second penalty would count it twice"):
            transform(transform(self.make_batch()))

    @pytest.mark.parametrize("plans", [False, True])
    def test_advantages_without_the_penalty_are_refused(self, plans):
        model, batch = GPT(vocab_size=11, block_size=8), self.make_batch()
        batch["advantage"] = torch.ones(1, 1)
        controller = PlannedKLController(0.5) if plans else 0.1
        with pytest.raises(RuntimeError, match="has 'advantage' already, computed from rewards"):
            ResponseKLTransform(model, controller)(batch)
        assert ResponseKLTransform(model, 0.0)(batch)["next", "kl"] == 0  # which only measures

    def test_rewards_of_tokens_are_refused(self):
        for reward in (torch.ones(1, 4, 1), torch.nested.nested_tensor([torch.ones(2)])):
            batch = self.make_batch(reward=reward)
            with pytest.raises(ValueError, match=r"must be one number per response, of shape \(1"):
                self.make_transform()(batch)
            with pytest.raises(ValueError, match="sum a reward of each token"):
                as_steps(batch, pad_token=0)

    def test_missing_entries(self):
        batch = self.make_batch()
        with pytest.raises(KeyError, match="a response has one; set it before this transform"):
            self.make_transform()(batch.exclude(("next", "reward")))
        for key in (("tokens", "full"), ("tokens", "prompt"), "tokens"):
            with pytest.raises(KeyError, match="in a mode that returns tokens"):
                as_steps(batch.exclude(key), pad_token=0)
        with pytest.raises(KeyError, match='the batch has no "next"'):
            self.make_transform()(batch.exclude("next"))

    def test_prompts_that_do_not_begin_the_text(self):
        batch = self.make_batch()
        batch["tokens", "prompt"] = torch.tensor([[6, 5]])
        with pytest.raises(ValueError, match=r"must begin with .* but that of element 0 \(of 4"):
            as_steps(batch, pad_token=0)
        batch["tokens", "response"] = torch.tensor([[9, 9]])
        with pytest.raises(ValueError, match="pad prompts on the left, or leave them unpadded"):
            as_steps(batch, pad_token=0)

    @pytest.mark.parametrize("value", [0, True])
    def test_counts(self, value):
        with pytest.raises(ValueError, match="`chunk_size` must be an int of at least 1, got"):
            self.make_transform(chunk_size=value)

    def test_copies_in_other_processes_are_refused(self):
        with pytest.raises(pickle.PicklingError, match="cannot be sent to another process"):
            pickle.dumps(self.make_transform())


class Table(nn.Module):
    """Logits of a next token among three, by the tokens of a response so far: none, or one."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)  # (3,), (3, 3)

    def forward(self, tokens):
        after = self.second[tokens]
        after[:, 0] = self.first
        return after


def test_two_references_have_the_optimum_of_their_product():
    """prod ref_i^(c_i / c) exp(R / c): there, all responses have the same penalized reward."""
    coeffs, reward = (0.3, 0.5), torch.randn(3, 3)
    references = [Table(torch.randn(3), torch.randn(3, 3)) for _ in coeffs]
    total = reward / sum(coeffs)
    for coeff, each in zip(coeffs, references, strict=True):
        log_prob = each.first.log_softmax(-1)[:, None] + each.second.log_softmax(-1)
        total = total + log_prob.detach() * coeff / sum(coeffs)
    policy = Table(total.logsumexp(1), total)
    responses = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    tokens = {"full": torch.cat([torch.zeros(9, 1).long(), responses], 1)}
    tokens |= {"prompt": tokens["full"][:, :1]}
    batch = TensorDict(tokens=tokens, next={"reward": reward.view(9, 1)}, batch_size=9)
    for name, coeff, reference in zip(("first", "second"), coeffs, references, strict=True):
        keys = KLKeys.named(name)
        batch = ResponseKLTransform(policy, coeff, reference=reference, keys=keys)(batch)
    constant = sum(coeffs) * total.flatten().logsumexp(0)
    assert_close(batch["next", "reward"], constant.expand(9, 1))
    written: Any = batch["next"]
    names = {"first_kl", "second_kl", "first_ref_log_probs", "second_kl_coeff"}
    assert names <= set(written.keys())
