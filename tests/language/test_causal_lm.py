"""Calling any causal language model: families, wrappers, precisions, and what is refused."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode

from tests.gpt_helpers import sharp
from tests.language.models import (
    KINDS,
    LENGTH,
    SIZES,
    VOCAB,
    check_step,
    make_actor,
    make_critic,
    make_model,
    random_texts,
    states,
    step,
)
from torchrl_kl import KLConstrainedTransform
from torchrl_kl.language import (
    GPT,
    CausalLMActor,
    CausalLMCritic,
    CausalLMRewardModel,
    causal_lm,
    sample_responses,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
# Of each family: the class, the changes to its sizes, and whether it can be cached.
BAMBA: dict[str, Any] = {**SIZES, "attn_layer_indices": [1], "mamba_n_heads": 8}
BAMBA |= {"mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt-neox": ("GPTNeoX", SIZES, True),
    "mixture of experts": ("Mixtral", {**SIZES, "num_local_experts": 4}, True),
    "some layers slide": ("Gemma2", {**SIZES, "head_dim": 8, "sliding_window": 4}, True),
    "state space": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, True),
    "positions by distance": ("Falcon", {**SIZES, "alibi": True}, True),
    # Found by the comparison:
    "states by position": ("Bamba", BAMBA, False),
}


def make_family(name: str) -> Any:
    config, sizes, _ = FAMILIES[name]
    arguments = {**TOKENS, "vocab_size": VOCAB, **sizes}
    config = getattr(transformers, f"{config}Config")(**arguments)
    return sharp(transformers.AutoModelForCausalLM.from_config(config)).eval()


@pytest.mark.filterwarnings("ignore:the cache of this model is not used:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    actor = CausalLMActor(make_family(name))
    model, texts = actor.reader.lm.model, random_texts(3)
    for n in range(5, 12):
        # Those that count positions anew at padding see it in longer rows.
        plain = CausalLMActor(model)
        plain.reader.lm.caches = False
        expected = step(plain, texts, [n, n + 3, n - 3])
        got = step(actor, texts, torch.tensor([n, n + 3, n - 3]))
        assert_close(got, expected, atol=5e-5, rtol=0.0)
    assert actor.reader.lm.caches == FAMILIES[name][2]


class Plain(nn.Module):
    """A causal model by hand: no keywords, no config."""

    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(VOCAB, 8), nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids):
        return self.head(self.gru(self.embedding(ids))[0])


class TestCalls:
    def test_logits_of_half_precision_become_float32(self):
        actor = make_actor("llama").bfloat16()
        assert actor(states(random_texts(2), torch.tensor([3, 5])))["logits"].dtype == torch.float32

    def test_models_without_keywords(self):
        actor = CausalLMActor(sharp(Plain()).eval())
        assert not actor.reader.lm.caches
        assert actor.reader.lm.max_tokens is None
        for n in (4, 5, 6):
            check_step(actor, random_texts(4), [n, n + 2, n, 1])
        batch = sample_responses(actor, random_texts(4)[:, :3], 5, pad_token=0)
        kl = KLConstrainedTransform(actor, 0.1)(batch)["next", "kl"]
        assert kl.abs().max() < 1e-5

    @every_kind
    def test_only_asked_positions_reach_the_output_layer(self, kind):
        actor = make_actor(kind)
        model, seen = actor.reader.lm.model, []
        head = model.head if kind == "gpt" else model.lm_head
        head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:2].numel()))
        step(actor, random_texts(6), torch.full((6,), 8))
        assert seen[-1] == 6
        with set_recurrent_mode(True):
            step(actor, random_texts(6), torch.tensor([8, 9, 8, 9, 9, 8]))
        assert seen[-1] == 12


def longrope(long_factor: float) -> CausalLMActor:
    """With other rotary embeddings for texts of more than 8 tokens."""
    rope: Any = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [long_factor] * 4}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=rope)
    return CausalLMActor(sharp(transformers.LlamaForCausalLM(config)).eval())


class TestLengths:
    @pytest.mark.parametrize(("long_factor", "n_new"), [(4.0, 5), (1.0, 12)])
    def test_texts_that_are_read_alike(self, long_factor, n_new):
        actor = longrope(long_factor)
        batch = sample_responses(actor, random_texts(3)[:, :4], n_new, pad_token=0)
        assert KLConstrainedTransform(actor, 0.1)(batch)["next", "kl"].abs().max() < 1e-4

    @pytest.mark.parametrize("recurrent", [False, True])
    def test_a_beginning_that_is_read_otherwise_in_longer_texts(self, recurrent):
        actor, texts = longrope(4.0), random_texts(3)
        text = "those of the first 8 tokens of a text are others where it has 16.*`short_factor`"
        with pytest.raises(ValueError, match=text):
            sample_responses(actor, texts[:, :4], 6, pad_token=0)
        with pytest.raises(ValueError, match=text), set_recurrent_mode(recurrent):
            step(actor, texts, [3, 9, 4])

    def test_lengths_that_double_are_compared_once(self):
        actor = make_actor("llama")
        seen: list[int] = []
        step(actor, random_texts(2), [9, 9])
        actor.reader.lm.model.register_forward_pre_hook(lambda _, ids: seen.append(ids[0].shape[0]))
        for n in range(10, LENGTH + 1):
            with set_recurrent_mode(True):
                step(actor, random_texts(3), [n, n, n])
        assert seen == [3] * 7 + [2] * 6 + [3] * 4  # up to 16, then up to 32

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_few_positions_that_differ_in_half_precision_are_rounding(self, dtype):
        actor = make_actor("llama").to(dtype)

        def change(_, ids, output):  # the first of those that are asked for
            output.logits[:, 0] += (ids[0].shape[1] > 8) * torch.arange(VOCAB)

        actor.reader.lm.model.register_forward_hook(change)
        half = dtype == torch.bfloat16
        with nullcontext() if half else pytest.raises(ValueError, match="first 8 tokens"):
            step(actor, random_texts(2), [9, 9])

    def test_sharded_models_are_compared_once(self, monkeypatch):
        actor, seen = make_actor("llama"), []
        model = actor.reader.lm.model
        monkeypatch.setattr(causal_lm, "sharded_parts", lambda lm: [lm])
        model.register_forward_pre_hook(lambda _, ids: seen.append(tuple(ids[0].shape)))
        for n in (9, 18):
            with set_recurrent_mode(True):
                step(actor, random_texts(3), [n] * 3)
        assert seen == [(2, 4), (2, 9), (2, 1), (2, 6), (2, 9), (2, 1), (3, 9), (3, 18)]


class TestCriticsAndRewardModels:
    @pytest.mark.parametrize(
        ("position", "error", "text"),
        [
            ([4, -1], ValueError, r"must lie in 0\.\.6, got -1 to 4: it counts tokens"),
            ([4, 7], ValueError, r"must lie in 0\.\.6, got 4 to 7"),
            ([4], ValueError, r"one number per text .* got \(1,\) and \(2, 6\)"),
            ([4.0, 5.0], TypeError, r"`position` must be int64 or int32, got torch.float32"),
        ],
    )
    def test_positions_of_a_reward_model(self, position, error, text):
        model = make_critic("gpt").module.lm.model
        reward_model = CausalLMRewardModel(model, end_token=10, in_keys=("tokens", "position"))
        with pytest.raises(error, match=text):
            reward_model(random_texts(2)[:, :6], torch.tensor(position))


class TestErrors:
    @pytest.mark.parametrize(
        "make",
        [CausalLMActor, CausalLMCritic, lambda model: CausalLMRewardModel(model, end_token=1)],
    )
    def test_not_a_module(self, make):
        with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got function"):
            make(returns_nothing)

    @pytest.mark.parametrize("make", [CausalLMCritic, partial(CausalLMRewardModel, end_token=2)])
    def test_one_output_per_text(self, make):
        config = transformers.LlamaConfig(**{**SIZES, **TOKENS, "num_labels": 1})
        module = make(transformers.LlamaForSequenceClassification(config).eval())
        with pytest.raises(ValueError, match=r"got Tensor of \(\d, 1\) for ids .*TokenClassif"):
            module(tokens=random_texts(3)[:, :9], position=torch.tensor([5, 8, 6]))

    def test_encoders(self):
        config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=2)
        model = transformers.T5ForConditionalGeneration(config)
        with pytest.raises(ValueError, match=r"T5ForConditionalGeneration has an enc"):
            CausalLMActor(model)

    def test_numbers_of_outputs(self):
        llama = make_model("llama")
        critic, texts = CausalLMCritic(llama), random_texts(2)
        with pytest.raises(ValueError, match="one output per position, got 11: .*num_labels=1"):
            critic(states(texts, [4, 4]))
        reward_model = CausalLMRewardModel(llama, end_token=1)
        with pytest.raises(ValueError, match="one output per position, got 11: use GPT"):
            reward_model(texts[:, :9])
        value = make_critic("llama").module.lm.model
        with (
            pytest.warns(UserWarning, match="since a pass makes none"),
            pytest.raises(ValueError, match=r"\(from 2 to vocab_size = 11\), got 1 outputs"),
        ):
            step(CausalLMActor(value), texts, [4, 4])
        with pytest.raises(ValueError, match="vocabulary of 11 tokens, got 11: build"):
            CausalLMRewardModel(llama, end_token=11)

    @pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
    def test_temperature(self, temperature):
        with pytest.raises(
            ValueError, match=f"`temperature` must be finite and above 0, got {temperature}"
        ):
            CausalLMActor(GPT(11, 8), temperature=temperature)

    @pytest.mark.parametrize("kind", ["bert", "gru", "length"])
    def test_models_that_see_later_tokens(self, kind):
        if kind == "bert":
            sizes = {**SIZES, "is_decoder": False}
            model: Any = transformers.BertLMHeadModel(transformers.BertConfig(**sizes))
        elif kind == "length":  # not what later tokens are, but how many
            model = Plain()
            model.register_forward_hook(lambda _, inputs, output: output * inputs[0].shape[1])
        else:
            model = Plain()
            model.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        actor = CausalLMActor(sharp(model).eval())
        for _ in range(2):
            with pytest.raises(ValueError, match="`model` must be causal, but its outputs depend"):
                step(actor, random_texts(3), [5, 6, 7])

    def test_the_mean_of_tokens(self):
        actor, texts = make_actor("gpt"), random_texts(2)
        with (
            set_exploration_type(ExplorationType.MEAN),
            pytest.raises(ValueError, match=r"must be RANDOM, or MODE .* got MEAN"),
        ):
            actor(states(texts, torch.tensor([5, 6])))

    @pytest.mark.parametrize("kind", ["gpt", "gpt2"])
    def test_texts_that_are_too_long(self, kind):
        actor = make_actor(kind)
        long = torch.zeros(2, LENGTH + 5).long()
        with pytest.raises(ValueError, match=r"must lie in 0..20, got 4 to 21: it counts tokens"):
            step(actor, long, [4, 21])
        full = torch.cat([random_texts(2), random_texts(2)[:, :1]], 1)  # by one token
        assert step(actor, full, [4, LENGTH + 1]).shape == (2, VOCAB)

    def test_rotary_positions_have_no_limit(self):
        check_step(make_actor("llama"), random_texts(2).repeat(1, 3), [LENGTH + 1, 3 * LENGTH])

    @pytest.mark.parametrize(
        ("kind", "sizes", "most"),
        [
            ("Roberta", {**SIZES, "is_decoder": True, "pad_token_id": 1}, LENGTH - 2),
            ("OPT", {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32}, LENGTH),
            ("GPTJ", {"n_embd": 32, "n_head": 4, "n_layer": 1, "rotary_dim": 4}, LENGTH),
            ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": LENGTH}, LENGTH),
        ],
    )
    def test_tables_of_positions(self, kind, sizes, most):
        """One token more raises an error of the model itself."""
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": LENGTH, **sizes}
        if kind == "OPT":
            sizes |= {"num_attention_heads": 4, "num_hidden_layers": 1}
        if kind == "Mpt":
            del sizes["max_position_embeddings"]
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        actor, texts = CausalLMActor(model), torch.full((2, most + 1), 5)
        assert model(texts[:, :most]).logits.shape[1] == most
        with pytest.raises((IndexError, RuntimeError)):
            model(texts)
        with pytest.raises(ValueError, match=rf"must leave at most {most} tokens to be read"):
            sample_responses(actor, texts[:, :most], 2, pad_token=0)


def returns_nothing() -> None:
    pass
