"""The stack as a hook of TorchRL's PPOTrainer, with a log of both divergences."""

import csv
from pathlib import Path
from tempfile import mkdtemp

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.record.loggers import CSVLogger
from torchrl.trainers.algorithms import PPOTrainer

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, KLControlHook

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
loss = ClipPPOLoss(actor, value)
collector = Collector(
    env,
    actor,
    frames_per_batch=500,
    total_frames=3000,
    auto_register_policy_transforms=False,
)
folder = Path(mkdtemp())
trainer = PPOTrainer(
    collector=collector,
    total_frames=3000,
    frame_skip=1,
    optim_steps_per_batch=10,
    loss_module=loss,
    optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3),
    logger=CSVLogger("run", log_dir=str(folder)),
    log_interval=1,
    progress_bar=False,
)
controller = AdaptiveKLController(init_coeff=1.0, target=0.01, horizon=5_000, per="step")
KLControlHook(KLConstrainedTransform(actor, controller)).register(trainer)
trainer.train()

for name in ("kl_to_reference", "kl_to_old_policy", "kl_coeff"):
    (file,) = folder.rglob(f"{name}.csv")
    values = [float(row[1]) for row in csv.reader(file.read_text().splitlines())]
    print(f"{name:16}", " ".join(f"{value:+.4f}" for value in values))
