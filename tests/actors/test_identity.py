"""The fingerprint of a reference: what it tells apart, and where it is checked."""

import copy
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.gpt_helpers import sharp
from tests.helpers import WalkEnv, make_actor, moved, play
from torchrl_kl import GPT, CausalLMActor, FrozenActor, KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.actors.identity import fingerprint, weights_without_adapters
from torchrl_kl.envs import DigitLanguageEnv

OTHER = "the reference is not the one that the run was trained against"
UNFIT = "`state_dict` has a reference that does not fit its fingerprint"


def without_weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "actor." not in name}


def score(reference: FrozenActor) -> torch.Tensor:
    batch = play(WalkEnv((2,)), make_actor(), 4)
    return reference.step(reference.inputs(batch)).log_prob


class TestFingerprint:
    def test_it_tells_apart_all_that_the_weights_are(self):
        model, weights = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {"a": torch.tensor([1.0, 2.0])}
        changed = [
            {"b": torch.tensor([1.0, 2.0])},
            {"a": torch.tensor([1.0, 2.0000002])},
            {"a": torch.tensor([[1.0, 2.0]])},
            {"a": torch.tensor([1.0, 2.0]).view(torch.int32)},
            {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(0)},
        ]
        prints = [fingerprint(model, each) for each in (weights, *changed)]
        prints.append(fingerprint(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), weights))
        assert all(each.shape == (32,) and each.dtype == torch.uint8 for each in prints)
        assert len({bytes(each.tolist()) for each in prints}) == len(prints)

    def test_it_depends_on_nothing_else(self):
        model = nn.Linear(2, 2)
        weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}
        same = {"b": weights["b"], "a": weights["a"].t().contiguous().t().requires_grad_()}
        assert fingerprint(copy.deepcopy(model).eval(), same).equal(fingerprint(model, weights))

    def test_of_a_weight_that_holds_others_it_reads_all(self):
        model, first, second = nn.Linear(2, 2), torch.zeros(2, 2), torch.ones(2, 2)
        pairs = [TwoTensor(first, second), TwoTensor(first, 2 * second), TwoTensor(second, second)]
        prints = [fingerprint(model, {"a": pair}) for pair in pairs]
        assert len({bytes(each.tolist()) for each in prints}) == 3
        assert fingerprint(model, {"a": TwoTensor(first, second)}).equal(prints[0])

    def test_of_a_sharded_weight_it_is_that_of_the_whole(self, tmp_path):
        dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            whole = torch.arange(6.0).view(2, 3)
            sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
            prints = [fingerprint(nn.Linear(2, 2), {"a": each}) for each in (whole, sharded)]
        finally:
            dist.destroy_process_group()
        assert prints[0].equal(prints[1])


