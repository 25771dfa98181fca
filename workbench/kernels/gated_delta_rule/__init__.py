"""Gated delta rule: see `spec` for the contract, `reference` for the arbiter."""

from workbench.kernels.gated_delta_rule import (
    corex_gdn,
    cuda_chunk,
    cuda_chunk_split,
    cuda_recurrent,
    fla,
    flash_qla,
    flashinfer,
    reference,
    spec,
    torch_chunk,
    torch_interleaved,
    torch_recurrent,
    triton_chunk,
    triton_recurrent,
    vllm,
)
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "corex_gdn": corex_gdn,
        "cuda_chunk": cuda_chunk,
        "cuda_chunk_split": cuda_chunk_split,
        "cuda_recurrent": cuda_recurrent,
        "fla": fla,
        "flash_qla": flash_qla,
        "flashinfer": flashinfer,
        "torch_chunk": torch_chunk,
        "torch_interleaved": torch_interleaved,
        "torch_recurrent": torch_recurrent,
        "triton_chunk": triton_chunk,
        "triton_recurrent": triton_recurrent,
        "vllm": vllm,
    },
    spec.automatic_order,
)
