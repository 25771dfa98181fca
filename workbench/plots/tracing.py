"""Figures of traces and comparisons: errors by layer and stage, ranges through depth, exponents, spread of a NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import matplotlib
import matplotlib.colors
import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from workbench import taps
from workbench.analysis.nans import bad_share, relative_name
from workbench.numerics import LARGEST
from workbench.plots.plate import (
    BLUE,
    CARD,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    WIDTH,
    Plate,
    finished,
)

#: Colour, marker and dash of lines, one tap point after another.
LINES = (
    (BLUE, "o", "-"),
    (ORANGE, "s", "--"),
    (GREEN, "^", "-."),
    (PURPLE, "D", ":"),
    (SKY, "v", "--"),
    (GREY, "P", "-."),
)

#: Errors in roundings, pale where they are small.
ERRORS = matplotlib.colors.LinearSegmentedColormap.from_list("errors", ["#eef4fa", SKY, BLUE, "#1b2a52"])
SAME_CELL = "#f4f4f2"
#: Exponents of the normal numbers of float16.
FLOAT16_EXPONENTS = (-14, 15)


def _layers(axes, layers: Sequence[int]) -> None:
    step = max(1, math.ceil(len(layers) / 12))
    places = list(range(0, len(layers), step))
    axes.set_yticks(places, [f"layer {layers[place]}" if len(layers) <= 12 else str(layers[place]) for place in places])
    if len(layers) > 12:
        axes.set_ylabel("layer")


def _short(tap: str) -> str:
    """`layers.03.gdn.out` as people read it in a legend."""
    layer, name = taps.split_name(tap)
    return name if layer is None else f"{name}, layer {layer}"


# ---- errors by layer and stage


def stage_map(stages: pd.DataFrame, where: str | None = None, sides: tuple[str, str] = ("a", "b")) -> Plate:
    """Error of each tap point in multiples of a rounding, layers down, stages across, the worst of all passes.

    From `analysis.compare.Comparison.stages`; `where` is the tap point of the verdict, which is framed.
    """
    inside = stages[stages["layer"].notna()].assign(name=lambda rows: rows["tap"].map(relative_name))
    names = [name for name in taps.LAYER_TAPS if name in set(inside["name"])]
    layers = sorted(int(layer) for layer in inside["layer"].unique())
    worst = inside.pivot_table(index="layer", columns="name", values="roundings", aggfunc="max", observed=True)
    finite = stages["roundings"][np.isfinite(stages["roundings"]) & (stages["roundings"] > 0)]
    low, high = 0.1, max(100.0, 10.0 ** math.ceil(math.log10(finite.max()))) if len(finite) else 100.0
    norm = matplotlib.colors.LogNorm(low, high)
    values = np.array([[worst.loc[layer].get(name, math.nan) for name in names] for layer in layers], dtype=float)
    with matplotlib.rc_context(STYLE):
        row = 0.26 if len(layers) <= 16 else max(0.085, 4.0 / len(layers))
        figure = Figure(figsize=(WIDTH, 1.75 + row * len(layers)), layout="constrained")
        axes = figure.subplots()
        for (y, x), value in np.ndenumerate(values):
            box = {"xy": (x - 0.46, y - 0.46), "width": 0.92, "height": 0.92, "linewidth": 0.0}
            if math.isnan(value):
                axes.add_patch(Rectangle(**box | {"linewidth": 0.4}, facecolor=CARD, edgecolor=FAINT))
            elif math.isinf(value):
                axes.add_patch(Rectangle(**box, facecolor=RED, edgecolor=CARD, hatch="xxxx"))
            else:
                color = SAME_CELL if value == 0 else ERRORS(norm(max(value, low)))
                axes.add_patch(Rectangle(**box, facecolor=color))
        layer, name = taps.split_name(where) if where is not None else (None, "")
        if layer in layers and name in names:
            place = (names.index(name) - 0.5, layers.index(layer) - 0.5)
            axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=INK, linewidth=2.0, zorder=3))
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(len(layers) - 0.5, -0.5)
        _layers(axes, layers)
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        scale = matplotlib.cm.ScalarMappable(norm, ERRORS)
        bar = figure.colorbar(scale, ax=axes, shrink=0.9, aspect=max(8, 3 * len(layers) * row), pad=0.015)
        bar.set_label("unit roundoffs")
        bar.outline.set_visible(False)
        handles = [
            Patch(facecolor=SAME_CELL, edgecolor=FAINT, label="the same values"),
            Patch(facecolor=RED, edgecolor=CARD, hatch="xxxx", label="not finite on one side"),
            Patch(facecolor=CARD, edgecolor=FAINT, label="not compared"),
        ]
        if where is not None:
            handles.append(Patch(facecolor=CARD, edgecolor=INK, linewidth=2.0, label="first op at fault"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.6)
    subject = f"Map of errors of {len(layers)} layers by {len(names)} stages"
    return finished(figure, _map_caption(stages, where, sides), subject)


def _map_caption(stages: pd.DataFrame, where: str | None, sides: tuple[str, str]) -> str:
    unequal = stages[stages["error"] > 0]
    who = f"{sides[1]} beside {sides[0]}"
    if unequal.empty:
        return f"{who}: all {len(stages)} tensors hold the same values."
    first = unequal.iloc[0]
    finite = unequal[np.isfinite(unequal["roundings"])]
    text = f"{who}: the first tensor that differs is {first['tap']}"
    if len(finite):
        top = finite.loc[finite["roundings"].idxmax()]
        text += f"; the largest finite error is {top['roundings']:.3g} roundings, at {top['tap']}"
    return f"{text}{'' if where is None else f'; the first op at fault gives {where}'}."


# ---- ranges through depth

#: Tap points whose range is shown where nothing else is asked for.
DEPTH_TAPS = (taps.RESIDUAL, taps.MIXER_OUT, taps.MOE_OUT, taps.INPUT_NORM)


def depth_ranges(table: pd.DataFrame, names: Sequence[str] = DEPTH_TAPS, step: int = 0) -> Plate:
    """Largest magnitude and root mean square of tap points through the layers, with the limits of dtypes.

    From `workbench.trace(model).table`; `names` are tap points without their layer.
    """
    rows = table[(table["step"] == step) & table["layer"].notna() & (table["absmax"].notna() | (bad_share(table) > 0))]
    rows = rows.assign(name=rows["tap"].map(relative_name), bad=bad_share(rows))
    rows = rows[rows["name"].isin(list(names))]
    known = rows[rows["absmax"] > 0]
    top = float(known["absmax"].max()) if len(known) else 1.0
    low = float(known["rms"][known["rms"] > 0].min()) if len(known) else 0.1
    dtypes = list(dict.fromkeys(rows["dtype"]))
    limits = {name: LARGEST[name] for name in dict.fromkeys(["float16", *dtypes]) if LARGEST[name] < 1e6 * top}
    high = max([3.0 * top, *(3.0 * limit for limit in limits.values())])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = figure.subplots()
        for (color, marker, dash), name in zip(LINES, [n for n in names if n in set(rows["name"])], strict=False):
            group = rows[rows["name"] == name].sort_values("layer")
            layers = group["layer"].astype(int)
            axes.plot(layers, group["absmax"], color=color, marker=marker, linestyle=dash, markersize=4.5, label=name)
            axes.plot(layers, group["rms"], color=color, linestyle=dash, linewidth=1.0, alpha=0.55)
            broken = group[group["bad"] > 0]
            axes.plot(broken["layer"].astype(int), [high / 1.6] * len(broken), linestyle="", marker="X", color=RED,
                      markersize=8, markeredgecolor=CARD)  # fmt: skip
        for name, limit in limits.items():
            axes.axhline(limit, color=RED, linewidth=1.1, linestyle=(0, (4, 2)))
            axes.annotate(f"{name}\nlimit {limit:.5g}", (1.0, limit), xycoords=("axes fraction", "data"), xytext=(4, 0),
                          textcoords="offset points", va="center", color=RED, fontsize=8)  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(low / 3, high)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=12))
        axes.set_xlabel("layer")
        axes.set_ylabel("largest magnitude (thin: rms)")
        figure.legend(loc="outside lower center", ncols=6)
    broken = rows[rows["bad"] > 0]
    if len(known):
        row = known.loc[known["absmax"].idxmax()]
        nearest = min(LARGEST[name] for name in ["float16", row["dtype"]])
        name = "float16" if nearest == LARGEST["float16"] else row["dtype"]
        caption = (
            f"The largest magnitude is {row['absmax']:.4g}, at {row['tap']} ({row['dtype']}); {name} holds up to "
            f"{nearest:.5g}, {nearest / row['absmax']:.3g} times that"
        )
    else:
        caption = "No layer holds a finite value"
    if len(broken):
        caption += (
            f"; {len(broken)} of the tensors shown hold values that are not finite (crosses), the first of them "
            f"{broken.iloc[0]['tap']}"
        )
    elif "float16" not in dtypes and len(known):
        over = int((known["absmax"] > LARGEST["float16"]).sum())
        caption += f"; {over or 'none'} of {len(known)} tensors would overflow float16"
    return finished(figure, caption + ".", "Ranges of tap points through the layers")


# ---- exponents


def exponent_histograms(table: pd.DataFrame, columns: int = 4) -> Plate:
    """Share of values by binary exponent, a panel for each tap point, with the range of float16's normal numbers.

    From `analysis.spread.exponent_table` (tensors) or `exponents_of` (a trace): tap, dtype, exponent, share.
    """
    names = list(dict.fromkeys(table["tap"]))
    columns = min(columns, max(len(names), 1))
    rows = math.ceil(len(names) / columns)
    low, high = table["exponent"].min() - 2, table["exponent"].max() + 3
    below = {}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.75 + 1.45 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        for place, (axes, name) in enumerate(zip(panels.flat, names, strict=False)):
            group = table[table["tap"] == name]
            least, most = FLOAT16_EXPONENTS
            outside = (group["exponent"] < least) | (group["exponent"] > most)
            below[name] = float(group["share"][outside].sum())
            axes.bar(group["exponent"], 100 * group["share"], width=0.9, color=[RED if o else BLUE for o in outside])
            for bar, is_outside in zip(axes.patches, outside, strict=True):
                if is_outside:
                    bar.set(hatch="////", edgecolor=CARD, linewidth=0.0)
            for edge in (least - 0.5, most + 0.5):
                axes.axvline(edge, color=RED, linewidth=0.9, linestyle=(0, (4, 2)))
            axes.set_title(_short(name), fontsize=8.5)
            if below[name]:
                axes.annotate(f"{100 * below[name]:.2g} % outside", (0.03, 0.97), xycoords="axes fraction", va="top",
                              fontsize=8)  # fmt: skip
            axes.set_yscale("log")
            axes.set_ylim(0.001, 400)
            axes.set_xlim(min(low, least - 2), max(high, most + 2))
            if place + columns >= len(names):
                axes.set_xlabel("exponent")
                axes.tick_params(labelbottom=True)
            if place % columns == 0:
                axes.set_ylabel("% of values")
        handles = [
            Patch(facecolor=BLUE, label="normal numbers of float16"),
            Patch(facecolor=RED, edgecolor=CARD, hatch="////", linewidth=0.0, label="smaller or larger than those"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    worst = max(below, key=below.get)
    caption = (
        f"Binary exponents of {len(names)} tensors: at {_short(worst)} {100 * below[worst]:.2g} % of the values lie "
        "outside the normal numbers of float16, the most of all."
        if below[worst]
        else f"Binary exponents of {len(names)} tensors: all lie inside the normal numbers of float16."
    )
    return finished(figure, caption, "Histograms of binary exponents")


# ---- the spread of a NaN


def _hatch(axes, grid: pd.DataFrame) -> None:
    """Hatch the runs of tokens that are partly or wholly not finite, head by head."""
    for y, row in enumerate(grid.to_numpy()):
        start = 0
        for kind, run in itertools.groupby(np.where(row == 1, "xxx", np.where(row > 0, "///", ""))):
            width = len(list(run))
            if kind:
                edge = CARD if kind == "xxx" else GREY
                axes.add_patch(
                    Rectangle(
                        (start - 0.5, y - 0.5), width, 1, fill=False, hatch=str(kind), edgecolor=edge, linewidth=0.0
                    )
                )
            start += width


def nan_spread(spread: pd.DataFrame, chunk: int | None = None, columns: int = 4) -> Plate:
    """Which tokens and heads are not finite, a small panel for each tap point in the order of computation.

    From `analysis.spread.bad_spread`: tap, token, head, share; `chunk` draws the boundaries of chunks.
    """
    names = list(dict.fromkeys(spread["tap"]))
    columns = min(columns, max(len(names), 1))
    rows = math.ceil(len(names) / columns)
    colors = matplotlib.colors.LinearSegmentedColormap.from_list("bad", ["#dbe9f4", "#f3b08a", RED])
    sums: dict[str, float] = {}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.75 + 1.3 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        image = None
        for place, (axes, name) in enumerate(zip(panels.flat, names, strict=False)):
            grid = spread[spread["tap"] == name].pivot(index="head", columns="token", values="share")
            sums[name] = float(grid.to_numpy().mean())
            heads, tokens = grid.shape
            image = axes.imshow(grid, cmap=colors, vmin=0, vmax=1, aspect="auto", interpolation="nearest",
                                extent=(-0.5, tokens - 0.5, heads - 0.5, -0.5))  # fmt: skip
            _hatch(axes, grid)
            if chunk is not None:
                for edge in range(chunk, tokens, chunk):
                    axes.axvline(edge - 0.5, color=CARD, linewidth=1.0)
            axes.set_title(f"{_short(name)}: {100 * sums[name]:.3g} %", fontsize=8.0, fontweight="normal")
            axes.set_yticks([] if heads == 1 else range(0, heads, max(1, math.ceil(heads / 4))))
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=4))
            axes.tick_params(length=0, labelsize=7.5)
            axes.spines[:].set_visible(False)
            if place + columns >= len(names):
                axes.set_xlabel("token")
            if heads > 1 and place % columns == 0:
                axes.set_ylabel("head")
        if image is not None:
            bar = figure.colorbar(image, ax=panels, shrink=0.8, aspect=18, pad=0.01)
            bar.set_label("share not finite")
            bar.outline.set_visible(False)
            handles = [
                Patch(facecolor="#f3b08a", edgecolor=GREY, hatch="///", linewidth=0.0, label="partly not finite"),
                Patch(facecolor=RED, edgecolor=CARD, hatch="xxx", linewidth=0.0, label="nothing finite"),
            ]
            figure.legend(handles=handles, loc="outside lower center", ncols=2)
    first = next((name for name in names if sums[name]), None)
    if first is None:
        return finished(figure, f"All values of the {len(names)} tensors shown are finite.", "Maps of tokens by heads")
    rows_of = spread[spread["share"] > 0]
    here, last = rows_of[rows_of["tap"] == first], rows_of[rows_of["tap"] == names[-1]]
    caption = (
        f"Of the tap points shown {first} is the first with values that are not finite, in {here['token'].nunique()} "
        f"tokens, from {here['token'].min()} on, of {here['head'].nunique()} of "
        f"{spread[spread['tap'] == first]['head'].nunique()} heads; at {names[-1]} {last['token'].nunique()} of "
        f"{spread[spread['tap'] == names[-1]]['token'].nunique()} tokens hold values that are not finite."
    )
    return finished(figure, caption, "Maps of tokens by heads, a panel for each tap point")


# ---- over decode steps

#: What `step_timeline` calls a column.
TIMELINE_NAMES = {
    "absmax": "largest magnitude", "rms": "root mean square", "error": "relative error",
    "roundings": "error in unit roundoffs",
}  # fmt: skip


def step_timeline(table: pd.DataFrame, names: Sequence[str], value: str = "absmax") -> Plate:
    """A value of tap points over the passes, prompt first, then one token each.

    From `workbench.trace(model).table` (absmax, rms) or `Comparison.stages` (error, roundings); `names` are full names.
    """
    rows = table[table["tap"].isin(list(names))]
    steps = sorted(rows["step"].unique())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
        axes = figure.subplots()
        numbers = rows[value].astype(float)
        positive = numbers[np.isfinite(numbers) & (numbers > 0)]
        low = float(positive.min()) if len(positive) else 1e-8
        high = float(positive.max()) if len(positive) else 1.0
        floor, ceiling = low / 3, high * 4
        has_zero = has_bad = False
        for place, name in enumerate(names):
            color, marker, dash = LINES[place % len(LINES)]
            group = rows[rows["tap"] == name].groupby("step")[value].max().reindex(steps).astype(float)
            drawn = group.where(group > 0)
            drawn = drawn.where(np.isfinite(drawn))
            axes.plot(steps, drawn, color=color, marker=marker, linestyle=dash, markersize=4.5, label=_short(name))
            zero = group[group == 0]
            if len(zero):
                has_zero = True
                axes.plot(zero.index, [1.3 * floor] * len(zero), color=color, marker=marker, linestyle="",
                          markersize=4.5, fillstyle="none")  # fmt: skip
            bad = group[np.isinf(group) | (group.isna() & group.index.isin(rows[rows["tap"] == name]["step"]))]
            if len(bad):
                has_bad = True
                axes.plot(bad.index, [ceiling / 1.5] * len(bad), color=RED, marker="X", linestyle="", markersize=8,
                          markeredgecolor=CARD)  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(floor, ceiling)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=12))
        axes.set_xlabel("pass (0 is the prompt)")
        axes.set_ylabel(TIMELINE_NAMES.get(value, value))
        figure.legend(loc="outside lower center", ncols=3)
    kept = rows.loc[positive.index]
    what = TIMELINE_NAMES.get(value, value)
    if len(kept):
        top = kept.loc[kept[value].astype(float).idxmax()]
        caption = f"The {what} is highest at {top['tap']} in pass {top['step']}: {top[value]:.3g}"
    else:
        caption = f"The {what} is zero or not finite in every pass"
    caption += "; hollow marks are zero" if has_zero else ""
    caption += "; crosses are not finite" if has_bad else ""
    return finished(figure, caption + ".", f"The {what} of {len(names)} tap points over {len(steps)} passes")
