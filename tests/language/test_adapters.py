"""PEFT's adapters: a policy that is its own reference, and caches that follow every switch."""

import copy
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from torch.testing import assert_close
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.language.models import (
    KINDS,
    Passes,
    cache_of,
    check_step,
    make_model,
    random_texts,
    true_logits,
)
from torchrl_kl import KLConstrainedTransform
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


def true_log_prob(model: Any, batch: Any) -> torch.Tensor:
    log_probs = true_logits(model, batch["tokens"], batch["position"]).log_softmax(-1)
    return log_probs.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


@every_kind
@pytest.mark.parametrize("which", ["adapters off", "another adapter"])
class TestReference:
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
        assert_close(after["ref_log_prob"], true_log_prob(bare, batch), atol=2e-5, rtol=0.0)
        # And the policy is the one with its adapter.
        recorded = true_log_prob(merged(model, "default"), batch)
        assert_close(batch["action_log_prob"], recorded, atol=5e-5, rtol=0.0)

    def test_in_an_env_both_keep_their_cache(self, kind, which):
        model = adapted(kind)
        actor = CausalLMActor(model)
        switch, bare = references(model, kind)[which]
        stack = KLConstrainedTransform(actor, 0.1, reference=switch)
        env = TransformedEnv(DigitLanguageEnv(batch_size=[6], seed=0), stack)
        passes = Passes(model)
        torch.manual_seed(0)
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            env.rollout(4, actor)  # with a comparison
            passes.take()
            batch = env.rollout(4, actor)
        # New prompts are read by both; then each reads one position per step.
        assert passes.take() == [(6, 5)] * 2 + [(6, 1)] * 6
        assert len(cache_of(actor)._sets) == 2
        expected = true_log_prob(bare, batch)
        assert_close(batch["next", "ref_log_prob"], expected, atol=2e-5, rtol=0.0)
        kl = batch["action_log_prob"] - expected
        assert_close(batch["next", "kl"].squeeze(-1), kl, atol=2e-5, rtol=0.0)


def switch_off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def switch_adapter(model: Any) -> None:
    model.set_adapter("other")


def scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_scale("default", 3.0)


def merge(model: Any) -> None:
    model.merge_adapter(["other"])


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
    *(switch_off, switch_adapter, scale, merge, unload, edit_adapter, load_adapter),
    delete_adapter,
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


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_virtual_tokens_are_refused(kind):
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make_model("llama"), config)
    with pytest.raises(ValueError, match="one output per token, but .* adds virtual"):
        CausalLMActor(model)
