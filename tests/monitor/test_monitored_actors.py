"""KLMonitor with actors of every kind: recorded log-probs that are not the actor's."""

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close

from tests.helpers import (
    N_OBS,
    WalkEnv,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    with_transforms,
)
from torchrl_kl import (
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLKeys,
    KLMonitor,
)
from torchrl_kl.actors.log_probs import policy_log_prob
from torchrl_kl.language import GPT, CausalLMActor, as_steps


def disagreements(monitor: KLMonitor, batch: Any) -> list:
    return [message for message in monitor(batch) if message.condition == "sampler_disagrees"]


class TestRecorded:
    @pytest.mark.parametrize("kind", ["categorical", "normal", "lstm"])
    def test_of_another_policy(self, kind):
        actor = make_actor(kind)
        stack = KLConstrainedTransform(actor, 0.1)
        env = WalkEnv((4,), discrete=kind != "normal")
        memory = memory_of(actor) if kind == "lstm" else []
        batches = collect(with_transforms(env, *memory, stack), actor, frames=40, batches=2)
        monitor = KLMonitor(stack.controller, actor=actor, window=1)
        assert [disagreements(monitor, batch) for batch in batches] == [[], []]
        (message,) = disagreements(KLMonitor(stack.controller, actor=moved(actor)), batches[0])
        assert "of 40 steps: the KL is that of another policy" in message

    def test_figures(self):
        actor = make_actor()
        batch = KLConstrainedTransform(actor, 0.1)(play(WalkEnv((8,)), actor))
        batch["action_log_prob"][0, :3] += torch.tensor([0.25, -0.5, 0.0])
        (message,) = KLMonitor(ConstantKLController(0.1), actor=actor)(batch)
        assert "by up to 0.5 nats, on 2.1% of 96 steps" in message
        assert_close(
            message.figures, {"share": 2 / 96, "largest_difference": 0.5}, rtol=1e-5, atol=1e-5
        )

    @pytest.mark.parametrize(
        ("dtype", "most"), [(torch.float64, 1e-3), (torch.float32, 1e-3), (torch.bfloat16, 0.05)]
    )
    @pytest.mark.parametrize(("error", "found"), [(0.9, False), (1.1, True), (math.nan, True)])
    def test_tolerance(self, dtype, most, error, found):
        actor = make_actor()
        batch = KLConstrainedTransform(actor, 0.1)(play(WalkEnv((8,)), actor))
        actor, batch["observation"] = actor.to(dtype), batch["observation"].to(dtype)
        with torch.no_grad():
            scored = actor.get_dist(batch.select("observation")).log_prob(batch["action"])
        batch["action_log_prob"] = scored.double()
        batch["action_log_prob"][3, 3] += error * most
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor)
        assert bool(disagreements(monitor, batch)) == found

    def test_padding_is_not_compared(self):
        actor = make_actor()
        batch = KLConstrainedTransform(actor, 0.1)(play(WalkEnv((8,)), actor))
        batch["action_log_prob"][:, 5:] = math.nan
        batch["collector", "mask"] = torch.arange(12).expand(8, 12) < 5
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor, window=1)
        assert monitor(batch) == []
        batch["collector", "mask"] = torch.zeros(8, 12, dtype=torch.bool)
        assert monitor(batch) == []

    @pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(N_OBS)])
    def test_the_actor_is_evaluated_in_eval_mode(self, layer):
        # Noise of dropout would pass for another sampler; watching must not move statistics.
        actor, stack = make_actor(), KLConstrainedTransform(make_actor(), 0.1)
        actor[0].module = nn.Sequential(layer, actor[0].module)
        batch = stack(play(WalkEnv((2,)), actor.eval())).reshape(-1)
        before = copy.deepcopy(actor.train().state_dict())
        assert disagreements(KLMonitor(stack.controller, actor=actor), batch) == []
        assert all(part.training for part in actor.modules())
        assert_close(actor.state_dict(), before, rtol=0, atol=0)

    def test_keys_of_agents_are_found_by_the_actor_or_named(self):
        actor = make_actor(agents=True)
        policy, keys = moved(actor), KLKeys(reward=("agents", "reward"))
        controller = ExponentialKLController(1.0, 0.5, per="step")
        stack = KLConstrainedTransform(actor, controller, keys=keys)
        batch = stack(play(WalkEnv((2,), n_agents=3), policy))
        monitor = KLMonitor(controller, actor=policy, keys=keys)
        for watcher in (monitor, KLMonitor(controller, keys=KLKeys(kl=("agents", "kl")))):
            watcher(batch)
            assert watcher.state_dict()["pools"][0][0] == 72  # 2 rows, 12 steps, 3 agents
        assert monitor.counts["sampler_disagrees"] == (0, 0)

    def test_a_log_prob_that_is_named_is_the_recorded_one(self):
        """It asked for that of the actor, with the advice to name another one."""
        actor, keys = make_actor(), KLKeys(log_prob="sample_log_prob")
        batch = play(WalkEnv((8,)), actor)
        with torch.no_grad():
            batch["sample_log_prob"] = batch.pop("action_log_prob")
        stack = KLConstrainedTransform(actor, 0.1, reference=actor, keys=keys)
        batch = stack(batch)
        monitor = KLMonitor(stack.controller, actor=actor, keys=keys, window=1)
        assert disagreements(monitor, batch) == []
        batch["sample_log_prob"] += 0.5
        assert disagreements(monitor, batch)
        with pytest.raises(
            KeyError, match="'sample_log_prob' is not in .*`rescore\\(policy, batch"
        ):
            monitor(batch.exclude("sample_log_prob"))

    def test_time_may_be_given_in_place_of_its_name(self):
        actor = make_actor("lstm")
        env = with_transforms(WalkEnv((4,)), *memory_of(actor))
        stack = KLConstrainedTransform(actor, ExponentialKLController(1.0, 1e-6), time_dim=-1)
        named = play(env, actor)
        batch = named.copy()
        batch.names = [None, None]
        monitors = [KLMonitor(stack.controller, actor=actor, time_dim=dim) for dim in (None, -1)]
        for monitor, data in zip(monitors, (named, batch), strict=True):
            assert disagreements(monitor, stack(data)) == []
        pools = [monitor.state_dict()["pools"] for monitor in monitors]
        assert pools[0] == pools[1] != [[0, 0, 0]]
        with pytest.raises(RuntimeError, match=r"without a time dimension.*pass `time_dim`"):
            KLMonitor(stack.controller)(stack(batch))


