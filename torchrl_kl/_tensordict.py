"""Keys, shapes, masks and specs of TensorDicts; *B: the batch, *A: agents of nested actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import cast

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite, Unbounded

MASK_KEY = ("collector", "mask")
TRAJECTORY_KEY = ("collector", "traj_ids")
RECORD_LOG_PROB = (
    "build the policy with ProbabilisticActor(..., return_log_prob=True), name the entry that it "
    "records with `KLKeys(log_prob=...)`, or let the policy be asked again with "
    "`recompute_log_prob=True` of ReferenceModelLogProbTransform or FrozenActor (for "
    "KLConstrainedTransform: `reference=FrozenActor(actor, recompute_log_prob=True)`)."
)


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """A key as a tuple of strings."""
    return (key,) if isinstance(key, str) else cast(tuple[str, ...], key)


def sibling(key: NestedKey, name: str) -> NestedKey:
    """The key called `name` in the same nested tensordict as `key`."""
    return unravel_key((*as_tuple(key)[:-1], name))


def hidden_key(key: NestedKey, name: str) -> NestedKey:
    """A scratch entry, by which one part of the stack tells the next what is not recorded."""
    # Collectors drop entries whose names begin with "_", after their `postproc`.
    return f"_{'_'.join(as_tuple(key))}_{name}"


@dataclass(frozen=True)
class KLKeys:
    """Names of all entries that a KL stack reads and writes.

    None means the default name; "next to" an entry means in the same nested tensordict. All but
    `log_prob` and `top_k` are entries of "next".

    Args:
        log_prob: the policy's log-prob of its action, or a list of the log-probs of the parts of a
            composite action, which are added up; by default `actor.log_prob_keys`.
        ref_log_prob: the log-prob under the reference; by default next to `log_prob`.
        kl: k1 of each step; by default next to `log_prob`, or at the root if agents are summed.
        kl_estimate: another estimate of the same KL; by default next to `kl`.
        episode_kl: running sum of the measured KL; by default next to `kl`.
        reward: the reward that is penalized.
        task_reward, kl_coeff: the reward before the penalty, and the coefficient; next to `reward`.
        done: the end of a trajectory, where the env resets; by default next to `reward`, or else
            at the root.
        top_k: where TopKActor records its k most likely actions; by default next to `log_prob`.

    Example:
        >>> from torchrl_kl import KLKeys
        >>> KLKeys(reward=("agents", "reward")).resolve(("agents", "action_log_prob")).kl_coeff
        ('agents', 'kl_coeff')
        >>> KLKeys.named("second").resolve("action_log_prob").kl
        'second_kl'
    """

    log_prob: NestedKey | list[NestedKey] | None = None
    ref_log_prob: NestedKey | None = None
    kl: NestedKey | None = None
    kl_estimate: NestedKey | None = None
    episode_kl: NestedKey | None = None
    reward: NestedKey = "reward"
    task_reward: NestedKey | None = None
    kl_coeff: NestedKey | None = None
    done: NestedKey | None = None
    top_k: NestedKey | None = None
    _prefix: str = field(default="", repr=False)

    @classmethod
    def named(cls, name: str, **keys: NestedKey) -> KLKeys:
        """Keys of a further stack on the same data: its default names start with `name` and "_"."""
        return replace(cls(**keys), _prefix=f"{name}_")  # type: ignore[arg-type]

    def with_reward(self, reward: NestedKey, penalized: NestedKey) -> KLKeys:
        """These keys for a reward whose penalized value, and the coefficient, go elsewhere."""
        coeff = self.kl_coeff or sibling(penalized, f"{self._prefix}kl_coeff")
        return replace(self, reward=reward, kl_coeff=coeff)

    def resolve(
        self, log_prob: NestedKey | list[NestedKey] = "action_log_prob", *, sum_agents: bool = False
    ) -> ResolvedKeys:
        """All keys filled in; `log_prob`: where the policy records it unless these keys name it."""
        recorded, prefix = LogProbKeys(self.log_prob or log_prob), self._prefix
        # Agents that share a reward have one KL, (*B, 1) at the root, else (*B, *A, 1).
        kl = self.kl or (f"{prefix}kl" if sum_agents else recorded.sibling(f"{prefix}kl"))
        default = {
            "ref_log_prob": recorded.sibling(f"{prefix}ref_log_prob"),
            "kl": kl,
            "kl_estimate": sibling(kl, f"{prefix}kl_estimate"),
            "episode_kl": sibling(kl, f"{prefix}episode_kl"),
            "reward": self.reward,
            "task_reward": sibling(self.reward, f"{prefix}task_reward"),
            "kl_coeff": sibling(self.reward, f"{prefix}kl_coeff"),
            "done": sibling(self.reward, "done"),
            "top_k": recorded.sibling("top_k"),
        }
        keys = {name: unravel_key(getattr(self, name) or key) for name, key in default.items()}
        return ResolvedKeys(recorded=recorded, done_named=self.done is not None, **keys)


def as_keys(keys: KLKeys | None) -> KLKeys:
    """The keys, or the default ones; TypeError for anything else."""
    if not isinstance(keys, KLKeys | None):
        got = type(keys).__name__
        raise TypeError(f'`keys` must be KLKeys, got {got}: write `KLKeys(kl="...")`.')
    return keys or KLKeys()


@dataclass(frozen=True)
class ResolvedKeys:
    """The entries of one stack, all named; `done_named`: whether the user named `done`."""

    recorded: LogProbKeys
    ref_log_prob: NestedKey
    kl: NestedKey
    kl_estimate: NestedKey
    episode_kl: NestedKey
    reward: NestedKey
    task_reward: NestedKey
    kl_coeff: NestedKey
    done: NestedKey
    top_k: NestedKey
    done_named: bool

    @property
    def log_prob(self) -> NestedKey | list[NestedKey]:
        """Where the policy records its log-prob: one key, or a list for the parts of its action."""
        return self.recorded.key


class LogProbKeys:
    """Where the log-prob of an action is: `key`, or one key for each part of a composite action."""

    def __init__(self, key: NestedKey | list[NestedKey]):
        self.keys = [unravel_key(one) for one in (key if isinstance(key, list) else [key])]
        self.key = self.keys[0] if len(self.keys) == 1 else self.keys
        self.name = self.keys[0] if len(self.keys) == 1 else " + ".join(map(str, self.keys))
        # The KL is the sum over the parts: it belongs to the nested tensordict that holds them all.
        first, *others = (as_tuple(one)[:-1] for one in self.keys)
        depth = len(first)
        while any(path[:depth] != first[:depth] for path in others):
            depth -= 1
        self.branch = first[:depth]

    def sibling(self, name: str) -> NestedKey:
        """The key called `name` in the nested tensordict that holds all of them."""
        return unravel_key((*self.branch, name))

    def batch_size(self, tensordict: TensorDictBase) -> torch.Size:
        """Batch size of that nested tensordict: the shape of the log-prob."""
        return holder_batch_size(tensordict, (*self.branch, "log_prob"))

    def missing(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """The keys that are not in the data."""
        return [key for key in self.keys if tensordict.get(key, None) is None]

    def read(self, tensordict: TensorDictBase, shape: torch.Size | None = None) -> Tensor | None:
        """The log-prob of the whole action, nats, of `shape`; None if an entry is missing."""
        parts = [tensordict.get(key, None) for key in self.keys]
        if any(part is None for part in parts):
            return None
        # (*B, *A); the dimensions behind it are those of an action.
        shape = self.batch_size(tensordict) if shape is None else shape
        first, *others = (sum_action_dims(part, shape) for part in parts)
        return sum(others, first)

    def require(self, tensordict: TensorDictBase) -> Tensor:
        """The log-prob of the whole action; KeyError if an entry is missing."""
        for key in self.missing(tensordict):
            get_required(tensordict, key, RECORD_LOG_PROB)
        return cast(Tensor, self.read(tensordict))


def holder_batch_size(tensordict: TensorDictBase, key: NestedKey) -> torch.Size:
    """Batch size of the nested tensordict that holds `key`, or else of the root."""
    # A nested tensordict of agents has the batch size (*B, *A), its root only (*B).
    path = as_tuple(key)[:-1]
    holder = tensordict.get(path, None) if path else None
    return tensordict.batch_size if holder is None else holder.batch_size


def sum_action_dims(value: Tensor, batch_size: torch.Size) -> Tensor:
    """Sums the dimensions behind the batch: (*B, n), as of a `Normal`, becomes (*B)."""
    n = len(batch_size)
    return value.sum(tuple(range(n, value.ndim))) if n < value.ndim else value


def expand_right(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Expands a value of the first dimensions of `shape`, perhaps with trailing 1s, to `shape`."""
    if value.shape == torch.Size(shape):
        return value
    # A flag (*B, 1) fits values (*B, *A, 1) once its last 1 is removed.
    while value.ndim and value.shape[-1] == 1 and value.shape != torch.Size(shape[: value.ndim]):
        value = value.squeeze(-1)
    if value.shape != torch.Size(shape[: value.ndim]):
        raise ValueError(
            f"a flag must have the first dimensions of {tuple(shape)}, and perhaps trailing 1s, "
            f"got shape {tuple(value.shape)}."
        )
    return value.reshape(value.shape + (1,) * (len(shape) - value.ndim)).expand(shape)


