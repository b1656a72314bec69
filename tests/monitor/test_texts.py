"""Responses of language models: what KLMonitor finds in recorded log-probs and in tokens."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from tests.monitor.test_diagnosis import ratio_table
from tests.monitor.texts import (
    END,
    N_TOKENS,
    PAD,
    make_gpt,
    of_samples,
    sample_texts,
    texts_monitor,
    texts_of,
)
from torchrl_kl import (
    AdaptiveKLController,
    CausalLMActor,
    KLMonitor,
    ResponseKLTransform,
    as_steps,
    sample_responses,
)
from torchrl_kl.monitor import sampler_check
from torchrl_kl.monitor.diagnosis import N_ALTERNATIVES, log_ratios, take
from torchrl_kl.monitor.texts import TEXT_CONDITIONS, TextFaults, insert


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def steps_of(batch):
    return as_steps(batch, pad_token=PAD, eos_token=END)


class TestHealthyBatches:
    @pytest.mark.parametrize("form", ["batch", "steps"])
    def test_are_not_reported(self, form):
        """30 batches of 16 responses, of which some end early; the evidence stays at its level."""
        model = make_gpt()
        monitor = texts_monitor(model)
        for _ in range(30):
            batch = texts_of(*sample_texts(model))
            assert monitor(batch if form == "batch" else steps_of(batch)) == []
        counts = {name: monitor.counts[name].batches for name in TEXT_CONDITIONS}
        assert counts == dict.fromkeys(TEXT_CONDITIONS, 0)
        assert monitor.state_dict()["evidence"]["n_batches"] == 30
        shortest, longest = monitor.state_dict()["texts"][4:]
        assert shortest < longest == 30

    def test_the_evidence_exceeds_x_in_one_of_exp_x_runs(self):
        """200 runs of the monitor on one healthy batch each."""
        model, highest = make_gpt(), []
        for seed in range(200):
            torch.manual_seed(seed)
            monitor = texts_monitor(model)
            monitor(texts_of(*sample_texts(model, 4, 10)))
            highest.append(
                torch.tensor(monitor.state_dict()["evidence"]["log_wealth"]).logsumexp(0)
            )
        for level in (5.0, 20.0):
            # At most n / level are expected; 4 standard deviations of a binomial more.
            allowed = len(highest) / level + 4 * math.sqrt(len(highest) / level)
            assert (torch.stack(highest) > math.log(level)).sum() <= allowed

    @pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
    def test_no_false_alarm_where_texts_end(self, scale):
        """1000 runs of 100 batches of 20 responses that end with the first of 5 tokens."""
        generator = torch.Generator().manual_seed(round(10 * scale))
        wealth = highest = torch.full((1000,), -math.inf).double()
        for n in range(1, 101):
            probs = (scale * torch.randn(5, generator=generator)).softmax(0)
            drawn = torch.multinomial(probs, 1000 * 20 * 8, True, generator=generator)
            drawn = drawn.view(1000, 20, 8)
            ended = (drawn == 0).int().cumsum(-1) - (drawn == 0).int() > 0
            counts = torch.stack([((drawn == a) & ~ended).sum((1, 2)) for a in range(5)], -1)
            table = torch.stack(
                [
                    log_ratios(probs.double().log()[None], torch.tensor([a]), ((0,), (1,)))
                    for a in range(5)
                ]
            )
            ratios = counts.double() @ table.clamp_min(-1e9)
            stake = -torch.tensor(n * (n + 1.0) * N_ALTERNATIVES).double().log()
            wealth = torch.logaddexp(wealth if n > 1 else ratios - math.inf, stake) + ratios
            highest = torch.maximum(highest, wealth.logsumexp(-1))
        for level in (5.0, 20.0, 100.0):
            assert (highest > math.log(level)).sum() <= 1000 / level + 4 * math.sqrt(1000 / level)

    def test_never_drawing_a_token_is_a_distribution(self):
        """The mean of exp(log-ratio) is 1; a token that the model has not makes no difference."""
        probs = torch.tensor([0.25, 0.5, 0.25]).double()
        ratios = torch.stack(
            [log_ratios(probs.log()[None], torch.tensor([a]), ((1,), (7,))) for a in range(3)]
        )
        assert_close(probs @ ratios.exp(), torch.ones_like(ratios[0]), rtol=1e-12, atol=0.0)
        assert ratios[:, -1].eq(0).all()
        assert ratio_table(probs)[:, -2:].eq(0).all()


class TestFirstToken:
    def test_zero_is_named(self):
        model = make_gpt()
        prompts, responses, recorded = sample_texts(model)
        scored = torch.stack([row[0] for row in recorded])
        for row in recorded:
            row[0] = 0.0
        (message,) = texts_monitor(model)(texts_of(prompts, responses, recorded))
        assert message.condition == "first_token_zero"
        assert "The first token of 16 of 16 responses has a recorded log-prob of" in message.text
        assert "ResponseKLTransform scores all tokens again" in message.text
        assert_close(message.figures["scored"], scored.mean().item(), rtol=1e-4, atol=1e-4)

    def test_the_rest_is_still_compared(self):
        model = make_gpt()
        prompts, responses, recorded = sample_texts(model, temperature=0.7)
        for row in recorded:
            row[0] = 0.0
        said = of_samples(texts_monitor(model)(texts_of(prompts, responses, recorded)))
        assert set(said) == {"first_token_zero", "sampler_disagrees"}
        assert "the actor's at temperature 0.7. Divide" in said["sampler_disagrees"]
        assert "TransformersWrapper records log-probs at temperature 1" in said["sampler_disagrees"]

    def test_zeros_of_a_cold_sampler_are_its_own(self):
        """Where one token is all but certain for the sampler, its log-prob is recorded as 0."""
        model = make_gpt()
        prompts, responses, recorded = sample_texts(model, temperature=0.05)
        zeros = torch.stack([row[0] for row in recorded]) == 0
        assert zeros.any()
        assert not zeros.all()
        said = of_samples(texts_monitor(model)(texts_of(prompts, responses, recorded)))
        assert set(said) == {"sampler_disagrees"}
        assert "the actor's at temperature 0.05" in said["sampler_disagrees"]

    def test_zeros_alone_are_another_fault(self):
        model = make_gpt()
        prompts, responses, recorded = sample_texts(model)
        zeros = [torch.zeros_like(row) for row in recorded]
        said = of_samples(texts_monitor(model)(texts_of(prompts, responses, zeros)))
        assert "every recorded log-prob is 0" in said["sampler_disagrees"]
        assert set(said) == {"sampler_disagrees"}


def without(rows, responses, token):
    return [row[response != token] for row, response in zip(rows, responses, strict=True)]


class TestCutTokens:
    def cut(self, model, token, n=16):
        prompts, responses, recorded = sample_texts(model, n)
        return texts_of(
            prompts, without(responses, responses, token), without(recorded, responses, token)
        )

    def test_pad_tokens_inside_are_put_back(self):
        model = make_gpt()
        (message,) = texts_monitor(model)(self.cut(model, PAD))
        assert message.condition == "tokens_cut"
        assert "agree again if" in message.text
        assert "tokens with the id 0 are put back" in message.text
        assert "Set `tokenizer.pad_token` to a token that the model never draws" in message.text
        assert message.figures["tokens"] >= 4

    def test_end_tokens_are_missed(self):
        """A text does not show it: batches of few responses are pooled."""
        model = make_gpt()
        monitor, found = texts_monitor(model), []
        for n in range(30):
            messages = monitor(self.cut(model, END, n=4))
            found += [(n, message) for message in messages]
        ((n, message),) = found
        assert n > 0
        assert message.condition == "tokens_cut"
        assert f"is the end token {END}, though by the actor's" in message.text
        assert "name `eos_token` here and for `as_steps`" in message.text

    def test_several_end_tokens_are_missed(self):
        model = make_gpt()
        actor, ends = CausalLMActor(model), [END, 2]
        monitor, texts = texts_monitor(model, eos_token=ends), {}
        for cut in (False, True):
            for _ in range(30):
                prompts = torch.randint(3, N_TOKENS, (4, 5))
                steps = sample_responses(actor, prompts, 30, pad_token=PAD, eos_token=ends)
                keep = steps["collector", "mask"]
                assert (
                    steps["next", "terminated"]
                    .squeeze(-1)
                    .equal(torch.isin(steps["action"], torch.tensor(ends)) & keep)
                )
                keep = keep & ~torch.isin(steps["action"], torch.tensor(ends)) if cut else keep
                parts = [
                    [row[mask] for row, mask in zip(steps[key], keep, strict=True)]
                    for key in ("action", "action_log_prob")
                ]
                texts |= of_samples(monitor(texts_of(list(prompts), parts[0], parts[1])))
            assert set(texts) == ({"tokens_cut"} if cut else set())
        assert "is one of the end tokens 1 and 2, though" in texts["tokens_cut"]

    def test_end_tokens_that_are_suppressed_are_not_cut_out(self):
        model = make_gpt()
        actor = CausalLMActor(model)
        reader, scale = actor.reader, actor.reader.scale

        def suppress(logits):
            return scale(logits).index_fill(-1, torch.tensor(END), -math.inf)

        monitor = texts_monitor(model)
        reader.scale = suppress  # type: ignore[method-assign]
        said = {}
        for _ in range(10):
            prompts = torch.randint(2, N_TOKENS, (8, 4))
            steps = sample_responses(actor, prompts, 12, pad_token=PAD, eos_token=END)
            with torch.no_grad():
                scored = CausalLMActor(model).get_dist(steps.select("tokens", "position"))
            recorded = scored.log_prob(steps["action"])
            said |= of_samples(
                monitor(texts_of(list(prompts), list(steps["action"]), list(recorded)))
            )
        assert set(said) == {"sampler_disagrees"}
        assert "the sampler seems to suppress it (min_new_tokens" in said["sampler_disagrees"]

    def test_end_tokens_that_only_first_steps_lack_are_not_cut_out(self, monkeypatch):
        """Of a large vocabulary, only the first steps of the responses are looked at."""
        monkeypatch.setattr(sampler_check, "_TABLE_SIZE", N_TOKENS * 32)
        model = make_gpt()
        monitor, said, n_ended = texts_monitor(model), {}, 0
        for _ in range(10):
            rows = [row for row in zip(*sample_texts(model, 64), strict=True) if row[1][0] != END]
            prompts, responses, recorded = (list(part) for part in zip(*rows[:32], strict=True))
            n_ended += sum(int(row[-1] == END) for row in responses)
            said |= of_samples(monitor(texts_of(prompts, responses, recorded)))
        assert n_ended
        assert set(said) == {"sampler_disagrees"}
        assert "None of 32 tokens that were looked at is the end token" in said["sampler_disagrees"]
        assert "As this batch has it in other places, the sampler" in said["sampler_disagrees"]

    def test_tokens_are_put_in_before_a_step(self):
        model = make_gpt()
        row = steps_of(texts_of(*sample_texts(model, 1)))
        longer = insert(row, 2, [7, 8])
        at = int(row["position"][0, 2])
        before, after = row["tokens"][0, 0], longer["tokens"][0, 0]
        assert after.tolist() == [*before[:at].tolist(), 7, 8, *before[at:-2].tolist()]
        moved = longer["position"] - row["position"]
        assert moved[0, :2].tolist() == [0, 0]
        assert (moved[0, 2:-2] == 2).all()
        assert longer["position"].max() <= before.numel()


class TestOtherTokens:
    def test_other_lengths(self):
        model = make_gpt()
        prompts, responses, recorded = sample_texts(model)
        recorded[3] = recorded[3][:-1]
        batch = texts_of(prompts, responses, recorded)
        for form in (batch, steps_of(batch)):
            (message,) = texts_monitor(model)(form)
            assert message.condition == "retokenised"
            assert "1 of 16 responses have another number of tokens" in message.text
            assert "`input_mode='tokens'`" in message.text
        batch["log_probs", "full"] = torch.zeros(16, 3)
        with pytest.raises(ValueError, match="one number per token .* those of 16 of 16"):
            steps_of(batch)

    def test_as_many_other_tokens(self):
        """Two tokens of each text are others than those that were drawn."""
        model = make_gpt()
        monitor = texts_monitor(model)
        prompts, responses, recorded = sample_texts(model)
        others = []
        for response in responses:
            place = min(5, len(response) - 1)
            other = response.clone()
            other[place] = (response[place] + 4) % (N_TOKENS - 2) + 2
            others.append(other)
        (message,) = monitor(texts_of(prompts, others, recorded))
        assert message.condition == "retokenised"
        assert "they agree with the actor's up to a token, and differ from there" in message.text

    def test_small_batches_are_pooled(self):
        model = make_gpt()
        monitor, said = texts_monitor(model), []
        for _ in range(20):
            prompts, responses, recorded = sample_texts(model, 1)
            if len(responses[0]) > 8:
                responses[0] = responses[0].clone()
                responses[0][5] = (responses[0][5] + 4) % (N_TOKENS - 2) + 2
            said.append([m.condition for m in monitor(texts_of(prompts, responses, recorded))])
        flat = [name for names in said for name in names]
        assert "retokenised" in flat
        assert flat.index("sampler_disagrees") < flat.index("retokenised")  # no cause is told

    @pytest.mark.parametrize("temperature", [0.7, 1.4])
    def test_a_temperature_is_not_taken_for_it(self, temperature):
        model = make_gpt()
        actor = CausalLMActor(model, temperature=1.0)
        monitor = texts_monitor(model, actor=actor)
        for _ in range(10):
            batch = texts_of(*sample_texts(model, 8, temperature=temperature))
            monitor(batch)
        assert monitor.counts["sampler_disagrees"].batches == 10
        assert monitor.counts["retokenised"].batches == 0
        assert monitor.counts["tokens_cut"].batches == 0

    def test_a_temperature_is_not_taken_for_it_where_prompts_are_longer_than_responses(self):
        model = make_gpt()
        batch = texts_of(*sample_texts(model, 16, 6, temperature=0.7, shortest=20))
        (message,) = texts_monitor(model)(batch)
        assert message.condition == "sampler_disagrees"
        assert "the actor's at temperature 0.7. Divide" in message.text

    def test_a_difference_at_the_last_tokens_alone_is_not_taken_for_it(self):
        model = make_gpt()
        prompts, responses, recorded = sample_texts(model)
        for row in recorded:
            row[-1] -= 1.0
        (message,) = texts_monitor(model)(texts_of(prompts, responses, recorded))
        assert message.condition == "sampler_disagrees"


class TestSampler:
    """Log-probs of temperature 1, whatever was sampled at."""

    @pytest.mark.parametrize("temperature", [0.7, 1.5])
    def test_temperature(self, temperature):
        model = make_gpt()
        monitor, said = texts_monitor(model), {}
        for _ in range(6):
            prompts, responses, _ = sample_texts(model, temperature=temperature)
            batch = as_steps(texts_of(prompts, responses, responses), pad_token=PAD, eos_token=END)
            with torch.no_grad():
                dist = CausalLMActor(model).get_dist(batch.select("tokens", "position"))
            batch["sampler_log_prob"] = dist.log_prob(batch["action"])
            said |= of_samples(monitor(batch))
        assert set(said) == {"sampler_disagrees"}
        assert f"(near {temperature:g})" in said["sampler_disagrees"]
        assert "set `temperature` of CausalLMActor" in said["sampler_disagrees"]

    def test_a_batch_that_is_not_checked(self):
        model = make_gpt()
        monitor = texts_monitor(model, check_every=3)
        prompts, responses, recorded = sample_texts(model)
        bad = [row - 1.0 for row in recorded]
        assert monitor(texts_of(prompts, responses, recorded)) == []
        assert monitor(texts_of(prompts, responses, bad)) == []
        assert monitor(texts_of(prompts, responses, bad)) == []
        assert len(monitor(texts_of(prompts, responses, bad))) == 1

    def test_without_an_actor_only_the_kl_is_looked_at(self):
        model = make_gpt()
        batch = texts_of(*sample_texts(model))
        batch["next", "reward"] = torch.zeros(16, 1)
        monitor = texts_monitor(model, actor=None, window=1)
        assert monitor(batch) == []
        scored = ResponseKLTransform(model, 0.1, reference=make_gpt(1), **TOKENS)(batch)
        scored["next", "kl"] = torch.full((16, 1), math.nan)
        assert of_samples(monitor(scored)).keys() == {"kl_not_finite"}


TOKENS: dict[str, Any] = {"pad_token": PAD, "eos_token": END}


class TestTarget:
    @pytest.mark.parametrize("per", ["trajectory", "step"])
    @pytest.mark.parametrize("estimator", ["k1", "exact"])
    def test_kl_of_responses(self, per, estimator):
        model, other = make_gpt(), make_gpt(1)
        batch = texts_of(*sample_texts(model, 200, 6))
        batch["next", "reward"] = torch.zeros(200, 1)
        controller = AdaptiveKLController(0.1, target=1e-3, horizon=1000, per=per)
        transform = ResponseKLTransform(
            model, controller, reference=other, estimator=estimator, **TOKENS
        )
        scored = transform(batch)
        monitor = texts_monitor(model, window=1)
        monitor.controller = controller
        (message,) = (m for m in monitor(scored) if m.condition == "kl_above")
        totals = scored["next", "kl" if estimator == "k1" else "kl_estimate"].flatten()
        n_tokens = sum(map(len, batch["tokens"].get("response", as_list=True)))
        expected = totals.mean() if per == "trajectory" else totals.sum() / n_tokens
        assert_close(message.figures["kl"], expected.item(), rtol=1e-5, atol=1e-6)
        lengths = torch.tensor(list(map(len, batch["tokens"].get("response", as_list=True))))
        if per == "step":  # what is left of each response without its share of the tokens
            totals = totals / lengths.double().mean() - expected * lengths / lengths.double().mean()
        error = totals.double().std().item() / math.sqrt(200)
        assert_close(message.figures["standard_error"], error, rtol=1e-5, atol=1e-6)
        assert message.figures["count"] == 200
        assert "over the last 1 batches (200 responses)" in message.text

    @pytest.mark.parametrize("n_left_out", [12, 16])
    def test_responses_that_the_stack_left_out_do_not_count(self, n_left_out):
        model = make_gpt()
        batch = texts_of(*sample_texts(model, 16, 6))
        rewards = torch.zeros(16, 1)
        rewards[:n_left_out] = math.nan
        batch["next", "reward"] = rewards
        controller = AdaptiveKLController(0.1, target=1e-3, horizon=1000)
        options: dict[str, Any] = {"reference": make_gpt(1), "on_invalid": "mask", **TOKENS}
        with pytest.warns(UserWarning, match="got invalid numbers"):
            scored = ResponseKLTransform(model, controller, **options)(batch)
        monitor = texts_monitor(model, window=1)
        monitor.controller = controller
        assert "retokenised" not in of_samples(monitor(scored))
        ((count, total, _),) = monitor.state_dict()["pools"]
        assert count == 16 - n_left_out
        assert_close(total, scored["next", "kl"].double().sum().item())
        # As where those that are left out would be infinite.
        scored["next", "kl"] = torch.where(rewards.isnan(), 0.0, -9.0)
        assert not texts_monitor(model)(scored)

    @pytest.mark.parametrize("source", ["argument", "generation_config"])
    def test_several_end_tokens(self, source):
        """Of which one pads, as in many chat models: it is a token of the response, too."""
        model, ends = make_gpt(), [END, PAD]
        tokens: dict[str, Any] = {"pad_token": PAD, "eos_token": ends}
        model.generation_config = SimpleNamespace(pad_token_id=PAD, eos_token_id=ends)  # type: ignore[assignment]
        full = torch.tensor([[5, 6, 7, PAD, PAD], [5, 6, END, PAD, PAD], [5, 6, 7, 7, PAD]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :1]}, batch_size=3)
        batch["next"] = TensorDict(kl=torch.full((3, 1), 0.9), batch_size=3)
        options = tokens if source == "argument" else {}
        controller = AdaptiveKLController(0.1, target=1e-3, horizon=1000, per="step")
        monitor = KLMonitor(controller, actor=CausalLMActor(model), window=1, **options)
        (message,) = (m for m in monitor(batch) if m.condition == "kl_above")
        # 3 + 2 + 4 tokens of three responses.
        assert_close(message.figures["kl"], 3 * 0.9 / 9, rtol=1e-6, atol=0)

    def test_a_negative_mean_is_per_response(self):
        model = make_gpt()
        batch = texts_of(*sample_texts(model))
        batch["next", "kl"] = torch.tensor([-0.5, 0.25, 0.0, -0.25]).repeat(4)[:, None]
        (message,) = texts_monitor(model, window=1)(batch)
        # 16 values of mean -0.125; their squared deviations add up to 4 * 0.3125.
        error = math.sqrt(4 * 0.3125 / 15 / 16)
        expected = f"is -0.125 +- {error:.2g} nats per response over 16 responses"
        assert message.condition == "negative_noise"
        assert expected in message.text

    def test_scored_batches_are_compared_with_both(self):
        """What ResponseKLTransform writes is right, what the sampler recorded is not."""
        model = make_gpt()
        prompts, responses, recorded = sample_texts(model)
        batch = texts_of(prompts, responses, [row - 0.5 for row in recorded])
        batch["next", "reward"] = torch.zeros(16, 1)
        scored = ResponseKLTransform(model, 0.1, **TOKENS)(batch)
        said = of_samples(texts_monitor(model)(scored))
        assert set(said) == {"sampler_disagrees"}
        off = ResponseKLTransform(model, 0.1, temperature=0.5, **TOKENS)(batch)
        off["log_probs"] = off["log_probs"].exclude("response")
        said = of_samples(texts_monitor(model)(off))
        assert "the recorded log-probs are the actor's at temperature 0.5" in str(said)


def test_pooled_counts_are_plain_numbers():
    model = make_gpt()
    monitor = texts_monitor(model)
    monitor(texts_of(*sample_texts(model)))
    state = json.loads(json.dumps(monitor.state_dict()))
    other = texts_monitor(model)
    other.load_state_dict(state)
    assert other.state_dict() == monitor.state_dict()


def test_findings_begin_empty():
    faults = TextFaults(1e-3, [0] * 6)
    assert faults.findings == dict.fromkeys(TEXT_CONDITIONS)
    assert take(torch.zeros(2, 3), torch.tensor([0, 1])).eq(0).all()
