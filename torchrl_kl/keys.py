"""Names of entries in TensorDicts, and the entries under them; *B: the batch, *A: agents."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite

RECORD_LOG_PROB = (
    "let the policy record it (`return_log_prob=True`), write it into a batch with "
    "`rescore(policy, batch)`, or name the entry that it records with `KLKeys(log_prob=...)`."
)


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """A key as a tuple of strings."""
    return (key,) if isinstance(key, str) else tuple(map(str, key))


def sibling(key: NestedKey, name: str) -> NestedKey:
    """The key called `name` in the same nested tensordict as `key`."""
    return unravel_key((*as_tuple(key)[:-1], name))


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


def existing_keys(tensordict: TensorDictBase | Composite) -> str:
    """The keys of a tensordict or spec as a short, sorted text for an error message."""
    return ", ".join(sorted(str(key) for key in tensordict.keys(True, True))) or "nothing"


def get_stored(tensordict: TensorDictBase, key: NestedKey) -> Any:
    """The entry `key` as it is stored, a list for lazily stacked elements; None if missing."""
    *path, name = as_tuple(key)
    holder: Any = tensordict.get(unravel_key(tuple(path))) if path else tensordict
    options = {"as_list": True} if hasattr(holder, "tensordicts") else {}
    return holder.get(name, None, **options)


class MissingKeyError(KeyError):
    """A KeyError that prints its text as it is, and not in quotes."""

    __str__ = BaseException.__str__


def get_required(holder: Any, key: NestedKey, fix: str, where: str = "data") -> Any:
    """The entry `key` of data or a spec; KeyError with the fix and the keys there otherwise."""
    value = holder.get(key, None)
    if value is None:
        there = existing_keys(holder)
        raise MissingKeyError(f"{key!r} is not in the {where}: {fix} You have {there}.")
    return value


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
        penalized: where the penalized reward goes; by default it replaces `reward`. Elsewhere,
            `kl_coeff` is by default next to it.
        prefix: what the default name of each entry that is written starts with; see `named`.

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
    penalized: NestedKey | None = None
    prefix: str = ""

    @classmethod
    def named(cls, name: str, **keys: Any) -> KLKeys:
        """Keys of a further stack on the same data: its default names start with `name` and "_"."""
        return cls(prefix=f"{name}_", **keys)

    def resolve(
        self, log_prob: NestedKey | list[NestedKey] = "action_log_prob", *, sum_agents: bool = False
    ) -> ResolvedKeys:
        """All keys filled in; `log_prob`: where the policy records it unless these keys name it."""
        if not isinstance(sum_agents, bool):
            raise TypeError(f"`sum_agents` must be True or False, got {sum_agents!r}.")
        return ResolvedKeys(self, LogProbKeys(self.log_prob or log_prob), sum_agents)


def as_keys(keys: KLKeys | None) -> KLKeys:
    """The keys, or the default ones; TypeError for anything else."""
    if not isinstance(keys, KLKeys | None):
        got = type(keys).__name__
        raise TypeError(f'`keys` must be KLKeys, got {got}: write `KLKeys(kl="...")`.')
    return keys or KLKeys()


class ResolvedKeys:
    """The entries of one stack, all named."""

    def __init__(self, keys: KLKeys, recorded: LogProbKeys, sum_agents: bool):
        reward, penalized = keys.reward, keys.penalized or keys.reward
        self.recorded = recorded
        self.prefix = prefix = keys.prefix

        def near(key: NestedKey, name: str) -> NestedKey:
            return unravel_key(vars(keys)[name] or sibling(key, f"{prefix}{name}"))

        log_prob = recorded.sibling("log_prob")
        self.ref_log_prob = near(log_prob, "ref_log_prob")
        # Agents that share a reward have one KL, (*B, 1) at the root, else (*B, *A, 1).
        self.kl = near("kl" if sum_agents else log_prob, "kl")
        self.kl_estimate = near(self.kl, "kl_estimate")
        self.episode_kl = near(self.kl, "episode_kl")
        self.reward = unravel_key(reward)
        self.task_reward = near(reward, "task_reward")
        self.penalized = unravel_key(penalized)  # the result of the penalty
        self.kl_coeff = near(penalized, "kl_coeff")
        self.done = unravel_key(keys.done or sibling(reward, "done"))
        self.top_k = unravel_key(keys.top_k or recorded.sibling("top_k"))
        # In an env: task reward and k1 of a trajectory, for a plan; and whether any action of a
        # trajectory so far was not drawn from the policy, of which all stacks have one entry.
        self.episode_sums = sibling(self.kl, f"{prefix}episode_sums")
        self.not_drawn = recorded.sibling("not_drawn")

    def passed(self, estimator: str) -> NestedKey:
        """The hidden entry in which one part of the stack passes its estimate on to the next."""
        return self.recorded.sibling(f"_{self.prefix}estimate_{estimator}")

    @property
    def path(self) -> tuple[str, ...]:
        """The nested tensordict of the agents, or () for the root: its batch size is (*B, *A)."""
        return max(self.recorded.branch, as_tuple(self.kl)[:-1], key=len)

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
        paths = [as_tuple(one)[:-1] for one in self.keys]
        shared = takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))
        self.branch = tuple(name for name, *_ in shared)

    def sibling(self, name: str) -> NestedKey:
        """The key called `name` in the nested tensordict that holds all of them."""
        return unravel_key((*self.branch, name))

    def batch_size(self, tensordict: TensorDictBase) -> torch.Size:
        """Batch size of that nested tensordict: the shape of the log-prob."""
        return holder_batch_size(tensordict, (*self.branch, "log_prob"))

    def missing(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """The keys that are not in the data."""
        return [key for key in self.keys if tensordict.get(key, None) is None]

    def read(self, tensordict: TensorDictBase) -> Tensor | None:
        """The log-prob of the whole action, nats, (*B, *A); None if an entry is missing."""
        parts = [tensordict.get(key, None) for key in self.keys]
        return None if any(part is None for part in parts) else self._whole(tensordict, parts)

    def require(self, tensordict: TensorDictBase) -> Tensor:
        """The log-prob of the whole action; KeyError if an entry is missing."""
        parts = [get_required(tensordict, key, RECORD_LOG_PROB) for key in self.keys]
        return self._whole(tensordict, parts)

    def _whole(self, tensordict: TensorDictBase, parts: list[Tensor]) -> Tensor:
        shape = self.batch_size(tensordict)  # the dimensions behind it are those of an action
        first, *others = (sum_action_dims(part, shape) for part in parts)
        return sum(others, first)
