"""The gradients of KLPenaltyLoss against autograd of exact values, over all texts of three tokens.

A policy is a table of logits, one row per context: the empty one, 3 of one token, 9 of two.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.objectives import ClipPPOLoss

from tests.helpers import probabilistic_actor
from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss

N_WORDS, N_STEPS, N_CONTEXTS = 3, 3, 1 + 3 + 9
TEXTS = torch.cartesian_prod(*[torch.arange(N_WORDS)] * N_STEPS)  # (27, 3)
CONTEXTS = torch.stack(
    [torch.zeros(27).long(), 1 + TEXTS[:, 0], 4 + 3 * TEXTS[:, 0] + TEXTS[:, 1]], 1
)


def table(seed: int, scale: float = 1.0) -> Tensor:
    """Logits (13, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(N_CONTEXTS, N_WORDS, generator=generator, dtype=torch.float64)


POLICY, REFERENCE, OLD = table(0), table(1), table(0) + table(2, 0.5)


def make_actor(logits: Tensor) -> Any:
    net = nn.Linear(N_CONTEXTS, N_WORDS, bias=False, dtype=torch.float64)
    net.weight.data.copy_(logits.T)
    return probabilistic_actor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )


def token_log_probs(logits: Tensor) -> Tensor:
    """log pi(a_t|s_t) of every text, (27, 3)."""
    return logits.log_softmax(-1)[CONTEXTS, TEXTS]


def step_kl(logits: Tensor, other: Tensor = REFERENCE) -> Tensor:
    """KL(policy || other) in each context of every text, (27, 3)."""
    log_probs = logits.log_softmax(-1)
    return (log_probs.exp() * (log_probs - other.log_softmax(-1))).sum(-1)[CONTEXTS]


def text_probs(logits: Tensor) -> Tensor:
    return token_log_probs(logits).sum(1).exp()


def sequence_kl(logits: Tensor) -> Tensor:
    """KL between the two distributions over texts, from its definition."""
    log_ratio = (token_log_probs(logits) - token_log_probs(REFERENCE)).sum(1)
    return (text_probs(logits) * log_ratio).sum()


def gradient(function, logits: Tensor = POLICY) -> Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits)[0]


def batch_of(old: Tensor) -> Any:
    """Every text once, as a collector that ran the policy `old` would record it: (27, 3)."""
    done = torch.zeros(27, 3, 1, dtype=torch.bool)
    done[:, -1] = True
    batch = TensorDict(
        observation=nn.functional.one_hot(CONTEXTS, N_CONTEXTS).double(),
        action=TEXTS,
        action_log_prob=token_log_probs(old),
        next=TensorDict(done=done, batch_size=(27, 3)),
        batch_size=(27, 3),
    )
    batch.names = [None, "time"]
    return batch


def make_loss(logits: Tensor = POLICY, **kwargs) -> Any:
    reference = make_actor(REFERENCE)
    kwargs = {"reference": reference, "reduction": "none"} | kwargs
    return KLPenaltyLoss(make_actor(logits), 1.0, **kwargs)


