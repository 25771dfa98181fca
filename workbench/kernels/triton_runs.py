"""Where Triton kernels can run: on a GPU, and on a CPU in Triton's interpreter, which is how their tests run anywhere.

A backend in Triton is two files: ``triton_NAME.py``, the backend, which imports no Triton, and
``triton_NAME_kernels.py`` with the kernels, which `run` imports when it is first called. Triton decides when a kernel
is defined whether it is interpreted, so TRITON_INTERPRET=1 has to be set before that.
"""

from __future__ import annotations

import functools
import os

import torch

from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires

#: What every Triton backend needs. Of the dtypes each may take fewer.
REQUIRES = Requires(
    devices=("cuda", "cpu"), capability=(8, 0), dtypes=(torch.bfloat16, torch.float16, torch.float32),
    symbols=("triton:jit",),
)  # fmt: skip


def is_interpreted() -> bool:
    """Whether kernels that are defined from now on run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(call: Call) -> str | None:
    """Why no Triton kernel may serve the call: a CPU without the interpreter, or a backward pass."""
    if call.tensor_device == "cpu" and not is_interpreted():
        return "compiles for a GPU; on a CPU Triton only interprets, for tests: set TRITON_INTERPRET=1 before the start"
    return "has no backward pass; name a torch backend for training" if call.needs_grad else None


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether tiles can be moved by descriptors: from compute capability 9.0 on, and in the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def is_chained(device: torch.device) -> bool:
    """Whether a kernel may be started while the one before it still runs (programmatic dependent launch)."""
    return device.type == "cuda" and has_copy_engine(device)  # both came with 9.0


def padded(size: int) -> int:
    """`size` rounded up to a power of two, at least the 16 of a side of a product."""
    return max(16, 1 << (size - 1).bit_length())
