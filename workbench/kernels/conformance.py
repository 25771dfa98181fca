"""Hold a backend to the contract of its op: any backend, ours, of a library, or a function that nobody has registered.

Every case of the contract is run through `Kernels`, as a model's call is, and compared with the float64 arbiter fed the
same rounded inputs. What a backend refuses is no failure, but a backend that refuses everything has not passed. Each
row of the result names its place: case, dtype, output, index, what was found there and what was expected.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BackendError, BackendFailure, InputError, one_line
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.alignment import cases as _alignment
from workbench.kernels.attention import cases as _attention
from workbench.kernels.causal_conv import cases as _causal_conv
from workbench.kernels.contract import Arguments, Contract, Law, NanProbe, Outputs
from workbench.kernels.experts import cases as _experts
from workbench.kernels.gated_delta_rule import cases as _gated_delta_rule
from workbench.kernels.gdn_decode import cases as _gdn_decode
from workbench.kernels.linear import cases as _linear
from workbench.kernels.norms import cases as _norms
from workbench.kernels.poisoned_memory import PACKAGES, poisoned_memory
from workbench.kernels.registry import OPERATIONS, Backend, Operation, backend_named, operation_named
from workbench.kernels.requirements import dtype_name
from workbench.kernels.routing import cases as _routing

CONTRACTS: dict[str, Contract] = {
    contract.op: contract
    for module in (
        _alignment, _attention, _causal_conv, _experts, _gated_delta_rule, _gdn_decode, _linear, _norms, _routing,
    )
    for contract in module.CONTRACTS
}  # fmt: skip

#: What is checked, in this order; the laws of an op come before the gradients.
RUNS = "runs"
SHAPE = "shape and dtype"
VALUE = "value against the arbiter"
INPUTS = "inputs left alone"
MEMORY = "outputs share no memory with inputs"
REPEAT = "repeats itself"
EMPTY = "uninitialised memory is not read"
STRIDES = "strides do not matter"
NAN = "NaN stays visible and in its rows"
FLAGS = "flags that it raises itself"
GRADIENT = "gradients"
CHECKS = (RUNS, SHAPE, VALUE, INPUTS, MEMORY, REPEAT, EMPTY, STRIDES, NAN, FLAGS, GRADIENT)

PASSED, REFUSED, FAILED = "passed", "refused", "failed"

#: Gradients are compared in these, of cases with up to so many values in their inputs.
GRADIENT_DTYPES, GRADIENT_VALUES = (torch.float64, torch.float32), 20_000
#: Largest error of a gradient, in units of the limit of the op's outputs, where the contract has none of its own.
GRADIENT_UNITS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check of one case in one dtype.

    output  the output, input or gradient that the row is about, empty where it is about the call
    reason  of a refusal or failure, one line
    error, limit  relative errors (`agreement.relative_error`); None where nothing was measured
    index, found, expected  the element that is furthest off, in an output that is
    first_bad_row  the first row (all axes but the last) that is off by more than the limit allows the largest row
    inputs  name -> shape, dtype and strides, of a failure
    """

    check: str
    case: str
    dtype: str
    outcome: str
    output: str = ""
    reason: str = ""
    error: float | None = None
    limit: float | None = None
    index: tuple[int, ...] | None = None
    found: float | None = None
    expected: float | None = None
    first_bad_row: tuple[int, ...] | None = None
    inputs: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line: where, what, and by how much."""
        what = f"{self.check}: case {self.case!r}, {self.dtype}" + (f", {self.output}" if self.output else "")
        parts = [f"{what}: {self.outcome}"]
        if self.reason:
            parts.append(self.reason)
        if self.error is not None and self.outcome == FAILED:
            parts.append(f"error {self.error:.2g}, limit {self.limit:.2g}")
        if self.index is not None:
            parts.append(f"at {list(self.index)} found {self.found:.9g}, expected {self.expected:.9g}")
        if self.first_bad_row is not None:
            parts.append(f"first bad row {list(self.first_bad_row)}")
        if self.inputs:
            parts.append("given " + ", ".join(f"{name} {text}" for name, text in self.inputs.items()))
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what does not apply is left out, what is not finite is text."""
        row: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return {name: _plain(value) for name, value in row.items() if value not in (None, "", {})}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """What became of one backend: a row for each check, case and dtype."""

    op: str
    backend: str
    device: str
    rows: tuple[Row, ...]

    @property
    def outcome(self) -> str:
        """`failed` where a row is; `refused` where not one case was served; else `passed`."""
        outcomes = {row.outcome for row in self.rows if row.check == VALUE}
        if self.failures:
            return FAILED
        return PASSED if PASSED in outcomes else REFUSED

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.outcome == FAILED)

    @property
    def reason(self) -> str:
        """The first failure, or all the reasons for refusing; empty where it passed."""
        if self.failures:
            return str(self.failures[0])
        refusals = dict.fromkeys(row.reason for row in self.rows if row.outcome == REFUSED)
        return "" if self.outcome == PASSED else "; ".join(refusals)

    def counts(self) -> dict[str, dict[str, int]]:
        """check -> outcome -> rows, in the order in which checks are made."""
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows:
            of_check = counts.setdefault(row.check, {PASSED: 0, REFUSED: 0, FAILED: 0})
            of_check[row.outcome] += 1
        order = {check: place for place, check in enumerate(CHECKS)}
        return dict(sorted(counts.items(), key=lambda pair: order.get(pair[0], len(CHECKS) - 1.5)))

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op, "backend": self.backend, "device": self.device, "outcome": self.outcome,
            "reason": self.reason, "counts": self.counts(), "rows": [row.to_json() for row in self.rows],
        }  # fmt: skip


