"""Scoring a few rows of a batch at a time."""

import pytest
import torch
from torch.testing import assert_close

from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform
from torchrl_kl.envs import DigitLanguageEnv


def digit_actor(seed):
    torch.manual_seed(seed)
    return CausalLMActor(GPT(11, 8))


class TestChunks:
    @pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
    @pytest.mark.parametrize("flat", [False, True])
    def test_rows_scored_a_few_at_a_time_give_the_same(self, estimator, flat):
        actor, reference = digit_actor(0), digit_actor(1)
        batch = DigitLanguageEnv(batch_size=(7,), seed=0).rollout(4, actor)
        batch = batch.reshape(-1) if flat else batch
        whole, parts = (
            KLConstrainedTransform(
                actor, 0.1, estimator=estimator, reference=reference, chunk_size=size
            )(batch)["next"]
            for size in (None, 3)
        )
        for key in ("kl", "ref_log_prob", "reward", *(["kl_estimate"] * (estimator != "k1"))):
            assert_close(parts[key], whole[key], atol=1e-6, rtol=0.0)

    def test_no_more_rows_are_read_at_a_time(self):
        actor = digit_actor(0)
        stack = KLConstrainedTransform(actor, 0.1, chunk_size=3)
        sizes = []
        stack.reference.actor.reader.lm.model.register_forward_pre_hook(
            lambda _, inputs: sizes.append(len(inputs[0]))
        )
        batch = DigitLanguageEnv(batch_size=(7,), seed=0).rollout(4, actor)
        stack(batch)
        assert sizes == [3, 3, 3, 1]  # the first time, it looks at the weights, too
        sizes.clear()
        stack(batch)
        assert sizes == [3, 3, 1]

    def test_it_must_be_positive(self):
        with pytest.raises(ValueError, match="`chunk_size` must be at least 1, .* got 0"):
            KLConstrainedTransform(digit_actor(0), 0.1, chunk_size=0)
