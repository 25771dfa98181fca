"""Both norms of `spec` in one kernel in Triton: each row is read once, and lies where its view says.

The gated norm rounds the normalised row to the dtype of x before the weight, as the contract does. Rows are a view of
two axes, tokens and heads, since the output gate is a part of a wider projection: no copy is made of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench import taps
from workbench.kernels import triton_runs
from workbench.kernels.layout import row_major
from workbench.kernels.registry import Call

REQUIRES = triton_runs.REQUIRES
GATED_FLAGS = (taps.GDN_NORM,)


def supports(call: Call) -> str | None:
    return triton_runs.refusal(call)


class Rows(NamedTuple):
    """x [..., D] as rows: row r begins ``r // heads * outer + r % heads * inner`` elements behind the first."""

    x: Tensor
    heads: int
    outer: int
    inner: int


def rows_of(x: Tensor) -> Rows:
    """x itself where its leading axes are two steps in memory and its rows dense, a copy of it elsewhere."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = row_major(x)
    axes = [(size, step) for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    joined: list[tuple[int, int]] = []
    for size, step in axes:  # an axis whose step is the whole of the next one is one with it
        if joined and joined[-1][1] == size * step:
            joined[-1] = (joined[-1][0] * size, step)
        else:
            joined.append((size, step))
    if len(joined) > 2:
        return rows_of(row_major(x))
    (_, outer), (heads, inner) = [(1, 0), (1, 0), *joined][-2:]
    return Rows(x, heads, outer, inner)


def run_rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `spec`."""
    return _normed(x, None, weight, eps, None)


def run_gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, flags: Tensor | None = None
) -> Tensor:
    """See `spec`. `flags` int32 [1, 2]: words of `taps.GDN_NORM`."""
    return _normed(x, gate, weight, eps, flags)


def _normed(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, flags: Tensor | None) -> Tensor:
    from workbench.kernels.flags_kernels import PROGRAMS
    from workbench.kernels.norms import triton_rms_kernels as kernels

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    if y.numel() == 0:
        return y
    count = y.numel() // width
    rows = rows_of(x)
    gates = rows if gate is None else rows_of(gate)
    settings = kernels.settings(width, count)
    programs = -(-count // settings.rows)
    kernels.norm_kernel[(programs if flags is None else min(programs, PROGRAMS),)](
        rows.x, None if gate is None else gates.x, row_major(weight), y, flags, count, eps,
        rows.heads, rows.outer, rows.inner, gates.heads, gates.outer, gates.inner,
        WIDTH=width, ROWS=settings.rows, COLUMNS=settings.columns, num_warps=settings.warps,
    )  # fmt: skip
    return y
