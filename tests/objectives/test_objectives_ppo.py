"""ClipPPOLoss ends at the known optimum, with the KL in the loss as with the KL in the reward."""

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.objectives import ClipPPOLoss

from tests.helpers import play, probabilistic_actor
from torchrl_kl import Enumeration, KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

LANGUAGE = DigitLanguage(vocab_size=3, prompt_length=1, response_length=2, window=2)
COEFF = 0.2
N_BATCHES = 40


def reward_fn(texts: Tensor) -> Tensor:
    """0.6 for a first token of 1; 1 for a first token of 0 and the separator next.

    The separator has a large KL.
    """
    first, second = texts[:, -2:].unbind(1)
    return 0.6 * (first == 1) + 1.0 * ((first == 0) & (second == LANGUAGE.separator))


class Table(nn.Module):
    """Free logits for every context, at first those of the language mixed with uniform ones."""

    powers: Tensor

    def __init__(self):
        super().__init__()
        base = LANGUAGE.n_tokens + 1  # 0 is what is not written yet
        self.register_buffer("powers", base ** torch.arange(LANGUAGE.text_length))
        self.logits = nn.Embedding(base**LANGUAGE.text_length, LANGUAGE.n_tokens)
        contexts = torch.tensor(
            [[prompt, LANGUAGE.separator] for prompt in range(LANGUAGE.vocab_size)]
        )
        for _ in range(LANGUAGE.response_length):
            probs = 0.8 * LANGUAGE.next_token_probs(contexts).float() + 0.2 / LANGUAGE.n_tokens
            self.logits.weight.data[self.rows(contexts)] = probs.log()
            tokens = torch.arange(LANGUAGE.n_tokens).repeat(len(contexts))
            contexts = torch.cat(
                [contexts.repeat_interleave(LANGUAGE.n_tokens, 0), tokens[:, None]], 1
            )

    def rows(self, contexts: Tensor) -> Tensor:
        return ((contexts + 1) * self.powers[: contexts.shape[-1]]).sum(-1)

    def next_token(self, contexts: Tensor) -> Tensor:
        return self.logits(self.rows(contexts))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        written = torch.arange(tokens.shape[-1]) < position[..., None]
        return self.logits(torch.where(written, (tokens + 1) * self.powers, 0).sum(-1))


def train(kl_args: dict[str, Any] | None) -> Table:
    """PPO with the KL in the reward (`kl_args` None) or in the loss."""
    table = Table()
    net = TensorDictModule(table, ["tokens", "position"], ["logits"])
    actor = probabilistic_actor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    stack = KLConstrainedTransform(actor, COEFF if kl_args is None else 0.0)  # 0 only measures
    loss: Any = ClipPPOLoss(actor, None, entropy_bonus=False)
    if kl_args is not None:
        loss = KLPenaltyLoss(actor, COEFF, loss=loss, **kl_args)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: 1 - batch / N_BATCHES)
    env = DigitLanguageEnv(LANGUAGE, reward_fn=reward_fn, batch_size=(512,), seed=0)
    for batch_number in range(N_BATCHES):
        batch = stack(play(env, actor, 2, seed=batch_number).detach())
        reward_to_go = batch["next", "reward"].flip(1).cumsum(1).flip(1)
        batch["advantage"] = reward_to_go - reward_to_go.mean(0)
        for minibatch in (batch, *batch[torch.randperm(512)].split(256)):
            optimizer.zero_grad()
            losses = [value for key, value in loss(minibatch).items() if key.startswith("loss_")]
            torch.stack(losses).sum().backward()
            optimizer.step()
        schedule.step()
    return table


@pytest.fixture(scope="module")
def exact() -> Enumeration:
    prompts = torch.tensor([[prompt, LANGUAGE.separator] for prompt in range(LANGUAGE.vocab_size)])
    return Enumeration(Table().next_token, reward_fn, prompts, LANGUAGE.response_length)


@pytest.fixture(scope="module")
def regret_in_reward(exact) -> float:
    torch.manual_seed(0)
    return exact.values(train(None).next_token, COEFF).regret


@pytest.mark.parametrize("weights", ["trajectory", "step"])
def test_reward_and_loss_reach_the_same_optimum(exact, regret_in_reward, weights):
    regret = exact.values(
        train({"gradient": "sequence", "weights": weights}).next_token, COEFF
    ).regret
    assert abs(regret - regret_in_reward) < 0.02
    assert max(regret, regret_in_reward) < 0.02
    assert exact.values(Table().next_token, COEFF).regret > 0.1  # where they began


def test_the_gradient_of_single_steps_does_not(exact):
    """It does not count the KL of the separator when it chooses the token that leads there."""
    step = exact.values(train({"gradient": "step"}).next_token, COEFF)
    assert step.regret > 0.02
    assert step.kl > 1.3 * exact.optimum(COEFF).kl
