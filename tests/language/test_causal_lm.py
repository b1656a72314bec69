"""Calling any causal language model: families, wrappers, precisions, and what is refused."""

import shutil
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from tensordict import TensorDict
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
    Passes,
    check_step,
    make_actor,
    make_critic,
    make_model,
    random_texts,
    states,
    step,
    true_logits,
)
from torchrl_kl import KLConstrainedTransform
from torchrl_kl.language import (
    GPT,
    CausalLMActor,
    CausalLMCritic,
    CausalLMRewardModel,
    sample_responses,
)
from torchrl_kl.language.causal_lm import CausalLM

every_kind = pytest.mark.parametrize("kind", KINDS)
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
MLA = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
    **{"topk_group": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4},
}
NEO = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4},
    **{"attention_types": [[["global", "local"], 1]], "max_position_embeddings": LENGTH},
}
# Windows that the trial, of 5 tokens, cannot notice.
TEXT = {**SIZES, "vocab_size": VOCAB, "head_dim": 8, "sliding_window": 6}
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 8}
IMAGES |= {"num_attention_heads": 2, "patch_size": 4}
GEMMA3 = {**TEXT, "layer_types": ["sliding_attention", "full_attention"]}
# Of each family: the class, the changes to its sizes, and whether it can be cached.
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt-neox": ("GPTNeoX", SIZES, True),
    "opt": ("OPT", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, True),
    "gemma": ("Gemma", {**SIZES, "head_dim": 8}, True),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}, True),
    "mixture of experts": ("Mixtral", {**SIZES, "num_local_experts": 4}, True),
    "keys wider than values": ("DeepseekV3", {**SIZES, **MLA, "first_k_dense_replace": 1}, True),
    "one head of keys": ("GPTBigCode", {"n_embd": 32, "n_layer": 2, "n_head": 4}, True),
    "sliding window": ("Mistral", {**SIZES, "sliding_window": 4}, False),
    "some layers slide": ("Gemma2", {**SIZES, "head_dim": 8, "sliding_window": 4}, False),
    "some layers are local": ("GPTNeo", NEO, False),
    "texts and images": (
        "Gemma3",
        {"text_config": GEMMA3, "vision_config": IMAGES, "mm_tokens_per_image": 4},
        False,
    ),
    "state space": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, False),
    # Found by the trial:
    "positions by distance": ("Falcon", {**SIZES, "alibi": True}, False),
    "positions by padding": ("Roberta", {**SIZES, "is_decoder": True}, False),
}


def make_family(name: str) -> Any:
    config, sizes, _ = FAMILIES[name]
    arguments = {**TOKENS, "vocab_size": VOCAB, **sizes}
    config = getattr(transformers, f"{config}Config")(**arguments)
    return sharp(transformers.AutoModelForCausalLM.from_config(config)).eval()


@pytest.mark.filterwarnings("ignore:keys and values of this model cannot be cached:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    actor = CausalLMActor(make_family(name))
    model, texts = actor.reader.lm.model, random_texts(3)
    for n in range(5, 12):
        # Those that count positions anew at padding see it in longer rows.
        expected = step(CausalLMActor(model, cache_bytes=0), texts, [n, n + 3, n - 3])
        got = step(actor, texts, torch.tensor([n, n + 3, n - 3]))
        assert_close(got, expected, atol=5e-5, rtol=0.0)
    assert actor.reader.lm.caches == FAMILIES[name][2]


@pytest.mark.filterwarnings("ignore:keys and values of this model cannot be cached:UserWarning")
def test_parts_in_float32_of_a_model_in_float64():
    """A bias by distance, which rounds otherwise in texts of another length, is no later token."""
    sizes: dict[str, Any] = {**TOKENS, "vocab_size": VOCAB, "d_model": 32}
    config = transformers.MptConfig(**sizes, n_layers=2, n_heads=8, max_seq_len=40)
    model = sharp(transformers.AutoModelForCausalLM.from_config(config)).eval().double()
    actor, texts = CausalLMActor(model), random_texts(3)
    check_step(actor, texts, torch.tensor([5, 8, 2]))


class Plain(nn.Module):
    """A causal model by hand: no keywords, no config."""

    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(VOCAB, 8), nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids):
        return self.head(self.gru(self.embedding(ids))[0])


