"""Two processes train one policy, with one controller: torchrun --nproc_per_node 2 FILE."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrl.collectors import Collector
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, PIDKLController
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic

dist.init_process_group("gloo")  # with GPUs, "nccl"
rank, n_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # all ranks begin with the same policy, and so have the same reference
actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
critic = CausalLMCritic(GPT(vocab_size=11, block_size=9, n_out=1))
controller = PIDKLController(init_coeff=1.0, target=0.5)
controller.group = dist.group.WORLD  # it is fed the KL of all ranks
stack = KLConstrainedTransform(actor, controller)
gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True, shifted=False)
learner = DistributedDataParallel(ClipPPOLoss(actor, critic, reduction="sum"))
optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)

torch.manual_seed(1 + rank)  # each rank draws other actions
env = DigitLanguageEnv(batch_size=(48 + 32 * rank,), seed=rank)  # and may have more of them
frames = 4 * env.batch_size.numel()
collector = Collector(
    env,
    actor,
    frames_per_batch=frames,
    total_frames=5 * frames,  # the same number of batches on all ranks
    postproc=stack,
    auto_register_policy_transforms=False,
)
for batch in collector:
    gae(batch)
    losses = learner(batch.reshape(-1))
    # DDP takes the mean of the ranks' gradients; this makes it the mean over all their steps.
    n_steps = torch.tensor(float(batch.numel()))
    dist.all_reduce(n_steps)
    optimizer.zero_grad()
    ((losses["loss_objective"] + losses["loss_critic"]) * n_ranks / n_steps).backward()
    optimizer.step()
    coeffs = [0.0] * n_ranks
    dist.all_gather_object(coeffs, controller.coeff.item())
    if rank == 0:
        print("coefficients of the ranks:", *[f"{coeff:.4f}" for coeff in coeffs])
if rank == 0:  # one file serves all ranks
    torch.save({"stack": stack.state_dict(), "loss": learner.module.state_dict()}, "run.pt")
dist.barrier()
stack.load_state_dict(torch.load("run.pt", weights_only=True)["stack"])
dist.destroy_process_group()
