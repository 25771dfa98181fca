"""`cuda_chunk` split over value columns: blocks of the scan with 32 of them, four for a head of 128.

In a block two warps share 16 columns, each with half of the keys. What a chunk needs is read once for each block, so it
pays where batch x heads leaves multiprocessors idle.
"""

from __future__ import annotations

from torch import Tensor

from workbench.kernels import cuda_build
from workbench.kernels.gated_delta_rule import cuda_chunk
from workbench.kernels.registry import Call
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap

ROUNDS_INSIDE = cuda_chunk.ROUNDS_INSIDE
REQUIRES = cuda_chunk.REQUIRES
FLAGS = cuda_chunk.FLAGS


def supports(call: Call) -> str | None:
    refused = cuda_chunk.form_refusal(call, cuda_chunk.SPLIT_WARPS)
    return refused or (cuda_build.refusal() if call.machine.is_here else None)


def run(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, policy: NumericsPolicy, tap: Tap | None = None, flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `spec` and `cuda_chunk.run`."""
    return cuda_chunk.run_in_blocks(
        q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, policy=policy,
        tap=tap, flags=flags, warps=cuda_chunk.SPLIT_WARPS,
    )  # fmt: skip


def path(q: Tensor, k: Tensor, v: Tensor, *, policy: NumericsPolicy, **_others: object) -> str:
    """Which way through the kernels a call takes."""
    return cuda_chunk.path_in_blocks(q, v, policy, cuda_chunk.SPLIT_WARPS)
