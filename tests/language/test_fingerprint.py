"""A cache is never stale: whatever changes of a model between two steps, log-probs follow."""

import gc
import multiprocessing
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import random_unstructured
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from tests.gpt_helpers import sharp
from tests.language.models import (
    KINDS,
    VOCAB,
    Passes,
    check_step,
    checkpoint,
    first_layer,
    make_actor,
    make_model,
    random_texts,
    step,
    true_logits,
)
from torchrl_kl.language import GPT, CausalLMActor
from torchrl_kl.language.fingerprint import Fingerprint


def matrix_of(model: nn.Module) -> torch.Tensor:
    """A weight that keys and values depend on."""
    return next(p for p in first_layer(model).parameters() if p.ndim == 2)


def optimizer_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(random_texts(2))
    output = output if isinstance(output, torch.Tensor) else output.logits
    output.logsumexp(-1).sum().backward()
    optimizer.step()


def fused_optimizer_step(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.05, fused=True).step()


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        matrix_of(model).mul_(1.5)


def edit_data(model: Any) -> None:
    matrix_of(model).data.add_(0.1)


def set_data(model: Any) -> None:
    matrix_of(model).data = matrix_of(model).data * 1.5


def set_data_twice(model: Any) -> None:
    """The memory of the first weights is free when the second ones are made."""
    for _ in range(2):
        set_data(model)
        gc.collect()


def edit_row(model: Any) -> None:
    matrix_of(model).data[3] += 1.0


def edit_last_row(model: Any) -> None:
    matrix_of(model).data[-1] += 1.0


def edit_column(model: Any) -> None:
    matrix_of(model).data[:, 7] += 1.0


def edit_last_column(model: Any) -> None:
    matrix_of(model).data[:, -1] += 1.0


def edit_bias_like(model: Any) -> None:
    vector = next(p for p in first_layer(model).parameters() if p.ndim == 1)
    vector.data[5] += 1.0


def load_weights(model: Any) -> None:
    model.load_state_dict({k: v * 1.2 for k, v in model.state_dict().items()})


def assign_weights(model: Any) -> None:
    model.load_state_dict({k: v * 1.2 for k, v in model.state_dict().items()}, assign=True)


def update_tensordict(model: Any) -> None:
    weights: Any = TensorDict.from_module(model)
    weights.data.update_(weights.data * 1.2)


def put_tensordict(model: Any) -> None:
    weights: Any = TensorDict.from_module(model)
    (weights.data.clone() * 1.2).to_module(model)


def replace_module(model: Any) -> None:
    name, layer = next(
        (n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)
    )
    parent, _, last = name.rpartition(".")
    make: Any = type(layer)
    twin = make(*layer.weight.shape)
    setattr(model.get_submodule(parent), last, sharp(twin, seed=8))


def replace_parameter(model: Any) -> None:
    owner, name = next(
        (m, n) for m in first_layer(model).modules() for n, p in m.named_parameters(recurse=False)
    )
    setattr(owner, name, nn.Parameter(getattr(owner, name).detach() + 0.3))


def add_hook(model: Any) -> None:
    first_layer(model).register_forward_hook(
        lambda _, __, out: out * 2 if isinstance(out, torch.Tensor) else (out[0] * 2, *out[1:])
    )


def add_pre_hook(model: Any) -> None:
    first_layer(model).register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2, *inputs[1:]))


def prune(model: Any) -> None:
    layer = next(m for m in first_layer(model).modules() if hasattr(m, "weight"))
    random_unstructured(layer, "weight", 0.5)


def parametrize(model: Any) -> None:
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer = next(m for m in first_layer(model).modules() if hasattr(m, "weight"))
    register_parametrization(layer, "weight", Twice())


def cast_to_double(model: Any) -> None:
    model.double()


def cast_and_back(model: Any) -> None:
    model.to(torch.bfloat16).float()


