"""Join the curves of runs that follow one another, as a table and as a figure.

    python -m workbench.training.curve RUN/curve.csv [RUN/curve.csv ...] --out DIR

Writes DIR/training_curve.csv, the rows of all files with the number of the run and `total_step`, the steps of all runs
up to here; and DIR/training_curve.svg.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from workbench import plots
from workbench.errors import InputError
from workbench.training.command import one_line_errors
from workbench.training.corpus import write_atomic

NEEDED = ("step", "next", "heldout")


def joined(paths: list[Path]) -> pd.DataFrame:
    """The rows of all curves in order, with `run` from 1 and `total_step`. Raises InputError for another file."""
    parts, before = [], 0
    for number, path in enumerate(paths, start=1):
        try:
            rows = pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: expected the curve.csv of a training run, found: {error}") from None
        missing = [name for name in NEEDED if name not in rows]
        if missing or rows.empty:
            raise InputError(
                f"{path}: expected the curve.csv of a training run with {', '.join(NEEDED)}, "
                f"found {'no rows' if rows.empty else 'no column ' + missing[0]}"
            )
        for name in NEEDED:
            if not pd.api.types.is_numeric_dtype(rows[name]):
                raise InputError(f"{path}: column {name}: expected numbers, found {rows[name].iloc[0]!r}")
        rows.insert(0, "run", number)
        rows.insert(1, "total_step", before + rows["step"])
        before = int(rows["total_step"].iloc[-1])
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


@one_line_errors
def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (0 done, 2 unusable input)."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.curve", description=__doc__.split("\n\n")[0],
        epilog="example: python -m workbench.training.curve build/first/curve.csv --out build",
    )  # fmt: skip
    parser.add_argument("curves", metavar="CSV", nargs="+", type=Path, help="curve.csv of each run, in order")
    parser.add_argument("--out", type=Path, required=True, help="directory for training_curve.csv and .svg")
    options = parser.parse_args(arguments)
    curve = joined(options.curves)
    plate = plots.training_curve(curve)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "training_curve.csv", curve.to_csv(index=False).encode())
    write_atomic(options.out / "training_curve.svg", plate.svg().encode())
    print(plate.caption)
    return 0


if __name__ == "__main__":
    sys.exit(main())
