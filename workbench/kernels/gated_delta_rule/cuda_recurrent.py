"""The recurrence of `spec` token by token, CUDA C++ (csrc/recurrent.cuh), fp32 throughout: the decode step.

A block holds 128 value columns of one head's state in registers for all tokens of its sequence.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels import cuda_build
from workbench.kernels.gated_delta_rule import cuda_chunk, library_form, spec, torch_recurrent
from workbench.kernels.gated_delta_rule.cuda_chunk import Limits
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call
from workbench.kernels.requirements import Requires
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

REQUIRES = Requires(devices=("cuda",), capability=(7, 5), dtypes=(torch.bfloat16, torch.float16, torch.float32))
FLAGS = (taps.GDN_STATE, taps.GDN_OUT)
MOST_KEYS = 256

SOURCE = Path(__file__).parent / "csrc" / "recurrent.cu"
#: In the order of ElementKind in csrc/recurrent.cuh.
ELEMENT_KINDS = (torch.float32, torch.float16, torch.bfloat16)

_POINTERS = (
    "q", "k", "v", "log_decay", "beta", "initial_state", "out", "state", "bounds", "out_flag", "state_flag",
)  # fmt: skip
_NUMBERS = (
    "sequences", "tokens", "key_heads", "value_heads", "key_dim", "value_dim", "key_kind", "value_kind",
    "limits_state",
)  # fmt: skip


class RecurrentArguments(ctypes.Structure):
    """`RecurrentArguments` of csrc/recurrent.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int) for name in _NUMBERS),
        ("state_limits", Limits),
    )  # fmt: skip


def supports(call: Call) -> str | None:
    if call.needs_grad:
        return "has no backward pass; name a torch backend for training"
    if call.policy.state_dtype != "float32":
        return f"holds the state in float32; the policy asks for {call.policy.state_dtype}; use torch_recurrent"
    if call.weight_shape and call.weight_shape[1] > MOST_KEYS:
        return f"has kernels for key sizes up to {MOST_KEYS}, found {call.weight_shape[1]}"
    return torch_recurrent.supports(call) or (cuda_build.refusal() if call.machine.is_here else None)


def library(device: torch.device) -> ctypes.CDLL:
    """The kernel for the device's architecture, built on first use."""
    return cuda_build.built(SOURCE, {}, torch.cuda.get_device_capability(device))


@lru_cache(maxsize=256)
def _on_device(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec`. `flags` int32 [2, 2]: the words of FLAGS (see `tracing.flags`), raised in the kernel's epilogue."""
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    device = v.device
    bounds = spec.sequence_bounds(batch, tokens, cu_seqlens)
    sequences = batch if bounds is None else len(bounds) - 1
    kind = q.dtype if q.dtype == k.dtype else torch.float32
    tensors = {
        "q": row_major(q.to(kind)), "k": row_major(k.to(kind)), "v": row_major(v),
        "log_decay": library_form.gates(log_decay, policy, tokens), "beta": row_major(beta.to(torch.float32)),
        "initial_state": None if initial_state is None else row_major(initial_state.to(torch.float32)),
        "out": torch.empty(v.shape, dtype=v.dtype, device=device),
        "state": torch.empty(sequences, value_heads, key_dim, value_dim, dtype=torch.float32, device=device),
        "bounds": None if bounds is None else _on_device(tuple(bounds), device),
        "state_flag": None if flags is None else flags[0], "out_flag": None if flags is None else flags[1],
    }  # fmt: skip
    arguments = RecurrentArguments(
        **{name: None if x is None else x.data_ptr() for name, x in tensors.items()},
        sequences=sequences, tokens=tokens, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim,
        value_dim=value_dim, key_kind=ELEMENT_KINDS.index(kind), value_kind=ELEMENT_KINDS.index(v.dtype),
        limits_state=policy.clamp("state", spec.phase_of(tokens)) is not None,
        state_limits=Limits.of(policy.clamp("state", spec.phase_of(tokens))),
    )  # fmt: skip
    found = library(device)
    with torch.cuda.device_of(v):
        code = found.launch_recurrent(ctypes.byref(arguments), cuda_chunk.launch_stream(device))
    cuda_chunk.raise_for(code, found, "gated_delta_rule token by token")
    return library_form.finished(tensors["out"], tensors["state"], policy, tap, like=v)
