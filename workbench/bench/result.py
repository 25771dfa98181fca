"""Result files: ``<name>.<hardware>.json``, schema 1.

{schema, command, commit, dirty, hardware, versions, correctness: {metric, value, limit}, rows: [...]} with
rows {case, backend, unit, median, iqr, n, share_of_limit, attested}, and `rejected` where one is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.bench.machine import all_versions, hardware
from workbench.bench.timing import spread
from workbench.errors import InputError
from workbench.provenance import commit

SCHEMA = 1

#: The project's own results; an installed package has none.
RESULTS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Correctness:
    """The gate before the timing: `value` of `metric` must not exceed `limit`."""

    metric: str
    value: float
    limit: float

    def check(self) -> None:
        """Raise InputError when the gate is red."""
        if not self.value <= self.limit:  # NaN is red too
            raise InputError(
                f"benchmark: {self.metric}: expected at most {self.limit:.3g}, found {self.value:.3g}; "
                "no timing is reported for results that differ, find the difference first"
            )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a result: `median` and `iqr` of `n` samples in `unit`.

    `share_of_limit` is the share of what the hardware allows that was reached, None where no limit is known;
    `attested` says what ran, as its owner reports it; `rejected` why the figure must not be relied on (its samples
    spread too far), empty where it may.
    """

    case: str
    backend: str
    unit: str
    median: float
    iqr: float
    n: int
    share_of_limit: float | None = None
    attested: Sequence[str] = ()
    rejected: str = ""

    @classmethod
    def of(
        cls,
        case: str,
        backend: str,
        unit: str,
        samples: Sequence[float],
        *,
        share_of_limit: float | None = None,
        attested: Sequence[str] = (),
        rejected: str = "",
    ) -> Row:
        """The row of samples that are in `unit` already."""
        median, iqr = spread(samples)
        return cls(case, backend, unit, median, iqr, len(samples), share_of_limit, tuple(attested), rejected)

    def to_json(self) -> dict[str, object]:
        """Plain JSON values; `rejected` only where it says something."""
        row = dataclasses.asdict(self) | {"attested": list(self.attested)}
        return row if self.rejected else {name: value for name, value in row.items() if name != "rejected"}


def command_of(arguments: Sequence[str]) -> str:
    """The command that repeats a measurement, without ``--out``: where the file went was no condition of it."""
    kept, given = [], iter(arguments)
    for argument in given:
        if argument == "--out":
            next(given, None)  # its value
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(["python", *kept])


def write_result(
    folder: Path,
    name: str,
    correctness: Correctness,
    rows: Sequence[Row],
    *,
    project: Path | None = None,
    device: str = "cpu",
    peers: Sequence[str] = (),
    conditions: Mapping[str, object] | None = None,
    measured: tuple[str, bool] | None = None,
) -> Path:
    """Write `<name>.<hardware kind>.json` into `folder` and return its path.

    `project` is a folder inside the clone that was measured (default: `folder`); `peers` are distributions
    whose versions are recorded beside the usual ones; `conditions` go into `hardware`; `measured` is the commit and
    whether files differed from it, for a tree that was copied without its history. Raises InputError when the gate is
    red, when there are no rows, and for a number that is not finite.
    """
    correctness.check()
    if not rows:
        raise InputError(f"benchmark {name}: expected at least one row, found none")
    for row in rows:
        if not (math.isfinite(row.median) and math.isfinite(row.iqr)):
            raise InputError(f"benchmark {name}: case {row.case}, {row.backend}: expected finite numbers, found {row}")
    head, dirty = commit(project or folder) if measured is None else measured
    machine = hardware(device) | dict(conditions or {})
    content = {
        "schema": SCHEMA,
        "command": command_of(sys.argv),
        "commit": head,
        "dirty": dirty,
        "hardware": machine,
        "versions": all_versions(*peers),
        "correctness": dataclasses.asdict(correctness),
        "rows": [row.to_json() for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{machine['kind']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def read_result(path: Path) -> dict[str, object]:
    """A result file, checked: schema, every field present, gate green. Raises InputError naming the file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: expected a JSON result file, found {error}") from error
    found = content.get("schema") if isinstance(content, dict) else content
    if found != SCHEMA:
        raise InputError(f"{path}: expected schema {SCHEMA}, found {found!r}")
    expected = {"schema", "command", "commit", "dirty", "hardware", "versions", "correctness", "rows"}
    if set(content) != expected:
        raise InputError(f"{path}: expected the fields {sorted(expected)}, found {sorted(content)}")
    columns = {field.name for field in dataclasses.fields(Row)}
    for row in content["rows"]:
        if not columns - {"rejected"} <= set(row) <= columns:
            raise InputError(f"{path}: expected rows with {sorted(columns)}, found {sorted(row)}")
    Correctness(**content["correctness"]).check()
    return content


def recorded_result(name: str, kind: str = "cpu", folder: Path | None = None) -> dict[str, object] | None:
    """The committed result `<name>.<kind>.json`, checked as by `read_result`; None where there is no such file.

    `folder` None is the project's own; whoever shows the figures says so where there are none.
    """
    path = (RESULTS if folder is None else Path(folder)) / f"{name}.{kind}.json"
    return read_result(path) if path.is_file() else None
