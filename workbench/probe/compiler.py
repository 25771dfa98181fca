"""Small C++ and CUDA sources built into shared libraries, kept in the user's cache folder.

A build is found again by the hash of its source, its flags, the compiler and the libraries that it links to. It is
written under another name and renamed, so that what the cache holds is complete.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from workbench.errors import BackendError
from workbench.probe.child import last_lines

#: Compilers of C++ by name, in the order in which they are tried; $CXX goes before them.
COMPILERS = ("c++", "g++", "clang++")
#: What every C++ build has: an undefined symbol is an error when linked, not when called.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-z,defs")
#: A build that takes longer hangs.
PATIENCE_S = 120


class BuildError(BackendError):
    """A compiler or linker refuses; `lines` are the last ones that it wrote."""

    def __init__(self, message: str, lines: Sequence[str], is_link: bool):
        super().__init__(message)
        self.lines, self.is_link = tuple(lines), is_link


@dataclass(frozen=True, slots=True)
class Built:
    """A library that was built, or found in the cache; `note` tells where the cache could not be used."""

    path: Path
    was_cached: bool
    seconds: float
    note: str | None = None


def cache_folder() -> Path:
    """Where builds are kept: $XDG_CACHE_HOME, else ~/.cache, and there a folder of ours."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hybrid-moe-workbench" / "bridges"


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, or the first of COMPILERS on the PATH; None where there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named if shutil.which(named[0]) else None
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return None if found is None else [found]


def no_compiler() -> str:
    """The sentence for a machine without a compiler."""
    named = os.environ.get("CXX")
    if named:
        return f"no C++ compiler: $CXX is {named!r}, which is not on the PATH"
    return f"no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH"


@lru_cache(maxsize=8)
def compiler_version(command: tuple[str, ...]) -> str:
    """The lines of `--version`. Raises BuildError where the program is there and does not run."""
    done = _run([*command, "--version"])
    if done.returncode:
        raise BuildError(f"{command[0]} --version ended with code {done.returncode}", last_lines(done.stdout), False)
    return done.stdout.strip()


def build(
    source: str, compiler: Sequence[str], *, flags: Sequence[str] = FLAGS, libraries: Sequence[Path] = (),
    suffix: str = ".cpp", key: str = "", cache: Path | None = None,
) -> Built:  # fmt: skip
    """Compile and link one source to a shared library that finds `libraries` by their paths.

    `key` is what the outcome depends on beside source, flags, compiler and the paths, sizes and dates of `libraries`.
    Raises BuildError with the last lines of the compiler. A cache folder that cannot be written is no error: the
    library is then built in a temporary folder, gone with the process, and `Built.note` tells so.
    """
    begun = time.monotonic()
    cache = cache or cache_folder()
    name = _digest(source, compiler, flags, libraries, suffix, key)
    kept = cache / name / "bridge.so"
    if kept.is_file():
        return Built(kept, True, time.monotonic() - begun)
    note = None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix="building-", dir=kept.parent))
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="workbench-bridge-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        kept = folder / "bridge.so"
        note = f"{cache} cannot be written ({error.strerror}): built for this time alone"
    try:
        text, product = folder / f"bridge{suffix}", folder / "product.so"
        text.write_text(source, encoding="utf-8")
        # The folder of each library, so that it is found when the bridge is loaded wherever that is.
        places = [
            part for library in libraries
            for part in ("-Xlinker", "-rpath", "-Xlinker", str(Path(library).resolve().parent))
        ]  # fmt: skip
        command = [*compiler, *flags, str(text), *map(str, libraries), *places, "-ldl", "-o", str(product)]
        done = _run(command)
        if done.returncode or not product.is_file():
            raise _refused(command, done)
        if note is None:
            os.replace(text, kept.with_name(text.name))
        os.replace(product, kept)
    finally:
        if note is None:
            shutil.rmtree(folder)
    return Built(kept, False, time.monotonic() - begun, note)


def _digest(
    source: str, compiler: Sequence[str], flags: Sequence[str], libraries: Sequence[Path], suffix: str, key: str
) -> str:
    parts = [source, *compiler, compiler_version(tuple(compiler)), *flags, suffix, key]
    for library in libraries:
        real = Path(library).resolve()
        seen = real.stat()
        parts += [str(library), str(real), str(seen.st_size), str(seen.st_mtime_ns)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=PATIENCE_S, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} was not done after {PATIENCE_S} s", (), False) from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}", (), False) from error


def _refused(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> BuildError:
    lines = last_lines(done.stdout)
    is_link = any(
        sign in done.stdout
        for sign in ("undefined reference", "ld returned", "linker command failed", "cannot find -l", "ld: ")
    )
    stage = "linking" if is_link else "compiling"
    telling = [line for line in lines if "error" in line or "undefined reference" in line]
    said = (telling or lines or ("it wrote nothing",))[0]
    return BuildError(f"{stage} fails with code {done.returncode}: {said}; the command was: {shlex.join(command)}",
                      lines, is_link)  # fmt: skip
