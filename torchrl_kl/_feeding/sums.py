"""Sums along the trajectories of a batch, and whether its steps follow one another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial, reduce
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_kl import _tensordict as td
from torchrl_kl.controllers.trajectories import OpenTrajectories, Segments, TrajectorySums

# They show no state: a collector may set "truncated" in the last step of a batch.
_FLAGS = {"done", "terminated", "truncated", "is_init"}
# Nor do estimates of a value: the next batch has those of a network that was trained since.
_VALUES = {"state_value", "state_action_value", "action_value", "chosen_action_value"}


def kept_steps(tensordict: TensorDictBase, kl: Tensor, keys: td.ResolvedKeys) -> Tensor | None:
    """True where a stack has not left out the step of a batch, (*B); None if log-probs are missing.

    A step with invalid numbers that it has left out has a KL of 0, in spite of its log-probs. Those
    of equal distributions, of which an exact KL is 0, too, differ by rounding only.
    """
    log_prob = keys.recorded.read(tensordict)
    ref_log_prob = tensordict.get("next").get(keys.ref_log_prob, None)
    if log_prob is None or ref_log_prob is None or log_prob.numel() != ref_log_prob.numel():
        return None
    ref_log_prob = ref_log_prob.reshape(log_prob.shape)
    rounding = 64 * max(torch.finfo(each.dtype).eps for each in (log_prob, ref_log_prob))
    close = log_prob.double().isclose(ref_log_prob.double(), rounding, rounding)
    # (*B, *A), and (*B, *A, 1) or (*B, 1): both to (*B).
    unlike, some = (
        flags.unsqueeze(-1).flatten(tensordict.batch_dims).any(-1) for flags in (~close, kl != 0)
    )
    return ~unlike | some


def sum_trajectories(
    tensordict: TensorDictBase,
    values: Tensor,
    mask: Tensor | None,
    done_key: NestedKey,
    stream: OpenTrajectories,
    *,
    observed: Iterable[NestedKey] | None = None,
    judge: bool = True,
    check_order: bool = True,
) -> TrajectorySums:
    """Sums values over the trajectories of a batch (*B) whose last dimension is time.

    `values`: nats, (*B, *F); `mask`: True where a step counts, (*B); `stream`: what earlier batches
    left open; `observed`: keys that show whether steps follow one another, which `check_order`
    requires, by default all; `judge`: see `OpenTrajectories.add`. Returns running sums, (*B, *F) in
    at least float32, and the totals of the trajectories that have finished, float64, (N,).
    """
    step = cast(TensorDictBase, tensordict.get("next"))
    n_steps, n_rows = tensordict.batch_size[-1], tensordict.batch_size[:-1].numel()
    n_dims = tensordict.batch_dims
    n_values = values.shape[n_dims:].numel()

    # Rows R = all but the last dimension of *B: (R, T, F) for values, (R, T) for steps.
    def per_value(flag: Tensor) -> Tensor:
        return td.expand_right(flag, values.shape).reshape(n_rows, n_steps, n_values)

    def per_step(entry: Tensor, name: str) -> Tensor:
        if entry.numel() != n_rows * n_steps:
            raise ValueError(
                f"`{name}` must have one number per step of a batch of shape "
                f"{tuple(tensordict.batch_size)}, got shape {tuple(entry.shape)}."
            )
        return entry.reshape(n_rows, n_steps)

    done = cast(Tensor, td.find_ends(step, done_key, values.shape))
    terminated = td.find_ends(step, done_key, values.shape, "terminated")
    left = tensordict.get(done_key, None)  # at the root: True if an agent was done before the step
    ids, is_init = tensordict.get(td.TRAJECTORY_KEY, None), tensordict.get("is_init", None)
    is_init = is_init.bool() if is_init is not None and is_init.numel() else None
    keys = state_keys(tensordict, observed)
    begin = tensordict.exclude("next")
    left = torch.zeros_like(done) if left is None else left
    segments = Segments(
        done=per_value(done.bool()),
        terminated=per_value((torch.zeros_like(done) if terminated is None else terminated).bool()),
        left=per_value(left.bool()),
        any_done=_any_done(step, done_key, done, n_dims).reshape(n_rows, n_steps),
        any_left=_any_done(begin, done_key, left, n_dims).reshape(n_rows, n_steps),
        mask=None if mask is None else per_step(mask, "mask"),
        ids=None if ids is None else per_step(ids, "traj_ids").to(values.device),
        is_init=None if is_init is None else per_step(is_init, "is_init").to(values.device),
        states_before=partial(digests, tensordict, keys, tensordict.batch_dims),
        states_after=partial(digests, step, keys, tensordict.batch_dims),
    )
    if check_order:
        _check_order(tensordict, segments, keys, is_init)
    running, finished = stream.add(per_value(values), segments, judge=judge)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return TrajectorySums(running.reshape(values.shape).to(dtype), finished)


def _check_order(
    tensordict: TensorDictBase, segments: Segments, keys: list[NestedKey], is_init: Tensor | None
) -> None:
    """Raises if steps do not follow one another, or if rows of several workers are joined."""
    ends = segments.done.any(-1)  # (R, T)
    if not ends.numel():
        return
    # (R, T - 1): whether step t + 1 has another id than step t, and whether it may begin anew:
    # behind an end, in another trajectory, in padding, or where the env says so.
    changed = torch.zeros_like(ends[:, 1:])
    if segments.ids is not None:
        changed = segments.ids[:, 1:] != segments.ids[:, :-1]
    may_differ = ends[:, :-1] | changed
    if segments.mask is not None:
        may_differ = may_differ | ~segments.mask[:, 1:]
    if is_init is not None:
        may_differ = may_differ | is_init.reshape(ends.shape)[:, 1:]
    may_differ = may_differ.reshape(*tensordict.batch_size[:-1], may_differ.shape[-1])
    td.require_order(tensordict, keys, may_differ, _SHUFFLED)
    # Another id behind a step that is not done: the rows of two workers were joined there.
    ends = ends | segments.any_done
    done = tensordict.get(("next", "done"), None)
    if done is not None:  # which is not among them if another flag was named
        ends = ends | done.reshape(*ends.shape, -1).any(-1)
    seams = changed & ~ends[:, :-1]
    if segments.mask is not None:
        seams = seams & segments.mask[:, 1:]
    if seams.any():
        raise RuntimeError(_SEAMS)


def _any_done(step: TensorDictBase, done_key: NestedKey, done: Tensor, n_dims: int) -> Tensor:
    """Where any agent is done, of any group, (*B): collectors then change the trajectory id.

    `done`: the flags of this group, (*B, *F), which are the only ones if another flag was named.
    """
    groups = step.keys(True, True) if td.as_tuple(done_key)[-1] == "done" else []
    others = [step.get(key) for key in groups if td.as_tuple(key)[-1] == "done"]
    flags = [flag.bool().unsqueeze(-1).flatten(n_dims).any(-1) for flag in (done, *others)]
    return reduce(torch.logical_or, flags)


def state_keys(tensordict: TensorDictBase, observed: Iterable[NestedKey] | None) -> list[NestedKey]:
    """Keys of what a step leaves and the next one begins with: of `observed`, or of all entries."""
    step = cast(TensorDictBase, tensordict.get("next"))
    if observed is None:
        found = (key for key in step.keys(True, True) if td.as_tuple(key)[-1] not in _VALUES)
        observed = sorted(found, key=str)
    return [
        key
        for key in td.leaf_keys(tensordict, observed)
        if td.as_tuple(key)[-1] not in _FLAGS
        and all(isinstance(each.get(key, None), Tensor) for each in (tensordict, step))
    ]


def digests(
    batch: TensorDictBase, keys: list[NestedKey], n_dims: int, places: Tensor
) -> list[bytes]:
    """Digests of the states at steps, numbered row by row, (N,); empty where nothing shows one."""
    if not (keys and len(places)):
        return [b""] * len(places)
    parts = []
    for key in keys:
        # (*R, T, ...) -> (R * T, ...) -> (N, bytes)
        value = batch.get(key).detach().flatten(0, n_dims - 1)
        data = value.index_select(0, places.to(value.device)).cpu().reshape(len(places), -1)
        parts.append(data.view(torch.uint8))
    states = torch.cat(parts, 1).numpy()
    whole = states.view(f"V{states.shape[1]}").ravel().tolist()  # one `bytes` for each row
    if states.shape[1] <= 64:
        return whole
    # Long states, such as images, are kept as hashes: they are compared, never read.
    return [hashlib.blake2b(state, digest_size=8).digest() for state in whole]


_SHUFFLED = (
    "The controller adds up the KL along trajectories: shuffle after the stack, or whole rows."
)
_SEAMS = (
    "a row of the batch has another trajectory behind a step that is not done: does the collector "
    'join the rows of its workers along time (`cat_results=-1`)? Use `cat_results="stack"`.'
)
