"""Reproductions of known_faults_upstream.md, with TorchRL, transformers and PEFT alone.

Each function asserts what it reports. One that fails shows that the library has changed: remove
its row from the page. `python docs/known_faults_upstream.py` runs all of them.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torch.distributions import Normal
from torchrl.collectors import Collector, Evaluator, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs import Compose, GymEnv, SerialEnv, Transform, step_mdp
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from torchrl.modules import (
    AdditiveGaussianModule,
    Delta,
    ProbabilisticActor,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

RANDOM = ExplorationType.RANDOM
QUIET: dict[str, Any] = {"auto_register_policy_transforms": False}


def make_env(steps: int | None = None) -> GymEnv:
    env = GymEnv("CartPole-v1", categorical_action_encoding=True, max_episode_steps=steps)
    env.set_seed(0)
    return env


def make_actor() -> ProbabilisticActor:
    torch.manual_seed(0)
    return ProbabilisticActor(
        Mod(nn.Linear(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=1, num_attention_heads=2))


def evaluator_in_a_thread() -> str:
    """An evaluation in a thread changes the exploration type of the whole process."""
    evaluating, looked = threading.Event(), threading.Event()

    def act(observation: torch.Tensor) -> torch.Tensor:
        if exploration_type() == ExplorationType.DETERMINISTIC:
            evaluating.set()
            looked.wait(10)
        return torch.zeros((), dtype=torch.int64)

    with set_exploration_type(RANDOM):
        policy = Mod(act, ["observation"], ["action"])
        evaluator = Evaluator(make_env(2), policy, num_trajectories=1, max_steps=2)
        evaluator.trigger_eval()
        assert evaluating.wait(60)
        others = exploration_type()
        looked.set()
        evaluator.wait(60)
        evaluator.shutdown()
    assert others == ExplorationType.DETERMINISTIC
    return f"the thread of the training, set to RANDOM, sees {others}"


def padding_in_ppo() -> str:
    """Padded steps count in the metrics of ClipPPOLoss and in its normalised advantage."""
    torch.manual_seed(0)
    actor, value = make_actor(), ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    with set_exploration_type(RANDOM):
        batch = actor(TensorDict(observation=torch.randn(64, 4), batch_size=64)).detach()
    batch["advantage"], batch["value_target"] = torch.randn(2, 64, 1)
    batch["state_value"] = torch.zeros(64, 1)
    mask = torch.arange(64) < 32
    batch["collector", "mask"] = mask
    batch["action_log_prob"][~mask] = 0  # padding
    batch["advantage"][~mask] = 10
    loss = ClipPPOLoss(actor, value, normalize_advantage=True, entropy_bonus=False)
    whole, valid = loss(batch), loss(batch[mask])
    assert abs(valid["kl_approx"]) < 1e-6 < 0.1 < abs(whole["kl_approx"])
    assert not torch.isclose(whole["loss_objective"], valid["loss_objective"], rtol=0.1)
    return f"`kl_approx` {whole['kl_approx']:.2f} with padding, {valid['kl_approx']:.2f} without"


def padding_in_gae() -> str:
    """`average_gae` counts padded steps, too."""
    step = {name: torch.zeros(2, 8, 1, dtype=torch.bool) for name in ("done", "terminated")}
    step |= {"reward": torch.zeros(2, 8, 1), "state_value": torch.zeros(2, 8, 1)}
    mask = (torch.arange(8) < 4).expand(2, 8)
    step["reward"][mask] = torch.randn(8, 1, generator=torch.Generator().manual_seed(0)) + 1
    batch = TensorDict(next=step, state_value=torch.zeros(2, 8, 1), batch_size=(2, 8))
    batch["collector", "mask"] = mask
    gae: Any = GAE(gamma=0.0, lmbda=0.0, value_network=None, average_gae=True)
    mean = gae(batch)["advantage"][mask].mean()
    assert mean > 0.3
    return f"the advantages of the valid steps have a mean of {mean:.2f} instead of 0"


def reloaded_collector() -> str:
    """`load_state_dict` of a collector that has run gives open trajectories new ids."""
    collector = Collector(make_env(), make_actor(), frames_per_batch=8, total_frames=-1, **QUIET)
    batches = iter(collector)
    last = next(batches)[-1].clone()
    collector.load_state_dict(collector.state_dict())
    first = next(batches)[0].clone()
    collector.shutdown()
    assert first["observation"].equal(last["next", "observation"])
    before, after = (int(step["collector", "traj_ids"]) for step in (last, first))
    assert before != after
    return f"trajectory {before} goes on as {after}"


def finished_rows() -> str:
    """`break_when_all_done` repeats the last step of rows that are done."""
    env = SerialEnv(2, [lambda: make_env(3), lambda: make_env(6)])
    done = env.rollout(20, break_when_all_done=True)["next", "done"][0].flatten()
    env.close()
    assert done.sum() > 1
    return f"a trajectory of one row ends {done.sum()} times"


def compose_append() -> str:
    """`Compose.append` calls `eval()` on the transform."""
    transform = Transform(in_keys=[])
    Compose().append(transform)
    assert not transform.training
    return f"`training` is {transform.training} afterwards"


def random_frames() -> str:
    """`init_random_frames` fills the log-prob of random actions with zeros."""
    options = {"frames_per_batch": 8, "total_frames": 16, "init_random_frames": 8, **QUIET}
    first, second = Collector(make_env(), make_actor(), **options)
    assert (first["action_log_prob"] == 0).all()
    assert (second["action_log_prob"] < 0).all()
    return "all log-probs of the first batch are 0"


def reused_batch() -> str:
    """A collector hands out the same tensordict again, with what a `postproc` wrote into it."""
    seen = []

    def postproc(batch: Any) -> Any:
        seen.append("mine" in batch.keys())
        return batch.set("mine", torch.zeros(8))

    options = {"frames_per_batch": 8, "total_frames": 16, "postproc": postproc, **QUIET}
    list(Collector(make_env(), make_actor(), **options))
    assert seen == [False, True]
    return "the second batch arrives with the entry that `postproc` wrote into the first"


def stale_log_prob() -> str:
    """A random action keeps the log-prob of the action before it."""
    env = make_env()
    with set_exploration_type(RANDOM):
        data = step_mdp(env.step(make_actor()(env.reset())))
    taken = env.rand_step(data)
    assert "action_log_prob" in taken.keys()
    return f"log-prob {taken['action_log_prob']:.2f} next to a random action"


def make_normal_actor(loc: float, scale: float, distribution: Any) -> ProbabilisticActor:
    """An actor with the same parameters for each observation."""

    def parameters(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = torch.zeros_like(observation[..., :1])
        return zeros + loc, zeros + scale

    keys = ["loc", "scale"]
    network = Mod(parameters, ["observation"], keys)
    return ProbabilisticActor(network, keys, distribution_class=distribution, return_log_prob=True)


def gap_of_log_probs(*modules: Any) -> torch.Tensor:
    """What an actor recorded minus what it says of the action in the data, nats."""
    torch.manual_seed(0)
    data = TensorDict(observation=torch.zeros(1000, 3), batch_size=1000)
    with set_exploration_type(RANDOM):
        for module in modules:
            data = module(data)
    return data["action_log_prob"] - modules[0].get_dist(data).log_prob(data["action"])


def noise_behind_the_actor() -> str:
    """Exploration modules change the action and leave its log-prob."""
    actor = make_normal_actor(0.0, 1.0, Normal)
    noise = AdditiveGaussianModule(GymEnv("Pendulum-v1").action_spec, sigma_init=1.0)
    gap = gap_of_log_probs(actor, noise).mean()
    assert gap > 0.1
    return f"recorded and true log-prob differ by {gap:.1f} nats in the mean"


def saturated_tanh_normal() -> str:
    """The log-prob is recorded before the action is rounded to the largest number below 1."""
    gap = gap_of_log_probs(make_normal_actor(8.0, 0.3, TanhNormal)).mean()
    assert gap > 1
    return f"the same action has {gap:.1f} nats less when it is scored again"


def tanh_normal_outside_its_bounds() -> str:
    """The log-prob of an action that a TanhNormal cannot take is finite."""
    dist = TanhNormal(torch.zeros(1), torch.ones(1), low=-0.5, high=0.5)
    log_prob = dist.log_prob(torch.tensor([0.9]))
    assert log_prob.isfinite()
    return f"{log_prob:.1f} instead of -inf for the action 0.9 within bounds of 0.5"


def truncated_normal_far_from_its_bounds() -> str:
    """The mass within the bounds is clamped at 1e-6."""
    action, scale, found = torch.tensor([0.9]).double(), 0.5, []
    grid = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    for n_scales in (4, 6):
        loc = torch.tensor([1 + n_scales * scale], dtype=torch.float64)
        right = Normal(loc, scale).log_prob(action)
        right -= torch.trapezoid(Normal(loc, scale).log_prob(grid).exp(), grid).log()
        log_prob = TruncatedNormal(loc, torch.full((1,), scale).double()).log_prob(action)
        found.append(f"{log_prob.item():.2f} instead of {right.item():.2f} at {n_scales} scales")
    assert right - log_prob > 6
    return ", ".join(found)


def delta_has_no_density() -> str:
    """The log-prob of the only action of a Delta is inf."""
    log_prob = Delta(torch.zeros(1)).log_prob(torch.zeros(1))
    assert log_prob == torch.inf
    return f"a log-prob of {log_prob}"


def clamped_probabilities() -> str:
    """A distribution that is built with probabilities has no log-prob below -15.9."""
    probs, action = torch.tensor([1.0, 0.0]), torch.tensor(1)
    log_prob = torch.distributions.Categorical(probs=probs).log_prob(action)
    bernoulli = torch.distributions.Bernoulli(probs=probs[1]).log_prob(torch.tensor(1.0))
    assert log_prob > -16
    assert bernoulli > -16
    return f"{log_prob:.1f} instead of -inf for a probability of 0"


def slices_begin_trajectories() -> str:
    """`SliceSampler` marks the first step of each slice as the first of a trajectory."""
    sampler = SliceSampler(num_slices=4, traj_key="episode")
    storage = LazyTensorStorage(100)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=32)
    data = TensorDict(episode=torch.zeros(100, dtype=torch.int64), batch_size=100)
    data["is_init"] = (torch.arange(100) == 0).unsqueeze(-1)
    buffer.extend(data)
    marks = buffer.sample()["is_init"].sum()
    assert marks == 4
    return f"{marks} marks in 32 steps of one trajectory"


def samples_in_train_mode() -> str:
    """`OfflineToOnlineReplayBuffer` samples in train mode, other buffers in eval mode."""
    modes = []

    class Look(Transform):
        def forward(self, tensordict: Any) -> Any:
            modes.append(self.training)
            return tensordict

    offline = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    offline.extend(TensorDict(x=torch.zeros(8), batch_size=8))
    OfflineToOnlineReplayBuffer(offline, online_capacity=8, transform=Look()).sample(4)
    offline.append_transform(Look())
    offline.sample()
    assert modes == [True, False]
    return "`training` is True in this buffer, False in others"


def vector_env_resets() -> str:
    """The reset of a Gymnasium vector env is recorded as a step with reward 0."""
    env = GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True)
    env.set_seed(0)
    steps = env.rollout(60, break_when_any_done=False)["next"]
    rewards = steps["reward"][0].flatten()
    ends = steps["done"][0].flatten().roll(1)
    assert (rewards[1:] == 0).equal(ends[1:])
    assert ends[1:].any()
    return f"{int((rewards == 0).sum())} steps of 60 that no action caused"


def bfloat16_checkpoint() -> str:
    """`from_pretrained` keeps the dtype of the checkpoint, bfloat16 for most models."""
    with tempfile.TemporaryDirectory() as folder:
        make_model().to(torch.bfloat16).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    weight = model.lm_head.weight.detach()
    moved = (weight * (1 + 1 / 600) != weight).float().mean()
    assert weight.dtype == torch.bfloat16
    assert moved < 0.1
    return f"a step of 1/600 of each weight changes {moved:.0%} of them"


def settings_of_generate() -> str:
    """`generate` applies what `generation_config` of a model says and the call does not name."""
    model = make_model().eval()
    model.generation_config.update(temperature=0.01, do_sample=True)
    prompts = torch.ones(64, 1, dtype=torch.int64)
    with torch.no_grad():
        tokens = model.generate(prompts, max_new_tokens=1, pad_token_id=0)
    kinds = len(tokens[:, 1].unique())
    assert kinds < 10
    return f"64 draws from {len(model.lm_head.weight)} tokens give {kinds} of them"


def adapters_take_weights() -> str:
    """With `init_lora_weights="pissa"`, the model without its adapters is another one."""
    model, tokens = make_model().eval(), torch.arange(16)[None]
    before = model(tokens).logits.detach()
    targets = ["q_proj", "v_proj", "lm_head"]
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights="pissa")
    peft = get_peft_model(model, lora)
    with peft.disable_adapter():
        gap = (peft(tokens).logits - before).abs().max()
    assert gap > 1e-3
    return f"logits of the base differ by up to {gap:.3f}"


def dropout_of_adapters() -> str:
    """Adapters of a model in eval mode are in train mode, and their dropout is active."""
    model = make_model().eval()
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.5))
    modes = {module.training for module in peft.modules() if isinstance(module, nn.Dropout)}
    assert modes == {True}
    return "`training` of their Dropout is True"


def merged_in_bfloat16() -> str:
    """Merging adapters and taking them out again moves weights in bfloat16."""
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft: Any = get_peft_model(make_model().to(torch.bfloat16), config)
    weight = peft.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before, sizes = weight.detach().double(), []
    for _ in range(1000):
        peft.merge_adapter()
        peft.unmerge_adapter()
        sizes.append((weight.detach().double() - before).norm() / before.norm())
    assert sizes[-1] > 0.01
    return f"the base weights are off by {sizes[0]:.1%} after one, {sizes[-1]:.0%} after 1000 times"


def waits_for_ever(call: Callable[[], Any], collector: Any, seconds: float = 20.0) -> bool:
    """Whether a call is still waiting after some seconds; ends the workers."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    for process in collector.procs:
        process.kill()
    return thread.is_alive()


