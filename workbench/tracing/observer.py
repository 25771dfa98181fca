"""The observer behind `workbench.trace`: statistics of what passes each tap point, copies of what was
asked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import InputError
from workbench.taps import Ranges, Tap
from workbench.tracing.casts import Casts
from workbench.tracing.checks import CHECKS, of_ranges
from workbench.tracing.flags import FLAG_STEPS, Flags, FlagTap
from workbench.tracing.selection import Selection
from workbench.tracing.statistics import Statistics, exponent_histogram

if TYPE_CHECKING:
    from workbench.model import CausalLM

#: Columns of `Trace.table`, in order.
COLUMNS = (
    "layer", "tap", "step", "rank", "dtype", "shape",
    *(field.name for field in dataclasses.fields(Statistics)),
)  # fmt: skip


#: The column of `trace(model, histogram=True)`, after those of COLUMNS: see `statistics.exponent_histogram`.
EXPONENTS = "exponents"


class KeptTensors(dict[str, Tensor]):
    """Tensors by tap name; asking for one that was not kept says which were."""

    def __missing__(self, name: str) -> Tensor:
        raise InputError(
            f"trace: tensor {name!r} was not kept, expected one of {', '.join(self) or 'none'}; "
            f"name it in workbench.trace(model, keep=[...])"
        )


class Trace:
    """What was seen inside one `with workbench.trace(model)`, in the order of computation.

    `table`   one row per tap point and forward pass. `layer` is the layer's number (missing outside the
              layers and in the multi-token-prediction head), `tap` the full name, `step` the number of the
              forward pass inside the context, `rank` the process (0 here), `shape` a tuple; the rest is
              defined in `tracing.statistics`. A tap point that one pass reaches several times (scores of
              packed sequences) has a row for each.
    `tensors` for each kept name what was seen last; `history` for each kept name everything that was seen, as
              (step, tensor). Kept tensors are copies without a graph.
    `flags`   with `trace(model, check="flags")` the buffer of `tracing.flags`; the table is then made from it, for
              the passes that it still holds. Of a tensor with a value that is not finite (or near the limit) it
              says that there is one: its share is the least there can be, and `first_bad` is None.
    `casts`   with `trace(model, casts=True)` what the narrowing casts before each tap point did, summed over
              the passes: see `tracing.casts`.
    """

    def __init__(
        self, keep: Collection[str] = (), casts: Casts | None = None, check: str = "statistics", *,
        histogram: bool = False, select: Selection | None = None, names: Collection[str] = (),
    ):  # fmt: skip
        self.keep = tuple(keep)
        self.check = check
        self.histogram = histogram
        self._select, self._names = select, frozenset(names)
        self._pass_rows: tuple[int, int] | None = None
        self._casts = casts
        self.tensors: dict[str, Tensor] = KeptTensors()
        self.history: dict[str, list[tuple[int, Tensor]]] = {}
        self._step = -1
        self._rows: list[tuple] = []
        self._frame: pd.DataFrame | None = None

    @property
    def table(self) -> pd.DataFrame:
        """The rows so far."""
        if self._frame is None or len(self._frame) != len(self._rows):
            columns = [*COLUMNS, EXPONENTS] if self.histogram else list(COLUMNS)
            frame = pd.DataFrame(self._rows, columns=columns)
            self._frame = frame.astype({"layer": "Int64", "step": "int64", "rank": "int64"})
        return self._frame

    @property
    def casts(self) -> pd.DataFrame:
        """tap, from, to, values, overflowed, flushed, halved; raises InputError where casts were not counted."""
        if self._casts is None:
            raise InputError("trace: casts: expected a trace that counts them, found one that does not; "
                             "open it with workbench.trace(model, casts=True)")  # fmt: skip
        return self._casts.table

    @property
    def flags(self) -> Flags:
        """The buffer; raises InputError where the trace was not opened with check="flags"."""
        raise InputError(f"trace: flags: expected check 'flags', found {self.check!r}; "
                         "open it with workbench.trace(model, check='flags')")  # fmt: skip

    @property
    def steps(self) -> int:
        """Forward passes seen."""
        return self._step + 1

    def record(self, name: str, tensor: Tensor) -> None:
        """Add the row of `tensor` at the tap point of this full name."""
        if name == taps.EMBED or self._step < 0:
            self._step += 1  # the embedding is what every forward pass starts with
            self._pass_rows = tuple(tensor.shape[:2]) if name == taps.EMBED else None
        if self._casts is not None:
            self._casts.seen_at(name)
        if self._select is not None:
            if name not in self._names or not self._select.has_step(self._step):
                return
            tensor, _ = self._select.cut(name, tensor, self._pass_rows)
            if tensor is None:
                return
        histogram = (exponent_histogram(tensor),) if self.histogram else ()
        self._add(name, tensor.dtype, tensor.shape, CHECKS[self.check](tensor), *histogram)
        if any(fnmatchcase(name, pattern) for pattern in self.keep):
            copy = tensor.detach().clone()
            self.tensors[name] = copy
            self.history.setdefault(name, []).append((self._step, copy))


    def record_ranges(self, name: str, ranges: Ranges) -> None:
        """Add the row of a stage whose tensor nobody has."""
        self._step = max(self._step, 0)
        if self._select is not None and (name not in self._names or not self._select.has_step(self._step)):
            return
        self._add(name, ranges.dtype, ranges.shape, of_ranges(ranges))

    def _add(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], statistics: Statistics, *histogram: object
    ) -> None:
        layer, _ = taps.split_name(name)
        measured = (getattr(statistics, field.name) for field in dataclasses.fields(statistics))
        kind = str(dtype).removeprefix("torch.")
        self._rows.append((layer, name, self._step, 0, kind, tuple(shape), *measured, *histogram))

    @property
    def takes_ranges(self) -> bool:
        """Whether ranges of the stages inside an op are all that is asked of them (`taps.takes_ranges`)."""
        cuts = self._select is not None and self._select.tokens is not None
        return self.check == "ranges" and not (self.keep or self.histogram or self._casts or cuts)


class FlagTrace(Trace):
    """The trace of `check="flags"`: its rows are read from the buffer when they are asked for."""

    def __init__(self, flags: Flags):
        super().__init__(check="flags")
        self._flags = flags

    @property
    def flags(self) -> Flags:
        return self._flags

    @property
    def steps(self) -> int:
        return self._flags.steps_seen

    @property
    def table(self) -> pd.DataFrame:
        """The rows of the passes that the buffer holds; waits for the device."""
        found = self._flags.table.merge(self._flags.magnitudes(), on=["step", "tap"], sort=False)
        rows = []
        for row in found.itertuples():
            values = max(1, math.prod(row.shape or (1,)))
            has_nan, has_pinf, has_ninf, near = row.has_nan, row.has_pinf, row.has_ninf, row.is_near_limit
            is_finite = not (has_nan or has_pinf or has_ninf)
            measured = {
                **dict.fromkeys((field.name for field in dataclasses.fields(Statistics)), math.nan),
                "frac_nan": has_nan / values, "frac_pinf": bool(has_pinf) / values,
                "frac_ninf": bool(has_ninf) / values, "frac_near_limit": near / values if is_finite else math.nan,
                "absmax": max(row.high, row.low) if near else math.nan, "first_bad": None,
            }  # fmt: skip
            layer, _ = taps.split_name(row.tap)
            rows.append((layer, row.tap, row.step, 0, row.dtype, row.shape, *measured.values()))
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64", "step": "int64", "rank": "int64"})


class Observer:
    """The tap of a trace. Returns every tensor as it came, so that outputs do not change by a bit.

    `outer` is the tap that the model had before: it sees each tensor first, and what it returns is what is
    recorded and what the model goes on with.
    """

    def __init__(self, trace: Trace, outer: Tap | None, prefix: str = "", *, sees_inside: bool = True):
        self.trace, self.outer, self.prefix = trace, outer, prefix
        self.sees_inside = sees_inside or getattr(outer, "sees_inside", outer is not None)
        self.takes_ranges = trace.takes_ranges and (outer is None or taps.takes_ranges(outer))

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.outer is not None:
            tensor = self.outer(name, tensor)
        self.trace.record(self.prefix + name, tensor)
        return tensor

    def see_ranges(self, name: str, ranges: Ranges) -> None:
        if self.outer is not None:
            self.outer.see_ranges(name, ranges)
        self.trace.record_ranges(self.prefix + name, ranges)

    def scope(self, prefix: str) -> Observer:
        outer = None if self.outer is None else self.outer.scope(prefix)
        return Observer(self.trace, outer, self.prefix + prefix, sees_inside=self.sees_inside)


@contextmanager
def trace(
    model: CausalLM, keep: str | Collection[str] = (), *, casts: bool = False, check: str = "statistics",
    histogram: bool = False, select: Selection | None = None, inside: bool | None = None, flag_steps: int = FLAG_STEPS,
) -> Iterator[Trace]:  # fmt: skip
    """Record every tap point of every forward pass inside the context; see `Trace` for what is recorded.

    `keep`: names of tap points whose tensors are copied, with * and ? as wildcards (``"*.gdn.log_decay"``).
    `casts`: count what narrowing casts do, in `Trace.casts`; every operator of the passes then goes through Python.
    `check`: `statistics` measures everything, `exact` only what is not finite, `sampled` only that and only of the
    first and last 64 values of each tensor, `ranges` the smallest and largest value too, for which kernels need not
    write their stages to memory; what is not measured is NaN in the table (see `tracing.checks`). `flags`
    writes one check per tap point into a buffer on the device that is read when asked for (see `tracing.flags`).
    `histogram`: a last column `exponents` (see `statistics.exponent_histogram`).
    `select`: which layers, tap points, passes and tokens have rows and copies; with `flags` layers and tap points.
    `inside`: whether ops show their inner stages (`taps.STAGES`), some of which they compute for an observer alone.
    Default: yes, but with `flags`, or where `select` wants none of them.
    `flag_steps`: passes that the buffer of `flags` holds, the last ones.
    Contexts may be nested; each records, and an intervention set before the trace is recorded as it acts.
    Leaving the context, also by an exception, puts back the tap that the model had. Raises InputError for a
    pattern that no tap point of this model can match, for an unknown check, and for what `flags` cannot do.
    """
    if check not in (*CHECKS, "flags"):
        raise InputError(f"trace: check: expected one of {', '.join(CHECKS)}, flags, found {check!r}")
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    _check_patterns(model, keep)
    names = tap_names(model) if select is None else [n for n in tap_names(model) if n in select.names(tap_names(model))]
    outer = model.tap
    counter = Casts() if casts else None
    if check == "flags":
        if keep or casts or histogram or (select is not None and (select.steps or select.tokens)):
            raise InputError("trace: check flags: expected neither keep, casts, histogram nor a selection of passes or "
                             "tokens, found one of them; open a second trace for it")  # fmt: skip
        result: Trace = FlagTrace(Flags(names, steps=flag_steps, device=model.device))
        observer: Tap = FlagTap(result.flags, outer, inside=bool(inside))
    else:
        result = Trace(keep, counter, check, histogram=histogram, select=select, names=names)
        if inside is None:
            inside = any(is_stage(name) for name in names)
        observer = Observer(result, outer, sees_inside=inside)
    model.tap = observer
    try:
        with nullcontext() if counter is None else counter:
            yield result
        if model.tap is not observer:
            raise InputError(
                "trace: expected the model's tap to be the one that this context set, found another; "
                "leave nested contexts in reverse order and reset what was set inside"
            )
    finally:
        model.tap = outer


def is_stage(name: str) -> bool:
    """Whether the tap point of this full name is inside an op: see `taps.inside`."""
    return any(name.endswith("." + stage) for stage in taps.STAGES)


def tap_names(model: CausalLM) -> list[str]:
    """Every full name that a tap point of this model can have, whatever the backends."""
    config = model.config
    skipped = {"full_attention": "gdn.", "linear_attention": "attn."}
    names = [taps.EMBED]
    for layer, kind in enumerate(config.layer_types):
        inside = [name for name in taps.LAYER_TAPS if not name.startswith(skipped[kind])]
        names += [taps.full_name(layer, name) for name in inside]
    names += [taps.FINAL_NORM, taps.LOGITS]
    if config.mtp_num_hidden_layers:
        names += [f"mtp.layers.00.{name}" for name in taps.LAYER_TAPS if not name.startswith("gdn.")]
    return names


def _check_patterns(model: CausalLM, keep: tuple[str, ...]) -> None:
    names = tap_names(model)
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"trace: keep pattern {pattern!r} matches no tap point of this model; "
                f"expected a name such as {names[1]!r} or a pattern such as '*.gdn.log_decay'"
            )
