"""Figures of routing and of the expert paths. A kind of text, and a way to compute experts, has one look everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
import matplotlib.colors
import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from workbench.analysis.expert_paths import EVEN, LIMIT
from workbench.analysis.routing.load import HOT
from workbench.analysis.routing.views import ALL, PairView, pair_reading
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

#: Colour, marker and dash of each kind of text; other kinds take those of OTHER_STYLE in turn.
KIND_STYLE: dict[str, tuple[str, str, str]] = {
    ALL: (INK, "", "-"),
    "prose": (BLUE, "o", "-"),
    "code": (ORANGE, "s", "--"),
    "chat": (GREEN, "^", "-."),
    "repeated": (RED, "X", ":"),
}
OTHER_STYLE = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", "-."), (RED, "X", ":"), (PURPLE, "D", "--"))

#: The same of each way to compute the routed experts.
PATH_STYLE: dict[str, tuple[str, str, str]] = {
    "torch_sorted": (BLUE, "o", "-"),
    "torch_onednn": (GREEN, "^", "-"),
    "torch_grouped": (ORANGE, "s", "--"),
    "torch_sized": (SKY, "D", "-."),
    "torch_loop": (RED, "X", ":"),
    "torch_pairs": (PURPLE, "P", "--"),
    "torch_gathered": (PURPLE, "v", ":"),
    "torch_batched": (GREY, "<", "-."),
    "torch_dense": (GREY, ">", ":"),
    "transformers (grouped_mm)": (INK, "*", "-"),
    "transformers (eager)": (INK, "+", ":"),
}

#: Load against the even share, from a quarter to four times: blue below, white at 1, vermilion above.
LOADS = matplotlib.colors.LinearSegmentedColormap.from_list("load", [BLUE, "#f7f7f5", RED])
#: Up to so many experts each cell of a map has its number.
NUMBERED = 32


def load_maps(load: pd.DataFrame, reading: str, kinds: Sequence[str] = (ALL,)) -> Plate:
    """Load of each expert against its even share, layers down, experts across, a panel for each of `kinds`: from
    `views.main_load`; beside a single map the same sorted."""
    grids = {kind: _grid(load, kind) for kind in kinds}
    depth, experts = next(iter(grids.values())).shape
    is_single = len(kinds) == 1
    with matplotlib.rc_context(STYLE):
        rows = 1 if is_single else math.ceil(len(kinds) / 2)
        row = 0.24 if depth <= 12 else max(0.055, 2.6 / depth)
        height = (max(1.9, row * depth + 1.0) if is_single else max(1.1, 0.8 * row * depth + 0.45)) * rows + 0.55
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        is_sorted = experts > NUMBERED
        order = np.argsort(-_grid(load, ALL).to_numpy(), axis=1, kind="stable")
        if is_sorted:  # a number says little among hundreds: the hottest of each layer first, in every panel alike
            grids = {kind: _reordered(shown, order) for kind, shown in grids.items()}
        across = "experts of each layer, those hottest over all texts first" if is_sorted else "expert"
        grid = figure.add_gridspec(rows, 2, width_ratios=(1.75, 1.0) if is_single else None)
        panels = [figure.add_subplot(grid[place // 2, place % 2]) for place in range(len(kinds))]
        for axes, (kind, shown) in zip(panels, grids.items(), strict=True):
            image = _draw_load(axes, shown, numbers=is_single and experts <= NUMBERED)
            axes.set_title("Load × even share" if is_single else kind)
            axes.set_xlabel(across if is_single or axes in panels[-2:] else "")
        if is_single:
            _draw_sorted(figure.add_subplot(grid[0, 1]), grids[kinds[0]])
        _load_key(figure, panels, image, any(shown.isna().any(axis=None) for shown in grids.values()))
    return finished(figure, reading, f"Maps of {depth} layers by {experts} experts for {', '.join(kinds)}")


def _reordered(shown: pd.DataFrame, order: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(np.take_along_axis(shown.to_numpy(), order, axis=1), index=shown.index)


def _grid(load: pd.DataFrame, kind: str) -> pd.DataFrame:
    return load[load["kind"] == kind].pivot(index="layer", columns="expert", values="times_even")


def _draw_load(axes, shown: pd.DataFrame, numbers: bool):
    values = shown.to_numpy()
    depth, experts = values.shape
    colors = LOADS.with_extremes(bad=INK)
    image = axes.imshow(
        np.ma.masked_where(values == 0, np.log2(np.where(values > 0, values, 1.0))), cmap=colors, vmin=-2.0, vmax=2.0,
        aspect="auto", interpolation="nearest", extent=(-0.5, experts - 0.5, depth - 0.5, -0.5),
    )  # fmt: skip
    for y, x in np.argwhere(np.isnan(values)):
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=CARD, hatch="xxxx", edgecolor=RED, linewidth=0.0))
    for y, x in zip(*np.nonzero(values >= HOT), strict=True):
        if numbers:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.6))
    if numbers:
        size = 7.0 if experts <= 16 else 5.0
        for (y, x), value in np.ndenumerate(values):
            if math.isnan(value):
                continue
            strong = value > 0 and abs(math.log2(value)) > 1.3
            text = "0" if value == 0 else "<.1" if value < 0.05 else f"{value:.1f}".removeprefix("0")
            axes.text(x, y, text, ha="center", va="center", fontsize=size,
                      color=CARD if strong or value == 0 else INK)  # fmt: skip
    _layer_ticks(axes, shown.index)
    axes.set_xticks(range(0, experts, 1 if experts <= 16 else max(1, experts // 8)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _layer_ticks(axes, layers) -> None:
    """The number of each layer, or of every few where there are many."""
    step = max(1, math.ceil(len(layers) / 10))
    places = range(0, len(layers), step)
    axes.set_yticks(list(places), [str(layers[place]) for place in places])
    axes.set_ylabel("layer")


def _load_key(figure: Figure, panels, image, has_bad: bool) -> None:
    bar = figure.colorbar(image, ax=panels, location="bottom", aspect=42, pad=0.02, shrink=0.62, fraction=0.06)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["≤ ¼ ×", "½ ×", "even", "2 ×: hot", "≥ 4 ×"])
    bar.outline.set_visible(False)
    handles = [Patch(facecolor=INK, label="dead: no token")]
    if has_bad:
        handles.append(Patch(facecolor=CARD, edgecolor=RED, hatch="xxxx", linewidth=0.0, label="no finite token"))
    bar.ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.06, 0.4))


def _draw_sorted(axes, shown: pd.DataFrame) -> None:
    """Loads of each layer in falling order, the most even and the most uneven layer named."""
    values = -np.sort(-shown.to_numpy(), axis=1)
    ranks = np.arange(1, values.shape[1] + 1)
    order = np.argsort(values.max(1) - 0.001 * values.min(1), kind="stable")
    for row in values:
        axes.plot(ranks, row, color=FAINT, linewidth=1.0, zorder=1)
    for place, color, dash, word in ((order[0], BLUE, "--", "flattest"), (order[-1], RED, "-", "steepest")):
        axes.plot(ranks, values[place], color=color, linestyle=dash, linewidth=1.8,
                  label=f"{word}: layer {shown.index[place]}")  # fmt: skip
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
    axes.axhline(HOT, color=RED, linewidth=0.8, linestyle=(0, (1, 2)))
    for height, word in ((1.0, "even"), (HOT, "hot")):
        axes.annotate(word, (1.0, height), xycoords=("axes fraction", "data"), xytext=(-2, 2), ha="right",
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(1, max(len(ranks), 2))
    axes.set_title("Sorted, one line a layer")
    axes.set_xlabel("rank of the expert")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, integer=True))
    axes.legend(loc="upper right", fontsize=8, bbox_to_anchor=(1.02, 1.02))


def kind_style(kinds: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and dash of each kind, those with a name of their own and any other."""
    others = [kind for kind in kinds if kind not in KIND_STYLE]
    return KIND_STYLE | {kind: OTHER_STYLE[i % len(OTHER_STYLE)] for i, kind in enumerate(others)}


