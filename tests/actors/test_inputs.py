"""What an actor reads: entries that it overwrites, wide numbers, and nested tensordicts."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.data import Composite, Unbounded
from torchrl.envs import gSDENoise
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ConsistentDropoutModule, IndependentNormal, OnlineDTActor
from torchrl.modules.models.exploration import gSDEModule

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    collect,
    make_actor,
    moved,
    play,
    probabilistic_actor,
    sequence,
    sharp,
    with_transforms,
)
from torchrl_kl import FrozenActor, KLConstrainedTransform, KLPenaltyLoss, TopKActor

FAR = 1e6  # float32 numbers of this size are 0.06 apart


def categorical_actor(*modules: Any, seed: int = 0) -> Any:
    actor = probabilistic_actor(
        sequence(*modules),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    return sharp(actor, seed)


class Memory(nn.Module):
    """Logits, and what is remembered for the next step."""

    def __init__(self):
        super().__init__()
        self.logits, self.memory = nn.Linear(2 * N_OBS, N_ACTIONS), nn.Linear(2 * N_OBS, N_OBS)

    def forward(self, observation, memory):
        both = torch.cat([observation, memory], -1)
        return self.logits(both), self.memory(both)


def with_memory(out_key: Any) -> Any:
    return categorical_actor(
        TensorDictModule(Memory(), ["observation", "memory"], ["logits", out_key])
    )


def scaled_in_place() -> Any:
    return categorical_actor(
        TensorDictModule(lambda x: 3 * x - 1, ["observation"], ["observation"]),
        TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"]),
    )


class TestOverwritten:
    """The reference read what the policy had left there, which is not what the policy had read."""

    @pytest.mark.parametrize(
        ("make", "key"),
        [(scaled_in_place, "observation"), (lambda: with_memory("memory"), "memory")],
    )
    @pytest.mark.parametrize(
        "use",
        [
            FrozenActor,
            lambda actor: KLConstrainedTransform(actor, 0.1),
            lambda actor: KLConstrainedTransform(TopKActor(actor, 2), 0.1),
            lambda actor: KLPenaltyLoss(actor, 0.1),
        ],
    )
    def test_it_is_refused(self, make, key, use):
        with pytest.raises(ValueError, match=f"`actor` must leave what it reads.*'?{key}'?"):
            use(make())

    def test_whoever_wrote_it(self):
        reader = make_actor()
        for reference in (reader, FrozenActor(reader)):
            with pytest.raises(ValueError, match="it writes .'observation'. itself"):
                KLConstrainedTransform(scaled_in_place(), 0.1, reference=reference)

    def test_a_reference_that_alone_does_so_is_none_the_worse(self):
        policy, reference = moved(make_actor()), scaled_in_place()
        batch = KLConstrainedTransform(policy, 0.1, reference=reference)(
            play(WalkEnv((2,)), policy)
        )
        logits = reference.module[0].module[1].module(3 * batch["observation"] - 1)
        expected = logits.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        assert_close(batch["next", "ref_log_prob"], expected.detach())

    @pytest.mark.parametrize("place", ["env", "batch"])
    def test_noise_and_the_action_that_are_written_are_none_of_it(self, place):
        """The reference scores the policy's action, not the one that its own noise makes."""
        keys: list[Any] = ["action", "observation", "_eps_gSDE"]
        mean, noisy = nn.Linear(N_OBS, 2), gSDEModule(2, N_OBS)
        actor = probabilistic_actor(
            sequence(
                TensorDictModule(mean, ["observation"], ["action"]),
                TensorDictModule(noisy, keys, ["loc", "scale", *keys[::2]]),
            ),
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
        )
        stack = KLConstrainedTransform(actor, 0.1, reference=actor)
        before = [*map(copy.deepcopy, (mean, noisy))]
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.add_(0.1)
        noise = gSDENoise(state_dim=N_OBS, action_dim=2, shape=(2,))
        inside = [stack] if place == "env" else []
        batch = play(with_transforms(WalkEnv((2,), discrete=False), noise, *inside), actor)
        batch = batch.detach() if inside else stack(batch.detach())
        for modules, log_prob in (
            ((mean, noisy), batch["action_log_prob"]),
            (before, batch["next", "ref_log_prob"]),
        ):
            observation = batch["observation"]
            mu = modules[0](observation)
            with set_exploration_type(ExplorationType.RANDOM):
                loc, scale, *_ = modules[1](mu, observation, batch["_eps_gSDE"])
            expected = Normal(loc, scale).log_prob(batch["action"]).sum(-1)
            assert_close(log_prob, expected.detach())

    def test_a_mask_of_dropout_that_is_written_back_is_none_of_it(self):
        dropout = ConsistentDropoutModule(0.5, "hidden", "kept", input_shape=torch.Size((2, 4)))
        actor = categorical_actor(
            TensorDictModule(nn.Linear(N_OBS, 4), ["observation"], ["hidden"]),
            dropout,
            TensorDictModule(nn.Linear(4, N_ACTIONS), ["kept"], ["logits"]),
        ).eval()
        env = with_transforms(
            WalkEnv((2,)), dropout.make_tensordict_primer(), KLConstrainedTransform(actor, 0.1)
        )
        batch = play(env, actor)
        assert_close(batch["next", "ref_log_prob"], batch["action_log_prob"].detach())

    def test_actions_that_a_decision_transformer_reads_are_none_of_it(self):
        small = replace(OnlineDTActor.default_config(), n_embd=8, n_layer=1, n_head=1, n_inner=8)

        def actor():
            net = OnlineDTActor(N_OBS, 2, small)
            keys: list[Any] = ["observation", "action", "return_to_go"]
            return probabilistic_actor(
                TensorDictModule(net, keys, ["loc", "scale"]),
                in_keys=["loc", "scale"],
                out_keys=["action"],
                distribution_class=IndependentNormal,
                return_log_prob=True,
            )

        policy, reference = actor().eval(), actor().eval()
        shapes = {"observation": N_OBS, "action": 2, "return_to_go": 1}
        steps = {key: torch.randn(2, 5, n) for key, n in shapes.items()}
        batch = TensorDict({**steps, "next": TensorDict(batch_size=(2, 5))}, batch_size=(2, 5))
        loss = KLPenaltyLoss(policy, 1.0, reference=reference)(batch)["loss_kl"]
        one, other = (each.get_dist(batch).base_dist for each in (policy, reference))
        assert_close(loss, kl_divergence(one, other).sum(-1).mean())

    def test_a_memory_of_the_next_step_is_not_overwritten(self):
        actor = with_memory(("next", "memory"))
        assert FrozenActor(actor).state_keys == ["memory"]


