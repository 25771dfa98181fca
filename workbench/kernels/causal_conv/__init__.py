"""Causal depthwise convolution with SiLU: see `spec` for the contract."""

from workbench.kernels.causal_conv import reference, spec, torch_depthwise, torch_shift
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {"reference": reference, "torch_depthwise": torch_depthwise, "torch_shift": torch_shift},
    spec.automatic_order,
)
