"""The private names of PyTorch and of Hugging Face that the package uses.

A failure names the version that has changed one. Those that _torchrl.py uses are in
test_torchrl_private.py. Here are also the methods that TorchRL and PyTorch call by name, which
would never run again if they were renamed.
"""

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.modules import MaskedCategorical

CHANGED = f"torch {torch.__version__} or what is built on it has renamed or changed it"


@pytest.mark.parametrize(
    ("owner", "name", "caller"),
    [
        (Transform, "_step", TransformedEnv._step),
        (Transform, "_reset", TransformedEnv._reset),
        (Transform, "_reset_on_native_autoreset", None),
        (EnvBase, "_step", EnvBase.step),
        (EnvBase, "_reset", EnvBase.reset),
        (EnvBase, "_set_seed", EnvBase.set_seed),
        (nn.Module, "_apply", nn.Module.to),
        (nn.Module, "_save_to_state_dict", nn.Module.state_dict),
        (nn.Module, "_load_from_state_dict", nn.Module.load_state_dict),
    ],
)
def test_methods_that_are_called_by_name(owner, name, caller):
    assert callable(getattr(owner, name, None)), CHANGED
    if caller is not None:
        assert f".{name}(" in inspect.getsource(caller), CHANGED


def test_what_a_module_holds():
    module = nn.BatchNorm1d(2)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    held = module._parameters, module._buffers, nn.Sequential(module)._modules
    assert [sorted(entries) for entries in held] == [
        ["bias", "weight"],
        ["num_batches_tracked", "running_mean", "running_var"],
        ["0"],
    ], CHANGED
    assert (len(module._forward_hooks), len(module._forward_pre_hooks)) == (1, 1), CHANGED


def test_the_version_of_a_tensor_counts_its_edits():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1, CHANGED


def test_the_parameter_of_a_categorical():
    """It is what the distribution was built with, normalized: NextToken sets the same ones."""
    probs, logits = torch.tensor([[0.25, 0.75, 0.0]]), torch.zeros(1, 3)
    torch.testing.assert_close(Categorical(probs=probs)._param, probs, msg=CHANGED)
    masked: Any = MaskedCategorical(logits=logits, mask=torch.tensor([[True, True, False]]))
    plain: Any = Categorical(logits=logits)
    for dist, share in ((plain, 1 / 3), (masked, 1 / 2)):
        torch.testing.assert_close(dist._param[0, 0].exp().item(), share, msg=CHANGED)
        assert dist._num_events == 3, CHANGED
        assert dist._event_shape == (), CHANGED


def test_the_attention_of_a_hugging_face_model():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    changed = f"transformers {transformers.__version__}: {CHANGED}"
    assert model.config._attn_implementation in ("sdpa", "eager"), changed
