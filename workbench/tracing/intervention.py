"""Interventions: tensors replaced at tap points by name, and the ones that were seen done to these models.

>>> with workbench.intervene(model, {"layers.*.gdn.cumsum": lambda x: x.clamp(-12, 12)}) as done:
...     model(input_ids)
>>> done.table
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import InputError
from workbench.taps import Tap
from workbench.tracing.observer import tap_names

if TYPE_CHECKING:
    from workbench.model import CausalLM

Change = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Effect:
    """One pattern at one tap point: the function, and what it did so far.

    `tensors` given to it, `changed` those that came back different, `values` and `values_changed` their elements.
    """

    pattern: str
    change: Change
    tensors: int = 0
    changed: int = 0
    values: int = 0
    values_changed: int = 0

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """What the function makes of `tensor`; `tensor` itself where that is the same in every value."""
        found = self.change(tensor.clone())  # a copy, so that a function that works in place changes nothing else
        expected = (tensor.shape, tensor.dtype, tensor.device)
        if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != expected:
            raise InputError(
                f"intervene: pattern {self.pattern!r} at {name}: expected a tensor of {tensor.dtype} with shape "
                f"{tuple(tensor.shape)} on {tensor.device}, found {_described(found)}; return one like the argument"
            )
        differs = int((~((found == tensor) | (found.isnan() & tensor.isnan()))).sum())
        self.tensors += 1
        self.changed += differs > 0
        self.values += tensor.numel()
        self.values_changed += differs
        return found if differs else tensor


def _described(found: object) -> str:
    if not isinstance(found, Tensor):
        return type(found).__name__
    return f"{found.dtype} with shape {tuple(found.shape)} on {found.device}"


class Intervention:
    """What one `with workbench.intervene(model, changes)` did."""

    def __init__(self, patterns: Collection[str], effects: Mapping[str, list[Effect]]):
        self.patterns, self.effects = tuple(patterns), effects

    @property
    def table(self) -> pd.DataFrame:
        """A row for each tap point and pattern that matched it, in the order of the model.

        tap, pattern; `tensors` seen there, `changed` how many of them came back different, `share` of all values
        that did (0 where none was seen).
        """
        rows = [
            (name, e.pattern, e.tensors, e.changed, e.values_changed / e.values if e.values else 0.0)
            for name, effects in self.effects.items()
            for e in effects
        ]
        return pd.DataFrame(rows, columns=["tap", "pattern", "tensors", "changed", "share"])

    def __str__(self) -> str:
        """One line for each pattern."""
        lines = []
        table = self.table
        for pattern in self.patterns:
            rows = table[table["pattern"] == pattern]
            reached = rows[rows["tensors"] > 0]
            lines.append(
                f"{pattern}: reached {len(reached)} of {len(rows)} tap points, "
                f"changed {rows['changed'].sum()} of {rows['tensors'].sum()} tensors"
            )
        return "\n".join(lines)


class Changing:
    """The tap of an intervention. What it returns goes on to `outer`, the tap that the model had before."""

    def __init__(self, effects: Mapping[str, list[Effect]], outer: Tap | None, prefix: str = ""):
        self.effects, self.outer, self.prefix = effects, outer, prefix

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        full = self.prefix + name
        for effect in self.effects.get(full, ()):
            tensor = effect.apply(full, tensor)
        return tensor if self.outer is None else self.outer(name, tensor)

    def scope(self, prefix: str) -> Tap | None:
        outer = None if self.outer is None else self.outer.scope(prefix)
        full = self.prefix + prefix
        if not any(name.startswith(full) for name in self.effects):
            return outer  # layers that nobody touches keep their pace
        return Changing(self.effects, outer, full)


@contextmanager
def intervene(model: CausalLM, changes: Mapping[str, Change]) -> Iterator[Intervention]:
    """Replace tensors in every forward pass inside the context: `changes` maps names of tap points to functions.

    Names may hold * and ?; `workbench.taps` lists them with their shapes. A function gets a copy of the tensor and
    returns one of the same shape, dtype and device. Where several patterns match a point they act in the order of
    `changes`. Every tap point takes a replacement, and everything computed after it changes: `gdn.state` is what the
    next pass starts from, `gdn.cumsum` and the others inside a chunk exist only in backends that compute in chunks
    (with policy segsum, `gdn.decay` does not depend on `gdn.cumsum`).

    A trace around or inside the context records the changed tensors. Of nested interventions the inner one acts first.
    Leaving the context puts back the tap that the model had. Raises InputError for a pattern that matches no tap point
    of this model, at the end for one that no forward pass reached, and for a function that returns another kind.
    """
    effects: dict[str, list[Effect]] = {}
    names = tap_names(model)
    if not isinstance(changes, Mapping):
        raise InputError(f"intervene: expected names mapped to functions, found {type(changes).__name__}")
    for pattern, change in changes.items():
        if not isinstance(pattern, str) or not callable(change):
            raise InputError(
                f"intervene: expected the name of a tap point and a function, found {pattern!r}: {change!r:.60}"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"intervene: pattern {pattern!r} matches no tap point of this model; "
                f"expected a name such as {names[1]!r} or a pattern such as 'layers.*.gdn.cumsum'"
            )
    for name in names:
        matching = [Effect(pattern, change) for pattern, change in changes.items() if fnmatchcase(name, pattern)]
        if matching:
            effects[name] = matching
    outer, result = model.tap, Intervention(changes, effects)
    tap = Changing(effects, outer)
    model.tap = tap
    try:
        yield result
        if model.tap is not tap:
            raise InputError(
                "intervene: expected the model's tap to be the one that this context set, found another; "
                "leave nested contexts in reverse order and reset what was set inside"
            )
        _check_reached(result)
    finally:
        model.tap = outer


def _check_reached(result: Intervention) -> None:
    reached = {e.pattern for effects in result.effects.values() for e in effects if e.tensors}
    for pattern in result.patterns:
        if pattern not in reached:
            raise InputError(
                f"intervene: pattern {pattern!r}: expected a forward pass that reaches one of its tap points, found "
                "none; run the model inside the context, with a backend that has them (a decode step has no chunks)"
            )


# ---- what was done to models of this family, to show what it does


def zero_linear_layer(layer: int) -> dict[str, Change]:
    """The mixer of one linear layer returns zero: what remains of a layer whose NaN were all replaced."""
    return {taps.full_name(layer, taps.GDN_NORM): torch.zeros_like}


def replace_nan() -> dict[str, Change]:
    """Zero for each NaN in the output of every delta rule and in the state that it hands on."""
    return {f"layers.*.{name}": lambda x: x.nan_to_num(nan=0.0) for name in (taps.GDN_OUT, taps.GDN_STATE)}


def clamp_cumsum(limit: float = 12.0) -> dict[str, Change]:
    """The cumulative log decay of a chunk, clamped to +-limit before any exp: rows past the limit stop decaying."""
    if not limit >= 0:  # torch's clamp would set every value to a bound, or to NaN
        raise InputError(f"clamp_cumsum: expected a limit of at least 0, found {limit}")
    return {f"layers.*.{taps.GDN_CUMSUM}": lambda x: x.clamp(-limit, limit)}


@dataclass(frozen=True, slots=True)
class FieldIntervention:
    """`changes` makes the argument of `intervene`, to be used under `policy`; `origin` says what it was."""

    changes: Callable[..., dict[str, Change]]
    policy: str
    origin: str


#: By name: what users of these models did to keep them running, or what it left of them.
FIELD_INTERVENTIONS: dict[str, FieldIntervention] = {
    "zero_linear_layer": FieldIntervention(
        zero_linear_layer, "safe",
        "a linear layer of which 99.98 % was NaN, all replaced by zero: only the residual stream passes it",
    ),
    "replace_nan": FieldIntervention(
        replace_nan, "factored",
        "nan_to_num on the output of prefill and decode, to survive exponents that overflow: text became gibberish",
    ),
    "clamp_cumsum": FieldIntervention(
        clamp_cumsum, "safe",
        "cumulative gates clamped to +-20, then +-12, before exp, to keep it finite: finite and wrong where it binds",
    ),
}  # fmt: skip
