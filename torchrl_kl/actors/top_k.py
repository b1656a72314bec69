"""An actor that records its k most likely actions instead of its distribution over all of them."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_kl.actors import reading
from torchrl_kl.actors.protocol import KLActor, as_kl_actor
from torchrl_kl.functional.numbers import check_count
from torchrl_kl.functional.tiles import over_log_probs
from torchrl_kl.keys import as_tuple, sibling

RECORDED = ("log_probs", "actions", "in_top_k")


class TopKActor(KLActor, ProbabilisticTensorDictSequential):
    """An actor that records its k most likely actions and not its logits: O(k) per step.

    It shares the weights of `actor`, under the same names in `state_dict`, and replaces it in
    collectors, losses and transforms. `estimator="top_k"` reads what it records.

    Keys:
        reads what the actor reads.
        writes what the actor writes, except the parameters of its distribution, and next to its
        log-prob: ("top_k", "log_probs"), nats, descending, (*B, k); ("top_k", "actions"), int64,
        (*B, k); ("top_k", "in_top_k"), whether the drawn action is one of them, (*B).

    Args:
        actor: records its log-prob and has one categorical distribution (Categorical,
            OneHotCategorical, MaskedCategorical) of one choice per step (or per agent). Of the
            methods that its class may replace, `get_dist` is used.
        k: how many actions, from 1 to all of them.
        top_k_key: the nested tensordict to write; by default "top_k" next to the log-prob.

    Raises:
        TypeError: if `actor` is not a probabilistic actor or (in a call) not categorical.
        ValueError: if `k` is less than 1 or (in a call) more than the number of actions, the
            log-prob is not recorded, or there are several distributions.

    Example:
        >>> from torchrl_kl import TopKActor
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = TopKActor(CausalLMActor(GPT(vocab_size=11, block_size=8)), k=3)
        >>> step = actor(DigitLanguageEnv(batch_size=(5,)).reset())
        >>> step["top_k", "log_probs"].shape, "logits" in step
        (torch.Size([5, 3]), False)
    """

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        k: int,
        *,
        top_k_key: NestedKey | None = None,
    ):
        if not isinstance(actor, ProbabilisticTensorDictSequential):
            name = type(actor).__name__
            raise TypeError(f"`actor` must be a ProbabilisticTensorDictSequential, got {name}.")
        asked = as_kl_actor(actor)
        if asked.whole() is not actor:
            got = "got one that keeps only some of its actions in each step"
            raise ValueError(f'`actor` must not truncate, {got}: use `estimator="exact"`.')
        log_prob_key = reading.find_log_prob_keys(reading.dist_module_of(actor))[0]
        reading.require_recording(actor)
        modules: Any = actor.module
        named = isinstance(modules, nn.ModuleDict)  # by names that are in `state_dict`
        parts: Any = [OrderedDict(modules.items())] if named else modules
        super().__init__(*parts, partial_tolerant=actor.partial_tolerant)
        self.get_dist = actor.get_dist  # its parts would make all logits of one in tiles
        self.state_lengths, self.temperature = asked.state_lengths, asked.temperature
        self.k = check_count("k", k)
        self.top_k_key = unravel_key(top_k_key or sibling(log_prob_key, "top_k"))
        self._record_keys = [(*as_tuple(self.top_k_key), name) for name in RECORDED]
        self._params = reading.written_params(actor)
        dropped = (*self._params, *self._record_keys)
        self.out_keys = [*(key for key in actor.out_keys if key not in dropped), *self._record_keys]

    @dispatch(auto_batch_size=False)
    def forward(  # type: ignore[override]
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **kwargs
    ) -> TensorDictBase:
        """Draws an action; writes it, its log-prob and the top k."""
        # A copy: the logits must not reach the caller's tensordict, nor be read from it.
        played, dist_module = tensordict.exclude(*self._params), reading.dist_module_of(self)
        dist, action_key = self.get_dist(played, **kwargs), dist_module.dist_sample_keys[0]
        if any(played.get(key, None) is None for key in self._params):  # it makes them in tiles
            drawn = dist.sample() if exploration_type() == ExplorationType.RANDOM else dist.mode
            log_prob_key = reading.find_log_prob_keys(self)[0]
            played.set(action_key, drawn).set(log_prob_key, dist.log_prob(drawn))
        else:
            dist_module(played)
        values = record_top_k(dist, played.get(action_key), self.k)
        n = values[0].shape[-1]
        if self.k > n:
            raise ValueError(f"`k` must be at most the number of actions, {n}, got {self.k}.")
        for key, value in zip(self._record_keys, values, strict=True):
            played.set(key, value)
        tensordict_out = tensordict if tensordict_out is None else tensordict_out
        return tensordict_out.update(played.select(*self.out_keys, strict=False))


def record_top_k(dist: Distribution, drawn: Tensor, k: int) -> Sequence[Tensor]:
    """The entries `RECORDED` of drawn actions (*B,); of all actions if these are fewer than k."""

    def record(log_probs: Tensor, drawn: Tensor) -> list[Tensor]:
        top = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1)
        # Numbers of actions (*B), or one-hot vectors (*B, n_actions).
        index = drawn if drawn.ndim < log_probs.ndim else drawn.long().argmax(-1)
        return [top.values, top.indices, (top.indices == index.unsqueeze(-1)).any(-1)]

    return over_log_probs(record, dist, drawn)
