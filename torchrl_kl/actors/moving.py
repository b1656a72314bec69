"""Moves a frozen actor towards another one, by a copy or by an average kept in fp32."""

import torch
from torch import Tensor, nn

from torchrl_kl.actors.parallel import laid_out_as, sharded_parts
from torchrl_kl.functional.numbers import Float64State, check_number


class MasterWeights(Float64State):
    """The fp32 weights behind half-precision ones, by name; made by the first average."""

    # bfloat16 has 8 significant bits, and would round off a thousandth of the way.

    @torch.no_grad()
    def move(self, actor: nn.Module, source: nn.Module, tau: float) -> None:
        """Moves `actor`, as `FrozenActor.update_reference` says."""
        check_number("tau", tau, above=0, at_most=1)
        own, new = entries_of(actor), entries_of(source)
        new = {name: laid_out_as(new[name], own.get(name, new[name])) for name in new}
        _check_entries(own, new)
        weights = dict(actor.named_parameters())
        for name, value in own.items():
            key = name.replace(".", "/")  # the name of a buffer must not have a dot
            master, before = value, self._buffers.pop(key, None)
            averaged = name in weights and (value.is_floating_point() or value.is_complex())
            if tau == 1 or not averaged:
                # Buffers are copied: running statistics and counters belong to their weights.
                value.copy_(new[name])
                continue
            if torch.finfo(value.dtype).bits < 32:
                # It begins anew where the weight was loaded or cast, and differs from it.
                if before is None or not torch.equal(before.to(value), value):
                    before = value.detach().float()
                master = before.to(value.device)
                self.register_buffer(key, master)
            target = new[name].to(device=master.device, dtype=master.dtype)
            # A step keeps equal weights equal to the bit, and equal infinities do not give NaN.
            master.add_(torch.where(target == master, 0.0, target - master), alpha=tau)
            if master is not value:
                value.copy_(master)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # The buffers are those of the state: `__init__` makes none, but the first average does.
        self._buffers.clear()
        for key, value in state_dict.items():
            if key.startswith(prefix):
                self.register_buffer(key.removeprefix(prefix), torch.empty_like(value))
        super()._load_from_state_dict(state_dict, prefix, *args)


def entries_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, including those that are not in `state_dict`."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"`source` must be the policy, a module, got {type(module).__name__}.")
    for part in sharded_parts(module):
        part.reshard()  # of gathered weights, edits would be lost
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _check_entries(own: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    for name in sorted({*own, *new}):
        here, there = (tuple(each[name].shape) if name in each else None for each in (own, new))
        if here != there:
            raise ValueError(
                f"`source` must have the weights of the reference, got {name!r} of shape {there}, "
                f"where the reference has {here}: pass the policy, not what wraps it."
            )
        if new[name].isnan().any():
            raise ValueError(f"`source` has NaN in {name!r}: the policy has diverged.")
