# %% [markdown]
# # Control the KL of your own agent
#
# You have an agent that is good at its task, and a reward that says less than you want: what does
# the reward do to the agent, and at which KL? It takes one to two minutes on one core.

# %%
import copy

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    GymEnv,
    ObservationNorm,
    Transform,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, KLMonitor, PlannedKLController

BATCHES = 15
FRAMES = 1000

# %% [markdown]
# ## 1. An agent that is good already
#
# The car of MountainCar must swing up to reach its goal. The agent imitates a driver who can do
# this; in your own work, load your checkpoint here. KL control asks one thing of the agent,
# `return_log_prob=True`.


# %%
def make_env(*transforms):
    env = GymEnv("MountainCar-v0", categorical_action_encoding=True, max_episode_steps=500)
    scale = ObservationNorm(0.0, torch.tensor([1.0, 20.0]), in_keys=["observation"])
    env = TransformedEnv(env, Compose(*transforms, scale))
    env.set_seed(0)
    return env


torch.manual_seed(0)
net = MLP(2, 3, num_cells=[64, 64])  # position, velocity -> push left, coast, push right
agent = ProbabilisticActor(
    TensorDictModule(net, ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
states = torch.rand(5000, 2) * torch.tensor([1.8, 2.8]) - torch.tensor([1.2, 1.4])
push = 2 * (states[:, 1] > 0).long()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(300):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(states), push, label_smoothing=0.2).backward()
    optimizer.step()

with set_exploration_type("RANDOM"):
    drives = make_env().rollout(2 * FRAMES, agent, break_when_any_done=False)
goals = drives["next", "terminated"].sum()
coasting = (drives["action"] == 1).float().mean()
print(f"{goals} goals in {2 * FRAMES} steps; it coasts in {coasting:.0%} of them")

# %% [markdown]
# ## 2. A reward that says too little
#
# The car should use less fuel, so the new reward is 1 for each step without a push. It does not
# mention the goal. `fine_tune` is an ordinary loop of PPO; only the two lines with `stack` are from
# torchrl_kl.


# %%
class FuelReward(Transform):
    """1 for coasting, 0 for a push, in place of MountainCar's reward."""

    def _step(self, tensordict, next_tensordict):
        coasting = tensordict["action"].unsqueeze(-1) == 1
        return next_tensordict.set("reward", coasting.float())


def fine_tune(controller, watch=None):
    """PPO from the agent; reward, goals, KL (nats per step) and coefficient of each batch."""
    torch.manual_seed(0)
    policy = copy.deepcopy(agent)
    stack = KLConstrainedTransform(policy, controller, estimator="exact")
    value = ValueOperator(MLP(2, 1, num_cells=[64, 64]), in_keys=["observation"])
    loss, gae = ClipPPOLoss(policy, value), GAE(gamma=0.9, lmbda=0.95, value_network=value)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    collector = Collector(
        make_env(FuelReward()),
        policy,
        frames_per_batch=FRAMES,
        total_frames=BATCHES * FRAMES,
        postproc=stack,
        auto_register_policy_transforms=False,
    )
    rows = []
    for batch in collector:
        for message in watch(batch) if watch else ():
            print(f"batch {len(rows) + 1}: {message}")
        for _ in range(4):
            gae(batch)
            for minibatch in batch[torch.randperm(FRAMES)].split(FRAMES // 4):
                losses = loss(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                optimizer.step()
        step = batch["next"]
        reward, kl, coeff = (step[key].mean() for key in ("task_reward", "kl_estimate", "kl_coeff"))
        rows.append([reward, step["terminated"].sum(), kl, coeff])
    return torch.tensor(rows)


def print_last(name, rows):
    """The mean of the last third of the batches."""
    reward, goals, kl, coeff = rows[-(-2 * len(rows) // 3) :].mean(0).tolist()
    print(f"{name:16} reward {reward:.2f}, goals {goals:.1f}, KL {kl:.2f}, coefficient {coeff:.2f}")


# %% [markdown]
# ## 3. Measure first
#
# A coefficient of 0 changes no reward: the stack only measures.

# %%
runs = {"only measured": fine_tune(0.0)}
print_last("only measured", runs["only measured"])

# %% [markdown]
# ![Without a penalty the reward rises and no goal is reached](../images/finetune.png)
#
# In this picture of five seeds, the reward rises to its maximum (orange), and the car stays at the
# bottom of the valley. The KL tells it early: up to about 0.3 nats per step most goals are kept, so
# a target of 0.2 nats is on the safe side.
#
# ## 4. A constant coefficient
#
# Which coefficient leads to 0.2 nats? It depends on the scale of the reward and on how rare high
# rewards are. Two guesses:

# %%
for coeff in (0.2, 5.0):
    runs[f"constant {coeff}"] = fine_tune(coeff)
    print_last(f"constant {coeff}", runs[f"constant {coeff}"])

# %% [markdown]
# The lower one does not prevent the damage; with the higher one the policy hardly learns anything.
#
# ## 5. A controller
#
# A controller is told the KL instead, which means the same for every reward. `PlannedKLController`
# computes its first coefficient from the rewards of the first batch, and then corrects it.
# `KLMonitor` looks at every batch and says what is wrong with a run and what to do.

# %%
controller = PlannedKLController(target=0.2, per="step")
runs["controller"] = fine_tune(controller, KLMonitor(controller, window=5))
print_last("controller", runs["controller"])
print("coefficient:", " ".join(f"{coeff:.2f}" for coeff in runs["controller"][:, 3].tolist()))

# %% [markdown]
# With a coefficient of about 0.6 the car coasts four times as often as before, and still reaches
# its goal.
#
# ## 6. What to do in your own code
#
# 1. Add the stack [to your loop](../getting_started.md#add-it-to-your-loop).
# 2. Run once with the coefficient 0. Plot the KL, and something that the reward does not say: a
#    success rate, samples that you look at. Choose the KL up to which it is fine.
# 3. Run with `PlannedKLController(target)`, in nats per [trajectory or step](../concepts/units.md),
#    and let a `KLMonitor` watch.
#
# The [recipes](../recipes/index.md) have your kind of policy, env and collector.
