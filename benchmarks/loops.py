"""Training loops that differ in everything that a controller of the KL coefficient may meet.

A `Loop` is a small problem of reinforcement learning with a pretrained policy: responses of a
language model, or control. `train` runs it with any controller, and returns the KL of each batch.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from digit_ppo import count_even
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchrl.collectors import Collector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import (
    MLP,
    IndependentNormal,
    NormalParamExtractor,
    ProbabilisticActor,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from torchrl_kl import KLConstrainedTransform, KLController, KLPenaltyLoss
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic, sample_responses

Place = Literal["reward", "loss", "grpo", "grpo, no std"]


@dataclass(frozen=True)
class Loop:
    """A problem: what is learned, from which rewards, how fast, and which KL is wanted.

    `grpo` puts the penalty into the loss and takes the rewards of a prompt's responses, less their
    mean, for advantages, divided by their standard deviation or not.
    """

    name: str
    task: str  # "digits", "text", "text with ends" or the name of an env below
    target: float
    per: Literal["trajectory", "step"] = "trajectory"
    scale: float = 1.0  # of the rewards
    noise: float = 0.0  # standard deviation of what is added to the last reward of a trajectory
    power: float = 0.0  # if above 0, n even digits of 4 are rewarded with power ** (n - 4)
    sparse: bool = False  # all rewards come at the end
    lr: float = 1e-3
    decay: bool = False  # the learning rate goes to zero over all batches
    place: Place = "reward"
    whiten: bool = False  # advantages are normalised, as ClipPPOLoss can
    follow: float = 0.0  # after each batch the reference goes this share of the way to the policy
    responses: int = 256  # of a batch
    reaches: bool = True  # whether the unpenalised run passes the target


LOOPS = [
    Loop("responses", "digits", 0.5, lr=4e-4),
    Loop("responses, rewards x 100", "digits", 0.5, scale=100.0, decay=True),
    Loop("responses, rewards x 0.01", "digits", 0.5, scale=0.01, lr=4e-4),
    Loop("responses, noisy rewards", "digits", 0.5, noise=10.0, whiten=True),
    Loop("responses, small target, fast", "digits", 0.1),
    Loop("responses, large target, slow", "digits", 2.0, lr=1.5e-4),
    Loop("responses, slow at first", "digits", 1.0, power=4.0, lr=5e-5),
    Loop("responses, KL in the loss", "digits", 0.5, place="loss", whiten=True),
    Loop("responses, GRPO", "digits", 0.5, place="grpo", scale=100.0),
    Loop("responses, GRPO without std", "digits", 0.5, place="grpo, no std"),
    Loop("responses, unreachable", "digits", 30.0, reaches=False),
    Loop("responses, moving reference", "digits", 0.2, follow=0.03),
    Loop("cart-pole, per episode", "cartpole", 3.0, whiten=True, lr=1e-4),
    Loop(
        "cart-pole, per step, x 0.01",
        "cartpole",
        0.05,
        per="step",
        scale=0.01,
        whiten=True,
        lr=1e-4,
    ),
    Loop("cart-pole, reward at the end", "cartpole", 2.0, sparse=True, lr=1e-4),
    Loop("pendulum, per step", "pendulum", 0.05, per="step", lr=5e-5),
    Loop("mountain car, per step, x 100", "mountaincar", 0.2, per="step", scale=100.0, lr=1e-4),
]
# As docs/getting_started.md has it: k1, a critic that begins with the policy.
LOOPS += [
    Loop(f"{task}, {n}, lr {lr:g}", task, 2.0, responses=n, lr=lr)
    for task in ("text", "text with ends")
    for n in (128, 32)
    for lr in (1e-4, 3e-4, 1e-3)
]


# --- control --------------------------------------------------------------------------------------


class Dynamics(NamedTuple):
    """An env: `start(n)` gives states (N, D), `step(states, actions)` those that follow.

    `step` also gives rewards (N,) and failures (N,).
    """

    start: Callable[[int], Tensor]
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    expert: Callable[[Tensor], Tensor]  # what the pretrained policy imitates
    states: Callable[[int], Tensor]  # where it does so
    longest: int
    n_actions: int | None  # None: one real number
    gamma: float


def cartpole_step(states: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The equations of Gymnasium's CartPole; the reward is 1 where the cart is on the right."""
    x, v, angle, spin = states.unbind(-1)
    force = 20.0 * action - 10.0
    push = (force + 0.05 * spin**2 * angle.sin()) / 1.1
    turn = 9.8 * angle.sin() - angle.cos() * push
    turn = turn / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    speed_up = push - 0.05 * turn * angle.cos() / 1.1
    after = torch.stack([x + 0.02 * v, v + 0.02 * speed_up, angle + 0.02 * spin, spin], -1)
    after[:, 3] += 0.02 * turn
    return after, (after[:, 0] > 0).float(), (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)


