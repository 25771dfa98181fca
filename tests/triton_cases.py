"""Where tests run Triton kernels: on the GPU where there is one, otherwise in Triton's interpreter on the CPU.

Triton decides when a kernel is defined whether it is interpreted. So modules of kernels are imported anew inside the
fixture, and forgotten after it: no other test finds an interpreted kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _forget_kernels() -> None:
    for name in [name for name in sys.modules if name.startswith("workbench.") and name.endswith("_kernels")]:
        parent, _, leaf = name.rpartition(".")
        del sys.modules[name]
        if hasattr(sys.modules.get(parent), leaf):
            delattr(sys.modules[parent], leaf)  # or `from package import leaf` would find the old module


@pytest.fixture(scope="module")
def triton_device() -> Iterator[str]:
    """The device to put tensors on; while a test module with this fixture runs, Triton serves it."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        _forget_kernels()
        yield DEVICE
    _forget_kernels()
