"""Bring the figures of docs/patterns.md up to date with the result files that it cites.

    python benchmarks/patterns_page.py [--check]

In the text a figure stands before its number: `9.0 [3]`, `58 % [4]`, `33.5 ms [5]`. The table of figures gives for each
number the row of a result file, and its median, spread and count; the table of files the command, machine and commit.
Both tables and the figures in the text are rewritten from the files.
"""

import argparse
import re
import sys
from pathlib import Path

from workbench import bench
from workbench.errors import InputError, WorkbenchError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "patterns.md"
RESULTS = ROOT / "benchmarks" / "results"

#: A row of the table of figures: number, file, case, side, unit; what follows is written here.
SOURCE = re.compile(r"^\| (\d+) \| `([\w.-]+)` \| (.+?) \| (.+?) \| (.+?) \| .* \|$", re.MULTILINE)
#: A row of the table of files.
FILE = re.compile(r"^\| `([\w.-]+\.json)` \| .* \|$", re.MULTILINE)
#: A figure in the text.
FIGURE = re.compile(r"(?P<figure>\d[\d.,e-]*)(?P<unit> %| ms| µs)? \[(?P<number>\d+)\]")


def shown(value: float) -> str:
    """Three digits; whole numbers in full."""
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"


def scale(written: str | None, unit: str) -> float:
    """What a median in `unit` is multiplied by to be written with ` %`, ` ms` or ` µs` behind it."""
    return {" %": 100.0, " ms": 1e-3 if unit == "us" else 1.0}.get(written, 1.0)


def found_row(result: dict[str, object], file: str, case: str, side: str, unit: str) -> dict[str, object]:
    """The one row of a result file. Raises InputError where there is none, or more."""
    found = [row for row in result["rows"] if (row["case"], row["backend"], row["unit"]) == (case, side, unit)]
    if len(found) != 1:
        raise InputError(
            f"{file}: expected one row of case {case!r}, side {side!r}, unit {unit!r}, found {len(found)}; "
            "correct the table of figures"
        )
    return found[0]


def refreshed(page: str, results: Path = RESULTS) -> str:
    """The page with every figure as the result files have it.

    Raises InputError for a number in the text that the table lacks, and for one in the table that no text uses.
    """
    files = {match[2] for match in SOURCE.finditer(page)}
    contents = {name: bench.read_result(results / name) for name in files}
    rows = {match[1]: found_row(contents[match[2]], *match.groups()[1:]) for match in SOURCE.finditer(page)}

    def figure(match: re.Match) -> str:
        if match["number"] not in rows:
            raise InputError(f"patterns page: {match[0]!r}: expected number {match['number']} in the table of figures")
        row = rows[match["number"]]
        return f"{shown(scale(match['unit'], row['unit']) * row['median'])}{match['unit'] or ''} [{match['number']}]"

    def source(match: re.Match) -> str:
        row = rows[match[1]]
        cells = (*match.groups()[:1], f"`{match[2]}`", *match.groups()[2:],
                 shown(row["median"]), f"{row['iqr']:.2g}", str(row["n"]))  # fmt: skip
        return f"| {' | '.join(cells)} |"

    def file(match: re.Match) -> str:
        if match[1] not in contents:
            raise InputError(f"patterns page: expected files that the table of figures names, found {match[1]}")
        result = contents[match[1]]
        changed = ", with changes" if result["dirty"] else ""
        machine = f"{result['hardware']['model']}, torch {result['versions']['torch']}"
        return f"| `{match[1]}` | `{result['command']}` | {machine} | {result['commit'][:10]}{changed} |"

    unused = set(rows) - {match["number"] for match in FIGURE.finditer(page)}
    unlisted = files - {match[1] for match in FILE.finditer(page)}
    if unused or unlisted:
        raise InputError(
            "patterns page: expected every figure in the text and every file in the table of files, found unused "
            f"figures {sorted(unused)} and unlisted files {sorted(unlisted)}"
        )
    return FILE.sub(file, SOURCE.sub(source, FIGURE.sub(figure, page)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the page is out of date")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    new = refreshed(page)
    if new == page:
        print(f"{PAGE.relative_to(ROOT)}: up to date")
        return 0
    if options.check:
        print(f"{PAGE.relative_to(ROOT)}: out of date; run benchmarks/patterns_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: figures rewritten")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