CHANGES: list[Callable[[Any], None]] = [
    *(optimizer_step, fused_optimizer_step, edit_in_place, edit_data, set_data, set_data_twice),
    *(edit_row, edit_last_row, edit_column, edit_last_column, edit_bias_like, load_weights),
    *(assign_weights, update_tensordict, put_tensordict, replace_module, replace_parameter),
    *(add_hook, add_pre_hook, prune, parametrize, cast_to_double, cast_and_back),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_between_two_steps(kind, change):
    actor, texts = make_actor(kind), random_texts(4)
    model = actor.reader.lm.model
    for n in (3, 4):
        check_step(actor, texts, [n, n, n + 1, n])
    before = true_logits(model, texts, [5, 5, 6, 5])
    change(model)
    after = true_logits(model, texts, [5, 5, 6, 5])
    if change is not cast_to_double:
        assert not torch.allclose(before, after, atol=1e-3), "the change does nothing"
    for n in (5, 6):
        check_step(actor, texts, [n, n, n + 1, n])


def test_a_hook_in_place_of_another():
    actor, texts = make_actor("gpt"), random_texts(4)
    block = first_layer(actor.reader.lm.model)
    handle = block.register_forward_hook(lambda *_: None)
    check_step(actor, texts, [4, 4, 5, 4])
    handle.remove()
    block.register_forward_hook(lambda *inputs: 2 * inputs[-1])
    check_step(actor, texts, [5, 5, 6, 5])


@pytest.mark.parametrize("kind", KINDS)
def test_each_edit_of_a_row_or_column_of_any_matrix(kind):
    """Through `.data`, which PyTorch does not count."""
    model = make_model(kind)
    fingerprint = Fingerprint(model)
    for name, parameter in model.named_parameters():
        for dim in range(parameter.ndim):
            for index in range(parameter.shape[dim]):
                before = fingerprint.values()
                parameter.data.select(dim, index).add_(0.1)
                assert not fingerprint.values().equal(before), (name, dim, index)
    assert fingerprint.values().equal(fingerprint.values())


SHAPES = [(), (1,), (5,), (1, 7), (7, 1), (6, 9), (9, 6), (8, 8), (2, 3, 4), (4, 1, 5), (0, 3)]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_of_any_layout(shape, layout):
    module = nn.Module()
    tensor = torch.zeros(shape)
    if layout == "transposed":
        tensor = torch.zeros(shape[::-1]).permute(list(reversed(range(len(shape)))))
    elif layout == "sliced":
        larger = torch.zeros([2 * n for n in shape])
        tensor = larger[tuple(slice(None, None, 2) for _ in shape)]
    elif layout == "expanded":
        tensor = torch.zeros([1, *shape[1:]]).expand(shape) if shape else tensor
    module.register_buffer("tensor", tensor)
    fingerprint = Fingerprint(module)
    assert tensor.shape == shape
    for dim in range(tensor.ndim):
        for index in range(tensor.shape[dim] if tensor.numel() else 0):
            before = fingerprint.values()
            part = tensor.data.select(dim, index)
            part.copy_(part + 1.0) if layout != "expanded" else part.fill_(dim * 10.0 + index + 1)
            assert not fingerprint.values().equal(before), (dim, index)
    if not shape:
        before = fingerprint.values()
        tensor.data.fill_(1.0)
        assert not fingerprint.values().equal(before)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float16, torch.uint16, torch.bool, torch.complex64, torch.int64],
)
def test_tensors_of_any_dtype(dtype):
    """Next to others in float32, in which the last bit of a large int64 would be lost."""
    model = make_model("gpt")
    value = torch.full((3,), 2**40) if dtype == torch.int64 else torch.ones(3).to(dtype)
    model.register_buffer("other", value)
    fingerprint = Fingerprint(model)
    before = fingerprint.values()
    other: Any = model.other
    other.data[1] = value[1] + 1 if dtype == torch.int64 else torch.zeros(()).to(dtype)
    assert not fingerprint.values().equal(before)


