"""Scratch memory of an op: declared, allocated once, then only taken and given back.

    with Workspace() as workspace:
        workspace.declare("hidden", (512, 1024), torch.float32)  # the largest shape, or the most elements
        workspace.allocate()
        with workspace.take("hidden", (rows, width), torch.float32) as hidden:
            torch.mm(x, weight.T, out=hidden)
    # leaving warns of buffers that were declared and never taken

Rules. After `allocate` nothing can be declared and no memory is allocated any more. A buffer is one piece of memory,
so taking it again before it was given back raises: a recursive call needs buffers of its own, and so does a second
thread, which is refused (one workspace for each thread). What was taken is not initialised and belongs to the taker
until the end of the `with`; a result that has to live longer must be copied out. On a GPU the order of the current
stream protects a buffer that is given back before the kernels that use it have run; work on another stream has to be
ordered by its caller. Scratch takes no part in autograd.

With `debug` every taken buffer is filled with NaN (the largest value of an integer type, True for bool), when it is
taken and again when it is given back: a read of what was never written shows, and so does one that comes too late.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from threading import get_ident
from typing import NoReturn

import torch
from torch import Tensor

from workbench.errors import WorkspaceError, WorkspaceWarning

#: Views of a buffer that are kept, one for each shape taken; with more they are dropped and made again.
KEPT_VIEWS = 256


class _Buffer:
    """One piece of memory, and the context in which it is taken."""

    __slots__ = ("dtype", "elements", "is_debug", "is_taken", "memory", "n_taken", "name", "poison", "view", "views")

    def __init__(self, name: str, elements: int, dtype: torch.dtype, device: torch.device, is_debug: bool):
        self.name = name
        self.elements = elements
        self.dtype = dtype
        with torch.inference_mode(False):  # else in-place use outside of inference mode would be refused
            self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.is_debug = is_debug
        self.poison = poison_of(dtype)
        self.is_taken = False
        self.n_taken = 0
        self.view: Tensor | None = None
        self.views: dict[tuple[int, ...], Tensor] = {}

    def __enter__(self) -> Tensor:
        return self.view

    def __exit__(self, *_: object) -> None:
        if self.is_debug:
            self.view.fill_(self.poison)
        self.view = None
        self.is_taken = False


class Workspace:
    """Named scratch buffers on one device; see the module for the rules. `debug` fills what is taken with NaN.

    `declare` all, `allocate` once, then `take`; `close`, or the end of the `with`, reports what was never taken. Cannot
    be copied or pickled: two owners would write to the same memory. All misuse raises `WorkspaceError`, and so does a
    device that is unknown or that this machine does not have.
    """

    _is_open = False  # until __init__ is through, so that __del__ has nothing to say

    def __init__(self, device: str | torch.device = "cpu", *, debug: bool = False):
        self.device = _device(device)
        self._is_debug = debug
        self._declared: dict[str, tuple[int, torch.dtype]] = {}
        self._buffers: dict[str, _Buffer] = {}
        self._thread: int | None = None  # that may take, once allocated
        self._unused: tuple[str, ...] = ()
        self._is_open = True

    def declare(self, name: str, size: int | Sequence[int], dtype: torch.dtype) -> None:
        """Ask for a buffer: `size` is the largest shape, or the most elements, that will be taken.

        Raises WorkspaceError once allocated or closed, for a name declared before, for what is no name or dtype, and
        for sizes other than whole numbers of at least 1.
        """
        if not isinstance(name, str) or not name:
            raise WorkspaceError(f"workspace: buffer {name!r}: expected a name, found {_kind(name)}")
        if not self._is_open or self._thread is not None:
            state = "the workspace closed" if not self._is_open else "all allocated and frozen"
            raise WorkspaceError(f"workspace: buffer {name!r}: expected it declared before allocate, found {state}")
        if name in self._declared:
            raise WorkspaceError(f"workspace: buffer {name!r}: expected to be declared once, found a second time")
        shape = (size,) if isinstance(size, int) else size
        is_shape = isinstance(shape, Sequence) and len(shape) > 0 and all(type(n) is int and n > 0 for n in shape)
        if not is_shape or isinstance(size, bytes):
            raise WorkspaceError(
                f"workspace: buffer {name!r}: expected sizes of at least 1, as a number of elements or a shape, found "
                f"{size!r} ({_kind(size)})"
            )
        if not isinstance(dtype, torch.dtype):
            raise WorkspaceError(f"workspace: buffer {name!r}: expected a torch dtype, found {dtype!r}")
        try:
            torch.empty(1, dtype=dtype).fill_(poison_of(dtype))
        except (RuntimeError, TypeError):  # of quantised, packed and opaque types
            raise WorkspaceError(f"workspace: buffer {name!r}: expected a dtype of numbers, found {dtype}") from None
        self._declared[name] = (math.prod(shape), dtype)

    def allocate(self) -> None:
        """Allocate all that was declared, and freeze. The thread that calls it is the one that may take.

        Raises WorkspaceError the second time, and where the memory is not to be had: then nothing is allocated.
        """
        if not self._is_open or self._thread is not None:
            state = "closed" if not self._is_open else "allocated already"
            raise WorkspaceError(f"workspace: allocate: expected one call, found the workspace {state}")
        buffers = {}
        for name, (elements, dtype) in self._declared.items():
            try:
                buffers[name] = _Buffer(name, elements, dtype, self.device, self._is_debug)
            except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # torch has one of each for this
                raise WorkspaceError(
                    f"workspace: allocate: buffer {name!r}: expected {elements:,} elements of {dtype} "
                    f"({elements * dtype.itemsize:,} B, {self.n_bytes:,} B with all that was declared) on "
                    f"{self.device}, found no such memory: {_reason(error)}; declare less"
                ) from None
        self._buffers = buffers
        self._thread = get_ident()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Buffer:
        """``with workspace.take(name, shape, dtype) as tensor``: a contiguous tensor of this shape, not initialised.

        Raises WorkspaceError for a buffer that was not declared, not allocated, of another dtype, too small or taken
        already, for a shape that is no tuple of whole numbers of at least 0, and for a call from another thread than
        `allocate`'s.
        """
        try:
            buffer = self._buffers.get(name)
        except TypeError:  # not hashable
            buffer = None
        if buffer is None or buffer.is_taken or buffer.dtype is not dtype or self._thread != get_ident():
            self._refuse(name, shape, dtype)
        try:
            view = buffer.views.get(shape)
        except TypeError:  # not hashable, so no tuple of numbers
            view = None
        if view is None:
            view = self._new_view(buffer, shape)
        buffer.is_taken = True
        buffer.n_taken += 1
        buffer.view = view
        if buffer.is_debug:
            view.fill_(buffer.poison)
        return buffer

    def _new_view(self, buffer: _Buffer, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise WorkspaceError(
                f"workspace: buffer {buffer.name!r}: expected a shape, a tuple of whole numbers of at least 0, found "
                f"{shape!r} ({_kind(shape)})"
            )
        elements = math.prod(shape)
        if elements > buffer.elements:
            raise WorkspaceError(
                f"workspace: buffer {buffer.name!r}: expected at most {buffer.elements} elements as declared, found "
                f"{list(shape)}, which is {elements}; declare the largest shape"
            )
        if len(buffer.views) >= KEPT_VIEWS:
            buffer.views.clear()
        with torch.inference_mode(False):
            view = buffer.views[shape] = buffer.memory[:elements].view(shape)
        return view

    def _refuse(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> NoReturn:
        where = f"workspace: buffer {name!r}"
        if not isinstance(name, str):
            raise WorkspaceError(f"{where}: expected a name, found {_kind(name)}")
        if not self._is_open:
            raise WorkspaceError(f"{where}: expected an open workspace, found it closed; make a new one")
        if name not in self._declared:
            declared = ", ".join(self._declared) or "none"
            raise WorkspaceError(
                f"{where}: expected one of those declared ({declared}), found no such; "
                f"declare({name!r}, {shape!r}, {dtype}) before allocate"
            )
        if self._thread is None:
            raise WorkspaceError(f"{where}: expected a call of allocate before take, found nothing allocated")
        buffer = self._buffers[name]
        if self._thread != get_ident():
            raise WorkspaceError(
                f"{where}: expected to be taken by thread {self._thread}, which called allocate, found thread "
                f"{get_ident()}; give each thread a workspace of its own"
            )
        if buffer.dtype is not dtype:
            raise WorkspaceError(f"{where}: expected dtype {buffer.dtype} as declared, found {dtype}")
        raise WorkspaceError(
            f"{where}: expected to be free, found it taken and not given back; take it in a `with`, and declare a "
            "buffer for each that is in use at the same time"
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers, declared or allocated."""
        return sum(elements * dtype.itemsize for elements, dtype in self._declared.values())

    @property
    def unused(self) -> tuple[str, ...]:
        """Names declared and never taken so far."""
        if not self._is_open:
            return self._unused
        return tuple(name for name in self._declared if name not in self._buffers or not self._buffers[name].n_taken)

    def __str__(self) -> str:
        """One line for each buffer (elements, dtype, bytes, how often taken), then the bytes of all."""
        lines = []
        for name, (elements, dtype) in self._declared.items():
            taken = f"taken {self._buffers[name].n_taken} times" if name in self._buffers else "not allocated"
            kind = str(dtype).removeprefix("torch.")
            lines.append(f"{name:<16} {elements:>14,} {kind:<10} {elements * dtype.itemsize:>16,} B  {taken}")
        return "\n".join([*lines, f"{'workspace':<16} {'':>14} {self.device!s:<10} {self.n_bytes:>16,} B"])

    def close(self) -> tuple[str, ...]:
        """Let go of the memory; returns the names that were declared and never taken, and warns of them.

        Closing again returns the same and says nothing. Raises WorkspaceError while a buffer is taken.
        """
        taken = [buffer.name for buffer in self._buffers.values() if buffer.is_taken]
        if taken:
            raise WorkspaceError(
                f"workspace: close: expected all buffers to be free, found {', '.join(taken)} taken; leave their `with`"
            )
        was_open = self._is_open
        names = self._end()
        if names and was_open:
            warnings.warn(_unused_message(names), WorkspaceWarning, stacklevel=2)
        return names

    def _end(self) -> tuple[str, ...]:
        self._unused = self.unused
        self._is_open = False
        self._buffers = {}
        return self._unused

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()  # an error on its way out explains why buffers are taken, or were not

    def __del__(self) -> None:
        if not self._is_open:
            return
        names = self._end()
        if not names:
            return
        try:
            warnings.warn(_unused_message(names), WorkspaceWarning, stacklevel=2)
        except WorkspaceWarning as warning:  # warnings are errors here, and nobody can catch one that is raised now
            if sys.stderr is not None:
                sys.stderr.write(f"{warning}\n")

    def __copy__(self) -> NoReturn:
        raise _not_copyable("copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _not_copyable("copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _not_copyable("pickled")


def _unused_message(names: tuple[str, ...]) -> str:
    return (
        f"workspace: expected every declared buffer to be taken, found never taken: {', '.join(names)}; remove them, "
        "unless the backend that was chosen takes no scratch memory (`Kernels.attestation` names it)"
    )


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)  # a device of a kind that this build of torch, or this machine, does not have
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(f"this machine has {torch.cuda.device_count()} CUDA devices")
    except (RuntimeError, TypeError, AssertionError, ModuleNotFoundError) as error:  # torch has one of each for this
        raise WorkspaceError(
            f"workspace: device: expected one of this machine, such as cpu, found {str(device)!r}: {_reason(error)}"
        ) from None
    return found


def _reason(error: BaseException) -> str:
    """The first sentence of what torch says, which goes on with advice on debugging."""
    first = str(error).partition("\n")[0]
    return first.partition(". ")[0].removesuffix(".") or type(error).__name__


def _kind(value: object) -> str:
    is_empty = isinstance(value, str | tuple | list) and not value
    return f"an empty {type(value).__name__}" if is_empty else type(value).__name__


def _not_copyable(verb: str) -> WorkspaceError:
    return WorkspaceError(
        f"workspace: expected one owner, found it being {verb}: two owners would write to the same scratch memory; "
        "make a second Workspace with the same declarations"
    )


def poison_of(dtype: torch.dtype) -> float | int | bool:
    """What shows that memory was read before it was written: NaN, the largest integer, True."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max
