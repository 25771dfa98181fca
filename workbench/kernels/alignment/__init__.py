"""Token-expert pairs in the order of their experts: see `spec` for the contract."""

from workbench.kernels.alignment import ixformer, reference, spec, torch_count, torch_sort, triton_count, vllm
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "ixformer": ixformer,
        "torch_count": torch_count,
        "torch_sort": torch_sort,
        "triton_count": triton_count,
        "vllm": vllm,
    },
    spec.automatic_order,
)
