"""PEFT's adapters: a policy that is its own reference, and caches that follow every switch."""

import copy
from contextlib import contextmanager, nullcontext
from typing import Any

import peft
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.gpt_helpers import sharp
from tests.language.models import (
    KINDS,
    LENGTH,
    VOCAB,
    Passes,
    cache_of,
    check_step,
    make_critic,
    make_model,
    random_texts,
    step,
    true_logits,
)
from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import CausalLMActor, sample_responses

# 2026-11: peft 0.21.2 asks transformers 5.23 for an attribute by its old name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    # PEFT before 0.20, of weights that are not tied
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

LINEAR = ["q_proj", "k_proj", "v_proj", "down_proj"]
TARGETS = {"gpt": ["query_key_value", "project"], "gpt2": ["c_attn", "c_proj"]}
every_kind = pytest.mark.parametrize("kind", KINDS)


def config_of(kind: str, **kwargs) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=2, target_modules=TARGETS.get(kind, LINEAR), fan_in_fan_out=kind == "gpt2", **kwargs
    )


def adapted(kind: str, **kwargs) -> Any:
    """A model with two adapters, "default" and "other", whose weights are not zero."""
    model: Any = peft.get_peft_model(make_model(kind), config_of(kind, **kwargs))
    model.add_adapter("other", config_of(kind, **kwargs))
    for n, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(n)
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@contextmanager
def using(model: Any, name: str):
    """The model with another adapter, for as long as the context lasts."""
    before = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)


def merged(model: Any, name: str) -> Any:
    """A bare model with an adapter in its weights."""
    twin = copy.deepcopy(model)
    return twin.merge_and_unload(adapter_names=[name])


def references(model: Any, kind: str) -> dict[str, tuple[Any, Any]]:
    """What `reference` is, and the bare model that must have the same numbers."""
    return {
        "adapters off": (model.disable_adapter, make_model(kind)),
        "another adapter": (lambda: using(model, "other"), merged(model, "other")),
    }


class TestReference:
    @every_kind
    @pytest.mark.parametrize("which", ["adapters off", "another adapter"])
    def test_a_batch_is_scored_as_by_a_bare_model(self, kind, which):
        model = adapted(kind)
        actor = CausalLMActor(model)
        switch, bare = references(model, kind)[which]
        stack = KLConstrainedTransform(actor, 0.1, reference=switch)
        assert not list(stack.parameters())
        batch = sample_responses(actor, random_texts(5)[:, :4], 6, pad_token=0)
        after = stack(batch)["next"]
        twin = KLConstrainedTransform(actor, 0.1, reference=CausalLMActor(bare))(batch)["next"]
        assert_close(after["kl"], twin["kl"], atol=2e-5, rtol=0.0)
        assert after["kl"].abs().max() > 0.1
        logits = true_logits(bare, batch["tokens"], batch["position"]).log_softmax(-1)
        expected = logits.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        assert_close(after["ref_log_prob"], expected, atol=2e-5, rtol=0.0)
        # And the policy is the one with its adapter.
        policy = true_logits(merged(model, "default"), batch["tokens"], batch["position"])
        recorded = policy.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        assert_close(batch["action_log_prob"], recorded, atol=5e-5, rtol=0.0)

    @every_kind
    @pytest.mark.parametrize("which", ["adapters off", "another adapter"])
    def test_in_an_env_both_keep_their_cache(self, kind, which):
        model = adapted(kind)
        actor = CausalLMActor(model)
        switch, bare = references(model, kind)[which]
        stack = KLConstrainedTransform(actor, 0.1, reference=switch)
        env = TransformedEnv(DigitLanguageEnv(batch_size=[6], seed=0), stack)
        passes = Passes(model)
        torch.manual_seed(0)
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            env.rollout(4, actor)  # with the trial of the model
            passes.take()
            batch = env.rollout(4, actor)
        # New prompts are read by both; then each reads one position per step.
        assert passes.take() == [(6, 5)] * 2 + [(6, 1)] * 6
        assert len(cache_of(actor)._sets) == 2
        logits = true_logits(bare, batch["tokens"], batch["position"]).log_softmax(-1)
        expected = logits.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        assert_close(batch["next", "ref_log_prob"], expected, atol=2e-5, rtol=0.0)
        kl = batch["action_log_prob"] - expected
        assert_close(batch["next", "kl"].squeeze(-1), kl, atol=2e-5, rtol=0.0)

    @pytest.mark.parametrize("kind", ["gpt", "llama"])
    def test_training_moves_the_adapter_alone(self, kind):
        model = adapted(kind)
        actor, critic = CausalLMActor(model), make_critic(kind)
        stack = KLConstrainedTransform(actor, 0.1, reference=model.disable_adapter)
        penalty = KLPenaltyLoss(actor, 0.1, reference=model.disable_adapter)
        loss = ClipPPOLoss(actor, critic)
        optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=0.1)
        base = {n: p.clone() for n, p in model.named_parameters() if "lora_" not in n}
        for _ in range(2):
            before = sample_responses(actor, random_texts(5)[:, :4], 6, pad_token=0)
            batch = stack(before)
            with torch.no_grad(), set_recurrent_mode(True):
                GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True)(batch)
            optimizer.zero_grad()
            (loss(batch)["loss_objective"] + penalty(before)["loss_kl"]).backward()
            optimizer.step()
            check_step(actor, random_texts(4), [4, 5, 6, 5])
        moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved == {n for n, p in model.named_parameters() if "lora_" in n and "default" in n}
        assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)
        for name, parameter in model.named_parameters():
            if name in base:
                assert torch.equal(parameter, base[name])


