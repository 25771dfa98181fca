"""Which implementation of an op runs: declared backends, a choice made before the call, and a record of it.

Rules. A backend named by the user runs or the call fails with the exact reason; it is never replaced. Where
nobody named one, the op's own order of preference decides, the refusals are kept, and `Kernels.attestation`
shows them with the number of calls. A backend that fails while it runs is an error in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.errors import BackendError
from workbench.numerics import NumericsPolicy


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call before it is made; backends decide on it whether they can serve.

    `tokens` is the number of tokens of one sequence for sequence ops and of all rows for per-row ops;
    `packed` says that sequences of different length share one batch row; `needs_grad` that a backward pass
    will follow; `weight_shape` is that of the op's (first) matrix, empty where it has none.
    """

    op: str
    device: str
    dtype: torch.dtype
    tokens: int
    packed: bool
    needs_grad: bool
    policy: NumericsPolicy
    weight_shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of one op: `supports(call)` is the reason of refusal or None, `run` the op itself."""

    op: str
    name: str
    run: Callable[..., Any]
    supports: Callable[[Call], str | None]


@dataclass(frozen=True, slots=True)
class Operation:
    """An op, its backends by name, and the order in which they are tried for a given call when none is named."""

    name: str
    backends: Mapping[str, Backend]
    automatic_order: Callable[[Call], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Outcome of a choice: the backend, why it was taken, and what was refused before it, with the reasons."""

    backend: Backend
    reason: str
    refused: tuple[tuple[str, str], ...] = ()


OPERATIONS: dict[str, Operation] = {}


def register_operation(
    name: str, modules: Mapping[str, Any], automatic_order: Callable[[Call], tuple[str, ...]]
) -> Operation:
    """Declare an op. `modules` maps a backend's name to what offers its ``run`` and ``supports``."""
    backends = {key: Backend(name, key, module.run, module.supports) for key, module in modules.items()}
    OPERATIONS[name] = Operation(name, backends, automatic_order)
    return OPERATIONS[name]


def register_backend(op: str, name: str, run: Callable[..., Any], supports: Callable[[Call], str | None]) -> None:
    """Add a backend to a declared op; it runs only where it is named. Raises BackendError if the name is taken."""
    operation = operation_named(op)
    if name in operation.backends:
        raise BackendError(f"op {op}: backend {name!r} is registered already; choose another name")
    backends = dict(operation.backends) | {name: Backend(op, name, run, supports)}
    OPERATIONS[op] = Operation(op, backends, operation.automatic_order)


def operation_named(op: str) -> Operation:
    if op not in OPERATIONS:
        raise BackendError(f"unknown op {op!r}, expected one of {', '.join(sorted(OPERATIONS))}")
    return OPERATIONS[op]


def resolve(call: Call, requested: str | None = None) -> Resolution:
    """Choose the backend of a call. Raises BackendError when the requested one, or every candidate, refuses."""
    operation = operation_named(call.op)
    if requested is not None:
        if requested not in operation.backends:
            raise BackendError(
                f"op {call.op}: unknown backend {requested!r}, expected one of {', '.join(operation.backends)}"
            )
        backend = operation.backends[requested]
        refusal = backend.supports(call)
        if refusal is not None:
            raise BackendError(f"op {call.op}: backend {requested} was asked for and cannot serve this call: {refusal}")
        return Resolution(backend, "named by the user")
    refused: list[tuple[str, str]] = []
    for name in operation.automatic_order(call):
        backend = operation.backends[name]
        refusal = backend.supports(call)
        if refusal is None:
            reason = f"first of the automatic order for {call.tokens} tokens on {call.device} that can serve"
            return Resolution(backend, reason, tuple(refused))
        refused.append((name, refusal))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise BackendError(f"op {call.op}: no backend can serve {call.dtype} on {call.device}: {reasons}")


@dataclass(frozen=True, slots=True)
class Selection:
    """What a user asked for: a backend per op (or for every op that has one of that name), and a policy's name."""

    backends: Mapping[str, str] = field(default_factory=dict)
    policy: str | None = None


def parse_selection(text: str | None) -> Selection:
    """Read ``[OP=]NAME[:POLICY]``, several separated by commas; None chooses automatically.

    Without ``OP=`` the name applies to every op that has a backend of that name; ``OP=`` goes before it, so
    that ``reference,experts=torch_sorted`` is everything but one op. ``auto`` leaves the choice to the op.
    Raises BackendError for an empty part, a name that no op has, an op named twice, and two different
    policies.
    """
    by_op: dict[str, str] = {}
    by_name: dict[str, str] = {}
    policies: list[str] = []
    for part in [] if text is None else text.split(","):
        op, separator, rest = part.strip().rpartition("=")
        name, colon, policy = rest.partition(":")
        if not name or (separator and not op) or (colon and not policy):
            raise BackendError(f"backend {text!r}: expected [OP=]NAME[:POLICY], found {part.strip()!r}")
        policies += [policy] if colon else []
        operations = [operation_named(op)] if op else [o for o in OPERATIONS.values() if name in o.backends]
        if name == "auto":
            operations = operations if op else list(OPERATIONS.values())
        elif not operations:
            known = sorted({b for o in OPERATIONS.values() for b in o.backends})
            raise BackendError(
                f"backend {name!r}: no op has a backend of that name, expected one of {', '.join(known)}"
            )
        chosen = by_op if op else by_name
        for operation in operations:
            if name != "auto" and name not in operation.backends:
                raise BackendError(
                    f"op {operation.name}: unknown backend {name!r}, expected one of {', '.join(operation.backends)}"
                )
            if operation.name in chosen:
                raise BackendError(f"backend {text!r}: op {operation.name} is named twice")
            chosen[operation.name] = name
    if len(set(policies)) > 1:
        raise BackendError(f"backend {text!r}: two policies, {' and '.join(sorted(set(policies)))}; name one")
    backends = {op: name for op, name in (by_name | by_op).items() if name != "auto"}
    return Selection(backends, policies[0] if policies else None)
