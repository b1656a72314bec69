"""The stack as a hook of TorchRL's trainers: it charges batches, moves its controller, and logs which KL is which."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_kl._tensordict import MASK_KEY, as_tuple, expand_right
from torchrl_kl.transforms.base import get_required
from torchrl_kl.transforms.stack import KLConstrainedTransform


class KLControlHook(TrainerHookBase):
    """Charges KL(policy || reference) to the rewards of every batch that a PPOTrainer collects, and logs it.

    Each batch is charged once, before its advantage is computed, and then moves the controller at most once. The
    trainer's own log shows the charged reward as `r_training`; the hook adds, once per batch:

    ==================  ======================================================================  ==================
    name                what                                                                    unit
    ==================  ======================================================================  ==================
    `kl_to_reference`   mean KL(policy || reference): how far training has gone                 nats per step
    `kl_to_old_policy`  mean `kl_approx` of the loss over the updates of the batch's last       nats per step
                        epoch, log pi_old - log pi: how far the updates of one batch have gone
    `kl_coeff`          mean coefficient that the batch was charged with                        reward per nat
    `task_reward`       mean reward before the charge                                           reward per step
    ==================  ======================================================================  ==================

    You may rely on: the advantage sees the charged reward; padding (("collector", "mask") False) is in no mean; a
    trainer's checkpoint restores the controller and the reference, whatever actor the new stack was built from.

    State: that of the stack (the reference's weights, the controller, its pool), in the trainer's checkpoints. The sums
    of trajectories that are still open are not saved: a restarted collector begins new ones.

    Args:
        stack: what charges the rewards; it stands in no env and is no collector's `postproc` at the same time.

    Raises:
        TypeError: if `stack` is not a KLConstrainedTransform.
        RuntimeError: in training, if the rewards were charged before, the advantage was computed before, or the trainer
            gets to see no batches.

    Example:
        >>> import warnings
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.collectors import Collector
        >>> from torchrl.envs import GymEnv
        >>> from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
        >>> from torchrl.objectives import ClipPPOLoss
        >>> from torchrl.trainers.algorithms import PPOTrainer
        >>> from torchrl_kl import AdaptiveKLController
        >>> warnings.simplefilter("ignore")  # torchrl 0.14.1 calls PPOTrainer a prototype
        >>> net = TensorDictModule(MLP(4, 2, num_cells=[32]), ["observation"], ["logits"])
        >>> actor = ProbabilisticActor(
        ...     net, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ... )
        >>> loss = ClipPPOLoss(actor, ValueOperator(MLP(4, 1, num_cells=[32]), in_keys=["observation"]))
        >>> env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        >>> trainer = PPOTrainer(
        ...     collector=Collector(
        ...         env, actor, frames_per_batch=100, total_frames=200, auto_register_policy_transforms=False
        ...     ),
        ...     total_frames=200,
        ...     frame_skip=1,
        ...     optim_steps_per_batch=1,
        ...     loss_module=loss,
        ...     optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3),
        ...     progress_bar=False,
        ... )
        >>> controller = AdaptiveKLController(init_coeff=0.1, target=0.01, horizon=10_000, per="step")
        >>> KLControlHook(KLConstrainedTransform(actor, controller)).register(trainer)
        >>> trainer.train()
        >>> controller.coeff < 0.1  # two batches near the reference, below the target
        tensor(True)
    """

    def __init__(self, stack: KLConstrainedTransform):
        if not isinstance(stack, KLConstrainedTransform):
            raise TypeError(
                f"`stack` must be a KLConstrainedTransform, got {type(stack).__name__}: build one from the actor and a "
                "controller."
            )
        self.stack = stack

    def register(self, trainer: Trainer, name: str = "kl_control") -> None:
        """Registers the hook with a trainer: what it does to batches, what it logs, what is in the checkpoints.

        It may be called at any time after the trainer is built: PPOTrainer computes its advantage after all that is
        done to a batch.
        """
        trainer.register_module(name, self)
        trainer.register_op("batch_process", self)
        trainer.register_op("pre_steps_log", self.log_batch)
        trainer.register_op("post_optim_complete_log", self.log_update)

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Charges a batch and moves the controller; returns a shallow copy."""
        if "advantage" in batch.keys():
            raise RuntimeError(
                "the batch has an 'advantage' already: it was computed from rewards that were not charged. Register "
                "KLControlHook before what computes it, or leave that to PPOTrainer, which does it later."
            )
        return self.stack(batch)

    def log_batch(self, batch: TensorDictBase | None) -> dict[str, Any]:
        """What is known of a charged batch before it is learned from."""
        if batch is None:
            raise RuntimeError(
                "the trainer's collector writes its batches into a replay buffer and hands out none, so no reward "
                "would be charged: put the stack into the env instead of KLControlHook."
            )
        adjustment = self.stack.adjustment
        return {
            "kl_to_reference": _mean(batch, adjustment.measured_key),
            "kl_coeff": _mean(batch, adjustment.kl_coeff_key),
            "task_reward": _mean(batch, adjustment.task_reward_key),
            "log_pbar": True,
        }

    def log_update(self, optim_steps: int, losses: TensorDictBase | None) -> dict[str, Any] | None:
        """What is known after the updates on a batch; nothing where the loss has no `kl_approx`."""
        kl = None if losses is None else losses.get("kl_approx", None)
        return None if kl is None else {"kl_to_old_policy": kl.mean().item(), "log_pbar": True}

    def state_dict(self) -> dict[str, Any]:
        """The state of the stack."""
        return self.stack.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the stack, in place."""
        self.stack.load_state_dict(state_dict)


def _mean(batch: TensorDictBase, key: NestedKey) -> float:
    """Mean of ("next", key) over the steps that are no padding."""
    value = get_required(
        batch, ("next", *as_tuple(key)), "let nothing drop it between KLControlHook and the log."
    )
    mask: Tensor | None = batch.get(MASK_KEY, None)
    return (value if mask is None else value[expand_right(mask, value.shape)]).mean().item()
