"""What happens during a rehearsal and would not happen on the card: observers, and the choice of a backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.taps import Ranges, Tap


def outside() -> AbstractContextManager:
    """A context that no dispatch mode sees into: neither the card's limits nor a count of operators."""
    return _disable_current_modes()


class OutsideTap:
    """The observer `tap`, whose own arithmetic (statistics, float64 arbiters) is not held to the card's limits."""

    def __init__(self, tap: Tap):
        self._tap = tap

    def __getattr__(self, name: str) -> object:
        return getattr(self._tap, name)  # what an observer says of itself: `sees_inside`, `takes_parts`

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        with outside():
            return self._tap(name, tensor)

    def see_ranges(self, name: str, ranges: Ranges) -> None:
        with outside():
            self._tap.see_ranges(name, ranges)

    def scope(self, prefix: str) -> OutsideTap | None:
        scoped = self._tap.scope(prefix)
        return None if scoped is None else OutsideTap(scoped)
