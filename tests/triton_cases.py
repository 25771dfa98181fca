"""Where tests run Triton kernels: on the GPU where there is one, otherwise in Triton's interpreter on the CPU.

Triton decides when a kernel is defined whether it is interpreted. So modules of kernels are imported anew inside the
fixture, and forgotten after it: no other test finds an interpreted kernel. Triton's own functions in Triton (sum, max,
zeros) were defined when something first imported it, maybe before: they are exchanged for interpreted ones meanwhile.
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


def _interpret_library(patch: pytest.MonkeyPatch) -> None:
    """Triton's own functions in Triton as interpreted ones, as if TRITON_INTERPRET had been set at its import."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    compiled = {name: found for name, found in vars(tl.standard).items() if isinstance(found, JITFunction)}
    interpreted = {found: InterpretedFunction(found.fn) for found in compiled.values()}
    for owner in (tl.standard, tl, tl.math, tl.tensor):
        for name, found in list(vars(owner).items()):
            if not isinstance(found, JITFunction) or found not in interpreted:
                continue
            function = interpreted[found]
            if owner is tl.tensor:  # a method: only a Python function is bound to its tensor
                patch.setattr(owner, name, lambda *args, _of=function, **named: _of(*args, **named))
            else:
                patch.setattr(owner, name, function)


def _round_to_nearest(patch: pytest.MonkeyPatch) -> None:
    """bfloat16 as a GPU has it: the interpreter cuts bits off, and multiplies matrices of it as whole numbers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding(self, handle, target):
        source, goal = handle.dtype.scalar, target.scalar
        if source == tl.float32 and goal == tl.bfloat16:
            data = torch.from_numpy(handle.data.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
            return TensorHandle(data, goal)
        if source == tl.bfloat16 and goal == tl.float32:
            data = torch.from_numpy(handle.data.view("int16").copy()).view(torch.bfloat16).float().numpy()
            return TensorHandle(data, goal)
        return cast(self, handle, target)

    def widened(self, a, b, *others):
        if a.dtype.scalar == tl.bfloat16:
            a, b = rounding(self, a, tl.float32), rounding(self, b, tl.float32)
        return dot(self, a, b, *others)

    patch.setattr(InterpreterBuilder, "cast_impl", rounding)
    patch.setattr(InterpreterBuilder, "create_dot", widened)
    for name in ("create_fp_ext", "create_fp_trunc"):
        if hasattr(InterpreterBuilder, name):
            patch.setattr(InterpreterBuilder, name, rounding)


@pytest.fixture(scope="module")
def triton_device() -> Iterator[str]:
    """The device to put tensors on; while a test module with this fixture runs, Triton serves it."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            _interpret_library(patch)
            _round_to_nearest(patch)
        _forget_kernels()
        yield DEVICE
    _forget_kernels()
