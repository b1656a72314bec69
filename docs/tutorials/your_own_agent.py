# %% [markdown]
# # Control the KL of your own agent
#
# You have an agent that can do something, and a reward that says less than you want. This tutorial
# fine-tunes such an agent four times: it first only *measures* how far the policy goes, then holds
# it with a constant coefficient, then with a controller, and finally asks a monitor what is wrong.
#
# Sizes are small, so that it runs in about a minute on one core.

# %%
import copy

import matplotlib.pyplot as plt
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, Transform, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import ExponentialKLController, KLConstrainedTransform, KLMonitor

BATCHES = 15
FRAMES = 1000

# %% [markdown]
# ## 1. An agent that knows something
#
# The agent imitates a hand-written controller which balances the pole of CartPole. In your own
# work, load your checkpoint here. The one thing that KL control asks of the agent is
# `return_log_prob=True`: it must record how likely each action was.

# %%
torch.manual_seed(0)
net = MLP(4, 2, num_cells=[64, 64])
agent = ProbabilisticActor(
    TensorDictModule(net, ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
states = torch.randn(5000, 4) * torch.tensor([1.0, 1.0, 0.1, 0.5])
to_the_right = (states @ torch.tensor([0.02, 0.05, 1.0, 0.3]) > 0).long()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(300):
    optimizer.zero_grad()
    error = torch.nn.functional.cross_entropy(net(states), to_the_right, label_smoothing=0.2)
    error.backward()
    optimizer.step()
agrees = (net(states).argmax(-1) == to_the_right).float().mean()
print(f"the agent agrees with its teacher in {agrees:.1%} of the states")


# %% [markdown]
# ## 2. A reward that says too little
#
# Fine-tuning rewards the speed of the cart to the right. Nobody thought of saying that the pole
# should stay up.


# %%
class SpeedReward(Transform):
    """The speed to the right, in place of CartPole's reward."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", next_tensordict["observation"][..., 1:2].clone())


def fine_tune(controller, watch=None):
    """PPO from the agent; reward, KL (nats per step), coefficient and falls of each batch."""
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), SpeedReward())
    env.set_seed(0)
    policy = copy.deepcopy(agent)
    stack = KLConstrainedTransform(policy, controller, estimator="exact")
    value = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    loss, gae = ClipPPOLoss(policy, value), GAE(gamma=0.98, lmbda=0.95, value_network=value)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    sizes = {"frames_per_batch": FRAMES, "total_frames": BATCHES * FRAMES}
    rows = []
    for batch in Collector(
        env, policy, **sizes, postproc=stack, auto_register_policy_transforms=False
    ):
        if watch is not None:
            for message in watch(batch):
                print(message)
        for _ in range(5):
            gae(batch)
            for minibatch in batch[torch.randperm(FRAMES)].split(FRAMES // 4):
                losses = loss(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                optimizer.step()
        step = batch["next"]
        means = [step[key].mean().item() for key in ("task_reward", "kl_estimate", "kl_coeff")]
        rows.append([*means, step["terminated"].sum().item()])
    return torch.tensor(rows)


# %% [markdown]
# ## 3. Measure first
#
# A coefficient of 0 changes no reward: the stack only measures.

# %%
runs = {"measured only": fine_tune(0.0)}
reward, kl, _, falls = runs["measured only"][-1].tolist()
print(f"reward {reward:+.2f}, KL {kl:.3f} nats per step, {falls:.0f} falls in {FRAMES} steps")

# %% [markdown]
# The reward rises, and so do the falls. The KL shows from the start what the reward hides: the
# policy leaves what it knew.
#
# ## 4. A constant, then a controller
#
# Which coefficient is right? It depends on the scale of the reward, so it is hard to guess. The
# controller is given a KL instead, which means the same for every reward: 0.05 nats per step.

# %%
runs["constant 0.1"] = fine_tune(0.1)
controller = ExponentialKLController(init_coeff=1.0, target=0.05, gain=0.3, per="step")
runs["controller"] = fine_tune(controller)
for name, rows in runs.items():
    reward, kl, coeff, falls = rows[-5:].mean(0).tolist()
    print(
        f"{name:14} reward {reward:+.2f}, KL {kl:.3f}, coefficient {coeff:.3f}, falls {falls:.0f}"
    )

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for name, color in zip(runs, ("#d55e00", "#009e73", "#0072b2"), strict=True):
    axes[0].plot(runs[name][:, 1], color=color, label=name)
    axes[1].plot(runs[name][:, 3], color=color, label=name)
axes[0].axhline(0.05, color="black", linestyle=":", label="target")
axes[0].set(title="KL (nats per step)", xlabel="batch")
axes[1].set(title=f"falls in {FRAMES} steps", xlabel="batch")
_ = axes[0].legend(frameon=False)

# %% [markdown]
# ## 5. Ask what is wrong
#
# `KLMonitor` looks at every batch and says once per episode what is wrong with a run, and what to
# do about it. Here the coefficient starts so low that the policy runs away before it is found.

# %%
low = ExponentialKLController(init_coeff=1e-3, target=0.05, gain=0.1, per="step")
watch = KLMonitor(low, window=3)
runs["started low"] = fine_tune(low, watch)
print({name: count for name, count in watch.counts.items() if count.batches})

# %% [markdown]
# ## Where to go from here
#
# - [Units](../concepts/units.md): what a target of 0.05 nats per step means.
# - [Controllers](../concepts/controllers.md): how to choose the numbers.
# - [Recipes](../recipes/index.md): your kind of policy, env and collector.
