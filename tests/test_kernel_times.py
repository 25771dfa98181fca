"""A recorded result of the kernel benchmarks as tables, sentences and figures."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from workbench import bench, plots, report
from workbench.analysis import kernel_times
from workbench.errors import InputError

PREFILL, STEP, MOE = (
    "gated_delta_rule, 35b-a3b, 1x16384, bfloat16", "gdn_decode_in_place, 35b-a3b, 64x1, bfloat16",
    "moe_layer, 397b-tp8, 1x4096, bfloat16",
)  # fmt: skip


def row(case: str, backend: str, ms: float, **fields: object) -> dict:
    return bench.Row(case, backend, "ms", ms, 0.001, 11, **fields).to_json()


def result(**hardware: object) -> dict:
    """A result of three cases: a library beside ours, a side with flags, one that spread too far."""
    rows = [
        row(PREFILL, "triton_chunk", 0.5, share_of_limit=0.22), row(PREFILL, "triton_chunk, flags", 0.51),
        row(PREFILL, "fla", 1.2, share_of_limit=0.09), row(PREFILL, "flash_qla", 0.6, share_of_limit=0.18),
        row(PREFILL, "limit, compute", 0.11),
        bench.Row(PREFILL, "triton_chunk", "relative error of out", 2e-3, 0.0, 1).to_json(),
        bench.Row(PREFILL, "triton_chunk", "relative error of out, worst hard input", 3e-3, 0.0, 15,
                  attested=("mixed_decay",)).to_json(),
        row(STEP, "triton_packed", 0.07, share_of_limit=0.9), row(STEP, "limit, memory", 0.063),
        row(MOE, "torch_grouped", 1.9, share_of_limit=0.2),
        row(MOE, "triton_grouped", 0.1, share_of_limit=4.0, rejected="spread 60 % of the mean"),
        row(MOE, "limit, memory", 0.38),
    ]  # fmt: skip
    return {
        "rows": rows, "versions": {"torch": "2.11.0", "fla-core": "0.6.0"}, "commit": "c" * 40, "dirty": False,
        "command": "python benchmarks/gpu_kernels.py",
        "hardware": {
            "kind": "nvidia-h200", "model": "NVIDIA H200",
            "limits": {"bfloat16": {"bandwidth": 4.25e12, "rates": {"bfloat16": 8e14}}},
            "costs": {PREFILL: {"bytes": 4e8, "flops": 8.6e10}, STEP: {"bytes": 2.7e8, "flops": 2e8},
                      MOE: {"bytes": 1.6e9, "flops": 2e11}},
        } | hardware,
    }  # fmt: skip


def texts(plate: plots.Plate) -> str:
    root = ElementTree.fromstring(plate.svg())
    return " | ".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))


def test_every_side_has_a_row_with_the_limit_of_its_case():
    times = kernel_times.kernel_times(result())
    assert len(times) == 7 and not times["backend"].str.startswith("limit").any()
    first = times.iloc[0]
    assert (first["op"], first["shape"], first["case"]) == ("gated_delta_rule", "35b-a3b", "1x16384")
    assert (first["ms"], first["limit_ms"], first["bound"], first["flops"]) == (0.5, 0.11, "compute", 8.6e10)
    assert set(kernel_times.kernel_times(result(), ("moe_layer",))["backend"]) == {"torch_grouped", "triton_grouped"}
    with pytest.raises(InputError, match="gpu_kernels: expected times of routing"):
        kernel_times.kernel_times(result(), ("routing",))


def test_errors_and_flags_are_tables_of_their_own():
    errors = kernel_times.kernel_errors(result())
    assert errors["what"].tolist() == ["out", "out, worst hard input"] and errors["on"].tolist() == ["", "mixed_decay"]
    (cost,) = kernel_times.flag_costs(kernel_times.kernel_times(result())).itertuples()
    assert (cost.backend, cost.cost) == ("triton_chunk", pytest.approx(0.02))


def test_the_reading_names_ours_the_best_library_and_what_is_no_measurement():
    text = kernel_times.reading(result())
    assert text.startswith("gated_delta_rule of 1x16384 tokens (35b-a3b): triton_chunk 0.5 ms, 22 % of the limit, ")
    assert "1.2 times as fast as flash_qla (0.6 ms)" in text
    assert "torch_grouped 1.9 ms" in text, "a side that spread too far is no fastest one"
    assert "1 side spread too far and is marked" in text
    assert "Measured on NVIDIA H200 (copy 4.25 TB/s, bfloat16 products 800 TF), torch 2.11.0, fla-core 0.6.0, " in text
    assert "beforehand by `python benchmarks/gpu_kernels.py` at commit cccccccccc." in text
    assert kernel_times.source(result(is_live=True)).endswith("here, now.")
    assert "times as fast as" not in kernel_times.reading(result(), ("moe_layer",))


def test_the_figure_of_times_has_every_case_and_side():
    times, reading = kernel_times.figures(result())
    assert not times["backend"].str.endswith("flags").any()
    plate = plots.kernel_times(times, reading)
    shown = texts(plate)
    for text in ("gated_delta_rule, 35b-a3b, 1x16384", "triton_packed", "flash_qla", "least time of the machine", "ms"):
        assert text in shown
    assert plate.svg() == plots.kernel_times(times, reading).svg() and plate.caption == reading
    hollow = [line for line in plate.figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert len(hollow) == 1, "one side spread too far"


def test_the_roofline_has_its_two_limits_and_every_case_of_products():
    times, bandwidth, rates = kernel_times.roofline(result())
    best = times.iloc[0]
    assert best["intensity"] == pytest.approx(215.0) and best["rate"] == pytest.approx(1.72e14)
    plate = plots.roofline(times, bandwidth, rates, "reading")
    shown = texts(plate)
    assert "bfloat16 products, 800 TF" in shown and "copy, 4.25 TB/s" in shown and "moe_layer 1x4096" in shown
    with pytest.raises(InputError, match="expected the costs of cases and the limits"):
        kernel_times.roofline(result(costs={}))


def test_no_two_sides_look_alike():
    names = [f"side{i}" for i in range(20)]
    rows = [row(PREFILL, name, 1.0 + i) for i, name in enumerate(names)] + [row(PREFILL, "limit, memory", 0.1)]
    times, reading = kernel_times.figures(result() | {"rows": rows})
    lines = [line for line in plots.kernel_times(times, reading).figure.axes[0].lines if line.get_marker() != "None"]
    looks = {(line.get_color(), line.get_marker()) for line in lines}
    assert len(looks) == len(names)


VARIED = "gated_delta_rule, 35b-a3b, 1x4096, bfloat16"


def variants() -> dict:
    rows = []
    for structure, kernels, ms in (("two-phase", 100.0, 2.0), ("interleaved", 1000.0, 6.0)):
        side = f"{structure}, chunk 64, row_loop"
        rows += [
            bench.Row(VARIED, side, "kernels launched", kernels, 0.0, 1).to_json(),
            bench.Row(VARIED, side, "host syncs", 0.0, 0.0, 1).to_json(), row(VARIED, side, ms),
        ]  # fmt: skip
    return result() | {"rows": [*rows, row(VARIED, "limit, compute", 0.03)]}


def test_variants_are_a_table_of_launches_and_times():
    eager = result() | {"rows": [row(VARIED, "two-phase, chunk 64, row_loop", 3.0)]}
    table = kernel_times.variant_table(variants(), eager)
    first, second = table.itertuples()
    assert (first.case, first.structure, first.chunk, first.kernels, first.syncs) == ("1x4096", "two-phase", 64, 100, 0)
    assert (first.ms, first.ms_eager) == (2.0, 3.0) and second.ms_eager != second.ms_eager
    text = kernel_times.variant_reading(table, variants())
    assert text.startswith("At 1x4096 tokens, chunk after chunk launches 10 times the kernels of two phases, ")
    assert "the fastest is two-phase in chunks of 64 by row_loop, 2 ms, 100 kernels, 0 host syncs. Measured on" in text
    with pytest.raises(InputError, match="gdn_variants: expected sides like"):
        kernel_times.variant_table(result(), None)


def test_a_page_shows_figures_and_tables_or_that_there_are_none():
    shown = report.kernel_figures(result(), ("gated_delta_rule",))._repr_html_()
    assert shown.count("<img ") == 2 and "Closest to its limit is triton_chunk" in shown
    assert "benchmarks/gpu_kernels.py is installed here" in repr(report.kernel_figures(None, ()))
    assert "two-phase" in report.variant_times(variants(), None)._repr_html_()
    assert "benchmarks/gdn_variants.py is installed here" in repr(report.variant_times(None, None))


def test_without_a_gpu_a_page_has_what_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.kernel_result(kernel_times.DELTA_RULE) == bench.recorded_result("gpu_kernels", "nvidia-h200")


def test_what_is_recorded_here_can_be_shown():
    recorded = bench.recorded_result(kernel_times.RECORDED, kernel_times.ACCELERATOR)
    if recorded is None:
        pytest.skip("no result of benchmarks/gpu_kernels.py is committed")
    plots.kernel_times(*kernel_times.figures(recorded))
    times, bandwidth, rates = kernel_times.roofline(recorded)
    assert plots.roofline(times, bandwidth, rates, kernel_times.source(recorded)).svg()