class Relative(nn.Module):
    """Reads numbers far from 0 in float64, by weights in float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS)

    def forward(self, observation):
        return self.linear((observation - FAR).to(self.linear.weight.dtype))


class FarEnv(WalkEnv):
    """WalkEnv, with observations in float64 that are far from 0."""

    def __init__(self, batch_size: tuple[int, ...]):
        super().__init__(batch_size, dtype=torch.float64)

    def _reset(self, tensordict=None, **kwargs):
        return self._move(super()._reset(tensordict, **kwargs), FAR)

    def _step(self, tensordict):
        return self._move(super()._step(self._move(tensordict.clone(), -FAR)), FAR)

    def _move(self, tensordict, by):
        tensordict["observation"] = tensordict["observation"] + by
        return tensordict


class TestFloat64:
    """The reference rounded observations to its own float32 before its network read them."""

    def actor(self) -> Any:
        return categorical_actor(TensorDictModule(Relative(), ["observation"], ["logits"]))

    @pytest.mark.parametrize("place", ["env", "batch"])
    @pytest.mark.parametrize("given", [False, True])
    def test_it_reads_what_the_policy_reads(self, place, given):
        actor = self.actor()
        reference = FrozenActor(actor) if given else None
        stack = KLConstrainedTransform(actor, 0.1, reference=reference)
        if place == "env":
            batch = play(with_transforms(FarEnv((2,)), stack), actor)
        else:
            batch = stack(play(FarEnv((2,)), actor))
        assert_close(batch["next", "ref_log_prob"], batch["action_log_prob"].detach())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_reference_of_another_dtype_casts_what_it_reads(self, dtype):
        policy = make_actor().double()
        stack = KLConstrainedTransform(policy, 0.1, reference=FrozenActor(make_actor().to(dtype)))
        batch = stack(play(WalkEnv((2,), dtype=torch.float64), policy))
        tolerance = 100 * torch.finfo(dtype).eps
        assert_close(batch["next", "kl"], torch.zeros(2, 12, 1).double(), rtol=0, atol=tolerance)


class Stored(nn.Linear):
    """A layer of which the weight is kept in float8."""

    def __init__(self):
        super().__init__(3, 4)
        self.weight = nn.Parameter(self.weight.detach().to(torch.float8_e4m3fn), False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.weight.to(value.dtype), self.bias)


def test_weights_that_are_stored_in_one_byte():
    actor = make_actor()
    other = make_actor()
    layer = other.module[0].module = Stored()
    batch = play(WalkEnv((2,)), actor)
    after = KLConstrainedTransform(actor, 0.1, reference=other)(batch)
    logits = layer(batch["observation"]).detach()
    expected = Categorical(logits=logits).log_prob(batch["action"])
    assert_close(after["next", "ref_log_prob"], expected)


class ShowingEnv(WalkEnv):
    """WalkEnv, which shows its observation under another key, too."""

    def _reset(self, tensordict=None, **kwargs):
        return self._show(super()._reset(tensordict, **kwargs))

    def _step(self, tensordict):
        return self._show(super()._step(tensordict))

    def _show(self, tensordict):
        raise AssertionError("a subclass says how")


class TeacherEnv(ShowingEnv):
    """It is in float64 there."""

    def __init__(self, batch_size: tuple[int, ...]):
        super().__init__(batch_size)
        teacher = Unbounded(torch.Size((*batch_size, N_OBS)), dtype=torch.float64)
        self.observation_spec["teacher"] = teacher
        self.state_spec = self.observation_spec.clone()

    def _show(self, tensordict):
        return tensordict.set("teacher", tensordict["observation"].double())


class TestReferenceOfAnotherKind:
    """What a policy reads in float64 tells nothing of a reference that is built otherwise."""

    @pytest.mark.parametrize("given", [False, True])
    def test_it_casts_an_entry_that_the_policy_does_not_read(self, given):
        linear = nn.Linear(N_OBS, N_ACTIONS)
        policy, reference = (
            categorical_actor(TensorDictModule(linear, [key], ["logits"]))
            for key in ("observation", "teacher")
        )
        stack = KLConstrainedTransform(
            policy, 0.1, reference=FrozenActor(reference) if given else reference
        )
        batch = stack(play(TeacherEnv((2,)), policy))
        assert_close(batch["next", "ref_log_prob"], batch["action_log_prob"].detach())

    def test_it_casts_what_the_policy_casts_in_a_module_of_its_own(self):
        policy = categorical_actor(
            TensorDictModule(lambda x: x.float(), ["observation"], ["narrow"]),
            TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["narrow"], ["logits"]),
        )
        batch = KLConstrainedTransform(policy, 0.1, reference=make_actor())(
            play(WalkEnv((2,), dtype=torch.float64), policy)
        )
        assert batch["next", "kl"].isfinite().all()

    def test_one_for_two_policies_casts_for_both(self):
        reference, wide, narrow = FrozenActor(make_actor()), make_actor().double(), make_actor()
        stacks = [KLConstrainedTransform(p, 0.1, reference=reference) for p in (wide, narrow)]
        batch = stacks[0](play(WalkEnv((2,), dtype=torch.float64), wide))
        assert batch["next", "kl"].abs().max() < 1e-5


class Inside(nn.Module):
    """Reads a whole nested tensordict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS)

    def forward(self, scene):
        return self.linear(scene["place"])