def switch_off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def switch_adapter(model: Any) -> None:
    model.set_adapter("other")


def both_adapters(model: Any) -> None:
    model.base_model.set_adapter(["default", "other"])


def scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_scale("default", 3.0)


def merge(model: Any) -> None:
    model.merge_adapter(["other"])


def merge_and_edit(model: Any) -> None:
    model.merge_adapter(["default"])
    next(p for n, p in model.named_parameters() if "lora_" not in n and p.ndim == 2).data.mul_(1.1)


def unload(model: Any) -> None:
    model.unload()


def edit_adapter(model: Any) -> None:
    next(p for n, p in model.named_parameters() if "lora_B.default" in n).data[1] += 0.5


def load_adapter(model: Any) -> None:
    weights = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    peft.set_peft_model_state_dict(model, {k: 2 * v for k, v in weights.items()})


def delete_adapter(model: Any) -> None:
    model.set_adapter("other")
    model.delete_adapter("default")


CHANGES = [
    *(switch_off, switch_adapter, both_adapters, scale, merge, merge_and_edit, unload),
    *(edit_adapter, load_adapter, delete_adapter),
]


class TestNeverStale:
    @every_kind
    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning")
    def test_after_a_change_between_two_steps(self, kind, change):
        model, texts = adapted(kind), random_texts(4)
        actor = CausalLMActor(model)
        for n in (3, 4):
            check_step(actor, texts, [n, n, n + 1, n])
        before = true_logits(model, texts, [5, 5, 6, 5])
        change(model)
        assert not torch.allclose(before, true_logits(model, texts, [5, 5, 6, 5]), atol=1e-3)
        for n in (5, 6):
            check_step(actor, texts, [n, n, n + 1, n])

    @every_kind
    def test_merge_and_unmerge_compute_the_same(self, kind):
        model, texts = adapted(kind), random_texts(4)
        actor = CausalLMActor(model)
        expected = copy.deepcopy(model)
        for n, change in enumerate([None, model.merge_adapter, None, model.unmerge_adapter]):
            if change is not None:
                change()
            got = step(actor, texts, torch.full((4,), 4 + n))
            truth = true_logits(expected, texts, [4 + n] * 4).log_softmax(-1)
            assert_close(got, truth, atol=1e-4, rtol=0.0)  # the sum of weights is rounded

    @pytest.mark.parametrize(
        "options",
        [
            {"modules_to_save": ["lm_head"]},
            {"trainable_token_indices": {"embed_tokens": [1, 2]}},
            {"use_dora": True},
            {"lora_dropout": 0.1},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_other_parts_of_adapters(self, options):
        model: Any = peft.get_peft_model(make_model("llama"), config_of("llama", **options))
        sharp(model).eval()
        actor, texts = CausalLMActor(model), random_texts(4)
        for n in (3, 5, 7):
            for context in (nullcontext(), model.disable_adapter()):
                with context:
                    check_step(actor, texts, [n] * 4)
                    check_step(actor, texts, [n + 1] * 4)


class WithValueHead(nn.Module):
    """Logits of a model that has a value head, too."""

    def __init__(self, lm):
        super().__init__()
        self.lm, self.head = lm, nn.Linear(32, 1)

    def forward(self, tokens):
        return self.lm(tokens).logits


class TestWeightsThatLearn:
    """With the adapters switched off, none may be left on."""

    @pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers:UserWarning")
    @pytest.mark.parametrize(
        ("kind", "options", "name"),
        [
            ("gpt2", {"bias": "all"}, r"h\.0\.ln_1\.bias"),
            ("gpt", {"bias": "lora_only"}, r"query_key_value\.base_layer\.bias"),
        ],
    )
    def test_biases_are_refused(self, kind, options, name):
        model: Any = peft.get_peft_model(make_model(kind), config_of(kind, **options))
        actor = CausalLMActor(model)
        batch = sample_responses(actor, random_texts(3)[:, :4], 3, pad_token=0)
        transform = KLConstrainedTransform(actor, 0.1, reference=model.disable_adapter)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"must not learn.*such as '.*{name}': freeze"):
                transform(batch)
        KLConstrainedTransform(actor, 0.1)(batch)  # of a copy

    def test_a_value_head_may_learn(self):
        """Also with `reference.get_dist`, which the exact estimator calls."""
        base, model = make_model("llama"), WithValueHead(make_model("llama"))
        model.lm = peft.get_peft_model(model.lm, config_of("llama"))
        sharp(model.lm).eval()
        for parameter, weight in zip(
            (p for name, p in model.lm.named_parameters() if "lora" not in name),
            base.parameters(),
            strict=True,
        ):
            parameter.data.copy_(weight)
        actor = CausalLMActor(model)
        batch = sample_responses(actor, random_texts(3)[:, :4], 3, pad_token=0, return_logits=True)
        for estimator in ("k1", "exact"):
            options: dict[str, Any] = {"estimator": estimator}
            switched = KLConstrainedTransform(
                actor, 0.1, reference=model.lm.disable_adapter, **options
            )
            copied = KLConstrainedTransform(actor, 0.1, reference=CausalLMActor(base), **options)
            rewards = [transform(batch)["next", "reward"] for transform in (switched, copied)]
            assert_close(*rewards, atol=1e-5, rtol=0)
            assert rewards[0].abs().max() > 0.01

    @pytest.mark.parametrize(
        "options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 4]}]
    )
    def test_what_adapters_hold_is_allowed(self, options):
        model: Any = peft.get_peft_model(make_model("llama"), config_of("llama", **options))
        actor = CausalLMActor(model)
        KLConstrainedTransform(actor, 0.1, reference=model.disable_adapter)

    def test_two_adapters_of_single_tokens(self):
        config = peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[3, 4])
        model: Any = peft.get_peft_model(make_model("llama"), config)
        model.add_adapter("other", config)
        model.set_adapter("other")
        KLConstrainedTransform(CausalLMActor(model), 0.1, reference=model.disable_adapter)


