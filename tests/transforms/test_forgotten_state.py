"""A recurrent policy in an env without a place for its state, which it forgets at each step."""

import pytest

from tests.helpers import WalkEnv, make_actor, memory_of, play, with_transforms
from torchrl_kl import KLConstrainedTransform


class TestForgottenState:
    @pytest.mark.parametrize("kind", ["lstm", "gru"])
    @pytest.mark.parametrize("place", ["env", "batch"])
    @pytest.mark.parametrize("remembers", [False, True])
    def test_it_is_said_once(self, kind, place, remembers):
        actor = make_actor(kind)
        stack = KLConstrainedTransform(actor, 0.1)
        memory = memory_of(actor)[: None if remembers else 1]
        env = with_transforms(WalkEnv((8,)), *memory, *([stack] if place == "env" else []))
        score = (lambda batch: batch) if place == "env" else stack
        if remembers:
            assert score(play(env, actor, 40))["next", "kl"].abs().max() < 1e-5
            return
        said = "same weights, and the data lacks the recurrent state .*make_tensordict_primer"
        with pytest.warns(UserWarning, match=said) as caught:
            batch = score(play(env, actor, 40))
        assert len(caught) == 1
        assert batch["next", "kl"].abs().mean() > 0.02

    def test_a_state_that_was_left_out_of_the_batch(self):
        actor = make_actor("lstm")
        batch = play(with_transforms(WalkEnv((8,)), *memory_of(actor)), actor, 40)
        batch = batch.exclude("h", "c", ("next", "h"), ("next", "c"))
        batch = KLConstrainedTransform(actor, 0.1)(batch)  # warnings are errors
        assert batch["next", "kl"].abs().max() < 1e-5
