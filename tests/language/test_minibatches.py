"""`minibatches`: the parts are the batch, cut; their weighted mean is its mean."""

import copy

import pytest
import torch
from tensordict import TensorDict, unravel_key
from torch.testing import assert_close
from torchrl.objectives import ClipPPOLoss

from torchrl_kl import KLPenaltyLoss
from torchrl_kl.language import GPT, CausalLMActor, as_steps, minibatches, sample_responses

V, T, END, BUDGET = 11, 12, 3, 40
KEYS = ("tokens", "position")


def make_actor(in_keys=KEYS):
    torch.manual_seed(0)
    return CausalLMActor(GPT(V, 64, n_layer=1, n_head=2, n_embd=8).double(), in_keys=in_keys)


def make_batch(actor=None, prompts=None):
    """Prompts of two lengths in groups of 3, responses of 1 to T tokens, and advantages."""
    actor = actor or make_actor()
    if prompts is None:
        prompts = [torch.randint(V, (2 + i % 2,)) for i in range(6)]
        prompts = [prompt for prompt in prompts for _ in range(3)]
    batch = sample_responses(actor, prompts, T, pad_token=0, eos_token=END)
    batch["advantage"] = torch.randn(*batch.shape, 1, dtype=torch.float64)
    batch["row"] = torch.arange(len(batch))[:, None].expand(batch.shape)
    return batch


def weight_of(part, batch):
    return part["collector", "mask"].sum() / batch["collector", "mask"].sum().double()


def texts_of(part):
    """The texts of a part up to their ends, as sorted lists."""
    ends = part["next", "position"].where(part["collector", "mask"], torch.tensor(0)).amax(1)
    rows = zip(part["tokens"][:, 0].tolist(), ends.tolist(), strict=True)
    return sorted(text[:end] for text, end in rows)


class TestMean:
    @pytest.mark.parametrize("kind", ["ppo", "step", "sequence", "k2", "around"])
    def test_the_weighted_mean_of_gradients_is_that_of_the_batch(self, kind):
        actor = make_actor()
        batch, reference = make_batch(actor), copy.deepcopy(actor)
        for model in (actor, reference):  # a policy that has moved, and another reference
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
        ppo = ClipPPOLoss(actor, None, critic_coeff=None)
        loss = ppo
        if kind != "ppo":
            gradient = "sequence" if kind == "around" else kind
            around = ppo if kind == "around" else None
            options = {"reference": reference, "gradient": gradient, "loss": around}
            loss = KLPenaltyLoss(actor, 0.3, **options)

        def gradients(parts):
            actor.zero_grad()
            for part in parts:
                found = loss(part)
                total = sum(value for key, value in found.items() if key.startswith("loss_"))
                (weight_of(part, batch) * total).backward()
            return [torch.as_tensor(parameter.grad).clone() for parameter in actor.parameters()]

        parts = [*minibatches(batch, BUDGET)]
        assert len({part.shape[1] for part in parts}) > 1
        found, expected = gradients(parts), gradients([batch])
        assert max(grad.abs().max().item() for grad in expected) > 1e-3
        for own, whole in zip(found, expected, strict=True):
            assert_close(own, whole, atol=1e-10, rtol=1e-10)

    def test_the_mean_over_responses(self):
        batch = make_batch()
        parts = [*minibatches(batch, BUDGET)]
        mean = sum(len(part) / len(batch) * part["next", "reward"].sum(1).mean() for part in parts)
        assert_close(mean, batch["next", "reward"].sum(1).mean())


def check_parts(batch, parts, in_keys=KEYS, stride=0):
    """Every row is there once, cut to the longest; entries of steps that count are those before."""
    tokens, position = in_keys
    texts = {tokens, unravel_key(("next", tokens))}
    seen = []
    for part in parts:
        mask, rows = part["collector", "mask"], part["row"][:, 0]
        whole, steps = batch[rows], mask.shape[1]
        width = part["next", position][mask].max()
        assert part.names == [None, "time"]
        assert mask.any(0).all()
        assert not whole["collector", "mask"][:, steps:].any()
        assert len(part) == 1 or len(part) * width <= BUDGET
        for key in part.keys(True, True):
            expected = whole[key][:, :steps]
            if key in texts:
                expected = expected[..., :width]
                assert part[key].shape == (*part.shape, width)
                assert part[key].stride(1) == (stride and width)
            assert part[key][mask].equal(expected[mask])
        assert part[position].max() < width
        assert part["next", position].max() <= width
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(batch)))