def depth_lines(depth: pd.DataFrame, top_k: int, experts: int, reading: str) -> Plate:
    """Experts in use, entropy of a token's choice, and mass of the chosen, through depth: from `views.depth_table`."""
    panels = (
        ("effective", "Experts in use (exp entropy of load)", experts, f"all {experts}"),
        ("entropy", "Entropy of a token's choice, nats", math.log(experts), "no choice"),
        ("mass", f"Mass of the chosen {top_k}", top_k / experts, "no choice"),
    )
    style = kind_style(list(dict.fromkeys(depth["kind"])))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        for axes, (column, title, limit, word) in zip(figure.subplots(1, 3), panels, strict=True):
            for kind, rows in depth.groupby("kind", sort=False):
                color, marker, dash = style[kind]
                axes.plot(rows["layer"], rows[column], color=color, marker=marker if len(rows) <= 16 else "",
                          linestyle=dash, linewidth=2.4 if kind == ALL else 1.4, markersize=4,
                          label=kind, zorder=2 if kind == ALL else 3)  # fmt: skip
            axes.axhline(limit, color=GREY, linewidth=1.0, linestyle=(0, (4, 2)))
            axes.annotate(word, (0.0, limit), xycoords=("axes fraction", "data"), xytext=(2, 2), fontsize=8,
                          textcoords="offset points", color=GREY)  # fmt: skip
            axes.set_title(title, fontsize=9.0)
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
            axes.margins(y=0.12)
        figure.axes[2].set_ylim(0.0, 1.0)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return finished(figure, reading, "Three measures of the routers through depth")


