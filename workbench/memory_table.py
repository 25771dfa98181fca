"""What holds the memory of a model's device: weights, caches, activations, and what the allocator and the system say.

    print(memory_table(model, cache))

All figures are bytes. Memory that several tensors share is counted once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.cache import Cache, DeltaCache, KeyValueCache
from workbench.kernels.machine import this_machine

if TYPE_CHECKING:
    from workbench.model import CausalLM

#: Tensors of a failed step that its table names.
LARGEST = 5


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one kind of memory; None, with the reason in `note`, where they are unknown or unlimited."""

    what: str
    n_bytes: int | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor that the failed step held: its name in the function that had it."""

    name: str
    function: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """What held the memory of a device when a step failed for the second time, and what is free after it.

    `largest` are the largest tensors of the failed step that a variable named, neither weights nor cache.
    """

    device: str
    rows: tuple[MemoryRow, ...]
    largest: tuple[HeldTensor, ...]

    def __str__(self) -> str:
        lines = [f"memory of {self.device}"]
        for row in self.rows:
            size = "-" if row.n_bytes is None else _size(row.n_bytes)
            lines.append(f"  {row.what:<48} {size:>16}{'  ' + row.note if row.note else ''}")
        lines += ["largest tensors of the failed step"] if self.largest else []
        for held in self.largest:
            what = f"{held.name} {list(held.shape)} {held.dtype}"
            lines.append(f"  {what:<48} {_size(held.n_bytes):>16}  {held.function}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def _size(n_bytes: int) -> str:
    """``1.5 GiB``, in the largest unit of which there is one."""
    unit = min(max(n_bytes.bit_length() - 1, 0) // 10, 3)
    return f"{n_bytes} B" if unit == 0 else f"{n_bytes / 2 ** (10 * unit):,.1f} {'KMG'[unit - 1]}iB"


def storage_of(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, each piece once."""
    return sum({storage_of(x): x.untyped_storage().nbytes() for x in tensors}.values())


def cache_tensors(cache: Cache, kind: type | None = None, name: str | None = None) -> list[Tensor]:
    """Tensors of a cache: all, or those of one kind of layer, or one of its fields."""
    names = {KeyValueCache: ("keys", "values"), DeltaCache: ("window", "state")}
    return [
        getattr(layer, key)
        for layer in cache.layers if kind is None or isinstance(layer, kind)
        for key in names[type(layer)] if name is None or key == name
    ]  # fmt: skip


def in_use_on(device: torch.device) -> int | None:
    """Bytes of live tensors on a GPU, resident bytes of the process on a CPU; None where that is unknown."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status("VmRSS")


def _status(name: str) -> int | None:
    """A figure of /proc/self/status in bytes; None on a system without it."""
    path = Path("/proc/self/status")
    if not path.is_file():
        return None
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _group_limit() -> MemoryRow:
    """The limit of the control group of the process, as containers have it: of version 2, then of version 1."""
    what = "limit of the control group"
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            is_limit = text.isdecimal() and int(text) < 2**60  # version 1 writes a huge number for none
            return MemoryRow(what, int(text)) if is_limit else MemoryRow(what, None, "none")
    return MemoryRow(what, None, "unknown here")


def _cpu_rows(in_use: int | None) -> list[MemoryRow]:
    unknown = "unknown here"
    rows = [] if in_use is None else [MemoryRow("resident when the step failed", in_use)]
    rows += [
        MemoryRow(what, value, "" if value is not None else unknown)
        for what, value in (
            ("resident now", _status("VmRSS")),
            ("largest resident so far", _status("VmHWM")),
            ("address space in use", _status("VmSize")),
        )
    ]
    if sys.platform == "win32":  # has no such limit
        rows.append(MemoryRow("limit of the address space", None, "none"))
    else:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        is_free = limit == resource.RLIM_INFINITY
        rows.append(MemoryRow("limit of the address space", None if is_free else limit, "none" if is_free else ""))
    machine = this_machine("cpu")
    free = machine.free_bytes()
    rows += [
        _group_limit(),
        MemoryRow("free on the machine", free, "" if free is not None else unknown),
        MemoryRow("total of the machine", machine.total_bytes, "" if machine.total_bytes is not None else unknown),
    ]
    return rows


def _cuda_rows(device: torch.device, in_use: int | None) -> list[MemoryRow]:
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    now, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
    retried = f"after {stats['num_alloc_retries']} retries of the allocator and {stats['num_ooms']} failures so far"
    of_step = [] if in_use is None else [
        MemoryRow("activations of the failed step, when it failed", in_use - now),
        MemoryRow("allocated when the step failed", in_use),
    ]  # fmt: skip
    return [
        *of_step,
        MemoryRow("allocated now", now),
        MemoryRow("largest allocated since the last reset", stats["allocated_bytes.all.peak"]),
        MemoryRow("reserved by the allocator", reserved, retried),
        MemoryRow("of these unused and split, so not returned", stats["inactive_split_bytes.all.current"]),
        MemoryRow("other processes, and CUDA itself", max(total - free - reserved, 0)),
        MemoryRow("free on the device", free),
        MemoryRow("total of the device", total),
    ]


def memory_table(
    model: CausalLM, cache: Cache | None = None, held: Sequence[Cache] = (), *, in_use: int | None = None,
    activations: Sequence[HeldTensor] = (),
) -> MemoryTable:  # fmt: skip
    """What holds the memory of the model's device now; all figures in bytes.

    `cache` is that of the request in question, `held` those of others. Of a step that failed and was dropped, `in_use`
    is what was in use when it failed (`in_use_on`), and `activations` are the tensors found in its frames.
    """
    device = model.device
    workspace = model.kernels.workspace
    rows = [MemoryRow("weights", _n_bytes([*model.parameters(), *model.buffers()]))]
    if cache is not None:
        rows += [
            MemoryRow("keys and values of this request", _n_bytes(cache_tensors(cache, KeyValueCache))),
            MemoryRow("recurrent states of this request", _n_bytes(cache_tensors(cache, DeltaCache, "state"))),
            MemoryRow("convolution windows of this request", _n_bytes(cache_tensors(cache, DeltaCache, "window"))),
        ]
    rows.append(MemoryRow(f"caches of {len(held)} other requests", _n_bytes(x for c in held for x in cache_tensors(c))))
    rows += [] if workspace is None else [MemoryRow("workspace", workspace.n_bytes)]
    if activations:
        total = sum(tensor.n_bytes for tensor in activations)
        rows.append(MemoryRow("activations that variables named, when it failed", total))
    rows += _cuda_rows(device, in_use) if device.type == "cuda" else _cpu_rows(in_use)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return MemoryTable(f"{device} ({name})", tuple(rows), tuple(activations[:LARGEST]))
