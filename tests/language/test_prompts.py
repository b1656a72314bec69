"""Equal prompts are read once: what is read, and the numbers and gradients of whole rows."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers
from tensordict import TensorDict
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import GRPOLoss

from tests.gpt_helpers import sharp
from tests.language.models import (
    LENGTH,
    SIZES,
    VOCAB,
    Passes,
    checkpoint,
    make_critic,
    random_texts,
    sample,
    seeded,
    states,
)
from tests.language.models import make_model as make_plain
from tests.language.test_tiles import dist_of, gradients, make_model
from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss, rescore
from torchrl_kl.language import (
    GPT,
    CausalLMActor,
    ResponseKLTransform,
    minibatches,
    prompts,
    sample_responses,
)
from torchrl_kl.language.blocks import KeyValues

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
GROUP, LENGTHS = 4, (9, 9, 6)  # responses to a prompt, and tokens of the three prompts


@pytest.fixture(autouse=True)
def few_positions_are_worth_a_pass(monkeypatch):
    monkeypatch.setattr(prompts, "_LEAST_SAVED", 0)


@pytest.fixture(scope="module")
def batch() -> Any:
    """Twelve responses in groups of four, which end at different places."""
    texts = [row[:n] for n, row in zip(LENGTHS, random_texts(3), strict=True) for _ in range(GROUP)]
    order = torch.randperm(len(texts), generator=seeded()).tolist()
    actor = CausalLMActor(make_model("gpt", 3), return_logits=False)
    steps = sample(actor, [texts[i] for i in order])
    steps["advantage"] = torch.randn(*steps.shape, 1, generator=seeded(), dtype=torch.float64)
    return steps


def actor_of(model: Any, chunk: int | None = None, caches: bool = True) -> Any:
    """An actor that reads texts of these lengths without a look at whether it is causal."""
    actor = CausalLMActor(model, head_chunk=chunk, return_logits=False)
    lm = actor.reader.lm
    lm.causal, lm.caches = LENGTH, lm.caches and caches
    return actor


def whole(actor: Any) -> Any:
    """An actor over the same model, which reads whole rows."""
    return actor_of(actor.reader.lm.model, actor.reader.head_chunk, caches=False)


def read_once(actor: Any) -> bool:
    """Whether it was compared, with gradients, and found right."""
    known = actor.reader.lm.read_once[True].values()
    return bool(known) and all(known)


def make_loss(name: str, actor: Any, reference: Any) -> Any:
    ppo: Any = ClipPPOLoss(actor, None, entropy_coeff=0.1)  # type: ignore[arg-type]
    if name == "ppo":
        return ppo
    if name == "grpo":
        ppo = GRPOLoss(actor)  # type: ignore[arg-type]
        ppo.set_keys(action="action", sample_log_prob="action_log_prob")
    gradient: Any = "k2" if name == "grpo" else name
    return KLPenaltyLoss(actor, 0.5, reference=reference, gradient=gradient, loss=ppo)


def learn(name: str, actor: Any, reference: Any, parts: Any) -> list[torch.Tensor]:
    """The losses of the parts of a batch, and the gradient of their sum."""
    loss, total, found = make_loss(name, actor, reference), torch.zeros(()), []
    for part in parts:
        terms = loss(part)
        found += [terms[key] for key in terms.keys() if key.startswith("loss_")]
    total = torch.stack(found).sum()
    return [*found, *gradients(total, actor)]


def assert_equal(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for one, other in zip(got, expected, strict=True):
        atol = tolerance * max(1.0, other.abs().max().item())
        assert_close(one, other, rtol=0.0, atol=atol)
    assert any(each.any() for each in expected)


class TestAgainstWholeRows:
    @pytest.mark.parametrize("chunk", [None, 7])
    @pytest.mark.parametrize("name", ["ppo", "grpo", "step", "sequence", "k2"])
    @pytest.mark.parametrize("family", ["gpt", "tied"])
    def test_losses(self, family, name, chunk, batch):
        model, other = make_model(family), make_model(family, 1)
        actor, reference = (actor_of(m, chunk) for m in (model, other))
        expected = learn(name, whole(actor), whole(reference), [batch])
        assert_equal(learn(name, actor, reference, [batch]), expected)
        assert read_once(actor)

    def test_parts_of_a_batch(self, batch):
        """They are cut to their longest, and groups may be cut in two."""
        actor, reference = actor_of(make_model("gpt")), actor_of(make_model("gpt", 1))
        parts = [*minibatches(batch, 80)]
        assert len(parts) > 2
        expected = learn("k2", whole(actor), whole(reference), parts)
        assert_equal(learn("k2", actor, reference, parts), expected)
        assert read_once(actor)

    @pytest.mark.parametrize("chunk", [None, 7])
    def test_adapters_that_are_off_in_the_reference(self, chunk, batch):
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(0)
        model = peft.get_peft_model(make_plain("gpt"), config).double().eval()
        actor = actor_of(model, chunk)
        expected = learn("sequence", whole(actor), model.disable_adapter, [batch])
        assert_equal(learn("sequence", actor, model.disable_adapter, [batch]), expected)
        assert read_once(actor)

    def test_a_model_that_trains_with_checkpointing(self, batch):
        """It makes no cache, or an empty one: whole rows are read, without a word."""
        model, other = make_plain("gpt2").double(), make_model("tied", 1)
        checkpoint(model)
        actor, reference = actor_of(model.train()), actor_of(other)
        expected = learn("k2", whole(actor), whole(reference), [batch])
        passes = Passes(model)
        assert_equal(learn("k2", actor, reference, [batch]), expected)
        assert {n_tokens for _, n_tokens in passes} == {16}
        learn("k2", actor_of(model.eval()), reference, [batch])
        assert (3, 9) not in passes
        assert (2, 9) in passes

    def test_half_precision_by_autocast(self, batch):
        actor = actor_of(sharp(GPT(VOCAB, 20, n_layer=2, n_head=4, n_embd=32)).eval())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dists = [dist_of(each, batch) for each in (actor, whole(actor))]
        log_probs = [dist.log_prob(batch["action"]) for dist in dists]
        assert read_once(actor)
        assert 0 < (log_probs[0] - log_probs[1]).abs().max() < 0.3

    @pytest.mark.parametrize("chunk_size", [None, 5])
    def test_scores(self, chunk_size, batch):
        """Of ResponseKLTransform, the stack and `rescore`."""
        model, other, found = make_model("gpt"), make_model("gpt", 1), []
        mask = batch["collector", "mask"]
        lengths = batch["position"][:, 0].tolist()
        ends = (batch["position"][:, 0] + mask.sum(1)).tolist()
        texts = [
            TensorDict(tokens={"full": row[:end], "prompt": row[:start]})
            for row, start, end in zip(batch["tokens"][:, 0], lengths, ends, strict=True)
        ]
        responses: Any = TensorDict.lazy_stack(texts)
        responses["next"] = TensorDict(reward=torch.zeros(12, 1), batch_size=12)
        for caches in (False, True):
            transform = ResponseKLTransform(model, 0.1, reference=other, chunk_size=chunk_size)
            actor, reference = actor_of(model), actor_of(other)
            stack = KLConstrainedTransform(actor, 0.1, reference=reference)
            scorers = (transform._policy.held, transform.reference.actor)
            for each in (*scorers, actor, stack.reference.actor):
                each.reader.lm.caches = caches
            kl = transform(responses.clone())["next", "kl"]
            steps = rescore(actor, batch.exclude("advantage"))
            found.append([kl, steps["action_log_prob"][mask], stack(steps)["next", "kl"]])
            assert all(bool(each.reader.lm.read_once[False]) == caches for each in scorers)
        assert_equal(found[1], found[0])


class TestWhatIsRead:
    def test_prompts_once_and_then_what_follows(self, batch):
        """Prompts of one length together; a text is not read to its last token."""
        actor = actor_of(make_model("gpt"))
        learn("ppo", actor, None, [batch])
        passes = Passes(actor)
        learn("ppo", actor, None, [batch])
        assert sorted(passes.take()) == sorted([(2, 9), (8, 7), (1, 6), (4, 7)])
        dist_of(whole(actor), batch)
        assert passes.take() == [(12, 16)]

    def test_few_positions_are_not_worth_a_pass(self, batch, monkeypatch):
        monkeypatch.undo()
        actor = actor_of(make_model("gpt"))
        passes = Passes(actor)
        learn("ppo", actor, None, [batch])
        assert passes.take() == [(12, 16)]

    def test_texts_that_share_no_prompt(self):
        steps = sample(actor_of(make_model("gpt")), random_texts(6)[:, :9], eos_token=None)
        actor = actor_of(make_model("gpt"))
        passes = Passes(actor)
        dist_of(actor, steps)
        assert passes.take() == [(6, 16)]

    def test_whole_groups_together_without_gradients(self):
        actor = actor_of(make_model("gpt"))
        texts = random_texts(4)[:, :9].repeat_interleave(60, 0)
        steps = sample_responses(actor, texts, 8, pad_token=0)
        with torch.no_grad():
            expected = dist_of(actor, steps).logits
            passes = Passes(actor)
            assert_close(dist_of(whole(actor), steps).logits, expected)
            assert [n for n, _ in passes.take()] == [128, 112]  # of 2048 tokens
            dist_of(actor, steps)
        assert passes.take() == [(3, 9), (180, 7), (1, 9), (60, 7)]

    def test_large_groups_are_cut_without_gradients(self, monkeypatch):
        monkeypatch.setattr(prompts, "_TOGETHER", 17)  # tokens of a text, whose keys fill no cache
        actor = actor_of(make_model("gpt"))
        texts = random_texts(3)[:, :9].repeat_interleave(torch.tensor([20, 3, 2]), 0)
        steps = sample_responses(actor, texts, 8, pad_token=0)
        with torch.no_grad():
            assert_close(dist_of(actor, steps).logits, dist_of(whole(actor), steps).logits)
            passes = Passes(actor)
            dist_of(actor, steps)
        assert sorted(n for n, width in passes.take() if width == 7) == [2, 3, 3, 17]

    def test_groups_of_one_token_next_to_longer_ones(self, monkeypatch):
        """Steps that count, one after another: a part has only responses of one token."""
        monkeypatch.setattr(prompts, "_TOGETHER", 17)
        actor = actor_of(make_model("gpt"))
        texts, lengths = random_texts(2).repeat(90, 1), [1, 8] * 90
        texts[:, 8:] = torch.randint(VOCAB, (180, LENGTH - 8), generator=seeded())
        pairs = [(row, 8 + i) for row, n in enumerate(lengths) for i in range(n)]
        rows, position = torch.tensor(pairs).T
        steps = states(texts[rows], position)
        with torch.no_grad():
            assert_close(dist_of(actor, steps).logits, dist_of(whole(actor), steps).logits)

    def test_positions_of_int32(self, batch):
        steps = batch.select("tokens", "position")
        expected = dist_of(actor_of(make_model("gpt")), steps).logits
        steps["position"] = steps["position"].int()
        assert_close(dist_of(actor_of(make_model("gpt")), steps).logits, expected)

    def test_comparing_holds_no_more_logits_than_a_tile(self, batch):
        model, sizes = make_model("gpt"), []
        actor = actor_of(model, chunk=7)
        actor.reader.lm.splits = True  # without the look at that
        with model.head.register_forward_hook(lambda *call: sizes.append(call[2].shape[1])):
            dist_of(actor, batch).log_prob(batch["action"])
        assert read_once(actor)
        assert max(sizes) == 7

    def test_where_a_length_has_doubled_it_is_compared_again(self):
        actor = actor_of(make_plain("llama"))
        for start, end in [(5, 12), (6, 15), (7, 8), (9, 15), (9, 17), (10, 18)]:
            texts = random_texts(1)[:, :start].repeat(4, 1)
            texts = torch.cat([texts, random_texts(4)[:, start:end]], 1)
            position = torch.arange(start, end).expand(4, -1)
            with set_recurrent_mode(True):
                actor.get_dist(states(texts[:, None].expand(*position.shape, -1), position))
        lengths = [key[:2] for key in actor.reader.lm.read_once[True]]
        assert lengths == [(3, 4), (4, 4), (4, 5)]

    def test_rows_of_a_group_share_the_dropout_of_their_prompt(self, batch):
        model = GPT(VOCAB, 20, n_layer=2, n_head=4, n_embd=32, dropout=0.5)
        for once in (True, False):
            actor = actor_of(sharp(model).train())
            actor.reader.lm.caches = once
            logits, rows = dist_of(actor, batch).logits[:, 0], batch["tokens"][:, 0]
            same = (rows[:, None, :6] == rows[:, :6]).all(-1)
            distance = (logits[:, None] - logits).abs().amax(-1)
            assert (distance[same].max() == 0) == once
            assert distance[~same].min() > 0


class Detached(GPT):
    """Keys of earlier tokens have no gradient."""

    def new_cache(self):
        cache = super().new_cache()
        cache.reorder_cache = partial(self._reorder, cache)
        return cache

    def _reorder(self, cache, index):
        KeyValues.reorder_cache(cache, index)
        for layer in cache.layers:
            layer.keys = layer.keys.detach()


class Mixed(Detached):
    """All rows go on from the first text."""

    def _reorder(self, cache, index):
        KeyValues.reorder_cache(cache, index * 0)


class Forgetful(Detached):
    """Right up to eight tokens."""

    def _reorder(self, cache, index):
        KeyValues.reorder_cache(cache, index)
        for layer in cache.layers:
            layer.values = layer.values * (layer.values.shape[2] < 8)


class Raising(Detached):
    def _reorder(self, cache, index):
        raise IndexError("no such row")


class TestWhereItDoesNotWork:
    @pytest.mark.parametrize(
        ("kind", "once"),
        [(Detached, {False: True, True: False}), (Mixed, {}), (Forgetful, {}), (Raising, {})],
    )
    def test_whole_rows_are_read_from_then_on(self, kind, once, batch):
        model = sharp(kind(VOCAB, 20, n_layer=2, n_head=4, n_embd=32).double()).eval()
        actor, passes = actor_of(model), Passes(model)
        short = batch[batch["position"][:, 0] == 6]  # less than eight tokens in a prompt
        for steps in (short, batch):
            expected = learn("ppo", whole(actor), None, [steps])
            with torch.no_grad():
                logits = [dist_of(each, steps).logits for each in (actor, whole(actor))]
            assert_equal(learn("ppo", actor, None, [steps]), expected)
            assert_equal(logits[:1], logits[1:])
        for grad in (False, True):
            passes.clear()
            with torch.set_grad_enabled(grad):
                dist_of(actor, batch)
            assert (passes.take() == [(12, 16)]) != once.get(grad, False)

    def test_what_learns_later_is_compared_too(self, batch):
        """With all weights frozen there is no gradient to compare."""
        model = sharp(Detached(VOCAB, 20, n_layer=2, n_head=4, n_embd=32).double()).eval()
        actor = actor_of(model.requires_grad_(False))
        dist_of(actor, batch)
        assert read_once(actor)
        model.requires_grad_(True)
        assert_equal(learn("ppo", actor, None, [batch]), learn("ppo", whole(actor), None, [batch]))

    def test_positions_that_depend_on_ids(self):
        """RoBERTa does not count pad tokens, here in the prompts of a smaller group, and later."""
        config = transformers.RobertaConfig(
            **{**SIZES, "max_position_embeddings": 2 * LENGTH},
            is_decoder=True,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = sharp(transformers.RobertaForCausalLM(config).double()).eval()
        texts = torch.randint(2, VOCAB, (8, LENGTH), generator=seeded())
        texts[:, :8] = texts[torch.tensor([0] * 5 + [5] * 3), :8]
        texts[5:, 3:5] = 1
        position = torch.arange(8, LENGTH).expand(8, -1)
        steps = states(texts[:, None].expand(*position.shape, -1), position)
        actor = actor_of(model)
        assert_close(dist_of(actor, steps).logits, dist_of(whole(actor), steps).logits)
        for prompts_now in (texts[:4, :8], texts[4:, :8]):
            drawn = sample_responses(actor, prompts_now, 4, pad_token=0)
            expected = dist_of(whole(actor), drawn).log_prob(drawn["action"])
            assert_close(drawn["action_log_prob"], expected)

    @pytest.mark.parametrize("part", ["model.layers", "model.layers.0"])
    def test_checkpoints_in_a_part_that_is_in_train_mode(self, part, batch):
        model = make_plain("llama")
        checkpoint(model)
        model.eval().get_submodule(part).train()
        actor = actor_of(model)
        expected = learn("ppo", whole(actor), None, [batch])
        assert_equal(learn("ppo", actor, None, [batch]), expected, 1e-5)

    def test_layers_that_are_dropped_in_training(self, batch):
        """OPT leaves a dropped layer out of the cache; here all are dropped."""
        sizes = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": SIZES["hidden_size"]}
        config = transformers.OPTConfig(**sizes, layerdrop=1.0, dropout=0.0, pad_token_id=0)
        actor = actor_of(transformers.OPTForCausalLM(config).train())
        expected = dist_of(whole(actor), batch).logits
        assert_close(dist_of(actor, batch).logits, expected)

    def test_blocks_in_checkpoints_write_into_the_cache_twice(self, batch):
        model = make_model("gpt")
        expected = learn("ppo", actor_of(model), None, [batch])
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        actor = actor_of(model)
        assert_equal(learn("ppo", actor, None, [batch]), expected)
        assert not read_once(actor)

    @pytest.mark.parametrize("kind", ["compiled", "sharded"])
    def test_models_in_wrappers(self, kind, batch, monkeypatch):
        model = make_model("gpt")
        passes = Passes(model)
        if kind == "compiled":
            model = torch.compile(model, backend="eager")
        else:
            monkeypatch.setattr(prompts, "sharded_parts", lambda lm: [lm])
        dist_of(actor_of(model), batch)
        assert passes.take() == [(12, 16)]

    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_critics(self, kind, batch):
        """Models for token classification return no cache."""
        critic = make_critic(kind)
        assert critic.module.lm.caches
        with set_recurrent_mode(True):
            value = critic(batch.select("tokens", "position"))["state_value"]
        assert {*critic.module.lm.read_once[True].values()} == {kind == "gpt"}
        critic.module.lm.caches = False
        with set_recurrent_mode(True):
            assert_close(critic(batch.select("tokens", "position"))["state_value"], value)


FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 1024},
    "Llama": SIZES,
    "Gemma3Text": {**SIZES, "head_dim": 8, "sliding_window": 64},
    "GptOss": {**SIZES, "head_dim": 8, "sliding_window": 64, "num_local_experts": 4},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fourth_of_the_work_where_prompts_are_long(name):
    """16 responses of 64 tokens to a prompt of 512."""
    sizes = {**FAMILIES[name], "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0}
    sizes |= {"eos_token_id": 0} | ({} if name == "GPT2" else {"max_position_embeddings": 1024})
    config = getattr(transformers, f"{name}Config")(**sizes)
    actor = actor_of(transformers.AutoModelForCausalLM.from_config(config).eval())
    texts = torch.randint(64, (1, 576), generator=seeded()).repeat(16, 1)
    texts[:, 512:] = torch.randint(64, (16, 64), generator=seeded())
    position = torch.arange(512, 576).expand(16, -1)
    steps = states(texts[:, None].expand(16, 64, -1), position)
    counts = []
    for each in (actor, whole(actor)):
        dist_of(each, steps)  # which compares
        counter: Any = FlopCounterMode(display=False)
        tracker: Any = nullcontext()  # its hooks of modules change how these are called
        vars(tracker)["parents"] = {"Global"}
        vars(counter)["mod_tracker"] = tracker
        with counter:
            dist_of(each, steps).log_prob(texts[:, 512:]).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[1] >= 4 * counts[0]