def contract_of(op: str) -> Contract:
    """Raises BackendError, with the names that there are, for an op that is not declared."""
    return CONTRACTS[operation_named(op).name]


def conform(
    op: str, backend: str | Backend | Callable[..., Any], *, device: str = "cpu",
    dtypes: Iterable[torch.dtype] | None = None, cases: Iterable[str] | None = None,
) -> Conformance:  # fmt: skip
    """Hold a backend to the contract of `op` and say what became of every check.

    `backend` is a registered name, a `Backend`, or a function with the contract's signature, which need not be
    registered; `dtypes` those of the contract where None; `cases` names of the contract's, all where None. What no
    dtype changes is checked in the first dtype that the backend serves a case in. Raises BackendError for an unknown
    op or backend and a function with another signature, InputError for an unknown case or a dtype that the op has not.
    """
    contract = contract_of(op)
    backend = _as_backend(op, backend)
    taken = tuple(contract.dtypes if dtypes is None else dtypes)
    for dtype in taken:
        if dtype not in contract.dtypes:
            names = ", ".join(map(dtype_name, contract.dtypes))
            raise InputError(f"op {op}: expected dtypes of {names}, found {dtype_name(dtype)}")
    known = contract.cases()
    chosen = tuple(known if cases is None else cases)
    for case in chosen:
        if case not in known:
            raise InputError(f"op {op}: unknown case {case!r}, expected one of {', '.join(known)}")
    with _reachable(backend):
        rows = _Examination(contract, backend, device).rows(chosen, taken, everything=cases is None)
        return Conformance(op=op, backend=backend.name, device=device, rows=tuple(rows))


def signature_of(op: str) -> inspect.Signature:
    """How a backend of `op` is called: the signature of its arbiter."""
    return inspect.signature(operation_named(op).backends["reference"].run)


def signature_text(op: str) -> str:
    """The same as one reads it: annotations without quotes."""
    return str(signature_of(op)).replace("'", "")


