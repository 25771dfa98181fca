"""What commands print and write: JSON without NaN, tables in plain text."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def to_json(value: object) -> object:
    """Plain JSON values: what is not finite or missing becomes null."""
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    if hasattr(value, "item"):  # a number of numpy
        return to_json(value.item())
    return float(value) if isinstance(value, float) and math.isfinite(value) else None


def write_json(content: dict, target: str) -> None:
    """To stdout for `-`, else to the file, which appears complete or not at all.

    Pure ASCII, so that any console can show it and any file name be in it. Only a regular file is replaced: a
    link keeps pointing where it did, and a device or pipe is written to.
    """
    text = json.dumps(to_json(content), indent=1, allow_nan=False)
    if target == "-":
        print(text)
        return
    if not target:
        raise InputError("--json: expected the name of a file or -, found an empty one")
    path = Path(os.path.realpath(target))
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text + "\n", encoding="ascii")
            return
        scratch.write_text(text + "\n", encoding="ascii")
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):  # it may never have come to be
            scratch.unlink()
        raise InputError(f"--json {target}: cannot be written: {error.strerror}") from None


def text_table(frame: pd.DataFrame, formats: dict[str, str] | None = None) -> str:
    """Columns of a table side by side, numbers to the right, text to the left."""
    formats = formats or {}
    cells = {name: [_cell(value, formats.get(name, "")) for value in frame[name]] for name in frame.columns}
    lines = [[] for _ in range(len(frame) + 1)]
    for name, column in cells.items():
        is_text = all(isinstance(value, str | tuple) or value is None for value in frame[name])
        width = max(len(str(name)), *(len(cell) for cell in column), 1) if column else len(str(name))
        for line, cell in zip(lines, [str(name), *column], strict=True):
            line.append(cell.ljust(width) if is_text else cell.rjust(width))
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _cell(value: object, pattern: str) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, tuple):
        return "x".join(map(str, value)) if pattern == "shape" else str(value)
    return format(value, pattern or (".4g" if isinstance(value, float) else ""))
