"""What a backend may find out about the machine that its op is to run on: this one, or the card that is rehearsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from workbench.cards import Card


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of device, by the name that torch has for it (`device`: cpu, cuda).

    capability  CUDA compute capability, None where there is none
    total_bytes memory of the device; None where it is unknown
    absent      modules, or ``module:attribute``, that the machine lacks whatever is installed here, each with the
                reason; of a rehearsed card
    primitives  operators of torch (``aten::...``) that raise there, each with the reason; of a rehearsed card
    is_here     whether the op runs on this very machine; False while a card is rehearsed on another
    """

    device: str
    name: str
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    primitives: Mapping[str, str] = field(default_factory=dict)
    is_here: bool = True

    def missing(self, symbol: str) -> str | None:
        """Why ``package.module:attribute`` cannot be there, None where that is for its import to say."""
        parts = symbol.partition(":")[0].split(".")
        names = (symbol, *(".".join(parts[:i]) for i in range(len(parts), 0, -1)))
        return next((self.absent[name] for name in names if name in self.absent), None)

    def free_bytes(self) -> int | None:
        """Free memory of the device now; None where it is unknown. All of it on a rehearsed card."""
        if not self.is_here:
            return self.total_bytes
        if self.device == "cuda" and torch.cuda.is_available():
            return torch.cuda.mem_get_info()[0]
        return _memory("MemAvailable") if self.device == "cpu" else None


def _memory(line: str) -> int | None:
    """A figure of /proc/meminfo in bytes; None on a system without it."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    for row in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = row.partition(":")
        if name == line:
            return int(value.split()[0]) * 1024
    return None


@lru_cache(maxsize=8)
def this_machine(device: str) -> Machine:
    """This machine's device of a kind; without capability and memory where it has none of it."""
    if device == "cpu":
        return Machine("cpu", "CPU", total_bytes=_memory("MemTotal"))
    if device == "cuda" and torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Machine("cuda", seen.name, (seen.major, seen.minor), seen.total_memory)
    return Machine(device, f"no {device} device")


def rehearsed_machine(card: Card) -> Machine:
    """The machine that a card's profile describes."""
    return Machine(
        card.device, card.title, card.capability, card.memory_bytes, dict(card.absent_modules),
        {name: primitive.error for name, primitive in card.absent_primitives.items()}, is_here=False,
    )  # fmt: skip