#: Experts that are shown with their numbers beside a map of hundreds.
ZOOM = 20


def pair_maps(view: PairView) -> Plate:
    """Experts chosen together, and their bond through depth.

    The layers with the strongest and the weakest pair; of hundreds of experts the strongest layer, and its part around
    the pair.
    """
    strongest = view.strongest()
    first, last = int(strongest["ratio"].argmax()), int(strongest["ratio"].argmin())
    order, experts = list(view.order(first)), view.ratio.shape[1]
    layer = f"layer {view.layers[first]}"
    if experts > NUMBERED:
        middle = order.index(int(strongest["expert"][first]))
        start = min(max(middle - ZOOM // 2, 0), experts - ZOOM)
        near = order[start : start + ZOOM]
        shown = [(first, order, f"{layer}, {experts} experts"), (first, near, f"{layer}, closer")]
    else:
        shown = [(first, order, layer)]
        if first != last:
            shown.append((last, list(view.order(last)), f"layer {view.layers[last]}"))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.35), layout="constrained")
        *panels, right = figure.subplots(1, len(shown) + 1, width_ratios=[1.1] * len(shown) + [1.0])
        for axes, (place, numbers, title) in zip(panels, shown, strict=True):
            image = _draw_pairs(axes, view.ratio[place], numbers)
            axes.set_title(title)
        bar = figure.colorbar(image, ax=panels, location="bottom", aspect=40, shrink=0.8, pad=0.02)
        bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["⅛ ×", "¼", "½", "1", "2", "4", "8 ×"])
        bar.outline.set_visible(False)
        bar.ax.set_xlabel("tokens together, against independent choice")
        spread = [np.nanpercentile(ratio, 95) for ratio in view.ratio]
        for values, color, dash, marker, name in (
            (strongest["ratio"], RED, "-", "o", "strongest pair"), (spread, BLUE, "--", "s", "95th percentile")
        ):  # fmt: skip
            right.plot(strongest["layer"], values, color=color, linestyle=dash, markersize=4, label=name,
                       marker=marker if len(strongest) <= 16 else "")  # fmt: skip
        right.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        right.set_title("Bond through depth")
        right.set_xlabel("layer")
        right.set_ylim(0.0, 1.25 * strongest["ratio"].max())
        right.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
        right.legend(loc="upper left", fontsize=8)
    return finished(figure, pair_reading(view), f"Maps of {experts} by {experts} experts")


def _draw_pairs(axes, ratio: np.ndarray, experts: Sequence[int]):
    colors = LOADS.with_extremes(bad=FAINT)
    shown = np.log2(ratio[np.ix_(experts, experts)])
    image = axes.imshow(np.ma.masked_invalid(shown), cmap=colors, vmin=-3.0, vmax=3.0, interpolation="nearest")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    names = [str(expert) for expert in experts] if len(experts) <= NUMBERED else []
    axes.set_xticks(range(len(names)), names, fontsize=6.0, rotation=90)
    axes.set_yticks(range(len(names)), names, fontsize=6.0)
    return image


