"""`as_steps` on batches of TorchRL's LLM API, and where ResponseKLTransform takes them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, InitTracker, StepCounter
from torchrl.envs.llm import ChatEnv
from transformers import BertConfig, BertLMHeadModel

from tests.language.chats import (
    COEFF,
    DEPRECATED,
    QUESTIONS,
    make_dialogs,
    make_env,
    make_model,
    make_tokenizer,
    make_wrapper,
    rows_of,
    rows_of_log_probs,
    sample_chats,
)
from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    CausalLMActor,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLPenaltyLoss,
    ReferenceModelLogProbTransform,
    ResponseKLTransform,
    as_steps,
    sample_responses,
)

pytestmark = [pytest.mark.usefixtures("lists_are_stacked"), *DEPRECATED]


class TestSteps:
    def test_layout_is_that_of_sample_responses(self):
        actor = CausalLMActor(GPT(vocab_size=11, block_size=12))
        prompts = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
        expected = sample_responses(
            *(actor, prompts, 5),
            pad_token=10,
            eos_token=7,
            reward_fn=lambda texts: texts.float().mean(-1),
        )
        texts, mask = expected["tokens"][:, 0], expected["collector", "mask"]
        tokens = [
            TensorDict(full=text[: len(prompt) + int(n)], prompt=prompt)
            for text, prompt, n in zip(texts, prompts, mask.sum(1), strict=True)
        ]
        batch = TensorDict(tokens=lazy_stack(tokens), batch_size=2)
        batch["next"] = TensorDict(reward=expected["next", "reward"].sum(1), batch_size=2)
        steps = as_steps(batch, pad_token=10, eos_token=7)
        assert steps.names == expected.names
        n_steps, width = steps.shape[1], steps["tokens"].shape[-1]
        assert steps["tokens"].stride(1) == 0
        for key in expected.keys(True, True):
            if key == "action_log_prob":
                continue
            value, other = steps[key], expected[key][:, :n_steps]
            if "tokens" in (key, key[-1]):
                other = other[..., :width]
            where = steps["collector", "mask"]
            assert value.dtype == other.dtype
            assert value[where].equal(other[where]), key

    def test_turns_of_a_dialog_follow_one_another(self):
        batch = make_dialogs(make_tokenizer())
        steps = as_steps(batch, pad_token=0)
        mask, position = steps["collector", "mask"], steps["position"]
        masks = rows_of(batch, "masks", "all_assistant_mask")
        for i, one in enumerate(masks):
            assert position[i][mask[i]].equal(one.nonzero()[:, 0])
        both = mask[:, 1:]
        assert steps["next", "position"][:, :-1][both].equal(position[:, 1:][both])
        assert steps["next", "done"].sum() == len(masks)

    def test_prompt_and_mask_count_what_both_have(self):
        batch = make_dialogs(make_tokenizer(), pad_output=False)
        fulls = rows_of(batch, "tokens", "full")
        masks = rows_of(batch, "masks", "all_assistant_mask")
        ends = [40, 25]
        for i, row in enumerate(fulls[1:2]):
            tokens = TensorDict(full=row[None], prompt=row[None, : ends[i]], batch_size=1)
            entry = TensorDict(all_assistant_mask=masks[1][None], batch_size=1)
            steps = as_steps(TensorDict(tokens=tokens, masks=entry, batch_size=1), pad_token=0)
            counted = masks[1].nonzero()[:, 0]
            assert steps["position"].flatten().equal(counted[counted >= ends[i]])

    @pytest.mark.parametrize("source", ["argument", "generation_config"])
    def test_several_tokens_end_a_response(self, source):
        """Also where one of them pads: after another one, it is padding."""
        full = torch.tensor([[5, 6, 7, 4, 3, 3], [5, 6, 7, 8, 3, 3], [5, 6, 7, 8, 9, 9]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=3)
        steps = as_steps(batch, pad_token=3, eos_token=[3, 4])
        assert steps["collector", "mask"].sum(1).tolist() == [2, 3, 4]
        assert steps["next", "terminated"].sum((1, 2)).tolist() == [1, 1, 0]
        assert steps["next", "truncated"].sum((1, 2)).tolist() == [0, 0, 1]
        gpt, ends = GPT(11, 8), [3, 4]
        if source == "generation_config":
            gpt.generation_config = SimpleNamespace(pad_token_id=3, eos_token_id=ends)  # type: ignore[assignment]
            options = {}
        else:
            options = {"pad_token": 3, "eos_token": ends}
        batch["next"] = TensorDict(reward=torch.ones(3, 1), batch_size=3)
        log_probs = ResponseKLTransform(gpt, COEFF, **options)(batch)["log_probs", "full"]
        assert log_probs.isfinite().sum(1).tolist() == [2, 3, 4]

    def test_an_end_token_alone_is_a_response_where_prompts_end_with_one_too(self):
        full = torch.tensor([[5, 6, 3, 3, 3, 3], [5, 6, 3, 7, 3, 3]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :3]}, batch_size=2)
        steps = as_steps(batch, pad_token=3, eos_token=3)
        assert steps["collector", "mask"].sum(1).tolist() == [1, 2]
        assert steps["action"][0, 0] == 3
        assert steps["next", "terminated"].sum((1, 2)).tolist() == [1, 1]

    def test_a_text_of_which_the_mask_leaves_nothing_has_no_response(self):
        full = torch.tensor([[5, 6, 7, 8], [0, 0, 0, 0]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=2)
        batch["masks"] = TensorDict(all_attention_mask=full > 0, batch_size=2)
        steps = as_steps(batch, pad_token=0, eos_token=9)
        assert steps["collector", "mask"].sum(1).tolist() == [2, 0]

    @pytest.mark.parametrize("token", [-1, None])
    def test_a_configuration_without_an_end_token(self, token):
        gpt = GPT(11, 8)
        gpt.config = SimpleNamespace(pad_token_id=0, eos_token_id=token)  # type: ignore[assignment]
        assert ResponseKLTransform(gpt, COEFF).eos_token is None

    def test_the_configuration_of_a_parallel_model_is_that_of_what_it_holds(self):
        gpt = GPT(11, 8)
        gpt.config = SimpleNamespace(pad_token_id=3, eos_token_id=[3, 4])  # type: ignore[assignment]
        assert ResponseKLTransform(nn.DataParallel(gpt), COEFF).eos_token == (3, 4)

    @pytest.mark.parametrize("token", ["</s>", ["</s>"], 3.0])
    def test_an_end_token_is_an_id(self, token):
        full = torch.tensor([[5, 6, 7, 4, 3, 3]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=1)
        with pytest.raises(TypeError, match=r"`eos_token` must be the id .* got .*: pass `tokeni"):
            as_steps(batch, pad_token=3, eos_token=token)

    @pytest.mark.parametrize("before_texts", ["<|im_start|>", "<|im_end|>"])
    def test_padding_with_another_token_is_refused(self, before_texts):
        """In a chat, the first of them is in the template as well, and the second is not."""
        tokenizer = make_tokenizer(before_texts=before_texts)
        model = make_model("llama", tokenizer)
        measure = ResponseKLTransform(model, COEFF, reference=make_model("llama", tokenizer, 1))
        torch.manual_seed(0)
        expected = measure(sample_chats(model, tokenizer, "history", pad_output=False))
        torch.manual_seed(0)
        padded = sample_chats(model, tokenizer, "history", pad_output=True)
        token = tokenizer.convert_tokens_to_ids(before_texts)
        with pytest.raises(ValueError, match=rf"begin with [01] to 1[01] tokens {token}, none of"):
            measure(padded)
        wrapper = make_wrapper(model, tokenizer, "history", pad_output=True)
        wrapper.padding_value = tokenizer.pad_token_id
        torch.manual_seed(0)
        padded = sample_chats(model, tokenizer, "history", wrapper=wrapper)
        assert_close(measure(padded)["next", "kl"], expected["next", "kl"], atol=1e-4, rtol=0)

    @pytest.mark.parametrize("padded", [False, True])
    def test_chats_without_a_header_may_begin_with_several_of_one_token(self, padded):
        prompts, response = [[5, 5, 5, 6], [5, 6], [5, 5, 6]], [7, 8]
        rows = []
        for prompt in prompts:
            pads = [0] * (4 - len(prompt)) if padded else []
            full = torch.tensor([*pads, *prompt, *response])
            tokens = TensorDict(full=full, prompt=full[:-2])
            masks = TensorDict(all_attention_mask=full != 0)
            history = TensorDict(prompt=TensorDict(content="a question"))
            rows.append(TensorDict(tokens=tokens, masks=masks, history=history))
        steps = as_steps(lazy_stack(rows), pad_token=0)
        assert steps["position"].tolist() == [[4, 5], [2, 3], [3, 4]]

    def test_models_that_see_later_tokens_are_warned_of_once(self):
        config = BertConfig(
            vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1
        )
        model = BertLMHeadModel(config).eval()
        full = torch.tensor([[5, 6, 7, 8]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=1)
        batch["next"] = TensorDict(reward=torch.ones(1, 1), batch_size=1)
        measure = ResponseKLTransform(model, COEFF, pad_token=0)
        with pytest.warns(UserWarning, match="depend on later tokens.* not that of texts that it"):
            measure(batch)
        measure(batch)

    def test_a_prompt_is_not_of_padding_only(self):
        """As where the pad token is also the token before each text, and nothing else is asked."""
        full = torch.tensor([[0, 0, 7, 8], [0, 5, 7, 0]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=2)
        steps = as_steps(batch, pad_token=0)
        assert steps["position"][:, 0].tolist() == [1, 1]
        assert steps["tokens"][:, 0].tolist() == [[0, 7, 8], [5, 7, 0]]
        assert steps["collector", "mask"].tolist() == [[True, True], [True, False]]

    def test_padding_without_a_mask_is_told_by_the_pad_token(self):
        tokens = TensorDict(
            full=torch.tensor([[0, 5, 7, 8, 0, 9, 0], [6, 5, 7, 8, 7, 9, 3]]),
            prompt=torch.tensor([[0, 5], [6, 5]]),
            batch_size=2,
        )
        steps = as_steps(TensorDict(tokens=tokens, batch_size=2), pad_token=0)
        # A pad token inside a response was sampled.
        assert steps["action"][0][steps["collector", "mask"][0]].tolist() == [7, 8, 0, 9]
        assert steps["action"][1].tolist() == [7, 8, 7, 9, 3]
        assert steps["position"][0, :4].tolist() == [1, 2, 3, 4]

    @pytest.mark.parametrize("with_mask", [True, False])
    def test_prompts_padded_on_the_right_are_refused(self, with_mask):
        full = torch.tensor([[5, 6, 0, 0, 7, 8], [5, 6, 7, 8, 9, 0]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :4]}, batch_size=2)
        if with_mask:
            batch["masks"] = TensorDict(all_attention_mask=full != 0, batch_size=2)
        with pytest.raises(ValueError, match="on the left, but that of element 0 ends with paddi"):
            as_steps(batch, pad_token=0)

    @pytest.mark.parametrize(("padding", "pad_token"), [(0, None), (3, None), (0, 4)])
    def test_padding_that_counts_as_text_is_warned_of(self, padding, pad_token):
        """As where neither the model's configuration nor the batch tells the padding."""
        full = torch.tensor([[5, 6, 7, 3, *[padding] * 2], [5, 6, 7, 8, 3, padding], [5] * 5 + [3]])
        tokens = TensorDict(full=full, prompt=full[:, :2], batch_size=3)
        batch = TensorDict(tokens=tokens, batch_size=3)
        unpadded: Any = batch[2:]
        with pytest.warns(UserWarning, match=f"looks like padding.*`pad_token={padding}`, or"):
            as_steps(batch, pad_token=pad_token, eos_token=[3, 9])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            as_steps(batch, pad_token=padding, eos_token=3)
            as_steps(unpadded, pad_token=None, eos_token=3)
            as_steps(batch, pad_token=None)  # without end tokens
            batch["tokens", "full"][1, 5] = 7  # texts that go on, with different tokens
            as_steps(batch, pad_token=None, eos_token=3)

    def test_padded_rows_of_a_lazy_stack_are_warned_of(self):
        """As samples of a LazyStackStorage are, where only a mask tells padding from text."""
        rows = [[5, 6, 7, 3, 0, 0], [5, 6, 7, 8, 3, 0]]
        tokens = [TensorDict(full=torch.tensor(row), prompt=torch.tensor([5, 6])) for row in rows]
        batch: Any = lazy_stack([TensorDict(tokens=each) for each in tokens])
        with pytest.warns(UserWarning, match="looks like padding.*all_attention_mask"):
            assert as_steps(batch, pad_token=0, eos_token=3).shape == (2, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            as_steps(batch, pad_token=4, eos_token=3)  # such as a line break after each turn
            as_steps(batch, pad_token=0)
            as_steps(batch[1:], pad_token=0, eos_token=(3, 0))  # the end of a turn and of a text
            masks = [TensorDict(all_attention_mask=torch.tensor(row) != 0) for row in rows]
            for part, mask in zip(batch.unbind(0), masks, strict=True):
                part["masks"] = mask
            assert as_steps(batch, pad_token=0, eos_token=3).shape == (2, 3)

    @pytest.mark.parametrize("length", [3, 5])
    @pytest.mark.parametrize("name", ["all_attention_mask", "all_assistant_mask"])
    def test_masks_of_another_length_are_refused(self, name, length):
        tokens = TensorDict(full=torch.tensor([[5, 6, 7, 8]]), prompt=torch.tensor([[5]]))
        masks = TensorDict({name: torch.ones(1, length, dtype=torch.bool)})
        batch = TensorDict(tokens=tokens, masks=masks, batch_size=1)
        text = rf"\('masks', '{name}'\) must have .* got {length} for the 4 tokens of element 0"
        with pytest.raises(ValueError, match=text):
            as_steps(batch, pad_token=0)

    @pytest.mark.parametrize("last", [-1, 11])
    def test_tokens_outside_the_vocabulary_are_refused(self, last):
        tokens = TensorDict(full=torch.tensor([[5, 6, last]]), prompt=torch.tensor([[5]]))
        following = TensorDict(reward=torch.ones(1, 1), batch_size=1)
        batch = TensorDict(tokens=tokens, next=following, batch_size=1)
        transform = ResponseKLTransform(GPT(vocab_size=11, block_size=8), 0.1)
        with pytest.raises(ValueError, match=r"must be ids of the model's vocabulary, 0 to 10, go"):
            transform(batch)

    def test_a_pad_token_outside_the_vocabulary_is_named(self):
        texts = [torch.tensor([5, 6, 7]), torch.tensor([5, 6])]
        rows = [TensorDict(full=text, prompt=text[:1]) for text in texts]
        batch = TensorDict(tokens=lazy_stack(rows), batch_size=2)
        batch["next"] = TensorDict(reward=torch.ones(2, 1), batch_size=2)
        transform = ResponseKLTransform(GPT(vocab_size=11, block_size=8), 0.1, pad_token=11)
        with pytest.raises(ValueError, match="got 5 to 11: .* `pad_token` = 11, which must be one"):
            transform(batch)

    @pytest.mark.parametrize("padded", [False, True])
    def test_scored_log_probs_are_those_of_the_steps(self, padded):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, pad_output=padded)
        assert "action_log_prob" not in as_steps(batch, pad_token=0)
        steps = as_steps(ResponseKLTransform(model, 0.0)(batch), pad_token=0)
        actor, mask = CausalLMActor(model), steps["collector", "mask"]
        expected = torch.where(mask, rows_of_log_probs(actor, steps), 0.0)
        assert_close(steps["action_log_prob"], expected, atol=1e-5, rtol=0)
        # The loss takes such steps, and its KL is that of the exact estimator.
        other = CausalLMActor(reference)
        loss = KLPenaltyLoss(actor, 1.0, gradient="sequence", reference=other)
        exact = ResponseKLTransform(model, COEFF, reference=reference, estimator="exact")
        total = exact(batch)["next", "kl_estimate"].sum() / mask.sum()
        assert_close(loss(steps)["kl"], total, atol=1e-4, rtol=0)

    @pytest.mark.parametrize("shape", [(4, 1), (4, 1, 1)])
    def test_steps_of_penalized_rewards_are_not_penalized_again(self, shape):
        full, model = torch.randint(2, 11, (4, 7)), GPT(vocab_size=11, block_size=8)
        tokens = TensorDict(full=full, prompt=full[:, :3], batch_size=4)
        batch = TensorDict(tokens=tokens, next={"reward": torch.ones(shape)}, batch_size=4)
        actor = CausalLMActor(model)
        stack, loss = KLConstrainedTransform(actor, 0.1), KLPenaltyLoss(actor, 0.1)
        penalized = as_steps(ResponseKLTransform(model, 0.3)(batch), pad_token=0)
        assert penalized["next", "kl_coeff"].eq(0.3).all()
        for part, text in ((stack, "penalized for its KL before"), (loss, "penalize the KL again")):
            with pytest.raises(RuntimeError, match=text):
                part(penalized)
        measured = as_steps(ResponseKLTransform(model, 0.0)(batch), pad_token=0)
        assert stack(measured)["next", "kl"].abs().max() < 1e-5
        assert loss(measured)["kl"] < 1e-5

    def test_the_first_token_of_a_text_has_no_log_prob(self):
        tokens = TensorDict(full=torch.tensor([[5, 6]]), prompt=torch.zeros(1, 0).long())
        steps = as_steps(TensorDict(tokens=tokens, batch_size=1), pad_token=0)
        assert steps["position"].tolist() == [[1]]


