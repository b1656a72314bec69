"""GPT against PyTorch's transformer, and its files on disk."""

import json
import shutil
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from tests.gpt_helpers import blocks_of, make_texts, sharp
from torchrl_kl.language import GPT
from torchrl_kl.language.blocks import SMALL_PRODUCT, Block


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
        maps = gpt.attention_maps(tokens.view(*shape, length))
        assert maps.shape == (*shape, 3, 3, length, length)

    @pytest.mark.parametrize("n_embd", [6, SMALL_PRODUCT])  # attention of one position has two ways
    def test_no_text_of_one_token(self, n_embd):
        gpt = GPT(11, 8, n_layer=1, n_head=1, n_embd=n_embd)
        assert gpt(torch.zeros(0, 1, dtype=torch.long)).shape == (0, 1, 11)

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
            gpt.dropout = 0.0
        if part != "attention":
            block.attention.dropout = 0.0
        if part != "residual":
            block.dropout = 0.0
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
            (torch.zeros(2, 9).long(), ValueError, r"1 to `block_size` = 8, got shape \(2, 9\)"),
            (torch.zeros(2, 0).long(), ValueError, r"of 1 to .* got shape \(2, 0\)"),
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


def edit_config(folder: Path, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_weights(folder: Path, edit):
    """Changes the weights file and the digest in the config, so that the two belong together."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)
    edit_config(folder, weights_sha256=sha256(file.read_bytes()).hexdigest())


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
        with pytest.raises(
            FileNotFoundError, match=f"`folder` must contain .*{name} does not exist"
        ):
            GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"class": "Elephant"}, "`class` must be 'GPT', got 'Elephant'"),
            ({"n_header": 3}, "its keys must be class and .*'n_header'"),
            ({"n_head": 0}, "`n_head` must be at least 1, got 0"),
            ({"n_embd": "48"}, "`n_embd` must be an int, got str"),
            ({"block_size": 9}, "does not contain a valid GPT.*size mismatch"),
            ({"n_out": 12}, "does not contain a valid GPT.*size mismatch"),
            ({"n_layer": 2}, "`n_layer` must be the 3 blocks of model.safetensors, got 2"),
            ({"n_layer": "3"}, "`n_layer` must be the 3 blocks of model.safetensors, got '3'"),
            ({"n_embd": 3 * 10**30}, "does not contain a valid GPT"),
            ({"n_head": None}, "its keys must be class and .*'n_head'.*, got"),
            ({"weights_sha256": None}, "its keys must be class and .*'weights_sha256'.*, got"),
        ],
    )
    def test_bad_config(self, tmp_path, change, text):
        GPT(11, 8).save_pretrained(tmp_path)
        edit_config(tmp_path, **change)
        with pytest.raises(ValueError, match=f"(?s){text}"):
            GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "text"),
        [
            ("config.json", b"{", "does not contain a valid GPT: Expecting"),
            ("config.json", b"[]", "`class` must be 'GPT', got None"),
            ("model.safetensors", b"no tensors", "is not the file that config.json was saved with"),
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

    def test_subclass_with_arguments_of_its_own_is_saved(self, tmp_path):
        class Wide(GPT):
            def __init__(self, factor: int):
                super().__init__(11, 8, n_embd=3 * factor)
                self.scale = nn.Parameter(torch.ones(factor))

        gpt = Wide(2)
        gpt.save_pretrained(tmp_path)
        assert_close(load_file(tmp_path / "model.safetensors"), dict(gpt.state_dict()))

    def test_weights_file_that_is_not_in_the_format(self, tmp_path):
        GPT(11, 8).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"no tensors")
        edit_config(tmp_path, weights_sha256=sha256(b"no tensors").hexdigest())
        with pytest.raises(ValueError, match="does not contain a valid GPT: .*[Hh]eader"):
            GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_files_of_two_saves_are_not_one_model(self, tmp_path, name):
        # The same sizes of the files and of the weights: only the digest tells the two apart.
        for seed, folder in enumerate(("one", "other")):
            sharp(GPT(11, 8), seed).save_pretrained(tmp_path / folder)
        shutil.copy(tmp_path / "other" / name, tmp_path / "one" / name)
        with pytest.raises(ValueError, match="is not the file that config.json was saved with"):
            GPT.from_pretrained(tmp_path / "one")

    @pytest.mark.parametrize("limit", [100, 2000])
    def test_failed_save_leaves_the_old_model(self, tmp_path, limit):
        """The config has about 200 bytes, so the disk is full before it or after it."""
        old = sharp(GPT(11, 8, n_head=3))
        old.save_pretrained(tmp_path)
        with full_disk(limit), pytest.raises(OSError, match="File too large"):
            GPT(11, 8, n_head=6).save_pretrained(tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        loaded = GPT.from_pretrained(tmp_path)
        assert loaded.config == old.config
        assert_close(dict(loaded.state_dict()), dict(old.state_dict()), rtol=0.0, atol=0.0)

    def test_saves_over_an_older_model(self, tmp_path):
        new = sharp(GPT(11, 8, n_head=6, n_layer=1), seed=1)
        for gpt in (GPT(11, 8), new):
            gpt.save_pretrained(tmp_path)
        loaded = GPT.from_pretrained(tmp_path)
        assert loaded.config == new.config
        assert_close(dict(loaded.state_dict()), dict(new.state_dict()), rtol=0.0, atol=0.0)

    def test_many_blocks_in_the_config_are_refused_before_they_are_built(
        self, tmp_path, monkeypatch
    ):
        GPT(11, 8).save_pretrained(tmp_path)
        edit_config(tmp_path, n_layer=20_000)
        built = "torchrl_kl.language.gpt.Block"
        monkeypatch.setattr(built, lambda *_: pytest.fail("a block was built"))
        with pytest.raises(ValueError, match="must be the 3 blocks .* got 20000"):
            GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("head.weight", torch.bfloat16), ("blocks.0.mlp_norm.bias", torch.int64)],
    )
    def test_weights_of_several_dtypes(self, tmp_path, name, dtype):
        gpt = GPT(11, 8)
        gpt.save_pretrained(tmp_path)

        def cast_one(weights):
            weights[name] = weights[name].to(dtype)

        edit_weights(tmp_path, cast_one)
        found = ", ".join(sorted([f"'{dtype}'", "'torch.float32'"]))
        text = rf"must share one floating-point dtype, got \[{found}\]"
        with pytest.raises(ValueError, match=text):
            GPT.from_pretrained(tmp_path)
        gpt.head.double()
        with pytest.raises(ValueError, match=r"got \['torch.float32', 'torch.float64'\]"):
            gpt.save_pretrained(tmp_path / "new")
        assert not list((tmp_path / "new").iterdir())

    @pytest.mark.parametrize(
        ("change", "names"),
        [
            (lambda gpt: setattr(gpt, "head", nn.Linear(48, 12, bias=False)), "'head.weight'"),
            (lambda gpt: setattr(gpt, "head", nn.Linear(48, 11)), "'head.bias'"),
            (lambda gpt: nn.utils.parametrizations.weight_norm(gpt.head), "'head.parametrizations"),
            (lambda gpt: gpt.blocks.append(Block(3, 3, 48, 0.0)), "'blocks.3.attention"),
            (lambda gpt: get_peft_model(gpt, LoraConfig(target_modules=["head"])), "'head.base_"),
        ],
    )
    def test_parts_that_could_not_be_loaded_are_not_saved(self, tmp_path, change, names):
        old, gpt = sharp(GPT(11, 8)), GPT(11, 8)
        old.save_pretrained(tmp_path)
        change(gpt)
        with pytest.raises(
            ValueError, match=rf"a GPT of its sizes, but \[{names}.* merge adapters"
        ):
            gpt.save_pretrained(tmp_path)
        assert_close(GPT.from_pretrained(tmp_path).state_dict(), old.state_dict())

    def test_tied_weights_are_equal_and_no_longer_tied(self, tmp_path):
        gpt = sharp(GPT(11, 10)).eval()
        gpt.head.weight = gpt.token_embedding.weight
        gpt.save_pretrained(tmp_path)
        same, tokens = GPT.from_pretrained(tmp_path), make_texts(3)
        assert_close(same(tokens), gpt(tokens), rtol=0.0, atol=0.0)
        assert same.head.weight is not same.token_embedding.weight

    def test_integer_weights(self, tmp_path):
        GPT(11, 8).save_pretrained(tmp_path)
        edit_weights(tmp_path, lambda w: w.update({name: w[name].long() for name in w}))
        with pytest.raises(ValueError, match=r"floating-point dtype, got \['torch.int64'\]"):
            GPT.from_pretrained(tmp_path)
