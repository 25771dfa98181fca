"""What a backend needs of the machine, declared by it and checked before it is chosen."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import BackendError, one_line
from workbench.kernels.machine import Machine

if TYPE_CHECKING:
    from workbench.kernels.registry import Call


class MissingSymbol(BackendError):
    """A library's function is not to be had: the text is what its import said, in full."""


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@lru_cache(maxsize=256)
def _looked_up(symbol: str) -> tuple[Any, str | None]:
    """(the object, None) or (None, why it is not to be had)."""
    module_name, separator, attribute = symbol.partition(":")
    if not separator or not module_name or not attribute:
        raise BackendError(f"symbol {symbol!r}: expected package.module:attribute")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an import may raise anything, or exit; all of it is told
        return None, f"import of {module_name} fails: {_whole(error)}"
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            version = getattr(module, "__version__", None)
            known = f" (version {version})" if version else ""
            why = "" if error.__cause__ is None else f": {_whole(error)}"
            return None, f"{module_name}{known} has no {attribute}{why}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may import its parts when they are asked for
            return None, f"{module_name}: {attribute} cannot be had: {_whole(error)}"
    return found, None


def _whole(error: BaseException) -> str:
    """An exception with all that caused it, outermost first, and where the innermost was raised."""
    texts: list[str] = []
    seen: BaseException | None = error
    innermost = error
    while seen is not None:
        texts.append(f"{type(seen).__name__}: {seen}")
        innermost = seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    frames = traceback.extract_tb(innermost.__traceback__)
    where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return one_line(", caused by ".join(texts)) + where


def load_symbol(symbol: str) -> Any:
    """The object ``package.module:attribute``, imported when it is first asked for, kept afterwards.

    Raises MissingSymbol, with the original error in full, where the import fails or the module lacks the attribute.
    Both outcomes are kept until `forget_symbols`.
    """
    found, reason = _looked_up(symbol)
    if reason is not None:
        raise MissingSymbol(reason)
    return found


def forget_symbols() -> None:
    """Look every symbol up afresh: after a package was installed, and in tests."""
    _looked_up.cache_clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Requires:
    """What a backend needs; everything left out is no matter.

    devices           kinds of device by torch's name
    capability        least CUDA compute capability
    capability_below  the first CUDA compute capability that no longer works
    dtypes            of the call
    symbols           ``package.module:attribute`` that must import
    primitives        operators of torch (``aten::...``) that it cannot do without: a card may lack them
    free_bytes        free memory of the device when the choice is made
    """

    devices: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    capability_below: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    symbols: tuple[str, ...] = ()
    primitives: tuple[str, ...] = ()
    free_bytes: int = 0

    def refusal(self, call: Call) -> str | None:
        """Why the call cannot be served, None where it can: the machine's limits, then what this machine can run."""
        return self.lack(call) or self._not_here(call)

    def lack(self, call: Call) -> str | None:
        """What the call's machine, here or rehearsed, lacks; symbols are imported last, and only of this machine."""
        machine = call.machine
        if self.devices and call.device not in self.devices:
            return f"serves {' and '.join(self.devices)}, not {call.device}"
        absent = next(filter(None, map(machine.missing, self.symbols)), None)
        if absent is not None:  # no dtype helps where a card's module is not there
            return absent
        if self.dtypes and call.dtype not in self.dtypes:
            return f"takes {', '.join(map(dtype_name, self.dtypes))}, found {dtype_name(call.dtype)}"
        if machine.device == "cuda" and (self.capability or self.capability_below):
            reason = self._of_capability(machine)
            if reason is not None:
                return reason
        for name in self.primitives:
            if name in machine.primitives:
                return f"needs {name}, which {machine.name} lacks: {machine.primitives[name]}"
        free = machine.free_bytes() if self.free_bytes else None
        if free is not None and free < self.free_bytes:
            return f"needs {self.free_bytes / 2**20:.0f} MiB of free device memory, found {free / 2**20:.0f} MiB"
        return self._missing_symbol() if machine.is_here else None

    def _of_capability(self, machine: Machine) -> str | None:
        found = machine.capability
        if found is None and not machine.is_here:
            return f"needs a certain compute capability, and that of {machine.name} is unknown"
        if found is None:
            return f"needs a CUDA device to ask for its compute capability, found {machine.name}"
        if self.capability is not None and found < self.capability:
            return f"needs compute capability {_version(self.capability)}, found {_version(found)}"
        if self.capability_below is not None and found >= self.capability_below:
            return f"works below compute capability {_version(self.capability_below)}, found {_version(found)}"
        return None

    def _missing_symbol(self) -> str | None:
        return next(filter(None, (_looked_up(symbol)[1] for symbol in self.symbols)), None)

    def _not_here(self, call: Call) -> str | None:
        """Why a backend that the rehearsed machine could run cannot be run on this one."""
        if call.machine.is_here:
            return None
        if self.devices and call.tensor_device not in self.devices:
            return f"{call.machine.name} can run it; a rehearsal on {call.tensor_device} cannot"
        reason = self._missing_symbol()
        return None if reason is None else f"{call.machine.name} can run it; not on this machine: {reason}"
