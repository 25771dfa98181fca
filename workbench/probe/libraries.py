"""Shared libraries of a machine: where they are, and what they export.

A file's table of dynamic symbols is read with pyelftools, and read again with `nm -D` where that is installed.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
import shutil
import site
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from workbench.errors import InputError

#: ELF's name of a machine -> what `platform.machine()` says on it.
MACHINES = {
    "EM_X86_64": ("x86_64", "AMD64"), "EM_AARCH64": ("aarch64", "arm64"), "EM_386": ("i386", "i686"),
    "EM_ARM": ("armv7l", "armv6l"), "EM_PPC64": ("ppc64le", "ppc64"), "EM_RISCV": ("riscv64",),
    "EM_S390": ("s390x",), "EM_LOONGARCH": ("loongarch64",), "EM_MIPS": ("mips64", "mips"),
}  # fmt: skip
#: Names of shared libraries: libx.so, libx.so.1.2, x.cpython-311-x86_64-linux-gnu.so.
IS_LIBRARY = re.compile(r"\.so(\.\d+)*$")
#: What may go wrong inside pyelftools on a damaged file, beside its own errors: it trusts the numbers that it reads.
DAMAGED = (ELFError, ConstructError, struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError,
           AssertionError, OverflowError, MemoryError, RecursionError)  # fmt: skip
#: Where the dynamic linker's own list is asked from, which is often on no PATH but root's.
LDCONFIG = ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig")
#: No program that is asked about a library is waited for longer.
PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class Place:
    """A library file, and how it came to be found."""

    path: Path
    how: str


class LibraryFault(Exception):
    """A file is no usable library; `cause_id` says in which way."""

    def __init__(self, message: str, cause_id: str):
        super().__init__(message)
        self.cause_id = cause_id


@dataclass(frozen=True, slots=True)
class Symbol:
    """One dynamic symbol: its name as the linker has it; whether the library has it, or wants it from another."""

    name: str
    is_defined: bool
    is_function: bool


@dataclass(frozen=True, slots=True)
class Library:
    """What the headers of a library say."""

    path: Path
    machine: str
    soname: str | None
    needed: tuple[str, ...]
    symbols: tuple[Symbol, ...]

    @property
    def defined(self) -> frozenset[str]:
        return frozenset(symbol.name for symbol in self.symbols if symbol.is_defined)


def check_search(search: Sequence[Path]) -> None:
    """Raises InputError for a folder or file to search that is not there or cannot be read."""
    for entry in search:
        if not entry.exists():
            raise InputError(f"--search {entry}: expected a folder or a library file, found nothing there")
        if not os.access(entry, os.R_OK):
            raise InputError(f"--search {entry}: expected a folder or file that this user may read")


def find_libraries(search: Sequence[Path] = ()) -> tuple[list[Place], list[str]]:
    """(library files, each once by its real path; folders that cannot be read, with the reason).

    Looked for in `search` (with all folders below), in the packages of this Python, LD_LIBRARY_PATH, the CUDA
    toolkit's folder, and what `ldconfig -p` lists. Raises InputError for an entry of `search` that is not there.
    """
    unreadable: list[str] = []
    found: dict[Path, Place] = {}

    def keep(path: Path, how: str) -> None:
        real = Path(os.path.realpath(path))
        if real.is_file():
            found.setdefault(real, Place(path, how))

    check_search(search)
    for entry in search:
        for path in [entry] if entry.is_file() else libraries_below(entry, unreadable):
            keep(path, f"--search {entry}")
    for folder in package_folders():
        for path in libraries_below(folder, unreadable):
            keep(path, "Python packages")
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        for path in _in(Path(folder), unreadable):
            keep(path, "LD_LIBRARY_PATH")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        for path in _in(Path(os.environ[variable]) / "lib64", unreadable) if os.environ.get(variable) else ():
            keep(path, variable)
    for path in _of_ldconfig():
        keep(path, "ldconfig -p")
    return list(found.values()), unreadable


def package_folders() -> list[Path]:
    """Folders of installed packages of this Python, in the order in which imports look."""
    named = [*site.getsitepackages(), site.getusersitepackages() if site.ENABLE_USER_SITE else ""]
    of_path = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    return [Path(f) for f in dict.fromkeys([*of_path, *named]) if f and Path(f).is_dir()]


def libraries_below(folder: Path, unreadable: list[str]) -> Iterator[Path]:
    """Library files in a folder and all below it; what cannot be listed is added to `unreadable` with the reason."""

    def note(error: OSError) -> None:
        unreadable.append(f"{error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=note):
        folders.sort()
        for name in sorted(names):
            if IS_LIBRARY.search(name):
                yield Path(parent, name)


def _in(folder: Path, unreadable: list[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if IS_LIBRARY.search(path.name))
    except (FileNotFoundError, NotADirectoryError):  # both variables commonly name folders that are not there
        return []
    except OSError as error:
        unreadable.append(f"{folder}: {error.strerror}")
        return []


def _of_ldconfig() -> list[Path]:
    program = next(filter(None, map(shutil.which, LDCONFIG)), None)
    if program is None:
        return []
    done = subprocess.run([program, "-p"], capture_output=True, text=True, errors="replace", timeout=PATIENCE_S)
    return [Path(line.rpartition(" => ")[2]) for line in done.stdout.splitlines() if " => " in line]


def holds(path: Path, words: Sequence[str]) -> bool:
    """Whether the bytes of a file hold one of the words: a quick answer before its tables are read."""
    with open(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return False
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(word.encode()) >= 0 for word in words)


def read_library(path: Path) -> Library:
    """Headers and dynamic symbols of a library. Raises LibraryFault where it is none that this machine can load."""
    try:
        with open(path, "rb") as stream:
            start = stream.read(64)
            if not start.startswith(b"\x7fELF"):
                raise LibraryFault(_what_it_is(path, start), "not_an_elf_file")
            _check_size(path, start)
            stream.seek(0)
            return _read(path, stream)
    except OSError as error:
        is_damaged = error.errno == errno.EINVAL  # a position that no file has was read from it and gone to
        raise LibraryFault(
            f"{path}: cannot be read: {error.strerror}", "damaged_library" if is_damaged else "unreadable_library"
        ) from error
    except DAMAGED as error:
        size = path.stat().st_size
        raise LibraryFault(
            f"{path}: its ELF tables cannot be read, {type(error).__name__}: {error}; the file has {size:,} bytes",
            "damaged_library",
        ) from error


def _what_it_is(path: Path, start: bytes) -> str:
    if not start:
        return f"{path}: expected an ELF file, found an empty one"
    if start.startswith(b"/* GNU ld script"):
        return f"{path}: expected an ELF file, found a linker script, which names libraries and is none"
    if start.startswith(b"version https://git-lfs"):
        return f"{path}: expected an ELF file, found a pointer of Git LFS to one; fetch it with `git lfs pull`"
    return f"{path}: expected an ELF file (it begins with 7f 45 4c 46), found one that begins with {start[:4].hex(' ')}"


def _read(path: Path, stream) -> Library:
    elf = ELFFile(stream)
    machine = elf["e_machine"]
    _check_segments(path, elf)
    here = platform.machine()
    if here not in MACHINES.get(machine, ()):
        raise LibraryFault(
            f"{path}: built for {_machine_name(machine)}, expected {here}, the machine here", "wrong_architecture"
        )
    if (elf.elfclass == 64) != (struct.calcsize("P") == 8):
        raise LibraryFault(f"{path}: a library of {elf.elfclass} bits, expected {8 * struct.calcsize('P')}, as this "
                           "Python has", "wrong_architecture")  # fmt: skip
    if elf["e_type"] != "ET_DYN":
        raise LibraryFault(f"{path}: expected a shared library (ET_DYN), found {elf['e_type']}", "not_a_shared_library")
    dynamic = next((part for part in elf.iter_segments("PT_DYNAMIC")), None)
    if dynamic is None:
        raise LibraryFault(f"{path}: expected dynamic symbols, found no dynamic section: nothing can be linked against "
                           "it", "no_dynamic_symbols")  # fmt: skip
    tags = list(dynamic.iter_tags())
    soname = next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), None)
    needed = tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED")
    section = elf.get_section_by_name(".dynsym")
    if section is None:  # stripped of its sections; the segment that the loader reads has them too
        symbols = tuple(
            _symbol(s.name, s.entry.st_shndx, s.entry.st_info.type) for s in dynamic.iter_symbols() if s.name
        )
    else:
        symbols = tuple(_quickly(elf, section))
    return Library(path, machine, soname, needed, symbols)


def local_functions(path: Path) -> tuple[str, ...]:
    """Functions that a library has for itself and does not export, where it was not stripped of their names.

    Raises LibraryFault where their table cannot be read, which `read_library` does not look at.
    """
    with open(path, "rb") as stream:
        try:
            elf = ELFFile(stream)
            section = elf.get_section_by_name(".symtab")
            symbols = () if section is None else _quickly(elf, section)
            return tuple(s.name for s in symbols if s.is_defined and s.is_function)
        except (OSError, *DAMAGED) as error:  # OSError: a position that no file has
            raise LibraryFault(f"{path}: its table .symtab cannot be read, {type(error).__name__}: {error}",
                               "damaged_library") from error  # fmt: skip


def _check_size(path: Path, start: bytes) -> None:
    """A download or copy that ended early: the header tells where the table of sections ends, the last thing in most
    files."""
    size = path.stat().st_size
    if len(start) < 64:
        raise LibraryFault(f"{path}: cut short, the file has {size} bytes, no whole ELF header", "truncated_library")
    order = ">" if start[5] == 2 else "<"
    is_wide = start[4] == 2
    (begin,) = struct.unpack_from(order + ("Q" if is_wide else "I"), start, 0x28 if is_wide else 0x20)
    each, count = struct.unpack_from(order + "HH", start, 0x3A if is_wide else 0x2E)
    if begin + each * count > size:
        raise LibraryFault(_cut_short(path, begin + each * count), "truncated_library")


def _check_segments(path: Path, elf: ELFFile) -> None:
    """The same for a file without a table of sections: what is mapped must be there."""
    end = max((part["p_offset"] + part["p_filesz"] for part in elf.iter_segments()), default=0)
    if end > path.stat().st_size:
        raise LibraryFault(_cut_short(path, end), "truncated_library")


def _cut_short(path: Path, end: int) -> str:
    return f"{path}: cut short, its headers describe {end:,} bytes and the file has {path.stat().st_size:,}"


def _machine_name(machine: object) -> str:
    return MACHINES[machine][0] if machine in MACHINES else f"machine {str(machine).removeprefix('EM_')}"


def _symbol(name: str, section: object, kind: object) -> Symbol:
    return Symbol(name, section != "SHN_UNDEF", kind in ("STT_FUNC", "STT_GNU_IFUNC", "STT_LOOS"))


def _quickly(elf: ELFFile, section) -> Iterator[Symbol]:
    """All symbols of a table at once: torch's has 70,000, which the reader's own objects take seconds for."""
    order = "<" if elf.little_endian else ">"
    is_wide = elf.elfclass == 64
    entry = struct.Struct(order + ("IBBHQQ" if is_wide else "IIIBBH"))
    names = elf.get_section(section["sh_link"]).data()
    for fields in entry.iter_unpack(section.data()):
        start, info, where = (fields[0], fields[1], fields[3]) if is_wide else (fields[0], fields[3], fields[5])
        name = names[start : names.find(b"\0", start)].decode("utf-8", errors="replace")
        if name:  # function: STT_FUNC 2, STT_GNU_IFUNC 10; undefined: section 0
            yield Symbol(name, where != 0, info & 15 in (2, 10))


def names_by_nm(path: Path) -> frozenset[str] | None:
    """Names that `nm -D` finds defined; None where nm is not installed. Raises LibraryFault where it fails."""
    program = shutil.which("nm")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-D", "--defined-only", str(path)], capture_output=True, text=True, errors="replace",
            timeout=PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryFault(f"{path}: nm cannot be asked: {error}", "tool_broken") from error
    if done.returncode:
        raise LibraryFault(f"{path}: nm -D fails with code {done.returncode}: {done.stderr.strip()}", "damaged_library")
    # The version of a symbol stands behind @.
    return frozenset(line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.strip())
