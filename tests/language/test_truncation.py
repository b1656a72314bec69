"""Truncated sampling: the distribution of what is drawn, its record, and another sampler."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.gpt_helpers import sharp
from tests.language.models import make_model
from torchrl_kl import (
    ConstantKLController,
    ExponentialKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLMonitor,
    KLPenaltyLoss,
    TopKActor,
    rescore,
)
from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.exact import Enumeration, enumerate_kl
from torchrl_kl.functional.sampler import effective_share
from torchrl_kl.language import GPT, CausalLMActor, ResponseKLTransform, as_steps, sample_responses
from torchrl_kl.language.truncation import Truncation

VOCAB, PROMPT, T = 11, 3, 2
TEMPERATURE = 0.8
OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
}
every_truncation = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def warpers(top_k=None, top_p=None, min_p=None, temperature=1.0) -> Any:
    """Those of transformers, which draw the line."""
    chain: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p else []
    chain += [MinPLogitsWarper(min_p)] if min_p else []
    return LogitsProcessorList(chain)


def make_gpt(seed: int = 0) -> GPT:
    return sharp(GPT(VOCAB, 12, n_layer=2, n_head=2, n_embd=16).double(), seed).eval()


def next_logits(gpt: GPT, **options: Any):
    """A model of `enumerate_kl` that never calls the actor."""
    chain = warpers(temperature=TEMPERATURE, **options)
    return lambda tokens: chain(tokens, gpt(tokens)[:, -1])


def all_texts(prompts: torch.Tensor) -> torch.Tensor:
    ends = torch.cartesian_prod(*[torch.arange(VOCAB)] * T)
    return torch.cat([prompts.repeat_interleave(len(ends), 0), ends.repeat(len(prompts), 1)], 1)


def steps_of(texts: torch.Tensor, actor: CausalLMActor) -> Any:
    """All texts as responses (N, T), with the kept ids and the log-probs of `actor`."""
    tokens = TensorDict(full=texts, prompt=texts[:, :PROMPT])
    steps = as_steps(TensorDict(tokens=tokens, batch_size=len(texts)), pad_token=None)
    with torch.no_grad(), set_recurrent_mode(True):
        states = steps.select("tokens", "position")
        steps["action_log_prob"] = actor.get_dist(states).log_prob(steps["action"])
        if actor.truncation is not None:
            steps["kept", "ids"] = states["kept", "ids"]
    steps["sampler_log_prob"] = steps["action_log_prob"]
    return steps


PROMPTS = torch.tensor([[0, 2, 10], [5, 7, 10]])


class TestKeptSets:
    @pytest.mark.parametrize("tied", [False, True])
    @every_truncation
    def test_they_are_those_of_transformers(self, options, tied):
        logits = 2 * torch.randn(10_000, 40)
        if tied:
            logits = logits.round()
        expected = warpers(**options)(torch.zeros(1, 1).long(), logits.clone()).isfinite()
        truncation: Any = Truncation.of(**{"top_k": None, "top_p": None, "min_p": None, **options})
        ids = truncation.keep(logits, bounded=False)
        assert torch.zeros_like(expected).scatter(-1, ids.long(), True).equal(expected)
        bounded = truncation.keep(logits, bounded=True)
        assert bounded.shape[-1] == min(truncation.top_k, 40)
        if not tied:  # else other ones of the tokens at an edge may be kept
            assert torch.zeros_like(expected).scatter(-1, bounded.long(), True).equal(expected)

    def test_most_likely_first_then_the_first_again_and_never_a_banned_one(self):
        logits = torch.tensor([[0.0, 3.0, -torch.inf, 2.0]])
        truncation: Any = Truncation.of(4, None, None)
        ids = truncation.keep(logits, bounded=True)
        assert ids.tolist() == [[1, 3, 0, 1]]
        assert Truncation(4, 1e-9, 0.0).keep(logits, bounded=True).tolist() == [[1] * 4]
        # A drawn token takes a free place, or that of the least likely one.
        for record, drawn, expected in (
            (ids, 2, [1, 3, 0, 2]),
            (ids, 0, [1, 3, 0, 1]),
            (torch.tensor([[1, 3]]), 2, [1, 2]),
        ):
            found, missing = truncation.replay(logits, record, torch.tensor([drawn]))
            assert found.tolist() == [expected]
            assert missing.item() == (drawn == 2)

    def test_values_that_keep_all(self):
        choices: Any = ({}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_p": 1.0, "min_p": 0.0})
        for options in choices:
            assert CausalLMActor(make_gpt(), **options).truncation is None
        bounded: Any = Truncation.of(None, 0.9, None)
        assert bounded.top_k == 256

    @pytest.mark.parametrize(
        "options", [{"top_k": 0}, {"top_k": 2.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}]
    )
    def test_out_of_range(self, options):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
            CausalLMActor(make_gpt(), **options)


class TestAgainstEnumeration:
    @every_truncation
    def test_kl_and_mean_k1(self, options):
        policy, ref = make_gpt(0), make_gpt(1)
        actor = CausalLMActor(policy, temperature=TEMPERATURE, **options)
        expected = enumerate_kl(next_logits(policy, **options), next_logits(ref), PROMPTS, T)
        steps = steps_of(all_texts(PROMPTS), actor)
        probs = steps["action_log_prob"].sum(1).exp() / len(PROMPTS)
        possible = probs > 0
        reference = CausalLMActor(ref, temperature=TEMPERATURE, **options)  # is whole as such
        stack = KLConstrainedTransform(actor, 0.0, reference=reference)
        k1 = stack(steps[possible])["next", "kl"].squeeze(-1)
        assert_close(probs[possible] @ k1, expected, rtol=0, atol=1e-12)
        loss = KLPenaltyLoss(actor, 0.0, reference=reference, gradient="sequence", reduction="none")
        with torch.no_grad():
            exact = loss._terms(steps[possible], penalizes=False).kl
        # Of a state that several responses pass, each has its share.
        assert_close(probs[possible] @ exact, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("head_chunk", [None, 4])
    @every_truncation
    def test_gradients_with_recorded_sets(self, options, head_chunk):
        gpt, ref = make_gpt(0), make_gpt(1)
        actor = CausalLMActor(gpt, temperature=TEMPERATURE, head_chunk=head_chunk, **options)
        steps = steps_of(all_texts(PROMPTS), actor)
        with torch.no_grad():
            for weight in gpt.parameters():  # the sets are those of before
                weight += 0.1 * torch.randn_like(weight)
        texts, kept = all_texts(PROMPTS), steps["kept", "ids"].long()

        def log_probs(model, restricted: bool):
            logits = model(texts)[:, PROMPT - 1 : -1] / TEMPERATURE
            if restricted:
                mask = torch.ones_like(logits, dtype=torch.bool).scatter(-1, kept, False)
                logits = logits.masked_fill(mask, -1e300)
            return logits.log_softmax(-1)

        own, other = log_probs(gpt, True), log_probs(ref, False).detach()
        taken = texts[:, PROMPT:].unsqueeze(-1)
        drawn, ref_drawn = (each.gather(-1, taken).squeeze(-1) for each in (own, other))
        possible = (kept == taken).any(-1).all(-1)
        probs = drawn.sum(1).exp()[possible] / len(PROMPTS)
        objective = (probs * (drawn - ref_drawn).sum(1)[possible]).sum()
        expected = torch.autograd.grad(objective, [*gpt.parameters()], retain_graph=True)
        steps["action_log_prob"] = drawn.detach().clamp(min=-1e9)
        steps = steps[possible]
        reference = CausalLMActor(ref, temperature=TEMPERATURE)
        # k1, as it is subtracted from the reward, and the score function over it.
        stack = KLConstrainedTransform(actor, 1.0, reference=reference)
        penalty = stack(steps)["next", "kl"].sum((1, 2))
        with set_recurrent_mode(True):
            log_prob = actor.get_dist(steps.clone()).log_prob(steps["action"])
        surrogate = (probs.detach() * penalty * log_prob.sum(1)).sum()
        found = torch.autograd.grad(surrogate, [*gpt.parameters()])
        assert_close(found, expected, rtol=0, atol=1e-10)
        loss = KLPenaltyLoss(actor, 1.0, reference=reference, gradient="sequence", reduction="none")
        per_step = loss(steps)["loss_kl"]
        total = (probs.detach().unsqueeze(1) * per_step).sum()
        found = torch.autograd.grad(total, [*loss.actor_network_params.parameters()])
        assert_close(found, expected, rtol=0, atol=1e-10)


def sampled(actor: CausalLMActor, n: int = 64, length: int = 8) -> Any:
    torch.manual_seed(0)
    return sample_responses(actor, torch.randint(0, VOCAB, (n, 4)), length, pad_token=0)


def log_prob_of(actor: CausalLMActor, batch: Any) -> torch.Tensor:
    with set_recurrent_mode(True):
        return actor.get_dist(batch.copy()).log_prob(batch["action"])


class TestRecord:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_first_ratios_are_one(self, kind, dtype):
        actor = CausalLMActor(make_model(kind).eval().to(dtype), top_k=5, top_p=0.9)
        batch = sampled(actor)
        # A sampler with a cache rounds in another way; what it kept is still the same.
        assert (log_prob_of(actor, batch) > -20).all()
        batch = rescore(actor, batch)
        assert log_prob_of(actor, batch).equal(batch["action_log_prob"])

    def test_an_edge_that_rounding_moves(self):
        gpt = make_gpt()
        actor = CausalLMActor(gpt, top_k=3)
        batch = sampled(actor)
        with torch.no_grad():  # a sampler whose edges lie elsewhere
            for weight in gpt.parameters():
                weight += 0.02 * torch.randn_like(weight)
        replayed = log_prob_of(actor, batch)
        assert actor.n_rescued == 0
        states = batch.select("tokens", "position")
        with set_recurrent_mode(True):
            whole = actor.whole().get_dist(states.clone()).logits
        kept = actor.truncation.keep(whole, bounded=True)  # type: ignore[union-attr]
        missing = (kept != batch["action"].unsqueeze(-1)).all(-1)
        computed = log_prob_of(actor, batch.exclude("kept"))
        assert actor.n_rescued == missing.sum() > 0
        assert not replayed.equal(computed)
        assert computed.isfinite().all()
        mask = torch.rand(batch.shape) < 0.5
        log_prob_of(actor, batch.exclude("kept").set(("collector", "mask"), mask))
        assert actor.n_rescued == (missing & mask).sum()
        transform = ResponseKLTransform(gpt, 0.1, top_k=3, chunk_size=20)
        found = transform(responses_of(batch))
        assert transform.n_rescued == missing.sum()
        transform(found.exclude("next").set("next", responses_of(batch)["next"]))
        assert transform.n_rescued == 0

    def test_states_of_a_later_step(self):
        """A record that `step_mdp` has kept is that of the step before."""
        actor = CausalLMActor(make_gpt(), top_k=3)
        batch = sampled(actor, 6, 4)
        states = batch[:, 1].select("tokens", "position")
        expected = actor.get_dist(states.clone()).logits
        found = actor.get_dist(states.set("kept", batch[:, 0]["kept"])).logits
        assert found.isfinite().equal(expected.isfinite())

    def test_the_gradient_of_the_entropy(self):
        actor = CausalLMActor(make_gpt(), top_k=3)
        batch = sampled(actor, 6, 4)
        with set_recurrent_mode(True):
            dist = actor.get_dist(batch)
        probs = dist.logits.softmax(-1)
        assert_close(dist.entropy(), -(probs * (probs + (probs == 0)).log()).sum(-1))
        (1e4 * dist.entropy().sum()).backward()
        weights: Any = actor.parameters()
        assert all(weight.grad.isfinite().all() for weight in weights)

    @pytest.mark.parametrize("where", ["rollout", "responses"])
    def test_what_is_written(self, where):
        actor = CausalLMActor(make_gpt(), return_logits=False, **OPTIONS["all"])
        if where == "rollout":
            with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
                batch = DigitLanguageEnv(batch_size=(6,)).rollout(2, actor)
        else:
            batch = sampled(actor, 6, 4)
        assert batch["kept", "ids"].shape == (*batch.shape, 3)
        assert batch["kept", "ids"].dtype == torch.int32
        assert (batch["kept", "ids"] == batch["action"].unsqueeze(-1)).any(-1).all()
        assert_close(log_prob_of(actor, batch), batch["action_log_prob"])
        assert "kept" not in sampled(CausalLMActor(make_gpt()), 2, 2).keys()

    def test_rescoring(self):
        gpt = make_gpt()
        actor = CausalLMActor(gpt, top_k=3)
        batch = sampled(actor, 6, 4)
        batch["action_log_prob"][0, 1:] = torch.nan
        batch["collector", "mask"][0, 1:] = False
        first = rescore(actor, batch.exclude("kept"))
        assert first["kept", "ids"].sort().values.equal(batch["kept", "ids"].sort().values)
        with torch.no_grad():
            gpt.head.weight += 0.1 * torch.randn_like(gpt.head.weight)
        second, mask = rescore(actor, first), batch["collector", "mask"]
        assert second["action_log_prob"].equal(log_prob_of(actor, batch).detach())
        gap = (batch["action_log_prob"] - second["action_log_prob"])[mask]
        assert second["next", "sampler_kl"].squeeze(-1)[mask].equal(gap)
        assert (second["next", "sampler_kl"].squeeze(-1)[~mask] == 0).all()

    def test_the_most_likely_token(self):
        actor = CausalLMActor(make_gpt(), top_k=1)
        states = sampled(actor).select("tokens", "position")
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            step = actor(states.clone())
        assert (step["action_log_prob"] == 0).all()
        assert step["action"].equal(step["kept", "ids"][..., 0].long())

    def test_a_reference_is_whole(self):
        actor = CausalLMActor(make_gpt(), top_k=3)
        assert FrozenActor(actor).actor.truncation is None
        assert actor.whole().whole().truncation is None
        assert "kept" not in actor.whole()(sampled(actor).select("tokens", "position"))
        assert actor.whole().out_keys == CausalLMActor(make_gpt()).out_keys
        assert actor.kept_key in actor.out_keys
        whole = sampled(CausalLMActor(actor.reader.lm.model))
        for reference in (None, lambda: torch.enable_grad()):
            stack = KLConstrainedTransform(actor, 0.1, reference=reference)
            found = stack(sampled(actor))
            assert found["next", "kl"].mean() > 0.1
            assert found["next", "ref_log_prob"].isfinite().all()
            assert stack.reference.score(whole, timed=True).log_prob.isfinite().all()

    def test_top_k_actor_refuses_it(self):
        with pytest.raises(ValueError, match="must not truncate"):
            TopKActor(CausalLMActor(make_gpt(), top_k=3), 2)


def responses_of(steps: Any, **entries: Any) -> Any:
    """Steps (N, T) of responses as a batch of TorchRL's LLM API."""
    texts, n = steps["tokens"][:, 0], len(steps)
    first = int(steps["position"][0, 0])
    places = {"log_probs": steps["action_log_prob"]} | entries
    full = {key: torch.cat([v.new_zeros(n, first), v], 1) for key, v in places.items()}
    nested = {key: TensorDict(full=v, batch_size=n) for key, v in full.items()}
    tokens = TensorDict(full=texts, prompt=texts[:, :first], batch_size=n)
    following = TensorDict(reward=torch.zeros(n, 1, dtype=torch.float64), batch_size=n)
    return TensorDict(tokens=tokens, next=following, **nested, batch_size=n)


