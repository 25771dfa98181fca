"""How many kernels a computation launches, how often the host waits for the device, and the bytes that are touched.

Every operator that reaches the dispatcher below autograd and is not a mere view launches about one kernel on a device
(a matrix product exactly one; a few composites two or three). An operator whose result the host needs before it can go
on (a scalar read back, an index list, a copy to the host) is a host sync. Bytes are those of the tensors that a kernel
reads and writes, each element once, of a gather only what it fetches: what must cross the memory bus where no cache
helps. All are counted without a GPU, which is what makes structures and solvers comparable here; on one,
`torch.profiler` counts the kernels themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators after which the host knows a value or a size that depends on values.
SYNCS = frozenset({
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor",
})  # fmt: skip

#: Methods that hand values to the host without an operator of the dispatcher, or with one that is no sync elsewhere.
HOST_COPIES = frozenset({Tensor.tolist, Tensor.numpy, Tensor.cpu})

#: Operators that read of their first tensor only what the others ask for.
GATHERS = frozenset({"aten::index_select", "aten::gather", "aten::index", "aten::embedding", "aten::embedding_bag",
                     "aten::_embedding_bag", "aten::_embedding_bag_forward_only"})  # fmt: skip

#: Operators that only allocate or rename.
NO_LAUNCH = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::detach",
                       "aten::lift_fresh", "aten::alias"})  # fmt: skip


@dataclass(slots=True)
class Launches:
    """`kernels`, `syncs` and `bytes` as described above; `by_op` counts the kernels by operator."""

    kernels: int = 0
    syncs: int = 0
    bytes: int = 0
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
            result = func(*args, **(kwargs or {}))
            self.found.bytes += _bytes_touched(name, args, kwargs or {}, result)
            return result
        return func(*args, **(kwargs or {}))


class _CountingHostCopies(TorchFunctionMode):
    def __init__(self, found: Launches):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST_COPIES:
            self.found.syncs += 1
        return func(*args, **(kwargs or {}))


def _bytes_touched(name: str, args: tuple, kwargs: dict, result: object) -> int:
    written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in GATHERS:
        # The first tensor is the table: as much of it is read as there are indices, rows of it at most.
        table, *indices = read
        fetched = sum(x.numel() for x in indices if not x.is_floating_point())
        row = 1 if name in ("aten::gather", "aten::index") else table[0].numel() if len(table) else 0
        most = max(fetched * row, sum(x.numel() for x in written[:1]))
        return sum(map(_bytes, [*indices, *written])) + most * table.element_size()
    return sum(map(_bytes, [*read, *written]))


def _bytes(x: Tensor) -> int:
    """Of the elements that are there: an axis that was expanded holds one."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or size == 0 else 1
    return count * x.element_size()


def count_launches(call: Callable[[], object]) -> Launches:
    """Run `call` once, so that backends are chosen and tables made, then again without gradients, and count."""
    with torch.no_grad():
        call()
    mode = _Counting()
    with torch.no_grad(), _CountingHostCopies(mode.found), mode:  # inference mode would hide what composites consist of
        call()
    return mode.found