class TestParts:
    @pytest.mark.parametrize("in_keys", [KEYS, (("obs", "text"), ("obs", "place"))])
    def test_every_row_comes_once_and_cut(self, in_keys):
        batch = make_batch(make_actor(in_keys))
        check_parts(batch, minibatches(batch, BUDGET, in_keys=in_keys), in_keys)

    def test_a_collector_s_states_are_cut_alike(self):
        """There each state has the text so far, so that texts differ from step to step."""
        batch = make_batch()
        places = torch.arange(batch["tokens"].shape[-1])
        for td in (batch, batch["next"]):
            before = places < td["position"].unsqueeze(-1)  # type: ignore[arg-type]
            td["tokens"] = td["tokens"].where(before, 0)  # type: ignore[arg-type]
        check_parts(batch, minibatches(batch, BUDGET), stride=1)

    def test_of_a_batch_of_dialogs_and_of_a_batch_without_a_mask(self):
        full = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9], [4, 6, 0, 0, 0]])
        texts = TensorDict(tokens={"full": full, "prompt": full[:, :1]}, batch_size=3)
        steps = as_steps(texts, pad_token=0)
        parts = [*minibatches(steps, 6, shuffle=False)]
        assert [texts_of(part) for part in parts] == [[[5, 6, 7, 8, 9]], [[4, 6], [5, 6, 7]]]
        (part,) = minibatches(steps.exclude("collector"), 100)
        assert part.shape == steps.shape


class TestOrder:
    def test_is_that_of_the_generator(self):
        batch = make_batch()

        def order(seed):
            generator = torch.Generator().manual_seed(seed)
            parts = minibatches(batch, BUDGET, generator=generator)
            return [texts_of(part) for part in parts]

        assert order(0) == order(0)
        assert order(0) != order(1)

    def test_without_shuffling_the_longest_come_first(self):
        batch, state = make_batch(), torch.get_rng_state()
        widths = [part["tokens"].shape[-1] for part in minibatches(batch, BUDGET, shuffle=False)]
        assert widths == sorted(widths, reverse=True)
        assert torch.get_rng_state().equal(state)

    @pytest.mark.parametrize(("n_prompt", "together"), [(40, True), (1, False)])
    def test_groups_stay_together_where_prompts_are_long(self, n_prompt, together):
        prompts = torch.arange(3).repeat(4)[:, None].expand(-1, n_prompt) + 1
        batch = make_batch(prompts=prompts)
        budget = 4 * (n_prompt + T)
        parts = minibatches(batch, budget)
        n_groups = [len(part["tokens"][:, 0, 0].unique()) for part in parts]
        assert (max(n_groups) == 1) == together


class TestCopies:
    def test_texts_copied_for_each_token_are_warned_of_once(self, recwarn):
        """The copy is in a large storage, of which the rest is never touched."""
        actor = make_actor()
        batch, other = make_batch(actor), torch.empty(2**24, dtype=torch.long)
        loss = KLPenaltyLoss(actor, 0.1)

        def stored(steps):
            tokens = steps["tokens"]
            return steps.copy().set("tokens", other[: tokens.numel()].view_as(tokens).copy_(tokens))

        expected = loss(batch)["loss_kl"]
        states = stored(batch)
        places = torch.arange(batch["tokens"].shape[-1])
        states["tokens"].masked_fill_(places >= states["position"].unsqueeze(-1), 9)
        assert_close(loss(states)["loss_kl"], expected)  # a collector's states are no copies
        loss(batch[torch.randperm(len(batch))])  # small
        with pytest.warns(UserWarning, match="square of the length.* the parts that `minibatches`"):
            assert_close(loss(stored(batch))["loss_kl"], expected)
        loss(stored(batch))
        assert not recwarn.list


class TestErrors:
    @pytest.mark.parametrize("n_tokens", [0, 2.0])
    def test_a_budget(self, n_tokens):
        with pytest.raises(ValueError, match="`n_tokens` must be an int of at least 1, got"):
            minibatches(make_batch(), n_tokens)

    def test_a_batch(self):
        batch = make_batch()
        with pytest.raises(ValueError, match=r"responses \(N, T\).* got batch size \(216,\): spl"):
            minibatches(batch.reshape(-1), 10)
        with pytest.raises(KeyError, match="pass `in_keys` as to CausalLMActor"):
            minibatches(batch.exclude("position"), 10)
        with pytest.raises(
            TypeError, match="must be a TensorDict, got list: pass what a collector"
        ):
            minibatches([batch], 10)  # type: ignore[arg-type]

    @pytest.mark.parametrize("change", [torch.Tensor.float, lambda x: x.unsqueeze(-1)])
    def test_positions(self, change):
        batch = make_batch()
        batch["position"] = change(batch["position"])
        with pytest.raises((TypeError, ValueError), match="`position` must"):
            minibatches(batch, 10)
