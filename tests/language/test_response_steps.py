"""`as_steps` on batches of TorchRL's LLM API, and where ResponseKLTransform takes them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, InitTracker, StepCounter
from torchrl.envs.llm import ChatEnv

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
from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, KLPenaltyLoss, rescore
from torchrl_kl.language import GPT, CausalLMActor, ResponseKLTransform, as_steps

pytestmark = [pytest.mark.usefixtures("lists_are_stacked"), *DEPRECATED]


class TestSteps:
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

    @pytest.mark.parametrize("token", ["</s>", ["</s>"], 3.0])
    def test_an_end_token_is_an_id(self, token):
        full = torch.tensor([[5, 6, 7, 4, 3, 3]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=1)
        with pytest.raises(TypeError, match=r"`eos_token` must be the id .* got .*: pass `tokeni"):
            as_steps(batch, pad_token=3, eos_token=token)

    def test_a_prompt_is_not_of_padding_only(self):
        """As where the pad token is also the token before each text, and nothing else is asked."""
        full = torch.tensor([[0, 0, 7, 8], [0, 5, 7, 0]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=2)
        steps = as_steps(batch, pad_token=0)
        assert steps["position"][:, 0].tolist() == [1, 1]
        assert steps["tokens"][:, 0].tolist() == [[0, 7, 8], [5, 7, 0]]
        assert steps["collector", "mask"].tolist() == [[True, True], [True, False]]

    def test_rewards_are_at_the_last_token_that_counts(self):
        full = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 8, 9], [5, 6, 0, 0, 0]])
        batch = TensorDict(tokens={"full": full, "prompt": full[:, :2]}, batch_size=3)
        batch["next"] = TensorDict(reward=torch.tensor([[2.0], [3.0], [4.0]]), batch_size=3)
        steps = as_steps(batch, pad_token=0, eos_token=9)
        rewards = steps["next", "reward"].squeeze(-1)
        assert rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]
        assert steps["next", "terminated"].squeeze(-1)[1].tolist() == [False, False, True]

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

    @pytest.mark.parametrize("length", [3, 5])
    @pytest.mark.parametrize("name", ["all_attention_mask", "all_assistant_mask"])
    def test_masks_of_another_length_are_refused(self, name, length):
        tokens = TensorDict(full=torch.tensor([[5, 6, 7, 8]]), prompt=torch.tensor([[5]]))
        masks = TensorDict({name: torch.ones(1, length, dtype=torch.bool)})
        batch = TensorDict(tokens=tokens, masks=masks, batch_size=1)
        text = rf"\('masks', '{name}'\) must have .* got {length} for the 4 tokens of element 0"
        with pytest.raises(ValueError, match=text):
            as_steps(batch, pad_token=0)

    @pytest.mark.parametrize("padded", [False, True])
    def test_scored_log_probs_are_those_of_the_steps(self, padded):
        tokenizer = make_tokenizer()
        model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        batch = sample_chats(model, tokenizer, pad_output=padded)
        bare = as_steps(batch, pad_token=0)
        steps = as_steps(ResponseKLTransform(model, 0.0)(batch), pad_token=0)
        actor, mask = CausalLMActor(model), steps["collector", "mask"]
        expected = torch.where(mask, rows_of_log_probs(actor, steps), 0.0)
        assert_close(steps["action_log_prob"], expected, atol=1e-5, rtol=0)
        # Steps without them are refused, with what writes them, and then have no sampler.
        stack, loss = KLConstrainedTransform(actor, 0.1), KLPenaltyLoss(actor, 0.1, gradient="k2")
        for reader, named in ((stack, "KLKeys(log_prob="), (loss, "set_keys(sample_log_prob=")):
            with pytest.raises(KeyError, match=r"'action_log_prob' is not.*`rescore\(") as error:
                reader(bare)
            assert named in str(error.value)
        again = rescore(actor, bare)
        assert_close(again["action_log_prob"][mask], expected[mask], atol=1e-5, rtol=0)
        assert not {"sampler_log_prob", ("next", "sampler_kl")} & set(again.keys(True))
        # The loss takes such steps, and its KL is that of the exact estimator.
        other = CausalLMActor(reference)
        loss = KLPenaltyLoss(actor, 1.0, gradient="sequence", reference=other)
        exact = ResponseKLTransform(model, COEFF, reference=reference, estimator="exact")
        total = exact(batch)["next", "kl_estimate"].sum() / mask.sum()
        assert_close(loss(steps)["kl"], total, atol=1e-4, rtol=0)

    def test_a_loss_reads_the_log_probs_of_the_reference_of_a_transform(self):
        tokenizer = make_tokenizer()
        model, other = (make_model("llama", tokenizer, seed) for seed in (0, 1))
        transform = ResponseKLTransform(model, 0.0, reference=other)
        steps = as_steps(transform(sample_chats(model, tokenizer, pad_output=True)), pad_token=0)
        actor, reference = CausalLMActor(model), CausalLMActor(other)
        scored = torch.where(steps["collector", "mask"], rows_of_log_probs(reference, steps), 0.0)
        assert_close(steps["next", "ref_log_prob"], scored, atol=1e-5, rtol=0)
        expected = KLPenaltyLoss(actor, 1.0, gradient="k2", reference=reference)(steps)["loss_kl"]
        loss: Any = KLPenaltyLoss(actor, 1.0, gradient="k2", reference=transform.reference)
        loss.reference.get_dist = None  # it is not asked
        assert_close(loss(steps)["loss_kl"], expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("lazy", [False, True])
    def test_the_advantage_of_a_response_is_at_all_its_steps(self, lazy):
        full = torch.randint(2, 11, (4, 7))
        batch = TensorDict(
            tokens=TensorDict(full=full, prompt=full[:, :3], batch_size=4), batch_size=4
        )
        batch["advantage"] = torch.randn(4, 1, 1)
        steps = as_steps(lazy_stack(list(batch)) if lazy else batch, pad_token=0)
        assert_close(steps["advantage"], batch["advantage"].expand(4, 4, 1), atol=0, rtol=0)
        rows = [row.set("advantage", torch.randn(3 + i, 1)) for i, row in enumerate(batch)]
        assert "advantage" not in as_steps(lazy_stack(rows), pad_token=0)  # of each token

    @pytest.mark.parametrize("shape", [(4, 1), (4, 1, 1)])
    def test_steps_of_penalized_rewards_are_not_penalized_again(self, shape):
        full, model = torch.randint(2, 11, (4, 7)), GPT(vocab_size=11, block_size=8)
        tokens = TensorDict(full=full, prompt=full[:, :3], batch_size=4)
        batch = TensorDict(tokens=tokens, next={"reward": torch.ones(shape)}, batch_size=4)
        actor = CausalLMActor(model)
        stack, loss = KLConstrainedTransform(actor, 0.1), KLPenaltyLoss(actor, 0.1)
        penalized = as_steps(ResponseKLTransform(model, 0.3)(batch), pad_token=0)
        assert penalized["next", "kl_coeff"].eq(0.3).all()
        for part, text in ((stack, "penalized for its KL before"), (loss, "penalized again")):
            with pytest.raises(RuntimeError, match=text):
                part(penalized)
        measured = as_steps(ResponseKLTransform(model, 0.0)(batch), pad_token=0)
        assert stack(measured)["next", "kl"].abs().max() < 1e-5
        assert loss(measured)["kl"] < 1e-5


class TestPlaces:
    @pytest.mark.parametrize(
        ("mode", "padded", "flat"),
        [
            ("text", False, False),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in (
                    ("history", False, True),
                    ("history", True, False),
                    ("text", True, True),
                )
            ),
        ],
    )
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
