"""GPT against PyTorch's transformer, and its file on disk."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save
from torch import nn
from torch.testing import assert_close

from tests.gpt_helpers import blocks_of, make_texts, sharp
from torchrl_kl.language import GPT


class TestGPT:
    def test_equals_torch_transformer(self):
        gpt = sharp(GPT(11, 8, n_layer=2)).double()
        layer = nn.TransformerEncoderLayer(
            48, 3, 192, 0.0, nn.GELU("tanh"), batch_first=True, norm_first=True
        )
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
    @pytest.mark.parametrize("length", [1, 6])
    def test_leading_dimensions(self, shape, length):
        gpt = sharp(GPT(11, 8, n_out=2))
        n = torch.Size(shape).numel()
        tokens = make_texts(n)[:, :length]
        output = gpt(tokens.view(*shape, length))
        assert output.shape == (*shape, length, 2)
        rows = torch.stack([gpt(row) for row in tokens]) if n else torch.empty(0, length, 2)
        assert_close(output.reshape(-1, length, 2), rows)

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
        assert not maps.requires_grad
        assert (maps.triu(1) == 0).all()
        for layer, (attention, x, expected) in enumerate(seen[:3]):
            value = attention.query_key_value(x)[..., 96:].unflatten(-1, (3, 16))
            mixed = torch.einsum("nhts,nshd->nthd", maps[:, layer], value)
            assert_close(attention.project(mixed.flatten(2)), expected)

    def test_dropout(self):
        tokens = make_texts(4)[:, :8]
        gpt = sharp(GPT(11, 8, dropout=0.2))
        assert (gpt(tokens) - gpt(tokens)).abs().max() > 0.01
        same = sharp(GPT(11, 8))
        assert_close(same(tokens), same(tokens), rtol=0.0, atol=0.0)
        assert_close(gpt.eval()(tokens), same(tokens))

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
            (torch.zeros(2, 9).long(), ValueError, r"1 to `block_size` = 8, got shape \(2, 9\)"),
            (torch.zeros(2, 0).long(), ValueError, r"of 1 to .* got shape \(2, 0\)"),
            (torch.tensor(3), ValueError, r"got shape \(\)"),
            (torch.zeros(2, 8), TypeError, r"`tokens` must be int64 or int32, got torch.float32"),
            (torch.tensor([3, 11]), ValueError, r"must lie in 0..10, got 3 to 11"),
            (torch.tensor([-1, 4]), ValueError, r"must lie in 0..10, got -1 to 4"),
        ],
    )
    def test_bad_tokens(self, tokens, error, text):
        with pytest.raises(error, match=text):
            GPT(11, 8)(tokens)


@contextmanager
def full_disk(limit):
    """No file can grow beyond `limit` bytes, as on a disk that becomes full during a save."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def equal_models(one: GPT, other: GPT) -> bool:
    weights = one.state_dict(), other.state_dict()
    same = weights[0].keys() == weights[1].keys()
    return same and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Elephant(GPT):
    pass


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


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
        assert equal_models(same, gpt)
        tokens = make_texts(3)
        assert_close(same(tokens), gpt.eval()(tokens), rtol=0.0, atol=0.0)

    @pytest.mark.parametrize(
        ("damage", "text"),
        [
            (lambda file: file.write_bytes(b"no tensors"), "SafetensorError: .*[Hh]eader"),
            (lambda file: file.write_bytes(save({"x": torch.ones(1)})), "KeyError: 'config'"),
            (lambda _: Elephant(11, 8).save_pretrained(_.parent), "by the class Elephant"),
            (cut_off, "SafetensorError"),
        ],
    )
    def test_damaged_files(self, tmp_path, damage, text):
        GPT(11, 8).save_pretrained(tmp_path)
        damage(tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"must be an undamaged file that GPT\.save.*{text}"):
            GPT.from_pretrained(tmp_path)

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="must contain model.safetensors, but .* does"):
            GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize("limit", [0, 2000])
    def test_a_full_disk_leaves_the_old_model(self, tmp_path, limit):
        old = sharp(GPT(11, 8, n_head=3))
        old.save_pretrained(tmp_path)
        with full_disk(limit), pytest.raises(OSError, match="File too large"):
            GPT(11, 8, n_head=6).save_pretrained(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
        loaded = GPT.from_pretrained(tmp_path)
        assert loaded.config == old.config
        assert equal_models(loaded, old)

    def test_saves_over_an_older_model_and_one_that_was_killed(self, tmp_path):
        new = sharp(GPT(11, 8, n_head=6, n_layer=1), seed=1)
        GPT(11, 8).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors.unfinished").write_bytes(b"half of")
        new.save_pretrained(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
        loaded = GPT.from_pretrained(tmp_path)
        assert loaded.config == new.config
        assert equal_models(loaded, new)

    def test_tied_weights_are_equal_and_no_longer_tied(self, tmp_path):
        gpt = sharp(GPT(11, 10)).eval()
        gpt.head.weight = gpt.token_embedding.weight
        gpt.save_pretrained(tmp_path)
        same, tokens = GPT.from_pretrained(tmp_path), make_texts(3)
        assert_close(same(tokens), gpt(tokens), rtol=0.0, atol=0.0)
        assert same.head.weight is not same.token_embedding.weight
