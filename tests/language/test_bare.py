"""A model computes the same bare, whatever was done to its modules, and calls fewer of them."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured
from torch.testing import assert_close

from tests.gpt_helpers import sharp
from tests.language.models import random_texts
from torchrl_kl.language import GPT, CausalLMActor
from torchrl_kl.language.bare import BareView, bare
from torchrl_kl.language.causal_lm import CausalLM

TEXTS = random_texts(3)[:, :8]
PARTS = [
    *("", "blocks.1", "blocks.1.attention", "blocks.1.attention_norm", "blocks.1.expand"),
    *("blocks.1.attention.query_key_value", "blocks.1.attention.project", "token_embedding"),
    *("position_embedding", "norm", "head"),
]
each_part = pytest.mark.parametrize("name", PARTS)


def make_gpt(**options) -> Any:
    return sharp(GPT(11, 20, n_layer=2, n_head=4, n_embd=32, **options)).eval()


def check(gpt: nn.Module) -> None:
    """Outputs and gradients are the same numbers."""
    found = []
    for model in (gpt, bare(gpt)):
        gpt.zero_grad()
        torch.manual_seed(0)
        outputs = model(TEXTS)
        outputs.square().sum().backward()
        found.append([outputs, *(weight.grad for weight in gpt.parameters())])
    for own, expected in zip(*found, strict=True):
        assert_close(own, expected, atol=0.0, rtol=0.0)


def check_change(gpt: nn.Module, before: Tensor) -> None:
    """The change shows in the outputs of the bare model."""
    assert not torch.equal(bare(gpt)(TEXTS), before)
    check(gpt)


def module_calls(run: Callable[[], Any]) -> int:
    """How many modules are called."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is nn.Module._call_impl.__code__

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_only_the_model_is_called():
    gpt = make_gpt()
    assert module_calls(lambda: gpt(TEXTS)) == 1 + 2 + 2 * 8 + 2
    assert module_calls(lambda: bare(gpt)(TEXTS)) == 1
    check(gpt)


def test_in_train_mode_with_dropout():
    gpt = make_gpt(dropout=0.3).train()
    check(gpt)
    assert not torch.equal(bare(gpt)(TEXTS), bare(gpt.eval())(TEXTS))


def test_a_block_that_is_called_twice():
    gpt = make_gpt()
    before = gpt(TEXTS)
    gpt.blocks[1] = gpt.blocks[0]
    check_change(gpt, before)


@pytest.mark.filterwarnings("ignore:Full backward hook")  # of tokens, which have no gradient
@each_part
def test_hooks_are_called(name):
    gpt, called = make_gpt(), []
    before, part = gpt(TEXTS), gpt.get_submodule(name)
    part.register_forward_pre_hook(lambda *_: called.append("before"))
    part.register_forward_hook(lambda _, __, output: (called.append("after"), 2 * output)[1])
    part.register_full_backward_pre_hook(lambda *_: called.append("backward before"))
    part.register_full_backward_hook(lambda *_: called.append("backward after"))
    check_change(gpt, before)
    called.clear()
    bare(gpt)(TEXTS).sum().backward()
    assert set(called) == {"before", "after", "backward before", "backward after"}


@pytest.mark.parametrize("kind", ["pre_hook", "hook", "backward_hook", "backward_pre_hook"])
def test_one_kind_of_hook_is_enough(kind):
    names = {"backward_hook": "full_backward_hook", "backward_pre_hook": "full_backward_pre_hook"}
    name = names.get(kind, f"forward_{kind}")
    for part in ("blocks.0", "blocks.0.project"):
        gpt, called = make_gpt(), []
        getattr(gpt.get_submodule(part), f"register_{name}")(lambda *_: called.append(0))  # noqa: B023
        bare(gpt)(TEXTS).sum().backward()
        assert called == [0]


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(
    "register",
    [
        register_module_forward_hook,
        register_module_forward_pre_hook,
        register_module_full_backward_hook,
    ],
)
def test_hooks_of_all_modules_are_called(register):
    gpt, called = make_gpt(), []
    handle = register(lambda module, *_: called.append(type(module)))
    try:
        bare(gpt)(TEXTS).sum().backward()
    finally:
        handle.remove()
    assert called.count(nn.Linear) == 2 * 4 + 1


