"""KL control of whole responses, on batches of TorchRL's LLM API."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform
from torchrl.modules import set_recurrent_mode

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.parallel import unwrapped
from torchrl_kl.actors.policy import Acting, Borrowed, evaluating
from torchrl_kl.actors.reading import scored_inputs
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.actors.top_k import RECORDED, record_top_k
from torchrl_kl.batches import MASK_KEY
from torchrl_kl.controllers import KLController
from torchrl_kl.functional.numbers import check_count, check_finite
from torchrl_kl.functional.sampler import (
    FEWEST,
    SamplerWeights,
    check_sampler_weights,
    sampler_weights,
)
from torchrl_kl.functional.tiles import figures
from torchrl_kl.keys import KLKeys, MissingKeyError, as_keys, as_tuple, get_required
from torchrl_kl.language.causal_lm import stated
from torchrl_kl.language.heads import CausalLMActor, HeadChunk
from torchrl_kl.language.responses import (
    KEPT,
    LOG_PROB,
    SAMPLER_LOG_PROB,
    EndTokens,
    read_responses,
    several,
)
from torchrl_kl.transforms.base import env_of, open_batch, refuse_replaced
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
        temperature: that of the sampler; the logits of policy and reference are divided by it.
        top_k, top_p, min_p: those of the sampler; see CausalLMActor.
        sampler_weights, cap: None, or "truncated": weights what the controller is fed, as for
            KLPenaltyLoss, by the ratios up to each token, or with `per="step"` its own.
        update_every: how many responses (tokens) an update of the controller waits for. None: each
            batch updates once.
        chunk_size: how many responses are scored at a time. None: all.
        head_chunk: how many tokens have logits at a time; see CausalLMActor.
        pad_token, eos_token: as for `as_steps`; by default those of the model's configuration.
        keys: names of entries; `KLKeys.named("second")` for a second reference. `log_prob` and
            `ref_log_prob` of others than `named` are not read.

    Raises:
        TypeError: `model` is not a module, or is a wrapper of TorchRL.
        KeyError, ValueError: as `as_steps` does; and there is no reward, a number is not finite, or
            `model` is not causal.
        RuntimeError: it is put into an env, or the rewards were penalized before.

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
        named = as_keys(keys)
        resolved = replace(
            named,
            log_prob=LOG_PROB,
            ref_log_prob=(f"{named.prefix}ref_log_probs", "full"),
            kl=named.kl or f"{named.prefix}kl",
        ).resolve()
        written = [resolved.penalized, resolved.kl_coeff, resolved.task_reward, resolved.kl]
        written += [] if estimator == "k1" else [resolved.kl_estimate]
        written += [LOG_PROB, unravel_key(("next", resolved.ref_log_prob))]
        super().__init__(in_keys=[("tokens", "full")], out_keys=written)
        check_sampler_weights(sampler_weights, cap)
        self.keys = resolved
        self.sampler_weights, self.cap = sampler_weights, cap
        self.n_rescued = 0
        self.chunk_size = None if chunk_size is None else check_count("chunk_size", chunk_size)
        self._over = partial(CausalLMActor, temperature=temperature, head_chunk=head_chunk)
        actor = self._over(model, top_k=top_k, top_p=top_p, min_p=min_p)
        if isinstance(reference, nn.Module) and not hasattr(reference, "get_dist"):
            reference = self._over(reference)
        self._policy = Borrowed(actor, refusal=_NOT_PICKLED)
        frozen = as_reference(actor, reference)
        frozen.name_states(f"{named.prefix}ref_log_prob")  # as `as_steps` names its log-probs
        self._step_keys = KLKeys().resolve(frozen.log_prob_key)
        self._estimator = estimator
        estimate = make_estimate(estimator, actor, self._step_keys)
        self.scorer = Scorer(frozen, Acting.of(actor, frozen.recorded), estimate)
        self.penalty = Penalty(controller, resolved, update_every=update_every)
        inner = unwrapped(model)
        configs = stated("generation_config", inner), stated("config", inner)
        self.pad_token = stated("pad_token_id", *configs) if pad_token is None else pad_token
        ends = stated("eos_token_id", *configs) if eos_token is None else eos_token
        self.eos_token = several(ends) or None

    @property
    def reference(self) -> FrozenActor:
        """The frozen reference, an actor."""
        return self.scorer.reference

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards the model `source`; see `FrozenActor.update_reference`."""
        self.reference.update_reference(self._over(source), tau)

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuses envs."""
        super().set_container(container)
        if env_of(self) is not None:
            raise RuntimeError(
                "ResponseKLTransform works on whole batches, not in an env: pass it as "
                "`LLMCollector(postproc=...)`, or append it to a replay buffer with `invert=True`."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_replaced(self, name)
        super().__setattr__(name, value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Penalizes a batch (*B), and feeds the controller unless in eval mode."""
        return self._process(tensordict, moves=self.training)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """The same of a batch that a replay buffer is extended with."""
        return self._process(next_tensordict, moves=True)

    def _process(self, tensordict: TensorDictBase, *, moves: bool) -> TensorDictBase:
        """Scores, measures and penalizes a batch (*B); `moves`: whether the controller is fed."""
        batch, _ = open_batch(tensordict)
        following: Any = batch.get("next")
        self.refuse_penalized(following, "the batch")
        self.penalty.refuse_sums(batch)
        reward = get_required(following, self.keys.reward, _NO_REWARD)
        steps, places = read_responses(
            batch,
            reward,
            pad_token=self.pad_token,
            eos_token=self.eos_token,
            device=next(self._policy.held.parameters(), batch).device,
        )
        recorded, scored = _find_recorded(steps, following), self._score(steps)
        measured = measure(scored, None, self.keys, self._estimator)
        totals = measured._replace(kl=_sums(measured.kl, reward), fed=_sums(measured.fed, reward))
        self.penalty.check(totals, reward)
        moves, fed = moves and not self.frozen, self._fed(steps, scored, measured, recorded)
        if moves:
            samples = {} if fed is None else self._samples(steps, measured)
            self.penalty.feed.plan_from(self.controller, **samples)
        self.penalty.apply(following, totals.kl, reward)
        following.set(self.keys.kl, totals.kl)
        if self._estimator != "k1":
            following.set(self.keys.kl_estimate, totals.fed)
        places.write(batch, LOG_PROB, scored.log_prob)
        places.write(following, self.keys.ref_log_prob, scored.ref_log_prob)
        if recorded is not None:
            places.write(batch, SAMPLER_LOG_PROB, recorded)
            following.set("sampler_kl", _sums(recorded - scored.log_prob, reward))
        if (kept := steps.get(KEPT, None)) is not None:
            places.write(batch, KEPT, kept)
        if moves:
            self.penalty.feed.pool(self.controller, fed)
        return batch.set("next", following)

    def _score(self, steps: TensorDict) -> Scored:
        """The log-probs (N, T) of the steps, a few responses at a time; 0 where none counts.

        Writes the kept ids into the steps.
        """
        parts = steps.split(self.chunk_size or len(steps)) if len(steps) else [steps]
        self.n_rescued = 0
        found = [self._score_rows(rows) for rows in parts]
        if KEPT in parts[0].keys(True):
            steps.set(KEPT, torch.cat([rows.get(KEPT) for rows in parts]))
        log_prob, ref_log_prob, *estimates = (
            torch.where(steps.get(MASK_KEY), torch.cat(each), 0.0)
            for each in zip(*found, strict=True)
        )
        return Scored(log_prob, ref_log_prob, estimates)

    @torch.no_grad()
    def _score_rows(self, rows: TensorDictBase) -> list[Tensor]:
        """The log-probs, and the estimates, of all `rows` at once."""
        actor, action = self._policy.held, rows.get("action")
        inputs = scored_inputs(actor, rows)
        with evaluating(actor), set_recurrent_mode(True):
            dist = actor.get_dist(inputs)
        self.n_rescued += int(actor.n_rescued)
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

    def _samples(self, steps: TensorDict, measured: Measured) -> dict[str, Tensor]:
        """What a controller plans from; responses to one prompt are a group."""
        done, lengths = steps["next", "done"], steps.get(MASK_KEY).sum(1)
        tokens, start = steps["tokens"][:, 0], steps["position"][:, :1]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        prompts = torch.where(places < start, tokens, -1)
        some = lengths > 0
        return {
            "rewards": steps["next", "reward"][done],
            "groups": prompts[some].unique(dim=0, return_inverse=True)[1].double(),
            "log_ratios": measured.kl.sum((1, 2))[some],
            "lengths": lengths[some],
        }

    def _fed(
        self, steps: TensorDict, scored: Scored, measured: Measured, sampler: Tensor | None
    ) -> Tensor | None:
        """The KL of tokens or responses, (M,), for the controller; None: the sampler is too far."""
        mask, fed = steps.get(MASK_KEY), measured.fed.squeeze(-1)
        by_step = self.controller.per == "step"
        if self.sampler_weights is not None:
            if sampler is None:
                raise MissingKeyError(_NO_SAMPLER)
            check_finite(type(self).__name__, {SAMPLER_LOG_PROB: sampler}, mask)
            ends = None if by_step else steps["next", "done"].squeeze(-1)
            weights, share = sampler_weights(scored.log_prob - sampler, self.cap, ends, mask)
            if share < FEWEST:
                return None
            fed = fed * weights
        fed = fed[mask] if by_step else fed.sum(1)[mask.any(1)]
        # A KL from which a coefficient is planned says nothing about that coefficient.
        return fed[:0] if self.controller.planning else fed


def _sums(values: Tensor, reward: Tensor) -> Tensor:
    """The sums of values of steps, (N, T) or (N, T, 1), in the shape of the reward."""
    return values.flatten(1).sum(1).to(reward.device).reshape(reward.shape)


def _find_recorded(steps: TensorDict, following: TensorDictBase) -> Tensor | None:
    """The log-probs (N, T) of the sampler, if they are there."""
    # In a batch that another ResponseKLTransform has scored, they are those of the policy.
    names = {as_tuple(key)[-1] for key in following.keys(True)}
    scored = any(name.removesuffix("kl_coeff") + "ref_log_probs" in names for name in names)
    own = None if scored else steps.get("action_log_prob", None)
    return steps.get("sampler_log_prob", own)


_NO_REWARD = "a response has one; set it before this transform, to zeros for a measurement only."
_NO_SAMPLER = (
    '("log_probs", "full") is not in the data, with which `sampler_weights` compares the policy: '
    "let the sampler record it."
)
_NOT_PICKLED = (
    "a ResponseKLTransform cannot be sent to another process, where it would not see the policy "
    "learn: use it in the process that trains, as `postproc` or in the replay buffer there."
)
