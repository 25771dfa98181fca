"""Figures: tables in, a figure with a caption that states its reading out. No statistics are computed here.

Nothing is told by colour alone. Limits are labelled lines, and a value that is not finite is hatched, never left blank.
"""

from workbench.plots.half_precision import half_precision_depth
from workbench.plots.kernels import kernel_times, roofline
from workbench.plots.numerics import (
    POLICY_STYLE,
    cumsum_paths,
    gate_ranges,
    layer_times,
    numerics_probe,
    policy_errors,
    row_spread,
    sampled_map,
    share_maps,
    state_drift,
    triggers,
)
from workbench.plots.plate import CARD, Plate
from workbench.plots.routing import (
    depth_lines,
    load_maps,
    pair_maps,
    path_times,
    router_flips,
    routing_probe,
)
from workbench.plots.tracing import depth_ranges, exponent_histograms, nan_spread, stage_map, step_timeline
from workbench.plots.training import training_curve

__all__ = [
    "CARD",
    "POLICY_STYLE",
    "Plate",
    "cumsum_paths",
    "depth_lines",
    "depth_ranges",
    "exponent_histograms",
    "gate_ranges",
    "half_precision_depth",
    "kernel_times",
    "layer_times",
    "load_maps",
    "nan_spread",
    "numerics_probe",
    "pair_maps",
    "path_times",
    "policy_errors",
    "roofline",
    "router_flips",
    "routing_probe",
    "row_spread",
    "sampled_map",
    "share_maps",
    "stage_map",
    "state_drift",
    "step_timeline",
    "training_curve",
    "triggers",
]
