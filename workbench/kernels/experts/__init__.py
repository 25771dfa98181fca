"""Routed experts: see `spec` for the contract."""

from workbench.kernels.experts import (
    reference,
    spec,
    torch_batched,
    torch_dense,
    torch_gathered,
    torch_grouped,
    torch_loop,
    torch_onednn,
    torch_pairs,
    torch_sized,
    torch_sorted,
)
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "torch_batched": torch_batched,
        "torch_dense": torch_dense,
        "torch_gathered": torch_gathered,
        "torch_grouped": torch_grouped,
        "torch_loop": torch_loop,
        "torch_onednn": torch_onednn,
        "torch_pairs": torch_pairs,
        "torch_sized": torch_sized,
        "torch_sorted": torch_sorted,
    },
    spec.automatic_order,
)
