"""Which implementation of an op may run: declared backends, and a choice made before the call.

A backend named by the user is taken, or the call fails with the exact reason. Where nobody named one, the op's own
order of preference decides, and the refusals are kept. A card's rules (`workbench.cards`) may route a call to another
backend or cast its inputs; both are part of the outcome. What happens when the choice then fails is `dispatch`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import BackendError, Unserved
from workbench.kernels.machine import Machine, this_machine
from workbench.kernels.requirements import Requires, dtype_name
from workbench.kernels.signatures import DOCUMENTED_ORDER, Given, foreign
from workbench.numerics import NumericsPolicy
from workbench.taps import LAYER_TAPS

if TYPE_CHECKING:
    from workbench.cards import Card


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call before it is made; backends decide on it whether they can serve.

    `tokens` is the number of tokens of one sequence for sequence ops and of all rows for per-row ops;
    `packed` says that sequences of different length share one batch row; `needs_grad` that a backward pass
    will follow; `weight_shape` is that of the op's (first) weight, of the gated delta rule that of a state [V, K, W],
    of attention [heads, kv heads, head_dim]; empty where it has none or is not known. `machine` is what the call is
    judged by, None for this machine's `device`; `tensor_device` the kind of device that holds the tensors, empty
    where that is `device`, another one while a card is rehearsed.
    """

    op: str
    device: str
    dtype: torch.dtype
    tokens: int
    packed: bool
    needs_grad: bool
    policy: NumericsPolicy
    weight_shape: tuple[int, ...] = ()
    machine: Machine = None  # type: ignore[assignment]
    tensor_device: str = ""

    def __post_init__(self) -> None:
        if self.machine is None:
            object.__setattr__(self, "machine", this_machine(self.device))
        if not self.tensor_device:
            object.__setattr__(self, "tensor_device", self.device)


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of one op.

    run       the op itself, with the signature of the op's `spec`
    supports  the reason why a call cannot be served, or None: limits of shapes, sizes and policies
    requires  what it needs of the machine
    mutates   names of inputs that it updates in place
    policy    preset that describes what it computes; it is the policy of whoever names the backend and no policy
    forms     how the foreign functions that it requires may be called, by symbol (`signatures`)
    rounds_inside
              operands of its inner products are rounded to the dtype of the inputs, as tensor cores take them: what the
              contract holds to fp32 (a recurrent state) is as far off as that dtype rounds
    flags     tap points of its results, neighbours in the order of `taps.LAYER_TAPS`, whose words (`tracing.flags`) its
              kernels raise themselves where `run` is given ``flags``, int32 [len(flags), 2]
    path      (arguments of a call) -> which way through its kernels the call takes, in a few words that are attested:
              a function of shapes and settings, asked before each call; None where there is one way
    """

    op: str
    name: str
    run: Callable[..., Any]
    supports: Callable[[Call], str | None]
    requires: Requires = field(default_factory=Requires)
    mutates: tuple[str, ...] = ()
    policy: str | None = None
    forms: Mapping[str, tuple[tuple[Given, ...], ...]] = field(default_factory=dict)
    rounds_inside: bool = False
    flags: tuple[str, ...] = ()
    path: Callable[..., str] | None = None

    def __post_init__(self) -> None:
        places = [list(LAYER_TAPS).index(name) for name in self.flags]
        if places != list(range(places[0], places[0] + len(places)) if places else ()):
            raise BackendError(
                f"op {self.op}: backend {self.name}: flags: expected neighbours in the order of taps.LAYER_TAPS, found "
                f"{', '.join(self.flags)}; reorder them, and the rows that the kernel raises"
            )

    def refusal(self, call: Call) -> str | None:
        """Why the call cannot be served, None where it can; says everything that can be known before the call."""
        return self.requires.refusal(call) or self.supports(call) or self._unknown_signature()

    def _unknown_signature(self) -> str | None:
        """Why a foreign function cannot be called; asked last, when what it needs is there."""
        try:
            self.how_called()
        except BackendError as error:
            return str(error)
        return None

    def how_called(self) -> str:
        """How foreign functions are called that tell no signature, to be shown with the choice; empty for none."""
        bindings = (foreign(symbol, self.forms[symbol]) for symbol in self.requires.symbols if symbol in self.forms)
        return "; ".join([binding.reason for binding in bindings if binding.form == DOCUMENTED_ORDER])


@dataclass(frozen=True, slots=True)
class Operation:
    """An op, its backends by name, and the order in which they are tried for a given call when none is named."""

    name: str
    backends: Mapping[str, Backend]
    automatic_order: Callable[[Call], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Outcome of a choice: the backend, why it was taken, and what was refused before it, with the reasons.

    `routed` is the backend that a card's rule sends this call away from, `cast` the dtype that one casts inputs to;
    None without such a rule. `reason` names the rule.
    """

    backend: Backend
    reason: str
    refused: tuple[tuple[str, str], ...] = ()
    routed: str | None = None
    cast: torch.dtype | None = None


OPERATIONS: dict[str, Operation] = {}


