"""The stack around several envs at once: SerialEnv, ParallelEnv and Gymnasium's vector envs."""

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_actor():
    return ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def collect(env, actor, **options):
    env.set_seed(0)
    collector = Collector(
        env,
        actor,
        frames_per_batch=400,
        total_frames=800,
        auto_register_policy_transforms=False,
        **options,
    )
    for batch in collector:  # (2 envs, 200 steps)
        step = batch["next"]
        print(f"  {tuple(batch.shape)}, coefficient {step['kl_coeff'].mean():.4f}")
    collector.shutdown()


if __name__ == "__main__":  # ParallelEnv starts processes
    torch.manual_seed(0)
    actor = make_actor()

    def make_stack():
        return KLConstrainedTransform(actor, AdaptiveKLController(0.1, 5.0, horizon=200))

    print("SerialEnv, the stack as postproc")
    collect(SerialEnv(2, make_env), actor, postproc=make_stack())
    print("ParallelEnv, the stack around it and not inside its workers")
    collect(TransformedEnv(ParallelEnv(2, make_env), make_stack()), actor)
    print("Gymnasium's vector env, the stack as postproc")
    makers = [lambda: gymnasium.make("CartPole-v1")] * 2
    vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    env = GymWrapper(vector, categorical_action_encoding=True)
    collect(env, actor, postproc=make_stack())