def existing_keys(tensordict: TensorDictBase | Composite) -> str:
    """The keys of a tensordict or spec as a short, sorted text for an error message."""
    return ", ".join(sorted(str(key) for key in tensordict.keys(True, True)))


def leaf_keys(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[NestedKey]:
    """The keys; instead of one of a nested tensordict, those of all that it holds."""
    leaves: list[NestedKey] = []
    for key in keys:
        value = tensordict.get(key, None)
        if isinstance(value, TensorDictBase):
            inner = sorted(map(as_tuple, value.keys(True, True)))
            leaves += [unravel_key((*as_tuple(key), *path)) for path in inner]
        else:
            leaves.append(key)
    return leaves


def get_required(tensordict: TensorDictBase, key: NestedKey, fix: str) -> Tensor:
    """The entry `key`; KeyError with the keys that are there and the fix otherwise."""
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"{key!r} is not in the data, got {existing_keys(tensordict)}: {fix}")
    return value


def is_fake(tensordict: TensorDictBase) -> bool:
    """Whether all data are zeros, as in the batch by which a collector learns the entries."""
    # Scratch entries may hold anything; a collector may set the artificial end of a batch.
    return not any(
        any(bool(part.any()) for part in parts_of(tensordict, key))
        for key in tensordict.keys(True, True)
        if as_tuple(key)[-1] not in ("done", "truncated")
        and not any(name.startswith("_") for name in as_tuple(key))
    )


