"""Where a report comes from, as the lines that it ends with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from workbench.errors import InputError
from workbench.provenance import checkpoint_hash, commit, processor, versions


def commit_line(folder: Path) -> str:
    """Commit of the clone that `folder` is in, with `+ uncommitted changes`; says so where there is none."""
    try:
        head, is_changed = commit(folder)
    except InputError:
        return "unknown: not a git clone"
    return head + (" + uncommitted changes" if is_changed else "")


def provenance(
    *,
    project: Path,
    checkpoint: Path | None,
    parameters: Mapping[str, object],
    conditions: Mapping[str, object],
    command: str,
) -> list[tuple[str, str]]:
    """(label, value) in the order in which a report ends with them."""
    rows = [("Commit", commit_line(project)), ("Command", command)]
    if checkpoint is not None:
        rows.append(("Checkpoint", checkpoint_hash(checkpoint)))
    rows += [
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions().items())),
        ("Machine", f"{processor()}, {platform.system()} {platform.machine()}"),
    ]
    rows += [(name.replace("_", " ").capitalize(), _sentence(value)) for name, value in conditions.items()]
    rows.append(("Parameters", ", ".join(f"{name} = {_short(value)}" for name, value in parameters.items())))
    return rows


def _sentence(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_sentence(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_sentence, value)) or "none"
    return str(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
