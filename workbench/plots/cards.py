"""Figures of a rehearsed card: where the least time of a pass goes, and what fills the card's memory."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from workbench.analysis.memory_plan import MemoryPlan
from workbench.analysis.wording import size_text
from workbench.plots.plate import BLUE, CARD, FAINT, GREEN, GREY, INK, ORANGE, RED, SKY, STYLE, WIDTH, Plate, finished

#: Parts below this share of a pass are drawn as one.
SMALL = 0.02


def time_shares(costs: pd.DataFrame) -> Plate:
    """Least time of each part of a pass, a panel for each phase: bound by products or by memory, and what a rule adds.

    From `analysis.rehearse.Rehearsal.costs`, whose seconds must be known. The hatched end of a bar is what the dtype
    that the card's rules leave it costs over the card's model dtype.
    """
    phases = list(dict.fromkeys(costs["phase"]))
    tables = [_parts(costs[costs["phase"] == phase]) for phase in phases]
    longest = max(map(len, tables))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.3 + 0.235 * longest), layout="constrained")
        for axes, phase, table in zip(figure.subplots(1, len(phases), squeeze=False)[0], phases, tables, strict=True):
            unit, name = _unit(table["seconds"].max())
            for y, row in enumerate(table.itertuples()):
                color = ORANGE if row.bound == "compute" else BLUE if row.bound == "memory" else GREY
                before = min(row.seconds, row.in_model_dtype)
                axes.barh(y, before / unit, 0.72, color=color)
                axes.barh(y, (row.seconds - before) / unit, 0.72, left=before / unit, color=CARD, edgecolor=color,
                          hatch="////", linewidth=0.8)  # fmt: skip
                axes.annotate(f"{row.share:.0%}", (row.seconds / unit, y), (3, 0), textcoords="offset points",
                              va="center", fontsize=8)  # fmt: skip
            axes.set_yticks(range(len(table)), table["part"])
            axes.set_ylim(longest - 0.4, -0.6)
            axes.set_xlim(0, 1.14 * table["seconds"].max() / unit)
            axes.tick_params(axis="y", length=0)
            axes.set_xlabel(f"least time, {name}")
            axes.set_title(phase)
        handles = [
            Patch(color=ORANGE, label="bound by products"), Patch(color=BLUE, label="bound by memory"),
            Patch(facecolor=CARD, edgecolor=INK, hatch="////", label="added by the dtype it runs in"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    sentences = []
    for phase, table in zip(phases, tables, strict=True):
        first = table.iloc[0]
        sentences.append(f"{phase}: {first['part']} takes {first['share']:.0%} of the least time")
    caption = "; ".join(sentences)
    return finished(figure, f"{caption[:1].upper()}{caption[1:]}.", "Least time of the parts of a pass on the card")


def _parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Parts of one phase, the longest first, the small ones together at the end."""
    rows = rows.sort_values("seconds", ascending=False, kind="stable")
    large, small = rows[rows["share"] >= SMALL], rows[rows["share"] < SMALL]
    if len(small) > 1:
        rest = {"part": f"{len(small)} smaller parts", "bound": "mixed"} | {
            name: small[name].sum() for name in ("seconds", "share", "in_model_dtype")
        }
        return pd.concat([large, pd.DataFrame([rest])], ignore_index=True)
    return rows.reset_index(drop=True)


def _unit(seconds: float) -> tuple[float, str]:
    return next(((size, name) for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= size),
                (1e-9, "ns"))  # fmt: skip


def memory_bar(plan: MemoryPlan) -> Plate:
    """Weights, a pass, states, keys and values for what was asked, as one bar against the memory of the card."""
    parts = [
        ("weights", plan.weights, BLUE), ("a pass", plan.working, ORANGE),
        ("states and windows", plan.sequences * plan.sequence, GREEN),
        ("keys and values", plan.sequences * plan.length * plan.token, SKY),
    ]  # fmt: skip
    unit, name = (2**30, "GiB") if max(plan.needed, plan.usable or 0) >= 2**30 else (2**20, "MiB")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.75), layout="constrained")
        axes = figure.subplots()
        left = 0.0
        for label, size, color in parts:
            axes.barh(0, size / unit, 0.6, left=left, color=color, label=f"{label}, {size_text(size)}")
            left += size / unit
        end = left
        if plan.capacity is not None:
            axes.barh(0, plan.capacity / unit, 0.9, color="none", edgecolor=GREY, linewidth=1.0)
            over = plan.needed > plan.usable
            axes.axvline(plan.usable / unit, color=RED if over else GREY, linewidth=1.2, linestyle=(0, (4, 2)))
            axes.annotate(f"{plan.utilisation:.0%} of the card", (plan.usable / unit, 0.5), (-3, 0),
                          textcoords="offset points", ha="right", va="bottom", fontsize=8,
                          color=RED if over else INK)  # fmt: skip
            end = max(end, plan.capacity / unit)
        axes.set_xlim(0, 1.02 * end)
        axes.set_ylim(-0.55, 0.8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.set_xlabel(name)
        figure.legend(loc="outside lower center", ncols=2)
    if plan.usable is None:
        caption = f"What was asked for needs {size_text(plan.needed)}; the memory of the card is unknown."
    else:
        caption = f"What was asked for needs {size_text(plan.needed)} of the {size_text(plan.usable)} that can be used."
    return finished(figure, caption, "What fills the memory of the card")
