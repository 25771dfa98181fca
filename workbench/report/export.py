"""An executed notebook and its findings become one HTML file; all reports of a folder get an index page.

The pages hold everything they show: no font, no address of another machine, and a script only where a recorded sweep
needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from workbench.report.recording import MARK

if TYPE_CHECKING:
    from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
TEMPLATE = "template"


def stylesheet() -> str:
    return (HERE / TEMPLATE / "report.css").read_text(encoding="utf-8")


def script(notebook: NotebookNode) -> str:
    """What moves the recorded sweeps of a notebook; empty where it shows none."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    if not any(MARK in output.get("data", {}).get("text/html", "") for output in outputs):
        return ""
    return (HERE / TEMPLATE / "frames.js").read_text(encoding="utf-8").strip()


def notebook_page(
    notebook: NotebookNode, *, name: str, findings: dict, provenance: Sequence[tuple[str, str]]
) -> str:
    """The page of a report: verdict and numbers first, the notebook with folded code, provenance last."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name=TEMPLATE,
        extra_template_basedirs=[str(HERE)],
        exclude_anchor_links=True,
        embed_images=False,
    )
    resources = {
        "metadata": {"name": name},
        "workbench": {
            "findings": findings, "provenance": list(provenance), "stylesheet": stylesheet(),
            "script": script(notebook),
        },
    }  # fmt: skip
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    return page.strip() + "\n"


def index_page(entries: Sequence[dict]) -> str:
    """The page that links the reports: each entry holds `page` (its file) and `findings`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / TEMPLATE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("overview.html.j2")
    return template.render(entries=entries, stylesheet=stylesheet()).strip() + "\n"
