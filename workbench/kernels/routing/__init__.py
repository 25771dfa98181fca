"""Router: see `spec` for the contract."""

from workbench.kernels.registry import register_operation
from workbench.kernels.routing import ixformer, reference, spec, torch_max, torch_sort, triton_topk, vllm

register_operation(
    spec.OP,
    {
        "reference": reference,
        "ixformer": ixformer,
        "torch_max": torch_max,
        "torch_sort": torch_sort,
        "triton_topk": triton_topk,
        "vllm": vllm,
    },
    spec.automatic_order,
)