class Bag(nn.Module):
    """The sum of the tokens so far, or of all of them; the last two tokens are banned."""

    def __init__(self, sees_later, banned):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, VOCAB)
        self.sees_later, self.banned = sees_later, banned

    def forward(self, ids):
        values = self.embedding(ids)
        sums = values.sum(1, keepdim=True) if self.sees_later else values.cumsum(1)
        return sums.expand_as(values).index_fill(-1, torch.tensor([9, 10]), self.banned)


class Wrapped(nn.Module):
    """Any model, called without a name of an argument, as by DistributedDataParallel."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.fixture
def compiler_without_memory():
    """What was compiled before counts against the number of versions of a function."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class TestCalls:
    @pytest.mark.parametrize("model", [Plain(), Wrapped(make_model("llama"))], ids=["rnn", "ddp"])
    def test_models_without_keywords(self, model):
        actor = CausalLMActor(sharp(model).eval())
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

    @every_kind
    def test_it_is_causal(self, kind):
        """What follows `position` is never looked at: in each way of reading."""
        actor, texts = make_actor(kind), random_texts(4)
        other = texts.clone()
        other[:, 6:] = random_texts(4, seed=1)[:, 6:]
        for recurrent in (False, True):
            with set_recurrent_mode(recurrent):
                got = [step(actor, tokens, torch.tensor([6, 5, 6, 4])) for tokens in (texts, other)]
            assert torch.equal(*got) if recurrent else True
            assert_close(*got, atol=2e-5, rtol=0.0)

    @every_kind
    def test_modes_of_reading_agree(self, kind):
        actor = make_actor(kind)
        texts, position = random_texts(3), torch.arange(1, LENGTH + 1).expand(3, -1)
        tokens = texts[:, None].expand(-1, LENGTH, -1)
        expected = true_logits(actor.reader.lm.model, tokens, position)
        passes = Passes(actor)
        for layout in (tokens, tokens.clone()):  # stored once, and compared
            with set_recurrent_mode(True), torch.no_grad():
                got = actor.reader(layout, position)
            assert_close(got, expected, atol=5e-5, rtol=0.0)
            assert passes.take() == [(3, LENGTH)]

    @pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # attention
    @pytest.mark.parametrize("grad", [False, True])
    @every_kind
    def test_an_ensemble_by_vmap(self, kind, grad):
        readers = [make_actor(kind, seed).reader for seed in range(2)]
        texts, position = random_texts(3), torch.tensor([5, 9, 7])
        weights = torch.stack([TensorDict.from_module(reader) for reader in readers])

        def read(weights):
            with weights.to_module(readers[0]):
                return readers[0](texts, position)

        with torch.set_grad_enabled(grad):
            got = torch.vmap(read)(weights)
        for reader, logits in zip(readers, got, strict=True):
            expected = true_logits(reader.lm.model, texts, position)
            assert_close(logits, expected, atol=2e-5, rtol=0.0)

    @every_kind
    def test_gradients_are_those_of_the_bare_model(self, kind):
        actor = make_actor(kind).double()
        texts, position = random_texts(3), torch.tensor([4, 9, 6])
        parameters = list(actor.parameters())
        for recurrent in (False, True):
            with set_recurrent_mode(recurrent):
                loss = actor.reader(texts, position).log_softmax(-1)[:, 2].sum()
            got = torch.autograd.grad(loss, parameters)
            bare = [
                actor.reader.lm.model(texts[i : i + 1, :n]) for i, n in enumerate(position.tolist())
            ]
            bare = [x if isinstance(x, torch.Tensor) else x.logits for x in bare]
            expected = torch.stack([x[0, -1].log_softmax(-1)[2] for x in bare]).sum()
            assert_close(got, torch.autograd.grad(expected, parameters))

    def test_outputs_in_half_precision_become_float32(self):
        lm = CausalLM(make_model("llama").to(torch.bfloat16))
        assert lm(random_texts(2)).dtype == torch.float32
        assert CausalLM(make_model("llama").double())(random_texts(2)).dtype == torch.float64

    @pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")
    @pytest.mark.usefixtures("compiler_without_memory")
    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_compiled_models(self, kind):
        plain = make_actor(kind)
        actor = CausalLMActor(torch.compile(make_model(kind), backend="eager"))  # type: ignore[arg-type]
        self.check_compiled(actor, plain)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")
    @pytest.mark.usefixtures("compiler_without_memory")
    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_steps_of_compiled_models(self, kind):
        actor = CausalLMActor(torch.compile(make_model(kind), backend="eager"))  # type: ignore[arg-type]
        self.check_steps(actor, make_actor(kind))

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
    @pytest.mark.usefixtures("compiler_without_memory")
    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_models_compiled_by_inductor(self, kind):
        actor = CausalLMActor(torch.compile(make_model(kind)))  # type: ignore[arg-type]
        self.check_compiled(actor, make_actor(kind))
        self.check_steps(actor, make_actor(kind))

    @staticmethod
    def check_compiled(actor: Any, plain: Any) -> None:
        assert actor.reader.lm.vocab_size == VOCAB
        assert actor.reader.lm.max_tokens == LENGTH
        batch = sample_responses(plain, random_texts(4)[:, :4], 5, pad_token=0)
        with set_recurrent_mode(True):
            scored = actor.log_prob(batch.select("tokens", "position", "action"))
        assert_close(scored, batch["action_log_prob"], atol=2e-5, rtol=0.0)

    @staticmethod
    def check_steps(actor: Any, plain: Any) -> None:
        texts, model = random_texts(4), plain.reader.lm.model
        for n in (4, 5, 6):
            check_step(actor, texts, [n, n, n, n], model)
            check_step(actor, texts, [n + 1, n, n, n + 1], model)
        actor.reader.lm.model._orig_mod.get_parameter(
            next(n for n, p in model.named_parameters() if p.ndim == 2)
        ).data.mul_(1.5)
        check_step(actor, texts, [7, 7, 7, 7], actor.reader.lm.model._orig_mod)


