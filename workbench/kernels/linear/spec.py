"""Contract of the linear projection without bias.

    y = x weight^T

``run(x, weight) -> y``

x      [..., D]
weight [N, D]    dtype of x
y      [..., N]  dtype of x, accumulated in fp32 or better
"""

from __future__ import annotations

import math

from workbench.kernels.registry import Call

OP = "linear"

#: From this many multiply-adds on oneDNN saves more than its call costs, measured for 1 to 31 rows.
ONEDNN_MULTIPLIES = 1 << 22


def automatic_order(call: Call) -> tuple[str, ...]:
    if call.tokens * math.prod(call.weight_shape) >= ONEDNN_MULTIPLIES:
        return ("torch_onednn", "torch_linear")
    return ("torch_linear", "torch_onednn")