def expected(loss: Any, batch: Any, old: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a text and its gradient (13, 3), in expectation over the texts of `old`."""
    value = (text_probs(old)[:, None] * loss(batch)["loss_kl"].reshape(27, 3)).sum()
    value.backward()
    return value.detach(), loss.actor_network_params["module", "0", "module", "weight"].grad.T


def relative_error(actual: Tensor, truth: Tensor) -> float:
    return ((actual - truth).norm() / truth.norm()).item()


def along_states_of(logits: Tensor, per_step) -> Tensor:
    """The gradient of what each step contributes, states drawn by `logits` and taken as given."""
    return gradient(lambda own: (text_probs(logits)[:, None] * per_step(own)).sum())


@pytest.mark.parametrize("weights", [None, "trajectory", "step"])
def test_sequence_has_the_gradient_of_the_exact_kl_between_texts(weights):
    value, grad = expected(
        make_loss(gradient="sequence", weights=weights), batch_of(POLICY), POLICY
    )
    assert_close(value, sequence_kl(POLICY))
    assert relative_error(grad, gradient(sequence_kl)) < 1e-12


def test_step_alone_misses_the_effect_on_later_states():
    value, grad = expected(make_loss(gradient="step"), batch_of(POLICY), POLICY)
    assert_close(value, sequence_kl(POLICY))
    assert relative_error(grad, along_states_of(POLICY, step_kl)) < 1e-12
    assert relative_error(grad, gradient(sequence_kl)) > 0.2


def test_k2_has_the_gradient_of_step():
    _, grad = expected(make_loss(gradient="k2"), batch_of(POLICY), POLICY)
    assert relative_error(grad, along_states_of(POLICY, step_kl)) < 1e-12


class TestOffPolicy:
    """The texts are those of another policy than the one that is updated."""

    def test_sequence_is_exact_with_the_ratios_of_the_way(self):
        value, grad = expected(make_loss(gradient="sequence"), batch_of(OLD), OLD)
        assert_close(value, sequence_kl(POLICY))
        assert relative_error(grad, gradient(sequence_kl)) < 1e-12

    def test_sequence_with_the_ratio_of_each_step_is_what_it_says(self):
        later = step_kl(POLICY)
        later = later.flip(1).cumsum(1).flip(1) - later

        def surrogate(logits):
            ratio = (token_log_probs(logits) - token_log_probs(OLD)).exp()
            return (text_probs(OLD)[:, None] * (step_kl(logits) + ratio * later)).sum()

        _, grad = expected(make_loss(gradient="sequence", weights="step"), batch_of(OLD), OLD)
        assert relative_error(grad, gradient(surrogate)) < 1e-12
        # And what it says is an approximation.
        assert relative_error(grad, gradient(sequence_kl)) > 0.05

    @pytest.mark.parametrize("name", ["step", "k2"])
    @pytest.mark.parametrize(("weights", "states"), [("step", OLD), ("trajectory", POLICY)])
    def test_a_step_is_taken_over_the_states_that_the_weights_say(self, name, weights, states):
        _, grad = expected(make_loss(gradient=name, weights=weights), batch_of(OLD), OLD)
        assert relative_error(grad, along_states_of(states, step_kl)) < 1e-12
        other = POLICY if states is OLD else OLD
        assert relative_error(grad, along_states_of(other, step_kl)) > 0.05

    @pytest.mark.parametrize("name", ["step", "sequence", "k2"])
    def test_the_measured_kl_is_that_of_the_policy_now(self, name):
        loss = make_loss(gradient=name, weights="trajectory", reduction="mean")
        # Where the old policy was uniform, the mean over all texts is the expectation.
        measured = loss(batch_of(torch.zeros_like(OLD)))
        assert_close(3 * measured["kl"], sequence_kl(POLICY))
        if name != "k2":
            assert_close(measured["loss_kl"], measured["kl"])


class TestEndsOfTrajectories:
    """Nine rows of three texts one after the other."""

    @pytest.mark.parametrize("weights", ["trajectory", "step"])
    @pytest.mark.parametrize("sign", ["done", "traj_ids", "is_init"])
    def test_rows_of_several_trajectories_give_the_same(self, weights, sign):
        batch = batch_of(OLD).reshape(9, 9)
        if sign != "done":
            batch["next", "done"][:] = False
        if sign == "is_init":
            batch["is_init"] = (torch.arange(9) % 3 == 0).expand(9, 9).unsqueeze(-1)
        if sign == "traj_ids":
            batch["collector", "traj_ids"] = torch.arange(27).reshape(9, 3).repeat_interleave(3, 1)
        loss = make_loss(gradient="sequence", weights=weights, time_dim=-1)
        value, grad = expected(loss, batch, OLD)
        alone = expected(make_loss(gradient="sequence", weights=weights), batch_of(OLD), OLD)
        assert_close((value, grad), alone)

    def test_an_id_that_changes_where_another_is_done_ends_nothing(self):
        batch, loss = batch_of(OLD), make_loss(gradient="sequence")
        alone = expected(loss, batch, OLD)
        batch["collector", "traj_ids"] = torch.tensor([0, 1, 1]).expand(27, 3)
        assert expected(loss, batch, OLD)[0] != alone[0]
        batch["next", "other", "done"] = torch.tensor([True, False, False]).expand(27, 3)
        assert_close(expected(loss, batch, OLD), alone)


class TestUnit:
    """One coefficient means the same in the reward and in the loss."""

    def test_it_pulls_like_the_penalized_reward_in_ppo(self):
        coeff = 0.3
        # A uniform policy: the mean over all texts is the expectation, so both are exact.
        uniform = torch.zeros_like(POLICY)
        batch = batch_of(uniform)
        batch["next", "reward"] = torch.zeros(27, 3, 1, dtype=torch.float64)
        penalized = KLConstrainedTransform(make_actor(REFERENCE), coeff)(batch)
        penalized["advantage"] = penalized["next", "reward"].flip(1).cumsum(1).flip(1)
        actor = make_actor(uniform)
        ppo = ClipPPOLoss(actor, None, entropy_bonus=False)
        weight = actor[0].module.weight
        (in_reward,) = torch.autograd.grad(ppo(penalized)["loss_objective"], weight)
        loss = KLPenaltyLoss(actor, coeff, gradient="sequence", reference=make_actor(REFERENCE))
        (in_loss,) = torch.autograd.grad(loss(batch)["loss_kl"], weight)
        assert in_loss.norm() > 0.05 * coeff
        assert_close(in_loss, in_reward)