def make_workers(kind: Any, **options: Any) -> Any:
    settings = {"frames_per_batch": 32, "total_frames": -1, **QUIET, **options}
    return kind([make_env] * 2, make_actor(), **settings)


def second_loop() -> str:
    """A MultiSyncCollector cannot be iterated again after `break`."""
    collector, error = make_workers(MultiSyncCollector), ""
    try:
        for _ in range(2):
            next(iter(collector))
    except RuntimeError as reason:
        error = str(reason)
    collector.shutdown()
    assert "non-empty TensorList" in error
    return error


def state_dict_in_the_loop() -> str:
    """A MultiAsyncCollector waits for ever after `state_dict()` in its loop."""
    collector = make_workers(MultiAsyncCollector)
    batches = iter(collector)
    next(batches)

    def save_and_go_on() -> None:
        for _ in range(10):
            collector.state_dict()
            next(batches)

    assert waits_for_ever(save_and_go_on, collector)
    return "no batch after 20 s"


def killed_worker() -> str:
    """With a dead worker, an update of the weights waits for ever."""
    collector = make_workers(MultiSyncCollector)
    next(iter(collector))
    collector.procs[1].kill()
    collector.procs[1].join()
    assert waits_for_ever(collector.update_policy_weights_, collector)
    return "`update_policy_weights_` has not returned after 20 s"


