"""Figures of gates, policies and layers: tables in, a figure with a caption that states its reading out.

A policy has the same colour, marker and dash in every figure; nothing is told by colour alone (Okabe-Ito
palette). Limits are labelled lines, and a value that is not finite is hatched, never left blank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import matplotlib.colors
import matplotlib.lines
import matplotlib.path
import matplotlib.ticker
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch, Rectangle

from workbench.numerics import EXP_OVERFLOW
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
    new_figure,
)

#: Colour, marker and dash of each preset policy.
POLICY_STYLE: dict[str, tuple[str, str, str]] = {
    "safe": (BLUE, "o", "-"),
    "fp32_cumsum": (ORANGE, "s", "--"),
    "segsum": (GREEN, "^", "-."),
    "factored": (RED, "X", ":"),
    "factored_mask_after": (PURPLE, "P", ":"),
    "mask_after": (SKY, "D", "--"),
    "multiply_mask": (GREY, "v", "-."),
}

def _limit_lines(axes, *, vertical: bool, sign: float = 1.0) -> None:
    """Labelled lines where exp overflows in float16 and in float32."""
    for name, dash in (("float16", (0, (4, 2))), ("float32", "-")):
        value = sign * EXP_OVERFLOW[name]
        draw = axes.axvline if vertical else axes.axhline
        draw(value, color=RED, linewidth=1.1, linestyle=dash, zorder=1)
        limit = f"{EXP_OVERFLOW[name]:.1f}"
        if vertical:
            axes.annotate(
                f"{name} {limit}", (value, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
                textcoords="offset points", ha="center", va="bottom", color=RED, fontsize=8,
            )  # fmt: skip
        else:
            axes.annotate(
                f"{name}\nlimit {limit}", (1.0, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", ha="left", va="center", color=RED, fontsize=8,
            )  # fmt: skip


#: How a head is drawn by what its strongest chunk exceeds: colour, marker, label.
REACH_STYLE = (
    (BLUE, "o", "within both limits"),
    (ORANGE, "s", "beyond the float16 limit"),
    (RED, "X", "beyond the float32 limit"),
)


def _reach(span: float) -> int:
    return (span > EXP_OVERFLOW["float16"]) + (span > EXP_OVERFLOW["float32"])


def gate_ranges(gates: pd.DataFrame, chunk: int = 64) -> Plate:
    """Decay of one token and of one chunk, per layer and head, from `analysis.gates.gate_table`."""
    layers = sorted(gates["layer"].unique())
    heads = int(gates["head"].max()) + 1
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = new_figure(max(2.6, 0.62 * len(layers) + 1.2), 2, sharey=True)
        for row in gates.itertuples():
            y = layers.index(row.layer) + 0.76 * ((row.head + 0.5) / heads - 0.5)
            color, marker, _ = REACH_STYLE[_reach(row.span_max)]
            left.plot([-row.log_decay_max, -row.log_decay_min], [y, y], color=color, linewidth=1.2)
            left.plot(-row.log_decay_median, y, marker=marker, color=color, markersize=4.5)
            right.plot([row.span_median, row.span_max], [y, y], color=color, linewidth=1.2)
            right.plot(row.span_max, y, marker=marker, color=color, markersize=5)
        _limit_lines(right, vertical=True)
        for axes, title, label in (
            (left, "One token", "decay in nats: range over tokens, mark at the median"),
            (
                right,
                f"One chunk of {chunk} tokens",
                "|G| in nats: median to largest chunk, mark at the largest",
            ),
        ):
            axes.set_xscale("symlog", linthresh=1.0, linscale=0.6)
            axes.set_xlim(left=0.0)
            axes.set_title(title, pad=20)
            axes.set_xlabel(label)
            axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            axes.tick_params(axis="y", length=0)
            for boundary in range(1, len(layers)):
                axes.axhline(boundary - 0.5, color=FAINT, linewidth=0.8, zorder=0)
        right.set_xlim(right=max(2.0 * gates["span_max"].max(), 1.5 * EXP_OVERFLOW["float32"]))
        left.set_yticks(range(len(layers)), [f"layer {layer}" for layer in layers])
        left.set_ylim(len(layers) - 0.5, -0.5)
        shown = sorted({_reach(span) for span in gates["span_max"]})
        handles = [
            matplotlib.lines.Line2D(
                [], [], color=REACH_STYLE[i][0], marker=REACH_STYLE[i][1], label=REACH_STYLE[i][2]
            )
            for i in shown
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    over = int((gates["over_float32"] > 0).sum())
    over16 = int((gates["over_float16"] > 0).sum())
    top = gates.loc[gates["span_max"].idxmax()]
    low = gates.loc[gates["span_max"].idxmin()]
    reading = (
        f"{over} of {len(gates)} heads decay by more in one chunk than exp can undo in float32, {over16} by "
        "more than it can in float16."
        if over16
        else f"No chunk of this prompt reaches a limit of exp in any of the {len(gates)} heads."
    )
    caption = (
        f"{reading} The strongest, head {top['head']:.0f} of layer {top['layer']:.0f}, reaches "
        f"{top['span_max']:.4g} nats; the mildest, head {low['head']:.0f} of layer {low['layer']:.0f}, "
        f"{low['span_max']:.3g}."
    )
    return finished(figure, caption, f"Ranges of log decay per token and per chunk for {len(gates)} heads")


PATH_STYLE = {"strongest": (RED, "-"), "median": (ORANGE, "--"), "weakest": (BLUE, "-.")}


def cumsum_paths(paths: pd.DataFrame) -> Plate:
    """G over the rows of a chunk for a strong, a median and a weak head, from
    `analysis.gates.chunk_paths`."""
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.1)
        crossings = []
        for role, group in paths.groupby("role", sort=False):
            color, dash = PATH_STYLE[role]
            name = f"{role}: layer {group['layer'].iloc[0]}, head {group['head'].iloc[0]}"
            axes.plot(group["row"], group["cumsum"], color=color, linestyle=dash, linewidth=1.8, label=name)
            beyond = group[group["cumsum"] < -EXP_OVERFLOW["float32"]]
            if len(beyond):
                row = beyond.iloc[0]
                axes.plot(
                    row["row"], row["cumsum"], marker="X", color=color, markersize=8, markeredgecolor=CARD
                )
                crossings.append((name, int(row["row"])))
        _limit_lines(axes, vertical=False, sign=-1.0)
        axes.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        axes.set_ylim(top=0.0)
        axes.set_xlim(0, max(paths["row"].max(), 1))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.set_xlabel("row of the chunk")
        axes.set_ylabel("G, cumulative log decay in nats")
        figure.legend(loc="outside lower center", ncols=3)
    if crossings:
        name, row = crossings[0]
        caption = (
            f"exp(-G) is infinite in float32 from row {row} of its chunk on for the {name}"
            + ("" if len(crossings) == 1 else f", and for {len(crossings) - 1} more of the heads shown")
            + "; differences of G stay negative and never overflow."
        )
    else:
        caption = "No head shown passes the float32 limit inside its worst chunk, so exp(-G) is finite here."
    return finished(figure, caption, "Cumulative log decay over the rows of one chunk")


def share_maps(maps: Sequence[tuple[str, pd.DataFrame]]) -> Plate:
    """Share of values that are not finite, per layer and tap point, one panel per policy: (name,
    `nans.share_map`)."""
    names = list(dict.fromkeys(tap for _, shares in maps for tap in shares.columns))
    with matplotlib.rc_context(STYLE):
        rows = max(len(shares) for _, shares in maps)
        figure = Figure(figsize=(WIDTH, 0.9 + len(maps) * (0.235 * rows + 0.42)), layout="constrained")
        figure.get_layout_engine().set(hspace=0.06)
        panels = figure.subplots(len(maps), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, shares) in zip(panels, maps, strict=True):
            first = _draw_share_map(axes, shares, names)
            bad_layers = int((shares.max(axis=1) > 0).sum())
            note = (
                f"{bad_layers} of {len(shares)} layers hold values that are not finite"
                if first
                else "all finite"
            )
            axes.set_title(f"policy {name}: {note}")
            _label_layers(axes, shares, names)
        _label_tap_points(panels[-1], names)
        handles = [
            Patch(facecolor=SAFE_CELL, edgecolor=CARD, label="all finite"),
            Patch(facecolor=_bad_color(0.3), edgecolor=INK, hatch="////", label="partly not finite"),
            Patch(facecolor=_bad_color(1.0), edgecolor=CARD, hatch="xxxx", label="nothing finite"),
            Patch(facecolor=CARD, edgecolor=INK, linewidth=2.0, label="first bad op"),
            Patch(facecolor=CARD, edgecolor=FAINT, label="no such op in the layer"),
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=5, handlelength=1.6, columnspacing=1.2
        )
    caption = " ".join(_share_sentence(name, shares) for name, shares in maps)
    return finished(figure, caption, f"Maps of layers by tap points for {len(maps)} policies")


def _label_layers(axes, shares: pd.DataFrame, names: Sequence[str]) -> None:
    """Layers down the side of a map of `names` across, no frame and no ticks."""
    axes.set_yticks([y + 0.5 for y in range(len(shares))], [f"layer {layer}" for layer in shares.index])
    axes.tick_params(length=0)
    axes.set_xlim(0, len(names))
    axes.set_ylim(len(shares), 0)
    axes.spines[:].set_visible(False)


def _label_tap_points(axes, names: Sequence[str]) -> None:
    axes.set_xticks([x + 0.5 for x in range(len(names))], names, rotation=60, ha="right", rotation_mode="anchor")


SAFE_CELL = "#dbe9f4"


def _bad_color(share: float) -> tuple[float, float, float]:
    """From pale to full vermilion."""
    pale, full = (0.99, 0.88, 0.80), matplotlib.colors.to_rgb(RED)
    return tuple(a + (b - a) * share for a, b in zip(pale, full, strict=True))


def _first_cell(shares: pd.DataFrame) -> tuple[int, str] | None:
    """(layer, tap point) of the first share above zero in the order of computation."""
    for layer, row in shares.iterrows():
        bad = row[row > 0]
        if len(bad):
            return layer, bad.index[0]
    return None


def _draw_share_map(axes, shares: pd.DataFrame, names: list[str]) -> tuple[int, str] | None:
    first = _first_cell(shares)
    for y, (_, row) in enumerate(shares.iterrows()):
        for x, name in enumerate(names):
            share = row.get(name, math.nan)
            if math.isnan(share):
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=CARD, edgecolor=FAINT, linewidth=0.4))
                continue
            bad = share > 0
            hatch = None if not bad else "xxxx" if share == 1 else "////"
            axes.add_patch(
                Rectangle(
                    (x + 0.04, y + 0.04), 0.92, 0.92, hatch=hatch,
                    facecolor=_bad_color(share) if bad else SAFE_CELL,
                    edgecolor=(CARD if share == 1 else INK) if bad else CARD, linewidth=0.0,
                )
            )  # fmt: skip
    if first is not None:
        place = (names.index(first[1]), list(shares.index).index(first[0]))
        axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=INK, linewidth=2.0, zorder=3))
    return first


def _share_sentence(name: str, shares: pd.DataFrame) -> str:
    first = _first_cell(shares)
    if first is None:
        return f"Policy {name}: every value of every layer is finite."
    layer, tap = first
    lost = int((shares.iloc[:, -1] == 1).sum())
    share = shares.loc[layer, tap]
    return (
        f"Policy {name}: the first values that are not finite appear at {tap} of layer {layer} "
        f"({100 * share:.3g} % of its values); {lost} of {len(shares)} layers hand on nothing finite."
    )


def policy_errors(errors: pd.DataFrame, limit: float = 3e-6) -> Plate:
    """Error of each policy against the fp64 oracle, per layer: from `analysis.parity.delta_rule_errors`.

    `limit` is drawn as the bound that the default policy is held to.
    """
    layers = sorted(errors["layer"].unique())
    policies = list(dict.fromkeys(errors["policy"]))
    worst = errors[["error_out", "error_state"]].max(axis=1, skipna=False)
    finite = worst[worst.notna() & (worst > 0)]
    high = max(3.0 * limit, 3.0 * finite.max() if len(finite) else 0.0)
    low = min(1e-8, 0.5 * finite.min()) if len(finite) else 1e-8
    beyond = high * (high / low) ** 0.08  # middle of the strip for results that are not finite
    end = high * (high / low) ** 0.16
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(max(2.4, 0.5 * len(layers) + 1.3))
        axes.set_xscale("log")
        axes.axvspan(
            high, end, facecolor=_bad_color(0.0), hatch="////", edgecolor=RED, linewidth=0.0, alpha=0.5
        )
        above = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "xytext": (0, 3)}
        axes.annotate("not finite", (beyond, 1.0), ha="center", color=RED, fontsize=8, **above)
        for place, policy in enumerate(policies):
            color, marker, _ = POLICY_STYLE.get(policy, (INK, "o", "-"))
            group = errors[errors["policy"] == policy]
            offset = 0.6 * ((place + 0.5) / len(policies) - 0.5)
            x = [beyond if math.isnan(value) else max(value, low) for value in worst[group.index]]
            y = [layers.index(layer) + offset for layer in group["layer"]]
            axes.plot(
                x,
                y,
                linestyle="",
                marker=marker,
                color=color,
                markersize=7.5,
                markeredgewidth=0.6,
                label=policy,
                markeredgecolor=CARD,
            )
        axes.axvline(limit, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.annotate(f"bound {limit:.0e}", (limit, 1.0), ha="center", fontsize=8, **above)
        for boundary in range(1, len(layers)):
            axes.axhline(boundary - 0.5, color=FAINT, linewidth=0.8, zorder=0)
        axes.set_xlim(low, end)
        axes.set_ylim(len(layers) - 0.5, -0.5)
        axes.set_yticks(range(len(layers)), [f"layer {layer}" for layer in layers])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(
            "larger of the errors of output and final state, relative to the fp64 oracle (Frobenius)"
        )
        figure.legend(loc="outside lower center", ncols=min(len(policies), 4))
    sentences = []
    for policy in policies:
        value = worst[errors["policy"] == policy].max(skipna=False)
        sentences.append(f"{policy} {'is not finite' if math.isnan(value) else f'stays within {value:.1e}'}")
    caption = f"Worst layer of each policy on the same inputs: {'; '.join(sentences)}."
    return finished(figure, caption, f"Errors of {len(policies)} policies in {len(layers)} layers")


def triggers(table: pd.DataFrame, policy: str, limit: float | None, note: str = "") -> Plate:
    """Decay of every chunk and head in falling order against the limit of the form, from `analysis.policies.triggers`.

    `limit` is `analysis.policies.overflow_limit` of the policy, None for a form without one, `note` why.
    """
    ordered = table.sort_values("span", ascending=False).reset_index(drop=True)
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(2.8)
        axes.set_yscale("symlog", linthresh=1.0, linscale=0.5)
        for observed, color, marker, label in ((False, BLUE, "o", "finite"), (True, RED, "X", "not finite")):
            rows = ordered[ordered["observed"] == observed]
            axes.plot(
                rows.index + 1, rows["span"], linestyle="", marker=marker, color=color, markersize=5,
                label=f"{label} ({len(rows)})",
            )  # fmt: skip
        if limit is not None:
            axes.axhline(limit, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.annotate(
            "this form has no limit" if limit is None else f"this form overflows: {limit:.1f}",
            (1.0, 1.0 if limit is None else limit), xytext=(-4, -3 if limit is None else 3),
            xycoords=("axes fraction", "axes fraction" if limit is None else "data"),
            textcoords="offset points", ha="right", va="top" if limit is None else "bottom", fontsize=8,
        )  # fmt: skip
        axes.set_ylim(bottom=0.0, top=4.0 * max(ordered["span"].max(), limit or 0.0, 1.0))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.set_xlabel("chunks of all layers and heads, strongest decay first")
        axes.set_ylabel("decay in the chunk, nats")
        axes.legend(loc="lower left", title=f"output under {policy}")
    alarms = int((table["predicted"] & ~table["observed"]).sum())
    misses = int((table["observed"] & ~table["predicted"]).sum())
    said = [f"Under {policy}, {int(table['observed'].sum())} of {len(table)} chunks are not finite."]
    if limit is not None:
        said.append(f"The limit of {limit:.1f} nats predicts it for {int(table['predicted'].sum())}.")
    said.append(
        "No false alarm and no miss."
        if not alarms + misses
        else f"False alarms, finite beyond the limit: {alarms}; misses, not finite without it: {misses}."
    )
    return finished(
        figure, " ".join([*said, *filter(None, [note])]), f"Decay of {len(table)} chunks and whether each is finite"
    )


#: Bounds of the error axis of `numerics_probe`: the same for every setting, so that settings can be compared.
PROBE_ERRORS = (1e-8, 1e1)


def numerics_probe(probe, layer: int, head: int) -> Plate:
    """G of one head, error of every layer, and where values are not finite: from `analysis.lab.Lab.probe`.

    Panels stand at fixed places and share their axes over all settings: a figure that takes another's place changes
    in its data alone.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.4))
        left = figure.add_axes((0.085, 0.665, 0.35, 0.265))
        right = figure.add_axes((0.565, 0.665, 0.425, 0.265))
        axes = figure.add_axes((0.085, 0.235, 0.905, 0.25))
        for chunk, rows in probe.path.groupby("chunk"):
            left.plot(rows["row"], -rows["cumsum"], color=BLUE if chunk % 2 else ORANGE, linewidth=1.3)
        _limit_lines(left, vertical=False)
        left.set_yscale("symlog", linthresh=1.0, linscale=0.5)
        left.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        left.set_xlim(0, len(probe.path))
        span = -probe.path["cumsum"].min()
        if not math.isfinite(span):
            left.text(0.5, 0.15, "G is not finite here", transform=left.transAxes, ha="center", va="bottom", color=INK)
        left.set_ylim(bottom=0.0, top=4.0 * max(EXP_OVERFLOW["float32"], span if math.isfinite(span) else 0.0))
        left.set_title(f"|G| of layer {layer}, head {head}, chunk by chunk")
        left.set_xlabel("token")
        left.set_ylabel("nats", labelpad=2.0)
        low, high = PROBE_ERRORS
        for place, error in enumerate(probe.errors["error"]):
            bad = not math.isfinite(error)
            right.bar(
                place, high if bad else min(max(error, low), high), color=CARD if bad else BLUE,
                hatch="////" if bad else None, edgecolor=RED if bad else BLUE, width=0.7,
            )  # fmt: skip
        right.axhline(3e-6, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        right.set_yscale("log")
        right.set_ylim(low, high)
        powers = range(-8, 1, 2)
        right.set_yticks([10.0**power for power in powers], [f"1e{power}" if power else "1" for power in powers])
        right.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        right.set_xticks(range(len(probe.errors)), [str(i) for i in probe.errors["layer"]])
        right.set_title("error against fp64 (hatched: not finite)")
        right.set_xlabel("layer")
        names = list(probe.shares.columns)
        first = _draw_share_map(axes, probe.shares, names)
        _join_patches(axes)
        axes.set_title("values that are not finite" if first else "every value is finite")
        _label_layers(axes, probe.shares, names)
        _label_tap_points(axes, names)
    worst = probe.errors["error"].max()
    error = f"the worst layer is off by {worst:.2g}" if math.isfinite(worst) else "a layer's output is not finite"
    decay = f"decays by up to {span:.4g} nats in a chunk" if math.isfinite(span) else "is given no finite gates"
    caption = f"Head {head} of layer {layer} {decay}; {error}."
    return Plate(figure, caption, f"One setting of the numerics lab. {caption}", is_cropped=False)


def _join_patches(axes) -> None:
    """Draw the rectangles of one look as one shape each: less to draw and to write for the same picture."""
    looks: dict[tuple, list] = {}
    for patch in list(axes.patches):
        look = (
            patch.get_facecolor(), patch.get_edgecolor(), patch.get_hatch(), patch.get_linewidth(), patch.get_zorder()
        )  # fmt: skip
        corners = patch.get_corners()
        looks.setdefault(look, []).append(matplotlib.path.Path([*corners, corners[0]], closed=True))
        patch.remove()
    for (face, edge, hatch, width, order), paths in looks.items():
        axes.add_patch(
            PathPatch(
                matplotlib.path.Path.make_compound_path(*paths), facecolor=face, edgecolor=edge, hatch=hatch,
                linewidth=width, zorder=order,
            )
        )  # fmt: skip


DRIFT_STYLE = ((BLUE, "-"), (SKY, "--"), (ORANGE, "-."), (RED, ":"), (PURPLE, "-"), (GREEN, "--"))


def state_drift(table: pd.DataFrame, layer: int) -> Plate:
    """Norm of the recurrent state and its distance from float64 over a long input: `analysis.drift.state_drift`."""
    with matplotlib.rc_context(STYLE):
        figure, (left, right) = new_figure(3.2, 2)
        for (setting, rows), (color, dash) in zip(table.groupby("setting", sort=False), DRIFT_STYLE, strict=False):
            left.plot(rows["tokens"], rows["norm"], color=color, linestyle=dash, linewidth=1.5, label=setting)
            right.plot(rows["tokens"], rows["error"].clip(lower=1e-9), color=color, linestyle=dash, linewidth=1.5)
        left.set_title(f"Norm of the state of layer {layer}")
        left.set_ylim(bottom=0.0)
        right.set_title("Relative distance from float64")
        right.set_yscale("log")
        for axes in (left, right):
            axes.set_xlabel("tokens read")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
        figure.legend(loc="outside lower center", ncols=3)
    last = table[table["tokens"] == table["tokens"].max()]
    parts = [f"{row.setting} is off by {row.error:.1g}" for row in last.itertuples()]
    caption = f"After {int(table['tokens'].max()):,} tokens: {'; '.join(parts)}."
    return finished(figure, caption, f"State of layer {layer} over {int(table['tokens'].max()):,} tokens")


#: How `sampled_map` draws a tap point: colour, hatch, edge of the hatch, label.
SAMPLE_STYLE: dict[str, tuple[str, str | None, str, str]] = {
    "finite": (SAFE_CELL, None, CARD, "all finite"),
    "seen": (SKY, "....", INK, "not finite, and the sample meets it"),
    "missed": (RED, "xxxx", CARD, "not finite, called clean"),
}


def sampled_map(words: pd.DataFrame, policy: str, reading: str) -> Plate:
    """What the sampled check says of every tap point: `analysis.nan_checks.sampled_map` and `missed_reading`."""
    names = list(words.columns)
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(1.5 + 0.235 * len(words))
        for y, (_, row) in enumerate(words.iterrows()):
            for x, word in enumerate(row):
                if word not in SAMPLE_STYLE:
                    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=CARD, edgecolor=FAINT, linewidth=0.4))
                    continue
                color, hatch, edge, _ = SAMPLE_STYLE[word]
                axes.add_patch(
                    Rectangle(
                        (x + 0.04, y + 0.04), 0.92, 0.92, facecolor=color, hatch=hatch, edgecolor=edge, linewidth=0.0
                    )
                )  # fmt: skip
        axes.set_title(f"policy {policy}: what the first and last 64 values of each tensor tell")
        _label_layers(axes, words, names)
        _label_tap_points(axes, names)
        handles = [
            Patch(facecolor=color, hatch=hatch, edgecolor=edge, linewidth=0.0, label=label)
            for color, hatch, edge, label in SAMPLE_STYLE.values()
        ]
        handles.append(Patch(facecolor=CARD, edgecolor=FAINT, label="no such op in the layer"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4, handlelength=1.6, columnspacing=1.2)
    return finished(figure, reading, f"Map of {len(words)} layers by tap points")


#: Colour, marker and dash of each structure of the gated delta rule.
STRUCTURE_STYLE: dict[str, tuple[str, str, str]] = {
    "two-phase": (BLUE, "o", "-"),
    "two-phase, GPU's budget": (GREEN, "^", "-."),
    "interleaved": (ORANGE, "s", "--"),
}

#: The same of each solver.
SOLVER_STYLE: dict[str, tuple[str, str, str]] = {
    "auto": (INK, ".", ":"),
    "block_substitution": (RED, "X", "-"),
    "solve_triangular": (PURPLE, "D", "--"),
    "row_loop": (GREY, "v", "-."),
    "ungated_inverse": (SKY, "P", "--"),
}

PART_STYLE = {"whole layer": (BLUE, None), "all but projections": (SKY, "////")}


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100.0 else f"{value:.3g}"


def layer_times(layer: pd.DataFrame, alone: pd.DataFrame, source: str) -> Plate:
    """A layer beside transformers', structures and solvers by chunk size: from `analysis.layer_times`.

    `layer` is `against_transformers`, `alone` is `structures`, `source` sentences on the structures and on what they
    were measured with.
    """
    settings = list(dict.fromkeys(layer["setting"]))
    by_structure, by_solver = alone[alone["kind"] == "structure"], alone[alone["kind"] == "solver"]
    tokens = by_structure["tokens"].max()
    by_structure = by_structure[by_structure["tokens"] == tokens]
    with matplotlib.rc_context(STYLE):
        rows = layer.groupby("setting").size().max()
        figure = Figure(figsize=(WIDTH, 4.1 + 0.27 * rows), layout="constrained")
        upper, lower = figure.subfigures(2, 1, height_ratios=(0.27 * rows + 1.3, 2.8))
        upper.suptitle("Transformers' time over ours (ours : theirs, ms)", x=0.01, ha="left", fontweight="bold",
                       fontsize=10.0)  # fmt: skip
        panels = upper.subplots(1, len(settings), sharey=True, squeeze=False)[0]
        for axes, setting in zip(panels, settings, strict=True):
            _draw_ratios(axes, layer[layer["setting"] == setting].reset_index(drop=True))
            axes.set_title(setting)
            axes.set_xlim(0, (1.5 + 0.3 * len(settings)) * layer["ratio"].max())
            axes.set_ylim(rows - 0.5, -0.5)
        handles = [
            Patch(facecolor=color, hatch=hatch, edgecolor=CARD, linewidth=0.0, label=part)
            for part, (color, hatch) in PART_STYLE.items()
        ]
        upper.legend(handles=handles, loc="outside lower center", ncols=2)
        left, middle, *right = lower.subplots(1, 2 if by_solver.empty else 3)
        _draw_by_chunk(left, by_structure, "ms", STRUCTURE_STYLE)
        _draw_by_chunk(middle, by_structure, "kernels", STRUCTURE_STYLE)
        left.set_title(f"Rule alone, {tokens} tokens: ms")
        left.set_ylim(0.0, 1.12 * by_structure["ms"].max())
        middle.set_title("kernels launched")
        middle.set_yscale("log")
        for axes in right:
            _draw_by_chunk(axes, by_solver, "ms", SOLVER_STYLE)
            axes.set_title(f"Solvers, {by_solver['tokens'].max()} tokens: ms")
            axes.set_ylim(0.0, 1.12 * by_solver["ms"].max())
        handles = [line for axes in (left, *right) for line in axes.lines]
        lower.legend(handles=handles, loc="outside lower center", ncols=4, columnspacing=1.2)
    whole = layer[layer["part"] == "whole layer"]
    ratios = "; ".join(
        f"{name} {', '.join(f'{row.ratio:.2f} ({row.phase})' for row in whole[whole['setting'] == name].itertuples())}"
        for name in settings
    )
    best = by_structure.loc[by_structure["ms"].idxmin()]
    twins = by_structure[(by_structure["chunk"] == best["chunk"]) & (by_structure["kernels"] == best["kernels"])]
    takes = "takes" if len(twins) == 1 else "take"
    caption = (
        f"One layer of the 35B shape, times as fast as transformers' as a whole: {ratios}. Of the structures "
        f"{' and '.join(twins['name'])} with chunks of {best['chunk']} {takes} the least time here "
        f"({best['ms']:.0f} ms). {source}"
    )
    return finished(figure, caption, "Times of a GatedDeltaNet layer")


def _draw_ratios(axes, rows: pd.DataFrame) -> None:
    for y, row in enumerate(rows.itertuples()):
        color, hatch = PART_STYLE[row.part]
        axes.barh(y, row.ratio, height=0.66, color=color, hatch=hatch, edgecolor=CARD, linewidth=0.0,
                  xerr=row.ratio_iqr / 2, error_kw={"ecolor": INK, "elinewidth": 0.9})  # fmt: skip
        axes.annotate(
            f"{row.ratio:.2f} ({_milliseconds(row.workbench)} : {_milliseconds(row.transformers)})",
            (row.ratio + row.ratio_iqr / 2, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5,
        )  # fmt: skip
    axes.axvline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
    axes.set_xticks([0, 1, 2])
    axes.set_yticks(range(len(rows)), rows["phase"])
    axes.tick_params(axis="y", length=0)


def _draw_by_chunk(axes, rows: pd.DataFrame, column: str, style: dict[str, tuple[str, str, str]]) -> None:
    """A line for each name over the chunk sizes, which stand at equal distances."""
    chunks = sorted(rows["chunk"].unique())
    for name, found in rows.groupby("name", sort=False):
        color, marker, dash = style.get(name, (INK, "o", "-"))
        axes.plot([chunks.index(chunk) for chunk in found["chunk"]], found[column], color=color, marker=marker,
                  linestyle=dash, markersize=5, label=name)  # fmt: skip
    axes.set_xticks(range(len(chunks)), [str(chunk) for chunk in chunks])
    axes.set_xlabel("rows of a chunk")


def row_spread(rows: pd.DataFrame, layer: int, head: int, chunk: int = 64) -> Plate:
    """Share of each token's row that is not finite, stage by stage: from `analysis.overflow.row_spread`."""
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(1.15 + 0.24 * len(rows))
        colors = matplotlib.colors.ListedColormap([SAFE_CELL, *(_bad_color(i / 63) for i in range(64))])
        shown = rows.to_numpy()
        # The first color is for exact zero alone, however small a share is.
        axes.imshow(
            1.0 + 63.0 * shown - (shown == 0), cmap=colors, vmin=0.0, vmax=64.0, aspect="auto", interpolation="nearest",
            extent=(0, rows.shape[1], len(rows), 0),
        )  # fmt: skip
        for y, row in enumerate(shown):
            kinds = ["" if share == 0 else "xxxx" if share == 1 else "////" for share in row]
            start = 0
            for hatch, run in itertools.groupby(kinds):
                width = len(list(run))
                if hatch:
                    axes.add_patch(
                        Rectangle((start, y), width, 1, fill=False, hatch=hatch, linewidth=0.0,
                                  edgecolor=CARD if hatch == "xxxx" else INK)
                    )  # fmt: skip
                start += width
            axes.axhline(y, color=CARD, linewidth=1.5)
        for boundary in range(chunk, rows.shape[1], chunk):
            axes.axvline(boundary, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.set_yticks([y + 0.5 for y in range(len(rows))], list(rows.index))
        axes.set_xticks(range(0, rows.shape[1] + 1, max(chunk // 2, 1)))
        axes.set_xlabel("token; dashed: the next chunk")
        axes.set_title(f"layer {layer}, head {head}: rows that are not finite")
        axes.tick_params(axis="y", length=0)
        axes.spines[:].set_visible(False)
        handles = [
            Patch(facecolor=SAFE_CELL, label="all finite"),
            Patch(facecolor=_bad_color(0.3), edgecolor=INK, hatch="////", linewidth=0.0, label="partly not finite"),
            Patch(facecolor=_bad_color(1.0), edgecolor=CARD, hatch="xxxx", linewidth=0.0, label="nothing finite"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    alike: dict[tuple[int, ...], list[str]] = {}
    for stage, row in zip(rows.index, shown, strict=True):
        alike.setdefault(tuple(token for token, share in enumerate(row) if share > 0), []).append(stage)
    parts = [
        f"{', '.join(stages)}: {len(tokens)} of {rows.shape[1]} rows, from token {tokens[0]} on" if tokens
        else f"{', '.join(stages)}: none"
        for tokens, stages in alike.items()
    ]  # fmt: skip
    caption = f"Rows that are not finite in head {head} of layer {layer}: {'; '.join(parts)}."
    return finished(figure, caption, f"Map of stages by tokens for head {head} of layer {layer}")
