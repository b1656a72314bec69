"""torch.compile of a KLPenaltyLoss: one graph, the same values and gradients, the same refusals."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss

from tests.actors.kinds import act, actor_of, observed
from tests.helpers import N_OBS
from torchrl_kl import AdaptiveKLController, KLPenaltyLoss


def make(**options: Any) -> tuple[Any, Any]:
    """A loss around ClipPPOLoss, and steps (4, 6), of which the mask leaves some out."""
    actor = actor_of("Categorical")
    critic = ValueOperator(nn.Linear(N_OBS, 1).double(), in_keys=["observation"])
    controller = AdaptiveKLController(0.5, 0.01, 100, per="step")
    options |= {"reference": actor_of("Categorical", 1), "loss": ClipPPOLoss(actor, critic)}
    batch = act(actor, observed(4, 6))
    batch["next"] = batch.empty().update({"done": torch.zeros(4, 6, 1, dtype=torch.bool)})
    batch["advantage"], batch["value_target"] = torch.randn(2, 4, 6, 1).double()
    batch["collector", "mask"] = torch.rand(4, 6) < 0.8
    return KLPenaltyLoss(actor, controller, **options), batch


def run(function: Any, loss: Any, batch: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What the loss, or a compiled one, writes, and the gradients of all of its losses."""
    out = dict(function(batch).items())
    total = torch.stack([value for key, value in out.items() if key.startswith("loss")]).sum()
    return out, torch.autograd.grad(total, [p for p in loss.parameters() if p.requires_grad])


# 2026-11: tensordict 0.14.3 reads it, with PyTorch 2.13.
@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["step", "k2"])
def test_it_is_one_graph_whatever_its_coefficient_above_0(gradient):
    loss, batch = make(gradient=gradient)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(loss, backend=backend)
    for coeff in (0.5, 2.0):
        loss.controller.coeff = coeff
        expected = run(loss, loss, batch)
        assert_close(run(compiled, loss, batch), expected, rtol=1e-10, atol=1e-10)
        assert expected[0]["kl_coeff"] == coeff
        assert len(graphs) == 1
    batch["next", "kl_coeff"] = torch.full((4, 6, 1), 0.1)
    with pytest.raises(RuntimeError, match="would be penalized again"):
        compiled(batch)