class TestResponses:
    @pytest.mark.parametrize("estimator", ["k1", "exact", "top_k"])
    @pytest.mark.parametrize("head_chunk", [None, 7])
    def test_they_are_scored_as_they_are_drawn(self, head_chunk, estimator):
        gpt, options = make_gpt(), OPTIONS["all"]
        steps = sampled(CausalLMActor(gpt, **options))
        transform = ResponseKLTransform(
            gpt, 0.1, estimator=estimator, head_chunk=head_chunk, chunk_size=20, **options
        )
        found = transform(responses_of(steps))
        assert transform.n_rescued == 0
        again = as_steps(found, pad_token=None)
        assert again["kept", "ids"].sort().values.equal(steps["kept", "ids"].sort().values)
        assert_close(again["action_log_prob"], steps["action_log_prob"])
        assert found["next", "sampler_kl"].abs().max() < 1e-10
        stack = KLConstrainedTransform(CausalLMActor(gpt, **options), 0.1, estimator=estimator)
        if estimator == "k1":
            assert_close(found["next", "kl"], stack(steps)["next", "kl"].sum(1))
        # What is there is read: other sets give other numbers.
        with torch.no_grad():
            gpt.head.weight += 0.3 * torch.randn_like(gpt.head.weight)
        recorded = transform(found.exclude(("next", "kl_coeff"), ("next", "task_reward")))
        assert recorded["kept", "ids"].equal(found["kept", "ids"])


