"""What live controls have in common: a style, and a recorded sweep in the place of widgets that no kernel answers."""

from __future__ import annotations

import ipywidgets as widgets

from workbench.report.display import Html
from workbench.report.session import is_report

#: In a notebook, whose own style leaves wide gaps in what a widget shows; a page has its style sheet.
LIVE_STYLE = """<style>
.workbench-controls figure.plate, .workbench-controls figure.data { margin: 0; }
.workbench-controls figure.plate img { max-width: 100%; }
.workbench-controls p { margin: .3em 0; line-height: 1.4; }
.workbench-controls .widget-html-content { line-height: 1.4; }
.workbench-controls pre { white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; padding: .4em .6em; }
</style>"""


class RecordedControls(widgets.VBox):
    """Widgets that also tell how to show themselves where no kernel answers them."""

    def recorded(self) -> Html:
        """The sweep that stands in a page in the place of the widgets: see `report.frames`."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **options: object) -> dict:
        bundle = super()._repr_mimebundle_(**options)
        return {**bundle, "text/html": self.recorded()._repr_html_()} if is_report() else bundle
