"""GPT against another library's transformer; its heads in both of TorchRL's modes."""

import copy
import json
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.gpt import GPT, GPTActor, GPTCritic, GPTRewardModel

PROMPT, LENGTH, SEPARATOR = 4, 9, 10  # a text: prompt, separator, response


def assert_same(actual, expected):
    """What both modes promise in float32: 1e-5 (nats, for log-probabilities)."""
    assert_close(actual, expected, atol=1e-5, rtol=0.0)


def sharp(module, seed=0):
    """Weights far from GPT-2's small ones, under which every prediction is nearly uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def blocks_of(gpt) -> list[Any]:
    return list(gpt.blocks)


def make_texts(n, seed=0):
    texts = torch.randint(10, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
    texts[:, PROMPT] = SEPARATOR
    return texts


def states_of(texts) -> Any:
    """All states of each text, the finished one too: (n, 5) states."""
    position = torch.arange(PROMPT + 1, LENGTH + 1).expand(len(texts), -1)
    unwritten = torch.arange(LENGTH) >= position[..., None]
    tokens = texts[:, None].expand(-1, position.shape[1], -1).masked_fill(unwritten, SEPARATOR)
    return TensorDict(tokens=tokens, position=position, batch_size=position.shape)


def trajectories(texts) -> Any:
    """What a collector returns for the texts: [n, 4], the last dimension named "time"."""
    states = states_of(texts)
    batch, following = states[:, :-1].clone(), states[:, 1:].clone()
    ended = (following["position"] == LENGTH).unsqueeze(-1)
    first_digit_odd = (texts[:, PROMPT + 1] % 2 == 1)[:, None, None]
    following.update({"done": ended, "terminated": ended, "reward": (ended & first_digit_odd) * 1.0})
    batch["action"] = texts[:, PROMPT + 1 :].clone()
    batch["next"] = following
    batch.names = [None, "time"]
    return batch


def make_actor(**kwargs):
    return GPTActor(sharp(GPT(11, 8)), **kwargs)


def make_critic():
    return GPTCritic(sharp(GPT(11, 9, n_out=1), seed=1))


def logits_of(actor, states, recurrent):
    with set_recurrent_mode(recurrent):
        return actor.get_dist(states.select("tokens", "position")).logits


class TestGPT:
    def test_equals_torch_transformer(self):
        gpt = sharp(GPT(11, 8, n_layer=2)).double()
        layer = nn.TransformerEncoderLayer(48, 3, 192, 0.0, nn.GELU("tanh"), batch_first=True, norm_first=True)
        other = nn.TransformerEncoder(layer, 2, norm=gpt.norm, enable_nested_tensor=False).double()
        for ours, theirs in zip(blocks_of(gpt), cast("Any", other.layers), strict=True):
            theirs.self_attn.in_proj_weight = ours.attention.query_key_value.weight
            theirs.self_attn.in_proj_bias = ours.attention.query_key_value.bias
            theirs.self_attn.out_proj = ours.attention.project
            theirs.norm1, theirs.norm2 = ours.attention_norm, ours.mlp_norm
            theirs.linear1, theirs.linear2 = ours.expand, ours.project
        tokens = make_texts(5)[:, :7]
        embedded = gpt.token_embedding(tokens) + gpt.position_embedding(torch.arange(7))
        mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
        assert_close(gpt(tokens), gpt.head(other(embedded, mask=mask)))

    def test_causal(self):
        gpt, tokens = sharp(GPT(11, 8)), make_texts(1)[:, :8]
        changed = tokens.clone()
        changed[:, 5] = (changed[:, 5] + 1) % 10
        before, after = gpt(tokens), gpt(changed)
        assert_close(after[:, :5], before[:, :5], rtol=0.0, atol=0.0)
        assert ((after - before)[:, 5:].abs().amax(-1) > 0.01).all()

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)])
    def test_leading_dimensions(self, shape):
        gpt = sharp(GPT(11, 8, n_out=2))
        n = torch.Size(shape).numel()
        tokens = make_texts(n)[:, :6]
        output = gpt(tokens.view(*shape, 6))
        assert output.shape == (*shape, 6, 2)
        rows = [gpt(row) for row in tokens]
        assert_close(output.reshape(-1, 6, 2), torch.stack(rows) if n else torch.empty(0, 6, 2))
        assert gpt.attention_maps(tokens.view(*shape, 6)).shape == (*shape, 3, 3, 6, 6)

    def test_gpt2_initialisation(self):
        torch.manual_seed(0)
        n_layer = 4
        for name, weight in GPT(500, 200, n_layer=n_layer, n_head=4, n_embd=128).named_parameters():
            if name.endswith("bias"):
                assert (weight == 0).all(), name
            elif "norm" in name:
                assert (weight == 1).all(), name
            else:
                std = 0.02 / (2 * n_layer) ** 0.5 if name.endswith("project.weight") else 0.02
                # The standard error of a standard deviation over n normal draws: std / sqrt(2 n).
                error = std / (2 * weight.numel()) ** 0.5
                assert abs(weight.std().item() - std) < 5 * error, name
                assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5, name

    def test_attention_maps_are_those_of_the_forward_pass(self):
        gpt, tokens = sharp(GPT(11, 8)).double(), make_texts(4)[:, :8]
        seen = []
        for block in blocks_of(gpt):
            block.attention.register_forward_hook(lambda m, x, y: seen.append((m, x[0], y)))
        gpt(tokens)
        maps = gpt.attention_maps(tokens)
        assert maps.shape == (4, 3, 3, 8, 8)
        for layer, (attention, x, expected) in enumerate(seen[:3]):
            value = attention.query_key_value(x)[..., 96:].unflatten(-1, (3, 16))
            mixed = torch.einsum("nhts,nshd->nthd", maps[:, layer], value)
            assert_close(attention.project(mixed.flatten(2)), expected)

    def test_attention_maps_are_causal_distributions(self):
        maps = sharp(GPT(11, 8)).double().attention_maps(make_texts(4)[:, :8])
        assert_close(maps.sum(-1), torch.ones(4, 3, 3, 8, dtype=torch.float64))
        assert (maps.triu(1) == 0).all()
        assert (maps.tril() >= 0).all()
        assert not maps.requires_grad

    def test_dropout(self):
        tokens = make_texts(4)[:, :8]
        gpt = sharp(GPT(11, 8, dropout=0.2))
        assert (gpt(tokens) - gpt(tokens)).abs().max() > 0.01
        same = sharp(GPT(11, 8))
        assert_close(same(tokens), same(tokens), rtol=0.0, atol=0.0)
        assert_close(gpt.eval()(tokens), same(tokens))

    @pytest.mark.parametrize("part", ["embedding", "attention", "residual"])
    def test_dropout_acts_everywhere(self, part):
        gpt, tokens = sharp(GPT(11, 8, n_layer=1, dropout=0.5)), make_texts(4)[:, :8]
        block = blocks_of(gpt)[0]
        if part != "embedding":
            gpt.dropout.p = 0.0
        if part != "attention":
            block.attention.dropout = 0.0
        if part != "residual":
            block.dropout.p = 0.0
        assert (gpt(tokens) - gpt(tokens)).abs().max() > 0.01

    @pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")
    def test_compiles_without_graph_break(self):
        gpt, tokens = sharp(GPT(11, 8)), make_texts(4)[:, :8]
        compiled = torch.compile(gpt, fullgraph=True, backend="eager")
        assert_close(compiled(tokens), gpt(tokens))

    @pytest.mark.parametrize(
        ("kwargs", "error", "text"),
        [
            ({"vocab_size": 0}, ValueError, "`vocab_size` must be at least 1, got 0"),
            ({"block_size": -1}, ValueError, "`block_size` must be at least 1, got -1"),
            ({"n_layer": 0}, ValueError, "`n_layer` must be at least 1, got 0"),
            ({"n_out": 0}, ValueError, "`n_out` must be at least 1, got 0"),
            ({"n_head": 5}, ValueError, "`n_embd` must be a multiple of `n_head`, got 48 and 5"),
            ({"n_embd": 48.0}, TypeError, "`n_embd` must be an int, got float"),
            ({"n_layer": True}, TypeError, "`n_layer` must be an int, got bool"),
            ({"dropout": 1.0}, ValueError, r"`dropout` must lie in \[0, 1\), got 1.0"),
        ],
    )
    def test_bad_sizes(self, kwargs, error, text):
        with pytest.raises(error, match=text):
            GPT(**{"vocab_size": 11, "block_size": 8, **kwargs})

    @pytest.mark.parametrize(
        ("tokens", "error", "text"),
        [
            (torch.zeros(2, 9).long(), ValueError, r"`block_size` = 8 .* got shape \(2, 9\)"),
            (torch.zeros(2, 0).long(), ValueError, r"must have 1 to .* got shape \(2, 0\)"),
            (torch.tensor(3), ValueError, r"got shape \(\)"),
            (torch.zeros(2, 8), TypeError, r"`tokens` must be int64 or int32, got torch.float32"),
            (torch.tensor([3, 11]), ValueError, r"must lie in 0..10, got 3 to 11"),
            (torch.tensor([-1, 4]), ValueError, r"must lie in 0..10, got -1 to 4"),
        ],
    )
    def test_bad_tokens(self, tokens, error, text):
        gpt = GPT(11, 8)
        for call in (gpt, gpt.attention_maps):
            with pytest.raises(error, match=text):
                call(tokens)


class TestPretrained:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_round_trip_is_bit_exact(self, tmp_path, dtype):
        gpt = sharp(GPT(12, 10, n_layer=2, n_head=2, n_embd=8, n_out=1, dropout=0.1)).to(dtype)
        gpt.save_pretrained(tmp_path / "new" / "folder")
        rng = torch.get_rng_state()
        same = GPT.from_pretrained(str(tmp_path / "new" / "folder"))
        assert torch.equal(torch.get_rng_state(), rng)
        assert same.config == gpt.config
        assert not same.training
        assert all(parameter.requires_grad for parameter in same.parameters())
        assert_close(dict(same.state_dict()), dict(gpt.state_dict()), rtol=0.0, atol=0.0)
        tokens = make_texts(3)
        assert_close(same(tokens), gpt.eval()(tokens), rtol=0.0, atol=0.0)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_missing_file(self, tmp_path, name):
        GPT(11, 8).save_pretrained(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"`folder` must hold .*{name} is not there"):
            GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"class": "Elephant"}, "`class` must be 'GPT', got 'Elephant'"),
            ({"n_header": 3}, "its keys must be class and .*'n_header'"),
            ({"n_head": 0}, "`n_head` must be at least 1, got 0"),
            ({"n_embd": "48"}, "`n_embd` must be an int, got str"),
            ({"block_size": 9}, "holds no valid GPT.*size mismatch"),
            ({"n_layer": 2}, "holds no valid GPT.*Unexpected key"),
        ],
    )
    def test_bad_config(self, tmp_path, change, text):
        GPT(11, 8).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(ValueError, match=f"(?s){text}"):
            GPT.from_pretrained(tmp_path)

    def test_missing_key_is_not_filled_by_a_default(self, tmp_path):
        GPT(11, 8, n_head=6).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        del config["n_head"]
        file.write_text(json.dumps(config))
        with pytest.raises(ValueError, match="its keys must be"):
            GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "text"),
        [
            ("config.json", b"{", "holds no valid GPT: Expecting"),
            ("config.json", b"[]", "`class` must be 'GPT', got None"),
            ("model.safetensors", b"no tensors", "holds no valid GPT"),
        ],
    )
    def test_damaged_file(self, tmp_path, name, content, text):
        GPT(11, 8).save_pretrained(tmp_path)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=text):
            GPT.from_pretrained(tmp_path)

    def test_subclass_is_another_class(self, tmp_path):
        class Bigger(GPT):
            pass

        Bigger(11, 8).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="`class` must be 'GPT', got 'Bigger'"):
            GPT.from_pretrained(tmp_path)
        assert type(Bigger.from_pretrained(tmp_path)) is Bigger


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
    blocks, rows = actor[0].module.gpt.blocks, []
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
            value = GPTCritic(gpt)(states.clone())["state_value"]
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
            torch.autograd.grad((logits_of(actor, states, mode) * weight).sum(), parameters) for mode in (False, True)
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
            ((2, 9), [5, 10], ValueError, r"must lie in 0..9, .* got 5 to 10: it counts"),
            ((2, 9), [-1, 5], ValueError, r"must lie in 0..9, .* got -1 to 5"),
            ((2, 12), [5, 10], ValueError, r"at most `block_size` = 8, got 10: the text is longer"),
        ],
    )
    def test_bad_states(self, tokens, position, error, text):
        state = {"tokens": torch.zeros(tokens).long(), "position": torch.tensor(position)}
        with pytest.raises(error, match=text):
            make_actor()(TensorDict(state))

    def test_a_critic_values_no_text_that_it_cannot_read(self):
        critic = GPTCritic(GPT(11, 8, n_out=1))
        with pytest.raises(ValueError, match="`position` must be at most `block_size` = 8, got 9"):
            critic(states_of(make_texts(2)))


class TestHeads:
    def test_actor_keys(self):
        actor = make_actor(in_keys=[("obs", "tokens"), ("obs", "position")], action_key=("agents", "action"))
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
        with set_exploration_type(ExplorationType.RANDOM):
            actions = actor(state.expand(n).clone())["action"]
        frequency = torch.bincount(actions, minlength=11) / n
        probs = logits_of(actor, state, False).softmax(-1)
        assert ((frequency - probs).abs() < 5 * (probs * (1 - probs) / n).sqrt() + 1 / n).all()

    def test_copy_state_dict_and_dtype(self):
        actor, states = make_actor(), ordered()
        expected = logits_of(actor, states, False)
        twin = copy.deepcopy(actor)
        fresh = GPTActor(GPT(11, 8))
        fresh.load_state_dict(actor.state_dict())
        sharp(actor, seed=9)
        assert_close(logits_of(twin, states, False), expected)
        assert_close(logits_of(fresh, states, False), expected)
        doubled = logits_of(twin.to(torch.float64), states, True)
        assert doubled.dtype == torch.float64
        assert_same(doubled.float(), expected)

    def test_reward_model(self):
        gpt, texts = sharp(GPT(12, 10, n_out=1)), make_texts(6)
        model = GPTRewardModel(gpt)
        expected = gpt(torch.cat([texts, torch.full((6, 1), 11)], dim=1))[:, -1, 0]
        assert_close(model(texts), expected)
        assert_same(model(texts.view(2, 3, 9)), expected.view(2, 3))
        assert_same(model(texts[0]), expected[0])
        nested = GPTRewardModel(gpt, in_keys=[("a", "text")], out_keys=["b"], end_token=3)
        out = nested(TensorDict(a={"text": texts[:, :5]}, batch_size=[6]))
        ended = torch.cat([texts[:, :5], torch.full((6, 1), 3)], dim=1)
        assert_close(out["b"], gpt(ended)[:, -1, 0])

    def test_bad_gpts(self):
        with pytest.raises(ValueError, match=r"n_out from 2 to vocab_size = 11.*got n_out = 1:"):
            GPTActor(GPT(11, 8, n_out=1))
        with pytest.raises(ValueError, match="got n_out = 12: a critic's GPT cannot act"):
            GPTActor(GPT(11, 8, n_out=12))
        for head in (GPTCritic, GPTRewardModel):
            with pytest.raises(ValueError, match="must have one output, got n_out = 11"):
                head(GPT(11, 9))
        for end_token in (-1, 12):
            with pytest.raises(ValueError, match=rf"must lie in 0..11, got {end_token}: build"):
                GPTRewardModel(GPT(12, 10, n_out=1), end_token=end_token)

    @pytest.mark.parametrize("shape", [(2, 10), ()])
    def test_reward_model_needs_room_for_the_end_token(self, shape):
        with pytest.raises(ValueError, match=r"at most `block_size` - 1 = 9, since"):
            GPTRewardModel(GPT(12, 10, n_out=1))(torch.zeros(shape).long())


def scored_batch(actor, critic, **kwargs) -> Any:
    """Trajectories with old log-probs (of another policy) and the advantage by GAE."""
    batch = trajectories(make_texts(6))
    old = GPTActor(sharp(GPT(11, 8), seed=7))
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
        assert_close(critic(states)["state_value"].reshape(6, 4, 1), expected["next", "state_value"])

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
        monkeypatch.setattr("torchrl_kl.gpt.recurrent_mode", lambda: False)
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
        reward_model = GPTRewardModel(sharp(GPT(12, 10, n_out=1)))
        env = DigitLanguageEnv(batch_size=[3], seed=0, reward_fn=reward_model)
        torch.manual_seed(0)
        collector = Collector(env, actor, frames_per_batch=18, total_frames=36, auto_register_policy_transforms=False)
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
