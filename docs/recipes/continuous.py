"""PPO on Pendulum with a TanhNormal policy, whose exact KL feeds the controller."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import ExponentialKLController, KLConstrainedTransform

torch.manual_seed(0)
env = GymEnv("Pendulum-v1")
env.set_seed(0)
net = nn.Sequential(MLP(3, 2, num_cells=[64, 64]), NormalParamExtractor())
actor = ProbabilisticActor(
    TensorDictModule(net, ["observation"], ["loc", "scale"]),
    in_keys=["loc", "scale"],
    distribution_class=TanhNormal,
    distribution_kwargs={"low": -2.0, "high": 2.0},
    return_log_prob=True,
)
value = ValueOperator(MLP(3, 1, num_cells=[64, 64]), in_keys=["observation"])
loss, gae = ClipPPOLoss(actor, value), GAE(gamma=0.95, lmbda=0.95, value_network=value)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

controller = ExponentialKLController(init_coeff=1.0, target=0.02, gain=0.3, per="step")
# The KL of the two normal distributions, before tanh: no sampling noise within a step.
stack = KLConstrainedTransform(actor, controller, estimator="exact")
collector = Collector(
    env,
    actor,
    frames_per_batch=400,
    total_frames=2000,
    postproc=stack,
    auto_register_policy_transforms=False,
)
for batch in collector:
    for _ in range(4):
        gae(batch)
        for minibatch in batch[torch.randperm(len(batch))].split(100):
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimizer.step()
    step = batch["next"]
    k1, exact, coeff = step["kl"].mean(), step["kl_estimate"].mean(), step["kl_coeff"].mean()
    print(f"k1 {k1:+.4f}, exact {exact:.4f} nats per step, coefficient {coeff:.3f}")
