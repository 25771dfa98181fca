"""The gated delta rule chunk after chunk, each evaluated whole before the next: the structure that one writes first.

The arithmetic is that of `torch_chunk`, the order is not: what needs no state is done in the loop too, with launches of
its own for each chunk. Kept so that the gain of two phases can be timed. An observer sees all chunks at once, as there.
"""

from __future__ import annotations

from torch import Tensor

from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.kernels.registry import Call
from workbench.numerics import NumericsPolicy
from workbench.taps import Tap


def supports(call: Call) -> str | None:
    return torch_chunk.supports(call)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    policy: NumericsPolicy,
    tap: Tap | None = None,
) -> tuple[Tensor, Tensor]:
    """See `spec`."""
    return torch_chunk.run_in_parts(
        q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, policy=policy,
        tap=tap, limit=0,
    )  # fmt: skip