@each_part
def test_a_forward_of_an_instance(name):
    gpt = make_gpt()
    before, part = gpt(TEXTS), gpt.get_submodule(name)
    usual = part.forward
    part.forward = lambda *args, **kwargs: 2 * usual(*args, **kwargs)
    check_change(gpt, before)


@each_part
def test_a_subclass(name):
    gpt = make_gpt()
    before, part = gpt(TEXTS), gpt.get_submodule(name)
    kind = type(part)

    def forward(self, *args, **kwargs):
        return 2 * kind.forward(self, *args, **kwargs)

    part.__class__ = type("Twice", (kind,), {"forward": forward})
    check_change(gpt, before)


@pytest.mark.parametrize("name", ["", "blocks.1", "blocks.1.attention"])
def test_a_compiled_part(name):
    gpt, called = make_gpt(), []

    def backend(graph, _):
        called.append(name)
        return graph.forward

    gpt.get_submodule(name).compile(backend=backend)
    with torch.no_grad():
        bare(gpt)(TEXTS)
    assert called


def test_inside_a_compiled_function():
    gpt = make_gpt()
    read = torch.compile(lambda texts: bare(gpt)(texts), backend="eager", fullgraph=True)
    assert read(TEXTS).equal(gpt(TEXTS))


@pytest.mark.parametrize(
    "change", [weight_norm, spectral_norm, lambda m: l1_unstructured(m, "weight", 0.5)]
)
def test_a_weight_that_is_computed(change):
    gpt = make_gpt()
    before = gpt(TEXTS)
    change(gpt.blocks[0].expand)
    with torch.no_grad():
        for weight in gpt.parameters():
            weight.mul_(1.1)
    assert_close(bare(gpt)(TEXTS), gpt(TEXTS), atol=0.0, rtol=0.0)
    assert not torch.equal(bare(gpt)(TEXTS), before)


def test_a_parameter_that_a_layer_does_not_use():
    gpt = make_gpt()
    gpt.head.extra = nn.Parameter(torch.zeros(()))
    assert bare(gpt)(TEXTS).equal(gpt(TEXTS))


@pytest.mark.parametrize("last", ["query_key_value", "project", "expand", "head"])
def test_adapters(last):
    gpt = make_gpt()
    before = gpt(TEXTS)
    inject_adapter_in_model(LoraConfig(target_modules=[last], init_lora_weights=False), gpt)
    check_change(gpt, before)


@pytest.mark.parametrize("key", [key for key, _ in make_gpt().named_parameters()])
def test_weights_of_others(key):
    """For a call by `functional_call` or TensorDict, as losses of TorchRL make it."""
    gpt = make_gpt()
    before = gpt(TEXTS)
    other = gpt.get_parameter(key).detach() + 0.1 * torch.randn(gpt.get_parameter(key).shape)
    expected = functional_call(gpt, {key: other}, TEXTS)
    assert not torch.equal(expected, before)
    lm = _Bare(gpt)
    own = functional_call(lm, {f"gpt.{key}": other}, TEXTS)
    assert_close(own, expected, atol=0.0, rtol=0.0)
    weights: Any = TensorDict.from_module(gpt)
    weights = weights.clone()
    weights[tuple(key.split("."))] = other
    with weights.to_module(gpt):
        assert_close(bare(gpt)(TEXTS), expected, atol=0.0, rtol=0.0)
    assert_close(bare(gpt)(TEXTS), before, atol=0.0, rtol=0.0)


class _Bare(nn.Module):
    def __init__(self, gpt: nn.Module):
        super().__init__()
        self.gpt = gpt

    def forward(self, texts: Tensor) -> Tensor:
        return bare(self.gpt)(texts)


def test_precisions_and_copies():
    gpt = make_gpt()
    for model in (copy.deepcopy(gpt).double(), copy.deepcopy(gpt).bfloat16(), gpt):
        check(model)
    with torch.autocast("cpu", torch.bfloat16):
        check(gpt)
        assert bare(gpt)(TEXTS).dtype == torch.bfloat16


