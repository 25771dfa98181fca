"""RMS norm and gated RMS norm: see `spec` for the contracts."""

from dataclasses import dataclass

from workbench.kernels.norms import reference, spec, torch_rms
from workbench.kernels.registry import register_operation


@dataclass(frozen=True, slots=True)
class _Entry:
    run: object
    supports: object


for _op, _function in ((spec.RMS_NORM, "run_rms_norm"), (spec.GATED_RMS_NORM, "run_gated_rms_norm")):
    register_operation(
        _op,
        {
            "reference": _Entry(getattr(reference, _function), reference.supports),
            "torch_rms": _Entry(getattr(torch_rms, _function), torch_rms.supports),
        },
        spec.automatic_order,
    )
