"""What differs on a GPU: where tensors are, and other digits. Skipped where there is none."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.language.models import make_model
from torchrl_kl import (
    KLConstrainedTransform,
    KLMonitor,
    KLPenaltyLoss,
    PlannedKLController,
    rescore,
)
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import (
    GPT,
    CausalLMActor,
    CausalLMCritic,
    ResponseKLTransform,
    sample_responses,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Llama's norms and angles are in float32 in any precision.
TOLERANCE: dict[str, Any] = {
    "gpt": {"rtol": 1e-9, "atol": 1e-11},
    "llama": {"rtol": 1e-3, "atol": 1e-5},
}
OPTIONS = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02}


def actors(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """The same policy on the CPU and on the GPU."""
    model = make_model(kind).to(dtype).eval()
    on_gpu = copy.deepcopy(model).to("cuda")
    return CausalLMActor(model, **options), CausalLMActor(on_gpu, **options)


def sampled(actor: Any, n: int = 64, **options: Any) -> TensorDict:
    device = next(actor.parameters()).device
    prompts = torch.randint(1, 11, (n, 4), device=device)
    return sample_responses(actor, prompts, 8, pad_token=0, **options)


@pytest.mark.parametrize("head_chunk", [None, 16])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["whole", "truncated"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_batch_has_the_numbers_of_the_cpu(kind, options, head_chunk):
    on_cpu, on_gpu = actors(kind, head_chunk=head_chunk, **options)
    temperature = options.get("temperature", 1.0)
    other = CausalLMActor(make_model(kind, seed=1).double().eval(), temperature=temperature)
    batch = sampled(on_gpu, return_logits=True)
    assert_close(
        rescore(on_gpu, batch)["next", "sampler_kl"].abs().max().item(), 0.0, **TOLERANCE[kind]
    )
    found = []
    for actor, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
        data, reference = batch.to(device), copy.deepcopy(other).to(device)
        stack = KLConstrainedTransform(actor, 0.1, reference=reference, estimator="exact")
        scored = stack(data)["next"].select("kl", "kl_estimate", "reward")
        gradients = {}
        for gradient in ("step", "sequence", "k2"):
            loss = KLPenaltyLoss(actor, 0.1, reference=reference, gradient=gradient)
            loss(data)["loss_kl"].backward()
            weights = loss.actor_network_params.flatten_keys().items()
            gradients[gradient] = TensorDict(
                {str(k): v.grad for k, v in weights if v.grad is not None}
            )
        found.append(TensorDict(scored=scored, **gradients).cpu())
    assert_close(
        dict(found[1].items(True, True)), dict(found[0].items(True, True)), **TOLERANCE[kind]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_first_ratios_are_one(kind, dtype):
    _, actor = actors(kind, dtype, **OPTIONS)
    batch = rescore(actor, sampled(actor))
    with set_recurrent_mode(True):
        log_prob = actor.get_dist(batch.copy()).log_prob(batch["action"])
    assert log_prob.equal(batch["action_log_prob"])


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_responses(kind):
    on_cpu, on_gpu = actors(kind)
    steps = sampled(on_gpu, 16)
    texts = steps["tokens"][:, 0]
    tokens = TensorDict(full=texts, prompt=texts[:, :4], batch_size=16)
    batch = TensorDict(tokens=tokens, next={"reward": torch.ones(16, 1).double()}, batch_size=16)
    found = []
    for actor in (on_cpu, on_gpu):
        model = actor.reader.lm.model
        transform = ResponseKLTransform(model, 0.1, estimator="exact", **OPTIONS)  # type: ignore[arg-type]
        # A collector may store batches elsewhere.
        found.append(transform(batch.cpu())["next"].select("kl", "kl_estimate", "reward"))
    assert_close(dict(found[1].items()), dict(found[0].items()), **TOLERANCE[kind])


def test_the_whole_loop():
    """An env, a collector, a planned controller, a loss and the monitor, all on the GPU."""
    actor = CausalLMActor(GPT(11, 8).cuda())
    critic = CausalLMCritic(GPT(11, 9, n_out=1).cuda())
    controller = PlannedKLController(0.1)
    stack = KLConstrainedTransform(actor, controller).cuda()
    env = DigitLanguageEnv(batch_size=(32,), device="cuda")
    collector = Collector(
        TransformedEnv(env, stack),
        actor,
        frames_per_batch=128,
        total_frames=512,
        auto_register_policy_transforms=False,
    )
    loss = ClipPPOLoss(actor, critic)
    gae = GAE(gamma=1.0, lmbda=1.0, value_network=critic, deactivate_vmap=True)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    monitor = KLMonitor(controller, actor=actor)
    for batch in collector:
        assert batch["action"].is_cuda
        with torch.no_grad(), set_recurrent_mode(True):
            gae(batch)
        losses = loss(batch.reshape(-1))
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(one.condition == "kl_not_finite" for one in monitor(batch))
    collector.shutdown()
    assert controller.coeff.item() > 0
