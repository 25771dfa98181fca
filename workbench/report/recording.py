"""A recorded sweep: figures drawn beforehand, one for each setting of a few controls, in a page that has no kernel.

The page's script (`template/frames.js`) shows the controls and the frame that they stand for. Where no script runs, and
on paper, there are no controls, and the first frame stands with its setting written over it.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence

from workbench.errors import InputError
from workbench.report.display import Html, Shown

#: What a page is searched for, to know whether it needs the script.
MARK = '<section class="frames"'


def frames(name: str, controls: Mapping[str, Sequence[str]], shown: Sequence[Shown]) -> Html:
    """A sweep over every combination of `controls` (name to the labels of its settings), under the heading `name`.

    A frame holds anything that a notebook can show: a `plots.Plate`, a table.
    The first control becomes a slider, each other one a list. `shown` holds the frames in the order of
    `itertools.product` of the labels: the last control changes fastest. The frame of the first labels is seen first.
    Raises InputError for a control without labels and for a wrong number of frames.
    """
    counts = [len(labels) for labels in controls.values()]
    if not counts or 0 in counts or math.prod(counts) != len(shown):
        wanted = " x ".join(map(str, counts)) or "at least one control"
        raise InputError(f"frames of {name!r}: expected one for each setting ({wanted}), found {len(shown)}")
    rows = []
    for place, (control, labels) in enumerate(controls.items()):
        stride = math.prod(counts[place + 1 :])
        rows.append(_slider(control, labels, stride) if place == 0 else _list(control, labels, stride))
    figures = []
    for place, (labels, item) in enumerate(zip(itertools.product(*controls.values()), shown, strict=True)):
        setting = ", ".join(f"{control}: {label}" for control, label in zip(controls, labels, strict=True))
        figures.append(
            f'<div class="frame"{" hidden" if place else ""}><p class="setting">{html.escape(setting)}</p>'
            f"{item._repr_html_()}</div>"
        )
    page = (
        f'{MARK} aria-label="{html.escape(name)}"><p class="sweep">{html.escape(name)}</p>'
        f'<div class="controls" hidden>{"".join(rows)}</div>'
        f'<div aria-live="polite">{"".join(figures)}</div></section>'
    )
    return Html(page, f"{name}: {len(shown)} recorded frames")


def _slider(name: str, labels: Sequence[str], stride: int) -> str:
    marks = "".join(f"<span>{html.escape(label)}</span>" for label in labels)
    return (
        f'<label><span>{html.escape(name)}</span> <input type="range" min="0" max="{len(labels) - 1}" value="0" '
        f'step="1" data-stride="{stride}" autocomplete="off" aria-valuetext="{html.escape(labels[0])}"> '
        f'<output>{html.escape(labels[0])}</output><span class="labels" hidden>{marks}</span></label>'
    )


def _list(name: str, labels: Sequence[str], stride: int) -> str:
    options = "".join(f'<option value="{i}">{html.escape(label)}</option>' for i, label in enumerate(labels))
    return (
        f'<label><span>{html.escape(name)}</span> <select data-stride="{stride}" autocomplete="off">'
        f"{options}</select></label>"
    )
