"""What a number was computed by: commit, versions, processor, checkpoint. Reports and benchmarks record it."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from workbench import __version__
from workbench.errors import InputError

#: Distributions whose versions can change a number or a page.
DISTRIBUTIONS = (
    "torch", "numpy", "pandas", "safetensors", "tokenizers", "matplotlib", "nbclient", "nbconvert",
    "ipykernel",
)  # fmt: skip


def commit(folder: Path) -> tuple[str, bool]:
    """(commit of the clone that `folder` is in, whether tracked files differ from it).

    Raises InputError where there is none: a measurement that nobody can repeat is not worth a file.
    """
    while not folder.is_dir() and folder != folder.parent:  # a folder for results may be yet to come
        folder = folder.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise InputError(
                f"{folder}: expected a git clone to name the commit measured, found none ({error})"
            ) from error

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))


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
