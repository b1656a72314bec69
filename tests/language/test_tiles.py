"""Tiles of the head: the numbers and gradients of whole logits, for any model and caller."""

import copy
import gc
import math
import pickle
import weakref
from contextlib import contextmanager
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers
from tensordict import TensorDict
from torch.distributions import Categorical, kl_divergence
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import GRPOLoss

from tests.gpt_helpers import sharp
from tests.language.models import SIZES, random_texts, sample, seeded
from tests.language.test_causal_lm import TOKENS, Plain
from torchrl_kl import KLConstrainedTransform, KLMonitor, KLPenaltyLoss, TopKActor
from torchrl_kl.functional import kl_exact
from torchrl_kl.functional.tiles import TiledCategorical, figures
from torchrl_kl.language import GPT, CausalLMActor, ResponseKLTransform, as_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
CHUNK = 7
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 20}
FAMILIES: dict[str, Any] = {
    "tied": ("GPT2", GPT2),
    "llama": ("Llama", SIZES),
    "soft cap": ("Gemma2", {**SIZES, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "scaled": ("Granite", {**SIZES, "logits_scaling": 3.0}),
    "cohere": ("Cohere", {**SIZES, "logit_scale": 0.25}),
}


def make_model(name: str, seed: int = 0, lora: bool = False) -> Any:
    if name == "gpt":
        model: Any = GPT(11, 20, n_layer=2, n_head=4, n_embd=32)
    else:
        config, sizes = FAMILIES[name]
        config = getattr(transformers, f"{config}Config")(**{**TOKENS, "vocab_size": 11, **sizes})
        model = transformers.AutoModelForCausalLM.from_config(config)
    if lora:
        head = "head" if name == "gpt" else "lm_head"
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[head]))
    return sharp(model.double(), seed).eval()


@pytest.fixture(scope="module")
def batch() -> Any:
    actor = CausalLMActor(make_model("gpt", 3), return_logits=False)
    steps = sample(actor, random_texts(6)[:, :4])
    steps["advantage"] = torch.randn(6, 8, 1, generator=seeded(), dtype=torch.float64)
    return steps


def dist_of(actor: Any, batch: Any) -> Any:
    with set_recurrent_mode(True):
        return actor.get_dist(batch.select("tokens", "position"))


def gradients(value: torch.Tensor, module: Any) -> list[torch.Tensor]:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    found = torch.autograd.grad(value, weights, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]


def assert_equal(got: Any, expected: Any) -> None:
    """To 1e-12 of the largest number."""
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, rtol=0.0, atol=1e-12 * max(1.0, other.abs().max().item()))


def test_the_kl_of_half_precision_is_computed_in_float32():
    logits, other = torch.randn(2, 50, 11, generator=seeded())
    policy = Categorical(logits=logits.bfloat16())
    tile = lambda rows: Categorical(logits=rows)  # noqa: E731
    reference = TiledCategorical(other, tile, torch.Size([50]), 9, [False])
    kl = kl_exact(policy, reference)
    assert kl.dtype == torch.float32
    expected = kl_divergence(Categorical(logits=policy.logits.double()), Categorical(logits=other))
    assert_close(kl.double(), expected, rtol=0, atol=1e-5)


class Scorer(torch.nn.Module):
    """A CausalLMActor as GRPOLoss asks for its distributions, on batches (N, T) of steps."""

    def __init__(self, actor: CausalLMActor):
        super().__init__()
        self.actor, self.in_keys = actor, actor.in_keys

    def get_dist(self, tensordict: Any, logits_key: Any) -> Any:
        dist: Any = dist_of(self.actor, tensordict)
        dist.mask = tensordict["collector", "mask"]
        return dist


def losses(actor: Any, reference: Any, batch: Any) -> dict[str, torch.Tensor]:
    found = {}
    for gradient in ("step", "sequence", "k2"):
        loss = KLPenaltyLoss(actor, 0.5, reference=reference, gradient=gradient)  # type: ignore[arg-type]
        found[gradient] = loss(batch)["loss_kl"]
    weights = KLPenaltyLoss(actor, 0.5, reference=reference, gradient="step", weights="trajectory")
    found["step, weighted"] = weights(batch)["loss_kl"]
    ppo = ClipPPOLoss(actor, None, entropy_coeff=0.1)(batch)  # type: ignore[arg-type]
    found["ppo"] = ppo["loss_objective"] + ppo["loss_entropy"]
    return found