def test_a_weight_that_holds_others():
    """As those of quantized or sharded models do."""
    model = make_model("gpt")
    parts = torch.zeros(3, 2), torch.ones(3, 2)
    model.register_buffer("other", TwoTensor(*parts))
    fingerprint = Fingerprint(model)
    for part in parts:
        before = fingerprint.values()
        assert fingerprint.values().equal(before)
        part.data.add_(1.0)
        assert not fingerprint.values().equal(before)


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        actor = make_actor("gpt")
    texts = random_texts(3)
    with torch.inference_mode():
        check_step(actor, texts, [4, 4, 4])
        matrix_of(actor.reader.lm.model).mul_(1.5)
        check_step(actor, texts, [5, 5, 5])


class Scaled(nn.Module):
    """A model whose keys depend on a buffer."""

    def __init__(self, persistent: bool):
        super().__init__()
        self.gpt = make_model("gpt")
        self.register_buffer("scale", torch.ones(1), persistent=persistent)
        self.gpt.blocks[0].register_forward_pre_hook(lambda _, x: (x[0] * self.scale, *x[1:]))

    def forward(self, tokens, past_key_values=None, position_ids=None, attention_mask=None):
        options: Any = {"past_key_values": past_key_values, "position_ids": position_ids}
        return self.gpt(tokens, attention_mask=attention_mask, **options)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers(persistent):
    model: Any = Scaled(persistent)
    actor, texts = CausalLMActor(model), random_texts(3)
    passes = Passes(model)
    for n in (3, 4):
        check_step(actor, texts, [n, n, n])
    assert (3, 1) in passes
    model.scale.data.fill_(2.0)
    check_step(actor, texts, [5, 5, 5])
    model.scale = torch.full((1,), 3.0)
    check_step(actor, texts, [6, 6, 6])


class TestModes:
    @pytest.mark.parametrize("kind", ["gpt", "gpt2"])
    def test_eval_after_steps_with_dropout(self, kind):
        actor, texts = CausalLMActor(make_model(kind, dropout=0.5)), random_texts(4)
        expected = true_logits(actor.reader.lm.model, texts, [5] * 4).log_softmax(-1)
        actor.train()
        noisy = [step(actor, texts, torch.full((4,), 5)) for _ in range(2)]
        assert not torch.equal(*noisy)
        assert ((noisy[0] - expected).abs().amax(-1) > 0.1).all()
        actor.eval()
        check_step(actor, texts, [6] * 4)
        check_step(actor, texts, [7] * 4)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [4, 6, 3, 5]], ids=["equal", "ragged"])
    def test_autocast(self, kind, lengths):
        actor, plain = make_actor(kind), make_actor(kind, cache_bytes=0)
        texts = random_texts(4)
        half = torch.autocast("cpu", torch.bfloat16)
        for n, context in enumerate([nullcontext(), half, half, nullcontext(), nullcontext()]):
            with context:
                got, expected = (step(a, texts, torch.tensor(lengths) + n) for a in (actor, plain))
            bound = 2e-5 if isinstance(context, nullcontext) else 0.5
            assert_close(got, expected, atol=bound, rtol=0.0)

    @pytest.mark.parametrize("kind", ["llama", "qwen2"])
    def test_autocast_to_another_half_precision(self, kind):
        """As by `torch.autocast("cuda")` around a checkpoint in bfloat16."""
        actor, plain = make_actor(kind).bfloat16(), make_actor(kind, cache_bytes=0).bfloat16()
        texts = random_texts(4)
        with torch.autocast("cpu", torch.float16):
            for n in range(3):
                ends = torch.tensor([4, 6, 3, 5]) + n
                got, expected = (step(each, texts, ends) for each in (actor, plain))
                assert_close(got, expected, atol=0.5, rtol=0.0)

    @pytest.mark.parametrize("in_rollout", [True, False])
    def test_autocast_of_a_rollout_and_its_loss(self, in_rollout):
        """Weights that autocast casts in the rollout still receive gradients."""
        actor = make_actor("llama")
        texts = random_texts(3)
        with torch.autocast("cpu", torch.bfloat16):
            step(actor, texts, torch.tensor([4, 4, 4]))
            actor.reader(texts, torch.tensor([4, 4, 4])).logsumexp(-1).sum().backward()
        assert all(p.grad is not None for p in actor.parameters())

    def test_requires_grad_changes_nothing_and_costs_nothing(self):
        actor, texts = make_actor("llama"), random_texts(3)
        passes = Passes(actor)
        check_step(actor, texts, [4, 4, 4])
        actor.requires_grad_(False)
        passes.take()
        step(actor, texts, torch.tensor([5, 5, 5]))
        assert passes.take() == [(3, 1)]


