"""Which tensors of a trace are wanted: by layer, name of the tap point, forward pass and token.

>>> Selection(taps=("*.gdn.*",), layers=(0, 1, 2), steps=(0, 4), tokens=(128, 192))

Ranges are half open and count from 0; tokens count inside each forward pass. A tensor with an axis of tokens is cut to
the range, one of chunks to the chunks that hold a token of it. Any other tensor (of packed sequences, of several
rows joined in one axis) is kept whole: what was cut is said for each tensor, never guessed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from torch import Tensor

from workbench import taps
from workbench.errors import InputError


@cache
def axes_of(name: str) -> tuple[str, ...]:
    """Axes of the tensor at a tap point of this full name, as `workbench.taps` states them: ``("B", "T", "V")``."""
    relative = name.split(".", 3)[-1] if name.startswith("mtp.") else taps.split_name(name)[1]
    description = {**taps.LAYER_TAPS, **taps.MODEL_TAPS}[relative]
    found = description.split("[")[1].split("]")[0] if relative != taps.LOGITS else "B, T, vocabulary"
    return tuple(axis.strip() for axis in found.split(","))


@dataclass(frozen=True, slots=True)
class Selection:
    """`taps` patterns with * and ?, `layers` numbers (None: all, and what is outside the layers), ranges `steps` and
    `tokens` as (first, end), None for all. Raises InputError for a range that is none."""

    taps: tuple[str, ...] = ("*",)
    layers: tuple[int, ...] | None = None
    steps: tuple[int, int] | None = None
    tokens: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for what in ("steps", "tokens"):
            bounds = getattr(self, what)
            if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] < bounds[1]):
                raise InputError(f"selection: {what}: expected (first, end) with 0 <= first < end, found {bounds}")

    def names(self, candidates: Collection[str]) -> frozenset[str]:
        """Those of `candidates` that are wanted. Raises InputError for a pattern or a layer that selects none."""
        found = set()
        for pattern in self.taps:
            matching = {name for name in candidates if fnmatchcase(name, pattern)}
            if not matching:
                raise InputError(
                    f"selection: pattern {pattern!r} matches no tap point of this model; expected a name such as "
                    f"{next(iter(candidates))!r} or a pattern such as '*.gdn.log_decay'"
                )
            found |= matching
        if self.layers is not None:
            wanted = set(self.layers)
            present = {taps.split_name(name)[0] for name in candidates} - {None}
            if missing := sorted(wanted - present):
                raise InputError(f"selection: layers: expected 0 to {max(present)}, found {missing[0]}")
            found = {name for name in found if taps.split_name(name)[0] in wanted}
            if not found:
                raise InputError(f"selection: expected a tap point of layers {sorted(wanted)} that matches "
                                 f"{', '.join(self.taps)}, found none")  # fmt: skip
        return frozenset(found)

    def has_step(self, step: int) -> bool:
        return self.steps is None or self.steps[0] <= step < self.steps[1]

    def cut(self, name: str, tensor: Tensor, rows: tuple[int, int] | None) -> tuple[Tensor | None, tuple | None]:
        """(the part of the range, or None where it holds no token of it; its tokens (first, end), None where whole).

        `rows` is (batch, tokens) of the forward pass; None where it is unknown, and every tensor is then kept whole.
        """
        if self.tokens is None or rows is None:
            return tensor, None
        (first, end), (batch, count) = self.tokens, rows
        end = min(end, count)
        axes = axes_of(name)
        if len(axes) != tensor.dim():
            return tensor, None
        axis = axes.index("T") if "T" in axes else 0 if batch == 1 and axes[0] == "tokens" else None
        if axis is not None and tensor.shape[axis] == count:
            return (tensor.narrow(axis, first, end - first), (first, end)) if first < end else (None, None)
        if axes[0] == "N" and tensor.shape[0] % batch == 0:
            chunk = tensor.shape[2] if axes[2] == "C" else None
            chunks = tensor.shape[0] // batch
            if chunk is None:  # the state after each chunk has no axis of rows
                chunk = -(-count // chunks)
                chunk = 64 if -(-count // 64) == chunks else chunk if chunks == 1 else None
            if chunk is not None and -(-count // chunk) == chunks:
                if first >= end:
                    return None, None
                low, high = first // chunk, -(-end // chunk)
                # Chunks stand step by step, the rows of a batch side by side.
                return tensor[low * batch : high * batch], (low * chunk, min(high * chunk, count))
        return tensor, None

    def to_json(self) -> dict[str, Any]:
        def listed(values: tuple | None) -> list | None:
            return None if values is None else list(values)

        return {"taps": list(self.taps), "layers": listed(self.layers), "steps": listed(self.steps),
                "tokens": listed(self.tokens)}  # fmt: skip
