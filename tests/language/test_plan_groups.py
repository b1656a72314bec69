"""A plan compares the responses to one prompt, whatever feeds it: never equal responses."""

from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.testing import assert_close

from torchrl_kl import (
    ExponentialKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLPenaltyLoss,
    PlannedKLController,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
    TopKActor,
    coeff_for_budget,
    rescore,
)
from torchrl_kl.language import GPT, CausalLMActor, ResponseKLTransform, as_steps, sample_responses

PAD, EOS, BUDGET, S = 10, 0, 0.5, 64
PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 2, 2]])
any_end = pytest.mark.parametrize("eos", [None, EOS])


@cache
def sampled(eos: int | None, in_keys: tuple[str, str] = ("tokens", "position")) -> Any:
    """An actor, and 64 of its responses to each of 4 prompts, whose rewards are 10 apart.

    The model is peaked: most responses have a twin.
    """
    torch.manual_seed(0)
    gpt = GPT(vocab_size=11, block_size=12)
    for weight in gpt.parameters():
        weight.data.mul_(3.0)
    actor = CausalLMActor(gpt, temperature=0.25, in_keys=in_keys)
    prompts = PROMPTS.repeat_interleave(S, 0)

    def reward(texts: torch.Tensor) -> torch.Tensor:
        apart = 10.0 * torch.arange(len(PROMPTS)).repeat_interleave(S)
        return apart + texts[:, 3:].float().mean(1) / 3 + (texts[:, 3] == 5)

    batch = sample_responses(actor, prompts, 4, pad_token=PAD, eos_token=eos, reward_fn=reward)
    return actor, batch


def by_hand(batch: TensorDict) -> float:
    return coeff_for_budget(batch["next", "reward"].sum((1, 2)).reshape(-1, S), BUDGET)


def llm_batch(batch: TensorDict) -> Any:
    """The same responses as TorchRL's LLM API has them."""
    rows = []
    for text, mask, reward in zip(
        batch["next", "tokens"][:, -1],
        batch["collector", "mask"],
        batch["next", "reward"].sum(1),
        strict=True,
    ):
        tokens = TensorDict(full=text[: 3 + int(mask.sum())], prompt=text[:3])
        rows.append(TensorDict(tokens=tokens, next=TensorDict(reward=reward)))
    return lazy_stack(rows)


def planned(feed: Any) -> float:
    controller = ExponentialKLController("plan", BUDGET, max_coeff=1e9)
    feed(controller)
    assert not controller.planning
    return controller.coeff.item()


@any_end
def test_every_feed_plans_by_prompt(eos):
    actor, batch = sampled(eos)
    texts = batch["next", "tokens"][:, -1]
    assert len(texts.unique(dim=0)) < len(texts) / 2  # twins
    rows = llm_batch(batch)
    steps = as_steps(rows, pad_token=PAD, eos_token=eos)
    steps = rescore(actor, steps.set("action_log_prob", torch.zeros(steps.shape)))

    def in_parts(controller: Any) -> None:
        scored = KLDivergenceTransform()(ReferenceModelLogProbTransform(actor)(batch))
        RewardAdjustmentTransform(controller)(scored)

    def by_text(controller: Any) -> None:
        ResponseKLTransform(
            actor.reader.lm.model, controller, temperature=0.25, pad_token=PAD, eos_token=eos
        )(rows)

    feeds = {
        "stack": lambda it: KLConstrainedTransform(actor, it)(batch),
        "parts": in_parts,
        "stack of the k most likely": lambda it: KLConstrainedTransform(TopKActor(actor, 3), it)(
            batch
        ),
        "loss": lambda it: KLPenaltyLoss(actor, it).update_controller(batch),
        "as_steps": lambda it: KLConstrainedTransform(actor, it)(steps),
        "responses": by_text,
    }
    plans = {name: planned(feed) for name, feed in feeds.items()}
    for plan in plans.values():
        # Their numbers differ by the rounding of sums of float32 rewards.
        assert plan == pytest.approx(plans["stack"], rel=1e-5)
    assert plans["stack"] == pytest.approx(by_hand(batch), rel=1e-5)
    for feed in feeds.values():  # the policy is the reference, so that a later plan is the same
        later: Any = PlannedKLController(BUDGET, init_coeff=0.01)
        feed(later)
        assert later.plan.made.item() == pytest.approx(plans["stack"], rel=1e-5)
        assert later.n_updates == 1


def test_texts_under_other_names_are_cut_at_their_position():
    actor, batch = sampled(EOS, ("text", "place"))
    stack = planned(lambda it: KLConstrainedTransform(actor, it)(batch))
    assert stack == pytest.approx(by_hand(batch), rel=1e-5)


@any_end
def test_advantages_of_grpo_are_compared_by_prompt(eos):
    actor, batch = sampled(eos)
    rewards = batch["next", "reward"].sum((1, 2)).reshape(-1, S)
    centred = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    batch = batch.copy()
    batch["advantage"] = centred.reshape(-1, 1, 1).expand(*batch.shape, 1)
    plan = planned(lambda it: KLPenaltyLoss(actor, it).update_controller(batch))
    assert plan == pytest.approx(coeff_for_budget(centred, BUDGET), rel=1e-5)


def test_ragged_prompts_of_which_one_begins_the_other_are_two():
    actor, _ = sampled(None)
    prompts = [torch.tensor([1, 2])] * S + [torch.tensor([1, 2, 3])] * S
    batch = sample_responses(actor, prompts, 4, pad_token=3)
    batch["next", "reward"] = batch["next", "done"] * torch.randn(len(batch), 1, 1)
    batch["next", "reward"][:S] += 100.0 * batch["next", "done"][:S]
    plan = planned(lambda it: KLConstrainedTransform(actor, it)(batch))
    assert plan == pytest.approx(by_hand(batch), rel=1e-5)
    assert_close(batch["position"][:, 0], torch.tensor([2, 3]).repeat_interleave(S))
