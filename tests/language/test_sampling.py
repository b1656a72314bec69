"""sample_responses: the layout, the numbers, and who takes its batches."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.gpt_helpers import sharp
from tests.language.models import (
    KINDS,
    LENGTH,
    VOCAB,
    Passes,
    make_actor,
    make_critic,
    make_model,
    random_texts,
    true_logits,
)
from torchrl_kl import ConstantKLController, KLConstrainedTransform, KLMonitor, KLPenaltyLoss
from torchrl_kl.language import GPT, CausalLMActor, sample_responses
from torchrl_kl.language.distribution import NextToken, draw

PAD, EOS, T = 0, 3, 8
every_kind = pytest.mark.parametrize("kind", KINDS)


def equal(n: int = 6) -> torch.Tensor:
    return random_texts(n)[:, :4]


def ragged(n: int = 6) -> list[torch.Tensor]:
    return [row[: 1 + i % 5] for i, row in enumerate(random_texts(n))]


def sample(actor: Any, prompts: Any = None, **kwargs) -> Any:
    kwargs = {"pad_token": PAD, "eos_token": EOS, "generator": seeded(), **kwargs}
    return sample_responses(actor, equal() if prompts is None else prompts, T, **kwargs)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_layout(batch: Any, prompts: Any, pad: int, eos: int | None, rewards: Any) -> None:
    """All keys, as a loop over texts and steps says that they must be."""
    length = max(map(len, prompts)) + T
    assert batch.shape == (len(prompts), T)
    assert batch.names == [None, "time"]
    expected = {"tokens", "position", "action", "action_log_prob", ("collector", "mask")}
    after = {"tokens", "position", "reward", "done", "terminated", "truncated"}
    assert set(batch.keys(True, True)) == expected | {("next", key) for key in after}
    assert batch["tokens"].shape == (*batch.shape, length)
    for row, prompt in enumerate(prompts):
        actions = batch["action"][row].tolist()
        n = actions.index(eos) + 1 if eos in actions[:T] else T
        text = [*prompt.tolist(), *actions[:n]]
        text += [pad] * (length - len(text))
        for t in range(T):
            step: Any = batch[row, t]
            assert step["tokens"].tolist() == step["next", "tokens"].tolist() == text
            assert step["position"] == len(prompt) + t
            assert step["next", "position"] == len(prompt) + t + 1
            assert step["collector", "mask"] == (t < n)
            if t >= n:
                assert step["action"] == pad
                assert step["action_log_prob"] == 0
            last = t == n - 1
            ended = eos is None or actions[n - 1] == eos
            assert step["next", "done"].tolist() == [last]
            assert step["next", "terminated"].tolist() == [last and ended]
            assert step["next", "truncated"].tolist() == [last and not ended]
            assert step["next", "reward"].tolist() == [float(rewards[row]) if last else 0.0]


class TestLayout:
    @pytest.mark.parametrize("prompts", [equal(20), ragged(20)], ids=["equal", "ragged"])
    @pytest.mark.parametrize(
        ("pad", "eos"), [(PAD, EOS), (EOS, EOS), (PAD, None)], ids=["eos", "pad is eos", "no eos"]
    )
    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_every_key(self, kind, pad, eos, prompts):
        rewards = torch.arange(1.0, 21.0)
        seen = []

        def reward_fn(texts):
            seen.append(texts)
            return rewards

        batch = sample(make_actor(kind), prompts, pad_token=pad, eos_token=eos, reward_fn=reward_fn)
        check_layout(batch, prompts, pad, eos, rewards)
        mask = batch["collector", "mask"]
        assert mask.all() == (eos is None)
        assert mask[:, -1].any()
        assert len(seen) == 1
        assert_close(seen[0], batch["tokens"][:, 0])

    def test_types_and_memory(self):
        batch = sample(make_actor("gpt"))
        assert {batch[key].dtype for key in ("tokens", "position", "action")} == {torch.int64}
        assert batch["action_log_prob"].dtype == torch.float32
        assert batch["next", "reward"].dtype == torch.float32
        for key in ("done", "terminated", "truncated"):
            assert batch["next", key].dtype == torch.bool
        assert batch["tokens"].stride(1) == batch["next", "tokens"].stride(1) == 0
        assert batch["tokens"].data_ptr() == batch["next", "tokens"].data_ptr()
        assert not any(value.is_inference() for value in batch.values(True, True))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_log_probs_have_the_dtype_that_a_step_has(self, dtype):
        actor = make_actor("llama").to(dtype)
        batch = sample(actor, eos_token=None)
        with set_recurrent_mode(True):
            scored = actor.log_prob(batch.select("tokens", "position", "action"))
        assert batch["action_log_prob"].dtype == scored.dtype
        bound = 1e-12 if dtype == torch.float64 else 0.5
        assert_close(batch["action_log_prob"], scored, atol=bound, rtol=0.0)

    def test_names_of_keys(self):
        actor = make_actor(
            "gpt", in_keys=[("obs", "text"), ("obs", "at")], action_key=("agent", "token")
        )
        batch, plain = sample(actor), sample(make_actor("gpt"))
        assert_close(batch["obs", "text"], plain["tokens"])
        assert_close(batch["next", "obs", "text"], plain["next", "tokens"])
        assert_close(batch["next", "obs", "at"], plain["next", "position"])
        assert_close(batch["agent", "token"], plain["action"])
        assert_close(batch["agent", "token_log_prob"], plain["action_log_prob"])
        assert KLConstrainedTransform(actor, 0.1)(batch)["next", "agent", "kl"].shape == (6, T, 1)

    @pytest.mark.parametrize("reward", [-math.inf, math.inf])
    def test_an_infinite_reward_stays_at_its_token(self, reward):
        batch = sample(make_actor("gpt"), reward_fn=lambda x: torch.full((len(x),), reward))
        done = batch["next", "done"]
        assert (batch["next", "reward"][done] == reward).all()
        assert (batch["next", "reward"][~done] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.float16])
    def test_rewards_of_any_dtype(self, dtype):
        batch = sample(make_actor("gpt"), reward_fn=lambda x: torch.ones(len(x), dtype=dtype))
        assert batch["next", "reward"].sum() == 6
        assert batch["next", "reward"].dtype == torch.promote_types(dtype, torch.float32)

    def test_prompts_of_int32_and_a_single_one(self):
        actor = make_actor("llama")
        for given in (equal().int(), list(equal().int()), list(equal())):
            assert_close(sample(actor, given)["tokens"], sample(actor)["tokens"])
        assert sample(actor, equal(1)).shape == (1, T)

    def test_texts_that_fill_the_model(self):
        """The last token is never read."""
        prompts = random_texts(3)[:, : LENGTH - T + 1]
        check_layout(sample(make_actor("gpt"), prompts), prompts, PAD, EOS, torch.zeros(3))


class TestNumbers:
    @every_kind
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    @pytest.mark.parametrize("prompts", [equal(), ragged()], ids=["equal", "ragged"])
    def test_log_probs_are_those_of_the_bare_model(self, kind, prompts, temperature):
        actor = make_actor(kind, temperature=temperature)
        batch = sample(actor, prompts)
        mask = batch["collector", "mask"]
        logits = true_logits(
            actor.reader.lm.model, batch["tokens"], batch["position"].clamp(max=LENGTH)
        )
        log_probs = (logits / temperature).log_softmax(-1)
        expected = log_probs.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        assert_close(batch["action_log_prob"], expected * mask, atol=2e-5, rtol=0.0)
        with set_recurrent_mode(True):
            scored = actor.log_prob(batch.select("tokens", "position", "action"))
        assert_close(batch["action_log_prob"], scored * mask, atol=2e-5, rtol=0.0)

    @pytest.mark.parametrize("off", ["cache_bytes", "train", "checkpointing"])
    def test_without_a_cache_the_texts_are_the_same(self, off):
        expected = sample(make_actor("llama"), ragged())
        actor = make_actor("llama", **({"cache_bytes": 0} if off == "cache_bytes" else {}))
        if off == "checkpointing":
            actor.reader.lm.model.activation_checkpointing_enable()
        if off != "cache_bytes":
            actor.train()
        batch = sample(actor, ragged())
        assert_close(batch["tokens"], expected["tokens"])
        assert_close(batch["action_log_prob"], expected["action_log_prob"], atol=2e-5, rtol=0.0)

    @every_kind
    def test_one_position_per_token(self, kind):
        actor = make_actor(kind)
        passes = Passes(actor)
        sample(actor, eos_token=None)
        assert passes.take()[-T:] == [(6, 4)] + [(6, 1)] * (T - 1)
        sample(actor, eos_token=None, chunk_size=4)
        assert passes.take() == [(4, 4)] + [(4, 1)] * (T - 1) + [(2, 4)] + [(2, 1)] * (T - 1)

    def test_it_stops_when_all_have_ended(self):
        actor = make_actor("gpt")
        with torch.no_grad():
            actor.reader.lm.model.head.weight.zero_()
            bias = torch.full((VOCAB,), -100.0).index_fill(0, torch.tensor(EOS), 100.0)
        actor.reader.lm.model.head.bias = torch.nn.Parameter(bias)
        passes = Passes(actor)
        batch = sample(actor)
        assert passes.take()[-1] == (6, 4)
        assert (batch["collector", "mask"].sum(1) == 1).all()
        assert batch["next", "terminated"][:, 0].all()

    def test_the_generator_decides(self):
        actor = make_actor("llama")
        first = sample(actor)["tokens"]
        torch.rand(5)
        assert torch.equal(first, sample(actor)["tokens"])
        assert not torch.equal(first, sample(actor, generator=seeded(1))["tokens"])
        torch.manual_seed(3)
        default = sample(actor, generator=None)["tokens"]
        torch.manual_seed(3)
        assert torch.equal(default, sample(actor, generator=None)["tokens"])

    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_frequencies_of_two_tokens(self, kind):
        """Against the product of exact probabilities; 121 pairs, at most 5 standard errors."""
        actor, n = make_actor(kind), 20_000
        prompt = random_texts(1)[:, :3]
        batch = sample_responses(
            actor, prompt.expand(n, -1), 2, pad_token=PAD, generator=seeded(2), chunk_size=n
        )
        with torch.no_grad():
            model = actor.reader.lm.model
            texts = torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
            first = true_logits(model, prompt, [3]).softmax(-1)[0]
            second = true_logits(model, texts, [4] * VOCAB).softmax(-1)
        exact = (first[:, None] * second).flatten()
        pairs = batch["action"][:, 0] * VOCAB + batch["action"][:, 1]
        frequency = torch.bincount(pairs, minlength=VOCAB**2) / n
        error = (exact * (1 - exact) / n).sqrt()
        assert ((frequency - exact).abs() < 5 * error + 2 / n).all()


def uniforms(monkeypatch, values: torch.Tensor) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: values[:, None].clone())


class TestDraw:
    def test_a_token_for_each_part_of_the_unit_interval(self, monkeypatch):
        """Rare tokens have their share too: 1e-6 and 1e-12, where float32 has no room."""
        shares = [0.0, 0.5, 1e-6, 0.3, 1e-12, 0.0, 0.2 - 1e-6 - 1e-12, 0.0]
        probs = torch.tensor(shares, dtype=torch.float64)
        edges = probs.cumsum(0).tolist()
        parts = [(edges[i - 1], edges[i], i) for i in range(len(probs)) if probs[i] > 0]
        values, expected = [], []
        for low, high, token in parts:
            inside = (high - low) * 1e-3
            values += [low + inside, (low + high) / 2, high - inside]
            expected += [token] * 3
        values += [0.0, 1 - 2**-53]
        expected += [1, 6]
        u = torch.tensor(values, dtype=torch.float64)
        uniforms(monkeypatch, u)
        log_probs = probs.log().expand(len(u), -1)
        assert draw(log_probs)[:, 0].tolist() == expected

    def test_shares_of_float32_log_probs(self, monkeypatch):
        """The share of each token, by bisection on the uniform number, is its probability."""
        log_probs = (5 * torch.randn(1, 50)).log_softmax(-1)
        exact = log_probs.double().exp()
        exact = (exact / exact.sum()).cumsum(-1)[0, :-1]
        low, high = torch.zeros(49).double(), torch.ones(49).double()
        for _ in range(60):
            middle = (low + high) / 2
            uniforms(monkeypatch, middle)
            after = draw(log_probs.expand(49, -1))[:, 0] > torch.arange(49)
            low, high = torch.where(after, low, middle), torch.where(after, middle, high)
        assert_close(low, exact, atol=1e-14, rtol=0.0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_log_probs_are_left_alone(self, dtype):
        log_probs = torch.randn(3, 7, dtype=dtype).log_softmax(-1)
        before = log_probs.clone()
        draw(log_probs)
        dist = NextToken(log_probs)
        token = dist.sample()
        assert torch.equal(log_probs, before)
        assert_close(dist.log_prob(token), before.gather(1, token[:, None])[:, 0])

    def test_impossible_tokens_are_never_drawn(self):
        log_probs = torch.full((2000, 7), -math.inf)
        log_probs[:, 3] = 0.0
        assert (draw(log_probs) == 3).all()

    @pytest.mark.parametrize("value", [math.nan, -math.inf])
    def test_bad_logits(self, value):
        logits = torch.zeros(8, 5)
        logits[[2, 7]] = value
        text = r"got NaN, or infinity for all tokens, in rows \[2, 7\] \(2 of 8\): the model's"
        with pytest.raises(ValueError, match=text):
            draw(logits)
        actor = make_actor("gpt")
        actor.reader.lm.model.head.weight.data[:] = math.nan
        with pytest.raises(ValueError, match="weights may have diverged"):
            sample(actor)


class TestNextToken:
    def test_it_is_the_categorical(self):
        logits = 3 * torch.randn(4, 5, 7)
        ours, theirs = NextToken(logits), torch.distributions.Categorical(logits=logits)
        value = theirs.sample()
        assert_close(ours.log_prob(value), theirs.log_prob(value))
        for name in ("probs", "logits", "mode", "mean", "variance", "batch_shape", "event_shape"):
            got, expected = getattr(ours, name), getattr(theirs, name)
            if isinstance(got, torch.Tensor):
                assert_close(got, expected, equal_nan=True)
            else:
                assert got == expected
        assert_close(ours.entropy(), theirs.entropy())
        assert_close(ours.deterministic_sample, theirs.mode)
        assert_close(ours.enumerate_support(), theirs.enumerate_support())
        assert_close(torch.distributions.kl_divergence(ours, theirs), torch.zeros(4, 5))
        assert ours.sample().shape == (4, 5)
        assert ours.sample(torch.Size([3, 2])).shape == (3, 2, 4, 5)
        assert ours.expand((6, 4, 5)).batch_shape == (6, 4, 5)
        assert NextToken(torch.zeros(0, 7)).sample().shape == (0,)
        assert NextToken(torch.zeros(7)).sample().shape == ()
        assert NextToken(torch.zeros(7)).sample(torch.Size([3])).shape == (3,)

    def test_samples_of_a_shape(self):
        dist = NextToken(torch.tensor([[0.0, 5.0], [5.0, 0.0]]))
        drawn = dist.sample(torch.Size([4000])).double().mean(0)
        assert_close(drawn, dist.probs[:, 1].double(), atol=5 * 0.5 / 4000**0.5, rtol=0.0)


def scored(actor: Any, critic: Any, reference: Any, prompts: Any) -> Any:
    batch = sample(actor, prompts, reward_fn=lambda texts: (texts == 5).sum(1).float())
    batch = KLConstrainedTransform(actor, 0.1, reference=reference)(batch)
    with torch.no_grad(), set_recurrent_mode(True):
        GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True)(batch)
    return batch


class TestWhoTakesIt:
    @every_kind
    @pytest.mark.parametrize("prompts", [equal(), ragged()], ids=["equal", "ragged"])
    def test_k1_of_a_policy_against_itself(self, kind, prompts):
        actor = make_actor(kind)
        batch = KLConstrainedTransform(actor, 0.1)(sample(actor, prompts))
        assert batch["next", "kl"].abs().max() < 1e-5
        assert not batch["next", "kl"][~batch["collector", "mask"]].any()

    @every_kind
    def test_k1_against_another(self, kind):
        actor, other = make_actor(kind), make_actor(kind, seed=1)
        passes = Passes(other)
        stack = KLConstrainedTransform(actor, 0.1, reference=other)
        batch = sample(actor, ragged())
        after = stack(batch)["next"]
        mask = batch["collector", "mask"]
        logits = true_logits(other.reader.lm.model, batch["tokens"], batch["position"])
        expected = batch["action_log_prob"] - logits.log_softmax(-1).gather(
            -1, batch["action"].unsqueeze(-1)
        ).squeeze(-1)
        assert_close(after["kl"].squeeze(-1), expected * mask, atol=5e-5, rtol=0.0)
        assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])
        assert passes is not None

    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_a_training_step(self, kind):
        actor, critic = make_actor(kind), make_critic(kind)
        batch = scored(actor, critic, make_actor(kind, seed=1), ragged())
        steps = batch[batch["collector", "mask"]]
        loss = ClipPPOLoss(actor, critic, normalize_advantage=False)
        penalty = KLPenaltyLoss(actor, 0.1, reference=make_actor(kind, seed=1))
        for part in (batch, steps):
            for module in (loss, penalty):
                module.zero_grad()
            out = loss(part)
            kl = penalty(part.exclude(("next", "kl_coeff")))["loss_kl"]
            total = out["loss_objective"] + out["loss_critic"] + kl
            total.backward()
            assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)
            assert sum(p.grad.abs().sum() for p in loss.parameters() if p.grad is not None) > 0.1
        # The first ratios are 1: none is clipped, and the policy is where it was.
        assert out["clip_fraction"] == 0
        assert abs(out["kl_approx"]) < 1e-5
        KLMonitor(ConstantKLController(0.1), window=1)(batch)

    @pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
    def test_replay_buffers(self, storage, tmp_path):
        options: dict[str, Any] = (
            {"scratch_dir": str(tmp_path)} if storage is LazyMemmapStorage else {}
        )
        actor = make_actor("llama")
        batch = sample(actor, ragged(8))
        buffer = ReplayBuffer(
            storage=storage(8, **options),
            sampler=SamplerWithoutReplacement(shuffle=True),
            batch_size=4,
        )
        buffer.extend(batch)
        drawn: Any = torch.cat([buffer.sample(), buffer.sample()])
        assert drawn.shape == (8, T)
        with set_recurrent_mode(True):
            scores = actor.log_prob(drawn.select("tokens", "position", "action"))
        mask = drawn["collector", "mask"]
        assert_close(scores * mask, drawn["action_log_prob"], atol=2e-5, rtol=0.0)

    @every_kind
    def test_each_text_is_read_once(self, kind):
        """By policy, critic and reference, in whatever layout."""
        actor, critic = make_actor(kind), make_critic(kind)
        passes, values = Passes(actor), Passes(critic)
        stack = KLConstrainedTransform(actor, 0.1)
        references = Passes(stack)
        batch = sample(actor)
        for one in (passes, values, references):
            one.take()
        stack(batch)
        assert rows(passes, references) == 6
        with torch.no_grad(), set_recurrent_mode(True):
            GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True)(batch)
        assert rows(values) == 12  # of states and of next states
        loss = ClipPPOLoss(actor, critic)
        layouts = {
            "whole": (batch, 6),
            "rows": (batch[2:4], 2),
            "chosen rows": (batch[torch.tensor([5, 0, 2])], 3),
            "flat": (batch.reshape(-1), 6),
            "cloned": (batch.clone(), 6),
            "masked": (batch[batch["collector", "mask"]], 6),
        }
        for name, (part, expected) in layouts.items():
            loss(part)
            assert rows(passes) == expected, name
            assert rows(values) == expected, name


def rows(*passes: Passes) -> int:
    return sum(n for one in passes for n, _ in one.take())


def returns(value):
    return lambda texts: value


class TestErrors:
    @pytest.mark.parametrize(
        ("prompts", "kwargs", "error", "text"),
        [
            (equal().float(), {}, TypeError, "`prompts` must be int64 or int32, got torch.float32"),
            ([[1, 2], [3]], {}, TypeError, "`prompts` must be tensors, got list"),
            (
                equal()[0],
                {},
                ValueError,
                r"must be ids \(N, P\), or a list .*, got shapes \[\(4,\)\]",
            ),
            (equal()[:0], {}, ValueError, r"got shapes \[\(0, 4\)\]"),
            (equal()[:, :0], {}, ValueError, r"got shapes \[\(6, 0\)\]"),
            ([], {}, ValueError, r"got shapes \[\]"),
            ([equal()], {}, ValueError, r"got shapes \[\(6, 4\)\]"),
            ([equal()[0], equal()[0, :0]], {}, ValueError, r"got shapes \[\(4,\), \(0,\)\]"),
            (equal(), {"max_new_tokens": 0}, ValueError, "`max_new_tokens` must be .*, got 0"),
            (equal(), {"max_new_tokens": 2.0}, ValueError, "be an int of at least 1, got 2.0"),
            (equal(), {"chunk_size": 0}, ValueError, "`chunk_size` must be an int .*, got 0"),
            (
                equal(),
                {"max_new_tokens": 18},
                ValueError,
                "must leave at most 20 tokens to be read, .*, got 21: shorten them, or build",
            ),
            (equal(), {"pad_token": -100}, ValueError, "`pad_token` must lie .* of 11 tokens, got"),
            (
                equal(),
                {"eos_token": 11},
                ValueError,
                "`eos_token` must lie in .* 11 tokens, got 11",
            ),
            (
                equal(),
                {"reward_fn": returns(torch.ones(6, 1))},
                ValueError,
                r"`reward_fn` must return a tensor \(6,\), got \(6, 1\)",
            ),
            (equal(), {"reward_fn": returns([1.0] * 6)}, ValueError, r"\(6,\), got list"),
        ],
    )
    def test_bad_arguments(self, prompts, kwargs, error, text):
        kwargs = {"max_new_tokens": 4, "pad_token": PAD, **kwargs}
        with pytest.raises(error, match=text):
            sample_responses(make_actor("gpt"), prompts, **kwargs)

    def test_bad_actors(self):
        with pytest.raises(TypeError, match="`actor` must be a CausalLMActor, got GPT"):
            sample_responses(GPT(11, 8), equal(), 2, pad_token=0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="outputs: a critic's model cannot act"):
            CausalLMActor(sharp(GPT(11, 8, n_out=1)))

    def test_an_error_of_the_reward_function_is_raised(self):
        def fail(texts):
            raise KeyError("no reward")

        with pytest.raises(KeyError, match="no reward"):
            sample(make_actor("gpt"), reward_fn=fail)

    def test_a_model_without_sizes(self):
        """A module that says nothing of its vocabulary or length."""
        model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
        actor = CausalLMActor(sharp(model))
        check_layout(sample(actor), equal(), PAD, EOS, torch.zeros(6))
        with pytest.raises(ValueError, match="`pad_token` must lie in the model's vocabulary, got"):
            sample(actor, pad_token=-1)


def test_a_reference_in_bfloat16():
    """It differs from that in float32 by rounding: 8 bits of logits of at most 8."""
    from torchrl_kl import FrozenActor

    actor = make_actor("llama")
    batch = sample(actor)
    exact, half = FrozenActor(actor), FrozenActor(actor).to(torch.bfloat16)
    assert half.dtype == torch.float32
    stack = [
        KLConstrainedTransform(actor, 0.1, reference=reference)(batch)
        for reference in (exact, half)
    ]
    difference = (stack[0]["next", "kl"] - stack[1]["next", "kl"]).abs()
    size = true_logits(make_model("llama"), batch["tokens"], batch["position"]).abs().max().item()
    # Each of about 20 roundings moves a logit by at most 2**-9 of its size.
    assert 1e-4 < difference.max() < 2 * 20 * size * 2**-9


def test_empty_batches_are_scored():
    for kind in ("gpt", "llama"):
        actor = make_actor(kind)
        batch = sample(actor)
        for empty in (batch[:0], batch[:, :0], batch.reshape(-1)[:0]):
            state: Any = empty.select("tokens", "position")
            for recurrent in (False, True):
                with torch.no_grad(), set_recurrent_mode(recurrent):
                    logits = actor.get_dist(TensorDict(state)).logits
                assert logits.shape == (*empty.shape, VOCAB)
