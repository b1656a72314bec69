"""One call, `kl_collector`, that connects a KL stack to any of TorchRL's collectors.

`where` says where the reference is evaluated:

- "learner": each batch goes through the stack when it arrives. The reference scores a whole batch
  at once, a batch has one coefficient, and the learner waits meanwhile.
- "workers": each worker has a copy of the reference in its env, as the last transform. The work is
  shared, and each step is penalized with the learner's coefficient of that moment. A recurrent
  reference with asynchronous workers needs this: it cannot carry its state across batches that come
  from different workers in turn.

In both cases the stack stays in the learner's process, and each batch updates its controller there
when it arrives. The workers follow: they read the coefficient from a file that all processes of the
machine share, or are sent it over Ray. Changes of `stack.controller.coeff` by hand and changes of
the reference, by `stack.update_reference` or in any other way, reach them before they are asked for
the next batch; no worker scores with half of an update. If the policy itself is the reference
(`reference=` a context), "learner" needs no second model. With "workers" each worker has a copy of
the policy as it was at the start, with the context entered: what remains in that context, the base,
must not be trained.

You may rely on:

- ("next", "kl_coeff") is the coefficient of each step, also where an asynchronous collector mixes
  steps from before and after an update.
- The KL of a trajectory that continues in a later batch is summed over both, and each collector
  begins new sums. Trajectory ids are unique across workers.
- `update_policy_weights_()` moves the policy of the workers and not the reference.
- If a worker dies, the next use of the collector is a RuntimeError that names it, and no process
  remains. None remains either if the loop is left without `shutdown()`.
- The last dimension of a batch is time and has that name.

Defaults are TorchRL's, except `auto_register_policy_transforms=False`, a `num_threads` that does
not change the threads of this process, `launcher="mp"`, a free `tcp_port` and one thread per worker
(DistributedCollector), and `remote_configs={"num_cpus": 1}` and weights that are sent once before
the start (RayCollector).
"""

from torchrl_kl.collectors.kl_collector import kl_collector

__all__ = ["kl_collector"]
