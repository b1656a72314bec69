"""The private names of TorchRL that this package uses, all tested by test_torchrl_private.py."""

from tensordict import NestedKey
from torch import Tensor
from torch.distributions import Distribution
from torchrl.envs.transforms import DTypeCastTransform, ModuleTransform, Transform

from torchrl_kl.functional.distributions import COLUMN_READERS

HOOKS = ("_call", "_step", "_inv_call", "_post_step_mdp_hooks")  # what an env calls in a step


def container_of(transform: Transform) -> object:
    """The Compose or env that holds a transform, which may be in no env; None if nothing does."""
    reference = vars(transform)["_container"]
    return None if reference is None else reference()


def declared_keys(transform: Transform) -> tuple[set[NestedKey], set[NestedKey]]:
    """The `out_keys` and `in_keys_inv` of a transform, as far as they are known without an env."""
    if isinstance(transform, (DTypeCastTransform, ModuleTransform)):
        return set(transform.out_keys or ()), set(transform.in_keys_inv or ())
    # Elsewhere the public properties may ask for specs, and fail.
    out_keys, in_keys_inv = map(vars(transform).get, ("_out_keys", "_in_keys_inv"))
    return set(out_keys or ()), set(in_keys_inv or ())


def indices_of(distribution: Distribution) -> Tensor | None:
    """The action of each column of a MaskedCategorical given by `indices`; None: all, in order."""
    if getattr(distribution, "_sparse_mask", False):
        return getattr(distribution, "_mask", None)
    return None


COLUMN_READERS.append(indices_of)
