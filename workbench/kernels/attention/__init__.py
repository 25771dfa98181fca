"""Causal grouped-query attention: see `spec` for the contract."""

from workbench.kernels.attention import reference, spec, torch_onednn, torch_sdpa
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {"reference": reference, "torch_onednn": torch_onednn, "torch_sdpa": torch_sdpa},
    spec.automatic_order,
)
