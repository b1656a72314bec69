"""SAC with a replay buffer, whose samples are penalized with the coefficient of today."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

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
qvalue = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation", "action"])
loss = SACLoss(actor, qvalue, fixed_alpha=True, alpha_init=0.1, action_spec=env.action_spec)
loss.make_value_estimator(gamma=0.95)
target_update = SoftUpdate(loss, tau=0.01)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)

controller = ExponentialKLController(init_coeff=0.1, target=0.1, gain=0.3, per="step")
stack = KLConstrainedTransform(actor, controller)
collector = Collector(
    env,
    actor,
    frames_per_batch=200,
    total_frames=1200,
    postproc=stack,  # measures, and moves the controller; it stores `task_reward` and `kl`
    auto_register_policy_transforms=False,
)
for batch in collector:
    buffer.extend(batch)
    for _ in range(20):
        sample = buffer.sample()
        step = sample["next"]
        # The stored reward has the coefficient of the day on which it was collected.
        step["reward"] = step["task_reward"] - controller.coeff.float() * step["kl"]
        losses = loss(sample)
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_qvalue"]).backward()
        optimizer.step()
        target_update.step()
    stored, today = buffer[:]["next", "kl_coeff"].mean(), controller.coeff
    print(f"KL {batch['next', 'kl'].mean():+.3f}, coefficient {today:.3f}, stored {stored:.3f}")
