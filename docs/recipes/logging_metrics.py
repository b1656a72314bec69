"""What to log, under which names: CSV, TensorBoard or Weights & Biases (offline)."""

import argparse
from tempfile import mkdtemp

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor
from torchrl.record.loggers import get_logger

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, KLMonitor

parser = argparse.ArgumentParser()
parser.add_argument("--logger", choices=["csv", "tensorboard", "wandb"], default="csv")
parser.add_argument("--out", default=None)
args = parser.parse_args()

torch.manual_seed(0)
env = GymEnv("CartPole-v1", categorical_action_encoding=True)
actor = ProbabilisticActor(
    TensorDictModule(MLP(4, 2, num_cells=[64]), ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
controller = AdaptiveKLController(init_coeff=0.1, target=0.01, horizon=10_000, per="step")
stack = KLConstrainedTransform(actor, controller)
monitor = KLMonitor(controller, actor=actor)
out = args.out or mkdtemp()
options = {"offline": True, "project": "torchrl_kl"} if args.logger == "wandb" else {}
logger = get_logger(args.logger, logger_name=out, experiment_name="run", wandb_kwargs=options)
collector = Collector(
    env,
    actor,
    frames_per_batch=200,
    total_frames=1000,
    postproc=stack,
    auto_register_policy_transforms=False,
)
for n, batch in enumerate(collector):
    step = batch["next"]
    logger.log_scalar("kl/reference", step["kl"].mean().item(), n)  # nats per step
    logger.log_scalar("kl/coeff", step["kl_coeff"].mean().item(), n)  # reward per nat
    logger.log_scalar("reward/task", step["task_reward"].mean().item(), n)
    logger.log_scalar("reward/penalized", step["reward"].mean().item(), n)
    # With PPO, also the loss's `kl_approx`, as "kl/old_policy": how far one update went.
    for message in monitor(batch):  # what is wrong with the run, once per episode of it
        print(message)
print("logged", n + 1, "batches with", type(logger).__name__)
