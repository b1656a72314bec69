"""A controller of your own: one method says the next coefficient, and a buffer keeps its state."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, TargetKLController


class Patient(TargetKLController):
    """Moves by a fifth once the KL has been on one side of the target for two updates."""

    def __init__(self, init_coeff, target, **options):
        super().__init__(init_coeff, target, **options)
        # A buffer, edited in place: it is in `state_dict`, and a copy of the controller has it.
        self.register_buffer("side", torch.zeros((), dtype=torch.float64))

    def next_coeff(self, kl, n_steps):
        sign = 1.0 if kl > self.target else -1.0
        run = self.side.item() + sign if self.side * sign > 0 else sign
        self.side.fill_(run)
        return self.coeff.item() * (1.2**sign if abs(run) >= 2 else 1.0)


torch.manual_seed(0)
env = GymEnv("CartPole-v1", categorical_action_encoding=True)
env.set_seed(0)
actor = ProbabilisticActor(
    TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
value = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
stack = KLConstrainedTransform(actor, Patient(0.5, 0.01, per="step"), estimator="exact")
loss, gae = ClipPPOLoss(actor, value), GAE(gamma=0.99, lmbda=0.95, value_network=value)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
options = {"frames_per_batch": 500, "total_frames": 4000, "auto_register_policy_transforms": False}
for batch in Collector(env, actor, postproc=stack, **options):
    for _ in range(8):
        gae(batch)
        losses = loss(batch)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
    kl, coeff = batch["next", "kl_estimate"].mean(), stack.controller.coeff.item()
    print(f"KL {kl:.4f} nats per step, next coefficient {coeff:.3f}")