#: Colour, marker and dash of the settings of `narrowing.router_flips`, by dtype and what is narrow.
def _flip_style(setting: str) -> tuple[str, str, str]:
    color, marker = (RED, "X") if "bfloat16" in setting else (BLUE, "o")
    return color, marker, "--" if setting.startswith("softmax") else "-"


def router_flips(rates: pd.DataFrame, margins: Mapping[str, np.ndarray], reading: str) -> Plate:
    """Share of tokens with other experts by layer, and the fp32 margin of those: from `narrowing`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for setting, rows in rates.groupby("setting", sort=False):
            color, marker, dash = _flip_style(setting)
            left.plot(rows["layer"], 100 * rows["set_flip_rate"], color=color, marker=marker if len(rows) <= 16 else "",
                      linestyle=dash, markersize=5, label=setting)  # fmt: skip
        left.set_title("Tokens with other experts, %")
        left.set_xlabel("layer")
        left.set_ylim(bottom=0.0)
        left.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))
        floor = 1e-5
        for name, values in margins.items():
            if not len(values):
                continue
            color, _, dash = (INK, "", "-") if name not in set(rates["setting"]) else _flip_style(name)
            shares = 100 * np.arange(1, len(values) + 1) / len(values)
            kept = np.unique(np.linspace(0, len(values) - 1, 200).astype(int))
            right.plot(np.maximum(values[kept], floor), shares[kept], color=color, linestyle=dash,
                       linewidth=2.2 if color == INK else 1.5, drawstyle="steps-post", label=name)  # fmt: skip
        right.set_xscale("log")
        right.set_xlim(left=floor)
        right.set_ylim(0, 100)
        right.set_title("Choices with a margin below, %")
        right.set_xlabel("margin in fp32, logit k minus logit k + 1")
        handles = [line for line in right.lines if line.get_color() == INK] + list(left.lines)
        labels = [handle.get_label() for handle in handles]
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return finished(figure, reading, "Flips of a narrow router by layer, and margins at the flips")


def path_times(times: pd.DataFrame, reading: str) -> Plate:
    """Time of each way to compute the experts over the number of tokens, with the memory limit, and under skewed loads:
    from `expert_paths.figures`."""
    dtypes = list(dict.fromkeys(times["dtype"]))
    loads = [load for load in dict.fromkeys(times["load"]) if load != EVEN]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.9 + (2.2 if loads else 0.0)), layout="constrained")
        rows = figure.subplots(2 if loads else 1, len(dtypes), squeeze=False, sharey="row",
                               height_ratios=(3.0, 1.9) if loads else None)  # fmt: skip
        span = times[times["load"] == EVEN]["ms"].min() / 2, times[times["load"] == EVEN]["ms"].max() * 1.4
        for axes, dtype in zip(rows[0], dtypes, strict=True):
            _draw_times(axes, times[(times["dtype"] == dtype) & (times["load"] == EVEN)], span)
            axes.set_title(f"{dtype}: ms, experts chosen evenly")
        for axes, dtype in zip(rows[1] if loads else (), dtypes, strict=bool(loads)):
            _draw_skew(axes, times[times["dtype"] == dtype], loads)
        used = [path for path in dict.fromkeys(times["path"]) if path != LIMIT]
        handles = [_path_line(path) for path in used]
        beyond = {"label": "faster than memory allows", "hatch": "////", "linewidth": 0.0}
        handles.append(Patch(facecolor=FAINT, edgecolor=INK, **beyond))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, columnspacing=1.2)
    return finished(figure, reading, "Times of the ways to compute routed experts")


def _path_line(path: str) -> Line2D:
    color, marker, dash = PATH_STYLE.get(path, (INK, ".", "-"))
    return Line2D([], [], color=color, marker=marker, linestyle=dash, markersize=5, label=path)


def _draw_times(axes, rows: pd.DataFrame, span: tuple[float, float]) -> None:
    limit = rows[rows["path"] == LIMIT].sort_values("tokens")
    for path, found in rows[rows["path"] != LIMIT].groupby("path", sort=False):
        color, marker, dash = PATH_STYLE.get(path, (INK, ".", "-"))
        axes.plot(found["tokens"], found["ms"], color=color, marker=marker, linestyle=dash, markersize=4.5,
                  linewidth=1.4)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted(rows["tokens"].unique())
    axes.set_xlim(tokens[0] / 1.15, tokens[-1] * 1.15)
    axes.fill_between(limit["tokens"], span[0], limit["ms"], facecolor=FAINT, edgecolor=GREY, hatch="////",
                      linewidth=0.0, zorder=0)  # fmt: skip
    axes.plot(limit["tokens"], limit["ms"], color=INK, linewidth=1.6, zorder=1)
    axes.set_ylim(*span)
    axes.set_xticks(tokens, [str(token) for token in tokens])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.set_xlabel("tokens")


def _draw_skew(axes, rows: pd.DataFrame, loads: Sequence[str]) -> None:
    """The times of one number of tokens under every load, a row a load."""
    tokens = rows[rows["load"] == loads[0]]["tokens"].iloc[0]
    names = [EVEN, *loads]
    rows = rows[rows["tokens"] == tokens]
    paths = [path for path in dict.fromkeys(rows["path"]) if path != LIMIT]
    for y, load in enumerate(names):
        found = rows[rows["load"] == load].set_index("path")["ms"]
        axes.axhline(y, color=FAINT, linewidth=0.8, zorder=0)
        for place, path in enumerate(paths):
            if path in found.index:
                color, marker, _ = PATH_STYLE.get(path, (INK, ".", "-"))
                shift = 0.56 * ((place + 0.5) / len(paths) - 0.5)
                axes.plot(found[path], y + shift, color=color, marker=marker, markersize=5, linestyle="")
        if LIMIT in found.index:
            axes.plot([found[LIMIT]] * 2, [y - 0.36, y + 0.36], color=INK, linewidth=2.0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{tokens} tokens by load (bar: memory limit)")
    axes.set_xlabel("ms")


def routing_probe(load: np.ndarray, depth: pd.DataFrame, layer: int, experts: int, caption: str) -> Plate:
    """One setting of the routing controls: load of every expert of a layer, and the routers through depth.

    load   [E] tokens served over the even number;  depth  layer, entropy, mass of this setting
    """
    with matplotlib.rc_context(STYLE):
        # Axes at fixed places, so that the figures of a sweep take one another's place.
        figure = Figure(figsize=(WIDTH, 2.6))
        left = figure.add_axes((0.06, 0.19, 0.50, 0.68))
        middle, right = figure.add_axes((0.64, 0.19, 0.14, 0.68)), figure.add_axes((0.845, 0.19, 0.14, 0.68))
        hot, dead = load >= HOT, load == 0
        top = max(4.0, math.ceil(load.max()))
        left.bar(np.arange(len(load)), load, width=0.8 if len(load) <= 64 else 1.0, color=BLUE, linewidth=0.0)
        if hot.any():
            left.bar(np.flatnonzero(hot), load[hot], width=0.8 if len(load) <= 64 else 1.0, color=RED, hatch="////",
                     edgecolor=CARD, linewidth=0.0)  # fmt: skip
        left.plot(np.flatnonzero(dead), np.zeros(dead.sum()), marker="x", color=INK, linestyle="", clip_on=False)
        left.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        left.set_ylim(0.0, top)
        left.set_xlim(-0.7, len(load) - 0.3)
        left.set_xticks(range(0, len(load), 1 if len(load) <= 16 else max(1, len(load) // 8)))
        left.set_title(f"layer {layer}: load × even (hatched: hot, x: dead)")
        left.set_xlabel("expert")
        for axes, column, title, most in (
            (middle, "entropy", "entropy, nats", math.log(experts)), (right, "mass", "top-k mass", 1.0)
        ):  # fmt: skip
            axes.plot(depth["layer"], depth[column], color=BLUE, linewidth=1.4)
            here = depth[depth["layer"] == layer]
            axes.plot(here["layer"], here[column], color=RED, marker="D", markersize=6)
            axes.set_ylim(0.0, 1.05 * most)
            axes.set_title(title)
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
    return Plate(figure, caption, f"One setting of the routing controls. {caption}", is_cropped=False)
