"""RMS norm and gated RMS norm: see `spec` for the contracts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from workbench.kernels.norms import fla, flashinfer, reference, spec, torch_rms, triton_rms, vllm
from workbench.kernels.registry import register_operation
from workbench.kernels.requirements import Requires


@dataclass(frozen=True, slots=True)
class _Entry:
    """One of the two norms that a module has, as `register_operation` wants a backend."""

    run: Callable
    supports: Callable
    REQUIRES: Requires = field(default_factory=Requires)
    FORMS: Mapping = field(default_factory=dict)
    FLAGS: tuple[str, ...] = ()


def _rms_norm(module: ModuleType) -> _Entry:
    requires = getattr(module, "REQUIRES", Requires())
    return _Entry(module.run_rms_norm, module.supports, requires, getattr(module, "FORMS", {}))


def _gated_rms_norm(module: ModuleType) -> _Entry:
    requires = getattr(module, "GATED_REQUIRES", getattr(module, "REQUIRES", Requires()))
    flags = getattr(module, "GATED_FLAGS", ())
    return _Entry(module.run_gated_rms_norm, module.supports, requires, getattr(module, "FORMS", {}), flags)


register_operation(
    spec.RMS_NORM,
    {
        "reference": _rms_norm(reference),
        "flashinfer": _rms_norm(flashinfer),
        "torch_rms": _rms_norm(torch_rms),
        "triton_rms": _rms_norm(triton_rms),
        "vllm": _rms_norm(vllm),
    },
    spec.automatic_order,
)
register_operation(
    spec.GATED_RMS_NORM,
    {
        "reference": _gated_rms_norm(reference),
        "fla": _gated_rms_norm(fla),
        "torch_rms": _gated_rms_norm(torch_rms),
        "triton_rms": _gated_rms_norm(triton_rms),
        "vllm": _gated_rms_norm(vllm),
    },
    spec.automatic_order,
)
