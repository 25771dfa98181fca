"""One case, all its sides: held to the arbiter, then timed side by side.

A side is a choice of backends. Only what is within the contract's limit of the float64 arbiter, on inputs drawn for
this run and on inputs that are hard, is timed; the others are told with the reason. Hard inputs make a rounding of
operands large: a backend that rounds inside (`Backend.rounds_inside`) is held to `HARD_UNITS` times its limit on them,
and its error on each is in the result. Sides are timed in turn (A B, B A), and
a side whose samples spread by more than `MOST_SPREAD` is timed again with all the others; if it stays so, its row is
kept and marked as rejected.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.analysis.launches import count_launches
from workbench.bench.cases import Case, Drawn, Words
from workbench.bench.clocks import GRAPH, Clock, prepare, sets_needed
from workbench.bench.limits import Limits
from workbench.bench.result import Row
from workbench.bench.timing import interleave
from workbench.errors import BackendError, InputError, WorkbenchError, one_line
from workbench.kernels import Kernels
from workbench.kernels.agreement import relative_error
from workbench.kernels.dispatch import Attestation
from workbench.kernels.registry import Backend, backend_named, operation_named, parse_selection
from workbench.numerics import NumericsPolicy

#: Standard deviation over mean above which samples are no measurement, and how often they are taken until that is said.
MOST_SPREAD, ATTEMPTS = 0.05, 3
#: On hard inputs what rounds operands to the dtype of the call may be off by so many times its limit: the inverse of a
#: system of repeated keys has entries that cancel, and in bf16 a product with it keeps little more than a digit.
HARD_UNITS = 32
#: Backends that copy the weights of every pair of a token and an expert, and bytes from which on nobody would.
COPYING, MOST_COPIED = ("torch_gathered", "torch_pairs"), 1 << 30
#: Name of the row that is no side but the least time of the measured limits.
LIMIT = "limit"
#: The side that takes what the automatic order takes.
AUTOMATIC = "automatic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A choice of backends (op -> name), by the name of its rows, and the policy of its calls.

    `has_flags`: its kernels raise the flags of their results; a side whose backends raise none is not timed.
    `has_counts`: rows of the kernels that it launches and of its host syncs, for backends in PyTorch alone
    (`analysis.launches`), which sees no other kernels.
    """

    label: str
    requested: Mapping[str, str] = field(default_factory=dict)
    policy: NumericsPolicy | str | None = None
    has_flags: bool = False
    has_counts: bool = False

    def kernels(self) -> Kernels:
        return Kernels(self.requested, self.policy)


@dataclass(slots=True)
class Measured:
    """What came of a case.

    rows       of times and of errors
    not_timed  why of each side that has no time
    not_held   hard inputs that a side refuses, or that its policy is known not to be right on, with what came of them
    share      the largest error of a side that is right, over its limit
    hard       the error on each hard input, by side, output and input
    cost       bytes that a call must move at least, and its flops
    """

    rows: list[Row] = field(default_factory=list)
    not_timed: dict[str, str] = field(default_factory=dict)
    not_held: dict[str, str] = field(default_factory=dict)
    share: float = 0.0
    hard: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)


def side_named(case: Case, text: str) -> Side:
    """``triton_grouped``, or several for a case of several ops: ``triton_grouped+routing=triton_topk``.

    Raises BackendError for a name that no op of the case has.
    """
    if text == AUTOMATIC:
        return Side(label=text)
    requested: dict[str, str] = {}
    for part in text.split("+"):
        found = {op: name for op, name in parse_selection(part).backends.items() if op in case.ops}
        if not found:
            known = sorted({name for op in case.ops for name in operation_named(op).backends})
            raise BackendError(f"backend {part!r}: {case.op} has none of that name, expected one of {', '.join(known)}")
        requested |= found
    return Side(label=text, requested=requested)


def all_sides(case: Case) -> list[Side]:
    """The automatic choice, and each backend of the op that does the work, but the arbiter, and those that would copy
    the weights of all pairs where these are more than MOST_COPIED."""
    copied = case.rows * case.shape.top_k * 3 * case.shape.hidden * case.shape.expert_width * case.dtype.itemsize
    left = {"reference", *(COPYING if "experts" in case.ops and copied > MOST_COPIED else ())}
    names = [name for name in operation_named(case.ops[0]).backends if name not in left]
    return [Side(label=AUTOMATIC), *(Side(label=name, requested={case.ops[0]: name}) for name in names)]


def flagged(sides: Sequence[Side]) -> list[Side]:
    """Each side that names a backend whose kernels raise flags, once more with them."""

    def can(side: Side) -> bool:
        return any(backend_named(op, name).flags for op, name in side.requested.items())

    return [replace(side, label=f"{side.label}, flags", has_flags=True) for side in sides if can(side)]


