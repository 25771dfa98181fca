"""What a sampled check for NaN misses: faults of every extent laid at every position, and the faults of a real pass.

The sampled check reads the first and the last 64 values (`tracing.checks`). Of n values with a run of k bad ones at a
uniformly random place it misses max(0, n - 128 - k + 1) of the n - k + 1 places, nearly all. Faults of these layers
are no such runs but rows, heads and tokens of [B, T, V, W], which is what is laid out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.analysis import nans
from workbench.errors import InputError
from workbench.tracing.checks import CHECKS, SAMPLE_VALUES

#: Tokens of a fault that takes a whole chunk.
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """A fault of an output [B, T, V, W]: `places(shape)` says how many there are, `mark(x, i)` makes the i-th NaN."""

    what: str
    places: Callable[[tuple[int, ...]], int]
    mark: Callable[[Tensor, int], None]


def _value(x: Tensor, place: int) -> None:
    x.view(-1)[place] = math.nan


def _row(x: Tensor, place: int) -> None:
    x.flatten(0, 2)[place] = math.nan


def _token(x: Tensor, place: int) -> None:
    x.flatten(0, 1)[place] = math.nan


def _head(x: Tensor, place: int) -> None:
    sequence, head = divmod(place, x.shape[2])
    x[sequence, :, head] = math.nan


def _chunk(x: Tensor, place: int) -> None:
    steps = -(-x.shape[1] // CHUNK_TOKENS)
    place, head = divmod(place, x.shape[2])
    sequence, step = divmod(place, steps)
    x[sequence, step * CHUNK_TOKENS : (step + 1) * CHUNK_TOKENS, head] = math.nan


def _rest(x: Tensor, place: int) -> None:
    place, head = divmod(place, x.shape[2])
    sequence, token = divmod(place, x.shape[1])
    x[sequence, token:, head] = math.nan


#: By name, from the smallest to the largest.
EXTENTS: dict[str, Extent] = {
    "value": Extent("one value", lambda s: math.prod(s), _value),
    "row": Extent("one token of one head", lambda s: s[0] * s[1] * s[2], _row),
    "token": Extent("one token, all heads", lambda s: s[0] * s[1], _token),
    "chunk": Extent("one chunk of one head", lambda s: s[0] * -(-s[1] // CHUNK_TOKENS) * s[2], _chunk),
    "rest": Extent("one head from a token on, as a state that went bad leaves it", lambda s: s[0] * s[1] * s[2], _rest),
    "head": Extent("one head, all tokens", lambda s: s[0] * s[2], _head),
}  # fmt: skip

#: Where a fault is laid: bounds of its place as shares of all places, in row-major order.
POSITIONS: dict[str, tuple[float, float]] = {
    "first": (0.0, 0.0), "first tenth": (0.0, 0.1), "middle": (0.1, 0.9), "last tenth": (0.9, 1.0), "last": (1.0, 1.0),
    "anywhere": (0.0, 1.0),
}  # fmt: skip


def run_miss_rate(values: int, bad: int, sample: int = SAMPLE_VALUES) -> float:
    """The share of places at which a run of `bad` among `values` values touches neither end's `sample` values."""
    if not 1 <= bad <= values:
        raise InputError(f"nan_checks: expected a run of 1 to {values} bad values, found {bad}")
    return max(0, values - 2 * sample - bad + 1) / (values - bad + 1)


