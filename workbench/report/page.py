"""A page of its own, beside those of the notebooks: heading, findings, boxes of figures, the body, its provenance."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from workbench.report.export import stylesheet


def whole_page(
    title: str, *, kicker: str, findings: Iterable[str], boxes: Iterable[tuple[str, str, str]], body: str,
    entries: Mapping[str, str], boxes_style: str = "",
) -> str:  # fmt: skip
    """One HTML file that holds everything it shows.

    `kicker` (the line above the title), `findings` and `body` are HTML; the rest is text: `boxes` of (label, value,
    what it says), `entries` of the provenance, and `boxes_style`, a style of the row of boxes.
    """
    shown = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd><b>{html.escape(value)}</b> <span>{html.escape(said)}</span></dd></div>"
        for label, value, said in boxes
    )
    rows = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in entries.items())
    first = "".join(f"<li>{sentence}</li>" for sentence in findings)
    style = f' style="{html.escape(boxes_style)}"' if boxes_style else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)} – hybrid MoE workbench</title>\n"
        f"<style>\n{stylesheet()}\n</style>\n</head>\n<body>\n"
        f'<header>\n<p class="kicker">{kicker}</p>\n<h1>{html.escape(title)}</h1>\n'
        f'<ol class="findings">{first}</ol>\n'
        f'<dl class="numbers"{style}>{shown}</dl>\n</header>\n'
        f'<main>\n<section class="cell">\n{body}\n</section>\n</main>\n'
        f'<footer>\n<h2>Provenance</h2>\n<dl class="provenance">{rows}</dl>\n</footer>\n</body>\n</html>\n'
    )
