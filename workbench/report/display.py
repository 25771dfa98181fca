"""What a notebook shows besides figures: tables, verdicts, passages of text. All words are escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pandas as pd

from workbench.analysis.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Html:
    """Something to show: `page` in a notebook and a report, `text` where there is no page."""

    page: str
    text: str

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


class Shown(Protocol):
    """What a notebook can show: a table, a verdict, passages, a figure."""

    def _repr_html_(self) -> str: ...


def stack(*parts: Shown) -> Html:
    """Several things below each other, as the answer to one question."""
    return Html("\n".join(part._repr_html_() for part in parts), "\n\n".join(map(repr, parts)))


def folded(summary: str, part: Shown) -> Html:
    """Something to look up, closed until a reader opens it."""
    page = f"<details><summary>{html.escape(summary)}</summary>{part._repr_html_()}</details>"
    return Html(page, f"{summary}\n{part!r}")


def note(sentence: str) -> Html:
    """A plain statement in the place of something that cannot be shown."""
    return Html(f'<p class="note">{html.escape(sentence)}</p>', sentence)


def recorded(name: str, result: Mapping[str, object] | None, show: Callable[[Mapping[str, object]], Shown]) -> Shown:
    """`show(result)` of the benchmark `name`, or, where `result` is None, that none is installed here."""
    if result is None:
        return note(f"No result of benchmarks/{name}.py is installed here; run it in the project's clone for one.")
    return show(result)


def if_any(frame: pd.DataFrame, show: Callable[[pd.DataFrame], Shown], otherwise: str) -> Shown:
    """`show(frame)`, or the sentence `otherwise` where it has no rows."""
    return note(otherwise) if frame.empty else show(frame)


#: Characters from which a cell of a table is a sentence and no name.
SENTENCE = 30


def number(value: object) -> str:
    """Three significant digits, all digits of whole thousands; yes and no; a dash for what is missing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if 1000.0 <= abs(value) < 1e7 else f"{value:.3g}"
    return str(value)


def column(values: Sequence[object]) -> list[str]:
    """The cells of a column: its reals with one number of decimals, three digits of the largest, two of the smallest.

    Whole numbers stay whole. Where that would take more than five digits, each cell has three of its own.
    """
    reals = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    powers = [math.floor(math.log10(abs(v))) for v in reals if v]
    if all(v == round(v) for v in reals):
        return [number(value) for value in values]
    decimals = max(0, 2 - max(powers), 1 - min(powers))
    if decimals + max(powers) + 1 > 5 or decimals > 6:
        return [number(value) for value in values]
    return [f"{v:.{decimals}f}" if isinstance(v, float) and math.isfinite(v) else number(v) for v in values]


def table(frame: pd.DataFrame, caption: str, names: Mapping[str, str] | None = None) -> Html:
    """A table with its reading as caption; `names` gives columns the headings that are shown."""
    shown = frame.rename(columns=dict(names or {}))
    rows = list(shown.astype(object).itertuples(index=False, name=None))
    # Sentences are read from the left and may wrap; figures stand under each other.
    kinds = [
        " class=words" if any(isinstance(value, str) and len(value) > SENTENCE for value in values) else ""
        for values in zip(*rows, strict=True)
    ] or [""] * len(shown.columns)
    head = "".join(
        f"<th scope=col{kind}>{html.escape(str(name))}</th>" for name, kind in zip(shown.columns, kinds, strict=True)
    )
    cells = zip(*[column(values) for values in zip(*rows, strict=True)], strict=True)
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{html.escape(v)}</td>" for v, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in cells
    )
    page = (
        f'<figure class="data"><figcaption>{html.escape(caption)}</figcaption><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )
    return Html(page, f"{caption}\n{shown.to_string(index=False)}")


def verdict_card(verdict: Verdict) -> Html:
    """A verdict with its evidence, what it rules out, and the fix."""
    parts = [f"<p><strong>{html.escape(verdict.verdict)}</strong></p>"]
    for title, sentences in (
        ("Evidence", verdict.evidence),
        ("Ruled out", verdict.ruled_out),
        ("Fix", (verdict.fix,) if verdict.fix else ()),
    ):
        if sentences:
            items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
            parts.append(f"<dt>{title}</dt><dd><ul>{items}</ul></dd>")
    cause = html.escape(verdict.cause_id or "no fault")
    parts.append(f"<dt>Cause</dt><dd>{cause}, {html.escape(verdict.confidence.replace('_', ' '))}</dd>")
    kind = "fault" if verdict.is_fault else "fine"
    page = f'<section class="verdict {kind}">{parts[0]}<dl>{"".join(parts[1:])}</dl></section>'
    return Html(page, verdict.verdict)


def passages(entries: Sequence[tuple[str, str]], caption: str) -> Html:
    """Pieces of text, each under its label, line breaks kept: (label, text)."""
    items = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd><pre>{html.escape(text)}</pre></dd></div>"
        for label, text in entries
    )
    page = (
        f'<figure class="passages"><figcaption>{html.escape(caption)}</figcaption><dl>{items}</dl></figure>'
    )
    return Html(page, "\n".join(f"{label}: {text}" for label, text in entries))