class TestPrompts:
    def test_adapters_that_begin_at_later_tokens_are_refused(self):
        config = config_of("llama", task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
        model: Any = peft.get_peft_model(make_model("llama"), config)
        with pytest.raises(ValueError, match=r"adapter 'default' begins at the last tokens \[5, 6"):
            CausalLMActor(model)

    @pytest.mark.parametrize(
        "config",
        [
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        ],
        ids=lambda config: config.peft_type.value,
    )
    def test_virtual_tokens_are_refused(self, config):
        model = peft.get_peft_model(make_model("llama"), config)
        text = f"one output per token, but its adapter 'default' of type {config.peft_type.value} "
        with pytest.raises(ValueError, match=text + "adds 3 virtual tokens: use an adapter of"):
            CausalLMActor(model)

    @pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT 0.18
    def test_prefixes_are_read_without_a_cache(self):
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model: Any = peft.get_peft_model(make_model("llama"), config)
        sharp(model).eval()
        actor, texts = CausalLMActor(model), random_texts(3)
        with pytest.warns(UserWarning, match="keys and values of this model cannot be cached"):
            check_step(actor, texts, [4, 4, 4])
        for n in (5, 6):
            check_step(actor, texts, [n, n + 1, n])
        with model.disable_adapter():
            check_step(actor, texts, [7, 7, 7], make_model("llama"))
        batch = sample_responses(actor, texts[:, :4], 5, pad_token=0)
        again = KLConstrainedTransform(actor, 0.1)(batch)["next", "kl"]
        assert again.abs().max() < 1e-5


def test_a_copy_of_an_adapted_policy_is_a_reference_too():
    model = adapted("llama")
    actor = CausalLMActor(model)
    stack = KLConstrainedTransform(actor, 0.1)
    batch = sample_responses(actor, random_texts(5)[:, :4], 6, pad_token=0)
    edit_adapter(model)
    assert stack(batch)["next", "kl"].abs().max() < 1e-5
    state = TensorDict(tokens=random_texts(2), position=torch.tensor([4, 4]), batch_size=[2])
    assert actor(state)["logits"].shape == (2, VOCAB)
    assert state["tokens"].shape[-1] == LENGTH
