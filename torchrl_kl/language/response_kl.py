"""KL control of whole responses, on batches of TorchRL's LLM API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
    unravel_key,
)
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform
from torchrl.modules import set_recurrent_mode

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting, Borrowed, evaluating
from torchrl_kl.actors.reading import scored_inputs
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.actors.top_k import RECORDED, record_top_k
from torchrl_kl.batches import MASK_KEY
from torchrl_kl.controllers import KLController
from torchrl_kl.functional.numbers import check_finite
from torchrl_kl.functional.sampler import (
    FEWEST,
    SamplerWeights,
    check_sampler_weights,
    sampler_weights,
)
from torchrl_kl.functional.tiles import figures
from torchrl_kl.keys import KLKeys, MissingKeyError, as_keys, as_tuple
from torchrl_kl.language.heads import CausalLMActor, HeadChunk
from torchrl_kl.language.responses import (
    KEPT,
    LOG_PROB,
    SAMPLER_LOG_PROB,
    EndTokens,
    Responses,
    aligned,
    check_rewards,
    choose_tokens,
    flat,
    make_steps,
    read_responses,
)
from torchrl_kl.transforms.base import env_of, open_batch
from torchrl_kl.transforms.estimates import Estimator, make_estimate
from torchrl_kl.transforms.penalty import Penalizing, Penalty
from torchrl_kl.transforms.scorer import Measured, Scored, Scorer, measure

_TOP_K = 64  # tokens of a vocabulary that the estimator "top_k" measures exactly


class ResponseKLTransform(Penalizing, Transform):
    """Measures KL(policy || reference) of whole responses, and subtracts it from their rewards.

    For batches of TorchRL's LLM API, as `as_steps` reads them. Pass it as `postproc` of an
    LLMCollector, append it to a replay buffer (`append_transform(transform, invert=True)`), or call
    it on a batch, of which it returns a shallow copy. Policy and reference score in eval mode.

    You may rely on: `reward = task_reward - kl_coeff * kl`, once for each response; log-probs of
    the policy as it samples, of every token that counts, the first and the end token too. You may
    not rely on a penalty that survives GRPO's division by the rewards' standard deviation: there,
    pass the KL to the loss (docs/pitfalls.md).

    Keys:
        reads what `as_steps` reads, and ("next", "reward"), one number per response. A sampler's
        own ("log_probs", "full") are kept as ("sampler_log_probs", "full").
        writes ("log_probs", "full") and ("next", "ref_log_probs", "full"), nats, of the width of
        ("tokens", "full"), NaN where a token does not count, as GRPOLoss reads them; and of the
        reward's shape ("next", "kl"), k1 of each response, ("next", "kl_estimate") with another
        estimator, ("next", "task_reward"), ("next", "kl_coeff") and ("next", "reward"); where the
        sampler's log-probs are there, ("next", "sampler_kl"), log pi_sampler - log pi. If
        truncated, ("kept", "ids"), (width, `top_k`) of each response, unless they are there;
        `n_rescued` as for CausalLMActor.

    State: the reference's, the controller's, and the pool since its last update.

    Args:
        model: the causal language model that is the policy, such as `wrapper.model`; not copied.
        controller: a KLController, or a float for a constant coefficient, reward per nat. With
            `per="step"` it is fed nats per token. Responses to equal prompts are a plan's group.
        reference: another model (or an actor, which keeps its own temperature) to copy and freeze;
            None: `model` as it is now; or a callable that returns a context manager in which
            `model` is the reference, such as PEFT's `model.disable_adapter`.
        estimator: what is measured, as for KLConstrainedTransform; "top_k" is exact on 64 tokens.
        temperature: that of the sampler, by which logits of policy and reference are divided.
        top_k, top_p, min_p: those of the sampler; see CausalLMActor.
        sampler_weights, cap: None, or "truncated": weights what the controller is fed, as for
            KLPenaltyLoss, by the ratios up to each token, or with `per="step"` its own.
        update_every: how many responses (tokens) an update of the controller waits for. None: each
            batch updates once.
        chunk_size: how many responses are scored at a time. None: all.
        head_chunk: of how many tokens there are logits at a time; see CausalLMActor.
        pad_token, eos_token: as for `as_steps`; by default those of the model's configuration.
        keys: names of entries; `KLKeys.named("second")` for a second reference. `log_prob` and
            `ref_log_prob` of others than `named` are not read.

    Raises:
        TypeError: `model` is not a module, or is a wrapper of TorchRL.
        KeyError, ValueError: as `as_steps` does, if there is no reward, a number is not finite,
            or `model` is not causal.
        RuntimeError: if it is put into an env, or the rewards were penalized before.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl.language import GPT, ResponseKLTransform
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
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        sampler_weights: SamplerWeights | None = None,
        cap: float = 2.0,
        update_every: int | None = None,
        chunk_size: int | None = None,
        head_chunk: HeadChunk = "auto",
        pad_token: int | None = None,
        eos_token: EndTokens = None,
        keys: KLKeys | None = None,
    ):
        if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
            raise ValueError(f"`chunk_size` must be an int of at least 1, got {chunk_size!r}.")
        named = as_keys(keys)
        resolved = replace(
            named,
            log_prob=LOG_PROB,
            ref_log_prob=(f"{named.prefix}ref_log_probs", "full"),
            kl=named.kl or f"{named.prefix}kl",
        ).resolve()
        measured = [resolved.kl, *([] if estimator == "k1" else [resolved.kl_estimate])]
        scores = [LOG_PROB, unravel_key(("next", resolved.ref_log_prob))]
        written = [resolved.penalized, resolved.kl_coeff, resolved.task_reward]
        super().__init__(in_keys=[("tokens", "full")], out_keys=[*written, *measured, *scores])
        check_sampler_weights(sampler_weights, cap)
        self.keys, self.sampler_weights, self.cap = resolved, sampler_weights, cap
        self.temperature = temperature
        self.n_rescued = 0
        self.chunk_size = chunk_size
        self.head_chunk: HeadChunk = head_chunk
        actor = self._actor_over(model, top_k=top_k, top_p=top_p, min_p=min_p)
        if isinstance(reference, nn.Module) and not hasattr(reference, "get_dist"):
            reference = self._actor_over(reference)
        self._policy = Borrowed(actor, refusal=_NOT_PICKLED)
        frozen = as_reference(actor, reference)
        self._step_keys = KLKeys().resolve(frozen.log_prob_key)
        self._estimator = estimator
        estimate = make_estimate(estimator, actor, self._step_keys)
        self.scorer = Scorer(frozen, Acting.of(actor, frozen.recorded), estimate)
        self.penalty = Penalty(controller, resolved, update_every=update_every)
        self.pad_token, self.eos_token = choose_tokens(model, pad_token, eos_token)

    @property
    def reference(self) -> FrozenActor:
        """The frozen reference, an actor."""
        return self.scorer.reference

    def _actor_over(self, model: nn.Module, **kept: Any) -> CausalLMActor:
        options = {"temperature": self.temperature, "head_chunk": self.head_chunk, **kept}
        return CausalLMActor(model, **options)

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
        if env_of(self) is not None:
            raise RuntimeError(
                "ResponseKLTransform works on whole batches, not in an env: pass it as "
                "`LLMCollector(postproc=...)`, or append it to a replay buffer with `invert=True`."
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Penalizes a batch (*B), and feeds the controller unless in eval mode."""
        return self._process(tensordict, moves=self.training)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """The same of a batch that a replay buffer is extended with."""
        return self._process(next_tensordict, moves=True)

    def _process(self, tensordict: TensorDictBase, *, moves: bool) -> TensorDictBase:
        """Scores, measures and penalizes a batch (*B); `moves`: whether the controller is fed."""
        batch, _ = open_batch(tensordict)
        following = cast(TensorDictBase, batch.get("next"))
        self.penalty.refuse_penalized(following, "the batch")
        reward = self.penalty.open(
            batch,
            "a response has one; set it before this transform, to zeros for a measurement only.",
        )
        check_rewards(reward, batch.batch_size)
        responses = read_responses(batch, pad_token=self.pad_token, eos_token=self.eos_token)
        tokens = responses.tokens.to(self._device)
        responses = responses._replace(tokens=tokens, counted=responses.counted.to(self._device))
        rewards = reward.reshape(-1).to(tokens.device)
        steps = make_steps(responses, rewards, self.eos_token)
        # Of a batch that another of these has scored, log-probs are not those of a sampler.
        names = {as_tuple(key)[-1] for key in following.keys(True)}
        scored = any(name.removesuffix("kl_coeff") + "ref_log_probs" in names for name in names)
        for key in (KEPT, SAMPLER_LOG_PROB, *([] if scored else [LOG_PROB])):
            if (values := aligned(flat(batch), key, responses, steps)) is not None:
                steps.set(key, values)
        scored, tokenwise = self._score(steps)
        totals = self._add_up(scored, tokenwise, reward)
        self.penalty.check(totals, reward)
        moves, planned = moves and not self.frozen, self.controller.planning
        recorded = steps.get(SAMPLER_LOG_PROB, steps.get(LOG_PROB, None))
        fed = self._fed(scored, tokenwise, recorded, steps["next", "done"].squeeze(-1))
        if moves and self.controller.reads_rewards and fed is not None:
            self._plan_from(responses, rewards, tokenwise)
        self.penalty.apply(following, totals.kl, reward)
        following.set(self.keys.kl, totals.kl)
        if self.scorer.estimate is not None:
            following.set(self.keys.kl_estimate, totals.fed)
        if recorded is not None:
            gap = (recorded - totals.log_probs[LOG_PROB]).sum(1)
            following.set("sampler_kl", gap.to(reward.device).reshape(reward.shape))
        scores = {
            LOG_PROB: (batch, scored.log_prob),
            self.keys.ref_log_prob: (following, scored.ref_log_prob),
            SAMPLER_LOG_PROB: (batch, recorded),
            KEPT: (batch, steps.get(KEPT, None)),
        }
        for key, (holder, values) in scores.items():
            if values is not None:
                places = _places(responses, steps, values)
                _set_rows(holder, key, [row.to(reward.device) for row in places], responses.width)
        if moves and fed is not None:
            # A KL from which a coefficient is planned says nothing about that coefficient.
            self.penalty.feed.pool(self.controller, fed[: 0 if planned else None])
        return batch.set("next", following)

    def _score(self, steps: TensorDict) -> tuple[Scored, Measured]:
        """The log-probs (N, T) and the KL (N, T, 1) of the steps, a few responses at a time.

        Writes the kept ids into the steps.
        """
        parts = steps.split(self.chunk_size or len(steps)) if len(steps) else [steps]
        self.n_rescued = 0
        found = []
        for rows in parts:
            found.append(self._score_rows(rows))
            self.n_rescued += int(self._policy.held.n_rescued)
        if KEPT in parts[0].keys(True):
            steps.set(KEPT, torch.cat([rows.get(KEPT) for rows in parts]))
        log_prob, ref_log_prob, *estimates = map(torch.cat, zip(*found, strict=True))
        scored = Scored(log_prob, ref_log_prob, estimates)
        return scored, measure(scored, steps.get(MASK_KEY), self._step_keys)

    @torch.no_grad()
    def _score_rows(self, rows: TensorDictBase) -> list[Tensor]:
        """The log-probs, and the estimates, of all `rows` at once."""
        actor, action = self._policy.held, rows.get("action")
        if len(rows):
            actor.reader.lm.check_causal(rows.get("tokens")[0, 0, :-1])
        inputs = scored_inputs(actor, rows)
        with evaluating(actor), set_recurrent_mode(True):
            dist = actor.get_dist(inputs)
        if actor.truncation is not None:
            rows.set(KEPT, inputs.get(KEPT))
        if self._estimator == "exact":  # in tiles of both
            reference = self.reference.get_dist(rows, timed=True)
            log_prob, kl, ref_log_prob = figures(dist, action, reference)
            return [log_prob, ref_log_prob, kl]
        rows.set(actor.log_prob_keys[0], dist.log_prob(action))
        if self._estimator == "top_k":
            record = dict(zip(RECORDED, record_top_k(dist, action, _TOP_K), strict=True))
            rows.set(self._step_keys.top_k, TensorDict(record, batch_size=rows.batch_size))
        scored = self.scorer.batch(rows, rows.get(MASK_KEY))
        return [scored.log_prob, scored.ref_log_prob, *scored.estimates]

    def _add_up(self, scored: Scored, tokenwise: Measured, reward: Tensor) -> Measured:
        """The KL of each response, in the reward's shape; log-probs are 0 where no token counts."""
        mask = cast(Tensor, tokenwise.mask)
        kl, fed = (
            each.sum((1, 2)).to(reward.device).reshape(reward.shape)
            for each in (tokenwise.kl, tokenwise.fed)
        )
        names = (LOG_PROB, self.keys.ref_log_prob)
        log_probs = {
            name: torch.where(mask, each, 0.0) for name, each in zip(names, scored[:2], strict=True)
        }
        return Measured(kl, fed, None, log_probs)

    def _plan_from(self, responses: Responses, rewards: Tensor, tokenwise: Measured) -> None:
        """Gives rewards (N,) to a controller that plans; responses to one prompt are a group."""
        lengths = cast(Tensor, tokenwise.mask).sum(1)
        some = lengths > 0
        # The tokens before the first one that counts.
        starts = responses.counted.int().argmax(1)
        prompts = [
            tuple(text[:n])
            for text, n in zip(responses.tokens.tolist(), starts.tolist(), strict=True)
        ]
        numbers = {prompt: float(number) for number, prompt in enumerate(dict.fromkeys(prompts))}
        groups = torch.tensor([numbers[prompt] for prompt in prompts], device=rewards.device)
        self.penalty.feed.plan_from(
            self.controller,
            rewards[some],
            groups=groups[some],
            log_ratios=tokenwise.kl.sum((1, 2))[some],
            lengths=lengths[some],
        )

    def _fed(
        self, scored: Scored, tokenwise: Measured, sampler: Tensor | None, ends: Tensor
    ) -> Tensor | None:
        """What the controller is fed, of tokens or responses, (M,); None: a sampler too far off."""
        mask, fed = cast(Tensor, tokenwise.mask), tokenwise.fed.squeeze(-1)
        by_step = self.controller.per == "step"
        if self.sampler_weights is not None:
            if sampler is None:
                raise MissingKeyError(_NO_SAMPLER)
            check_finite(type(self).__name__, {SAMPLER_LOG_PROB: sampler}, mask)
            log_ratio = torch.where(mask, scored.log_prob - sampler, 0.0)
            weights, share = sampler_weights(log_ratio, self.cap, None if by_step else ends, mask)
            if share < FEWEST:
                return None
            fed = fed * weights
        return fed[mask] if by_step else fed.sum(1)[mask.any(1)]


def _places(responses: Responses, steps: TensorDict, values: Tensor) -> list[Tensor]:
    """Values of steps (N, T, ...) at their tokens in ("tokens", "full"); else NaN, or of ids 0."""
    rows, missing = [], torch.nan if values.is_floating_point() else 0
    mask = steps.get(MASK_KEY)
    position = steps.get("position")
    for i, width in enumerate(responses.widths):
        row = values.new_full((width, *values.shape[2:]), missing)
        row[position[i][mask[i]] + responses.shift[i]] = values[i][mask[i]]
        rows.append(row)
    return rows


def _set_rows(batch: TensorDictBase, key: NestedKey, values: list[Tensor], width: int) -> None:
    """Sets an entry of a batch (*B), one row per element, of the common `width` or ragged."""
    name, leaf = cast(tuple[str, str], key)
    held = batch.get(name, None)
    holder = held if is_tensor_collection(held) else None  # not that of TorchRL's KLRewardTransform
    widths = {len(row) for row in values}
    if not values or (len(widths) == 1 and not isinstance(batch, LazyStackedTensorDict)):
        holder = TensorDict(batch_size=batch.batch_size) if holder is None else holder.copy()
        stacked = torch.stack(values) if values else torch.zeros(0, width)
        holder.set(leaf, stacked.reshape(*batch.batch_size, *stacked.shape[1:]))
    else:
        old = [TensorDict()] * len(values) if holder is None else holder.reshape(-1).unbind(0)
        parts = [part.copy() for part in old]
        for part, value in zip(parts, values, strict=True):
            part.set(leaf, value)
        for size in reversed(batch.batch_size[1:]):
            parts = [lazy_stack(parts[i : i + size]) for i in range(0, len(parts), size)]
        holder = lazy_stack(parts)
    batch.set(name, holder)


_NO_SAMPLER = (
    '("log_probs", "full") is not in the data, with which `sampler_weights` compares the policy: '
    "let the sampler record it."
)
_NOT_PICKLED = (
    "a ResponseKLTransform cannot be sent to another process, where it would not see the policy "
    "learn: use it in the process that trains, as `postproc` or in the replay buffer there."
)
