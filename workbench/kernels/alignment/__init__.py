"""Token-expert pairs in the order of their experts: see `spec` for the contract."""

from workbench.kernels.alignment import reference, spec, torch_count, torch_sort
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {"reference": reference, "torch_count": torch_count, "torch_sort": torch_sort},
    spec.automatic_order,
)
