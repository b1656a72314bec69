"""Each transform of TorchRL behind the stack, nearer to the policy: right numbers or a refusal."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.data import MultiStep, Unbounded
from torchrl.envs import EnvBase, TransformedEnv, check_env_specs
from torchrl.envs import transforms as tr
from torchrl.envs.utils import ExplorationType, set_exploration_type, step_mdp
from torchrl.record import TensorDictRecorder

from tests.helpers import (
    SpyController,
    WalkEnv,
    collect,
    compose,
    make_actor,
    play,
    policy,
    with_transforms,
)
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    PlannedKLController,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)

# TorchRL will replace VecNorm, and calls VecNormV2 experimental in envs with a batch size.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated in favor of.*VecNormV2:FutureWarning",
    "ignore:Support of VecNormV2:UserWarning",
    "ignore:The base_env is not a gym env:UserWarning",
)
COEFF, SEEN, IMAGES = 0.5, ["observation"], ("floats", "brights")


def stack(controller: Any = COEFF, **kwargs: Any) -> Any:
    return KLConstrainedTransform(make_actor(), controller, **kwargs)


def preset() -> Any:
    return KLRewardTransform(make_actor(), COEFF)


def whole(controller: Any = COEFF, **kwargs: Any) -> list[Any]:
    return [stack(controller, **kwargs)]


def parts(controller: Any = COEFF, **kwargs: Any) -> list[Any]:
    reference = ReferenceModelLogProbTransform(make_actor())
    return [reference, KLDivergenceTransform(), RewardAdjustmentTransform(controller, **kwargs)]


def halved(value: Any) -> Any:
    return value / 2


def dtype_cast(inner: Any, outer: Any, *keys: str, **inverse: Any) -> Any:
    names = {"out_keys": [f"{key}_cast" for key in keys]} if keys == ("observation",) else {}
    return lambda: tr.DTypeCastTransform(inner, outer, [*keys], **names, **inverse)


def inverse(key: str) -> Any:
    return tr.UnaryTransform([], [], [key], [key], fn=halved, inv_fn=halved)


def module(inverse: bool, key: str, out: str) -> Any:
    own = tr.ModuleTransform(module=TensorDictModule(halved, [key], [out]), inverse=inverse)
    if not inverse:
        own.observation_spec_transform = lambda spec: spec.set(out, spec[key].clone()) or spec
    return own


class Lives(WalkEnv):
    lives = staticmethod(lambda: torch.ones(2))  # what EndOfLifeTransform asks for


class Half(tr.Transform):
    """A transform of one's own that writes a new observation, as TorchRL's tutorials do it."""

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs / 2

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any):
        observation_spec["half"] = observation_spec["observation"].clone()
        return observation_spec


def paint(observation: Tensor) -> Tensor:
    picture = (255 * observation.sigmoid()).to(torch.uint8)[..., None, None, :]
    return picture.expand(*observation.shape[:-1], 8, 8, -1)


RIGHT: dict[str, list[Callable[[], Any]]] = {
    "ActionMask": [lambda: tr.ActionMask(mask_key="mask")],
    "CatFrames": [lambda: tr.CatFrames(2, -1, SEEN, ["frames"])],
    "CatTensors": [lambda: tr.CatTensors(["observation", "left"], "cat", del_keys=False)],
    "ClipTransform": [lambda: tr.ClipTransform(SEEN, low=-1.0, high=1.0)],
    "DTypeCastTransform": [
        dtype_cast(torch.float32, torch.float64, "observation"),
        dtype_cast(torch.float32, torch.float64, "reward"),
        dtype_cast(torch.float32, torch.bfloat16, "floats"),
        dtype_cast(torch.int64, torch.int32, in_keys_inv=["action"]),
    ],
    "DeviceCastTransform": [lambda: tr.DeviceCastTransform("cpu")],
    "DoubleToFloat": [tr.DoubleToFloat],
    "EndOfLifeTransform": [lambda: tr.EndOfLifeTransform(eol_attribute="lives")],
    "ExcludeTransform": [lambda: tr.ExcludeTransform("pixels", "ref_log_prob")],
    "ExpandAs": [lambda: tr.ExpandAs("left", "observation", out_key="lefts")],
    "FiniteTensorDictCheck": [tr.FiniteTensorDictCheck],
    "FlattenObservation": [lambda: tr.FlattenObservation(-3, -1, ["floats"])],
    "GrayScale": [lambda: tr.GrayScale(in_keys=["floats"])],
    "Half": [lambda: Half(SEEN, ["half"])],
    "Hash": [lambda: tr.Hash(["left"], ["hash"], hash_fn=lambda value: value * 7)],
    "InitTracker": [tr.InitTracker],
    "ModuleTransform": [
        lambda: module(False, "floats", "halves"),
        lambda: module(True, "action", "other"),
    ],
    "NextObservationDelta": [lambda: tr.NextObservationDelta(["floats"])],
    "ObservationNorm": [lambda: tr.ObservationNorm(0.3, 2.0, in_keys=SEEN)],
    "PermuteTransform": [lambda: tr.PermuteTransform((-1, -2, -3), in_keys=["floats"])],
    "PolicyAgeFilter": [lambda: tr.PolicyAgeFilter(3, 1)],
    "RNDTransform": [lambda: tr.RNDTransform(nn.Linear(3, 2), nn.Linear(3, 2))],
    "RandomTruncationTransform": [
        lambda: compose(tr.StepCounter(), tr.RandomTruncationTransform(1, 3))
    ],
    "RemoveEmptySpecs": [tr.RemoveEmptySpecs],
    "RenameTransform": [
        lambda: tr.RenameTransform(["floats"], ["images"]),
        lambda: tr.RenameTransform(["reward"], ["penalized"], create_copy=True),
        lambda: tr.RenameTransform(["done"], ["ended"], create_copy=True),
    ],
    "RewardSum": [tr.RewardSum],
    "SqueezeTransform": [lambda: tr.SqueezeTransform(-1, in_keys=["left"], out_keys=["flat"])],
    "Stack": [lambda: tr.Stack(["floats", "brights"], "stacked")],
    "StepCounter": [tr.StepCounter, lambda: tr.StepCounter(3)],
    "TargetReturn": [lambda: tr.TargetReturn(5.0)],
    "TensorDictPrimer": [
        lambda: tr.TensorDictPrimer(noise=Unbounded(torch.Size([1])), expand_specs=True)
    ],
    "TerminateTransform": [
        lambda: tr.TerminateTransform(stop=lambda data: data["observation"][..., :1] > 1.0)
    ],
    "TimeMaxPool": [lambda: tr.TimeMaxPool(SEEN, ["most"], T=2)],
    "Timer": [lambda: tr.Timer()],
    "ToTensorImage": [lambda: tr.ToTensorImage(in_keys=["pixels"], out_keys=["image"])],
    "TrajCounter": [tr.TrajCounter],
    "UnaryTransform": [lambda: tr.UnaryTransform(SEEN, ["half"], fn=halved)],
    "UnsqueezeTransform": [lambda: tr.UnsqueezeTransform(-1, in_keys=["left"], out_keys=["tall"])],
    "VecNorm": [lambda: tr.VecNorm(in_keys=SEEN)],
    "VecNormV2": [
        lambda: tr.VecNormV2(in_keys=SEEN),
        lambda: tr.VecNormV2(in_keys=["reward"], out_keys=["normal"]),
    ],
    "gSDENoise": [lambda: tr.gSDENoise(action_dim=2, state_dim=3, shape=(2,))],
}


def assert_right(batch: Any, counted: Any = True) -> None:
    """The record of a rollout, by a formula or a loop over its other data."""
    step, inputs = batch["next"], batch.select("observation", "action")
    with torch.no_grad():
        expected = policy().log_prob(inputs.clone()) - make_actor().log_prob(inputs.clone())
    expected = torch.where(torch.as_tensor(counted), expected, 0.0)
    kl, running = step["kl"].squeeze(-1), torch.zeros(batch.shape[:-1])
    assert_close(kl, expected, atol=1e-5, rtol=1e-5)
    reward = step["task_reward"] - step["kl_coeff"] * step["kl"]
    assert_close(step["reward"], reward.to(step["reward"]), atol=1e-5, rtol=1e-5)
    for t in range(batch.shape[-1]):
        running = running + kl[..., t]
        assert_close(step["episode_kl"][..., t, 0], running, atol=1e-5, rtol=1e-5)
        running = running * ~step["done"][..., t, 0]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_harmless_leaves_the_record_right(name):
    for make in RIGHT[name]:
        pixels = tr.UnaryTransform(SEEN, ["pixels"], fn=paint)
        images = [tr.ToTensorImage(in_keys=["pixels"], out_keys=[key]) for key in IMAGES]
        mask = tr.UnaryTransform(["left"], ["mask"], fn=lambda left: (left > 0).expand(-1, 4))
        env = TransformedEnv(Lives((2,)), compose(pixels, *images, mask, stack(), make()))
        batch = play(env, policy(), 9)
        assert batch["next", "done"].any()
        assert_right(batch)


@pytest.mark.parametrize("penalty", [whole, parts])
@pytest.mark.parametrize("behind", [False, True])
def test_a_skipped_step_has_no_kl(penalty, behind):
    calls = iter(range(100))
    skip = tr.ConditionalSkip(lambda _: next(calls) % 2 == 1)
    order = (*penalty(), skip) if behind else (skip, *penalty())
    batch = play(with_transforms(WalkEnv(), *order), policy(), 20)
    skipped = torch.arange(20) % 2 == 1
    assert_right(batch, ~skipped)
    assert (batch["next", "task_reward"][skipped] == 0).all()


@pytest.mark.parametrize("penalty", [whole, parts])
@pytest.mark.parametrize(
    "make",
    [
        lambda: PlannedKLController(0.5),
        lambda: AdaptiveKLController(0.1, 9.0, horizon=9),
        lambda: AdaptiveKLController(0.1, 9.0, horizon=9, per="step"),
    ],
)
def test_random_steps_of_a_reset_are_not_of_the_trajectory(penalty, make):
    """Nothing of them goes on in it: no sum, nor the mark that keeps it from the controller."""
    coeffs = []
    for behind in (False, True):
        controller = make()
        order = penalty(controller, update_every=4)
        order.insert(len(order) if behind else 0, tr.NoopResetEnv(1, random=False))
        batch = play(with_transforms(WalkEnv(longest=6), *order), policy(), 80)
        assert_right(batch)
        assert not batch["next", "not_drawn"].any()
        coeffs.append(controller.coeff.item())
    assert coeffs[0] == coeffs[1] != make().coeff.item()


def test_a_reset_forgets_no_step_that_it_did_not_make():
    env: Any = with_transforms(WalkEnv((2,), longest=30), stack())
    first, act = env.reset(), policy()
    with set_exploration_type(ExplorationType.RANDOM):
        drawn = step_mdp(env.step(act(first.clone())))
        data = step_mdp(env.step(env.rand_action(first)))
        data = env.reset(data.set("_reset", torch.tensor([[False], [True]])))
        after = step_mdp(env.step(act(data)))
        env.reset()
        later = env.step(act(drawn.clone()))["next"]  # goes on from where it was
    assert after["not_drawn"].tolist() == [[True], [False]]
    assert_close(later["episode_kl"], drawn["episode_kl"] + later["kl"], rtol=0, atol=0)


# What does harm.


class Reward(tr.Transform):
    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", torch.ones_like(next_tensordict["reward"]))


class Pair(tr.Compose):
    def _call(self, next_tensordict):
        return next_tensordict


class Late(tr.Transform):
    def _post_step_mdp_hooks(self, tensordict, tensordict_):
        tensordict["next", "reward"].mul_(2)
        return tensordict, tensordict_


class Skewed(tr.DTypeCastTransform):
    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.double() / 2


class Stopping(Half):
    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs[..., :1] > 0


REWRITES, CHANGES = "rewrites 'reward'", "changes {} on the way into the env, before the reference"
MORE = "may change more than its keys say"
REFUSED: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "ActionDiscretizer": [(lambda: tr.ActionDiscretizer(3), CHANGES.format("'action'"))],
    "ActionScaling": [(tr.ActionScaling, CHANGES.format("'action'"))],
    "BatchSizeTransform": [(lambda: tr.BatchSizeTransform(batch_size=torch.Size([2])), MORE)],
    "BinarizeReward": [(tr.BinarizeReward, REWRITES)],
    "CatTensors": [
        (
            lambda: tr.CatTensors(out_key="cat", del_keys=False),
            "would make .*'kl_coeff'.* part of the observation",
        )
    ],
    "ClipTransform": [(lambda: tr.ClipTransform(["reward"], low=-1.0, high=1.0), REWRITES)],
    "ConditionalPolicySwitch": [
        (lambda: tr.ConditionalPolicySwitch(policy(), condition=lambda _: False), MORE)
    ],
    "DTypeCastTransform": [
        (dtype_cast(torch.float32, torch.bfloat16, "reward"), REWRITES),
        (lambda: tr.DTypeCastTransform(torch.float32, torch.float16), "rewrites .*'reward'"),
        (
            dtype_cast(torch.int64, torch.float32, in_keys_inv=["action"]),
            CHANGES.format("'action'"),
        ),
    ],
    "DiscreteActionProjection": [
        (lambda: tr.DiscreteActionProjection(4, 5), CHANGES.format("'action'"))
    ],
    "FlattenAction": [(lambda: tr.FlattenAction(-2, -1), CHANGES.format("'action'"))],
    "FrameSkipTransform": [(lambda: tr.FrameSkipTransform(4), MORE)],
    "Late": [(Late, MORE)],
    "LineariseRewards": [(lambda: tr.LineariseRewards(["reward"]), REWRITES)],
    "MacroPrimitiveTransform": [
        (lambda: tr.MacroPrimitiveTransform(macro_steps=2, action_dim=1), MORE)
    ],
    "MeanActionSelector": [(tr.MeanActionSelector, CHANGES.format("'action'"))],
    "ModuleTransform": [
        (lambda: module(True, "action", "action"), CHANGES.format("'action'")),
        (lambda: module(True, "observation", "observation"), CHANGES.format("'observation'")),
        (lambda: module(False, "observation", "kl"), "rewrites 'kl'"),
    ],
    "MultiAction": [(tr.MultiAction, MORE)],
    "ObservationNorm": [
        (
            lambda: tr.ObservationNorm(0.3, 2.0, SEEN, in_keys_inv=SEEN),
            CHANGES.format("'observation'"),
        )
    ],
    "Pair": [(lambda: Pair(cast(Any, tr.StepCounter())), MORE)],
    "Reward": [(Reward, MORE)],
    "RewardClipping": [(lambda: tr.RewardClipping(-1.0, 1.0), REWRITES)],
    "RewardScaling": [(lambda: tr.RewardScaling(0.0, 2.0), REWRITES)],
    "SignTransform": [(lambda: tr.SignTransform(["reward"]), REWRITES)],
    "Skewed": [(lambda: Skewed(torch.float32, torch.float64, ["reward"]), REWRITES)],
    "SuccessReward": [(lambda: tr.SuccessReward("left", "reward"), REWRITES)],
    "UnaryTransform": [
        (lambda: tr.UnaryTransform(["reward"], ["reward"], fn=halved), REWRITES),
        (lambda: inverse("action"), CHANGES.format("'action'")),
        (lambda: inverse("action_log_prob"), CHANGES.format("'action_log_prob'")),
    ],
    "VecGymEnvTransform": [(tr.VecGymEnvTransform, MORE)],
    "VecNorm": [(lambda: tr.VecNorm(in_keys=["reward"]), REWRITES)],
    "VecNormV2": [(lambda: tr.VecNormV2(in_keys=["observation", "reward"]), REWRITES)],
    "_CallableTransform": [(lambda: lambda data: data, MORE)],
}


def test_what_an_estimate_reads_of_the_policy_is_not_to_change():
    with pytest.raises(RuntimeError, match=CHANGES.format("'logits'")):
        with_transforms(WalkEnv(), stack(estimator="exact"), inverse("logits")).reset()
    with_transforms(WalkEnv(), stack(), inverse("logits")).reset()


ENDS: list[Callable[[], Any]] = [
    lambda: tr.StepCounter(3),
    lambda: tr.TerminateTransform(stop=lambda _: torch.zeros(2, 1).bool()),
    lambda: compose(tr.StepCounter(), tr.RandomTruncationTransform(1, 3)),
    lambda: Stopping(SEEN, ["terminated"]),
]


def appended(penalty: Any, other: Any) -> EnvBase:
    env = with_transforms(WalkEnv((2,)), penalty)
    check_env_specs(env)  # right until now
    return env.append_transform(other)


ORDERS: dict[str, Callable[[Any, Any], EnvBase]] = {
    "appended": appended,
    "within": lambda penalty, other: with_transforms(
        WalkEnv((2,)), tr.StepCounter(), compose(penalty), compose(other)
    ),
    "unwrapped": lambda penalty, other: TransformedEnv(
        TransformedEnv(WalkEnv((2,)), penalty, auto_unwrap=False), other, auto_unwrap=True
    ),
}


@pytest.mark.parametrize(
    ("name", "order", "penalty"),
    [("RewardScaling", order, stack) for order in ORDERS]
    + [(name, "within", penalty) for name in REFUSED for penalty in (stack, preset)],
)
def test_what_comes_after_the_stack_and_undoes_its_work_is_refused(name, order, penalty):
    for make, reason in REFUSED[name]:
        text = rf"{name} comes after KL\w+Transform and {reason}.*Put it before the KL transforms"
        if (name, penalty) == ("ModuleTransform", preset) and "'kl'" in reason:
            continue  # which has no such entry
        with pytest.raises(RuntimeError, match=text):
            ORDERS[order](penalty(), make()).reset()


@pytest.mark.parametrize("nr", range(len(ENDS)))
def test_ends_that_come_after_a_stack_that_waits_for_them_are_refused(nr):
    env: Any = with_transforms(WalkEnv((2,)), stack(SpyController()), ENDS[nr]())
    with pytest.raises(RuntimeError, match=r"\w+ comes after KLCons.* and ends trajectories"):
        env.reset()


def test_what_drops_the_sums_is_refused():
    with pytest.raises(KeyError, match="let no later transform drop or rename that entry"):
        play(
            with_transforms(WalkEnv(), stack(), tr.SelectTransform("observation", "left")), policy()
        )


ELSEWHERE = {
    # In tests above, or in an env that puts it first.
    *("AutoResetTransform", "ConditionalSkip", "NoopResetEnv", "SelectTransform"),
    # In buffers; bases of others.
    *("ActionChunkTransform", "BurnInTransform", "MultiStepTransform", "NextStateReconstructor"),
    *("RandomCropTensorDict", "Reward2GoTransform", "Compose", "ObservationTransform", "Transform"),
    # They need a GPU, a tokenizer, a process of Ray, or a library that is not here.
    *("PinMemoryTransform", "ActionTokenizerTransform", "Tokenizer", "RayTransform", "CenterCrop"),
    *("Crop", "Resize", "DecodeVideoTransform", "R3MTransform", "VC1Transform", "VIPTransform"),
    "VIPRewardTransform",
}


def test_each_transform_of_torchrl_was_tried():
    names = {
        name
        for name, value in vars(tr).items()
        if isinstance(value, type) and issubclass(value, tr.Transform)
    }
    assert names - RIGHT.keys() - REFUSED.keys() == ELSEWHERE


def test_a_multi_step_leaves_the_entries_that_it_is_told_to():
    (batch,) = collect(WalkEnv((2,)), policy(), frames=16, batches=1)
    penalty = stack()
    batch, multi_step = penalty(batch), MultiStep(0.9, 3)
    multi_step.done_keys = (*multi_step.done_keys, *penalty.out_keys)
    after = multi_step(batch.clone())["next"]
    for key in ("ref_log_prob", "kl", "task_reward", "kl_coeff", "episode_kl"):
        assert_close(after[key], batch["next", key], rtol=0, atol=0)


def test_a_recorder_may_come_last(tmp_path):
    recorder = TensorDictRecorder(str(tmp_path / "steps"))
    stack = KLConstrainedTransform(make_actor(), 0.1)
    env = with_transforms(WalkEnv(), stack, recorder)
    assert "kl" in play(env, policy())["next"].keys()
