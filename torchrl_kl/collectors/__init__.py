"""One call, `kl_collector`, that connects a KL stack to any of TorchRL's collectors.

`where` says where the reference is evaluated:

- "learner": each batch goes through the stack when it arrives. The reference scores a whole batch
  at once, a batch has one coefficient, and the learner waits meanwhile.
- "workers": each worker has a copy of the reference in its env, as the last transform, and
  penalizes each step with the learner's coefficient of that moment. A recurrent reference with
  asynchronous workers needs this: it cannot carry its state across batches of different workers.

In both cases each batch updates the controller in the learner's process when it arrives. The
workers read the coefficient from a file of the machine, or are sent it over Ray. Changes of
`stack.controller.coeff` by hand and of the reference, in any way, reach them before they are asked
for the next batch; no worker scores with half of an update. If the policy itself is the reference
(`reference=` a context), "learner" needs no second model. With "workers" each worker has a copy of
the policy as it was at the start, with the context entered: the base that remains in that context
must not be trained.

You may rely on:

- ("next", "kl_coeff") is the coefficient of each step, also where an asynchronous collector mixes
  steps from before and after an update.
- The KL of a trajectory that continues in a later batch is summed over both, and each collector
  begins new sums. Trajectory ids are unique across workers.
- `update_policy_weights_()` moves the policy of the workers and not the reference.
- If a worker dies, the next use of the collector is a RuntimeError that names it. No process
  remains then, nor if the loop is left without `shutdown()`.
- The last dimension of a batch is time and has that name.

You may not rely on what padding holds with "workers": where `preemptive_threshold` has cut a batch,
TorchRL's buffers leave older steps there. ("collector", "mask") leaves them out.

Defaults are TorchRL's, except `auto_register_policy_transforms=False`, a `num_threads` that does
not change the threads of this process, `use_buffers=False` with `set_truncated=True`,
`launcher="mp"`, a free `tcp_port` and one thread per worker (DistributedCollector), and
`remote_configs={"num_cpus": 1}` and weights that are sent once before the start (RayCollector).
"""

from torchrl_kl.collectors.kl_collector import kl_collector

__all__ = ["kl_collector"]
