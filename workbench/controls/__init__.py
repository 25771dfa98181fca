"""Live controls for notebooks: ipywidgets that redraw at every change.

They need a running kernel. A page has none, so controls that run for a page record a small sweep to stand there.
"""

from workbench.controls.numerics import NO_CLAMP, RECORDED_LIMITS, RECORDED_POLICIES, NumericsControls
from workbench.controls.routing import ExpertTimings, RoutingControls

__all__ = [
    "NO_CLAMP", "RECORDED_LIMITS", "RECORDED_POLICIES", "ExpertTimings", "NumericsControls", "RoutingControls",
]  # fmt: skip
