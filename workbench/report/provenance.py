"""Where a report comes from: commit, command, checkpoint, versions, machine, parameters."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from workbench import __version__

#: Distributions whose versions can change a number or a page.
DISTRIBUTIONS = (
    "torch", "numpy", "pandas", "safetensors", "tokenizers", "matplotlib", "nbclient", "nbconvert",
    "ipykernel",
)  # fmt: skip


def commit(folder: Path) -> str:
    """Commit of the clone that `folder` is in, with `+ uncommitted changes`; says so where there is none."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git clone"
    return head + (" + uncommitted changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over names and contents of config.json and all safetensors files, in the order of names."""
    digest = hashlib.sha256()
    files = [*folder.glob("config.json"), *sorted(folder.glob("*.safetensors"))]
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def processor() -> str:
    """Name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The workbench, Python and every distribution of DISTRIBUTIONS."""
    found = {"workbench": __version__, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def provenance(
    *,
    project: Path,
    checkpoint: Path | None,
    parameters: Mapping[str, object],
    conditions: Mapping[str, object],
    command: str,
) -> list[tuple[str, str]]:
    """(label, value) in the order in which a report ends with them."""
    rows = [("Commit", commit(project)), ("Command", command)]
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
