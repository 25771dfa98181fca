"""One decode step of a gated delta rule layer: see `spec` for the contract, `reference` for the arbiter."""

from workbench.kernels.gdn_decode import reference, spec, torch_composed, triton_packed
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {"reference": reference, "torch_composed": torch_composed, "triton_packed": triton_packed},
    spec.automatic_order,
)
