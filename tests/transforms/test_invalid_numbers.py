"""NaN, infinite and huge numbers are refused by name, or left out with a warning."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv

from tests.helpers import (
    SpyController,
    WalkEnv,
    compose,
    make_actor,
    moved,
    play,
    policy,
    step_of,
    with_transforms,
)
from torchrl_kl import (
    GPT,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLPenaltyLoss,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    ResponseKLTransform,
    RewardAdjustmentTransform,
)

NAN, INF = math.nan, math.inf
# What is spoiled at row 0, step 2, with what, and the text that names it.
SPOILED: dict[str, tuple[Any, float, str]] = {
    "observation": ("observation", NAN, r"'observation' has 3 of 36, the first nan at \(0, 2, 0\)"),
    "log-prob": (
        "action_log_prob",
        NAN,
        r"'action_log_prob' has 1 of 12, the first nan at \(0, 2\)",
    ),
    "impossible": (
        "action_log_prob",
        -INF,
        r"'action_log_prob' has 1 of 12, the first -inf at \(0, 2\)",
    ),
    "nan reward": (
        ("next", "reward"),
        NAN,
        r"\('next', 'reward'\) has 1 of 12, the first nan at \(0, 2, 0\)",
    ),
    "infinite reward": (
        ("next", "reward"),
        -INF,
        r"\('next', 'reward'\) has 1 of 12, the first -inf",
    ),
    "huge reward": (
        ("next", "reward"),
        1e30,
        r"\('next', 'reward'\) has 1 of 12, the first 1\.0.*e\+30",
    ),
}
spoiled = pytest.mark.parametrize("kind", SPOILED)


def batch_of(kind: str | None = None) -> Any:
    batch = play(WalkEnv((2,)), policy(), 6)
    if kind is not None:
        batch[SPOILED[kind][0]][0, 2] = SPOILED[kind][1]
    if kind == "observation":
        batch["next", "observation"][0, 1] = NAN
    return batch


def stack(controller: Any = 0.1, **kwargs) -> Any:
    return KLConstrainedTransform(make_actor(), controller, **kwargs)


def parts(controller: Any = 0.1, **kwargs) -> Any:
    return compose(
        ReferenceModelLogProbTransform(make_actor(), **kwargs),
        KLDivergenceTransform(**kwargs),
        RewardAdjustmentTransform(controller, **kwargs),
    )


def preset(controller: Any = 0.1, **kwargs) -> Any:
    return KLRewardTransform(make_actor(), 0.1, **kwargs)


def finite(batch: Any) -> bool:
    """Whether all that the transforms wrote is finite."""
    written = batch["next"].exclude("observation")
    return all(value.isfinite().all() for value in written.values() if value.is_floating_point())


class TestRaise:
    @spoiled
    @pytest.mark.parametrize("make", [stack, parts, preset])
    def test_a_batch_is_refused_by_key_count_and_place(self, make, kind):
        with pytest.raises(ValueError, match=SPOILED[kind][2]):
            make()(batch_of(kind))

    @spoiled
    @pytest.mark.parametrize("per", ["step", "trajectory"])
    def test_the_controller_keeps_its_state_and_the_batch_may_be_repaired(self, kind, per):
        clean, transform = stack(SpyController(per=per)), stack(SpyController(per=per))
        with pytest.raises(ValueError, match="KLConstrainedTransform got invalid numbers"):
            transform(batch_of(kind))
        assert transform.controller.calls == []
        assert transform.statistics.count == 0
        transform(batch_of())
        clean(batch_of())
        assert transform.controller.calls == clean.controller.calls != []

    def test_the_class_that_the_user_wrote_is_named(self):
        for make, name in ((stack, "KLConstrainedTransform"), (preset, "KLRewardTransform")):
            with pytest.raises(ValueError, match=f"{name} got invalid numbers"):
                make()(batch_of("log-prob"))

    @pytest.mark.parametrize("make", [stack, parts, preset])
    def test_in_a_replay_buffer(self, make):
        buffer = ReplayBuffer(storage=LazyTensorStorage(12), batch_size=4)
        buffer.append_transform(make())
        batch = batch_of().reshape(-1)
        buffer.extend(batch.set("action_log_prob", torch.full((12,), NAN)))
        with pytest.raises(ValueError, match="'action_log_prob' has 4 of 4, the first nan"):
            buffer.sample()

    def test_a_reference_that_cannot_take_the_action(self):
        transform, batch = stack(), batch_of()
        with torch.no_grad():
            transform.reference.actor[0].module.bias[batch["action"][0, 2]] = -INF
        with pytest.raises(ValueError, match=r"'ref_log_prob'\) has \d+ of 12, the first -inf"):
            transform(batch)

    @pytest.mark.parametrize("make", [stack, preset])
    @pytest.mark.parametrize(
        ("shape", "text"), [((3,), r"3 of 3, the first nan at \(0,\)"), ((), r"1 of 1.* at \(\)")]
    )
    def test_in_an_env_step(self, make, shape, text):
        transform = make()
        with torch.no_grad():
            transform.reference.actor[0].module.bias.fill_(NAN)
        with pytest.raises(ValueError, match=rf"'ref_log_prob'\) has {text}"):
            play(with_transforms(WalkEnv(shape), transform), policy(), 2)

    def test_an_estimate_that_overflows(self):
        batch = batch_of()
        batch["action_log_prob"][0, 2] = -200.0  # k3 is exp(199), inf in float32
        with pytest.raises(ValueError, match=r"'kl_estimate'\) has 1 of 12, the first inf"):
            stack(estimator="k3")(batch)

    def test_padding_may_hold_anything(self):
        batch = batch_of("log-prob")
        batch["next", "reward"][0, 2] = NAN
        batch["collector", "mask"] = torch.ones(2, 6, dtype=torch.bool)
        batch["collector", "mask"][0, 2] = False
        after = stack()(batch)["next"]
        assert after["kl"][0, 2] == 0
        assert after["reward"][0, 2].isnan()
        assert after["reward"].isfinite().sum() == 11

    def test_large_numbers_that_are_valid(self):
        batch = batch_of()
        batch["next", "reward"] = torch.full((2, 6, 1), 1e19)  # their norm is above the limit
        assert (stack()(batch)["next", "task_reward"] == 1e19).all()

    def test_opposite_numbers_do_not_cancel(self):
        batch = batch_of("huge reward")
        batch["next", "reward"][1, 2] = -1e30
        with pytest.raises(ValueError, match="has 2 of 12"):
            stack()(batch)

    def test_a_coefficient_of_0_only_measures_infinity_but_not_nan(self):
        transform, batch = stack(0.0), batch_of()
        with torch.no_grad():
            transform.reference.actor[0].module.bias[batch["action"][0, 2]] = -INF
        after = transform(batch)["next"]
        assert after["kl"][0, 2] == INF
        assert_close(after["reward"], batch["next", "reward"], rtol=0, atol=0)
        with pytest.raises(ValueError, match="'action_log_prob' has 1 of 12"):
            stack(0.0)(batch_of("log-prob"))

    @pytest.mark.parametrize("make", [stack, parts, preset])
    def test_the_option_is_one_of_two(self, make):
        with pytest.raises(
            ValueError, match='`on_invalid` must be "raise" or "mask", got \'skip\''
        ):
            make(on_invalid="skip")


class TestMask:
    @spoiled
    @pytest.mark.parametrize("make", [stack, parts, preset])
    def test_the_step_is_left_out_and_the_others_are_as_before(self, make, kind):
        with pytest.warns(UserWarning, match=SPOILED[kind][2]):
            after = make(on_invalid="mask")(batch_of(kind))
        clean, there = make()(batch_of()), torch.zeros(2, 6, 1, dtype=torch.bool)
        there[0, 2] = True
        assert finite(after)
        task = 0.0 if "reward" in kind else batch_of()["next", "reward"][0, 2]
        assert_close(after["next", "reward"][there], torch.as_tensor([task]), rtol=0, atol=0)
        names = [
            n for n in ("kl", "reward", "task_reward", "ref_log_prob") if n in clean["next"].keys()
        ]
        for name in names:
            others = ~there.reshape(clean["next", name].shape)
            actual, expected = after["next", name][others], clean["next", name][others]
            assert_close(actual, expected, rtol=0, atol=0)
        if "kl" in names:
            assert after["next", "kl"][there] == 0

    @pytest.mark.parametrize("kind", ["observation", "log-prob"])
    def test_a_part_writes_the_log_prob_of_the_policy_where_it_masks(self, kind):
        """So that their difference is 0; 0 where that of the policy is invalid itself."""
        batch = batch_of(kind)
        with pytest.warns(UserWarning, match=SPOILED[kind][2]):
            after = ReferenceModelLogProbTransform(make_actor(), on_invalid="mask")(batch)
        expected = 0.0 if kind == "log-prob" else batch["action_log_prob"][0, 2].item()
        assert after["next", "ref_log_prob"][0, 2].item() == expected
        clean = ReferenceModelLogProbTransform(make_actor())(batch_of())["next", "ref_log_prob"]
        actual = after["next", "ref_log_prob"].clone()
        actual[0, 2] = clean[0, 2]
        assert_close(actual, clean, rtol=0, atol=0)

    @spoiled
    @pytest.mark.parametrize("make", [stack, parts])
    def test_the_step_is_not_counted(self, make, kind):
        told = {}
        for on_invalid in ("raise", "mask"):
            controller = SpyController(per="step")
            transform = make(controller, on_invalid=on_invalid)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                transform(batch_of(kind if on_invalid == "mask" else None))
            ((mean, n),) = controller.calls
            told[on_invalid] = (mean * n, n)
        clean = stack()(batch_of())["next", "kl"]
        assert told["raise"][1] - told["mask"][1] == 1
        rounding = 12 * torch.finfo(torch.float32).eps
        assert told["raise"][0] - told["mask"][0] == pytest.approx(clean[0, 2].item(), abs=rounding)

    def test_it_warns_once(self):
        transform = stack(on_invalid="mask")
        with pytest.warns(UserWarning, match="not be warned again"):
            transform(batch_of("log-prob"))
        assert finite(transform(batch_of("nan reward")))  # warnings are errors

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies_do_the_same(self, how):
        with pytest.warns(UserWarning, match="KLConstrainedTransform got"):
            assert finite(how(stack(on_invalid="mask"))(batch_of("log-prob")))

    @pytest.mark.parametrize("make", [stack, parts])
    @pytest.mark.parametrize("per", ["step", "trajectory"])
    def test_env_and_batch_give_the_same(self, make, per):
        """Rows whose observation has a large first entry are NaN to the reference."""
        reference = make_actor()
        reference[0].module = Touchy(reference[0].module)
        told, batches = [], []
        for place in ("env", "batch"):
            controller = SpyController(per=per)
            transform = make(controller, on_invalid="mask")
            first = transform if make is stack else transform[0]
            last = transform if make is stack else transform[2]
            first.reference._hold(reference)
            last.feed.update_every = 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if place == "env":
                    env = TransformedEnv(WalkEnv((3,), longest=3), transform)
                    batch = play(env, policy(), 30)
                else:
                    batch = transform(play(WalkEnv((3,), longest=3), policy(), 30))
            batches.append(batch["next"])
            ended = {"step": batch["next", "kl"].numel(), "trajectory": batch["next", "done"].sum()}
            n = sum(n for _, n in controller.calls)
            assert 0 < n < ended[per]
            told.append((n, sum(kl * n for kl, n in controller.calls)))
        for name in ("kl", "reward", "episode_kl", "task_reward"):
            assert_close(batches[0][name], batches[1][name], rtol=1e-5, atol=1e-5)
        assert told[0][0] == told[1][0]
        assert told[0][1] == pytest.approx(told[1][1], abs=1e-4)
        assert (batches[0]["kl"] == 0).any()

    def test_agents_share_the_fate_of_a_step(self):
        actor = make_actor(agents=True)
        batch = play(WalkEnv((2,), n_agents=3), moved(actor), 6)
        batch["agents", "action_log_prob"][0, 2, 1] = NAN
        with pytest.warns(UserWarning, match=r"first nan at \(0, 2, 1\)"):
            after = KLConstrainedTransform(
                actor, 0.1, keys=KLKeys(reward=("agents", "reward")), on_invalid="mask"
            )(batch)["next", "agents"]
        assert (after["kl"][0, 2] == 0).all()
        assert (after["kl"] != 0).sum() == 33
        assert_close(after["reward"][0, 2], batch["next", "agents", "reward"][0, 2])

    def test_a_kl_that_was_measured_elsewhere(self):
        batch = step_of(reward=[1.0, 1.0], kl=[INF, 0.5], done=[False, True])
        controller = SpyController()
        transform = RewardAdjustmentTransform(controller, on_invalid="mask")
        with pytest.warns(UserWarning, match=r"RewardAdjustmentTransform got.*'kl'\) has 1 of 2"):
            after = transform(batch)["next"]
        assert_close(after["reward"].flatten(), torch.tensor([1.0, 0.95]))
        assert controller.calls == [(0.5, 1)]

    def test_padding_and_invalid_steps_of_one_batch_are_both_left_out(self):
        batch = step_of(reward=[1.0] * 4, kl=[0.5, NAN, 0.25, 8.0], done=[False] * 4)
        batch["collector", "mask"] = torch.tensor([[True, True, True, False]])
        controller = SpyController(per="step")
        with pytest.warns(UserWarning, match=r"'kl'\) has 1 of 4, the first nan"):
            after = RewardAdjustmentTransform(controller, on_invalid="mask")(batch)["next"]
        assert controller.calls == [(0.375, 2)]
        assert after["episode_kl"].flatten()[:3].tolist() == [0.5, 0.5, 0.75]

    def test_an_infinite_kl_is_masked_with_a_coefficient_of_0_too(self):
        batch = step_of(reward=[1.0, 2.0, 3.0], kl=[0.5, INF, 0.25], done=[False] * 3)
        with pytest.warns(UserWarning, match=r"'kl'\) has 1 of 3, the first inf"):
            after = RewardAdjustmentTransform(0.0, on_invalid="mask")(batch)["next"]
        assert after["kl"].flatten().tolist() == [0.5, 0.0, 0.25]
        assert after["episode_kl"].flatten().tolist() == [0.5, 0.5, 0.75]
        assert after["reward"].flatten().tolist() == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize("shape", [(2,), ()])
    def test_a_trajectory_without_a_valid_step_is_not_told(self, shape):
        for longest in (2, 4):
            controller = SpyController()
            transform = stack(controller, on_invalid="mask", update_every=1)
            with torch.no_grad():
                transform.reference.actor[0].module.bias.fill_(NAN)
            with pytest.warns(UserWarning, match="'ref_log_prob'"):
                play(with_transforms(WalkEnv(shape, longest=longest), transform), policy(), 12)
            assert controller.calls == []


class Touchy(torch.nn.Module):
    """A network that is NaN in some states."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, observation):
        return torch.where(observation[..., :1] > 0.5, NAN, self.net(observation))