def test_a_language_model_of_any_class():
    lm = CausalLM(nn.Sequential(nn.Embedding(11, 11), nn.Linear(11, 11)))
    assert bare(lm)(TEXTS).equal(lm(TEXTS))
    other = nn.Linear(3, 3)
    assert bare(other) is other


@pytest.mark.parametrize("option", ["padding_idx", "max_norm"])
def test_an_embedding_with_options(option):
    gpt = make_gpt()
    before = gpt(TEXTS)
    setattr(gpt.token_embedding, option, {"padding_idx": 3, "max_norm": 0.5}[option])
    if option == "max_norm":  # which a lookup applies to the weights
        check_change(gpt, before)
    else:
        check(gpt)
        gpt.zero_grad()
        bare(gpt)(TEXTS).sum().backward()
        assert (TEXTS == 3).any()
        assert gpt.token_embedding.weight.grad[3].eq(0).all()


def _change_forward(part):
    usual = part.forward
    part.forward = lambda *args, **kwargs: 2 * usual(*args, **kwargs)


def _change_class(part):
    forward = type(part).forward
    body = {"forward": lambda self, *args, **kwargs: 2 * forward(self, *args, **kwargs)}
    part.__class__ = type("Twice", (type(part),), body)


def _change_number(part):
    norm = part.norm if hasattr(part, "norm") else part
    norm.eps = 1.0


class TestBareView:
    def test_it_is_one_copy_as_long_as_nothing_changes(self):
        gpt = make_gpt()
        view = BareView(gpt)
        first = view.get(0)
        assert view.get(0) is first
        assert module_calls(lambda: first(TEXTS)) == 1
        gpt.head.weight.data.mul_(2)
        assert view.get(0) is first
        assert first(TEXTS).equal(gpt(TEXTS))

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            *[(name, change) for name in PARTS for change in (_change_forward, _change_class)],
            *[(name, _change_number) for name in ("norm", "blocks.1.attention_norm")],
            ("", lambda gpt: gpt.train()),
            ("", lambda gpt: setattr(gpt.blocks[0].attention, "n_head", 8)),
        ],
    )
    def test_it_sees_changes_of_attributes(self, name, change):
        gpt = make_gpt(dropout=0.3)
        view = BareView(gpt)
        before = view.get(0)(TEXTS)
        change(gpt.get_submodule(name))
        torch.manual_seed(0)
        after = view.get(0)(TEXTS)
        torch.manual_seed(0)
        assert after.equal(gpt(TEXTS))
        assert not after.equal(before)

    def test_it_is_told_of_other_weights_and_hooks(self):
        gpt, called = make_gpt(), []
        view = BareView(gpt)
        view.get(0)
        gpt.head.weight = nn.Parameter(2 * gpt.head.weight.detach())
        assert view.get(1)(TEXTS).equal(gpt(TEXTS))
        gpt.norm.register_forward_hook(lambda *_: called.append(0))
        view.get(2)(TEXTS)
        assert called == [0]

    def test_hooks_of_all_modules(self):
        gpt = make_gpt()
        view = BareView(gpt)
        view.get(0)
        handle = register_module_forward_hook(lambda *_: None)
        try:
            assert view.get(0) is gpt
        finally:
            handle.remove()
        assert view.get(0) is not gpt


@pytest.mark.parametrize("change", [_change_forward, _change_class])
def test_a_change_between_two_steps_of_a_rollout(change):
    """What was read before is kept, as its weights are; what is read next is computed anew."""
    actor = CausalLMActor(make_gpt())
    state = TensorDict({"tokens": TEXTS, "position": torch.full((3,), 5)}, [3])
    with torch.no_grad():
        actor.get_dist(state.clone())
        change(actor.reader.lm.model.head)
        state["position"] += 1
        own = actor.get_dist(state.clone()).logits
        actor.clear_cache()
        assert_close(own, actor.get_dist(state.clone()).logits)