class TestWhen:
    def test_once_per_window(self):
        """The disagreement begins in the third batch; the fourth is the next that is checked."""
        actor = make_actor()
        stack = KLConstrainedTransform(make_actor(seed=5), 0.1)
        honest = stack(play(WalkEnv((8,)), actor))
        other = stack(play(WalkEnv((8,)), moved(actor)))
        assert (honest["next", "kl"].mean() > 0) & (other["next", "kl"].mean() > 0)
        monitor = KLMonitor(stack.controller, actor=actor, window=3)
        seen = [len(monitor(batch)) for batch in [honest] * 2 + [other] * 6]
        assert seen == [0, 0, 0, 1, 0, 0, 0, 0]
        assert monitor.counts["sampler_disagrees"] == (2, 1)  # batches 4 and 7, one episode

    def test_a_negative_batch_is_checked_out_of_turn(self):
        actor = make_actor()
        stack = KLConstrainedTransform(actor, 0.1)
        honest = stack(play(WalkEnv((8,)), actor))
        other = stack(play(WalkEnv((8,)), moved(actor)))
        other["next", "kl"] = -other["next", "kl"].abs()
        monitor = KLMonitor(stack.controller, actor=actor, window=1000)
        assert monitor(honest) == []
        (message,) = monitor(other)
        assert "recorded log-probs differ" in message


class TestResponses:
    """Batches of TorchRL's LLM API, of which as_steps makes steps."""

    @pytest.mark.parametrize("per", ["trajectory", "step"])
    def test_the_kl_of_responses_is_compared_with_the_target(self, per):
        full, kl = torch.randint(0, 10, (40, 8)), torch.rand(40, 1)
        tokens = TensorDict(full=full, prompt=full[:, :4], batch_size=40)
        batch = TensorDict(tokens=tokens, next=TensorDict(kl=kl, batch_size=40), batch_size=40)
        actor = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
        log_probs = policy_log_prob(actor, as_steps(batch, pad_token=None), True)[0].detach()
        batch["log_probs", "full"] = torch.cat([torch.full((40, 4), torch.nan), log_probs], 1)
        controller = ExponentialKLController(1.0, 1e-6, per=per)
        monitor = KLMonitor(controller, actor=actor, window=1)
        steps = as_steps(batch, pad_token=None)
        found = [message.condition for message in monitor(steps)]
        assert found == ["kl_far_above", "kl_above"]
        ((count, total, _),) = monitor.state_dict()["pools"]
        assert (count, total) == (
            40 if per == "trajectory" else 160,
            pytest.approx(kl.sum().item()),
        )
        steps["action_log_prob"] += 0.5
        assert disagreements(monitor, steps)
        before = monitor.counts
        with pytest.raises(ValueError, match=r"reads steps, got .*\(40,\).*pass `as_steps\(batch"):
            monitor(batch)
        assert monitor.counts == before
