"""Causal grouped-query attention: see `spec` for the contract."""

from workbench.kernels.attention import (
    corex_fa2,
    flash_attn,
    flashinfer,
    reference,
    spec,
    torch_onednn,
    torch_sdpa,
)
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "corex_fa2": corex_fa2,
        "flash_attn": flash_attn,
        "flashinfer": flashinfer,
        "torch_onednn": torch_onednn,
        "torch_sdpa": torch_sdpa,
    },
    spec.automatic_order,
)