class TestAgainstTheWhole:
    @pytest.mark.parametrize("lora", [False, True])
    @pytest.mark.parametrize("name", ["gpt", *FAMILIES])
    def test_losses_and_gradients(self, name, lora, batch):
        model, other = make_model(name, 0, lora), make_model(name, 1, lora)
        found = []
        for chunk in (None, CHUNK):
            actor, reference = (CausalLMActor(m, head_chunk=chunk) for m in (model, other))
            assert isinstance(dist_of(actor, batch), TiledCategorical) == (chunk == CHUNK)
            values = losses(actor, reference, batch)
            found.append((values, {key: gradients(x, model) for key, x in values.items()}))
        (whole, of_whole), (tiled, of_tiles) = found
        assert_equal(tiled.values(), whole.values())
        for key, expected in of_whole.items():
            assert_equal(of_tiles[key], expected)
            assert any(gradient.any() for gradient in expected)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_the_distribution(self, temperature, batch):
        model = make_model("llama")
        whole, tiled = (
            dist_of(CausalLMActor(model, head_chunk=chunk, temperature=temperature), batch)
            for chunk in (None, CHUNK)
        )
        action = batch["action"]
        assert_equal([tiled.entropy()], [whole.entropy()])
        pairs = [(d.log_prob(action), d.entropy(), d.logits) for d in (tiled, whole)]
        assert_equal(*pairs)
        assert tiled.mode.equal(whole.mode)
        assert tiled.deterministic_sample.equal(whole.deterministic_sample)
        drawn = []
        for dist in (tiled, whole):
            torch.manual_seed(0)
            drawn.append(dist.sample())
        assert drawn[0].equal(drawn[1])
        assert tiled.sample(torch.Size([3, 2])).shape == (3, 2, *action.shape)

    def test_the_kl_of_any_pair(self, batch):
        model, other = make_model("gpt"), make_model("gpt", 1)
        actors = (CausalLMActor(m, head_chunk=None) for m in (model, other))
        policy, reference = (dist_of(actor, batch) for actor in actors)
        expected = kl_divergence(
            Categorical(logits=policy.logits), Categorical(logits=reference.logits)
        )
        tiles = [dist_of(CausalLMActor(m, head_chunk=CHUNK), batch) for m in (model, other)]
        for one in (policy, tiles[0]):
            for two in (reference, tiles[1]):
                kl = kl_exact(one, two)
                assert_equal([kl], [expected])
                got, true = (gradients(x.sum(), other) for x in (kl, expected))
                assert_equal(got, true)

    def test_actions_that_cannot_be_drawn(self, batch):
        model, other = make_model("gpt"), make_model("gpt", 1)

        def ban(token: int) -> Any:
            mask = torch.zeros(11, dtype=torch.float64)
            mask[token] = -torch.inf
            return lambda _, inputs, output: output + mask

        policies = []
        for banned in (5, 6):
            pair = []
            for chunk in (None, CHUNK):
                actor: Any = CausalLMActor(copy.deepcopy(model), head_chunk=chunk)
                actor.reader.lm.model.head.register_forward_hook(ban(5))
                reference: Any = CausalLMActor(copy.deepcopy(other), head_chunk=chunk)
                reference.reader.lm.model.head.register_forward_hook(ban(banned))
                policy = dist_of(actor, batch)
                kl, entropy = kl_exact(policy, dist_of(reference, batch)), policy.entropy()
                value = kl[kl.isfinite()].sum() + entropy.sum()
                pair.append((kl, entropy, *gradients(value, actor)))
            assert_close(pair[1], pair[0], rtol=1e-12, atol=1e-12)
            policies.append(pair[1][0])
        assert policies[0].isfinite().all()
        assert (policies[1] == torch.inf).all()