def entries_of_postproc() -> str:
    """Workers that write into a buffer lose the entries that a `postproc` adds."""
    storage = LazyTensorStorage(100)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    collector = make_workers(
        MultiSyncCollector, replay_buffer=buffer, postproc=add_entry, total_frames=64
    )
    for _ in collector:
        pass
    collector.shutdown()
    assert "mine" not in buffer[:].keys()
    return f"{len(buffer)} steps without the entry"


def add_entry(batch: Any) -> Any:
    return batch.set("mine", batch["next", "reward"] + 1)


FAULTS: tuple[Callable[[], str], ...] = (
    evaluator_in_a_thread,
    padding_in_ppo,
    padding_in_gae,
    reloaded_collector,
    finished_rows,
    compose_append,
    random_frames,
    reused_batch,
    stale_log_prob,
    noise_behind_the_actor,
    saturated_tanh_normal,
    tanh_normal_outside_its_bounds,
    truncated_normal_far_from_its_bounds,
    delta_has_no_density,
    clamped_probabilities,
    slices_begin_trajectories,
    samples_in_train_mode,
    vector_env_resets,
    bfloat16_checkpoint,
    settings_of_generate,
    adapters_take_weights,
    dropout_of_adapters,
    merged_in_bfloat16,
)
FAULTS_OF_WORKERS: tuple[Callable[[], str], ...] = (
    second_loop,
    state_dict_in_the_loop,
    killed_worker,
    entries_of_postproc,
)

if __name__ == "__main__":
    for fault in (*FAULTS, *FAULTS_OF_WORKERS):
        print(f"{fault.__name__}: {fault()}")
