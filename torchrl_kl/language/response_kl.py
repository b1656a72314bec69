"""KL control of whole responses, on batches of TorchRL's LLM API."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
)
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform
from torchrl.modules import set_recurrent_mode

from torchrl_kl import _tensordict as td
from torchrl_kl._tensordict import KLKeys
from torchrl_kl.actors.policy import Borrowed, evaluating
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.actors.responses import (
    EndTokens,
    Responses,
    check_rewards,
    choose_tokens,
    make_steps,
    read_responses,
)
from torchrl_kl.actors.top_k import RECORDED, record_top_k
from torchrl_kl.controllers import KLController
from torchrl_kl.controllers.plan import RewardPlan
from torchrl_kl.functional.invalid import OnInvalid, is_valid, seem_valid
from torchrl_kl.language.heads import CausalLMActor
from torchrl_kl.language.trial import warn_if_not_causal
from torchrl_kl.transforms.doubts import refuse_sums
from torchrl_kl.transforms.estimates import Estimator, KLStep, make_estimate
from torchrl_kl.transforms.penalty import PenaltyTransform
from torchrl_kl.transforms.steps import check_reward, measure, score_batch

_LOG_PROB, _REF_LOG_PROB = ("log_probs", "full"), ("ref_log_probs", "full")


class ResponseKLTransform(PenaltyTransform):
    """Measures KL(policy || reference) of whole responses, and subtracts it from their rewards.

    For batches of TorchRL's LLM API (ChatEnv, TransformersWrapper, vLLMWrapper, LLMCollector), as
    `as_steps` reads them: each element is one response, or one dialog. Pass it as `postproc` of an
    LLMCollector, append it to a replay buffer (`append_transform(transform, invert=True)`), or call
    it on a batch, of which it returns a shallow copy. It is the stack of KLConstrainedTransform for
    a CausalLMActor, with one pass of the policy and one of the reference, both in eval mode.

    You may rely on: `reward = task_reward - kl_coeff * kl`, once for each response, however many
    tokens it has; log-probs at the temperature of the sampler, of every token that counts, the
    first and the end token too. Not on those recorded by the sampler: they are not read. A penalty
    per response favours short responses. An empty one has a KL of 0 and does not move the
    controller.

    GRPO divides rewards by their standard deviation within a group, and the size of a penalty with
    them. There, pass the KL to the loss (KLPenaltyLoss), with a controller that only measures here.
    GRPOLoss scores at temperature 1. To sample at another temperature, let the model divide its
    logits by it (docs/pitfalls.md shows how), and pass `temperature=1` here.

    Keys:
        reads what `as_steps` reads, and ("next", "reward"), one number per response.
        writes ("log_probs", "full") and ("next", "ref_log_probs", "full"), nats, which GRPOLoss
        reads: of the width of ("tokens", "full"), NaN where a token does not count, which GRPOLoss
        leaves out. ("next", "kl"), k1 of each response, nats, and ("next", "kl_estimate") with
        another estimator; ("next", "task_reward"), ("next", "kl_coeff") and ("next", "reward"): all
        of the reward's shape.

    State: the reference's, the controller's, and the pool since its last update.

    Args:
        model: the causal language model that is the policy, such as `wrapper.model`. It is used
            where it is and not copied, so that the transform sees it learn.
        controller: a KLController, or a float for a constant coefficient, reward per nat. A
            trajectory is a response; with `per="step"` it is fed nats per token.
        reference: another model (or an actor, which keeps its own temperature) to copy and freeze;
            None: `model` as it is now; or, without a copy, a callable that returns a context
            manager in which `model` is the reference, such as PEFT's `model.disable_adapter`.
        estimator: what is measured, as for KLConstrainedTransform. "exact" and "top_k" need nothing
            that the policy records.
        temperature: that of the sampler, by which logits of policy and reference are divided. Where
            its arguments name none, `generate` takes the one in `model.generation_config`.
        update_every: how many responses (tokens) an update of the controller waits for. None: each
            batch updates once.
        chunk_size: how many responses are scored at a time, so that the logits of a large
            vocabulary never exist for all of them. None: all.
        top_k: how many tokens "top_k" measures exactly, at least 1.
        pad_token, eos_token: as for `as_steps`; by default those of the model's configuration. Pass
            `eos_token` where the arguments of `generate` name other end tokens.
        on_invalid: as for KLConstrainedTransform; what is masked is the whole response.

    Raises:
        TypeError: `model` is not a module, or is a wrapper of TorchRL.
        KeyError, ValueError: as `as_steps` does, if there is no reward, or if `model` or
            `reference` lacks a token.
        RuntimeError: if it is put into an env, or the rewards were penalized before.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import GPT, ResponseKLTransform
        >>> transform = ResponseKLTransform(GPT(vocab_size=11, block_size=8), 0.1)
        >>> tokens = TensorDict(full=torch.tensor([[5, 6, 7, 8]]), prompt=torch.tensor([[5, 6]]))
        >>> batch = TensorDict(tokens=tokens, next={"reward": torch.ones(1, 1)}, batch_size=1)
        >>> transform(batch)["next", "reward"]  # the policy is its reference
        tensor([[1.]])
    """

    def __init__(
        self,
        model: nn.Module,
        controller: KLController | float,
        *,
        reference: nn.Module | Switch | None = None,
        estimator: Estimator = "k1",
        temperature: float = 1.0,
        update_every: int | None = None,
        chunk_size: int | None = None,
        top_k: int = 64,
        pad_token: int | None = None,
        eos_token: EndTokens = None,
        on_invalid: OnInvalid = "raise",
    ):
        _check_count("top_k", top_k)
        _check_count("chunk_size", 1 if chunk_size is None else chunk_size)
        self._temperature, self.chunk_size, self.top_k = temperature, chunk_size, top_k
        actor = self._actor_over(model)
        if isinstance(reference, nn.Module) and not hasattr(reference, "get_dist"):
            reference = self._actor_over(reference)
        keys = KLKeys(log_prob=("log_probs", "full"), kl="kl").resolve()
        out_keys = [keys.kl, *([] if estimator == "k1" else [keys.kl_estimate])]
        out_keys += [keys.log_prob, ("next", *_REF_LOG_PROB)]  # type: ignore[list-item]
        options: dict[str, Any] = {"in_keys": [("tokens", "full")], "update_every": update_every}
        options["on_invalid"] = on_invalid
        super().__init__(controller, keys, out_keys=out_keys, **options)
        self._policy = Borrowed(actor, refusal=_NOT_PICKLED)
        self.reference = as_reference(actor, reference)
        self._step_keys = KLKeys().resolve(self.reference.log_prob_key)
        self.estimate = make_estimate(estimator, actor, self._step_keys, self.reference.actor)
        self.pad_token, self.eos_token = choose_tokens(model, pad_token, eos_token)

    @property
    def temperature(self) -> float:
        """That of the sampler, which was chosen when the transform was built."""
        return self._temperature

    def _actor_over(self, model: nn.Module) -> CausalLMActor:
        return CausalLMActor(model, temperature=self._temperature)

    @property
    def _device(self) -> torch.device | None:
        """Where the policy is; a collector may store its batches elsewhere."""
        weight = next(self._policy.held.parameters(), None)
        return None if weight is None else weight.device

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards the model `source`; see `FrozenActor.update_reference`."""
        self.reference.update_reference(self._actor_over(source), tau)

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuses envs."""
        super().set_container(container)
        if self.in_env:
            raise RuntimeError(
                "ResponseKLTransform works on whole batches, not in an env: pass it as "
                "`LLMCollector(postproc=...)`, or append it to a replay buffer with `invert=True`."
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Scores, measures and penalizes a batch (*B) that has "next"; returns a shallow copy."""
        batch = td.copy_batch(tensordict)
        following = cast(TensorDictBase, batch.get("next"))
        self.refuse_penalized(following, "the batch")
        if self.controller.coeff.item() != 0 or self.controller.planning:
            refuse_sums(batch)
        reward = td.get_required(following, self.keys.reward, _NO_REWARD)
        check_rewards(reward, batch.batch_size)
        responses = read_responses(batch, pad_token=self.pad_token, eos_token=self.eos_token)
        responses = responses.to(self._device)
        self._check_ids(responses.tokens)
        rewards = reward.reshape(-1).to(self._device)
        steps = make_steps(responses, rewards, self.eos_token)
        step, reward = self._kept(self._score(steps), reward)
        following.set(self.keys.reward, reward)
        for key, values in ((_LOG_PROB, step.log_prob), (_REF_LOG_PROB, step.ref_log_prob)):
            holder = batch if key is _LOG_PROB else following
            rows = _places(responses, steps, cast(Tensor, values))
            _set_rows(holder, key, [row.to(reward.device) for row in rows], responses.width)
        totals = {self.keys.kl: step.kl, self.keys.kl_estimate: step.estimate}
        for key, each in totals.items():
            if each is not None:
                following.set(key, each.sum((1, 2)).to(reward.device).reshape(reward.shape))
        kl = following.get(self.keys.kl)
        check_reward(kl, reward, self.keys.reward)  # before anything changes
        if self.training and not self.frozen:
            self._plan_responses(responses, reward.reshape(-1).to(self._device), step)
        self._penalize(following, KLStep(None, kl, kl=kl), reward)
        if self.training and not self.frozen:
            self._feed(step)
        return batch.set("next", following)

    def _check_ids(self, tokens: Tensor) -> None:
        """ValueError unless policy and reference have (N, L); they do not read the last token."""
        actors = (self._policy.held, self.reference.actor)
        models = [actor.reader.lm for actor in actors if isinstance(actor, CausalLMActor)]
        sizes = [model.vocab_size for model in models if model.vocab_size is not None]
        low, high = (int(value) for value in tokens.aminmax()) if len(tokens) else (0, 0)
        most = min(sizes, default=high + 1) - 1
        if low < 0 or high > most:
            raise ValueError(
                f"('tokens', 'full') must be ids of the model's vocabulary, 0 to {most}, got {low} "
                f"to {high}: sample with the tokenizer of policy and reference (vocabularies of "
                f"{sizes} tokens). Shorter texts are filled with `pad_token` = {self.pad_token}, "
                "which must be one of the ids, too."
            )

    def _score(self, steps: TensorDict) -> KLStep:
        """The log-probs (N, T) and the KL (N, T, 1) of the steps, a few responses at a time."""
        chunks, n_rows = [], max(len(steps), 1)  # also a batch of none is one chunk
        size = self.chunk_size or n_rows
        for first in range(0, n_rows, size):
            rows = cast(TensorDictBase, steps[first : first + size])
            self._ask_policy(rows)
            step = score_batch(self.reference, rows, self.estimate, None, fake=False)
            step = measure(step, rows, self.estimate)
            chunks.append((step.log_prob, step.ref_log_prob, step.mask, step.kl, step.estimate))
        log_prob, ref_log_prob, mask, kl, estimate = (
            None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)
        )
        return KLStep(log_prob, ref_log_prob, mask, kl=kl, estimate=estimate)  # type: ignore[arg-type]

    def _kept(self, step: KLStep, reward: Tensor) -> tuple[KLStep, Tensor]:
        """The steps (N, T) and the rewards without those of responses with invalid numbers."""
        counted, rewards = cast(Tensor, step.mask), reward.reshape(-1).to(self._device)
        ratio = cast(Tensor, step.log_prob) - step.ref_log_prob
        numbers = torch.where(counted, ratio, 0.0), cast(Tensor, step.measured).squeeze(-1), rewards
        if seem_valid(numbers):
            return step, reward
        names = (_LOG_PROB, ("next", *_REF_LOG_PROB), ("next", "kl_estimate"), ("next", "reward"))
        values = (step.log_prob, step.ref_log_prob, step.estimate)
        entries = {
            name: torch.where(counted, value.reshape(counted.shape), 0.0)
            for name, value in zip(names[:3], values, strict=True)
            if value is not None
        }
        measures = self.controller.coeff.item() == 0 and not self.controller.planning
        only_measures = measures and not self.guard.masks
        infinite = {names[1]: -torch.inf, names[2]: torch.inf} if only_measures else None
        valid = self.guard.valid_steps(
            entries | {names[3]: rewards},
            rewards.shape,
            None,
            type(self).__name__,
            allowed=infinite,
        )
        kept = valid.unsqueeze(-1)  # (N, 1)
        kl, estimate = (
            None if each is None else torch.where(kept.unsqueeze(-1), each, 0.0)
            for each in (step.kl, step.estimate)
        )
        log_prob, ref_log_prob = (
            torch.where(kept, cast(Tensor, each), torch.nan) for each in values[:2]
        )
        step = KLStep(log_prob, ref_log_prob, counted & kept, kl=kl, estimate=estimate)
        return step, torch.where(is_valid(reward), reward, 0.0)

    @torch.no_grad()
    def _ask_policy(self, rows: TensorDictBase) -> None:
        """Writes the log-prob of each token, and what the estimator reads of the policy."""
        actor = self._policy.held
        warn_if_not_causal(actor.reader.lm)
        with evaluating(actor), set_recurrent_mode(True):
            dist = actor.get_dist(rows.select(*actor.in_keys))
        rows.set(actor.log_prob_keys[0], dist.log_prob(rows.get("action")))
        for key in [] if self.estimate is None else self.estimate.policy_keys:
            if key != self._step_keys.top_k:
                rows.set(key, dist.logits)
                continue
            k = min(self.top_k, dist.logits.shape[-1])
            values = record_top_k(dist.logits, rows.get("action"), k)
            record = dict(zip(RECORDED, values, strict=True))
            rows.set(key, TensorDict(record, batch_size=rows.batch_size))

    def _plan_responses(self, responses: Responses, rewards: Tensor, step: KLStep) -> None:
        """Gives rewards (N,) to a controller that plans; responses to one prompt are a group."""
        lengths = cast(Tensor, step.mask).sum(1)
        some = lengths > 0
        if not self.controller.planning or not some.any():
            return
        # The tokens before the first one that counts.
        starts = responses.counted.int().argmax(1)[some].tolist()
        texts = [
            tuple(row[:n]) for row, n in zip(responses.tokens[some].tolist(), starts, strict=True)
        ]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        groups = rewards.new_tensor([numbers[text] for text in texts], dtype=torch.float64)
        self.feed.rewards.give(
            self.controller,
            rewards[some],
            # Those of earlier batches are other groups.
            groups=groups + cast(RewardPlan, self.controller.plan).new_groups(len(numbers)),
            log_ratios=cast(Tensor, step.kl).sum((1, 2))[some],
            lengths=lengths[some] if self.controller.per == "step" else None,
        )

    def _feed(self, step: KLStep) -> None:
        """Pools the measured KL, of tokens or of the responses that have any."""
        if self.controller.per == "step":
            self.feed.pool(step.measured, step.mask)
        else:
            self.feed.pool(step.measured.sum((1, 2)), cast(Tensor, step.mask).any(1))


