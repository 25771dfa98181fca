"""Contracts of the two RMS norms.

rms_norm:        y = x rsqrt(mean(x^2) + eps) (1 + weight)          zero-centred weight, rounded once at the end
gated_rms_norm:  y = (weight * round(x rsqrt(mean(x^2) + eps))) silu(gate)   plain weight; `round` is to x's dtype

``run_rms_norm(x, weight, *, eps)``              x [..., D], weight [D]
``run_gated_rms_norm(x, gate, weight, *, eps)``  x, gate [..., W], weight [W], shared by the heads

Arithmetic in fp32 or better, results in the dtype of x.
"""

from __future__ import annotations

from workbench.kernels.registry import Call

RMS_NORM = "rms_norm"
GATED_RMS_NORM = "gated_rms_norm"


def automatic_order(call: Call) -> tuple[str, ...]:
    return ("torch_rms",)
