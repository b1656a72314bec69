"""Evaluation: the controller stays where it is, and the task reward is told from the penalty."""

import copy

import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import Compose, GymEnv, RewardSum, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform


def make_actor():
    return ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


torch.manual_seed(0)
policy, reference = make_actor(), make_actor()
controller = AdaptiveKLController(init_coeff=0.1, target=1.0, horizon=100)
stack = KLConstrainedTransform(policy, controller, reference=reference, update_every=1)
# The RewardSum before the stack sums the task reward.
env = TransformedEnv(
    GymEnv("CartPole-v1", categorical_action_encoding=True), Compose(RewardSum(), stack)
)
env.set_seed(0)


def evaluate(name, exploration):
    with set_exploration_type(exploration), torch.no_grad():
        rollout = env.rollout(200, policy)
    step = rollout["next"]
    result = f"return {step['episode_reward'][-1].item():.0f}, KL {step['kl'].mean():+.4f} per step"
    print(f"{name:21}{result}, coefficient {controller.coeff:.4f}")


# The most likely actions are not samples: their mean k1 is not the KL, and moves nothing.
evaluate("most likely actions", ExplorationType.DETERMINISTIC)
stack.freeze()
evaluate("sampled, frozen", ExplorationType.RANDOM)
stack.unfreeze()
evaluate("sampled, in training", ExplorationType.RANDOM)

# On batches, eval() stops the controller as well.
with set_exploration_type(ExplorationType.RANDOM):
    batch = env.base_env.rollout(200, policy)
on_batches = KLConstrainedTransform(policy, copy.deepcopy(controller), reference=reference).eval()
print(f"KL of a batch        {on_batches(batch)['next', 'kl'].mean():+.4f} per step")