class TestLoss:
    @pytest.mark.parametrize(
        ("key", "gradient", "weights"),
        [
            ("observation", "step", "step"),  # which does not read a log-prob
            *(
                (key, *options)
                for key in ("observation", "action_log_prob")
                for options in (("step", "trajectory"), ("sequence", "trajectory"), ("k2", "step"))
            ),
        ],
    )
    def test_value_and_gradient(self, gradient: Any, weights: Any, key):
        actor = policy()
        options: Any = {"gradient": gradient, "weights": weights, "reference": make_actor()}
        batch = batch_of()
        batch["collector", "mask"] = torch.ones(2, 6, dtype=torch.bool)
        batch["collector", "mask"][0, 2] = False
        expected = KLPenaltyLoss(actor, 0.1, **options)(batch)["loss_kl"]
        expected_grad = torch.autograd.grad(expected, list(actor.parameters()))
        spoilt = batch_of("observation" if key == "observation" else "log-prob")
        with pytest.raises(ValueError, match=f"KLPenaltyLoss got invalid.*'{key}' has"):
            KLPenaltyLoss(actor, 0.1, **options)(spoilt)
        loss = KLPenaltyLoss(actor, 0.1, on_invalid="mask", **options)
        with pytest.warns(UserWarning, match=f"KLPenaltyLoss got invalid.*'{key}' has"):
            actual = loss(spoilt)["loss_kl"]
        assert_close(actual, expected, rtol=0, atol=0)
        grads = torch.autograd.grad(actual, list(actor.parameters()))
        assert_close(grads, expected_grad, rtol=0, atol=0)

    def test_weights_that_overflow(self):
        batch = batch_of()
        batch["action_log_prob"][1] = -100.0
        loss = KLPenaltyLoss(policy(), 0.1, weights="trajectory", reference=make_actor())
        with pytest.raises(ValueError, match="KLPenaltyLoss got invalid numbers: 'loss_kl' has"):
            loss(batch)

    @pytest.mark.parametrize(
        ("gradient", "weights"),
        [("step", "trajectory"), ("sequence", "trajectory"), ("sequence", "step")],
    )
    def test_weights_that_overflow_where_another_step_is_invalid(self, gradient: Any, weights: Any):
        options: Any = {"gradient": gradient, "weights": weights, "reference": make_actor()}
        actor, batch = policy(), batch_of("log-prob")
        batch["action_log_prob"][1] = -100.0
        with pytest.warns(UserWarning, match="'action_log_prob' has"):
            loss = KLPenaltyLoss(actor, 0.1, on_invalid="mask", **options)(batch)["loss_kl"]
        grads = torch.autograd.grad(loss, list(actor.parameters()))
        assert all(each.isfinite().all() for each in (loss, *grads))
        assert loss != 0

    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    @pytest.mark.parametrize("number", [INF, 1e30])
    def test_a_log_prob_that_gives_a_weight_of_0(self, gradient: Any, number):
        batch = batch_of()
        batch["action_log_prob"][0, 2] = number
        options: Any = {"gradient": gradient, "weights": "trajectory", "reference": make_actor()}
        with pytest.raises(ValueError, match="'action_log_prob' has 1 of 12, the first"):
            KLPenaltyLoss(policy(), 0.1, **options)(batch)

    def test_the_controller_keeps_its_state(self):
        controller = SpyController(per="step")
        loss = KLPenaltyLoss(policy(), controller, gradient="k2", reference=make_actor())
        with pytest.raises(ValueError, match="'action_log_prob' has 1 of 12"):
            loss.update_controller(batch_of("log-prob"))
        assert controller.calls == []
        assert loss.statistics.count == 0
        masks = KLPenaltyLoss(
            policy(), controller, gradient="k2", reference=make_actor(), on_invalid="mask"
        )
        with pytest.warns(UserWarning, match="'action_log_prob' has 1 of 12"):
            masks.update_controller(batch_of("log-prob"))
        assert [n for _, n in controller.calls] == [11]


