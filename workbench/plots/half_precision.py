"""The figure of a float16 readiness report: how far values reach through depth, against float16's largest number."""

from __future__ import annotations

import matplotlib
import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure

from workbench.analysis.half_precision.watch import MIXER, MLP, NORMED, PRODUCT, RULE, STREAM
from workbench.numerics import LARGEST, SMALLEST_NORMAL
from workbench.plots.plate import BLUE, CARD, GREEN, GREY, ORANGE, PURPLE, RED, SKY, STYLE, WIDTH, Plate, finished

#: Kind of tensor -> colour, marker and dash of its line.
LINE_OF_KIND = {
    STREAM: (BLUE, "o", "-"),
    PRODUCT: (ORANGE, "s", "--"),
    MLP: (GREEN, "^", "-."),
    MIXER: (PURPLE, "D", ":"),
    NORMED: (SKY, "v", "--"),
    RULE: (GREY, "P", ":"),
}


def half_precision_depth(activations: pd.DataFrame) -> Plate:
    """Largest magnitude of each kind of tensor in each layer, in float32, against 65504; crosses overflow float16.

    From `analysis.half_precision.Readiness.activations`. A kind is as large as the largest of its tensors in the layer;
    those inside the mixer's op are held wider than float16 and are drawn for the sake of cards that narrow them.
    """
    rows = activations[activations["layer"].notna() & (activations["absmax"] > 0)]
    rows = rows.assign(layer=rows["layer"].astype(int))
    limit = LARGEST["float16"]
    worst = rows.groupby(["kind", "layer"])["absmax"].max()
    top, low = float(worst.max()), float(worst.min())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        axes = figure.subplots()
        for kind, (color, marker, dash) in LINE_OF_KIND.items():
            if kind not in worst.index.get_level_values("kind"):
                continue
            line = worst[kind].sort_index()
            axes.plot(line.index, line, color=color, marker=marker, linestyle=dash, markersize=4.5, label=kind)
        faults = rows[rows["fault"]].groupby(["kind", "layer"])["absmax"].max()
        axes.plot([layer for _, layer in faults.index], faults, linestyle="", marker="X", color=RED, markersize=9,
                  markeredgecolor=CARD, zorder=4, label="overflows float16" if len(faults) else None)  # fmt: skip
        axes.axhline(limit, color=RED, linewidth=1.1, linestyle=(0, (4, 2)))
        axes.annotate(f"float16\nlimit {limit:.0f}", (1.0, limit), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", color=RED, fontsize=8)  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(min(low / 3, SMALLEST_NORMAL["float16"] * 1e3), max(3.0 * limit, 3.0 * top))
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=12))
        axes.set_xlabel("layer")
        axes.set_ylabel("largest magnitude in float32")
        figure.legend(loc="outside lower center", ncols=4)
    held = rows[rows["held"] == "float16"]
    row = held.loc[held["absmax"].idxmax()]
    caption = (
        f"Of what a float16 model holds in float16 in its layers, {row['name']} reaches furthest: {row['absmax']:.4g}, "
        f"{100 * row['share']:.3g} % of {limit:.0f}"
    )
    faulty = rows[rows["fault"]]
    if len(faulty):
        caption += f"; {len(faulty)} of {len(held)} tensors overflow, the first of them {faulty['name'].iloc[0]}"
    else:
        caption += f"; none of {len(held)} tensors overflows"
    return finished(figure, caption + ".", "Largest magnitudes through the layers against the limit of float16")