def _places(responses: Responses, steps: TensorDict, values: Tensor) -> list[Tensor]:
    """Values of steps (N, T) at their tokens in ("tokens", "full"), NaN at all others."""
    rows, mask, position = [], steps.get(td.MASK_KEY), steps.get("position")
    for i, width in enumerate(responses.widths):
        row = values.new_full((width,), torch.nan)
        row[position[i][mask[i]] + responses.shift[i]] = values[i][mask[i]]
        rows.append(row)
    return rows


def _set_rows(
    batch: TensorDictBase, key: tuple[str, str], values: list[Tensor], width: int
) -> None:
    """Sets an entry of a batch (*B), one row per element, of the common `width` or ragged."""
    name, leaf = key
    held = batch.get(name, None)
    holder = held if is_tensor_collection(held) else None  # not that of TorchRL's KLRewardTransform
    widths = {len(row) for row in values}
    if not values or (len(widths) == 1 and not isinstance(batch, LazyStackedTensorDict)):
        holder = TensorDict(batch_size=batch.batch_size) if holder is None else holder.copy()
        shape = *batch.batch_size, width
        holder.set(leaf, torch.stack(values).reshape(shape) if values else torch.zeros(shape))
    else:
        old = [TensorDict()] * len(values) if holder is None else holder.reshape(-1).unbind(0)
        parts = [part.copy() for part in old]
        for part, value in zip(parts, values, strict=True):
            part.set(leaf, value)
        for size in reversed(batch.batch_size[1:]):
            parts = [lazy_stack(parts[i : i + size]) for i in range(0, len(parts), size)]
        holder = lazy_stack(parts)
    batch.set(name, holder)


def _check_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {count!r}.")


_NO_REWARD = "a response has one; set it before this transform, to zeros for a measurement only."
_NOT_PICKLED = (
    "a ResponseKLTransform cannot be sent to another process, where it would not see the policy "
    "learn: use it in the process that trains, as `postproc` or in the replay buffer there."
)
