"""Contract of the linear projection without bias.

    y = x weight^T

``run(x, weight) -> y``

x      [..., D]
weight [N, D]    dtype of x
y      [..., N]  dtype of x, accumulated in fp32 or better
"""

from __future__ import annotations

from workbench.kernels.registry import Call

OP = "linear"


def automatic_order(call: Call) -> tuple[str, ...]:
    return ("torch_onednn", "torch_linear")
