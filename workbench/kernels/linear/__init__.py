"""Linear projection: see `spec` for the contract."""

from workbench.kernels.linear import ixformer, reference, spec, torch_linear, torch_onednn
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {"reference": reference, "ixformer": ixformer, "torch_linear": torch_linear, "torch_onednn": torch_onednn},
    spec.automatic_order,
)