@torch.no_grad()
def miss_rates(
    shape: tuple[int, int, int, int], *, trials: int = 100, seed: int = 0, checks: Iterable[str] = ("exact", "sampled")
) -> pd.DataFrame:
    """Measured share of faults that each check misses, per extent and position, in an output of `shape` [B, T, V, W].

    Columns: extent, position, values (median number of bad ones), share (of all values), places (drawn), and a column
    of misses for each check. All places, or `trials` drawn where there are more; each is made NaN in a
    finite tensor, and checked.
    """
    if len(shape) != 4 or min(shape) < 1:
        raise InputError(f"nan_checks: expected a shape [B, T, V, W] of positive sizes, found {shape}")
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randn(shape, generator=generator)
    rows = []
    for name, extent in EXTENTS.items():
        count = extent.places(shape)
        for position, (low, high) in POSITIONS.items():
            first, last = round(low * (count - 1)), round(high * (count - 1))
            span = last - first + 1
            drawn = range(span) if span <= trials else torch.randint(span, (trials,), generator=generator).tolist()
            missed, sizes = dict.fromkeys(checks, 0), []
            for offset in drawn:
                x = clean.clone()
                extent.mark(x, first + offset)
                sizes.append(int(x.isnan().sum()))
                for check in missed:
                    missed[check] += CHECKS[check](x).first_bad is None
            middle = sorted(sizes)[len(sizes) // 2]
            rows.append((name, position, middle, middle / clean.numel(), len(drawn),
                         *(count / len(drawn) for count in missed.values())))  # fmt: skip
    return pd.DataFrame(rows, columns=["extent", "position", "values", "share", "places", *checks])


def missed_in_pass(exact: pd.DataFrame, sampled: pd.DataFrame) -> pd.DataFrame:
    """The bad rows of a trace with check `exact`, and what a trace of the same passes with `sampled` says of them.

    Columns: tap, step, shape, bad_share (all values), sampled_share (the sample's), missed (the sample is clean).
    """
    if list(exact["tap"]) != list(sampled["tap"]) or list(exact["shape"]) != list(sampled["shape"]):
        raise InputError("nan_checks: expected two traces of the same passes, found other tap points or shapes")
    kinds = ["frac_nan", "frac_pinf", "frac_ninf"]
    found = exact[["tap", "step", "shape"]].copy()
    found["bad_share"], found["sampled_share"] = exact[kinds].sum(axis=1), sampled[kinds].sum(axis=1)
    found["missed"] = found["sampled_share"] == 0
    return found[found["bad_share"] > 0].reset_index(drop=True)


def sampled_map(exact: pd.DataFrame, sampled: pd.DataFrame) -> pd.DataFrame:
    """What the sampled check says of each tap point of a pass: layers down, tap points across, in the order computed.

    "finite", "seen" (bad, and the sample meets it) or "missed" (bad, and the sample is clean); missing where a layer
    has no such tap point. Of a tap point that a pass reaches several times the worst counts.
    """
    found = missed_in_pass(exact, sampled)
    bad, seen = nans.share_map(exact), nans.share_map(sampled)
    words = bad.mask(bad == 0, "finite").mask((bad > 0) & (seen > 0), "seen").mask((bad > 0) & (seen == 0), "missed")
    for row in found[found["missed"]].itertuples():
        layer, tap = taps.split_name(row.tap)
        if layer is not None:
            words.loc[layer, tap] = "missed"
    return words.astype("object").where(bad.notna(), None)


def missed_reading(found: pd.DataFrame, tensors: int) -> str:
    """`missed_in_pass` of a pass with so many `tensors`, as a sentence."""
    if found.empty:
        return f"All {tensors} tensors of this pass are finite: there is nothing to miss."
    missed = found[found["missed"]]
    sentence = f"{len(found)} of {tensors} tensors hold values that are not finite, and of {len(missed)} of them"
    if missed.empty:
        return f"{sentence} the sample is clean: in this pass the fault is too large to miss."
    largest, first, seen = missed.loc[missed["bad_share"].idxmax()], found.iloc[0]["tap"], found[~found["missed"]]
    blamed = "it blames nothing" if seen.empty else f"it blames {_with_op(seen.iloc[0]['tap'])}"
    start = (
        f"where the fault is born at {_with_op(first)}, {blamed}" if found.iloc[0]["missed"]
        else f"{_with_op(first)}, where the fault is born, is seen"
    )  # fmt: skip
    return (
        f"{sentence} the sampled check says that they are clean: {start}. The largest fault that it misses is "
        f"{100 * largest['bad_share']:.3g} % of {largest['tap']}."
    )


def _with_op(tap: str) -> str:
    return f"{tap} ({nans.OP_OF_TAP[nans.relative_name(tap)]})"


#: Headings of `rate_table` where people read them: the first column, then the positions.
RATE_HEADINGS = {"what": "what is not finite", "share": "share of all values"} | {
    name: f"missed: {name}" for name in POSITIONS
}


def rate_table(rates: pd.DataFrame) -> pd.DataFrame:
    """`miss_rates` as a table to read: a row for each extent, the sampled check's share of misses by position."""
    wide = rates.pivot(index="extent", columns="position", values="sampled").loc[list(EXTENTS), list(POSITIONS)]
    share = rates[rates["position"] == "anywhere"].set_index("extent")["share"]
    wide.insert(0, "share", share)
    wide.insert(0, "what", [EXTENTS[name].what for name in wide.index])
    return wide.reset_index(drop=True).rename_axis(columns=None)


def rate_reading(rates: pd.DataFrame, shape: tuple[int, ...]) -> str:
    """What `miss_rates` of `shape` come to, as a sentence."""
    found = rates.set_index(["extent", "position"])
    exact = "the exact check misses none" if not rates["exact"].any() else "the exact check misses some"
    return (
        f"Faults laid into an output of this prompt's shape, {' x '.join(map(str, shape))}, and the share of them that "
        f"the sample does not meet. A whole head that is not finite is missed at "
        f"{100 * found.loc[('head', 'anywhere'), 'sampled']:.3g} % of the places, a chunk of a head at "
        f"{100 * found.loc[('chunk', 'anywhere'), 'sampled']:.3g} %; {exact}."
    )


#: The benchmark that measures the checks.
RECORDED = "nan_checks"


def cost_reading(recorded: Mapping[str, object] | None) -> str:
    """What the checks cost, from the benchmark RECORDED, as a sentence; None: that no result is installed."""
    if recorded is None:
        return f"What the checks cost is measured by benchmarks/{RECORDED}.py, of which no result is installed here."
    rows = pd.DataFrame(recorded["rows"])
    passes = rows[rows["case"].str.startswith("cost of a traced pass")]
    median = passes.set_index("backend")["median"]
    added = {name: median[f"trace, {name}"] - median["no trace"] for name in ("statistics", "exact", "sampled")}
    hardware = recorded["hardware"]
    return (
        f"On a pass of {median['no trace']:.0f} ms the exact check adds {added['exact']:.0f} ms, the sampled "
        f"{added['sampled']:.0f} ms, all statistics {added['statistics']:.0f} ms ({hardware['model']}, "
        f"{hardware['threads']} thread, benchmarks/{RECORDED}.py)."
    )
