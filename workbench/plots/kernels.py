"""Figures of kernel benchmarks: the time of each side beside the least the machine can do, and the roofline."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workbench.plots.plate import (
    BLUE,
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

_COLORS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, GREY, INK)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


def kernel_times(times: pd.DataFrame, reading: str) -> Plate:
    """Milliseconds of each side, a row for each case, with the least time of the machine: from `kernel_times.figures`.

    What spread too far is drawn hollow.
    """
    cases = list(times.groupby(["op", "shape", "case"], sort=False))
    styles = _styles(times["backend"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.5 + 0.36 * len(cases) + 0.17 * (len(styles) // 3)), layout="constrained")
        axes = figure.subplots()
        for y, (_, rows) in enumerate(cases):
            axes.axhline(y, color=FAINT, linewidth=0.8, zorder=0)
            least = rows["limit_ms"].iloc[0]
            axes.plot([least] * 2, [y - 0.36, y + 0.36], color=INK, linewidth=2.0)
            for row in rows.itertuples():
                color, marker = styles[row.backend]
                axes.plot(row.ms, y, color=color, marker=marker, markersize=6.5, linestyle="",
                          markerfacecolor="none" if row.rejected else color)  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.set_yticks(range(len(cases)), [f"{op}, {shape}, {case}" for (op, shape, case), _ in cases])
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("ms")
        handles = [_point(name, *style) for name, style in styles.items()]
        handles.append(Line2D([], [], color=INK, linewidth=2.0, label="least time of the machine"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return finished(figure, reading, "Times of kernels, case by case, with the least time of the machine")


def roofline(times: pd.DataFrame, bandwidth: float, rates: dict[str, float], reading: str) -> Plate:
    """Flops in a second over flops for each byte, under what copy and product allow: from `kernel_times.roofline`."""
    styles = _styles(times["backend"])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2 + 0.17 * (len(styles) // 3)), layout="constrained")
        axes = figure.subplots()
        knees = [rate / bandwidth for rate in rates.values()]
        span = (times["intensity"].min() / 2.0, 2.0 * max(times["intensity"].max(), *knees))
        for name, rate in rates.items():
            knee = rate / bandwidth
            axes.plot([span[0], knee, span[1]], [1e-12 * bandwidth * span[0], 1e-12 * rate, 1e-12 * rate], color=INK,
                      linewidth=1.6)  # fmt: skip
            axes.annotate(f"{name} products, {1e-12 * rate:.3g} TF", (span[1], 1e-12 * rate), (-2, 3), ha="right",
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.annotate(f"copy, {1e-12 * bandwidth:.3g} TB/s", (span[0], 1e-12 * bandwidth * span[0]), (6, 14),
                      textcoords="offset points", fontsize=8)  # fmt: skip
        for row in times.itertuples():
            color, marker = styles[row.backend]
            axes.plot(row.intensity, 1e-12 * row.rate, color=color, marker=marker, markersize=6, linestyle="",
                      markerfacecolor="none" if row.rejected else color)  # fmt: skip
        for (op, _, case), rows in times.groupby(["op", "shape", "case"], sort=False):
            best = rows.loc[rows["rate"].idxmax()]
            axes.annotate(f"{op} {case}", (best["intensity"], 1e-12 * best["rate"]), (4, 5), fontsize=7, color=GREY,
                          textcoords="offset points")  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(*span)
        axes.set_xlabel("flops for each byte that must be moved")
        axes.set_ylabel("teraflops in a second")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        figure.legend(handles=[_point(name, *style) for name, style in styles.items()], loc="outside lower center",
                      ncols=3)  # fmt: skip
    return finished(figure, reading, "Rates of kernels under the roofline of the machine")


def _styles(backends: pd.Series) -> dict[str, tuple[str, str]]:
    """Colour and marker of each side, in the order in which they come; no two have both in common."""
    names = list(dict.fromkeys(backends))
    return {name: (_COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)]) for i, name in enumerate(names)}


def _point(name: str, color: str, marker: str) -> Line2D:
    return Line2D([], [], color=color, marker=marker, linestyle="", markersize=6, label=name)
