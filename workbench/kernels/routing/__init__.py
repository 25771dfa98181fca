"""Router: see `spec` for the contract."""

from workbench.kernels.registry import register_operation
from workbench.kernels.routing import reference, spec, torch_max, torch_sort

register_operation(
    spec.OP,
    {"reference": reference, "torch_max": torch_max, "torch_sort": torch_sort},
    spec.automatic_order,
)
