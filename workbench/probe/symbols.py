"""C++ names: demangled, and taken apart into a function's name and the types of its arguments."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from workbench.errors import BackendError

#: Libraries that have the demangler of the C++ ABI; torch needs the first.
DEMANGLERS = ("libstdc++.so.6", "libc++abi.so.1", "libc++abi.dylib")
#: No demangler is waited for longer.
PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a library exports.

    mangled    the linker's name
    shown      as C++ has it, `at::_ops::relu_::call(at::Tensor&)`; the linker's name where it is a C function
    name       without arguments, `at::_ops::relu_::call`
    arguments  types as the demangler writes them; None of a C function, whose name tells nothing of them
    is_member  a const method, which needs an object
    """

    mangled: str
    shown: str
    name: str
    arguments: tuple[str, ...] | None
    is_member: bool = False

    @property
    def last_name(self) -> str:
        """The name without namespaces and template arguments."""
        last = _split(self.name, "::")[-1]
        return last if last.startswith("operator") else last.partition("<")[0]

    @property
    def signature(self) -> str:
        """Argument types as one text; `unknown` of a C function."""
        return "unknown" if self.arguments is None else f"({', '.join(self.arguments)})"


@lru_cache(maxsize=1)
def _abi():
    """The ABI's own demangler; None where none of its libraries is there."""
    for name in DEMANGLERS:
        try:
            library = ctypes.CDLL(name)
        except OSError:  # another one may be there; none at all is the caller's business
            continue
        function = library.__cxa_demangle
        function.restype = ctypes.c_void_p
        function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        release = ctypes.CDLL(None).free
        release.argtypes = (ctypes.c_void_p,)
        release.restype = None
        return function, release
    return None


def demangled(names: Iterable[str]) -> list[str]:
    """Each name as C++ has it; names that are none of C++ stay. Raises BackendError where nothing can demangle."""
    names = list(names)
    abi = _abi()
    if abi is not None:
        return [_by_abi(name, *abi) if name.startswith("_Z") else name for name in names]
    program = shutil.which("c++filt")
    if program is None:
        raise BackendError(
            f"C++ names: expected one of {', '.join(DEMANGLERS)} or the program c++filt to demangle them, found none; "
            "install libstdc++ or binutils"
        )
    done = subprocess.run([program], input="\n".join(names), capture_output=True, text=True, timeout=PATIENCE_S)
    shown = done.stdout.splitlines()
    if done.returncode or len(shown) != len(names):
        raise BackendError(f"C++ names: {program} ended with code {done.returncode} and gave {len(shown)} names for "
                           f"{len(names)}: {done.stderr.strip()}")  # fmt: skip
    return shown


def _by_abi(name: str, function, release) -> str:
    status = ctypes.c_int()
    address = function(name.encode(), None, None, ctypes.byref(status))
    if not address:  # the name is not one of C++ after all
        return name
    try:
        return ctypes.string_at(address).decode("utf-8", errors="replace")
    finally:
        release(address)


def functions(mangled: Iterable[str]) -> list[Function]:
    """The functions behind linker names."""
    mangled = list(mangled)
    return [_function(m, shown) for m, shown in zip(mangled, demangled(mangled), strict=True)]


def _function(mangled: str, shown: str) -> Function:
    start = _arguments_start(shown)
    if mangled == shown or start is None:
        return Function(mangled, shown, shown, None)
    end = _closing(shown, start)
    inside, after = shown[start + 1 : end].strip(), shown[end + 1 :]
    name = shown[:start]
    if ">" in name:  # a template's name has its result type in front
        name = _split(name, " ")[-1]
    # "[abi:cxx11]" and "[clone .cold]" are no arguments.
    return Function(mangled, shown, name, tuple(p.strip() for p in _split(inside, ",")) if inside else (),
                    " const" in after or after.strip().startswith(("&", "&&")))  # fmt: skip


def _arguments_start(shown: str) -> int | None:
    """Where the list of arguments begins: the first ( outside of template arguments and of `(anonymous namespace)`."""
    depth = i = 0
    while i < len(shown):
        if shown.startswith(("operator<<", "operator>>", "operator()", "operator->"), i):
            i += len("operator()")
            continue
        if shown.startswith("(anonymous namespace)", i):
            i += len("(anonymous namespace)")
            continue
        if shown[i] == "(" and depth == 0:
            return i
        depth += {"<": 1, ">": -1}.get(shown[i], 0)
        i += 1
    return None


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside of all brackets."""
    parts, depth, begun, i = [], 0, 0, 0
    while i < len(text):
        depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(text[i], 0)
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[begun:i])
            i += len(separator)
            begun = i
            continue
        i += 1
    return [*parts, text[begun:]]