class TestCallers:
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact", "top_k"])
    def test_transforms(self, estimator, batch, monkeypatch):
        monkeypatch.delattr(TiledCategorical, "logits")  # nobody asks for all of them
        model, other = make_model("llama"), make_model("llama", 1)
        full = batch["tokens"][:, 0]
        texts = TensorDict(tokens={"full": full, "prompt": full[:, :4]}, batch_size=6)
        texts["next"] = TensorDict(reward=torch.zeros(6, 1, dtype=torch.float64), batch_size=6)
        found = []
        for chunk in (None, CHUNK):
            response = ResponseKLTransform(
                model, 0.1, reference=other, estimator=estimator, head_chunk=chunk
            )(texts)
            found.append(response["next"].exclude("ref_log_probs"))
        assert_close(found[1].to_dict(), found[0].to_dict(), rtol=1e-12, atol=1e-12)
        found = []
        for chunk in (None, CHUNK):
            actor, reference = (CausalLMActor(m, head_chunk=chunk) for m in (model, other))
            steps = batch.exclude("advantage")
            if estimator == "top_k":
                actor: Any = TopKActor(actor, 3)
                torch.manual_seed(0)
                steps["logits"] = torch.zeros(6, 8, 11, dtype=torch.float64)  # of another pass
                with set_recurrent_mode(True), set_exploration_type(ExplorationType.RANDOM):
                    actor(steps)
                del steps["logits"]
                assert isinstance(dist_of(actor, batch), TiledCategorical) == (chunk == CHUNK)
            else:
                whole = dist_of(CausalLMActor(model, head_chunk=None), batch)
                steps["logits"] = whole.logits.detach()
            stack = KLConstrainedTransform(actor, 0.1, reference=reference, estimator=estimator)
            after = stack(steps)
            found.append(after["next"].exclude("tokens", "position"))
            pickle.dumps(after)
            assert not [key for key in stack.state_dict() if "tile" in key or "split" in key]
        assert_close(found[1].to_dict(), found[0].to_dict(), rtol=1e-12, atol=1e-12)

    def test_the_controller_of_a_loss_and_the_monitor(self, batch):
        model, other = make_model("gpt", 3), make_model("gpt", 1)
        actor, reference = (CausalLMActor(m, head_chunk=CHUNK) for m in (model, other))
        loss = KLPenaltyLoss(actor, 0.5, reference=reference, gradient="sequence")
        loss.update_controller(batch)
        stack = KLConstrainedTransform(actor, 0.1, reference=reference)
        monitor = KLMonitor(stack.controller, actor=actor)
        after = stack(batch.exclude("advantage"))
        assert "sampler_disagrees" not in [message.condition for message in monitor(after)]

    def test_supervised_fine_tuning(self):
        model, ids = make_model("llama"), random_texts(6)
        texts = TensorDict(tokens={"full": ids, "prompt": ids[:, :1]}, batch_size=6)
        steps = as_steps(texts, pad_token=None)
        dist = dist_of(CausalLMActor(model, head_chunk=CHUNK), steps)
        loss = -dist.log_prob(steps["action"]).mean()
        whole = cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        assert_equal([loss, *gradients(loss, model)], [whole, *gradients(whole, model)])

    def test_grpo_next_to_the_penalty(self, batch):
        model, other, found = make_model("gpt", 3), make_model("gpt", 1), []
        for chunk in (None, CHUNK):
            actor, reference = (CausalLMActor(m, head_chunk=chunk) for m in (model, other))
            grpo: Any = GRPOLoss(Scorer(actor), kl_to_ref_coeff=None)  # type: ignore[arg-type]
            grpo.set_keys(action="action", sample_log_prob="action_log_prob")
            penalty = KLPenaltyLoss(actor, 0.5, reference=reference, gradient="sequence")
            terms = grpo(batch)
            losses = (terms.loss_objective, terms.loss_entropy, penalty(batch)["loss_kl"])
            found.append([x for loss in losses for x in (loss, *gradients(loss, model))])
        assert_equal(found[1], found[0])

    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    @pytest.mark.parametrize("loss", [partial(ClipPPOLoss, critic_network=None), GRPOLoss])
    def test_one_pass_for_the_penalty_and_its_loss(self, loss, gradient, batch):
        """The decoder runs once; the head on one row, and on each tile, also in `backward`."""
        # Models of Hugging Face would add up gradients in float32.
        model, other, found, calls = make_model("gpt"), make_model("gpt", 1), [], []
        for part in (model.norm, model.head):
            part.register_forward_hook(lambda part, *_: calls.append(type(part).__name__))
        for chunk, around in ((None, False), (None, True), (CHUNK, True)):
            actor, reference = (CausalLMActor(m, head_chunk=chunk) for m in (model, other))
            inner: Any = loss(actor)  # type: ignore[arg-type]
            if loss is GRPOLoss:
                inner.set_keys(action="action", sample_log_prob="action_log_prob")
            options: Any = {"reference": reference, "gradient": gradient}
            penalty = KLPenaltyLoss(actor, 0.5, **options, loss=inner if around else None)
            dist_of(actor, batch)  # which compares the tiles once
            calls.clear()
            out = dict(penalty(batch).items())
            out |= {} if around else dict(inner(batch).items())
            losses = [out[key] for key in ("loss_kl", "loss_objective", "loss_entropy")]
            found.append([*losses, *gradients(torch.stack(losses).sum(), model)])
            n_heads = 1 if chunk is None else 1 + 2 * -(-batch.numel() // CHUNK)
            if around:
                assert [calls.count(name) for name in ("LayerNorm", "Linear")] == [1, n_heads]
        assert_equal(found[1], found[0])
        assert_equal(found[2], found[0])

    def test_adapters_that_are_off_in_the_reference(self, batch):
        """Also those of the head, whose tiles are computed after the switch."""
        model = make_model("llama", 0, lora=True)
        found = []
        for chunk in (None, CHUNK):
            actor = CausalLMActor(model, head_chunk=chunk)
            loss = KLPenaltyLoss(actor, 0.5, reference=model.disable_adapter, gradient="sequence")
            value = loss(batch)["loss_kl"]
            found.append((value, *gradients(value, model)))
        assert_equal(found[1], found[0])
        assert found[0][0] > 0

    def test_weights_of_the_head_that_the_reference_has_for_its_passes_alone(self, batch):
        model = make_model("gpt")

        @contextmanager
        def doubled():
            model.head.weight.data.mul_(2)
            yield
            model.head.weight.data.div_(2)

        found = []
        for chunk in (None, CHUNK):
            actor = CausalLMActor(model, head_chunk=chunk)
            loss = KLPenaltyLoss(actor, 0.5, reference=doubled, gradient="sequence")
            value = loss(batch)["loss_kl"]
            found.append((value, *gradients(value, model)))
        assert_equal(found[1], found[0])
        assert found[0][0] > 0

    def test_dropout_in_the_head_is_repeated(self, batch):
        model = make_model("llama", 0)
        config = peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.5)
        model = peft.get_peft_model(model, config)
        actor = CausalLMActor(sharp(model.double()).train(), head_chunk=CHUNK)
        torch.manual_seed(0)
        log_prob = dist_of(actor, batch).log_prob(batch["action"])
        model.eval()  # after the pass
        (gradient,) = gradients(log_prob.sum(), model)[:1]
        again = []
        for step in (1e-6, -1e-6):
            twin = copy.deepcopy(model).train()
            weight = next(w for w in twin.parameters() if w.requires_grad)
            weight.data[0, 0] += step
            torch.manual_seed(0)
            actor = CausalLMActor(twin, head_chunk=CHUNK)
            again.append(dist_of(actor, batch).log_prob(batch["action"]).sum())
        slope = (again[0] - again[1]).item() / 2e-6
        assert gradient[0, 0].item() == pytest.approx(slope, rel=1e-6)

    def test_an_actor_that_acts_in_recurrent_mode(self, batch):
        model, states = make_model("gpt"), batch.select("tokens", "position")
        states["logits"] = torch.zeros(6, 8, 11, dtype=torch.float64)  # of another pass
        actors = [CausalLMActor(model, head_chunk=CHUNK, return_logits=r) for r in (True, False)]
        with set_recurrent_mode(True), set_exploration_type(ExplorationType.RANDOM):
            whole, tiled = (actor(states.clone()) for actor in actors)
        expected = dist_of(CausalLMActor(model, head_chunk=None), batch).logits
        assert_equal([whole["logits"]], [expected])
        assert "logits" not in tiled.keys()


