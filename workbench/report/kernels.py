"""Kernel benchmarks on a page: times and roofline of some ops, and the PyTorch variants with what they launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench import plots
from workbench.analysis import kernel_times
from workbench.report.display import Shown, folded, recorded, stack, table


def kernel_figures(result: Mapping[str, object] | None, ops: Sequence[str]) -> Shown:
    """Times of the sides of `ops` and where they stand under the machine's roofline; a note without a result."""

    def show(found: Mapping[str, object]) -> Shown:
        times, bandwidth, rates = kernel_times.roofline(found, ops)
        roof = plots.roofline(times, bandwidth, rates, kernel_times.roofline_reading(times))
        return stack(plots.kernel_times(*kernel_times.figures(found, ops)), roof)

    return recorded(kernel_times.RECORDED, result, show)


def variant_times(result: Mapping[str, object] | None, eager: Mapping[str, object] | None) -> Shown:
    """The structures, chunks and solvers of the gated delta rule in PyTorch, as a table; a note without a result."""

    def show(found: Mapping[str, object]) -> Shown:
        rows = kernel_times.variant_table(found, eager)
        shown = table(rows, kernel_times.variant_reading(rows, found), kernel_times.VARIANT_HEADINGS)
        return folded("Structures, chunks and solvers in PyTorch on a GPU", shown)

    return recorded(kernel_times.VARIANTS, result, show)