class SceneEnv(ShowingEnv):
    """It is in a nested tensordict there."""

    def __init__(self, batch_size: tuple[int, ...]):
        super().__init__(batch_size)
        place = Unbounded(torch.Size((*batch_size, N_OBS)))
        self.observation_spec["scene"] = Composite(place=place, shape=batch_size)
        self.state_spec = self.observation_spec.clone()

    def _show(self, tensordict):
        place = tensordict["observation"].clone()
        tensordict["scene"] = TensorDict(place=place, batch_size=self.batch_size)
        return tensordict


class TestNestedTensorDicts:
    """Its entries tell which steps follow one another; the key alone was taken for a tensor."""

    @pytest.fixture
    def actor(self) -> Any:
        return categorical_actor(TensorDictModule(Inside(), ["scene"], ["logits"]))

    def test_trajectories_are_told_as_those_of_an_observation(self, actor):
        told = []
        for read in (actor, make_actor()):
            controller = SpyController()
            stack = KLConstrainedTransform(read, controller)
            read.load_state_dict(
                dict(zip(read.state_dict(), actor.state_dict().values(), strict=True))
            )
            stack.update_reference(read)
            for batch in collect(SceneEnv((2,)), moved(read), frames=10, batches=4):
                stack(batch)
            told.append(controller.calls)
        assert len(told[0]) == 4
        assert told[0] == told[1]

    @pytest.mark.parametrize("gradient", ["step", "sequence"])
    def test_padding_in_it_reaches_neither_loss_nor_gradient(self, actor, gradient):
        policy = moved(actor)
        batch = play(SceneEnv((2,)), policy, 8).detach()
        batch["collector", "mask"] = (torch.arange(8) < 5).expand(2, 8).clone()
        outs = []
        for padding in (0.0, torch.nan):
            batch["scene", "place"][:, 5:] = padding
            loss = KLPenaltyLoss(policy, 1.0, reference=actor, gradient=gradient)
            value = loss(batch)["loss_kl"]
            outs.append([value, *torch.autograd.grad(value, list(loss.parameters()))])
        assert_close(outs[0], outs[1], rtol=0, atol=0)
        assert value > 0

    def test_a_controller_of_a_loss_is_told_of_its_trajectories(self, actor):
        controller, policy = SpyController(), moved(actor)
        batch = collect(SceneEnv((2,)), policy, frames=20, batches=1)[0]
        KLPenaltyLoss(policy, controller, reference=actor).update_controller(batch)
        assert [n for _, n in controller.calls] == [int(batch["next", "done"].sum())]