def measure(
    case: Case, sides: Sequence[Side], *, device: str, limits: Limits, seed: int, rounds: int = 11, clock: str = GRAPH,
    say: Callable[[str], None] = lambda line: None,
) -> Measured:  # fmt: skip
    """All rows of a case. `say` gets a line for each thing that is over. Raises InputError for rounds below 2."""
    if rounds < 2:
        raise InputError(f"rounds: expected at least 2, whose spread can be told, found {rounds}")
    result = Measured()
    case = case.with_weights(device, seed)
    first = case.draw(device, seed)
    moved, flops = case.cost(first)
    result.cost = {"bytes": moved, "flops": flops}
    count = sets_needed(moved, device)
    sets = [first, *(case.draw(device, seed + number) for number in range(1, count))]
    trials = {"": first, **case.hard(device, seed)}
    expected = {name: case.expected(given) for name, given in trials.items()}
    served: dict[str, tuple[Kernels, Words | None]] = {}
    say(f"{case.name}: the arbiter has {len(trials)} answers; {count} set{'' if count == 1 else 's'} of inputs")
    for side in sides:
        kernels, watch = side.kernels(), Words(device) if side.has_flags else None
        reason = _held(case, side, kernels, watch, trials, expected, result)
        if reason is None:
            served[side.label] = (kernels, watch)
            say(f"{case.name}: {side.label}: right")
            if side.has_counts:
                result.rows += _counts(case, side, kernels, first)
        else:
            result.not_timed[f"{case.name}: {side.label}"] = reason
            say(f"{case.name}: {side.label}: {reason}")
    del trials
    if served:
        _time(case, served, sets, expected[""], result, device, limits.seconds(moved, flops, case.dtype), rounds, clock)
        least, bound = limits.seconds(moved, flops, case.dtype)
        result.rows.append(Row(case.name, f"{LIMIT}, {bound}", "ms", 1e3 * least, 0.0, 1))
    for row in result.rows:
        if row.unit == "ms":
            share = "" if row.share_of_limit is None else f", {100 * row.share_of_limit:.1f} % of the limit"
            say(f"{row.case}: {row.backend}: {row.median:.4f} ms, iqr {row.iqr:.4f}{share}"
                f"{'; rejected: ' + row.rejected if row.rejected else ''}")  # fmt: skip
    return result


# ---- right or not


def _held(
    case: Case, side: Side, kernels: Kernels, watch: Words | None, trials: Mapping[str, Drawn],
    expected: Mapping[str, Any], result: Measured,
) -> str | None:  # fmt: skip
    """Why the side is not timed, None where it is right; its errors become rows."""
    worst: dict[str, tuple[float, str]] = {}
    rows: list[Row] = []
    for name, given in trials.items():
        try:
            with torch.inference_mode():
                found = case.call(kernels, _own(case, kernels, given), watch)
        except WorkbenchError as error:  # refused, or failed with the library's own text: both are the answer
            said = one_line(str(error))[:400]
            if "cannot serve this call" not in said:
                return f"failed{name and ' on ' + name}: {said}"
            if not name:
                return f"refused: {said}"
            result.not_held[f"{case.name}: {side.label}: {name}"] = f"refused: {said}"
            continue
        if watch is not None and not watch.are_raised:
            return "refused: its kernels raise no flags in this call"
        backend = _backend(case, kernels)
        for output, error, limit in _errors(case, backend, found, expected[name]):
            if name and math.isfinite(error):
                result.hard.setdefault(side.label, {}).setdefault(output, {})[name] = float(f"{error:.3g}")
            limit *= HARD_UNITS if name and backend.rounds_inside else 1
            share = error / limit if limit else (0.0 if error == 0.0 else math.inf)
            if share > 1.0 and name and backend.policy and case.contract.unpromised(name, backend.policy):
                result.not_held[f"{case.name}: {side.label}: {name}, {output}"] = (
                    f"error {error:.2g}, limit {limit:.2g}: {case.contract.unpromised(name, backend.policy)}"
                )
                continue
            if not share <= 1.0:
                return f"wrong{name and ' on ' + name}: {output}: error {error:.3g}, limit {limit:.3g}"
            result.share = max(result.share, share)
            if not name:
                rows.append(Row(case.name, side.label, f"relative error of {output}", error, 0.0, 1))
            elif error >= worst.get(output, (0.0, ""))[0]:
                worst[output] = (error, name)
    for output, (error, name) in worst.items():
        unit = f"relative error of {output}, worst hard input"
        rows.append(Row(case.name, side.label, unit, error, 0.0, len(trials) - 1, attested=(name,)))
    result.rows += rows
    return None