def parts_of(tensordict: TensorDictBase, key: NestedKey) -> list[Tensor]:
    """The tensors of an entry: several where rows of a lazy stack differ in shape, none of text."""
    value = tensordict.get(key, as_list=True)  # type: ignore[call-overload]
    if isinstance(value, Tensor):
        return [*value.unbind(0)] if value.is_nested else [value]
    values, parts = [value], []
    while values:
        one = values.pop()
        if isinstance(one, list):
            values += one
        elif isinstance(one, Tensor):
            parts.append(one)
    return parts


def counted_steps(tensordict: TensorDictBase, fake: bool) -> Tensor | None:
    """True where a step counts, (*B), which padding and fake data do not; None if all do."""
    mask = tensordict.get(MASK_KEY, None)
    if mask is None and fake:
        mask = torch.zeros(tensordict.batch_size, dtype=torch.bool, device=tensordict.device)
    return mask


def check_batch(batch: TensorDictBase) -> None:
    """Raises unless it is a TensorDict of which entries can be asked for."""
    if not isinstance(batch, TensorDictBase):
        got = type(batch).__name__
        raise TypeError(f"the batch must be a TensorDict, got {got}: pass what a collector gives.")
    if isinstance(batch, LazyStackedTensorDict) and not batch.tensordicts:
        raise ValueError(
            "the batch must have entries, got a lazy stack of no elements, which has none: skip it."
        )


def copy_batch(tensordict: TensorDictBase) -> TensorDictBase:
    """A shallow copy of a batch, nested tensordicts included."""
    check_batch(tensordict)
    # A collector hands out the same buffer again: entries written into it would come back.
    if tensordict.get("next", None) is None:
        raise KeyError(
            f'the batch has no "next", got {existing_keys(tensordict)}: outside an env the '
            "transforms work on the batches of a collector, a rollout or a replay buffer."
        )
    return tensordict.copy()


def add_spec(
    spec: Composite, key: NestedKey, shape: Sequence[int], dtype: torch.dtype, holder: torch.Size
) -> None:
    """Adds an unbounded leaf to a spec; missing nested specs get the shape `holder`, (*B, *A)."""
    path = as_tuple(key)
    for depth in range(1, len(path)):
        if path[:depth] not in spec.keys(True):
            spec[path[:depth]] = Composite(shape=holder, device=spec.device)  # type: ignore[arg-type]
    spec[key] = Unbounded(shape=torch.Size(shape), dtype=dtype, device=spec.device)


