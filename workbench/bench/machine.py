"""The conditions of a measurement: threads, memory allocation, hardware, versions."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from importlib import metadata

import torch

from workbench.errors import InputError
from workbench.provenance import processor, versions

#: Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def pin_threads(count: int) -> None:
    """Compute with `count` threads; more threads than free cores make torch many times slower."""
    if count < 1:
        raise InputError(f"threads: expected at least 1, found {count}")
    torch.set_num_threads(count)


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees; True where that is known to work.

    A forward pass frees and allocates tens of megabytes a layer. By default glibc returns part of them to the
    system and faults them in again, at moments that depend on what the process did before: the same code
    takes from 0 to 100,000 page faults. For measurements only, where it takes that chance out for all sides.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30))


def hardware(device: str = "cpu") -> dict[str, object]:
    """What was measured on: kind (part of the file's name), model, count of cores and threads or memory."""
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return {
            "kind": "cpu",
            "model": processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cores": cores,
            "threads": torch.get_num_threads(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": properties.name.lower().replace(" ", "-"),
        "model": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


def all_versions(*others: str) -> dict[str, str]:
    """Versions of the workbench, Python, the libraries it computes with, and the distributions `others`."""
    return versions() | {name: metadata.version(name) for name in others}
