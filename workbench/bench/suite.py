"""Many cases one after another: kept as soon as each is over, written as one result, and gone on with after a stop."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from workbench.bench.cases import Case
from workbench.bench.clocks import GRAPH
from workbench.bench.limits import Limits, measure_limits
from workbench.bench.machine import hardware
from workbench.bench.measure import Measured, Side, measure
from workbench.bench.result import Correctness, Row, write_result
from workbench.bench.unfinished import Unfinished
from workbench.kernels.requirements import dtype_name
from workbench.provenance import commit

#: Gate of a result: what is over its limit is told with its error, and never timed.
METRIC = "largest error of a timed side over its contract's limit, against float64"

#: Distributions that the backends' functions come from, recorded as far as they are installed.
PEERS = (
    "causal-conv1d", "fla-core", "flash-attn", "flash-linear-attention", "flash-qla", "flashinfer-python",
    "nvidia-cutlass-dsl", "tilelang", "transformers", "triton", "vllm",
)  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A case and the sides that it is measured for."""

    case: Case
    sides: Sequence[Side]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How every case is measured. `seed` None draws one for each case; `minutes` None takes as long as it takes."""

    device: str = "cpu"
    rounds: int = 11
    clock: str = GRAPH
    seed: int | None = None
    minutes: float | None = None


@dataclass(slots=True)
class Outcome:
    """What came of all cases. `limits` by dtype; `seeds`, `costs` (bytes, flops) and errors on `hard` inputs by case;
    `left`: those for which there was no time."""

    rows: list[Row] = field(default_factory=list)
    not_timed: dict[str, str] = field(default_factory=dict)
    not_held: dict[str, str] = field(default_factory=dict)
    share: float = 0.0
    limits: dict[str, Limits] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    hard: dict[str, dict] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    path: Path | None = None

    def conditions(self) -> dict[str, object]:
        """What a result says of the run, in plain JSON values."""
        return {
            "limits": {name: dataclasses.asdict(found) for name, found in self.limits.items()},
            "seeds": self.seeds, "costs": self.costs, "not_timed": self.not_timed, "not_held": self.not_held,
            "cases left": self.left, "errors on hard inputs": self.hard,
        }  # fmt: skip


def run_suite(
    entries: Sequence[Entry], settings: Settings, *, name: str, folder: Path | None = None,
    project: Path | None = None, measured: tuple[str, bool] | None = None,
    conditions: Mapping[str, object] | None = None, say: Say = lambda line: None,
) -> Outcome:  # fmt: skip
    """Measure every entry; with a `folder`, write the result there after each (see `write_result`).

    A run that was stopped goes on after the cases that are over, if nothing else about it has changed. Raises what
    `measure` and `write_result` raise.
    """
    started, outcome = time.monotonic(), Outcome()

    def tell(line: str) -> None:
        say(f"{time.monotonic() - started:.1f} s: {line}")

    kept = None
    if folder is not None:
        measured = measured or commit(project or folder)
        kept = Unfinished(folder, name, _told(settings, measured), tell)
    for number, entry in enumerate(entries, 1):
        case = entry.case
        if kept is not None and case.name in kept.done:
            _take(outcome, case, kept.done[case.name][0])
            continue
        if settings.minutes is not None and time.monotonic() - started > 60.0 * settings.minutes:
            outcome.left.append(case.name)
            continue
        dtype = dtype_name(case.dtype)
        if dtype not in outcome.limits:
            found = outcome.limits[dtype] = measure_limits(settings.device, case.dtype)
            rate = found.rates[dtype]
            tell(
                f"{settings.device}: copy {1e-12 * found.bandwidth:.3g} TB/s, product in {dtype} {1e-12 * rate:.3g} TF"
            )
        seed = secrets.randbits(31) if settings.seed is None else settings.seed
        tell(f"{number} of {len(entries)}: {case.name}")
        found = measure(
            case, entry.sides, device=settings.device, limits=outcome.limits[dtype], seed=seed, rounds=settings.rounds,
            clock=settings.clock, say=tell,
        )  # fmt: skip
        done = _kept(found, outcome.limits[dtype], seed)
        _take(outcome, case, done)
        if kept is not None:
            kept.add(case.name, [done])
            _write(outcome, settings, name, folder, measured, conditions)
        if settings.device != "cpu":
            torch.cuda.empty_cache()
    if kept is not None:
        _write(outcome, settings, name, folder, measured, conditions)
        if not outcome.left:
            kept.remove()
    return outcome


def _told(settings: Settings, measured: tuple[str, bool]) -> dict[str, object]:
    """What must be the same for the cases of a stopped run to be taken; `minutes` need not be."""
    told = {key: value for key, value in dataclasses.asdict(settings).items() if key != "minutes"}
    return told | {
        "commit": list(measured), "hardware": hardware(settings.device), "versions": installed_peers(),
    }  # fmt: skip


def _kept(found: Measured, limits: Limits, seed: int) -> dict[str, object]:
    return {
        "rows": [row.to_json() for row in found.rows], "not_timed": found.not_timed, "not_held": found.not_held,
        "share": found.share, "limits": dataclasses.asdict(limits), "seed": seed, "cost": found.cost,
        "hard": found.hard,
    }  # fmt: skip


def _take(outcome: Outcome, case: Case, done: Mapping) -> None:
    outcome.rows += [Row(**row) for row in done["rows"]]
    outcome.not_timed |= done["not_timed"]
    outcome.not_held |= done["not_held"]
    outcome.share = max(outcome.share, done["share"])
    outcome.limits.setdefault(dtype_name(case.dtype), Limits(**done["limits"]))
    outcome.seeds[case.name], outcome.costs[case.name] = done["seed"], dict(done["cost"])
    outcome.hard[case.name] = done["hard"]


def _write(
    outcome: Outcome, settings: Settings, name: str, folder: Path, measured: tuple[str, bool],
    conditions: Mapping[str, object] | None,
) -> None:  # fmt: skip
    if not outcome.rows:
        return
    outcome.path = write_result(
        folder, name, Correctness(METRIC, outcome.share, 1.0), outcome.rows, device=settings.device,
        peers=list(installed_peers()), conditions=outcome.conditions() | dict(conditions or {}),
        measured=measured,
    )  # fmt: skip


def installed_peers() -> dict[str, str]:
    """Version of each of PEERS that is installed."""
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