def pendulum_step(states: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gymnasium's Pendulum; the reward is for a torque near 1, whatever the pendulum does."""
    angle, spin = torch.atan2(states[:, 1], states[:, 0]), 8 * states[:, 2]
    torque = action.squeeze(-1).clamp(-2, 2)
    spin = (spin + 0.05 * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
    angle = angle + 0.05 * spin
    reward = -((action.squeeze(-1) - 1) ** 2)
    after = torch.stack([angle.cos(), angle.sin(), spin / 8], -1)
    return after, reward, torch.zeros_like(angle, dtype=torch.bool)


def mountaincar_step(states: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gymnasium's MountainCar; the reward is 1 for coasting, and nothing for the goal."""
    x, v = states[:, 0], states[:, 1] / 20
    v = (v + 0.001 * (action - 1) - 0.0025 * (3 * x).cos()).clamp(-0.07, 0.07)
    x = (x + v).clamp(-1.2, 0.6)
    v = torch.where((x <= -1.2) & (v < 0), 0.0, v)
    return torch.stack([x, 20 * v], -1), (action == 1).float(), x >= 0.5


def swing_up(states: Tensor) -> Tensor:
    """A driver of the pendulum: pumps energy in, and holds it near the top."""
    angle, spin = torch.atan2(states[:, 1], states[:, 0]), 8 * states[:, 2]
    hold = -10 * angle - 2 * spin
    pump = 2 * spin.sign()
    return torch.where(angle.abs() < 0.5, hold, pump).clamp(-2, 2).unsqueeze(-1)


def uniform(low: list[float], high: list[float]) -> Callable[[int], Tensor]:
    """A function of n that draws states (N, D) from a box."""
    bounds = torch.tensor(low), torch.tensor(high)
    return lambda n: bounds[0] + torch.rand(n, len(low)) * (bounds[1] - bounds[0])


def on_circle(n: int) -> Tensor:
    """States (N, 3) of the pendulum at any angle."""
    angle, spin = math.pi * (2 * torch.rand(n) - 1), 2 * torch.rand(n) - 1
    return torch.stack([angle.cos(), angle.sin(), spin], -1)


ENVS = {
    "cartpole": Dynamics(
        uniform([-0.05] * 4, [0.05] * 4),
        cartpole_step,
        lambda s: (s @ torch.tensor([0.1, 0.3, 2.0, 1.0]) > 0).long(),
        uniform([-2.0, -1.0, -0.2, -1.0], [2.0, 1.0, 0.2, 1.0]),
        longest=200,
        n_actions=2,
        gamma=0.98,
    ),
    "pendulum": Dynamics(
        on_circle, pendulum_step, swing_up, on_circle, longest=100, n_actions=None, gamma=0.9
    ),
    "mountaincar": Dynamics(
        lambda n: torch.stack([0.2 * torch.rand(n) - 0.6, torch.zeros(n)], -1),
        mountaincar_step,
        lambda s: 2 * (s[:, 1] > 0).long(),
        uniform([-1.2, -1.4], [0.6, 1.4]),
        longest=250,
        n_actions=3,
        gamma=0.9,
    ),
}


class RowsEnv(EnvBase):
    """Rows of an env with given dynamics; a row that has failed or is too long begins anew."""

    def __init__(self, dynamics: Dynamics, loop: Loop, rows: int):
        super().__init__(device=None, batch_size=torch.Size([rows]))
        self.dynamics, self.loop = dynamics, loop
        one, n_states = torch.Size([rows, 1]), dynamics.start(1).shape[-1]
        entries = {"observation": Unbounded(torch.Size([rows, n_states]))}
        entries["n_steps"] = Unbounded(one, dtype=torch.int64)
        entries["due"] = Unbounded(one)  # rewards that wait for the end
        self.observation_spec = Composite(entries, shape=self.batch_size)
        self.state_spec = self.observation_spec.clone()
        n_actions = dynamics.n_actions
        discrete = n_actions is not None
        self.action_spec = (
            Categorical(n_actions, shape=self.batch_size) if discrete else Unbounded(one)
        )
        self.reward_spec = Unbounded(one)
        flag = Categorical(2, shape=one, dtype=torch.bool)
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        self.full_done_spec = Composite(flags, shape=self.batch_size)

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        rows = self.batch_size[0]
        out = TensorDict(self.full_done_spec.zero().to_dict(), batch_size=self.batch_size)
        out["observation"] = self.dynamics.start(rows)
        # Episodes end at different times.
        out["n_steps"] = torch.randint(0, self.dynamics.longest // 2, (rows, 1))
        out["due"] = torch.zeros(rows, 1)
        return out

    def _step(self, tensordict: Any) -> TensorDict:
        states, reward, failed = self.dynamics.step(tensordict["observation"], tensordict["action"])
        reward, failed = self.loop.scale * reward.unsqueeze(-1), failed.unsqueeze(-1)
        n_steps = tensordict["n_steps"] + 1
        truncated = n_steps >= self.dynamics.longest
        done, due = failed | truncated, tensordict["due"]
        if self.loop.sparse:
            due = due + reward
            reward = torch.where(done, due, 0.0)
        entries = {"observation": states, "n_steps": n_steps, "due": due, "reward": reward}
        entries |= {"done": done, "terminated": failed, "truncated": truncated}
        return TensorDict(entries, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


def control_policy(dynamics: Dynamics) -> ProbabilisticActor:
    """A policy that imitates the expert."""
    n_states, n_actions = dynamics.start(1).shape[-1], dynamics.n_actions
    net: nn.Module = MLP(n_states, n_actions or 2, num_cells=[64, 64])
    states = dynamics.states(4000)
    actions = dynamics.expert(states)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    if n_actions is None:
        net = nn.Sequential(net, NormalParamExtractor())
    for _ in range(300):
        optimizer.zero_grad()
        if n_actions is None:
            loc, scale = net(states)
            loss = ((loc - actions) ** 2 + (scale - 0.7) ** 2).mean()
        else:
            loss = cross_entropy(net(states), actions, label_smoothing=0.2)
        loss.backward()
        optimizer.step()
    keys: Any = ["logits"] if n_actions else ["loc", "scale"]
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys),
        in_keys=keys,
        distribution_class=torch.distributions.Categorical if n_actions else IndependentNormal,
        return_log_prob=True,
    )


# --- responses ------------------------------------------------------------------------------------

LANGUAGE = DigitLanguage()


@cache
def language_model(seed: int) -> GPT:
    """A small GPT, trained on texts of the language."""
    torch.manual_seed(seed)
    gpt = GPT(LANGUAGE.n_tokens, LANGUAGE.text_length, n_layer=1, n_head=2, n_embd=32)
    optimizer = torch.optim.Adam(gpt.parameters(), lr=3e-3)
    for _ in range(300):
        texts = LANGUAGE.sample(LANGUAGE.sample_prompts(128))
        logits = gpt(texts[:, :-1])[:, LANGUAGE.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, LANGUAGE.context_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return gpt


def digits_env(loop: Loop, seed: int) -> DigitLanguageEnv:
    """256 responses; with GRPO 16 to each of 16 prompts."""
    prompts = None

    def reward(texts: Tensor) -> Tensor:
        rewards = count_even(texts)
        if loop.power:
            rewards = loop.power ** (rewards - 4)
        return loop.scale * (rewards + loop.noise * torch.randn(len(texts)))

    if loop.place.startswith("grpo"):
        prompts = LANGUAGE.sample_prompts(16)
    return DigitLanguageEnv(
        LANGUAGE, prompts=prompts, reward_fn=reward, batch_size=(loop.responses,), seed=seed
    )


def group_advantage(batch: Any, std: bool) -> None:
    """The advantages of GRPO: what the response's reward is above the mean of its prompt."""
    rewards = batch["next", "reward"].sum(1)  # (N, 1)
    prompts = batch["tokens"][:, 0, : LANGUAGE.prompt_length]
    _, group, counts = prompts.unique(dim=0, return_inverse=True, return_counts=True)
    weights = nn.functional.one_hot(group).to(rewards)  # (N, groups)
    means = (weights.T @ rewards) / counts[:, None]
    centred = rewards - means[group]
    if std:
        variances = (weights.T @ centred**2) / (counts[:, None] - 1).clamp(min=1)
        centred = centred / (variances.sqrt()[group] + 1e-6)
    batch["advantage"] = centred[:, None].expand(batch["next", "reward"].shape).contiguous()


# --- text -----------------------------------------------------------------------------------------

# Sentences: an article, an adjective, a noun, a verb, and again. 0 is the end of a sentence.
KINDS = {"article": 3, "adjective": 16, "noun": 24, "verb": 16, "adverb": 8}
SENTENCE = ("article", "adjective", "noun", "adverb", "verb", "article", "adjective", "noun")
END, PAD, FIRST = 0, 1, 2
N_WORDS, TEXT, NEW = FIRST + sum(KINDS.values()), 48, 12  # tokens of a text, and of a response


def sentences(n: int) -> Tensor:
    """Token ids (N, 9); some words are far more frequent than others."""
    starts = dict(zip(KINDS, itertools.accumulate(KINDS.values(), initial=FIRST), strict=False))
    columns = []
    for kind in SENTENCE:
        weights = 1 / torch.arange(1.0, KINDS[kind] + 1)
        columns.append(starts[kind] + weights.multinomial(n, replacement=True))
    return torch.stack([*columns, torch.full((n,), END)], 1)


def llama(kind: Any, **options: Any) -> Any:
    """A Llama of width 48."""
    config = LlamaConfig(
        vocab_size=N_WORDS,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT,
        pad_token_id=PAD,
        **options,
    )
    return kind(config).eval()


@cache
def text_model(seed: int) -> tuple[Any, Tensor]:
    """A Llama that was trained on 256 sentences, and those."""
    torch.manual_seed(seed)
    model, known = llama(LlamaForCausalLM), sentences(256)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(1000):
        texts = known[torch.randint(256, (32, 4))].flatten(1)  # four that follow one another
        logits = model(texts[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, known


def text_batches(loop: Loop, actor: Any, known: Tensor, n_batches: int) -> Iterator[TensorDict]:
    """Responses to the first words of sentences, 1 to 6 of them."""
    end = END if loop.task == "text with ends" else None
    for _ in range(n_batches):
        chosen = known[torch.randint(len(known), (loop.responses,))]
        prompts = [row[: int(torch.randint(1, 7, ()))] for row in chosen]
        yield sample_responses(
            actor, prompts, NEW, pad_token=PAD, eos_token=end, reward_fn=even_words
        )


def even_words(texts: Tensor) -> Tensor:
    """The rewards (N,) of texts (N, L): how many words have an even number."""
    return ((texts >= FIRST) & (texts % 2 == 0)).sum(1).float()


# --- training -------------------------------------------------------------------------------------


class Curves(NamedTuple):
    """A number for each batch."""

    kl: list[float]  # nats per trajectory or per step, as the loop's target
    coeff: list[float]
    reward: list[float]  # of the task, mean per step


def train(loop: Loop, controller: KLController | float, seed: int, batches: int) -> Curves:
    """Runs a loop."""
    texts, rows = loop.task.startswith("text"), 32
    responses = texts or loop.task == "digits"
    env: Any = None
    known: Any = None  # the sentences that the model of texts was trained on
    frames, gamma, epochs, parts = loop.responses, 1.0, 2, 2
    if texts:
        reference, known = text_model(seed)
        torch.manual_seed(seed)
        actor: Any = CausalLMActor(copy.deepcopy(reference))
        critic: Any = CausalLMCritic(llama(LlamaForTokenClassification, num_labels=1))
        parts = 8
    elif responses:
        reference = language_model(seed)
        torch.manual_seed(seed)
        actor = CausalLMActor(copy.deepcopy(reference))
        critic = CausalLMCritic(
            GPT(LANGUAGE.n_tokens, LANGUAGE.text_length, n_layer=1, n_head=2, n_embd=32, n_out=1)
        )
        env = digits_env(loop, seed)
        frames = loop.responses * LANGUAGE.response_length
    else:
        torch.manual_seed(seed)
        dynamics = ENVS[loop.task]
        actor = control_policy(dynamics)
        critic = ValueOperator(
            MLP(dynamics.start(1).shape[-1], 1, num_cells=[64, 64]), in_keys=["observation"]
        )
        env = RowsEnv(dynamics, loop, rows)
        env.set_seed(seed)
        frames, gamma, epochs, parts = 2048, dynamics.gamma, 4, 8
    in_loss = loop.place != "reward"
    stack = KLConstrainedTransform(
        actor, 0.0 if in_loss else controller, estimator="k1" if texts else "exact"
    )
    loss: Any = ClipPPOLoss(
        actor,
        critic,
        entropy_bonus=False,
        critic_coeff=1.0,
        loss_critic_type="smooth_l1" if texts else "l2",
        normalize_advantage=loop.whiten,
    )
    gae = GAE(
        gamma=gamma,
        lmbda=1.0 if loop.task == "digits" else 0.95,
        value_network=critic,
        deactivate_vmap=True,
        shifted=False,
    )
    if in_loss:
        loss = KLPenaltyLoss(actor, controller, loss=loss, gradient="sequence", weights="step")
    optimizer = torch.optim.Adam(
        [
            {"params": list(actor.parameters()), "lr": loop.lr},
            {"params": list(critic.parameters()), "lr": loop.lr if texts else 3e-3},
        ],
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: 1 - n / batches if loop.decay else 1.0
    )
    if texts:
        collected: Any = map(stack, text_batches(loop, actor, known, batches))
    else:
        collected = Collector(
            env,
            actor,
            frames_per_batch=frames,
            total_frames=frames * batches,
            postproc=stack,
            auto_register_policy_transforms=False,
        )
    curves = Curves([], [], [])
    for batch in collected:
        step: Any = batch["next"]
        ended = step["done"]
        if loop.per == "step":
            kl = step["kl_estimate"].mean().item()
        elif ended.any():
            kl = step["episode_kl"][ended].mean().item()
        else:  # nothing is known of it
            kl = curves.kl[-1] if curves.kl else 0.0
        coeff = step["kl_coeff"].flatten()[0].item()
        if loop.place.startswith("grpo"):
            group_advantage(batch, std=loop.place == "grpo")
            batch["value_target"] = torch.zeros_like(batch["advantage"])
        else:
            with torch.no_grad(), set_recurrent_mode(responses):
                gae(batch)
        if in_loss:
            loss.update_controller(batch)
            coeff = loss.controller.coeff.item()
        curves.kl.append(kl)
        curves.coeff.append(coeff)
        curves.reward.append(step["task_reward"].mean().item())
        flat = batch if responses else batch.reshape(-1)
        for _ in range(epochs):
            for minibatch in flat[torch.randperm(len(flat))].chunk(parts):
                optimizer.zero_grad()
                losses = loss(minibatch)
                total = torch.stack([v for k, v in losses.items() if k.startswith("loss_")]).sum()
                total.backward()
                if not texts:
                    nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
                optimizer.step()
        schedule.step()
        if loop.follow:
            stack.update_reference(actor, loop.follow)
    if not texts:
        collected.shutdown()
    return curves