def register_operation(
    name: str, modules: Mapping[str, Any], automatic_order: Callable[[Call], tuple[str, ...]]
) -> Operation:
    """Declare an op. `modules` maps a backend's name to what offers its ``run`` and ``supports``."""
    backends = {key: _declared(name, key, module) for key, module in modules.items()}
    OPERATIONS[name] = Operation(name, backends, automatic_order)
    return OPERATIONS[name]


def _declared(op: str, name: str, module: Any) -> Backend:
    """The backend that a module offers: ``run``, ``supports``, and optional REQUIRES, MUTATES, POLICY, FORMS,
    ROUNDS_INSIDE, FLAGS and ``path``."""
    return Backend(
        op, name, module.run, module.supports, getattr(module, "REQUIRES", Requires()),
        tuple(getattr(module, "MUTATES", ())), getattr(module, "POLICY", None), getattr(module, "FORMS", {}),
        getattr(module, "ROUNDS_INSIDE", False), tuple(getattr(module, "FLAGS", ())), getattr(module, "path", None),
    )  # fmt: skip


def register_backend(
    op: str, name: str, run: Callable[..., Any], supports: Callable[[Call], str | None], *,
    requires: Requires | None = None, mutates: Collection[str] = (), policy: str | None = None,
    rounds_inside: bool = False, flags: Sequence[str] = (), path: Callable[..., str] | None = None,
) -> None:  # fmt: skip
    """Add a backend to a declared op; it runs only where it is named. Raises BackendError if the name is taken."""
    operation = operation_named(op)
    if name in operation.backends:
        raise BackendError(f"op {op}: backend {name!r} is registered already; choose another name")
    added = Backend(
        op, name, run, supports, requires or Requires(), tuple(mutates), policy, rounds_inside=rounds_inside,
        flags=tuple(flags), path=path,
    )  # fmt: skip
    OPERATIONS[op] = Operation(op, dict(operation.backends) | {name: added}, operation.automatic_order)


def operation_named(op: str) -> Operation:
    if op not in OPERATIONS:
        raise BackendError(f"unknown op {op!r}, expected one of {', '.join(sorted(OPERATIONS))}")
    return OPERATIONS[op]


def backend_named(op: str, name: str) -> Backend:
    """Raises BackendError, with the names that there are, for an op or a backend that is not declared."""
    operation = operation_named(op)
    if name not in operation.backends:
        raise BackendError(f"op {op}: unknown backend {name!r}, expected one of {', '.join(operation.backends)}")
    return operation.backends[name]


def resolve(
    call: Call, requested: str | None = None, card: Card | None = None, failed: Mapping[str, str] | None = None
) -> Resolution:
    """Choose the backend of a call. Raises Unserved when the requested one, or every candidate, refuses.

    `card` may route or cast by its rules; `failed` are backends that failed at this call before, with their errors.
    """
    if requested is not None:
        found = _tried(backend_named(call.op, requested), call, card, "named by the user")
        if isinstance(found, str):
            raise Unserved(f"op {call.op}: backend {requested} was asked for and cannot serve this call: {found}")
        return found
    operation = operation_named(call.op)
    refused: list[tuple[str, str]] = []
    why = f"first of the automatic order for {call.tokens} tokens on {call.device} that can serve"
    for name in operation.automatic_order(call):
        found = _tried(operation.backends[name], call, card, why)
        taken = name if isinstance(found, str) else found.backend.name  # a card's rule may name another
        found = (failed or {}).get(name) or (failed or {}).get(taken) or found
        if not isinstance(found, str):
            return replace(found, refused=tuple(refused))
        refused.append((name, found))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise Unserved(f"op {call.op}: no backend can serve {call.dtype} on {call.device}: {reasons}")


def _tried(backend: Backend, call: Call, card: Card | None, why: str) -> Resolution | str:
    """The choice of one backend after the card's rules, or why it cannot be."""
    rule = None if card is None else card.rule(backend.op, dtype_name(call.dtype), backend.name)
    if rule is None or rule.outcome == "run":
        return backend.refusal(call) or Resolution(backend, "; ".join(filter(None, (why, backend.how_called()))))
    named = f"card {card.name}: {rule.why}"
    if rule.outcome == "cast":
        dtype = getattr(torch, rule.to)
        reason = f"{why}; its inputs are cast to {rule.to} ({named})"
        return backend.refusal(replace(call, dtype=dtype)) or Resolution(backend, reason, cast=dtype)
    target = backend_named(call.op, rule.to)
    refusal = target.refusal(call)
    if refusal is not None:
        return f"{dtype_name(call.dtype)} is routed to {rule.to} ({named}), which cannot serve: {refusal}"
    return Resolution(target, f"routed from {backend.name} ({named})", routed=backend.name)


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
            if name != "auto":
                backend_named(operation.name, name)
            if operation.name in chosen:
                raise BackendError(f"backend {text!r}: op {operation.name} is named twice")
            chosen[operation.name] = name
    if len(set(policies)) > 1:
        raise BackendError(f"backend {text!r}: two policies, {' and '.join(sorted(set(policies)))}; name one")
    backends = {op: name for op, name in (by_name | by_op).items() if name != "auto"}
    return Selection(backends, policies[0] if policies else None)
