"""The heads of the GPT on single states and whole trajectories, and within TorchRL."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
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
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic, CausalLMRewardModel


def ordered() -> Any:
    return states_of(make_texts(6))[:, :-1]


def several_responses_in_a_row() -> Any:
    states = ordered()
    return torch.cat([states[:3], states[3:]], dim=1)


def cut_at_both_ends() -> Any:
    return several_responses_in_a_row()[:, 2:7]


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
    cut_at_both_ends,
    shuffled,
    one_prompt_and_positions_that_continue,
    a_shorter_text_between_two_that_differ,
    padded_by_split_trajs,
    with_extra_leading_dimensions,
]


def rows_read(actor, states, recurrent):
    """How many rows the GPT was run on."""
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

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_both_modes_give_the_same_log_probs(self, layout):
        actor, states = make_actor(), layout()
        step, recurrent = (logits_of(actor, states, mode) for mode in (False, True))
        assert step.shape == (*states.shape, 11)
        assert_same(recurrent, step)

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

    def test_gradients_are_the_same_in_both_modes(self):
        actor, states = make_actor().double(), several_responses_in_a_row()
        weight = torch.randn(*states.shape, 11, dtype=torch.float64)
        parameters = list(actor.parameters())
        step, recurrent = (
            torch.autograd.grad((logits_of(actor, states, mode) * weight).sum(), parameters)
            for mode in (False, True)
        )
        assert all(gradient.abs().max() > 1e-3 for gradient in step)
        assert_close(recurrent, step)

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

    def test_a_critic_values_no_text_that_it_cannot_read(self):
        critic = CausalLMCritic(GPT(11, 8, n_out=1))
        with pytest.raises(ValueError, match=r"`position` must lie in 0..8, got 5 to 9"):
            critic(states_of(make_texts(2)))


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

    def test_actor_samples_its_distribution(self):
        actor, n = make_actor(), 20_000
        state = ordered()[0, 0]
        torch.manual_seed(0)
        # In recurrent mode all these equal states share one row of the GPT.
        with set_exploration_type(ExplorationType.RANDOM), set_recurrent_mode(True):
            actions = actor(state.expand(n).clone())["action"]
        frequency = torch.bincount(actions, minlength=11) / n
        probs = logits_of(actor, state, False).softmax(-1)
        assert ((frequency - probs).abs() < 5 * (probs * (1 - probs) / n).sqrt() + 1 / n).all()

    def test_copy_state_dict_and_dtype(self):
        actor, states = make_actor(), ordered()
        expected = logits_of(actor, states, False)
        twin = copy.deepcopy(actor)
        fresh = CausalLMActor(GPT(11, 8))
        fresh.load_state_dict(actor.state_dict())
        sharp(actor, seed=9)
        assert_close(logits_of(twin, states, False), expected)
        assert_close(logits_of(fresh, states, False), expected)
        doubled = logits_of(twin.to(torch.float64), states, True)
        assert doubled.dtype == torch.float64
        assert_same(doubled.float(), expected)

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

    # Torch has no batching rule for this kernel and loops; the numbers are what counts here.
    @pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
    def test_gae_with_vmap(self):
        actor, critic = make_actor(), make_critic()
        expected = scored_batch(actor, critic, deactivate_vmap=True, shifted=False)
        with set_recurrent_mode(True):
            batch = scored_batch(actor, critic, deactivate_vmap=False, shifted=False)
        assert_same(batch["advantage"], expected["advantage"])

    def test_ppo_loss_is_that_of_single_steps(self, monkeypatch):
        actor, critic = make_actor(), make_critic()
        batch = scored_batch(actor, critic, deactivate_vmap=True, shifted=False)
        loss = ClipPPOLoss(actor, critic, normalize_advantage=False)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
        layouts = [batch, batch.reshape(-1), batch.reshape(-1)[order]]
        fast = [losses(loss, layout) for layout in layouts]
        monkeypatch.setattr("torchrl_kl.language.reader.recurrent_mode", lambda: False)
        for value, layout in zip(fast, layouts, strict=True):
            assert_same(value, losses(loss, layout))
            assert_same(value, fast[0])

    def test_ppo_updates_every_weight(self):
        actor, critic = make_actor(), make_critic()
        batch = scored_batch(actor, critic, deactivate_vmap=True, shifted=False)
        loss = ClipPPOLoss(actor, critic)
        before = [parameter.clone() for parameter in loss.parameters()]
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.01)
        out = loss(batch)
        (out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]).backward()
        optimizer.step()
        assert len(before) == 2 * len(list(actor.parameters()))
        for old, new in zip(before, loss.parameters(), strict=True):
            assert not torch.equal(old, new)

    def test_rollout_waits_for_rows_that_ended(self):
        actor, env = make_actor(), DigitLanguageEnv(batch_size=[2], seed=0)
        start: Any = env.reset()
        start["tokens"][0, 5:7], start["position"][0] = 3, 7  # Row 0 is two tokens ahead.
        rollout = env.rollout(
            10,
            actor,
            tensordict=start,
            auto_reset=False,
            break_when_any_done=False,
            break_when_all_done=True,
        )
        assert rollout["next", "position"][:, -1].tolist() == [LENGTH, LENGTH]
        assert rollout.shape == (2, 4)

    # TorchRL warns of its own classes when its collectors are imported.
    @pytest.mark.filterwarnings("ignore:Creating .*WeightUpdaterBase:DeprecationWarning")
    def test_collected_log_probs_are_found_again(self):
        from torchrl.collectors import Collector

        actor = make_actor()
        reward_model = CausalLMRewardModel(sharp(GPT(12, 10, n_out=1)), end_token=11)
        env = DigitLanguageEnv(batch_size=[3], seed=0, reward_fn=reward_model)
        torch.manual_seed(0)
        collector = Collector(
            env, actor, frames_per_batch=18, total_frames=36, auto_register_policy_transforms=False
        )
        # Six steps of texts with four tokens: rows end and begin inside a response.
        for batch in collector:
            recorded = batch["action_log_prob"]
            with set_recurrent_mode(True):
                again = actor.log_prob(batch.select("tokens", "position", "action"))
            assert_same(again, recorded)
            ended = batch["next", "done"].squeeze(-1)
            scores = reward_model(batch["next", "tokens"][ended])
            assert_same(batch["next", "reward"][ended].squeeze(-1), scores)
        collector.shutdown()
