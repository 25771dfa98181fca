"""As `torch_sorted`, with oneDNN's product: see `linear.torch_onednn` for when and why."""

from __future__ import annotations

from torch import Tensor

from workbench.kernels.experts.torch_sorted import by_segments
from workbench.kernels.linear.torch_onednn import product, refusal
from workbench.kernels.registry import Call

#: Rows per expert come in multiples of this, so that few shapes have to be compiled.
SEGMENT_ROWS = 32


def supports(call: Call) -> str | None:
    return refusal(call)


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return by_segments(
        x, weights, experts, gate_up.contiguous(), down.contiguous(), product=product, multiple=SEGMENT_ROWS
    )