def state_spec(input_spec: Composite) -> Composite:
    """The state spec in an env's input spec, added if it is missing."""
    if input_spec["full_state_spec"] is None:
        empty = Composite(shape=input_spec.shape, device=input_spec.device)  # type: ignore[arg-type]
        input_spec["full_state_spec"] = empty
    return input_spec["full_state_spec"]


def find_time_dim(tensordict: TensorDictBase, time_dim: int | None) -> int | None:
    """The last batch dimension if it is time, named "time" or given; else None."""
    if time_dim is None:
        names = tensordict.names if tensordict.batch_dims else []
        if "time" not in names:
            return None
        time_dim = names.index("time")
    last = tensordict.batch_dims - 1
    if time_dim not in (last, -1) or last < 0:
        raise ValueError(
            f"`time_dim` must be the last batch dimension, got {time_dim} for a batch of shape "
            f"{tuple(tensordict.batch_size)}: transpose the batch, as TorchRL's recurrent modules "
            "require too."
        )
    return last


def find_done(tensordict: TensorDictBase, done_key: NestedKey, *, named: bool = True) -> NestedKey:
    """The done flag: `done_key`, or the step's "done" if that is missing and not `named`."""
    if tensordict.get(done_key, None) is not None:
        return done_key
    if not named and tensordict.get("done", None) is not None:
        return "done"
    raise KeyError(
        f"there is no {done_key!r} and no 'done' in the step, got {existing_keys(tensordict)}: "
        "trajectories end at done; name it with `KLKeys(done=...)`."
    )


def require_order(
    tensordict: TensorDictBase, keys: Iterable[NestedKey], may_differ: Tensor, consequence: str
) -> None:
    """ValueError if the steps of a batch (*R, T) do not follow one another, as in a shuffled one.

    `keys`: entries to compare; `may_differ`: True where step t + 1 need not continue step t,
    (*R, T - 1); `consequence`: why it matters and what to do.
    """
    if not may_differ.numel():  # fewer than two steps
        return
    for key in keys:
        # (*R, T, ...): what a step leaves in "next", and what a step begins with.
        before = cast(TensorDictBase, tensordict.get("next")).get(key, None)
        after = tensordict.get(key, None)
        if before is None or after is None or before.shape != after.shape:
            continue
        if not _steps_follow(before, after, may_differ):
            raise ValueError(
                f"the steps of the batch do not follow one another: {key!r} is not what the step "
                'before has in "next", and no trajectory begins there. Is it a shuffled sample '
                f'that kept the name "time"? {consequence}'
            )


def _steps_follow(before: Tensor, after: Tensor, may_differ: Tensor) -> bool:
    """Whether each step begins with what the one before left, (*R, T, ...); NaN equals NaN."""
    dim, n_pairs = may_differ.ndim - 1, may_differ.shape[-1]
    before, after = before.narrow(dim, 0, n_pairs), after.narrow(dim, 1, n_pairs)

    def all_explained(equal: Tensor) -> bool:
        # (*R, T - 1, ...) -> (*R, T - 1); not by a reshape, since a dimension may be empty.
        while equal.ndim > may_differ.ndim:
            equal = equal.all(-1)
        return bool((equal | may_differ).all())

    equal = before == after
    # NaN is looked for only if something differs: most observations have none.
    return all_explained(equal) or (
        before.is_floating_point() and all_explained(equal | (before.isnan() & after.isnan()))
    )


def find_ends(
    step: TensorDictBase, done_key: NestedKey, shape: Sequence[int], name: str = "done"
) -> Tensor | None:
    """Where trajectories end in `step`, expanded to `shape`; None without a flag of that name."""
    keys = [done_key if name == "done" else sibling(done_key, name)]
    # Some envs reset all agents as soon as one is done, which only the flag at their root says.
    if len(as_tuple(done_key)) > 1:
        keys.append(name)
    flags = [step.get(key, None) for key in keys]
    # (*B, 1) or (*B, *A, 1) each.
    ends = [expand_right(flag, shape) for flag in flags if flag is not None]
    return reduce(torch.logical_or, ends) if ends else None