def unfit(op: str, function: Callable[..., Any]) -> str | None:
    """Why a function cannot be called as a backend of `op` is, both signatures shown; None where it can.

    What the contract passes by position has its place and its name there, what it passes by keyword its name; whatever
    else the function takes must have a default. One whose signature Python cannot read is taken as it is.
    """
    wanted = signature_of(op)
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # of compiled code
        return None
    by_position = [p.name for p in wanted.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    by_name = [p.name for p in wanted.parameters.values() if p.kind == p.KEYWORD_ONLY]
    both = f"expected {op}{signature_text(op)}, found {getattr(function, '__qualname__', function)}{found}"
    try:
        bound = found.bind(*by_position, **{name: name for name in by_name})
    except TypeError as error:
        return f"{error}; {both}"
    moved = [f"{name} where {value} is passed" for name, value in bound.arguments.items()
             if isinstance(value, str) and name in by_position and value != name]  # fmt: skip
    return f"it has {', '.join(moved)}; {both}" if moved else None


def _as_backend(op: str, backend: str | Backend | Callable[..., Any]) -> Backend:
    if isinstance(backend, Backend):
        if backend.op != op:
            raise BackendError(f"op {op}: backend {backend.name} is one of {backend.op}; name that op")
        return backend
    if isinstance(backend, str):
        return backend_named(op, backend)
    wrong = unfit(op, backend)
    if wrong:
        raise BackendError(f"op {op}: {_name_of(backend)} has not the signature of the contract: {wrong}")
    return Backend(op, _name_of(backend), backend, lambda call: None)


def _name_of(function: Callable[..., Any]) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


@contextmanager
def _reachable(backend: Backend) -> Iterator[None]:
    """The registry with this backend, so that calls take the way of a model's."""
    operation = OPERATIONS[backend.op]
    if operation.backends.get(backend.name) is backend:
        yield
        return
    OPERATIONS[backend.op] = Operation(
        operation.name, dict(operation.backends) | {backend.name: backend}, operation.automatic_order
    )
    try:
        yield
    finally:
        OPERATIONS[backend.op] = operation


class _Refusal(Exception):
    """The backend said before it ran that it cannot serve a call."""


class _Failure(Exception):
    """The backend raised while it ran; the text is all of what it raised."""


def _arbiter(op: str, case: str, dtype: torch.dtype) -> Outputs:
    """The arbiter in float64 on a case or a NaN probe of the contract, fed the values that `dtype` can hold."""
    return _arbiter_once(op, case, _of_values(dtype))


def _of_values(dtype: torch.dtype) -> torch.dtype:
    """Cases are written in fp32: in float64 they have the same values, and the arbiter the same answer."""
    return torch.float32 if dtype == torch.float64 else dtype


@functools.cache
def _arbiter_once(op: str, case: str, dtype: torch.dtype) -> Outputs:
    contract = CONTRACTS[op]
    known = contract.cases()
    arguments = known[case] if case in known else contract.probes()[case].arguments
    return _called(contract, Kernels({op: "reference"}), _widened(contract, arguments, dtype))


@functools.cache
def _arbiters_gradients(op: str, case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """The arbiter's gradients in float64, and the scale of an error: the largest of them, or a hundredth of what came
    down from above, since some gradients are a difference of equals, as that of a norm over one channel."""
    contract = CONTRACTS[op]
    wide = _widened(contract, contract.cases()[case], dtype)
    kernels = Kernels({op: "reference"})
    found, cotangents = _gradients(contract, lambda arguments: _called(contract, kernels, arguments), wide)
    sizes = [torch.linalg.vector_norm(x).item() for x in found.values()]
    return found, max(*sizes, *(0.01 * torch.linalg.vector_norm(x).item() for x in cotangents))


def _widened(contract: Contract, arguments: Arguments, dtype: torch.dtype) -> dict[str, Any]:
    if not dtype.is_floating_point:
        return dict(arguments)
    return contract.cast(contract.cast(arguments, dtype), torch.float64)


def _called(contract: Contract, kernels: Kernels, arguments: Arguments) -> Outputs:
    return contract.parts(getattr(kernels, contract.op)(**arguments))


def _gradients(
    contract: Contract, run: Callable[[dict[str, Any]], Outputs], arguments: Arguments
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of a weighted sum of the floating outputs with respect to all floating inputs, and the weights."""
    leaves = {
        name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    parts = [part for part in run(leaves) if part.is_floating_point()]
    weights = [
        torch.linspace(-1.0, 2.0, p.numel(), dtype=torch.float64, device=p.device).view(p.shape).to(p.dtype)
        for p in parts
    ]
    sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
    trained = {name: x for name, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}
    return {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in trained.items()}, weights


@dataclass(slots=True)
class _Served:
    """A case that the backend served, for the checks that follow."""

    case: str
    arguments: dict[str, Any]
    dtype: torch.dtype
    outputs: Outputs


class _Examination:
    """All checks of one backend."""

    def __init__(self, contract: Contract, backend: Backend, device: str):
        self.contract, self.backend, self.device = contract, backend, device
        self.kernels = Kernels({contract.op: backend.name})
        self.packages = tuple({*PACKAGES, (getattr(backend.run, "__module__", None) or "workbench").split(".")[0]})

    def rows(self, cases: tuple[str, ...], dtypes: tuple[torch.dtype, ...], everything: bool) -> Iterator[Row]:
        served: list[_Served] = []
        for case in cases:
            first: _Served | None = None
            for dtype in dtypes:
                found = yield from self._values(case, dtype)
                first = first or found
            served += [first] if first else []
        for one in served:  # all cases have been run by now: what one call leaves behind meets the others
            if not self.contract.repeats(one.case):
                yield from self._again(one)
                yield from self._strides(one)
            if self.backend.flags:
                yield self._flags(one.case, one.arguments, one.dtype)
        widest = [dtype for dtype in dtypes if any(one.dtype == dtype for one in served)]
        if everything and widest:
            for name, probe in self.contract.probes().items():
                yield from self._probe(name, probe, widest[0])
                if self.backend.flags:
                    yield self._flags(name, probe.arguments, widest[0])
            for check, laws in self.contract.laws.items():
                for name, law in laws().items():
                    yield from self._law(check, name, law, widest[0])
        for dtype in dtypes:
            if dtype in GRADIENT_DTYPES:
                for case in cases:
                    yield from self._gradient(case, dtype)

    # ---- calls

    def _given(self, arguments: Arguments, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of its own for a call: tensors are copies, in their layout, that a backend may spoil."""
        moved = self.contract.cast(arguments, dtype, self.device)
        return {name: _copied(x) if isinstance(x, Tensor) else x for name, x in moved.items()}

    def _call(self, arguments: Arguments) -> Outputs:
        """Raises _Refusal with the backend's reason, _Failure with all that it raised."""
        try:
            found = _called(self.contract, self.kernels, arguments)
        except BackendFailure as error:
            raise _Failure(_told(error.__cause__ or error)) from error
        except BackendError as error:
            said = f"op {self.contract.op}: backend {self.backend.name} was asked for and cannot serve this call: "
            if not str(error).startswith(said):
                raise _Failure(_told(error)) from error
            raise _Refusal(str(error).removeprefix(said)) from error
        except Exception as error:
            raise _Failure(_told(error)) from error
        names = self.contract.outputs
        if len(found) != len(names) or not all(isinstance(part, Tensor) for part in found):
            kinds = ", ".join(type(part).__name__ for part in found)
            raise _Failure(f"expected {len(names)} tensors ({', '.join(names)}), found {len(found)}: {kinds}")
        return found

    def _row(self, check: str, case: str, dtype: torch.dtype, outcome: str, **more: Any) -> Row:
        return Row(check=check, case=case, dtype=dtype_name(dtype), outcome=outcome, **more)

    def _failed(self, check: str, case: str, dtype: torch.dtype, arguments: Arguments, reason: str, **more: Any) -> Row:
        return self._row(check, case, dtype, FAILED, reason=reason, inputs=_described(arguments), **more)

    def _unpromised(self, case: str) -> str | None:
        policy = self.backend.policy
        return None if policy is None else self.contract.unpromised(case, policy)

    # ---- checks

    def _values(self, case: str, dtype: torch.dtype) -> Iterator[Row]:
        """Run a case: shape, dtype, value, inputs and memory. Returns what was served, None where nothing was."""
        contract = self.contract
        expected = _arbiter(contract.op, case, dtype)
        if any(_overflows(e, contract.output_dtype(dtype, n)) for n, e in zip(contract.outputs, expected, strict=True)):
            return None  # the right answer is none that this dtype can hold
        given = self._given(contract.cases()[case], dtype)
        kept = {name: _copied(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        try:
            found = self._call(given)
        except _Refusal as refusal:
            yield self._row(RUNS, case, dtype, REFUSED, reason=str(refusal))
            return None
        except _Failure as failure:
            yield self._failed(RUNS, case, dtype, kept, str(failure))
            return None
        yield self._row(RUNS, case, dtype, PASSED)
        yield from self._untouched(case, dtype, given, kept, found)
        found = tuple(_copied(part) for part in found)
        wrong = self._misshapen(dtype, found, expected)
        if wrong:
            yield self._failed(SHAPE, case, dtype, kept, wrong)
            return None
        yield self._row(SHAPE, case, dtype, PASSED)
        unpromised = self._unpromised(case)
        if unpromised:
            yield self._row(VALUE, case, dtype, REFUSED, reason=unpromised)
        else:
            yield from self._compared(VALUE, case, dtype, kept, found, expected)
        return _Served(case, kept, dtype, found)

    def _misshapen(self, dtype: torch.dtype, found: Outputs, expected: Outputs) -> str:
        for name, part, reference in zip(self.contract.outputs, found, expected, strict=True):
            wanted = self.contract.output_dtype(dtype, name)
            if part.shape != reference.shape or part.dtype != wanted or part.device.type != self.device.split(":")[0]:
                return (
                    f"{name}: expected {list(reference.shape)} {dtype_name(wanted)} on {self.device}, found "
                    f"{list(part.shape)} {dtype_name(part.dtype)} on {part.device}"
                )
        return ""

    def _compared(
        self, check: str, case: str, dtype: torch.dtype, arguments: Arguments, found: Outputs, expected: Outputs,
        limit: float | None = None,
    ) -> Iterator[Row]:  # fmt: skip
        """A row for each output: within its limit of the arbiter; whole numbers exactly."""
        for name, part, reference in zip(self.contract.outputs, found, expected, strict=True):
            allowed = self.contract.allowed(dtype, name, self.backend) if limit is None else limit
            part, reference = part.cpu(), reference.cpu()
            if not part.is_floating_point():
                if torch.equal(part, reference):
                    yield self._row(check, case, dtype, PASSED, output=name)
                else:
                    yield self._failed(check, case, dtype, arguments, "", output=name, **_place(part, reference, 0.0))
                continue
            error = relative_error(part, reference)
            if error <= allowed:
                yield self._row(check, case, dtype, PASSED, output=name, error=error, limit=allowed)
            else:
                yield self._failed(check, case, dtype, arguments, "", output=name, error=error, limit=allowed,
                                   **_place(part, reference, allowed))  # fmt: skip

    def _untouched(
        self, case: str, dtype: torch.dtype, given: Arguments, kept: Arguments, found: Outputs
    ) -> Iterator[Row]:
        """Inputs as they were, but those that the backend declares and may update; no output in the memory of one."""
        free = set(self.backend.mutates) & set(self.contract.may_update)
        changed = [name for name, x in kept.items() if name not in free and not _same(given[name], x)]
        if changed:
            x, before = given[changed[0]], kept[changed[0]]
            allowed = ", ".join(self.contract.may_update) or "none"
            where = _first_difference(x, before) if isinstance(x, Tensor) and x.shape == before.shape else {}
            yield self._failed(
                INPUTS, case, dtype, kept, f"{', '.join(changed)} changed by the call; a backend may update, if it "
                f"declares so in MUTATES: {allowed}", output=changed[0], **where,
            )  # fmt: skip
        else:
            yield self._row(INPUTS, case, dtype, PASSED)
        shared = [
            f"{output} lies in the memory of {name}"
            for output, part in zip(self.contract.outputs, found, strict=True)
            for name, x in given.items()
            if isinstance(x, Tensor) and name not in free and part.numel() and part.device == x.device
            and part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        ]  # fmt: skip
        if shared:
            yield self._failed(MEMORY, case, dtype, kept, "; ".join(shared), output=shared[0].split()[0])
        else:
            yield self._row(MEMORY, case, dtype, PASSED)

    def _again(self, one: _Served) -> Iterator[Row]:
        """The same call after all others, in memory that is full of NaN: the same bits."""
        case, dtype = one.case, one.dtype
        poisoned = yield from self._another(EMPTY, one, poisoned_memory(self.packages))
        if poisoned is not None:
            bad = self._newly_bad(poisoned, one.outputs)
            if bad:
                yield self._failed(EMPTY, case, dtype, one.arguments, "memory that was never written reached the "
                                   "result: NaN where the same call had a number", **bad)  # fmt: skip
            else:
                yield self._row(EMPTY, case, dtype, PASSED)
        second = poisoned
        if poisoned is None or not all(map(torch.equal, poisoned, one.outputs)):
            second = yield from self._another(REPEAT, one, nullcontext())
        if second is None:
            return
        for name, a, b in zip(self.contract.outputs, second, one.outputs, strict=True):
            if not _same(a, b):
                place = _first_difference(a, b) if a.shape == b.shape else {}
                yield self._failed(REPEAT, case, dtype, one.arguments, "the same call gave other bits", output=name,
                                   **place)  # fmt: skip
                return
        yield self._row(REPEAT, case, dtype, PASSED)

    def _another(self, check: str, one: _Served, surroundings: Any) -> Iterator[Row]:
        """The same call once more; a row where that fails, though it did not the first time."""
        given = self._given(one.arguments, one.dtype)
        if check == EMPTY:
            _leave_nan_behind([x for x in (*one.outputs, *given.values()) if isinstance(x, Tensor)])
        try:
            with surroundings:
                return self._call(given)
        except (_Refusal, _Failure) as failure:
            yield self._failed(check, one.case, one.dtype, one.arguments, f"the same call did not run: {failure}")
            return None

    def _newly_bad(self, found: Outputs, before: Outputs) -> dict[str, Any]:
        for name, a, b in zip(self.contract.outputs, found, before, strict=True):
            if not a.is_floating_point() or a.shape != b.shape:
                continue
            bad = ~torch.isfinite(a) & torch.isfinite(b)
            if bool(bad.any()):
                index = _first(bad)
                return {"output": name, "index": index, "found": a[index].item(), "expected": b[index].item(),
                        "first_bad_row": index[:-1] or None}  # fmt: skip
        return {}

    def _strides(self, one: _Served) -> Iterator[Row]:
        """The same values in two other layouts: every second element of a row, and axes that lie elsewhere."""
        case, dtype = one.case, one.dtype
        expected = _arbiter(self.contract.op, case, dtype)
        for layout in (_every_second, _transposed):
            given = self._given(one.arguments, dtype)
            strided = {
                name: layout(x) if isinstance(x, Tensor) and name not in self.contract.on_host else x
                for name, x in given.items()
            }
            kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in strided.items()}
            try:
                found = self._call(strided)
            except (_Refusal, _Failure) as failure:
                yield self._failed(STRIDES, case, dtype, strided, f"did not run: {failure}")
                continue
            wrong = self._misshapen(dtype, found, expected)
            if wrong:
                yield self._failed(STRIDES, case, dtype, strided, wrong)
                continue
            free = set(self.backend.mutates) & set(self.contract.may_update)
            changed = [name for name, x in kept.items() if name not in free and not _same(strided[name], x)]
            if changed:
                yield self._failed(INPUTS, case, dtype, strided, f"{', '.join(changed)} changed by the call",
                                   output=changed[0])  # fmt: skip
            if not self._unpromised(case):
                yield from self._compared(STRIDES, case, dtype, strided, found, expected)
            is_finite = all(bool(torch.isfinite(x).all()) for x in one.outputs)
            if self.contract.layout_limit is not None and dtype == torch.float32 and is_finite:
                yield from self._compared(STRIDES, case, dtype, strided, found, one.outputs, self.contract.layout_limit)

    def _probe(self, name: str, probe: NanProbe, dtype: torch.dtype) -> Iterator[Row]:
        """NaN where it must be, nowhere where it must not, and the rest as the arbiter has it."""
        contract = self.contract
        given = self._given(probe.arguments, dtype)
        try:
            found = self._call(given)
        except _Refusal as refusal:
            yield self._row(NAN, name, dtype, REFUSED, reason=str(refusal))
            return
        except _Failure as failure:
            yield self._failed(NAN, name, dtype, given, f"did not run: {failure}")
            return
        expected = _arbiter(contract.op, name, dtype)
        wrong = self._misshapen(dtype, found, expected)
        if wrong:
            yield self._failed(NAN, name, dtype, given, wrong)
            return
        try:
            clean = None if probe.clean is None else self._call(self._given(probe.clean, dtype))
        except (_Refusal, _Failure) as failure:
            yield self._failed(NAN, name, dtype, given, f"did not run without NaN: {failure}")
            return
        bad_rows = torch.isnan(expected[0]).flatten(1).any(1)
        for i, (output, part, reference) in enumerate(zip(contract.outputs, found, expected, strict=True)):
            before = None if clean is None else clean[i].cpu()
            reason, place = self._probed(probe, output, part.cpu(), reference, before, bad_rows, dtype)
            if reason:
                yield self._failed(NAN, name, dtype, given, reason, output=output, **place)
            else:
                yield self._row(NAN, name, dtype, PASSED, output=output)

    def _probed(
        self, probe: NanProbe, output: str, part: Tensor, reference: Tensor, clean: Tensor | None, bad_rows: Tensor,
        dtype: torch.dtype,
    ) -> tuple[str, dict[str, Any]]:  # fmt: skip
        """What is wrong with one output of a call that had NaN, and where; ("", {}) where nothing is.

        `reference` is the arbiter's, `clean` the backend's own without NaN; whole numbers of `bad_rows` are free.
        """
        if not part.is_floating_point():
            good = ~bad_rows
            if not torch.equal(part[good], reference[good]):
                return "whole numbers of other rows changed", _first_difference(part[good], reference[good])
            return self.contract.legal(probe.arguments, output, part[bad_rows]) or "", {}
        has = torch.isnan(reference)
        must = has if probe.must is None else probe.must(output, has)
        may = must if probe.may is None else probe.may(output, must)
        if self.backend.name in probe.spares:
            may = torch.ones_like(must)
        seen = torch.isnan(part)
        if bool((must & ~seen).any()):
            index = _first(must & ~seen)
            return "a NaN was swallowed", {"index": index, "found": part[index].item(), "expected": math.nan}
        stray = ~torch.isfinite(part) & ~may & torch.isfinite(reference)
        if bool(stray.any()):
            index = _first(stray)
            where = f" ({probe.reason})" if probe.reason else ""
            return f"a NaN reached what does not read it{where}", {
                "index": index, "found": part[index].item(), "expected": reference[index].item(),
            }  # fmt: skip
        rest = torch.isfinite(reference) & ~may
        if bool(rest.any()):
            error = relative_error(part[rest], reference[rest])
            limit = self.contract.allowed(dtype, output, self.backend)
            if error > limit:
                good = part.masked_fill(~rest, 0.0), reference.masked_fill(~rest, 0.0)
                return "values beside a NaN changed", {"error": error, "limit": limit, **_place(*good, limit)}
        if clean is not None and not torch.equal(part[~may], clean[~may]):
            return "values beside a NaN changed", _first_difference(
                part.masked_fill(may, 0.0), clean.masked_fill(may, 0.0)
            )
        return "", {}

    def _flags(self, case: str, arguments: Arguments, dtype: torch.dtype) -> Row:
        """The words that the backend raised for its results, and those of the results themselves: the same bits."""
        given = self._given(arguments, dtype)
        words = _Words(self.device)
        try:
            found = self._call({**given, "watch": words})
        except _Refusal as refusal:
            return self._row(FLAGS, case, dtype, REFUSED, reason=str(refusal))
        except _Failure as failure:
            return self._failed(FLAGS, case, dtype, given, f"did not run: {failure}")
        outputs = dict(zip(self.contract.outputs, found, strict=True))
        for name, raised in zip(self.backend.flags, words.rows.tolist(), strict=True):
            output = self.contract.flagged.get(name)
            if output is None:  # of a value between, which the call does not return
                continue
            expected = _words_of(outputs[output])
            # Any pattern above that of infinity is NaN.
            if [min(word, INFINITY_BITS + 1) for word in raised] != [min(w, INFINITY_BITS + 1) for w in expected]:
                return self._failed(FLAGS, case, dtype, given, f"{name}: words {raised}, of the result {expected}",
                                    output=output)  # fmt: skip
        return self._row(FLAGS, case, dtype, PASSED)

    def _law(self, check: str, name: str, law: Law, dtype: torch.dtype) -> Iterator[Row]:
        """Two calls whose outputs must agree in part, to the last bit."""
        given = self._given(law.changed, dtype)
        try:
            plain, found = self._call(self._given(law.arguments, dtype)), self._call(given)
        except _Refusal as refusal:
            yield self._row(check, name, dtype, REFUSED, reason=str(refusal))
            return
        except _Failure as failure:
            yield self._failed(check, name, dtype, given, f"did not run: {failure}")
            return
        for output, a, b in zip(self.contract.outputs, found, plain, strict=True):
            a, b = a.cpu(), b.cpu()
            differs = (a != b) & ~(torch.isnan(a) & torch.isnan(b))
            wrong = differs if law.same is None else differs & law.same(a)
            if bool(wrong.any()):
                index = _first(wrong)
                yield self._failed(check, name, dtype, given, "changed by what it must not depend on", output=output,
                                   index=index, found=a[index].item(), expected=b[index].item())  # fmt: skip
            elif law.changes is not None and not bool((differs & law.changes(a)).any()):
                yield self._failed(check, name, dtype, given, "not changed by what it must depend on", output=output)
            else:
                yield self._row(check, name, dtype, PASSED, output=output)

    def _gradient(self, case: str, dtype: torch.dtype) -> Iterator[Row]:
        contract = self.contract
        arguments = contract.cases()[case]
        values = sum(x.numel() for x in arguments.values() if isinstance(x, Tensor))
        if values > GRADIENT_VALUES or contract.repeats(case) or self._unpromised(case):
            return
        given = self._given(arguments, dtype)
        try:
            found, _ = _gradients(contract, self._call, given)
        except _Refusal as refusal:
            yield self._row(GRADIENT, case, dtype, REFUSED, reason=str(refusal))
            return
        except _Failure as failure:
            yield self._failed(GRADIENT, case, dtype, given, f"did not run: {failure}")
            return
        except Exception as error:  # noqa: BLE001 - a backward pass is the backend's too: whatever it raises is told
            yield self._failed(GRADIENT, case, dtype, given, f"backward pass: {_told(error)}")
            return
        expected, scale = _arbiters_gradients(contract.op, case, _of_values(dtype))
        for name, gradient in found.items():
            reference, gradient = expected[name], gradient.cpu().double()
            limit = (
                GRADIENT_UNITS * max(contract.limit(dtype, output) for output in contract.outputs)
                if contract.gradient_limit is None else contract.gradient_limit(dtype, name)
            )  # fmt: skip
            distance = torch.linalg.vector_norm(gradient - reference).item()
            error = distance / scale if scale else float(distance > 0)
            if error <= limit:  # a NaN is not
                yield self._row(GRADIENT, case, dtype, PASSED, output=name, error=error, limit=limit)
            else:
                yield self._failed(GRADIENT, case, dtype, given, "", output=name, error=error, limit=limit,
                                   **_place(gradient, reference, limit))  # fmt: skip


class _Words:
    """An observer that does nothing but give away words to raise, int32 [points, 2] of -1 (`tracing.flags`)."""

    def __init__(self, device: str):
        self.device = device
        self.rows = torch.empty(0, 2, dtype=torch.int32)

    def flag_rows(self, names: tuple[str, ...]) -> Tensor:
        self.rows = torch.full((len(names), 2), -1, dtype=torch.int32, device=self.device)
        return self.rows


#: Bits of +inf in float32; those of NaN, without a sign, are above.
INFINITY_BITS = 0x7F800000


def _words_of(x: Tensor) -> list[int]:
    """Bits of the largest x and of the largest -x, at least +0.0; of any NaN in both; -1 of no values at all."""
    x = x.detach().float().cpu()
    if not x.numel():
        return [-1, -1]
    return (torch.stack([x.amax(), (-x).amax()]).clamp(min=0.0).view(torch.int32) & 0x7FFFFFFF).tolist()


#: Blocks of each size that are left behind.
BLOCKS = 4


def _leave_nan_behind(tensors: list[Tensor]) -> None:
    """Free memory full of NaN, in blocks as large as these tensors: what compiled code allocates by itself is taken
    from there by an allocator that keeps blocks by size, as CUDA's in torch does."""
    floating = [x for x in tensors if x.is_floating_point() and x.numel()]
    blocks = [torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in floating * BLOCKS]
    del blocks


# ---- places and texts


def _copied(x: Tensor) -> Tensor:
    """A copy in the same layout; what shares elements with itself (an expanded axis) is made dense."""
    return x.detach().clone(memory_format=torch.preserve_format)


def _same(a: Any, b: Any) -> bool:
    """Equal to the last bit; NaN is NaN's equal."""
    if not isinstance(a, Tensor):
        return a == b
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x


def _transposed(x: Tensor) -> Tensor:
    """The first two axes, or the only one, in another place in memory."""
    if x.dim() < 2:
        return _every_second(x)
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _first_difference(found: Tensor, expected: Tensor) -> dict[str, Any]:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    differs = (found != expected) & ~((found != found) & (expected != expected))
    if not bool(differs.any()):
        return {}
    index = _first(differs)
    return {"index": index, "found": found[index].item(), "expected": expected[index].item()}


def _place(found: Tensor, expected: Tensor, limit: float) -> dict[str, Any]:
    """The element that is furthest off, and the first row that is off by more than `limit` times the largest row."""
    found, expected = found.detach().double(), expected.detach().double()
    distance = (found - expected).abs()
    distance = distance.masked_fill(~torch.isfinite(distance), math.inf)
    flat = int(distance.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape))
    place: dict[str, Any] = {"index": index, "found": found[index].item(), "expected": expected[index].item()}
    if found.dim() < 2:
        return place
    rows = torch.linalg.vector_norm(distance, dim=-1)
    size = torch.linalg.vector_norm(expected, dim=-1).max().item()
    bad = rows > limit * size
    # Without one, many rows are each a little off, and the worst stands for them.
    place["first_bad_row"] = _first(bad if bool(bad.any()) else rows == rows.max())
    return place


def _overflows(expected: Tensor, dtype: torch.dtype) -> bool:
    return bool(
        dtype.is_floating_point and expected.numel() and expected.abs().max().item() > torch.finfo(dtype).max
    )


def _described(arguments: Arguments) -> dict[str, str]:
    """Shape, dtype and strides of each input, other values as they are."""
    return {
        name: f"{list(x.shape)} {dtype_name(x.dtype)} strides {list(x.stride())}" if isinstance(x, Tensor) else repr(x)
        for name, x in arguments.items()
    }


def _told(error: BaseException) -> str:
    """Type and text of an exception, the causes below it, and the innermost place."""
    texts, seen, innermost = [], error, error
    while seen is not None:
        texts.append(f"{type(seen).__name__}: {seen}" if str(seen) else type(seen).__name__)
        innermost, seen = seen, seen.__cause__
    frames = traceback.extract_tb(innermost.__traceback__)
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return one_line(", caused by ".join(texts)) + where
