"""What commands print and write: JSON without NaN, tables in plain text."""

from __future__ import annotations

import errno
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
    """To stdout for `-`, else to the file, which appears complete or not at all (`write_file`).

    Pure ASCII, so that any console can show it and any file name be in it.
    """
    text = json.dumps(to_json(content), indent=1, allow_nan=False)
    if target == "-":
        print(text)
        return
    write_file(text + "\n", target, "--json")


def write_file(text: str, target: str | Path, option: str) -> None:
    """Write a file as a whole or not at all; `option` is what named it, for the error.

    Only a regular file is replaced: a link keeps pointing where it did, and a device or pipe is written to.
    """
    path = _named_file(target, option)
    scratch = _scratch(path)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):  # it may never have come to be
            scratch.unlink()
        raise InputError(f"{option} {target}: cannot be written: {error.strerror}") from None


def check_file(target: str | Path, option: str, *, makes_folders: bool = False) -> None:
    """Raise InputError where `write_file` could not write, before the time of a run is spent.

    It writes an empty file where `write_file` writes its own, and removes it. With `makes_folders` the folders above
    the file need not be there yet.
    """
    path = _named_file(target, option)
    folder = path.parent
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            return  # a device or a pipe, which is not opened twice
        while makes_folders and not folder.exists() and folder != folder.parent:
            folder = folder.parent
        scratch = _scratch(folder / path.name)
        with open(scratch, "xb"):
            pass
        scratch.unlink()
    except OSError as error:
        raise InputError(f"{option} {target}: cannot be written: {error.strerror}") from None


def _named_file(target: str | Path, option: str) -> Path:
    if str(target) in ("", "."):  # pathlib takes the one for the other
        raise InputError(f"{option}: expected the name of a file{' or -' * (option == '--json')}, found an empty one")
    return Path(os.path.realpath(target))


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


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
