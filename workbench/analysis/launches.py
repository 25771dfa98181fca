"""How many kernels a computation launches and how often the host waits for the device, counted on any device.

Every operator that reaches the dispatcher below autograd and is not a mere view launches about one kernel on a device
(a matrix product exactly one; a few composites two or three). An operator whose result the host needs before it can go
on (a scalar read back, an index list, a copy to the host) is a host sync. Both are counted without a GPU, which is what
makes structures and solvers comparable here; on one, `torch.profiler` counts the kernels themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators after which the host knows a value or a size that depends on values.
SYNCS = frozenset({
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor",
})  # fmt: skip

#: Operators that only allocate or rename.
NO_LAUNCH = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::detach",
                       "aten::lift_fresh", "aten::alias"})  # fmt: skip


@dataclass(slots=True)
class Launches:
    """`kernels` and `syncs` as described above; `by_op` counts the kernels by operator."""

    kernels: int = 0
    syncs: int = 0
    by_op: Counter[str] = field(default_factory=Counter)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Launches()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in SYNCS or func.name() in SYNCS:
            self.found.syncs += 1
        is_view = any(returned.alias_info is not None and not returned.alias_info.is_write
                      for returned in func._schema.returns)  # fmt: skip
        gives_tensor = any("Tensor" in str(returned.type) for returned in func._schema.returns)
        if gives_tensor and not is_view and name not in NO_LAUNCH:
            self.found.kernels += 1
            self.found.by_op[name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def count_launches(call: Callable[[], object]) -> Launches:
    """Run `call` once, so that backends are chosen and tables made, then again without gradients, and count."""
    with torch.no_grad():
        call()
    with torch.no_grad(), _Counting() as mode:  # inference mode would hide what composites are made of
        call()
    return mode.found
