"""The stack as a hook of TorchRL's trainers: it penalizes batches and logs which KL is which."""

import warnings
from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_kl.batches import counted_values
from torchrl_kl.keys import get_required
from torchrl_kl.transforms import KLConstrainedTransform


class KLControlHook(TrainerHookBase):
    """Penalizes KL(policy || reference) in every batch that a PPOTrainer collects, and logs it.

    A batch is penalized once, before its advantage is computed, and then moves the controller at
    most once. The trainer logs the penalized reward as `r_training`, from TorchRL 0.15 on as
    `training/rewards/mean`; the hook adds, for each batch:

    - `kl_to_reference`: mean KL(policy || reference), nats per step: how far training has gone.
    - `kl_to_old_policy`: mean `kl_approx` of the loss, log pi_old - log pi, over the batch's last
      epoch, nats per step: how far the updates of one batch have gone.
    - `kl_coeff`: mean coefficient of the penalty, reward per nat.
    - `task_reward`: mean reward before the penalty, per step.
    - `sampler_kl`, `sampler_kl_error`: mean KL(sampler || policy), nats per step, and its standard
      error, of batches from `rescore`.

    The figures are those of this process, also if the controller is fed by a group of ranks.

    You may rely on: padding (("collector", "mask") False) is in no mean; a trainer's checkpoint
    restores the controller, what it was fed, and the reference. A restarted collector begins new
    trajectories.

    Args:
        stack: penalizes the rewards; it must not be in an env or the collector's `postproc` too.

    Raises:
        RuntimeError: in training, if rewards were penalized or, unless the coefficient is 0,
            advantages computed before it.

    Example:
        >>> from torchrl_kl import KLConstrainedTransform, KLControlHook
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> hook = KLControlHook(KLConstrainedTransform(actor, 0.1))  # then hook.register(trainer)
        >>> batch = hook(DigitLanguageEnv(batch_size=(8,)).rollout(4, actor))
        >>> abs(hook.log_batch(batch)["kl_to_reference"]) < 1e-6  # the policy is the reference
        True
    """

    def __init__(self, stack: KLConstrainedTransform):
        if not (isinstance(stack, KLConstrainedTransform) and stack.records):
            got = type(stack).__name__
            raise TypeError(f"`stack` must be a KLConstrainedTransform, got {got}: build one.")
        self.stack = stack

    def register(self, trainer: Trainer, name: str = "kl_control") -> None:
        """Registers the hook for batches, log and checkpoints of a trainer.

        Call it after the trainer is built, and before `load_from_file`, which restores only that.
        """
        if trainer.collected_frames:
            what = f"KLControlHook was registered after {trainer.collected_frames} frames"
            fix = "register it before `load_from_file`, which restores its controller"
            warnings.warn(f"{what}: {fix} and reference.", stacklevel=2)
        trainer.register_module(name, self)
        trainer.register_op("batch_process", self)
        trainer.register_op("pre_steps_log", self.log_batch)
        trainer.register_op("post_optim_complete_log", self.log_update)

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Penalizes a batch and moves the controller; returns a shallow copy."""
        return self.stack(batch)

    def log_batch(self, batch: TensorDictBase | None) -> dict[str, Any]:
        """The figures of a penalized batch, before the updates on it."""
        if batch is None:
            fix = "put the stack into the env if the collector writes into a replay buffer"
            raise RuntimeError(f"the trainer has no batch to penalize: {fix}.")
        found = {
            "kl_to_reference": _counted(self.stack, batch, self.stack.measured_key).mean().item(),
            "kl_coeff": _counted(self.stack, batch, self.stack.keys.kl_coeff).mean().item(),
            "task_reward": _counted(self.stack, batch, self.stack.keys.task_reward).mean().item(),
            "log_pbar": True,
        }
        key = self.stack.keys.recorded.sibling("sampler_kl")
        if batch.get(unravel_key(("next", key)), None) is not None:
            values = _counted(self.stack, batch, key)
            error = values.std().item() / len(values) ** 0.5
            found |= {"sampler_kl": values.mean().item(), "sampler_kl_error": error}
        return found

    def log_update(self, optim_steps: int, losses: TensorDictBase | None) -> dict[str, Any] | None:
        """The figures of the updates on a batch; None if the loss has no `kl_approx`."""
        # The trainer gives the mean over the last epoch, and None where there were no updates.
        kl = None if losses is None else losses.get("kl_approx", None)
        return None if kl is None else {"kl_to_old_policy": kl.mean().item(), "log_pbar": True}

    def state_dict(self) -> dict[str, Any]:
        """The state of the stack."""
        return self.stack.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the stack, in place."""
        self.stack.load_state_dict(state_dict)


def _counted(stack: KLConstrainedTransform, batch: TensorDictBase, key: NestedKey) -> Tensor:
    """An entry of "next", (*B, *A, 1), of the steps that count, (N,)."""
    fix = "let nothing drop it between KLControlHook and the log."
    values = get_required(batch, unravel_key(("next", key)), fix)
    return values[counted_values(batch, stack.keys, values)]
