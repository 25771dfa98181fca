"""What an op promises, in a form that a program can check: its cases, dtypes, tolerances and in-place rules.

Each op has one `Contract`, in `<op>/cases.py`; `conformance` holds any backend to it. Formula, shapes and layouts are
the text of the op's `spec`, the signature is that of its arbiter: neither is written down twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workbench.kernels.registry import Backend

#: Arguments of one call of an op, by name, floating tensors in fp32.
Arguments = Mapping[str, Any]
#: What a call returned: one tensor for each of the contract's outputs.
Outputs = tuple[Tensor, ...]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: An accumulation in fp32 or fp64 may be off by so many units in the last place of its dtype, over a whole tensor.
UNITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NanProbe:
    """A call with NaN (or an infinity that gives one) in some inputs.

    must    (output, where the arbiter has NaN) -> where there must be one; None: wherever the arbiter has one
    may     (output, where there must be one) -> where one may stand; None: nowhere else
    spares  backends for which one may stand anywhere, as the op's spec says
    reason  why `may` or `spares` is wider than `must`
    clean   the same call without what is bad, where all that stands outside `may` must be its result to the last bit

    What is finite for the arbiter and stands outside `may` must agree with it.
    """

    arguments: Arguments
    clean: Arguments | None = None
    must: Callable[[str, Tensor], Tensor] | None = None
    may: Callable[[str, Tensor], Tensor] | None = None
    spares: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A call and a change to its inputs that must leave part of the outputs as they are, to the last bit.

    `same(output)` is a mask of the elements that must not change (None: all), `changes` one of those of which at least
    one must (None: no such demand): a backend that ignores the input would pass otherwise.
    """

    arguments: Arguments
    changed: Arguments
    same: Callable[[Tensor], Tensor] | None = None
    changes: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The contract of one op.

    op          its name in the registry
    spec        the module whose text has formula, shapes, dtypes and layouts
    outputs     names of what a call returns, in order
    cases       the calls that every backend is held to, by name, made when first asked for
    limit       (dtype, output) -> largest `agreement.relative_error` against the float64 arbiter
    tolerance   the same in words
    roundings   how often a value is rounded to a narrow dtype on the way to the result, at most
    dtypes      of the calls; int64 alone where the op has no floating input
    output_dtype (dtype, output) -> the dtype that the output has
    wide        inputs that are fp32 or better whatever the dtype of the call
    on_host     inputs that stay contiguous on the CPU
    may_update  inputs that a backend may update in place if it declares so in `mutates`
    layout_limit how far the same values in another memory layout may change a result; None: within `limit`
    gradient_limit (dtype, input) -> how far a gradient may be from the arbiter's, over the largest one of the case
    probes      calls with NaN, by name
    laws        by the name of a check, calls by name, see `Law`
    repeats     case -> whether another has its shapes: memory, layouts and gradients are checked with that one alone
    unpromised  (case, policy) -> why a backend that computes by this preset is not held to the case, or None
    legal       (arguments, output, values [rows, ...]) -> what is wrong with whole numbers beside a NaN, or None
    parts       what a call returns -> its outputs, in order
    flagged     tap point -> output that a model shows there, of those that a kernel may flag (`Backend.flags`)
    """

    op: str
    spec: ModuleType
    outputs: tuple[str, ...]
    cases: Callable[[], Mapping[str, Arguments]]
    limit: Callable[[torch.dtype, str], float]
    tolerance: str
    output_dtype: Callable[[torch.dtype, str], torch.dtype]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    wide: tuple[str, ...] = ()
    on_host: tuple[str, ...] = ("cu_seqlens",)
    may_update: tuple[str, ...] = ()
    layout_limit: float | None = None
    gradient_limit: Callable[[torch.dtype, str], float] | None = None
    probes: Callable[[], Mapping[str, NanProbe]] = dict
    laws: Mapping[str, Callable[[], Mapping[str, Law]]] = field(default_factory=dict)
    repeats: Callable[[str], bool] = lambda _case: False
    unpromised: Callable[[str, str], str | None] = lambda _case, _policy: None
    legal: Callable[[Arguments, str, Tensor], str | None] = lambda _arguments, _output, _values: None
    parts: Callable[[Any], Outputs] = lambda found: found if isinstance(found, tuple) else (found,)
    flagged: Mapping[str, str] = field(default_factory=dict)

    def allowed(self, dtype: torch.dtype, output: str, backend: Backend | None = None) -> float:
        """The limit of an output; of a backend that rounds inside (`Backend.rounds_inside`) the widest of them all.

        What has to be exact, as values that are only moved, stays so.
        """
        own = self.limit(dtype, output)
        if backend is None or not backend.rounds_inside or own == 0.0:
            return own
        return max(self.limit(dtype, name) for name in self.outputs)

    def cast(self, arguments: Arguments, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
        """Floating inputs in `dtype`, those of `wide` in fp32 or better, tensors on `device` but those of the host."""

        def moved(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or name in self.on_host:
                return value
            if not value.is_floating_point() or not dtype.is_floating_point:
                return value.to(device)
            return value.to(device, torch.promote_types(dtype, torch.float32) if name in self.wide else dtype)

        return {name: moved(name, value) for name, value in arguments.items()}


def rounding_limit(roundings: int) -> Callable[[torch.dtype, str], float]:
    """fp32 and fp64: `UNITS` half units in the last place; narrower: as many as values are rounded to it."""

    def limit(dtype: torch.dtype, _output: str) -> float:
        return (UNITS if dtype in (torch.float32, torch.float64) else roundings) * torch.finfo(dtype).eps / 2

    return limit


def rounding_text(roundings: int) -> str:
    """`rounding_limit` in words."""
    times = "once" if roundings == 1 else f"{roundings} times"
    return (
        f"{UNITS} eps / 2 in float32 and float64; {roundings} eps / 2 in bfloat16 and float16, to which values are "
        f"rounded {times} at most"
    )


def same_dtype(dtype: torch.dtype, _output: str) -> torch.dtype:
    """Outputs in the dtype of the call."""
    return dtype


def tokens_text(count: int) -> str:
    """``1 token``, ``2 tokens``: for names of cases."""
    return f"{count} token{'' if count == 1 else 's'}"


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bounds_of(*lengths: int) -> Tensor:
    """[S + 1] boundaries of packed sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)
