"""What ran, for a page: the backend of each op, how often, why it was chosen, what was refused, what failed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from workbench.report.display import Html, Shown, folded, note, stack, table

HEADINGS = {
    "run": "run", "op": "op", "backend": "backend", "dtype": "dtype", "tokens": "tokens", "calls": "calls",
    "why": "why it was chosen",
}  # fmt: skip

#: How a reason says that nobody named the backend (`kernels.registry`).
_ORDER = r"first of the automatic order for \d+ tokens on (\w+) that can serve"


def attested(runs: Mapping[str, Iterable[Any]]) -> Shown:
    """A table of what served each op in each run: label -> attestations, or their JSON as bundles have it.

    What failed and was tried again or replaced stands above it, unfolded.
    """
    rows = [
        (label, row if isinstance(row, Mapping) else row.to_json()) for label, found in runs.items() for row in found
    ]
    if not rows:
        return note("No run says which backends served it.")
    frame = pd.DataFrame([_cells(label, row) for label, row in rows], columns=list(HEADINGS))
    frame = frame if len(runs) > 1 else frame.drop(columns="run")
    caption = "Each op by its backend, how often, and why it was chosen."
    chosen = folded("Which backends ran, and why", table(frame, caption, HEADINGS))
    failed = [sentence for label, row in rows for sentence in _failures(label, row)]
    if not failed:
        return chosen
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in failed)
    head = "Backends failed while they ran"
    page = f'<section class="verdict fault"><p><strong>{head}</strong></p><ul>{items}</ul></section>'
    return stack(Html(page, "\n".join([head, *failed])), chosen)


def _cells(label: str, row: Mapping[str, Any]) -> tuple:
    why = re.sub(_ORDER, r"first in order on \1 that can serve", str(row.get("reason", "not said")))
    why += "".join(f"; {path} ({count} of {row.get('calls')} calls)" for path, count in row.get("paths", ()))
    for name, what in (("routed", "calls routed"), ("cast", "calls with inputs cast")):
        why += f"; {row[name]} {what}" if row.get(name) else ""
    refused = "; ".join(f"{name}: {reason}" for name, reason in row.get("refused", ()))
    why += f"; refused before it: {refused}" if refused else ""
    return (label, *(row.get(name, "") for name in ("op", "backend", "dtype", "tokens", "calls")), why)


def _failures(label: str, row: Mapping[str, Any]) -> Iterable[str]:
    """What was repeated or replaced, in sentences."""
    for name, error in row.get("replaced", ()):
        yield f"{label}: op {row['op']}: {row['backend']} took the place of {name}, which {error}"
    if row.get("retries"):
        yield f"{label}: op {row['op']}: backend {row['backend']}: {row['retries']} calls were repeated after a failure"