class TestSampler:
    """A sampler at another temperature, or with noise in its logits, against enumeration."""

    N = 6_000

    def draw(self, kind: str) -> tuple[Any, Any, TensorDict]:
        gpt, noisy = make_gpt(), make_gpt()
        with torch.no_grad():
            noise = 0.2 * torch.randn(VOCAB, dtype=torch.float64)
        temperature = 0.9 if kind == "temperature" else 1.0
        if kind == "noise":
            noisy.register_forward_hook(lambda _module, _args, logits: logits + noise)  # type: ignore[operator]
        torch.manual_seed(1)
        prompts = PROMPTS[:1].expand(self.N, -1)
        steps = sample_responses(
            CausalLMActor(noisy, temperature=temperature), prompts, T, pad_token=0
        )
        sampler = lambda tokens: noisy(tokens)[:, -1] / temperature  # noqa: E731
        return gpt, sampler, steps

    @pytest.mark.parametrize("kind", ["temperature", "noise"])
    def test_sampler_kl_and_weights(self, kind):
        gpt, sampler, steps = self.draw(kind)
        ref = make_gpt(1)
        policy, cap = (lambda tokens: gpt(tokens)[:, -1]), 1.2
        transform = ResponseKLTransform(
            gpt, 0.0, reference=ref, sampler_weights="truncated", cap=cap
        )
        fed: list[torch.Tensor] = []
        transform.penalty.feed.pool = lambda controller, values: fed.append(values)  # type: ignore[assignment]
        found = transform(responses_of(steps))
        again = as_steps(found, pad_token=None)
        own, other = again["action_log_prob"], again["sampler_log_prob"]
        gap = own - found["next", "ref_log_probs", "full"][:, PROMPT:]
        weights = (own - other).cumsum(1).exp().clamp(max=cap)
        assert_close(fed[0], (weights * gap).sum(1), rtol=0, atol=1e-12)
        # By enumeration.
        zero = lambda texts: torch.zeros(len(texts))  # noqa: E731
        of = {
            name: Enumeration(model, zero, PROMPTS[:1], T).log_probs[0]
            for name, model in (("own", policy), ("sampler", sampler))
        }
        first, ref_first = (
            model(PROMPTS[:1])[0].log_softmax(-1) for model in (policy, lambda t: ref(t)[:, -1])
        )
        sampler_first = sampler(PROMPTS[:1])[0].log_softmax(-1)
        ref_whole = Enumeration(lambda t: ref(t)[:, -1], zero, PROMPTS[:1], T).log_probs[0]
        k1_first = (first - ref_first).repeat_interleave(VOCAB)
        k1 = of["own"] - ref_whole
        weight = (of["own"] - of["sampler"]).exp().clamp(max=cap)
        weight_first = (first - sampler_first).exp().clamp(max=cap).repeat_interleave(VOCAB)
        weighted = weight_first * k1_first + weight * (k1 - k1_first)
        probs = of["sampler"].exp()
        for values, expected in (
            (found["next", "sampler_kl"].flatten(), of["sampler"] - of["own"]),
            (found["next", "kl"].flatten(), k1),
            (fed[0], weighted),
            (fed[0] - found["next", "kl"].flatten(), weighted - k1),
        ):
            error = values.std() / math.sqrt(self.N)
            assert abs(values.mean() - probs @ expected) < 4 * error
        # The unweighted mean is off, by more than the cap costs.
        true = of["own"].exp() @ k1
        assert abs(probs @ weighted - true) < abs(probs @ k1 - true)
        # And so is the loss.
        loss = KLPenaltyLoss(
            CausalLMActor(gpt),
            1.0,
            reference=CausalLMActor(ref),
            gradient="k2",
            weights="trajectory",
            sampler_weights="truncated",
            cap=cap,
        )
        out = loss(again)
        assert_close(out["kl"] * T, fed[0].mean(), rtol=0, atol=1e-12)
        assert_close(out["loss_kl"], (weights * gap**2 / 2).mean(), rtol=0, atol=1e-12)
        by_step = ResponseKLTransform(
            gpt,
            ConstantKLController(0.0, per="step"),
            reference=ref,
            sampler_weights="truncated",
            cap=cap,
        )
        by_step.penalty.feed.pool = lambda controller, values: fed.append(values)  # type: ignore[assignment]
        by_step(responses_of(steps))
        weights = (own - other).exp().clamp(max=cap)
        assert_close(fed[1], (weights * gap).flatten(), rtol=0, atol=1e-12)

    def test_a_batch_too_far_off_moves_nothing_and_is_named(self):
        gpt = make_gpt()
        steps = sampled(CausalLMActor(gpt), 50)
        steps["action_log_prob"] = steps["action_log_prob"] - 3 * torch.randn(50, 8).double()
        controller = ExponentialKLController(1.0, target=0.1)
        transform = ResponseKLTransform(gpt, controller, sampler_weights="truncated")
        found = transform(responses_of(steps))
        assert controller.coeff == 1.0
        read = as_steps(found, pad_token=None)
        (message,) = [one for one in KLMonitor(controller)(read) if one.condition == "sampler_far"]
        assert message.figures["share"] < 0.1
        assert_close(message.figures["kl"], found["next", "sampler_kl"].mean().item())
        again = as_steps(found.exclude(("next", "kl_coeff")), pad_token=None)
        planned = ExponentialKLController("plan", target=0.1)
        for one in (controller, planned):
            loss = KLPenaltyLoss(CausalLMActor(gpt), one, sampler_weights="truncated")
            loss.update_controller(again)
        ResponseKLTransform(gpt, planned, sampler_weights="truncated")(responses_of(steps))
        assert controller.coeff == 1.0
        assert planned.coeff == 0.0
        assert len(planned.plan.samples) == 0  # type: ignore[union-attr]
        by_step = KLMonitor(ExponentialKLController(1.0, target=0.1, per="step"))(read)
        (message,) = [one for one in by_step if one.condition == "sampler_far"]
        assert_close(message.figures["kl"], found["next", "sampler_kl"].mean().item() / 8)

    def test_what_is_refused(self):
        gpt = make_gpt()
        with pytest.raises(ValueError, match="`sampler_weights` must be"):
            ResponseKLTransform(gpt, 0.1, sampler_weights="sequence")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`cap` must be"):
            KLPenaltyLoss(CausalLMActor(gpt), 0.1, sampler_weights="truncated", cap=0.5)
        batch = responses_of(sampled(CausalLMActor(gpt), 4))
        transform = ResponseKLTransform(gpt, 0.1, sampler_weights="truncated")
        batch["log_probs", "full"][1, -1] = torch.nan
        with pytest.raises(ValueError, match="sampler_log_probs"):
            transform(batch)
        batch = batch.exclude("log_probs")
        with pytest.raises(KeyError, match="let the sampler record it"):
            ResponseKLTransform(gpt, 0.1, sampler_weights="truncated")(batch)

    def test_effective_share(self):
        assert effective_share(torch.zeros(7)) == 1
        assert effective_share(torch.zeros(0)) == 1
        ratios = torch.tensor([1.0, 2.0, 3.0])
        assert_close(effective_share(ratios.log()), 36 / (14 * 3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_a_compiled_actor_answers_as_the_one_within():
    actor = CausalLMActor(GPT(vocab_size=11, block_size=8), top_p=0.5, temperature=0.7)
    compiled: Any = torch.compile(actor)  # which compiles nothing before a call
    assert as_kl_actor(compiled) is actor
    reference = KLConstrainedTransform(compiled, 0.1).reference.actor
    assert (reference.truncation, reference.temperature) == (None, 0.7)
