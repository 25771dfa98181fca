"""A result for a page: measured on this machine's GPU where it has one, else the recorded one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.analysis.kernel_times import ACCELERATOR, RECORDED
from workbench.bench.cases import case_of, fits, parse_tokens
from workbench.bench.machine import all_versions, hardware
from workbench.bench.measure import all_sides
from workbench.bench.result import recorded_result
from workbench.bench.shapes import shape_named
from workbench.bench.suite import Entry, Settings, installed_peers, run_suite


def kernel_result(
    ops: Sequence[str], *, tokens: Sequence[str] = ("1x4096", "64x1"), shape: str = "35b-a3b", minutes: float = 2.0
) -> dict[str, object] | None:
    """A result with cases of `ops`, in the form of `read_result`.

    With a CUDA device every backend is measured there now, for up to `minutes`, and ``hardware.is_live`` is True.
    Without one it is the recorded result of `analysis.kernel_times`, None where none is installed.
    """
    if not torch.cuda.is_available():
        return recorded_result(RECORDED, ACCELERATOR)
    sizes, at = shape_named(shape), [parse_tokens(text) for text in tokens]
    cases = [case_of(op, sizes, one, torch.bfloat16) for op in ops for one in at if fits(op, sizes, one)]
    outcome = run_suite(
        [Entry(case, all_sides(case)) for case in cases], Settings(device="cuda", minutes=minutes), name=RECORDED
    )
    return {
        "commit": "", "dirty": False, "command": "", "versions": all_versions(*installed_peers()),
        "hardware": hardware("cuda") | outcome.conditions() | {"is_live": True},
        "rows": [row.to_json() for row in outcome.rows],
    }  # fmt: skip
