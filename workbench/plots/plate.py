"""What every figure is made of: colours, style, and the plate that holds it with its words."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6b7280"
)  # fmt: skip
INK, FAINT, CARD = "#1f2933", "#d7dce2", "#ffffff"

STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "workbench",  # the same ids at every run
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": False,
    "hatch.linewidth": 0.7,
    "figure.facecolor": CARD,
    "savefig.facecolor": CARD,
    "legend.frameon": False,
}

#: Without these an SVG names the time, the program and three web addresses.
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))

WIDTH = 8.6  # inches; the width of a report's text


@dataclass(frozen=True, slots=True)
class Plate:
    """A figure, the sentence that states its reading, and the text for those who cannot see it."""

    figure: Figure
    caption: str
    alt: str
    is_cropped: bool = True  # to what is drawn; not where figures take one another's place

    def svg(self) -> str:
        """The figure as SVG, byte for byte the same at every call."""
        buffer = io.StringIO()
        with matplotlib.rc_context(STYLE):
            box = "tight" if self.is_cropped else None
            self.figure.savefig(buffer, format="svg", metadata=NO_METADATA, bbox_inches=box)
        return buffer.getvalue()

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg().encode()).decode()
        image = f'<img alt="{html.escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'
        return f'<figure class="plate">{image}<figcaption>{html.escape(self.caption)}</figcaption></figure>'


def new_figure(height: float, columns: int = 1, **options):
    """A figure of a report's width, `height` in inches, and its `columns` axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def finished(figure: Figure, caption: str, subject: str) -> Plate:
    """Freeze the layout, which every further drawing would move a little, and put the words to it."""
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return Plate(figure, caption, f"{subject}. {caption}")
