"""The cell of a notebook that is tagged `parameters`: read, checked and rewritten as text, never run."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import InputError

if TYPE_CHECKING:
    from nbformat import NotebookNode

TAG = "parameters"


def parameters_cell(notebook: NotebookNode, name: str) -> NotebookNode:
    """The cell tagged `parameters`. Raises InputError unless there is exactly one."""
    cells = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    if len(cells) != 1 or cells[0].cell_type != "code":
        raise InputError(f"notebook {name}: expected one code cell tagged {TAG!r}, found {len(cells)}")
    return cells[0]


def read_parameters(source: str, name: str) -> dict[str, object]:
    """Names and values of a parameters cell. Raises InputError for anything but assignments of literals."""
    return {target: value for target, value, _ in _assignments(source, name)}


def replace_parameters(source: str, changes: Mapping[str, object], name: str) -> str:
    """The cell's text with new values in the place of the old ones; comments and order stay.

    Raises InputError for a name that the cell does not assign and for a value of another type. A whole
    number is accepted where the cell has a real one.
    """
    assignments = _assignments(source, name)
    known = {target: value for target, value, _ in assignments}
    for target, value in changes.items():
        if target not in known:
            raise InputError(f"notebook {name}: no parameter {target!r}, expected one of {', '.join(known)}")
        _check_type(target, value, known[target], name)
    lines = source.encode().split(b"\n")  # positions of the syntax tree count bytes
    for target, old, node in reversed(assignments):
        if target not in changes:
            continue
        value = changes[target]
        text = repr(float(value) if isinstance(old, float) else value).encode()
        first, last = node.lineno - 1, node.end_lineno - 1
        lines[first : last + 1] = [
            lines[first][: node.col_offset] + text + lines[last][node.end_col_offset :]
        ]
    return b"\n".join(lines).decode()


def parse_setting(text: str, defaults: Mapping[str, object], name: str) -> tuple[str, object]:
    """`KEY=VALUE` from a command line, the value read in the type that the notebook's parameter has.

    Text needs no quotes; everything else is a Python literal. Raises InputError for a missing `=`, an
    unknown key and a value of the wrong type.
    """
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise InputError(f"--set {text!r}: expected KEY=VALUE, for instance --set max_new_tokens=8")
    if key not in defaults:
        raise InputError(f"--set {key}: no such parameter in {name}, expected one of {', '.join(defaults)}")
    if isinstance(defaults[key], str):
        return key, value
    try:
        parsed = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        parsed = value
    _check_type(key, parsed, defaults[key], name)
    return key, parsed


def from_here(key: str, value: object, default: object, folder: Path, name: str) -> object:
    """A path as given on a command line, made absolute where it exists there: the kernel works in another folder.

    A parameter names a file or folder where its default is the name of one, as seen from the notebook's `folder`; so
    does `policy`, where it is no preset. What is not found here is left to be found beside the notebook; InputError
    for what is found in neither place, and for a file where a folder is expected or the other way round.
    """
    is_path = isinstance(default, str) and default != "" and os.path.exists(folder / default)
    if not isinstance(value, str) or not (is_path or key == "policy"):
        return value
    from workbench.numerics import PRESETS

    if key == "policy" and value in PRESETS:
        return value
    given = os.path.expanduser(value)
    path = os.path.realpath(given) if value and os.path.exists(given) else value
    if is_path:
        is_folder = os.path.isdir(folder / default)
        if not value or not (os.path.isdir if is_folder else os.path.isfile)(folder / path):
            found = "a file" if is_folder else "a folder"
            raise InputError(
                f"{key} {value!r}: expected a {'folder' if is_folder else 'file'} here or by the notebook, found "
                f"{found if value and os.path.exists(folder / path) else 'none'} (notebook {name})"
            )
    return path


def check_parameters(parameters: Mapping[str, object], name: str, folder: Path) -> None:
    """Refuse, before a kernel starts, what cannot be met: a folder, dtype, policy or number that is none.

    `folder` is the notebook's, where its relative paths begin. Raises InputError or PolicyError in the words that the
    notebook itself would use, and names the notebook.
    """
    from workbench.loading import dtype_named
    from workbench.numerics import PRESETS, resolve_policy

    where = f"(notebook {name})"
    checkpoint, policy = parameters.get("checkpoint"), parameters.get("policy")
    if isinstance(checkpoint, str) and not (folder / checkpoint).is_dir():
        raise InputError(f"checkpoint {checkpoint!r}: expected a folder here or by the notebook, found none {where}")
    if isinstance(policy, str):
        path = folder / policy
        resolve_policy(policy if policy in PRESETS or not path.is_file() else path)
    if "dtype" in parameters:
        dtype_named(parameters["dtype"])
    for key, least in (("max_tokens", 1), ("max_new_tokens", 1), ("flip_texts", 1)):
        if isinstance(parameters.get(key), int) and parameters[key] < least:
            raise InputError(f"{key}: expected at least {least}, found {parameters[key]} {where}")


def _check_type(key: str, value: object, default: object, name: str) -> None:
    expected, found = type(default), type(value)
    if found is expected or (expected is float and found is int):
        return
    raise InputError(
        f"notebook {name}: parameter {key}: expected {expected.__name__} as in {default!r}, found {value!r}"
    )


def _assignments(source: str, name: str) -> list[tuple[str, object, ast.expr]]:
    found = []
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise InputError(
            f"notebook {name}: parameters cell: not Python ({error.msg}, line {error.lineno})"
        ) from None
    for statement in tree.body:
        is_plain = (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        )
        try:
            value = ast.literal_eval(statement.value) if is_plain else None
        except ValueError:
            is_plain = False
        if not is_plain:
            raise InputError(
                f"notebook {name}: parameters cell, line {statement.lineno}: expected NAME = LITERAL, "
                f"found {ast.unparse(statement)[:60]!r}"
            )
        found.append((statement.targets[0].id, value, statement.value))
    return found