class TestPlaces:
    @pytest.mark.parametrize("mode", ["history", "text"])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("flat", [False, True])
    def test_postproc_of_a_collector(self, mode, padded, flat):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        transform = ResponseKLTransform(model, COEFF, reference=reference)
        seen = []

        def postproc(batch):
            batch["next", "reward"] = torch.ones(*batch.batch_size, 1, 1)
            seen.append(batch)
            return transform(batch)

        collector = make_collector(
            tokenizer, model, mode, postproc=postproc, flatten_data=flat, pad_output=padded
        )
        batch = next(iter(collector))
        assert batch.batch_size == ((6,) if flat else (3, 2))
        expected = transform(seen[0].reshape(-1))["next", "kl"]
        assert_close(batch["next", "kl"].reshape(-1), expected.reshape(-1), atol=1e-5, rtol=0)
        assert expected.abs().min() > 1e-3

    def test_replay_buffer_scores_once_and_moves_the_controller(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        controller = AdaptiveKLController(COEFF, target=1.0, horizon=10)
        transform = ResponseKLTransform(model, controller, reference=reference)
        buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
        buffer.append_transform(transform, invert=True)
        batch = sample_chats(model, tokenizer)
        expected = ResponseKLTransform(model, COEFF, reference=reference)(batch)["next"]
        buffer.extend(batch)
        assert controller.coeff > COEFF
        coeff = controller.coeff.item()
        sample = buffer.sample()
        assert controller.coeff == coeff
        assert {float(v) for v in sample["next", "kl"].flatten()} <= {
            float(v) for v in expected["kl"].flatten()
        }

    def test_parts_in_a_replay_buffer(self):
        actor, other = (CausalLMActor(GPT(vocab_size=11, block_size=8)) for _ in range(2))
        parts = (ReferenceModelLogProbTransform(other), KLDivergenceTransform())
        steps = sample_responses(actor, torch.tensor([[1, 2, 3], [4, 5, 6]]), 4, pad_token=10)
        buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2)
        for part in reversed(parts):  # a buffer inverts the last one first
            buffer.append_transform(part, invert=True)
        buffer.extend(steps)
        expected = KLConstrainedTransform(actor, 0.1, reference=other)(steps)["next", "kl"]
        assert buffer[:]["next", "kl"].equal(expected)

    def test_stack_in_a_replay_buffer(self):
        actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        controller = AdaptiveKLController(0.1, target=1.0, horizon=10)
        stack = KLConstrainedTransform(actor, controller)
        buffer = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2)
        buffer.append_transform(stack, invert=True)
        steps = sample_responses(actor, torch.tensor([[1, 2, 3], [4, 5, 6]]), 4, pad_token=10)
        buffer.extend(steps)
        assert controller.coeff < 0.1
        assert not stack.training
        assert buffer.sample()["next", "kl_coeff"].allclose(torch.tensor(0.1))

    def test_envs_are_refused(self):
        env = make_env(make_tokenizer())
        with pytest.raises(RuntimeError, match=r"whole batches, not in an env: pass it as `LLMC"):
            env.append_transform(ResponseKLTransform(GPT(vocab_size=11, block_size=8), 0.1))

    def test_eval_and_freeze_stop_the_controller(self):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer)
        controller = AdaptiveKLController(COEFF, target=1.0, horizon=10)
        transform = ResponseKLTransform(model, controller, reference=reference)
        for still in (transform.eval, transform.freeze):
            still()
            transform(batch)
            assert controller.coeff == COEFF
            transform.train()
        transform.unfreeze()(batch)
        assert controller.coeff > COEFF

    @pytest.mark.parametrize("per", ["trajectory", "step"])
    def test_controller_is_fed_responses_or_tokens(self, per):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer)
        controller = AdaptiveKLController(COEFF, target=1.0, horizon=10_000, per=per)
        options = {"reference": reference, "update_every": 10_000}
        transform = ResponseKLTransform(model, controller, **options)
        total = transform(batch)["next", "kl"].sum()
        n_tokens = sum(map(len, rows_of(batch, "tokens", "response")))
        statistics = transform.statistics
        assert statistics.count == (3 if per == "trajectory" else n_tokens)
        assert_close(float(statistics.mean * statistics.count), float(total), atol=1e-4, rtol=0)


def make_collector(tokenizer, model, mode, *, postproc, flatten_data, pad_output):
    loader = DataLoader(
        QUESTIONS * 10,  # type: ignore[arg-type]
        batch_size=3,
        collate_fn=lambda items: TensorDict(query=list(items), batch_size=(len(items),)),
    )
    env = ChatEnv.from_dataloader(
        loader, tokenizer=tokenizer, input_mode=mode, batch_size=(3,), repeats=1
    ).append_transform(Compose(InitTracker(), StepCounter(max_steps=1)))  # type: ignore[call-arg]
    return LLMCollector(
        env,
        policy=make_wrapper(model, tokenizer, mode, pad_output=pad_output),
        dialog_turns_per_batch=6,
        total_dialog_turns=6,
        postproc=postproc,
        flatten_data=flatten_data,
    )
