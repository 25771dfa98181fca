"""Gated delta rule: see `spec` for the contract, `reference` for the arbiter."""

from workbench.kernels.gated_delta_rule import reference, spec, torch_chunk, torch_interleaved, torch_recurrent
from workbench.kernels.registry import register_operation

register_operation(
    spec.OP,
    {
        "reference": reference,
        "torch_chunk": torch_chunk,
        "torch_interleaved": torch_interleaved,
        "torch_recurrent": torch_recurrent,
    },
    spec.automatic_order,
)
