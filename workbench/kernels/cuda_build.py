"""Builds CUDA C++ sources on first use, by torch's extension loader, into a library of plain C functions.

The sources know no torch: arguments are one struct of pointers and numbers, so a build takes seconds, and torch's
version is no matter to the result. A library is kept in torch's extension cache (TORCH_EXTENSIONS_DIR) under a name
made of its sources, macros and architecture: a change of any of them is another library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from workbench.errors import BackendError, one_line

#: Lines of the compiler's output that a message ends with, and the most characters of each.
LAST_LINES, LINE_LENGTH = 3, 300

#: Age in seconds from which the lock of a build is one that an interrupted build has left behind.
STALE_LOCK_S = 900

#: Shared memory in bytes that a block may have, by compute capability; of one that is not here, that of the newest
#: before it. Source: CUDA C++ programming guide, table of technical specifications per compute capability.
SHARED_BYTES = {
    (7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10,
    (10, 0): 227 << 10, (12, 0): 99 << 10,
}  # fmt: skip

FLAGS = ("-std=c++17", "-O3")


def shared_bytes(capability: tuple[int, int]) -> int:
    """Most shared memory of a block on a GPU of this compute capability, at least (7, 5)."""
    return SHARED_BYTES[max(known for known in SHARED_BYTES if known <= capability)]


@lru_cache(maxsize=1)
def refusal() -> str | None:
    """Why nothing can be built here, None where it can: torch without CUDA, or no nvcc, C++ compiler or ninja."""
    if torch.version.cuda is None:
        return "is built for CUDA, and this torch is not; install a CUDA build of torch"
    from torch.utils import cpp_extension  # takes a moment, and few processes build

    home = cpp_extension.CUDA_HOME
    if home is None or not Path(home, "bin", "nvcc").is_file():
        return (
            f"is built with nvcc, found none at CUDA_HOME {home} nor on PATH; install the CUDA toolkit "
            f"{torch.version.cuda} and set CUDA_HOME"
        )
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"is built with a C++ compiler, found no {compiler}; install g++, or set CXX"
    if not cpp_extension.is_ninja_available():
        return "is built with ninja, found none on PATH; pip install ninja"
    return None


def library_name(source: Path, macros: Mapping[str, str], capability: tuple[int, int]) -> str:
    """A name that is another one where a file beside the source, a macro, a flag or the architecture is."""
    content = hashlib.sha256(repr((sorted(macros.items()), FLAGS)).encode())
    for file in sorted(source.parent.glob("*.cu*")):
        content.update(file.name.encode() + file.read_bytes())
    return f"workbench_{source.stem}_{content.hexdigest()[:12]}_sm{capability[0]}{capability[1]}"


def last_lines(output: str) -> str:
    """The end of a compiler's output in one line: lines that tell of an error where there are any."""
    lines = [one_line(line)[:LINE_LENGTH] for line in output.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"\b(error|fatal|undefined|cannot|not found)\b", line, re.I)]
    return " | ".join((told or lines)[-LAST_LINES:])


@lru_cache(maxsize=64)
def _built(source: Path, macros: tuple[tuple[str, str], ...], capability: tuple[int, int]) -> ctypes.CDLL:
    reason = refusal()
    if reason is not None:
        raise BackendError(f"{source.name}: {reason}")
    from torch.utils import cpp_extension

    name = library_name(source, dict(macros), capability)
    architecture = f"{capability[0]}{capability[1]}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    lock = folder / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > STALE_LOCK_S:
        raise BackendError(
            f"{source.name}: {lock} is {(time.time() - lock.stat().st_mtime) / 60:.0f} minutes old, left by a build "
            "that was interrupted, and torch would wait for it forever; remove it"
        )
    try:
        path = cpp_extension.load(
            name, [str(source)],
            extra_cuda_cflags=[
                *FLAGS, f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
                *(f"-D{key}={text}" for key, text in macros),
            ],
            build_directory=str(folder), with_cuda=True, is_python_module=False,
        )  # fmt: skip
    except (RuntimeError, OSError, ImportError) as error:
        raise BackendError(
            f"{source.name} for sm_{architecture}: the build failed: {last_lines(str(error))}; next: run `ninja -v` in "
            f"{folder} for all of it, and check that nvcc ({cpp_extension.CUDA_HOME}) knows sm_{architecture} and that "
            f"it and torch are for the same CUDA ({torch.version.cuda})"
        ) from error
    library = ctypes.CDLL(path or os.path.join(folder, f"{name}.so"))
    library.error_text.restype = ctypes.c_char_p  # every source has it: the text of an error of CUDA
    return library


def built(source: Path, macros: Mapping[str, str], capability: tuple[int, int]) -> ctypes.CDLL:
    """The library of `source` with macros (-DKEY=VALUE) for one architecture, built when it is first asked for.

    Raises BackendError with the last lines of the compiler and the next step where it cannot be built.
    """
    return _built(source, tuple(sorted(macros.items())), capability)
