"""The stack as a hook of TorchRL's trainers: it penalizes batches and logs which KL is which."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_kl._feeding import kept_steps
from torchrl_kl._tensordict import MASK_KEY, as_tuple, expand_right, get_required
from torchrl_kl.transforms import KLConstrainedTransform


class KLControlHook(TrainerHookBase):
    """Penalizes KL(policy || reference) in every batch that a PPOTrainer collects, and logs it.

    A batch is penalized once, before its advantage is computed, and then moves the controller at
    most once. The trainer logs the penalized reward as `r_training`; the hook adds, for each batch:

    - `kl_to_reference`: mean KL(policy || reference), nats per step: how far training has gone.
    - `kl_to_old_policy`: mean `kl_approx` of the loss, log pi_old - log pi, over the updates of the
      batch's last epoch, nats per step: how far the updates of one batch have gone.
    - `kl_coeff`: mean coefficient of the penalty, reward per nat.
    - `task_reward`: mean reward before the penalty, per step.

    You may rely on: padding (("collector", "mask") False) is in no mean, and a step that the stack
    left out (`on_invalid="mask"`) not in that of the KL, which is NaN if none is left; a trainer's
    checkpoint restores the controller, what it was fed, and the reference, whatever actor the new
    stack was built from. A restarted collector begins new trajectories.

    Args:
        stack: penalizes the rewards; it must not be in an env or the collector's `postproc` too.

    Raises:
        TypeError: if `stack` is not a KLConstrainedTransform.
        RuntimeError: in training, if the rewards were penalized before, the advantage was computed
            before, or the trainer is given no batches.

    Example:
        >>> import warnings
        >>> from torch.optim import Adam
        >>> from torchrl.collectors import Collector
        >>> from torchrl.objectives import ClipPPOLoss
        >>> from torchrl.trainers.algorithms import PPOTrainer
        >>> from torchrl_kl import GPT, AdaptiveKLController, CausalLMActor, CausalLMCritic
        >>> from torchrl_kl import KLConstrainedTransform, KLControlHook
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> warnings.simplefilter("ignore")  # torchrl 0.14.1 calls PPOTrainer a prototype
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> loss = ClipPPOLoss(actor, CausalLMCritic(GPT(vocab_size=11, block_size=8, n_out=1)))
        >>> frames = {"frames_per_batch": 32, "total_frames": 64}
        >>> trainer = PPOTrainer(
        ...     collector=Collector(DigitLanguageEnv(batch_size=(8,)), actor, **frames),
        ...     loss_module=loss, optimizer=Adam(loss.parameters()), total_frames=64, frame_skip=1,
        ...     optim_steps_per_batch=1, progress_bar=False,
        ... )
        >>> controller = AdaptiveKLController(0.1, target=0.5, horizon=1000)
        >>> KLControlHook(KLConstrainedTransform(actor, controller)).register(trainer)
        >>> trainer.train()
        >>> controller.coeff < 0.1  # two batches near the reference, below the target
        tensor(True)
    """

    def __init__(self, stack: KLConstrainedTransform):
        if not (isinstance(stack, KLConstrainedTransform) and stack.record):
            raise TypeError(
                f"`stack` must be a KLConstrainedTransform, got {type(stack).__name__}: build one "
                "from the actor and a controller."
            )
        self.stack = stack

    def register(self, trainer: Trainer, name: str = "kl_control") -> None:
        """Registers the hook with a trainer: for its batches, its log and its checkpoints.

        Call it after the trainer is built (PPOTrainer computes its advantage last), and before
        `load_from_file`, which restores only what is registered. It warns if the trainer has
        collected frames already.
        """
        if trainer.collected_frames:
            warnings.warn(
                f"KLControlHook was registered after {trainer.collected_frames} frames: if a "
                "checkpoint was loaded before, its controller and its reference were not restored. "
                "Register it before `load_from_file`. (If KL control begins here, all is well.)",
                stacklevel=2,
            )
        trainer.register_module(name, self)
        # They run in this order: a batch comes, is logged, and then has been learned from.
        trainer.register_op("batch_process", self)
        trainer.register_op("pre_steps_log", self.log_batch)
        trainer.register_op("post_optim_complete_log", self.log_update)

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Penalizes a batch and moves the controller; returns a shallow copy."""
        # An advantage that exists will not be computed again, whatever the reward becomes.
        if "advantage" in batch.keys():
            raise RuntimeError(
                "the batch has an 'advantage' already, computed from rewards without the penalty. "
                "Register KLControlHook before what computes it, or leave that to PPOTrainer."
            )
        return self.stack(batch)

    def log_batch(self, batch: TensorDictBase | None) -> dict[str, Any]:
        """What is known of a penalized batch before it is learned from."""
        if batch is None:
            raise RuntimeError(
                "the trainer's collector writes its batches into a replay buffer and returns none, "
                "so no reward would be penalized: put the stack into the env instead."
            )
        kept = kept_steps(batch, _next(batch, self.stack.keys.kl), self.stack.keys)
        return {
            "kl_to_reference": _mean(batch, _next(batch, self.stack.measured_key), kept),
            "kl_coeff": _mean(batch, _next(batch, self.stack.keys.kl_coeff)),
            "task_reward": _mean(batch, _next(batch, self.stack.keys.task_reward)),
            "log_pbar": True,
        }

    def log_update(self, optim_steps: int, losses: TensorDictBase | None) -> dict[str, Any] | None:
        """What is known after the updates on a batch; nothing if the loss has no `kl_approx`."""
        # The trainer gives the mean over the last epoch, and None where there were no updates.
        kl = None if losses is None else losses.get("kl_approx", None)
        return None if kl is None else {"kl_to_old_policy": kl.mean().item(), "log_pbar": True}

    def state_dict(self) -> dict[str, Any]:
        """The state of the stack."""
        return self.stack.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the stack, in place."""
        self.stack.load_state_dict(state_dict)


def _next(batch: TensorDictBase, key: NestedKey) -> Tensor:
    fix = "let nothing drop it between KLControlHook and the log."
    return get_required(batch, ("next", *as_tuple(key)), fix)


def _mean(batch: TensorDictBase, values: Tensor, kept: Tensor | None = None) -> float:
    """Mean of the values (*B, 1) of steps that are not padding and, if given, `kept`, (*B)."""
    counts = torch.ones_like(values, dtype=torch.bool)
    for flags in (batch.get(MASK_KEY, None), kept):
        if flags is not None:
            counts = counts & expand_right(flags, values.shape)
    return values[counts].mean().item()
