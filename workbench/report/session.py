"""What a notebook does first and last: settle chance, threads and style; hand over its findings."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping
from pathlib import Path

from workbench.errors import InputError

#: Folder into which a running report collects findings; unset in a notebook that is worked with by hand.
FINDINGS_FOLDER = "WORKBENCH_FINDINGS_FOLDER"

#: Digits kept of a number in the findings: more would differ between machines, fewer would not tell.
SIGNIFICANT_DIGITS = 6


def notebook_defaults(seed: int = 0, threads: int | None = None) -> None:
    """The same results at every run: random seeds, thread count, dates in figures, and deterministic
    algorithms.

    `threads` None keeps OMP_NUM_THREADS where it is set, else takes one: more threads than free cores make
    torch many times slower, and the count changes the order of sums.
    """
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # the package reads no memory that it did not write
    )


def write_findings(name: str, findings: Mapping[str, object]) -> Path:
    """Write the findings of the notebook `name` as JSON beside its report and return the file.

    `findings` holds at least `title` (text), `verdict` (three sentences) and `numbers` (four of label,
    value, note); the page head, the index page and the tests read them from this file. Numbers keep six
    digits, one that is not finite becomes null. The folder is the one of the running report, else `reports`
    beside the notebooks' folder.
    """
    for field in ("title", "verdict", "numbers"):
        if field not in findings:
            raise InputError(f"findings of {name}: expected the field {field!r}, found {', '.join(findings)}")
    folder = Path(os.environ.get(FINDINGS_FOLDER) or default_folder())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.findings.json"
    content = {"schema": 1, "notebook": name, **plain(findings)}
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    return path


def is_report() -> bool:
    """Whether the notebook runs for a page, in which no widget will live."""
    return FINDINGS_FOLDER in os.environ


def default_folder() -> Path:
    """`reports` of the project that the working directory belongs to: beside `notebooks`, or inside the
    directory."""
    here = Path.cwd()
    return (here.parent if here.name == "notebooks" else here) / "reports"


def plain(value: object) -> object:
    """`value` in the types of JSON: tuples as lists, numbers rounded, what is not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | str | int | None):
        return value
    number = float(value)
    return float(f"{number:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(number) else None