class TestTiles:
    def test_the_head_sees_a_tile_at_a_time(self, batch):
        model = make_model("gpt")
        seen: list[int] = []
        model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
        dist = dist_of(CausalLMActor(model, head_chunk=CHUNK), batch)
        seen.clear()
        dist.log_prob(batch["action"]).sum().backward()
        # And again in the backward pass, the last one first.
        assert seen == [7, 7, 7, 7, 7, 7, 6, 6, 7, 7, 7, 7, 7, 7]

    def test_by_default_what_a_loss_holds_decides(self):
        """Four numbers for each logit, of which 1024 x 32,000 fill 524 MB; by default 256 MB."""
        model, lengths = GPT(32_000, 40, n_layer=1, n_head=1, n_embd=4), torch.arange(1, 33)
        for n, tiled in ((16, False), (32, True)):
            tokens = torch.zeros(n, 32, 40, dtype=torch.long)
            steps = TensorDict(tokens=tokens, position=lengths.expand(n, 32), batch_size=(n, 32))
            assert isinstance(dist_of(CausalLMActor(model), steps), TiledCategorical) == tiled

    def test_nothing_is_left_without_garbage_collection(self, batch):
        actor, reference = (CausalLMActor(make_model("gpt", i), head_chunk=CHUNK) for i in (0, 1))
        gc.collect()
        gc.disable()
        try:
            policy = dist_of(actor, batch)
            pair = (policy, dist_of(reference, batch))
            found = [policy.log_prob(batch["action"]), *figures(*pair[:1], reference=pair[1])]
            hidden = weakref.ref(policy.tiles.hidden)
            del policy, pair, found
            assert hidden() is None
        finally:
            gc.enable()

    def test_entropy_comes_with_log_probs_if_it_was_read_last_time(self, batch):
        """Head calls of log-probs with the entropy after them; only the first time is it late."""
        model = make_model("gpt", 0)
        actor, calls = CausalLMActor(model, head_chunk=CHUNK), []
        n_tiles = math.ceil(batch.numel() / CHUNK)
        with model.head.register_forward_hook(lambda *_: calls.append(1)):
            dist_of(actor, batch).log_prob(batch["action"])  # as of a loss without an entropy
            found = []
            for _ in range(3):
                policy = dist_of(actor, batch)
                calls.clear()
                policy.log_prob(batch["action"])
                policy.entropy()
                found.append(len(calls))
        assert found == [2 * n_tiles, n_tiles, n_tiles]

    def test_what_it_remembers_is_the_entropy_alone(self, batch):
        """The entropy was given as the KL to a reference that came after `log_prob`."""
        policy, reference, *whole = (
            dist_of(CausalLMActor(make_model("gpt", seed), head_chunk=chunk), batch)
            for chunk in (CHUNK, None)
            for seed in (0, 1)
        )
        expected = kl_divergence(*whole), whole[0].entropy()
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                policy.log_prob(batch["action"])
            assert_equal([kl_exact(policy, reference), policy.entropy()], expected)

    def test_a_loss_reads_each_tile_once(self, batch):
        """The log-prob and the KL are computed from the same logits."""
        model = make_model("gpt")
        seen: list[int] = []
        actor = CausalLMActor(model, head_chunk=CHUNK)
        loss = KLPenaltyLoss(actor, 0.5, gradient="sequence")
        model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
        dist_of(actor, batch)  # which looks once whether the head works on a part
        seen.clear()
        value = loss(batch)["loss_kl"]
        assert len([n for n in seen if n > 1]) == 7  # of 48 steps
        value.backward()

    def test_models_without_a_decoder_are_read_as_before(self, batch):
        actor = CausalLMActor(sharp(Plain()).double(), head_chunk=CHUNK)
        with pytest.warns(UserWarning, match="does not work on a part .*get_decoder"):
            assert not isinstance(dist_of(actor, batch), TiledCategorical)
        assert not isinstance(dist_of(actor, batch), TiledCategorical)  # and says so once

    def test_what_a_model_adds_after_its_decoder_by_position(self, batch):
        model = make_model("gpt")
        shift = torch.arange(20, dtype=torch.float64)[:, None] * torch.arange(11)
        model.register_forward_hook(lambda _, inputs, output: output + shift[: output.shape[1]])
        with pytest.warns(UserWarning, match="its logits differ"):
            dist = dist_of(CausalLMActor(model, head_chunk=CHUNK), batch)
        assert not isinstance(dist, TiledCategorical)

    @pytest.mark.parametrize("chunk", [0, -1, 2.0, True, "all"])
    def test_sizes(self, chunk):
        with pytest.raises(ValueError, match="`head_chunk` must be an int of at least 1"):
            CausalLMActor(GPT(11, 8), head_chunk=chunk)

    def test_the_default_is_64_megabytes(self):
        with torch.device("meta"):
            actor = CausalLMActor(GPT(151_936, 8, n_embd=3))
        assert actor.reader.head_chunk == 110
        assert CausalLMActor(GPT(11, 8)).reader.head_chunk == 2**24 // 11
