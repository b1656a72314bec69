"""The logits that `sample_responses` records, and the exact KL that is measured with them."""

import pytest
import torch
from torch.testing import assert_close

from torchrl_kl import GPT, CausalLMActor, FrozenActor, KLConstrainedTransform, sample_responses

P, T, V = 3, 6, 7  # tokens of a prompt, of a response, of the vocabulary
# Cached and teacher-forced logits differ by the rounding of float32 in sums of some 100 terms.
ROUNDING = {"rtol": 0, "atol": 2e-5}


@pytest.fixture
def actor() -> CausalLMActor:
    return CausalLMActor(GPT(V, P + T), temperature=0.7)


def sample(actor, n: int = 40, **options):
    prompts = torch.randint(V, (n, P))
    return sample_responses(actor, prompts, T, pad_token=0, return_logits=True, **options)


def teacher_forced(actor, batch) -> torch.Tensor:
    """Log-probs of all next tokens at each step, (N, T, V)."""
    with torch.no_grad():
        logits = actor.reader.lm.model(batch["tokens"][:, 0, :-1])[:, P - 1 :]
    return (logits / actor.reader.temperature).log_softmax(-1)


@pytest.mark.parametrize("chunk_size", [7, 256])
def test_they_are_those_of_the_policy_at_each_step(actor, chunk_size):
    batch = sample(actor, chunk_size=chunk_size)
    assert_close(batch["logits"].log_softmax(-1), teacher_forced(actor, batch), **ROUNDING)
    taken = batch["logits"].log_softmax(-1).gather(-1, batch["action"][..., None])[..., 0]
    assert_close(taken, batch["action_log_prob"], **ROUNDING)


def test_they_are_0_after_the_end(actor):
    batch = sample(actor, eos_token=1)
    ended = ~batch["collector", "mask"]
    assert ended.any()
    assert (batch["logits"][ended] == 0).all()
    assert_close(
        batch["logits"][~ended].log_softmax(-1), teacher_forced(actor, batch)[~ended], **ROUNDING
    )


def test_texts_that_all_end_at_once_have_zeros_for_the_rest(actor):
    with torch.no_grad():
        actor.reader.lm.model.head.weight.zero_()
        actor.reader.lm.model.head.bias = torch.nn.Parameter(torch.zeros(V))
        actor.reader.lm.model.head.bias[1] = 100.0  # the end token, always
    batch = sample(actor, eos_token=1)
    assert batch["logits"].shape == (40, T, V)
    assert (batch["action"][:, 0] == 1).all()
    assert (batch["logits"][:, 0, 1] == 0).all()  # log 1
    assert (batch["logits"][:, 1:] == 0).all()


@pytest.mark.parametrize("eos_token", [None, 1])
def test_the_stack_measures_the_exact_kl_with_them(actor, eos_token):
    reference = CausalLMActor(GPT(V, P + T), temperature=0.7)
    stack = KLConstrainedTransform(actor, 0.1, estimator="exact", reference=FrozenActor(reference))
    batch = sample(actor, eos_token=eos_token)
    step = stack(batch)["next"]
    policy, ref = teacher_forced(actor, batch), teacher_forced(reference, batch)
    kl = (policy.exp() * (policy - ref)).sum(-1, keepdim=True)
    mask = batch["collector", "mask"][..., None]
    assert_close(step["kl_estimate"], torch.where(mask, kl, 0.0), rtol=0, atol=1e-4)
    # The penalty is k1, as with every estimator.
    assert_close(
        step["kl"].sum(), (policy - ref).gather(-1, batch["action"][..., None])[mask].sum()
    )


def test_without_them_the_batch_has_none(actor):
    batch = sample_responses(actor, torch.zeros(2, P, dtype=torch.int64), T, pad_token=0)
    assert "logits" not in batch
