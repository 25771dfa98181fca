"""The figure of a training run."""

from __future__ import annotations

import matplotlib.ticker
import pandas as pd

from workbench.plots.plate import (
    BLUE,
    GREEN,
    GREY,
    INK,
    STYLE,
    Plate,
    finished,
    new_figure,
)


def training_curve(curve: pd.DataFrame) -> Plate:
    """Losses and dialogues over the steps of one or more runs, each starting from the one before.

    `curve` has the columns run, total_step, next, heldout and, where dialogues were followed, validation_exact: the
    rows of `workbench.training.curve.joined`.
    """
    has_dialogues = "validation_exact" in curve and curve["validation_exact"].notna().any()
    with matplotlib.rc_context(STYLE):
        figure, panels = new_figure(2.9, 2 if has_dialogues else 1, squeeze=False)
        left, right = panels[0][0], panels[0][-1]
        for number, (_, rows) in enumerate(curve.groupby("run", sort=False)):
            steps = rows["total_step"]
            left.plot(steps, rows["next"], color=GREY, linewidth=1.0, label=None if number else "training text")
            left.plot(
                steps, rows["heldout"], color=BLUE, marker="o", markersize=3.5, linewidth=1.5,
                label=None if number else "held-out text",
            )  # fmt: skip
            if has_dialogues:
                right.plot(steps, 100 * rows["validation_exact"], color=GREEN, marker="o", markersize=3.5)
        ends = curve.groupby("run", sort=False)["total_step"].max().tolist()
        for axes in panels[0]:
            axes.set_xlabel("step")
            axes.set_xlim(left=0)
            for end in ends[:-1]:
                axes.axvline(end, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
        left.set_ylabel("nats a token")
        left.set_title("Text")
        left.legend(loc="lower left")
        if has_dialogues:
            right.set_title("Validation dialogues with an exact reply")
            right.set_ylabel("%")
            right.set_ylim(0, 102)
    last = curve.iloc[-1]
    caption = f"Held-out text ends at {last['heldout']:.3f} nats a token"
    if has_dialogues:
        caption += f", with {100 * last['validation_exact']:.1f} % of the validation dialogues exact"
    runs = len(ends)
    caption += f", after {ends[-1]:,} steps" + (f" in {runs} runs (dashed lines)." if runs > 1 else ".")
    return finished(figure, caption, "Losses over training steps")
