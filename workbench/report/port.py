"""The page of one port board: the table ranked by time, then what stands behind each op."""

from __future__ import annotations

import html
import re

import pandas as pd

from workbench import __version__
from workbench.analysis.port import MISSING, RIGHT, SLOW, UNPROVEN, WRONG, Board, Part, PortRow
from workbench.analysis.wording import counted, duration_text
from workbench.report.display import Html, Shown, folded, note, stack, table
from workbench.report.page import whole_page

HEADINGS = {
    "rank": "", "op": "op", "state": "state", "share": "share of time, %", "prefill": "of the prompt, %",
    "decode": "of a token, %", "kernel": "kernel", "meanwhile": "meanwhile", "ratio": "times the least",
}  # fmt: skip
PART_HEADINGS = {
    "part": "part", "calls": "calls", "backend": "backend", "least": "least time", "seconds": "time",
    "ratio": "times the least", "how": "how it is known",
}  # fmt: skip
FIVE_IN_A_ROW = "grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr))"
#: What each state means, for the legend.
MEANING = {
    WRONG: "fails its contract", MISSING: "no kernel of its own there", SLOW: "right, and far from its least time",
    UNPROVEN: "a library has a kernel that nothing here can run", RIGHT: "nothing to do",
}  # fmt: skip


def port_page(board: Board, command: str) -> str:
    """One HTML file that holds everything it shows."""
    heading = f"Port to {board.card.title}"
    counts = board.counts()
    entries = {
        "Command": command, "Model": board.model, "Card": f"{board.card.name}: {board.card.title}",
        "Dtype": board.dtype,
        "Request": f"a prompt of {counted(board.prompt, 'token')} and {counted(board.following, 'token')} after it",
        "Least time": "unknown" if board.least is None else duration_text(board.least),
        "Measured on": board.machine if board.device else "nothing, times are priced", "Workbench": __version__,
    }  # fmt: skip
    return whole_page(
        heading, kicker="Port board", findings=map(_prose, findings(board)),
        boxes=[(state, str(counts[state]), said) for state, said in MEANING.items()], body=port_view(board).page,
        entries=entries, boxes_style=FIVE_IN_A_ROW,
    )  # fmt: skip


def findings(board: Board) -> list[str]:
    """Where to begin, and what the board rests on."""
    open_rows = [row for row in board.rows if row.state != RIGHT]
    said = []
    if open_rows:
        worst = open_rows[0]
        share = "" if worst.share is None else f" ({100 * worst.share:.0f} % of the least time of a request)"
        said.append(f"Begin with {worst.op}{share}: {worst.state}. {worst.todo[:1].upper()}{worst.todo[1:]}.")
    else:
        said.append("Every op is right, as far as was checked.")
    known = [row.share for row in board.rows]
    if None not in known:
        done = sum(row.share for row in board.rows if row.state == RIGHT)
        said.append(f"{100 * done:.0f} % of the time is in ops that are right.")
    said.append(
        f"Checked and timed on {board.machine}." if board.device else
        "Nothing was measured on the card: backends of torch were checked on this machine's CPU, times are priced."
    )  # fmt: skip
    return said


def port_view(board: Board) -> Html:
    """The table, and the evidence of each row."""
    rows = pd.DataFrame([_line(rank, row) for rank, row in enumerate(board.rows, 1)], columns=list(HEADINGS))
    others = ", ".join(
        op if share is None else f"{op} {100 * share:.2g} %" for op, share in board.others
    )
    caption = (
        f"Ops by their share of the least time of a request: {counted(board.prompt, 'prompt token')} and "
        f"{counted(board.following, 'new token')}. An op is slow from {board.multiple:g} times its least time on. "
        f"No ops of the registry: {others}."
    )
    parts: list[Shown] = [table(rows, caption, HEADINGS), *(_evidence(row) for row in board.rows)]
    parts += [Html("<h2>What this rests on</h2>", "What this rests on"), *map(note, board.notes)]
    return stack(*parts)


def _prose(text: str) -> str:
    """Escaped, what stands in backquotes as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _line(rank: int, row: PortRow) -> tuple:
    worst = row.worst
    return (
        rank, row.op, row.state, *(_percent(x) for x in (row.share, row.prefill, row.decode)), row.backend or "none",
        row.meanwhile or "–", "–" if worst is None else f"{worst.ratio:.3g}",
    )  # fmt: skip


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _evidence(row: PortRow) -> Html:
    """One op: state, next step, what was checked, its libraries, and its times folded away."""
    entries = [("Next", row.todo)] if row.todo != "nothing" else []
    entries += [("Failure", row.failure)] if row.failure else []
    entries += [("Checked", row.checked)] if row.checked else []
    entries += [("Meanwhile", f"{row.meanwhile}, composed of torch's operators")] if row.meanwhile else []
    shown = [*entries, *((f"Library {name}", why) for name, why in row.libraries)]
    listed = "".join(f"<dt>{html.escape(k)}</dt><dd>{_prose(v)}</dd>" for k, v in shown)
    kind = "fine" if row.state in (RIGHT, UNPROVEN) else "fault"
    head = f"{row.op}: {row.state}"
    page = f'<section class="verdict {kind}"><p><strong>{html.escape(head)}</strong></p><dl>{listed}</dl></section>'
    text = "\n".join([head, *(f"  {k}: {v}" for k, v in [*entries, *row.libraries])])
    times = pd.DataFrame([_part(part) for part in row.parts], columns=list(PART_HEADINGS))
    return stack(Html(page, text), folded(f"Times of {row.op}", table(times, "One pass of each phase.", PART_HEADINGS)))


def _part(part: Part) -> tuple:
    return (
        f"{part.name}, {'prompt' if part.phase == 'prefill' else 'token'}", part.calls, part.backend or "none",
        "unknown" if part.least is None else f"{duration_text(part.least)}, {part.bound}",
        "unknown" if part.seconds is None else duration_text(part.seconds),
        "–" if part.ratio is None else f"{part.ratio:.3g}", part.how,
    )  # fmt: skip