def _counts(case: Case, side: Side, kernels: Kernels, given: Drawn) -> list[Row]:
    found = count_launches(lambda: case.call(kernels, _own(case, kernels, given)))
    counts = (("kernels launched", found.kernels), ("host syncs", found.syncs))
    return [Row(case.name, side.label, unit, float(count), 0.0, 1) for unit, count in counts]


def _errors(case: Case, backend: Backend, found: Sequence[Tensor], expected: Sequence[Tensor]):
    """(output, relative error, limit); whole numbers are equal (0) or not (inf)."""
    for name, part, reference in zip(case.contract.outputs, found, expected, strict=True):
        if not part.is_floating_point():
            yield name, 0.0 if torch.equal(part, reference) else math.inf, 0.0
        else:
            yield name, relative_error(part, reference), case.contract.allowed(case.dtype, name, backend)


def _backend(case: Case, kernels: Kernels) -> Backend:
    """The one that served the op whose contract the case is held to."""
    served = next(row.backend for row in kernels.attestation() if row.op == case.contract.op)
    return backend_named(case.contract.op, served)


def _own(case: Case, kernels: Kernels, given: Drawn) -> Drawn:
    """The inputs with copies of those that a backend may write to: of a named one those that it declares."""
    written = set(case.written) | {
        name for op in case.ops
        for name in (backend_named(op, kernels.requested[op]).mutates if op in kernels.requested
                     else case.contract.may_update)
    }  # fmt: skip
    return {name: x.clone() if name in written and isinstance(x, Tensor) else x for name, x in given.items()}


# ---- how long


def _time(
    case: Case, served: Mapping[str, tuple[Kernels, Words | None]], sets: Sequence[Drawn], expected: Sequence[Tensor],
    result: Measured, device: str, least: tuple[float, str], rounds: int, clock: str,
) -> None:  # fmt: skip
    clocks: dict[str, Clock] = {}
    with torch.inference_mode():
        for label, (kernels, watch) in served.items():
            kernels.reset_attestation()  # what is attested is what is timed
            calls = [partial(case.call, kernels, _own(case, kernels, given), watch) for given in sets]
            for call in calls[:2]:
                call()
            clocks[label] = prepare(calls, device, clock)
        samples = _quiet(clocks, rounds)
    for label, (found, attempts) in samples.items():
        (kernels, watch), made = served[label], clocks[label]
        backend = _backend(case, kernels)
        wrong = [] if backend.mutates or case.written else [
            f"{output}: error {error:.3g}, limit {limit:.3g}"
            for output, error, limit in _errors(case, backend, made.first, expected) if not error <= limit
        ]  # fmt: skip
        if wrong:
            result.not_timed[f"{case.name}: {label}"] = f"wrong when it was timed ({made.how}): {'; '.join(wrong)}"
            continue
        spread = _spread(found)
        rejected = ""
        if spread > MOST_SPREAD:
            rejected = f"spread {100 * spread:.1f} % of the mean, allowed {100 * MOST_SPREAD:g} %, {attempts} times"
        ms = [1e-3 * us for us in found]
        share = least[0] / (1e-3 * statistics.median(ms))
        attested = [_attested(row) for row in kernels.attestation()]
        attested += [made.how] if watch is None else [made.how, "flags raised by its kernels"]
        result.rows.append(
            Row.of(case.name, label, "ms", ms, share_of_limit=share, attested=attested, rejected=rejected)
        )


def _attested(row: Attestation) -> str:
    """``gated_delta_rule=triton_chunk (4 segments of 64 chunks): named by the user``."""
    ways = ", ".join(path for path, _ in row.paths)
    return f"{row.op}={row.backend}{f' ({ways})' if ways else ''}: {row.reason}"


def _quiet(clocks: Mapping[str, Clock], rounds: int) -> dict[str, tuple[list[float], int]]:
    """Microseconds of each side, and at which attempt they were taken: the first that is quiet, else the last."""
    kept: dict[str, tuple[list[float], int]] = {}
    for attempt in range(1, ATTEMPTS + 1):
        for name, found in _in_turn(clocks, rounds).items():
            if name not in kept or _spread(kept[name][0]) > MOST_SPREAD:
                kept[name] = (found, attempt)
        if all(_spread(found) <= MOST_SPREAD for found, _ in kept.values()):
            break
    return kept


def _in_turn(clocks: Mapping[str, Clock], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Microseconds of each side, A B, B A, ..."""
    samples: dict[str, list[float]] = {name: [] for name in clocks}
    runs = {name: lambda name=name: samples[name].append(clocks[name].sample()) for name in clocks}
    interleave(runs, rounds=rounds, warmup=warmup)
    return {name: found[warmup:] for name, found in samples.items()}


def _spread(samples: Sequence[float]) -> float:
    """Standard deviation over mean."""
    return statistics.stdev(samples) / statistics.fmean(samples)
