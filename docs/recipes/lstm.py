"""A recurrent policy: the reference has its own hidden state, and PPO trains whole sequences."""

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import Compose, GymEnv, InitTracker, TransformedEnv
from torchrl.modules import MLP, LSTMModule, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform

torch.manual_seed(0)
lstm = LSTMModule(
    input_size=4,
    hidden_size=32,
    in_keys=["observation", "h", "c"],
    out_keys=["features", ("next", "h"), ("next", "c")],
)
head = TensorDictModule(MLP(32, 2, num_cells=[32]), ["features"], ["logits"])
actor = ProbabilisticActor(
    TensorDictSequential(lstm, head),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
value = ValueOperator(MLP(4, 1, num_cells=[64]), in_keys=["observation"])
controller = AdaptiveKLController(init_coeff=1.0, target=0.01, horizon=5_000, per="step")
env = TransformedEnv(
    GymEnv("CartPole-v1", categorical_action_encoding=True),
    Compose(
        InitTracker(),  # marks the first step of an episode
        lstm.make_tensordict_primer(),  # gives the policy a hidden state at reset
        KLConstrainedTransform(actor, controller),  # last; it keeps the reference's own state
    ),
)
env.set_seed(0)
loss, gae = ClipPPOLoss(actor, value), GAE(gamma=0.99, lmbda=0.95, value_network=value)
optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
collector = Collector(
    env,
    actor,
    frames_per_batch=400,
    total_frames=2000,
    auto_register_policy_transforms=False,
)
for batch in collector:
    gae(batch)
    for _ in range(4):
        losses = loss(batch)  # the whole batch in the order of its steps: the loss runs the LSTM
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
    kl, coeff = batch["next", "kl"].mean(), batch["next", "kl_coeff"].mean()
    print(f"KL {kl:+.4f} nats per step, coefficient {coeff:.4f}")