class TestResponses:
    def responses(self, reward: float = 1.0) -> TensorDict:
        full = torch.tensor([[5, 6, 7, 8], [5, 6, 3, 9]])
        tokens = TensorDict(full=full, prompt=full[:, :2], batch_size=2)
        rewards = torch.tensor([[reward], [1.0]])
        return TensorDict(
            tokens=tokens, next=TensorDict(reward=rewards, batch_size=2), batch_size=2
        )

    def transform(
        self, broken: bool = False, **kwargs
    ) -> tuple[ResponseKLTransform, SpyController]:
        torch.manual_seed(0)
        model, reference, controller = GPT(11, 8), GPT(11, 8), SpyController(1.0)
        torch.nn.init.normal_(reference.head.weight, std=0.2)
        if broken:  # token 3 follows on nothing
            reference.head.bias = torch.nn.Parameter(torch.zeros(11))
            with torch.no_grad():
                reference.head.bias[3] = -INF
        return ResponseKLTransform(model, controller, reference=reference, **kwargs), controller

    @pytest.mark.parametrize("reward", [NAN, INF, 1e30])
    def test_a_reward(self, reward):
        transform, controller = self.transform()
        with pytest.raises(ValueError, match=r"\('next', 'reward'\) has 1 of 2, the first .* \(0,"):
            transform(self.responses(reward))
        assert controller.calls == []
        transform, controller = self.transform(on_invalid="mask")
        with pytest.warns(
            UserWarning, match=r"ResponseKLTransform got.*\('next', 'reward'\) has 1"
        ):
            after = transform(self.responses(reward))
        expected = self.transform()[0](self.responses())["next"]
        for name in ("reward", "task_reward", "kl"):
            assert after["next", name][0] == 0
            assert_close(after["next", name][1], expected[name][1], rtol=0, atol=0)
        assert controller.calls == [(pytest.approx(expected["kl"][1].item()), 1)]
        assert after["log_probs", "full"][0].isnan().all()

    def test_a_token_that_the_reference_cannot_write(self):
        transform, controller = self.transform(broken=True)
        with pytest.raises(
            ValueError, match=r"'ref_log_probs', 'full'\) has 1 of 4, the first -inf"
        ):
            transform(self.responses())
        assert controller.calls == []
        transform, controller = self.transform(broken=True, on_invalid="mask")
        with pytest.warns(UserWarning, match=r"'ref_log_probs', 'full'\) has 1 of 4"):
            after = transform(self.responses())["next"]
        assert after["kl"].flatten()[1] == 0
        assert after["reward"].flatten()[1] == 1
        assert [n for _, n in controller.calls] == [1]
