"""Router: see `spec` for the contract."""

from workbench.kernels.registry import register_operation
from workbench.kernels.routing import ixformer, reference, spec, torch_max, torch_sort, vllm

register_operation(
    spec.OP,
    {
        "reference": reference,
        "ixformer": ixformer,
        "torch_max": torch_max,
        "torch_sort": torch_sort,
        "vllm": vllm,
    },
    spec.automatic_order,
)
