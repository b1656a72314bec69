"""A reference that is renewed when the KL is used up; the coefficient then waits."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import ExponentialKLController, KLConstrainedTransform

TARGET, EVERY = 0.02, None  # nats per step; or a number of batches

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
loss, gae = ClipPPOLoss(actor, value), GAE(gamma=0.99, lmbda=0.95, value_network=value)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
controller = ExponentialKLController(0.2, target=TARGET, gain=0.2, per="step")
stack = KLConstrainedTransform(actor, controller, estimator="exact")
options = {"frames_per_batch": 500, "total_frames": 6000, "auto_register_policy_transforms": False}
for n, batch in enumerate(Collector(env, actor, postproc=stack, **options)):
    kl = batch["next", "kl_estimate"].mean().item()
    moved = n > 0 and (kl > 1.5 * TARGET if EVERY is None else n % EVERY == 0)
    print(f"KL {kl:.4f} nats per step, coefficient {controller.coeff:.3f}{', renewed' * moved}")
    for _ in range(8):
        gae(batch)
        losses = loss(batch)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
    if moved:
        stack.update_reference(actor)
        stack.statistics.reset()  # values of the old reference that no update has used
        stack.freeze()  # near a new reference the KL says nothing about the coefficient
    elif kl > 0.5 * TARGET:
        stack.unfreeze()
