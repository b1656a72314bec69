"""Steps of a policy, told from those of a random one."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MaskedCategorical, ProbabilisticActor

from torchrl_kl import FrozenActor
from torchrl_kl.actors.policy import Acting


class ActorOfItsOwn(ProbabilisticActor):
    def forward(self, *args, **kwargs):  # type: ignore[override]
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("actor_class", [ProbabilisticActor, ActorOfItsOwn])
def test_a_step_in_which_one_action_is_allowed_is_not_that_of_a_random_policy(actor_class):
    """Its log-prob is 0, as are the logits of a network that begins at 0."""
    net = nn.Linear(3, 2)
    for weight in net.parameters():
        nn.init.zeros_(weight)
    actor = actor_class(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits", "mask"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    batch = actor(TensorDict(observation=torch.randn(3, 3), mask=mask, batch_size=3))
    acting, log_prob = Acting.of(actor, FrozenActor(actor).recorded), batch["action_log_prob"]
    assert acting.random_steps(batch, log_prob, None) is None
    told_nothing = batch.select("observation", "action", "action_log_prob")
    assert acting.random_steps(told_nothing, log_prob, None) is None
    assert acting.random_steps(batch[:0], log_prob[:0], None) is None
    # A frame of a random policy: the collector has filled in zeros, and no mask forces its action.
    batch["mask"][0] = True
    random = acting.random_steps(batch, log_prob, None)
    assert random is not None
    assert random.tolist() == [True, False, False]
