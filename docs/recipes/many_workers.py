"""One call for each of TorchRL's collectors: in one process, in several, or over Ray."""

import argparse

import torch
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import RayCollector
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, kl_collector
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic

KINDS = {"one": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
KINDS["ray"] = RayCollector


def make_env():
    return DigitLanguageEnv(batch_size=(64,))


if __name__ == "__main__":  # the workers are processes that import this file
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="sync")
    parser.add_argument("--where", choices=["learner", "workers"], default="learner")
    args = parser.parse_args()
    torch.manual_seed(0)
    actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
    critic = CausalLMCritic(GPT(vocab_size=11, block_size=9, n_out=1))
    controller = AdaptiveKLController(init_coeff=0.5, target=0.5, horizon=500)
    collector = kl_collector(
        KINDS[args.kind],
        make_env,
        actor,
        KLConstrainedTransform(actor, controller),
        where=args.where,
        num_workers=1 if args.kind == "one" else 2,
        frames_per_batch=512,
        total_frames=2560,
    )
    loss = ClipPPOLoss(actor, critic)
    gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True, shifted=False)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    for batch in collector:
        gae(batch)
        losses = loss(batch.reshape(-1))
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        optimizer.step()
        collector.update_policy_weights_()  # the workers' policy, and not their reference
        print(f"{tuple(batch.shape)}, coefficient {batch['next', 'kl_coeff'].mean():.4f}")
    collector.shutdown()