class TestCheckpointing:
    """Hugging Face's models use no cache then, and only say so in a log."""

    @pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
    def test_steps(self, kind):
        model = make_model(kind)
        checkpoint(model)
        actor, texts = CausalLMActor(model.train()), random_texts(3)
        for n in (4, 5, 6):
            check_step(actor, texts, [n, n, n])
            check_step(actor, texts, [n, n + 1, n])
        actor.eval()
        passes = Passes(actor)
        check_step(actor, texts, [7, 7, 7])
        check_step(actor, texts, [8, 8, 8])
        assert (3, 1) in passes


@pytest.mark.timeout(600, method="thread")
def test_shared_memory_that_another_process_edits():
    actor, texts = make_actor("llama"), random_texts(3)
    check_step(actor, texts, [4, 4, 4])
    actor.share_memory()
    check_step(actor, texts, [5, 5, 5])
    weight = matrix_of(actor.reader.lm.model).detach()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=operator.iadd, args=[weight, 0.2])
    process.start()
    process.join()
    assert process.exitcode == 0
    check_step(actor, texts, [6, 6, 6])


class TestTrial:
    """Each model is tried once, as some compute something else with a cache."""

    def test_a_model_that_computes_something_else(self):
        class Moved(GPT):
            def forward(self, tokens, past_key_values=None, attention_mask=None, position_ids=None):
                options: Any = {
                    "past_key_values": past_key_values,
                    "attention_mask": attention_mask,
                }
                return super().forward(tokens, **options)

        actor = CausalLMActor(sharp(Moved(VOCAB, 20)).eval())
        texts = random_texts(3)
        with pytest.warns(UserWarning, match=r"cannot be cached \(its outputs differ by .*whole"):
            check_step(actor, texts, [4, 4, 4])
        for n in (5, 6):
            check_step(actor, texts, [n, n + 1, n])

    def test_a_model_that_raises(self):
        class Picky(GPT):
            def forward(self, tokens, past_key_values=None, attention_mask=None, position_ids=None):
                if past_key_values is not None:
                    raise KeyError("masks of two dimensions only")
                return super().forward(tokens)

        actor = CausalLMActor(sharp(Picky(VOCAB, 20)).eval())
        with pytest.warns(UserWarning, match=r"cannot be cached \(it raised KeyError: 'masks of"):
            check_step(actor, random_texts(3), [4, 5, 6])
        check_step(actor, random_texts(3), [5, 6, 7])

    def test_it_leaves_modes_and_random_numbers_alone(self):
        model = make_model("gpt2", dropout=0.3).train()
        model.transformer.h[1].eval()
        modes = [m.training for m in model.modules()]
        actor = CausalLMActor(model)
        torch.manual_seed(1)
        first = step(actor, random_texts(3), torch.tensor([4, 4, 4]))  # with a trial
        actor.clear_cache()
        torch.manual_seed(1)
        again = step(actor, random_texts(3), torch.tensor([4, 4, 4]))
        assert torch.equal(first, again)
        assert [m.training for m in model.modules()] == modes

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_models_of_few_tokens(self, size):
        actor = CausalLMActor(sharp(GPT(2, size)).eval())
        texts = random_texts(3) % 2
        for n in range(1, size + 1):
            check_step(actor, texts[:, :size], [n] * 3)
