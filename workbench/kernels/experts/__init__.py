"""Routed experts: see `spec` for the contract."""

from workbench.kernels.experts import (
    reference,
    spec,
    torch_dense,
    torch_gathered,
    torch_onednn,
    torch_pairs,
    torch_sorted,
)
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "torch_dense": torch_dense,
        "torch_gathered": torch_gathered,
        "torch_onednn": torch_onednn,
        "torch_pairs": torch_pairs,
        "torch_sorted": torch_sorted,
    },
    spec.automatic_order,
)
