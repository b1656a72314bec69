"""The heads of the GPT on single states and whole trajectories, and within TorchRL."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.modules import set_recurrent_mode
from torchrl.objectives.value import GAE

from tests.gpt_helpers import (
    LENGTH,
    PROMPT,
    SEPARATOR,
    assert_same,
    logits_of,
    make_actor,
    make_critic,
    make_texts,
    sharp,
    states_of,
    trajectories,
)
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic, CausalLMRewardModel


def ordered() -> Any:
    return states_of(make_texts(6))[:, :-1]


def several_responses_in_a_row() -> Any:
    states = ordered()
    return torch.cat([states[:3], states[3:]], dim=1)


def shuffled() -> Any:
    states = ordered().reshape(-1)
    return states[torch.randperm(24, generator=torch.Generator().manual_seed(3))]


def one_prompt_and_positions_that_continue() -> Any:
    """Two responses to one prompt: states 5, 6 of the first, then 7, 8 of the second."""
    texts = make_texts(1).expand(2, -1).clone()
    texts[1, PROMPT + 1 :] = (texts[0, PROMPT + 1 :] + 1) % 10
    states = states_of(texts)
    return torch.cat([states[0, :2], states[1, 2:4]])


def a_shorter_text_between_two_that_differ() -> Any:
    """Prefix of both its neighbours, and equal to the first in the padding too."""
    texts = make_texts(1).expand(2, -1).clone()
    texts[0, 6] = SEPARATOR
    states = states_of(texts)
    return torch.stack([states[0, 2], states[0, 1], states[1, 2]])


def padded_by_split_trajs() -> Any:
    states = ordered().clone()
    states[2:4, 2:] = states[2:4, 2:].apply(torch.zeros_like)
    return states


def with_extra_leading_dimensions() -> Any:
    states = states_of(make_texts(6))
    return torch.stack([states[:, :-1], states[:, 1:]]).reshape(2, 3, 2, 4)


LAYOUTS = [
    ordered,
    several_responses_in_a_row,
    shuffled,
    one_prompt_and_positions_that_continue,
    a_shorter_text_between_two_that_differ,
    padded_by_split_trajs,
    with_extra_leading_dimensions,
]


def rows_read(actor, states, recurrent):
    """How many rows the GPT was run on, after its first texts."""
    logits_of(actor, states, recurrent)
    blocks, rows = actor[0].module.lm.model.blocks[0], []
    handle = blocks.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    logits_of(actor, states, recurrent)
    handle.remove()
    return rows


class TestStates:
    @pytest.mark.parametrize("recurrent", [False, True])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_output_at_the_last_real_token(self, layout, recurrent):
        """Against the bare GPT on each text without its padding."""
        gpt, states = sharp(GPT(11, 9, n_out=1)), layout()
        with set_recurrent_mode(recurrent):
            value = CausalLMCritic(gpt)(states.clone())["state_value"]
        flat = states.reshape(-1)
        lengths = flat["position"].clamp(min=1).tolist()
        expected = [gpt(text[:n])[-1] for text, n in zip(flat["tokens"], lengths, strict=True)]
        assert_same(value.reshape(-1, 1), torch.stack(expected))

    def test_a_trajectory_costs_one_row(self):
        actor = make_actor()
        assert rows_read(actor, ordered(), recurrent=True) == [6]
        assert rows_read(actor, several_responses_in_a_row(), recurrent=True) == [6]
        assert rows_read(actor, ordered(), recurrent=False) == [24]

    @pytest.mark.parametrize("recurrent", [False, True])
    def test_padding_is_never_looked_at(self, recurrent):
        actor, states = make_actor(), ordered()
        other = states.clone()
        unwritten = torch.arange(LENGTH) >= states["position"][..., None]
        other["tokens"] = torch.where(unwritten, make_texts(24, 5).view(6, 4, 9), states["tokens"])
        expected = logits_of(actor, states, recurrent)
        assert_same(logits_of(actor, other, recurrent), expected)

    @pytest.mark.parametrize("recurrent", [False, True])
    def test_one_state_and_no_state(self, recurrent):
        actor, states = make_actor(), ordered()
        one = logits_of(actor, states[0, 1], recurrent)
        assert_same(one, logits_of(actor, states, False)[0, 1])
        assert logits_of(actor, states[:0], recurrent).shape == (0, 4, 11)

    def test_finished_text_needs_no_next_token(self):
        actor, states = make_actor(), states_of(make_texts(3))
        step, recurrent = (logits_of(actor, states, mode) for mode in (False, True))
        assert_same(step[:, -1], step[:, -2])
        assert_same(recurrent, step)

    @pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")
    @pytest.mark.parametrize("recurrent", [False, True])
    def test_compiles_without_graph_break(self, recurrent):
        critic, states = make_critic(), ordered()
        compiled = torch.compile(critic.module, fullgraph=True, backend="eager")
        with set_recurrent_mode(recurrent):
            value = compiled(states["tokens"], states["position"])
        assert_same(value, critic(states)["state_value"])

    @pytest.mark.parametrize(
        ("tokens", "position", "error", "text"),
        [
            ((2, 9), [[5], [6]], ValueError, r"one number per text.* got \(2, 1\) and \(2, 9\)"),
            ((), 1, ValueError, r"got \(\) and \(\)"),
            ((2, 9), [5.0, 6.0], TypeError, "`position` must be int64 or int32, got torch.float32"),
            (
                (2, 9),
                [5, 10],
                ValueError,
                r"must lie in 0..8, got 5 to 10: .* have length 9 and .* at most 8",
            ),
            ((2, 9), [-1, 5], ValueError, r"must lie in 0..8, got -1 to 5"),
            ((2, 12), [5, 10], ValueError, r"must lie in 0..8, got 5 to 10: .* have length 12 and"),
        ],
    )
    def test_bad_states(self, tokens, position, error, text):
        state = {"tokens": torch.zeros(tokens).long(), "position": torch.tensor(position)}
        with pytest.raises(error, match=text):
            make_actor()(TensorDict(state))


class TestHeads:
    def test_actor_keys(self):
        actor = make_actor(
            in_keys=[("obs", "tokens"), ("obs", "position")], action_key=("agents", "action")
        )
        states = TensorDict(obs=ordered(), batch_size=[6, 4])
        out = actor(states.clone())
        assert actor.log_prob_keys == [("agents", "action_log_prob")]
        expected = logits_of(make_actor(), ordered(), False).log_softmax(-1)
        assert_close(out["agents", "action"], expected.argmax(-1))
        assert_close(out["agents", "action_log_prob"], expected.amax(-1))
        silent = make_actor(return_log_prob=False)(ordered())
        assert set(silent.keys()) == {"tokens", "position", "logits", "action"}

    def test_reward_model(self):
        gpt, texts = sharp(GPT(12, 10, n_out=1)), make_texts(6)
        model = CausalLMRewardModel(gpt, end_token=11)
        expected = gpt(torch.cat([texts, torch.full((6, 1), 11)], dim=1))[:, -1, 0]
        assert_close(model(texts), expected)
        assert_same(model(texts.view(2, 3, 9)), expected.view(2, 3))
        assert_same(model(texts[0]), expected[0])
        nested = CausalLMRewardModel(gpt, in_keys=[("a", "text")], out_keys=["b"], end_token=3)
        out = nested(TensorDict(a={"text": texts[:, :5]}, batch_size=[6]))
        ended = torch.cat([texts[:, :5], torch.full((6, 1), 3)], dim=1)
        assert_close(out["b"], gpt(ended)[:, -1, 0])

    def test_bad_gpts(self):
        with pytest.raises(ValueError, match=r"from 2 to vocab_size = 11.*got 1 outputs:"):
            CausalLMActor(GPT(11, 8, n_out=1))
        with pytest.raises(ValueError, match="got 12 outputs: a critic's model cannot act"):
            CausalLMActor(GPT(11, 8, n_out=12))
        for head in (CausalLMCritic, CausalLMRewardModel):
            options: Any = {"end_token": 3} if head is CausalLMRewardModel else {}
            with pytest.raises(ValueError, match="must have one output per position, got 11"):
                head(GPT(11, 9), **options)
        for end_token in (-1, 12):
            with pytest.raises(
                ValueError, match=rf"in the vocabulary of 12 tokens, got {end_token}: build"
            ):
                CausalLMRewardModel(GPT(12, 10, n_out=1), end_token=end_token)

    @pytest.mark.parametrize("shape", [(2, 10), ()])
    def test_reward_model_needs_room_for_the_end_token(self, shape):
        with pytest.raises(ValueError, match=r"at most 9, since the end token"):
            CausalLMRewardModel(GPT(12, 10, n_out=1), end_token=11)(torch.zeros(shape).long())


def scored_batch(actor, critic, **kwargs) -> Any:
    """Trajectories with old log-probs (of another policy) and the advantage by GAE."""
    batch = trajectories(make_texts(6))
    old = CausalLMActor(sharp(GPT(11, 8), seed=7))
    with torch.no_grad():
        batch["action_log_prob"] = old.log_prob(batch.select("tokens", "position", "action"))
        GAE(gamma=1.0, lmbda=0.9, value_network=critic, **kwargs)(batch)
    return batch


def losses(loss, batch):
    out = loss(batch.clone())
    return torch.stack([out[k] for k in ("loss_objective", "loss_critic", "loss_entropy")])


class TestInTorchRL:
    def test_gae_in_recurrent_mode(self):
        actor, critic = make_actor(), make_critic()
        expected = scored_batch(actor, critic, deactivate_vmap=True, shifted=False)
        with set_recurrent_mode(True):
            batch = scored_batch(actor, critic, deactivate_vmap=True, shifted=False)
        for key in ("advantage", "value_target", ("next", "state_value")):
            assert_same(batch[key], expected[key])
        states = expected["next"].reshape(-1)
        assert_close(
            critic(states)["state_value"].reshape(6, 4, 1), expected["next", "state_value"]
        )
