"""Bridges: a function of a vendor's library, which has no Python binding, made a backend of an op.

A bridge is data: the function, the types of its arguments, and which value of the op each of them takes. From that a
few lines of C++ are written, compiled, and linked against the vendor's library; Python calls them through ctypes.

No header of torch is needed. A pointer argument gets the address of a tensor's values; an argument `at::Tensor&` gets
the address of a cell that holds the tensor's implementation, which is what an at::Tensor is. The source names the
function by its linker name and catches what it throws.
"""

from __future__ import annotations

import ctypes
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BackendError, InputError, one_line
from workbench.kernels.registry import OPERATIONS, Call, Requires, backend_named, register_backend
from workbench.probe import compiler
from workbench.probe.frames import FRAMES
from workbench.probe.headers import Declaration
from workbench.probe.symbols import Function

#: Types of numbers that an argument may have -> least and largest value; None for floating point.
NUMBERS = {
    "bool": (0, 1), "int": (-(2**31), 2**31 - 1), "unsigned int": (0, 2**32 - 1), "long": (-(2**63), 2**63 - 1),
    "unsigned long": (0, 2**63 - 1), "long long": (-(2**63), 2**63 - 1), "float": None, "double": None,
}  # fmt: skip
#: What a pointer may point to -> dtype of the tensor; None for any.
ELEMENTS = {
    "void": None, "float": torch.float32, "double": torch.float64, "__half": torch.float16, "c10::Half": torch.float16,
    "__nv_bfloat16": torch.bfloat16, "c10::BFloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64,
    "long long": torch.int64, "short": torch.int16, "signed char": torch.int8, "unsigned char": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
#: Passed by the address of a tensor, by value too: the C++ ABI passes a class with a destructor by a hidden address.
TENSORS = ("at::Tensor&", "at::Tensor const&", "at::Tensor")
#: cudaStream_t.
STREAM = "CUstream_st*"
#: Results that can be let go; any other may be returned through a hidden argument.
RESULTS = ("void", "int", "long", "bool", "at::Tensor&", "at::Tensor const&")
#: One sentence for every refusal.
SUPPORTED = (
    f"numbers ({', '.join(NUMBERS)}), pointers to values ({', '.join(ELEMENTS)}; also const), "
    f"{', '.join(TENSORS)}, {STREAM}; results {', '.join(RESULTS)}"
)
#: Characters of a function's own error that are kept.
ERROR_SIZE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """How a vendor's function computes an op of ours.

    name       of the backend
    op         one of `frames.FRAMES`
    symbol     the function: `at::_ops::mm_out::call`, or its last name alone
    signature  types of its arguments as the demangler writes them: "float const*", "at::Tensor&", "int"
    arguments  the value for each: a name of the op's frame ("x", "rows", "stream"), or a number ("1", "0.5", "true")
    returns    type of its result; a symbol does not tell it, a header does
    is_status  whether a result other than 0 is an error
    devices, dtypes  what it serves, by torch's names; empty dtypes: any
    library    file that has the function; empty: looked for in what is searched
    source     where the signature is known from
    """

    name: str
    op: str
    symbol: str
    signature: tuple[str, ...]
    arguments: tuple[str, ...]
    returns: str = "void"
    is_status: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ()
    library: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        where = f"bridge {self.name!r}"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise InputError(f"{where}: name: expected lower-case letters, digits and _")
        if self.op not in FRAMES:
            raise InputError(f"{where}: op: expected one of {', '.join(FRAMES)}, found {self.op!r}")
        if not re.fullmatch(r"[A-Za-z_][\w:]*", self.symbol):
            raise InputError(f"{where}: symbol: expected the name of a function without its arguments, found "
                             f"{self.symbol!r}")  # fmt: skip
        if len(self.signature) != len(self.arguments):
            raise InputError(f"{where}: expected as many arguments as types, found {len(self.arguments)} and "
                             f"{len(self.signature)}")  # fmt: skip
        bad = [type_ for type_ in self.signature if not is_supported(type_)]
        if bad:
            raise InputError(f"{where}: signature: {bad[0]!r} cannot be bridged; a bridge takes {SUPPORTED}")
        if self.returns not in RESULTS:
            raise InputError(f"{where}: returns: expected one of {', '.join(RESULTS)}, found {self.returns!r}")
        if self.is_status and self.returns != "int":
            raise InputError(f"{where}: is_status: expected returns = 'int', found {self.returns!r}")
        for name in self.dtypes:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise InputError(f"{where}: dtypes: {name!r} is no dtype of torch")
        frame = FRAMES[self.op]
        for type_, value in zip(self.signature, self.arguments, strict=True):
            _check_value(where, type_, value, frame)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, which `bridge_of` reads."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def is_supported(type_: str) -> bool:
    """Whether a bridge can pass an argument of this type."""
    return type_ in NUMBERS or type_ in TENSORS or type_ == STREAM or _element(type_) is not None


def _element(type_: str) -> str | None:
    """What a pointer points to, None for what is no pointer that a bridge can pass."""
    inside = type_.removesuffix("*").removesuffix(" const") if type_.endswith("*") else None
    return inside if inside in ELEMENTS else None


def _check_value(where: str, type_: str, value: str, frame: Any) -> None:
    if type_ in NUMBERS:
        known, is_fine = frame.NUMBERS, value in frame.NUMBERS or _literal(value) is not None
    elif type_ == STREAM:
        known, is_fine = ("stream",), value == "stream"
    else:
        known, is_fine = frame.TENSORS, value in frame.TENSORS
    if not is_fine:
        numbers = " or a number" if type_ in NUMBERS else ""
        raise InputError(f"{where}: argument {value!r} of type {type_}: expected one of {', '.join(known)}{numbers}")


def _literal(value: str) -> int | float | None:
    if value in ("true", "false"):
        return int(value == "true")
    try:
        return float(value) if re.search(r"[.eE]", value) else int(value)
    except ValueError:  # a name, which the caller looks for
        return None


def bridge_of(content: Mapping[str, Any], where: str = "bridge") -> Bridge:
    """A bridge from plain values. Raises InputError, naming the field, for what is none."""
    known = {field.name for field in fields(Bridge)}
    unknown = sorted(set(content) - known)
    if unknown:
        raise InputError(f"{where}: unknown field {unknown[0]!r}, expected {', '.join(sorted(known))}")
    missing = [name for name in ("name", "op", "symbol", "signature", "arguments") if name not in content]
    if missing:
        raise InputError(f"{where}: field {missing[0]!r} is missing")
    values: dict[str, Any] = {}
    for key, value in content.items():
        is_list = key in ("signature", "arguments", "devices", "dtypes")
        expected = list | tuple if is_list else bool if key == "is_status" else str
        if not isinstance(value, expected) or (is_list and not all(isinstance(item, str) for item in value)):
            kind = "a list of strings" if is_list else "true or false" if key == "is_status" else "a string"
            raise InputError(f"{where}: {key}: expected {kind}, found {value!r}")
        values[key] = tuple(value) if is_list else value
    return Bridge(**values)


def read_bridges(path: Path) -> list[Bridge]:
    """The tables `[[bridge]]` of a TOML file; a `library` that is no absolute path is one from the file's folder."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected TOML, found what is none: {error}") from error
    tables = content.get("bridge")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: expected at least one table [[bridge]], found none")
    bridges = [bridge_of(table, f"{path}: bridge {n}") for n, table in enumerate(tables, start=1)]
    return [replace(b, library=str(path.resolve().parent / b.library)) if b.library else b for b in bridges]


def refusal(bridge: Bridge, function: Function, declarations: Sequence[Declaration] = ()) -> str | None:
    """Why this declaration does not describe a function, None where it does; says what was found and what is known."""
    if function.is_member:
        return f"{function.shown} is a method, which needs an object; a bridge calls functions"
    if function.arguments is not None and function.arguments != bridge.signature:
        bad = [type_ for type_ in function.arguments if not is_supported(type_)]
        if bad:
            return f"{function.shown}: its argument {bad[0]} cannot be bridged; a bridge takes {SUPPORTED}"
        return f"{function.shown}: bridge {bridge.name} is declared for ({', '.join(bridge.signature)})"
    said = {d.returns for d in declarations}
    if said and bridge.returns not in said:
        first = declarations[0]
        return (f"{function.shown}: {first.path}:{first.line} says that it returns {first.returns}, bridge "
                f"{bridge.name} is declared with {bridge.returns}")  # fmt: skip
    return None


def source_of(bridge: Bridge, mangled: str) -> str:
    """The C++ of a bridge to the function of that linker name."""
    types, calls = [], []
    pointers = numbers = 0
    for type_ in bridge.signature:
        if type_ in NUMBERS:
            kind = "reals" if NUMBERS[type_] is None else "integers"
            types.append(type_)
            calls.append(f"static_cast<{type_}>({kind}[{numbers}])")
            numbers += 1
        else:  # a reference is an address too
            types.append("void*")
            calls.append(f"pointers[{pointers}]")
            pointers += 1
    returns = "void*" if bridge.returns in TENSORS else bridge.returns
    call = f"target({', '.join(calls)})"
    body = f"return {call} == 0 ? 0 : say(error, size, \"it returned a status other than 0\");" if bridge.is_status \
        else f"{call}; return 0;"
    return f"""// Bridge {bridge.name} to {bridge.symbol}({', '.join(bridge.signature)}).
#include <cstdint>
#include <cstdio>
#include <dlfcn.h>
#include <exception>

extern "C" {returns} target({', '.join(types)}) __asm__("{mangled}");

extern "C" const char* workbench_bridge_library() {{
    Dl_info found;
    return dladdr(reinterpret_cast<void*>(&target), &found) ? found.dli_fname : "";
}}

static int say(char* error, int64_t size, const char* text) {{
    snprintf(error, static_cast<size_t>(size), "%s", text);
    return 1;
}}

extern "C" int workbench_bridge(void* const* pointers, const int64_t* integers, const double* reals, char* error,
                                int64_t size) {{
    (void)pointers, (void)integers, (void)reals;
    try {{
        {body}
    }} catch (const std::exception& thrown) {{
        return say(error, size, thrown.what());
    }} catch (...) {{
        return say(error, size, "it threw something that is no std::exception");
    }}
}}
"""


def build_bridge(bridge: Bridge, function: Function, library: Path, command: Sequence[str]) -> compiler.Built:
    """Compile a bridge and link it against the library. Raises BuildError with the last lines of either."""
    return compiler.build(source_of(bridge, function.mangled), command, libraries=[library])


class LoadedBridge:
    """A built bridge in this process.

    Raises BackendError where the dynamic linker refuses it, and where it took another library than `library`: of two
    with the same soname a process loads one.
    """

    def __init__(self, bridge: Bridge, path: Path, library: Path):
        self.bridge = bridge
        try:
            loaded = ctypes.CDLL(str(path))
            self._function, origin = loaded.workbench_bridge, loaded.workbench_bridge_library
        except (OSError, AttributeError) as error:
            raise BackendError(f"bridge {bridge.name}: {path} cannot be loaded: {error}; put the folder of what is "
                               f"missing on LD_LIBRARY_PATH; if nothing is, remove {path.parent}, so that it is built "
                               "again") from error  # fmt: skip
        origin.restype = ctypes.c_char_p
        taken = Path(origin().decode("utf-8", errors="replace")).resolve()
        if taken != library.resolve():
            raise BackendError(
                f"bridge {bridge.name}: expected {bridge.symbol} of {library}, found that this process has it from "
                f"{taken}, loaded before; start a new process, or use that library"
            )
        self._function.restype = ctypes.c_int

    def call(self, values: Mapping[str, Tensor | int | float], device: torch.device) -> None:
        """Call the function with the values of a frame. Raises BackendError for a value that does not fit its type,
        and with the function's own text where it throws or returns a bad status."""
        bridge = self.bridge
        cells: list[tuple[str, ctypes.c_void_p, int]] = []
        pointers: list[int] = []
        integers: list[int] = []
        reals: list[float] = []
        for type_, name in zip(bridge.signature, bridge.arguments, strict=True):
            if type_ in NUMBERS:
                value = _number(bridge, type_, name, values)
                integers.append(0 if NUMBERS[type_] is None else int(value))
                reals.append(float(value) if NUMBERS[type_] is None else 0.0)
            elif type_ == STREAM:
                pointers.append(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
            elif type_ in TENSORS:
                implementation = values[name]._cdata
                cells.append((name, ctypes.c_void_p(implementation), implementation))
                pointers.append(ctypes.addressof(cells[-1][1]))
            else:
                pointers.append(_address(bridge, type_, name, values[name]))
        error = ctypes.create_string_buffer(ERROR_SIZE)
        code = self._function(
            (ctypes.c_void_p * max(len(pointers), 1))(*pointers), (ctypes.c_int64 * max(len(integers), 1))(*integers),
            (ctypes.c_double * max(len(reals), 1))(*reals), error, ctypes.c_int64(ERROR_SIZE),
        )  # fmt: skip
        if code:
            text = one_line(error.value.decode("utf-8", errors="replace"))
            raise BackendError(f"op {bridge.op}: {bridge.symbol}, called by bridge {bridge.name}, says: {text}")
        for name, cell, before in cells:
            if cell.value != before:
                raise BackendError(
                    f"op {bridge.op}: {bridge.symbol} put another tensor in the place of its argument {name}, which "
                    f"bridge {bridge.name} cannot follow: it needs a function that fills the tensors it is given"
                )


def _number(bridge: Bridge, type_: str, name: str, values: Mapping[str, Any]) -> int | float:
    value = values[name] if name in values else _literal(name)
    limits = NUMBERS[type_]
    if limits is not None and not limits[0] <= value <= limits[1]:
        raise BackendError(f"op {bridge.op}: {name} = {value} does not fit the argument of type {type_} of "
                           f"{bridge.symbol}")  # fmt: skip
    return value


def _address(bridge: Bridge, type_: str, name: str, tensor: Tensor) -> int:
    expected = ELEMENTS[_element(type_)]
    if expected is not None and tensor.dtype != expected:
        raise BackendError(f"op {bridge.op}: {name}: {bridge.symbol} takes {type_}, found a tensor of {tensor.dtype}; "
                           f"cast it or name another backend")  # fmt: skip
    if not tensor.is_contiguous():
        raise BackendError(f"op {bridge.op}: {name}: {bridge.symbol} takes {type_}, which has no strides, found "
                           f"strides {list(tensor.stride())} of shape {list(tensor.shape)}")  # fmt: skip
    return tensor.data_ptr()


def output_dtypes(bridge: Bridge) -> dict[str, torch.dtype]:
    """Dtypes that pointer arguments ask of the tensors they get."""
    found = {}
    for type_, name in zip(bridge.signature, bridge.arguments, strict=True):
        element = _element(type_)
        if element is not None and ELEMENTS[element] is not None:
            found[name] = ELEMENTS[element]
    return found


def runner(loaded: LoadedBridge) -> Callable[..., Any]:
    """The op by a bridge, with the signature of the op's contract."""
    frame = FRAMES[loaded.bridge.op]
    return frame.runner(lambda values, device: loaded.call(values, device), output_dtypes(loaded.bridge))


def supports(call: Call) -> str | None:
    """Why a bridge cannot serve a call beyond its declared devices and dtypes."""
    return "a bridge has no backward pass" if call.needs_grad else None


#: (op, backend's name) -> the library built for it, of bridges registered in this process.
_registered: dict[tuple[str, str], Path] = {}


def register_bridge(bridge: Bridge, path: Path, library: Path) -> None:
    """Make a bridge, built against `library`, a backend of its op, to be named like any other (`--backend op=name`).

    The same build again changes nothing. Raises BackendError where the name is another backend's, or the library
    cannot be loaded. The call is trusted from here on: `try_bridge` runs it in a process of its own first.
    """
    key = (bridge.op, bridge.name)
    if bridge.name in OPERATIONS[bridge.op].backends:
        if _registered.get(key) == path:
            return
        raise BackendError(f"op {bridge.op}: backend {bridge.name!r} is registered already; choose another name")
    dtypes = () if bridge.op == "alignment" else tuple(getattr(torch, name) for name in bridge.dtypes)
    register_backend(
        bridge.op, bridge.name, runner(LoadedBridge(bridge, path, library)), supports,
        requires=Requires(devices=bridge.devices, dtypes=dtypes),
    )  # fmt: skip
    _registered[key] = path


def try_bridge(
    bridge: dict[str, Any], path: str, library: str, device: str, dtype: str
) -> tuple[str, list[str]]:
    """The check for a process of its own: load, call, compare with the op's reference."""
    declared = bridge_of(bridge)
    frame = FRAMES[declared.op]
    run = runner(LoadedBridge(declared, Path(path), Path(library)))
    args, named = frame.sample(torch.device(device), getattr(torch, dtype))
    expected = backend_named(declared.op, "reference").run(*args, **named)
    with torch.no_grad():
        found = run(*args, **named)
    if device != "cpu":
        torch.cuda.synchronize()
    return frame.compare(found, expected), []
