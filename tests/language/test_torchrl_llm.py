"""What TorchRL 0.14.1 gives for the KL of language models, and what these parts give.

Each test runs both and shows both figures. Where TorchRL has been mended its assertion fails: then
the row of that defect in docs/migration.md is out of date, and both should go.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.testing import assert_close
from torchrl.data import AdaptiveKLController as TorchRLController
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.llm.transforms import KLComputation, KLRewardTransform, RetrieveKL
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from tests.language.chats import (
    DEPRECATED,
    QUESTIONS,
    make_env,
    make_model,
    make_tokenizer,
    make_wrapper,
    rows_of,
    sample_chats,
)
from torchrl_kl import (
    AdaptiveKLController,
    CausalLMActor,
    ConstantKLController,
    KLMonitor,
    ResponseKLTransform,
    as_steps,
)

pytestmark = [pytest.mark.usefixtures("lists_are_stacked"), *DEPRECATED]


def sum_rows(rows):
    return torch.stack([row[row.isfinite()].sum() for row in rows])


def our_log_probs(model, batch, **options):
    """Of each response, nats."""
    return sum_rows(rows_of(ResponseKLTransform(model, 0.1, **options)(batch), "log_probs", "full"))


class TestSampling:
    """The log-probs that TransformersWrapper records as it samples."""

    @pytest.mark.parametrize("kind", ["llama", "qwen2"])
    def test_first_token_has_the_log_prob_zero(self, kind):
        tokenizer = make_tokenizer()
        model = make_model(kind, tokenizer)
        batch = sample_chats(model, tokenizer)
        recorded = rows_of(batch, "log_probs", "response")
        assert all(row[0] == 0 for row in recorded)
        theirs = sum_rows(recorded) - our_log_probs(model, batch)
        assert theirs.mean() > 1  # nats, the "KL" of a policy to itself
        ours = ResponseKLTransform(model, 0.1)(batch)["next", "kl"]
        assert ours.abs().max() < 1e-5

    def test_log_probs_ignore_the_temperature(self):
        tokenizer = make_tokenizer()
        model = make_model("llama", tokenizer)
        batch = sample_chats(model, tokenizer, generate_kwargs={"temperature": 0.7})
        recorded = sum_rows([row[1:] for row in rows_of(batch, "log_probs", "response")])
        firsts = [
            [row[row.isfinite()][0] for row in rows_of(result, "log_probs", "full")]
            for result in (
                ResponseKLTransform(model, 0.1, temperature=temperature)(batch)
                for temperature in (0.7, 1.0)
            )
        ]
        ours = our_log_probs(model, batch, temperature=0.7) - torch.stack(firsts[0])
        at_one = our_log_probs(model, batch) - torch.stack(firsts[1])
        assert_close(recorded, at_one, atol=1e-3, rtol=0)  # not those of the sampler
        assert (ours - recorded).abs().max() > 1

    def test_end_tokens_are_lost_where_they_are_the_pad_token(self):
        tokenizer = make_tokenizer(pad_is_eos=True)
        model, end = make_model("qwen2", tokenizer), tokenizer.eos_token_id
        questions = QUESTIONS * 8
        torch.manual_seed(0)
        theirs = sample_chats(model, tokenizer, "text", questions)
        responses = rows_of(theirs, "tokens", "response")
        ended = sum(len(row) < 10 for row in responses)
        assert ended > 0
        assert not any((row == end).any() for row in responses)
        torch.manual_seed(0)
        padded = sample_chats(model, tokenizer, "text", questions, pad_output=True)
        steps = as_steps(padded, pad_token=end, eos_token=end)
        last = steps["action"][steps["next", "done"][..., 0]]
        assert (last == end).sum() == ended

    def test_whole_texts_have_no_log_probs_for_the_loss(self):
        tokenizer = make_tokenizer()
        model = make_model("llama", tokenizer)
        batch = sample_chats(model, tokenizer, pad_output=True)
        advantage = torch.ones(3, 1, 1)
        loss = make_loss(model, tokenizer)
        with pytest.raises(KeyError, match="Couldn't find the log-prob"):
            loss(batch.copy().set("advantage", advantage))
        values = loss(ResponseKLTransform(model, 0.1)(batch).set("advantage", advantage))
        assert values.kl_approx.abs() < 1e-5

    def test_sampled_tokens_are_tokenised_again(self):
        tokenizer = make_tokenizer()
        model = make_model("llama", tokenizer)
        batch = sample_chats(model, tokenizer, "history", QUESTIONS * 8)
        sampled = rows_of(batch, "tokens", "full")
        scorer = make_wrapper(model, tokenizer, "history", generate=False)
        again = rows_of(scorer(batch.copy()), "tokens", "full")
        same = [
            len(one) <= len(two) and two[: len(one)].equal(one)
            for one, two in zip(sampled, again, strict=True)
        ]
        assert sum(same) < len(same)
        result = ResponseKLTransform(model, 0.1)(batch)
        for one, scores in zip(sampled, rows_of(result, "log_probs", "full"), strict=True):
            assert len(one) == len(scores)


def make_loss(model, tokenizer, **options):
    policy = make_wrapper(
        *(model, tokenizer, "tokens"), generate=False, pad_output=True, pad_model_input=True
    )
    return GRPOLoss(policy, entropy_bonus=False, **options)


class TestScoring:
    """The log-probs that TransformersWrapper computes of given texts."""

    def test_gpt2_cannot_be_scored(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("gpt2", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer)
        scorer = make_wrapper(model, tokenizer, "tokens", generate=False)
        with pytest.raises(Exception, match=r"."):  # its mask is taken for cached keys
            scorer(batch)
        kl = ResponseKLTransform(model, 0.1, reference=reference)(batch)["next", "kl"]
        assert kl.isfinite().all()

    @pytest.mark.parametrize("in_model", [False, True])
    def test_grpo_scores_at_temperature_one(self, in_model):
        """Its first ratios are 1 only if the model divides its logits itself."""
        tokenizer = make_tokenizer()
        model = without_tokens(make_model("llama", tokenizer), tokenizer.pad_token_id)

        def divide_logits(model, args, output):
            output.logits = output.logits / 0.7

        if in_model:
            model.register_forward_hook(divide_logits)
        temperature = 1.0 if in_model else 0.7
        sampling = {"pad_output": True, "generate_kwargs": {"temperature": temperature}}
        batch = sample_chats(model, tokenizer, "text", QUESTIONS * 8, **sampling)
        scored = ResponseKLTransform(model, 0.0, temperature=temperature)(batch)
        scored["advantage"] = torch.randn(24, 1, 1, generator=torch.Generator().manual_seed(0))
        theirs = make_loss(model, tokenizer)(scored)
        assert (theirs.clip_fraction == 0) == in_model
        # The same objective, exact at any temperature.
        steps = as_steps(scored, pad_token=tokenizer.pad_token_id)
        steps["advantage"] = scored["advantage"].expand(*steps.shape, 1)
        actor = CausalLMActor(model, temperature=temperature)
        loss = ClipPPOLoss(actor, None, critic_coeff=None, entropy_bonus=False)
        ours = loss(steps[steps["collector", "mask"]])
        assert ours["kl_approx"].abs() < 1e-5
        difference = ours["loss_objective"] - theirs.loss_objective.squeeze()
        assert (difference.abs() < 1e-5) == in_model

    def test_packed_texts_are_not_read_causally(self):
        tokenizer = make_tokenizer()
        model = make_model("llama", tokenizer)
        batch = sample_chats(model, tokenizer, pad_output=False)
        scorer = make_wrapper(model, tokenizer, "tokens", generate=False, pad_model_input=False)
        changed = batch.clone()
        for row in rows_of(changed, "tokens", "full"):
            row[-1] = (row[-1] + 1) % len(tokenizer)

        @torch.no_grad()
        def largest_move(score):
            scores = (rows_of(score(one.copy()), "log_probs", "full") for one in (batch, changed))
            moves = [(a - b)[:-1].nan_to_num().abs().max() for a, b in zip(*scores, strict=True)]
            return max(moves)

        assert largest_move(scorer) > 1  # nats, of tokens before the one that was changed
        assert largest_move(ResponseKLTransform(model, 0.1)) < 1e-4


class TestPenalty:
    def test_task_reward_is_paid_once_per_token(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer)
        ours = ResponseKLTransform(model, 0.1, reference=reference)(batch)
        following = ours["next"].copy()
        following["log_probs"] = ours["log_probs"]
        following["reward"] = batch["next", "reward"]
        transform = KLComputation(coeff=0.1)
        rows = lazy_stack(list(TensorDict(next=following, batch_size=3).unbind(0)))
        paid = sum_rows(transform(rows)["next"].get("reward", as_list=True))
        widths = torch.tensor([len(row) for row in rows_of(batch, "tokens", "full")])
        penalties = 0.1 * ours["next", "kl"].flatten()
        assert_close(paid, widths - penalties, atol=1e-4, rtol=0)
        assert_close(ours["next", "reward"].flatten(), 1 - penalties, atol=1e-5, rtol=0)

    def test_prompt_tokens_are_penalized(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, "tokens")
        scorers = [
            make_wrapper(one, tokenizer, "tokens", generate=False, log_probs_key=key)
            for one, key in ((model, "log_probs"), (reference, "ref_log_probs"))
        ]
        transform = RetrieveKL(*scorers, assistant_only=False, add_to_reward=False)
        result = transform(batch.clone())
        theirs = sum_rows(list(result["next", "kl_penalty"].unbind(0)))
        ours = ResponseKLTransform(model, 0.1, reference=reference)(batch)["next", "kl"].flatten()
        assert (theirs - ours).abs().min() > 1

    def test_buffers_cannot_hold_the_transform(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer)
        scorer = make_wrapper(reference, tokenizer, "tokens", generate=False)
        buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=3)
        buffer.append_transform(KLRewardTransform(scorer), invert=True)
        with pytest.raises(KeyError):
            buffer.extend(batch)
        buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=3)
        transform = ResponseKLTransform(model, 0.1, reference=reference)
        buffer.append_transform(transform, invert=True)
        buffer.extend(batch)
        assert buffer.sample()["next", "kl"].isfinite().all()

    @pytest.mark.parametrize("pad_output", [False, True])
    def test_both_in_one_run(self, pad_output):
        """KLRewardTransform in the env, which writes tensors where ours has TensorDicts."""
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        policy, *scorers = (
            make_wrapper(one, tokenizer, mode, generate=generate, pad_output=pad_output)
            for one, mode, generate in (
                *((model, "text", True), (model, "tokens", False)),
                (reference, "tokens", False),
            )
        )
        theirs = KLRewardTransform(scorers[1], add_to_reward=False)
        env = make_env(tokenizer).append_transform(theirs)
        batch = policy(env.reset(TensorDict(query=QUESTIONS, batch_size=3)))
        batch = env.step(batch.update(scorers[0](batch.clone())))
        batch["next", "reward"] = torch.zeros(3, 1, 1)
        rows = batch["next", "kl_penalty"].unbind(0)
        result = ResponseKLTransform(model, 0.1, reference=reference)(batch)
        assert_close(result["next", "kl"].flatten(), sum_rows(rows), atol=1e-4, rtol=0)


class TestControl:
    @pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
    def test_controller_lowers_the_coefficient_above_the_target(self):
        theirs = TorchRLController(init_kl_coef=0.1, target=1.0, horizon=100)
        ours = AdaptiveKLController(0.1, target=1.0, horizon=100)
        assert theirs.update([5.0] * 10) < 0.1 < ours.update(5.0, 10)

    def test_kl_in_the_loss_is_diluted_by_prompts_and_padding(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, pad_output=True)
        scored = ResponseKLTransform(model, 0.1, reference=reference)(batch)
        scored["advantage"] = torch.zeros(3, 1, 1)
        values = make_loss(model, tokenizer, kl_to_ref_coeff=1.0)(scored)
        ratio = scored["next", "ref_log_probs", "full"] - scored["log_probs", "full"]
        mask = ratio.isfinite()
        k3 = (ratio.expm1() - ratio)[mask]
        diluted = k3.mean() * mask.float().mean()
        assert_close(values.kl_to_ref, diluted, atol=1e-3, rtol=1e-3)
        assert mask.float().mean() < 0.5

    def test_std_of_groups_divides_the_coefficient_away(self):
        """With equal task rewards, advantages do not depend on how large the coefficient is."""
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, "text", QUESTIONS[:1] * 4)
        batch["next", "done"] = torch.ones(4, 1, dtype=torch.bool)
        advantages = []
        for coeff in (0.01, 1.0, 100.0):
            penalized = ResponseKLTransform(model, coeff, reference=reference)(batch)
            group = MCAdvantage(grpo_size=4)
            rewards = penalized["next", "reward"].flatten()
            result = None
            for row in penalized.unbind(0):
                result = group.inv(row.unsqueeze(0))
            assert result is not None
            advantages.append(result["advantage"].flatten())
            assert rewards.std() > 1e-3 * coeff
        for other in advantages[1:]:
            assert_close(other, advantages[0], atol=1e-2, rtol=0)


def without_tokens(model, *tokens):
    """A model that never draws some tokens."""
    old = model.get_output_embeddings()
    new = torch.nn.Linear(old.in_features, old.out_features)
    with torch.no_grad():
        new.weight.copy_(old.weight)
        new.bias.zero_()[list(tokens)] = -40.0
    model.set_output_embeddings(new)
    return model


class TestMonitor:
    """What KLMonitor says of batches that TorchRL samples, scores and cuts."""

    def make(self, *, pad_is_eos=False, kind="llama", pads=False):
        tokenizer = make_tokenizer(pad_is_eos=pad_is_eos)
        model = make_model(kind, tokenizer)
        return tokenizer, model if pads else without_tokens(model, tokenizer.pad_token_id)

    def watch(self, model, *batches, temperature=1.0) -> dict[str, Any]:
        actor = CausalLMActor(model, temperature=temperature)
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor, check_every=1)
        messages = [message for batch in batches for message in monitor(batch)]
        return {message.condition: message.text for message in messages}

    @pytest.mark.parametrize("mode", ["history", "text", "tokens"])
    @pytest.mark.parametrize("padded", [False, True])
    def test_first_token_is_all_that_is_wrong(self, mode, padded):
        tokenizer, model = self.make()
        questions = QUESTIONS[:1] * 8 if mode == "tokens" else QUESTIONS * 3
        batch = sample_chats(model, tokenizer, mode, questions, pad_output=padded)
        scored = ResponseKLTransform(model, 0.1)(batch)
        steps = as_steps(batch, pad_token=tokenizer.pad_token_id)
        for form in (batch, scored, steps):
            said = self.watch(model, form)
            assert set(said) == {"first_token_zero"}
            n = len(questions)
            assert f"The first token of {n} of {n} responses" in said["first_token_zero"]

    def test_pad_tokens_are_cut_out(self):
        tokenizer, model = self.make(pads=True)
        batch = sample_chats(model, tokenizer, "text", QUESTIONS * 8)
        said = self.watch(model, batch)
        assert set(said) == {"first_token_zero", "tokens_cut"}
        assert f"tokens with the id {tokenizer.pad_token_id} are put back" in said["tokens_cut"]
        padded = sample_chats(model, tokenizer, "text", QUESTIONS * 8, pad_output=True)
        assert set(self.watch(model, padded)) == {"first_token_zero"}

    def test_end_tokens_are_cut_out(self):
        tokenizer, model = self.make(pad_is_eos=True, pads=True)
        batches = [sample_chats(model, tokenizer, "text", QUESTIONS * 8) for _ in range(8)]
        said = self.watch(model, *batches)
        assert set(said) == {"first_token_zero", "tokens_cut"}
        assert f"is the end token {tokenizer.eos_token_id}, though" in said["tokens_cut"]
        padded = [
            sample_chats(model, tokenizer, "text", QUESTIONS * 8, pad_output=True) for _ in range(8)
        ]
        assert set(self.watch(model, *padded)) == {"first_token_zero"}

    def test_log_probs_of_a_text_that_was_tokenised_again(self):
        tokenizer, model = self.make()
        batch = sample_chats(model, tokenizer, "history", QUESTIONS * 3)
        scorer = make_wrapper(model, tokenizer, "history", generate=False)
        mixed = batch.copy()
        mixed["log_probs"] = scorer(batch.copy())["log_probs"]
        said = self.watch(model, mixed)
        assert set(said) == {"retokenised"}
        assert "`input_mode='tokens'` for a wrapper that has" in said["retokenised"]

    @pytest.mark.parametrize(
        ("sampling", "seen"),
        [
            ({"temperature": 0.6}, "a lower temperature (near 0."),
            ({"top_k": 8}, "top-k sampling with k near 10"),
            ({"top_p": 0.7}, "top-p sampling with p near 0.7"),
        ],
    )
    def test_sampler_and_scorer_have_other_settings(self, sampling, seen):
        tokenizer, model = self.make()
        batches = [
            sample_chats(model, tokenizer, "text", QUESTIONS * 8, generate_kwargs=sampling)
            for _ in range(4)
        ]
        said = self.watch(model, *batches)
        assert set(said) == {"first_token_zero", "sampler_disagrees"}
        assert f"They look like {seen}" in said["sampler_disagrees"]
        assert "there `top_k` to 0 (it is 50 by default)" in said["sampler_disagrees"]

    def test_recorded_at_another_temperature_than_sampled(self):
        tokenizer, model = self.make()
        sampling = {"temperature": 0.5}
        batch = sample_chats(model, tokenizer, "text", QUESTIONS * 8, generate_kwargs=sampling)
        said = self.watch(model, batch, temperature=0.5)
        assert set(said) == {"first_token_zero", "sampler_disagrees"}
        assert "log-probs are the actor's at temperature 2. " in said["sampler_disagrees"]
        scored = ResponseKLTransform(model, 0.1, temperature=0.5)(batch)
        scored["log_probs"] = scored["log_probs"].exclude("response")
        assert self.watch(model, scored, temperature=0.5) == {}

    def test_wrappers_are_refused_as_actors(self):
        tokenizer, model = self.make()
        wrapper = make_wrapper(model, tokenizer)
        with pytest.raises(TypeError, match=r"or CausalLMActor\(wrapper\.model\) where an actor"):
            KLMonitor(ConstantKLController(0.1), actor=wrapper)
