"""Routed experts: see `spec` for the contract."""

from workbench.kernels.experts import (
    corex_moe,
    ixformer,
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
    triton_few,
    triton_grouped,
    vllm,
)
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "corex_moe": corex_moe,
        "ixformer": ixformer,
        "torch_batched": torch_batched,
        "torch_dense": torch_dense,
        "torch_gathered": torch_gathered,
        "torch_grouped": torch_grouped,
        "torch_loop": torch_loop,
        "torch_onednn": torch_onednn,
        "torch_pairs": torch_pairs,
        "torch_sized": torch_sized,
        "torch_sorted": torch_sorted,
        "triton_few": triton_few,
        "triton_grouped": triton_grouped,
        "vllm": vllm,
    },
    spec.automatic_order,
)
