"""Causal depthwise convolution with SiLU: see `spec` for the contract."""

from workbench.kernels.causal_conv import (
    causal_conv1d,
    reference,
    spec,
    torch_depthwise,
    torch_shift,
    triton_conv,
    vllm,
)
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "causal_conv1d": causal_conv1d,
        "torch_depthwise": torch_depthwise,
        "torch_shift": torch_shift,
        "triton_conv": triton_conv,
        "vllm": vllm,
    },
    spec.automatic_order,
)