class TestFrozen:
    def test_a_state_brings_its_weights_whatever_the_reference_was(self):
        first = FrozenActor(make_actor())
        resumed = FrozenActor(moved(make_actor()))
        resumed.load_state_dict(first.state_dict())
        assert score(resumed).equal(score(first))
        assert resumed.state_dict()["fingerprint"].equal(first.state_dict()["fingerprint"])

    def test_a_state_is_loaded_into_another_dtype(self):
        resumed = FrozenActor(make_actor()).to(torch.bfloat16)
        resumed.load_state_dict(FrozenActor(moved(make_actor())).state_dict())
        assert score(resumed).isfinite().all()

    def test_a_moved_reference_has_the_fingerprint_of_its_weights(self):
        reference = FrozenActor(make_actor())
        before = reference.state_dict()["fingerprint"]
        reference.update_reference(moved(make_actor()), tau=0.5)
        saved = reference.state_dict()
        assert not saved["fingerprint"].equal(before)
        resumed = FrozenActor(make_actor())
        resumed.load_state_dict(saved)
        assert score(resumed).equal(score(reference))

    @pytest.mark.parametrize("kind", [KLConstrainedTransform, KLPenaltyLoss])
    def test_weights_of_another_reference_are_refused(self, kind):
        first, other = kind(make_actor(), 0.1), kind(moved(make_actor()), 0.1)
        mixed = first.state_dict()
        foreign = {name: v for name, v in other.state_dict().items() if ".actor." in name}
        with pytest.raises(RuntimeError, match=UNFIT):
            kind(make_actor(), 0.1).load_state_dict(mixed | foreign)

    def test_a_state_without_fingerprint_is_refused(self):
        state = FrozenActor(make_actor()).state_dict()
        del state["fingerprint"]
        with pytest.raises(RuntimeError, match='Missing key.*"fingerprint"'):
            FrozenActor(make_actor()).load_state_dict(state)

    def test_a_reference_out_of_its_own_file_is_checked_when_it_scores(self):
        run = FrozenActor(make_actor())
        state = without_weights(run.state_dict())
        resumed = FrozenActor(make_actor())
        resumed.load_state_dict(state, strict=False)
        assert resumed.state_dict()["fingerprint"].equal(state["fingerprint"])
        assert score(resumed).equal(score(run))
        # The mistake: the reference is the policy of the run that goes on.
        mistaken = FrozenActor(moved(make_actor()))
        mistaken.load_state_dict(state, strict=False)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=OTHER):
                score(mistaken)
        with pytest.raises(RuntimeError, match=OTHER):
            mistaken.update_reference(make_actor())


def adapted(seed: int) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["query_key_value"])
    return peft.get_peft_model(sharp(GPT(11, 8), seed), config)  # type: ignore[arg-type]


def run_of(model: Any) -> KLConstrainedTransform:
    return KLConstrainedTransform(CausalLMActor(model), 0.1, reference=model.disable_adapter)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
class TestSwitched:
    def test_adapters_are_not_part_of_it(self):
        model = adapted(0)
        weights = weights_without_adapters(model)
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert {*weights} == {name for name, _ in model.named_parameters()} - trained
        assert trained
        assert weights_without_adapters(GPT(11, 8)) == {}

    def test_the_base_is_checked_when_a_resumed_run_scores(self):
        run, model = run_of(adapted(0)), adapted(0)
        state = run.state_dict()
        batch = DigitLanguageEnv(batch_size=(2,)).rollout(4, CausalLMActor(model))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_()  # as if it was trained
        resumed = run_of(model)
        resumed.load_state_dict(state)
        assert resumed(batch)["next", "kl"].abs().max() < 1  # another base is far away
        other = run_of(adapted(1))
        other.load_state_dict(state)
        with pytest.raises(RuntimeError, match=OTHER):
            other(batch)

    def test_weights_next_to_the_adapters_are_named(self):
        """A value head that was not loaded: the reference is right, but this cannot be seen."""
        runs = []
        for model in (adapted(0), adapted(0)):
            model.value_head = nn.Linear(48, 1)
            runs.append(run_of(model))
        runs[1].load_state_dict(runs[0].state_dict())
        batch = DigitLanguageEnv(batch_size=(2,)).rollout(4, CausalLMActor(adapted(0)))
        with pytest.raises(RuntimeError, match=rf"{OTHER}.*value head: load those that learn"):
            runs[1](batch)

    def test_the_policy_may_be_loaded_after_the_stack(self):
        model, new = adapted(0), adapted(1)
        batch = DigitLanguageEnv(batch_size=(2,)).rollout(4, CausalLMActor(model))
        resumed = run_of(new)
        resumed.load_state_dict(run_of(model).state_dict())
        new.load_state_dict(model.state_dict())
        resumed(batch)

    def test_another_switch_has_no_fingerprint(self):
        from contextlib import nullcontext

        stack = KLConstrainedTransform(make_actor(), 0.1, reference=nullcontext)
        assert "reference.fingerprint" not in stack.state_dict()
        stack.load_state_dict(stack.state_dict())
