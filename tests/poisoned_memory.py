"""Uninitialised memory made visible: `torch.empty` and its relatives hand the package NaN, not leftovers.

Fresh memory is often zero, so code that reads an element it never wrote passes a test by luck. With NaN it
fails. Only calls made by code of the `workbench` package are affected: torch's own layers and other libraries
may rely on leftovers being harmless, and filling for them would cost time.
"""

import functools
import sys

import torch

# (owner, name) of everything in torch's public interface that returns memory without writing it.
ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def is_package_frame(frame) -> bool:
    """Whether the calling frame belongs to a module of the package."""
    name = frame.f_globals.get("__name__") or ""
    return name == "workbench" or name.startswith("workbench.")


def poisoned(allocate):
    """`allocate`, its result filled with NaN when the package calls it and its dtype has NaN."""

    @functools.wraps(allocate)
    def allocate_poisoned(*args, **kwargs):
        # Under torch.compile the frame check cannot be traced; compiled code gets the plain allocation.
        if torch.compiler.is_compiling() or not is_package_frame(sys._getframe(1)):
            return allocate(*args, **kwargs)
        memory = allocate(*args, **kwargs)
        if memory.is_meta or not (memory.is_floating_point() or memory.is_complex()):
            return memory
        with torch.no_grad():  # a leaf that requires grad refuses writes in place otherwise
            return memory.fill_(float("nan"))

    return allocate_poisoned


def install(monkeypatch) -> None:
    """Replace every allocator until the monkeypatch is undone."""
    for owner, name in ALLOCATORS:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
