"""As `torch_sorted`, with oneDNN's product: see `linear.torch_onednn` for when and why.

oneDNN compiles its kernel anew for each number of rows, which costs as much as a small product. By size class: segments
of a few rows come as they are, larger ones are rounded up.
"""

from __future__ import annotations

from torch import Tensor

from workbench.kernels.experts.spec import Chain
from workbench.kernels.experts.torch_sorted import by_segments
from workbench.kernels.linear.torch_onednn import product, refusal
from workbench.kernels.registry import Call

#: Size classes of segments: (at most so many rows, rounded up to a multiple of), the last for all others.
SIZE_CLASSES = ((8, 1), (64, 8))
LARGE_MULTIPLE = 32


def rounded(rows: int) -> int:
    """The number of rows that are computed for a segment of `rows`."""
    multiple = next((multiple for most, multiple in SIZE_CLASSES if rows <= most), LARGE_MULTIPLE)
    return -(-rows // multiple) * multiple


def supports(call: Call) -> str | None:
    return refusal(call)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, chain: Chain) -> Tensor:
    return by_segments(
        x, weights, experts, gate_up.contiguous(), down.contiguous(), chain=chain, product=product, rounded=rounded
    )
