"""The largest sum of tensors that a computation holds at once, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watching(TorchDispatchMode):
    """Adds up the storages that operators return for the first time, and takes off those that are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.alive:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.alive[key] = size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.bytes -= self.alive.pop(key, 0)


def peak_tensor_bytes(call: Callable[[], object]) -> int:
    """Largest sum, in bytes, of the tensors that `call` makes and holds at once.

    Inputs and weights are not counted, nor what a library allocates inside one operator. Run without gradients.
    """
    with torch.inference_mode(), _Watching() as mode:
        call()
    return mode.peak