class TestCriticsAndRewardModels:
    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_a_value_for_each_state(self, kind):
        critic, texts = make_critic(kind), random_texts(3)
        position = torch.tensor([[3, 4], [8, 9], [20, 1]])
        tokens = texts[:, None].expand(-1, 2, -1)
        expected = true_logits(critic.module.lm.model, tokens, position)
        for recurrent in (False, True):
            with set_recurrent_mode(recurrent):
                value = critic(states(tokens, position))["state_value"]
            assert_close(value, expected, atol=2e-5, rtol=0.0)

    def test_reward_models_of_hugging_face(self):
        model = make_critic("llama").module.lm.model
        reward_model = CausalLMRewardModel(model, end_token=10, in_keys=("tokens", "position"))
        texts = random_texts(3)[:, : LENGTH - 1]
        position = torch.tensor([4, 19, 9])
        got = reward_model(states(texts, position))["score"]
        for text, n, score in zip(texts, position.tolist(), got, strict=True):
            ended = torch.cat([text[:n], torch.tensor([10])])[None]
            assert_close(score, model(ended).logits[0, -1, 0], atol=2e-5, rtol=0.0)
        # As the reward of sampled responses, each where it ends, and not after its padding.
        prompts = [text[:n] for text, n in zip(texts, (4, 2, 1), strict=True)]
        scorer = CausalLMRewardModel(model, end_token=10)
        for eos_token in (None, range(5)):
            batch = sample_responses(
                *(make_actor("llama"), prompts, 5),
                **{"pad_token": 0, "eos_token": eos_token, "reward_fn": scorer},
            )
            for row, reward in zip(batch, batch["next", "reward"].sum((1, 2)), strict=True):
                n_tokens = row["position"][0] + row["collector", "mask"].sum()
                text = row["tokens"][0, : int(n_tokens)]
                assert_close(reward, scorer(text[None])[0].detach(), atol=2e-5, rtol=0.0)

    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_reward_models_of_no_texts_and_of_empty_ones(self, kind):
        model = make_critic(kind).module.lm.model
        reward_model = CausalLMRewardModel(model, end_token=10)
        assert reward_model(torch.zeros(0, 3, 5, dtype=torch.long)).shape == (0, 3)
        expected = CausalLM(model)(torch.tensor([[10]]))[0, 0]
        assert_close(reward_model(torch.zeros(1, 0, dtype=torch.long)), expected)

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
        with pytest.raises(ValueError, match=r"got Tensor of \(3, 1\) for ids .*TokenClassif"):
            module(tokens=random_texts(3)[:, :9], position=torch.tensor([5, 8, 6]))

    def test_outputs_without_logits(self):
        actor = CausalLMActor(make_model("llama").model)
        with pytest.raises(ValueError, match=r"as `.logits`, got BaseModelOutput"):
            step(actor, random_texts(3), [5, 8, 6])

    def test_encoders(self):
        config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=2)
        model = transformers.T5ForConditionalGeneration(config)
        with pytest.raises(ValueError, match=r"T5ForConditionalGeneration has an encoder"):
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
        with pytest.raises(ValueError, match=r"\(from 2 to vocab_size = 11\), got 1 outputs"):
            step(CausalLMActor(value), texts, [4, 4])
        with pytest.raises(ValueError, match="vocabulary of 11 tokens, got 11: build"):
            CausalLMRewardModel(llama, end_token=11)

    @pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
    def test_temperature(self, temperature):
        with pytest.raises(
            ValueError, match=f"`temperature` must be finite and above 0, got {temperature}"
        ):
            CausalLMActor(GPT(11, 8), temperature=temperature)

    @pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    def test_logits_of_another_model_stay(self, kind):
        actor = make_actor("gpt", return_logits=False)
        state = states(random_texts(2), torch.tensor([5, 6]))
        state["logits"] = torch.ones(2, 3)
        with set_exploration_type(kind):
            assert actor(state)["logits"].equal(torch.ones(2, 3))

    @pytest.mark.parametrize("banned", [-1e4, -65504.0, -1e9, -3e38, -torch.inf])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_banned_tokens_do_not_hide_later_tokens(self, dtype, banned):
        """A banned token's logit is no magnitude that rounding is told by."""
        for sees_later in (True, False):
            actor = CausalLMActor(sharp(Bag(sees_later, banned)).eval().to(dtype))
            with pytest.raises(ValueError, match="must be causal") if sees_later else nullcontext():
                step(actor, random_texts(3), [5, 6, 7])

    @pytest.mark.parametrize("kind", ["bert", "gru", "length", "middle"])
    def test_models_that_see_later_tokens(self, kind):
        if kind == "bert":
            sizes = {**SIZES, "is_decoder": False}
            model: Any = transformers.BertLMHeadModel(transformers.BertConfig(**sizes))
        elif kind == "length":  # not what later tokens are, but how many
            model = Plain()
            model.register_forward_hook(lambda _, inputs, output: output * inputs[0].shape[1])
        elif kind == "middle":  # all but the first two tokens do
            model = Plain()
            model.register_forward_hook(
                lambda _, inputs, output: torch.cat([output[:, :2], output[:, 2:].flip(1)], 1)
            )
        else:
            model = Plain()
            model.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        actor = CausalLMActor(sharp(model).eval())
        for _ in range(2):
            with pytest.raises(ValueError, match="`model` must be causal, but its outputs depend"):
                step(actor, random_texts(3), [5, 6, 7])

    def test_positions_of_two_scales(self):
        # Beyond 8 tokens, the angles of all positions change, also of those that were read before.
        scales = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        options = {"original_max_position_embeddings": 8, "rope_scaling": scales}
        config = transformers.Phi3Config(**{**SIZES, **TOKENS, **options})
        actor = CausalLMActor(sharp(transformers.Phi3ForCausalLM(config)).eval())
        texts = random_texts(3)
        full = actor.get_dist(
            states(texts[:, None].expand(-1, 4, -1), torch.arange(5, 9).expand(3, -1))
        )
        for n in range(5, 9):
            assert_close(step(actor, texts, [n] * 3), full.logits[:, n - 5], atol=2e-5, rtol=0.0)
        with pytest.raises(ValueError, match=r"the model reads at most 8"):
            step(actor, texts, [9] * 3)

    def test_the_mean_of_tokens(self):
        actor, texts = make_actor("gpt"), random_texts(2)
        with (
            set_exploration_type(ExplorationType.MEAN),
            pytest.raises(ValueError, match=r"must be RANDOM, or MODE .* got MEAN"),
        ):
            actor(states(texts, torch.tensor([5, 6])))

    @every_kind
    def test_texts_that_are_too_long(self, kind):
        actor = make_actor(kind)
        long = torch.zeros(2, LENGTH + 5).long()
        with pytest.raises(ValueError, match=r"must lie in 0..20, got 4 to 21: it counts tokens"):
            step(actor, long, [4, 21])
        full = torch.cat([random_texts(2), random_texts(2)[:, :1]], 1)  # by one token
        assert step(actor, full, [4, LENGTH + 1]).shape == (2, VOCAB)


def returns_nothing() -> None:
    pass
