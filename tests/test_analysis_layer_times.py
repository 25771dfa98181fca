"""Figures of the layer's benchmark, read from its result and drawn."""

import dataclasses

import pandas as pd
import pytest

from workbench import bench, plots
from workbench.analysis import layer_times
from workbench.errors import InputError

LAYER = {"float32": 2.0, "float32, chunk 32": 3.0, "bfloat16": 1.5}


def result(*, has_solvers: bool = True) -> dict:
    rows = []
    for setting, ratio in LAYER.items():
        for part in ("whole layer", "all but projections"):
            for phase, unit in (("prefill of 512 tokens", "ms"), ("decode step", "ms per token")):
                case = f"{setting}, {part}, {phase}"
                rows += [
                    bench.Row(case, "workbench", unit, 100.0, 1.0, 7),
                    bench.Row(case, "transformers", unit, 100.0 * ratio, 1.0, 7),
                    bench.Row(case, "transformers / workbench", "ratio of one round", ratio, 0.1, 7),
                ]
    for tokens in (512, 2048):
        for chunk in (32, 64):
            case = f"float32, gated delta rule alone, {tokens} tokens, chunk {chunk}"
            names = {case: ("two-phase", "interleaved")}
            if has_solvers and tokens == 512:
                names[f"{case}, by solver"] = ("auto", "row_loop")
            for of, backends in names.items():
                for place, backend in enumerate(backends):
                    rows += [
                        bench.Row(of, backend, "ms", tokens / chunk + place, 0.1, 7),
                        bench.Row(of, backend, "kernels launched", 100 + place, 0.0, 1),
                        bench.Row(of, backend, "host syncs", place, 0.0, 1),
                    ]
            rows.append(bench.Row(case, "interleaved / two-phase", "ratio of one round", 1.1, 0.0, 7))
    return {
        "hardware": {"model": "a processor", "instructions": "AVX512", "threads": 1}, "commit": "c" * 40, "dirty": True,
        "versions": {"torch": "2.13.0", "transformers": "5.19.0", "numpy": "2.0"}, "command": "python a.py --rounds 7",
        "rows": [dataclasses.asdict(row) for row in rows],
    }  # fmt: skip


def test_every_case_is_read_with_its_setting():
    layer = layer_times.against_transformers(result())
    assert len(layer) == 3 * 2 * 2 and list(dict.fromkeys(layer["setting"])) == list(LAYER)
    assert all(row.transformers / row.workbench == row.ratio == LAYER[row.setting] for row in layer.itertuples())
    alone = layer_times.structures(result())
    assert alone.groupby("kind").size().to_dict() == {"structure": 8, "solver": 4}
    row = alone.set_index(["kind", "name", "tokens", "chunk"]).loc["structure", "interleaved", 2048, 64]
    assert (row["ms"], row["kernels"], row["syncs"]) == (33.0, 101, 1)


def test_the_source_names_hardware_versions_and_command():
    assert layer_times.source(result()) == (
        "Measured on a processor (AVX512), 1 thread, torch 2.13.0, transformers 5.19.0, by `python a.py --rounds 7` at "
        "commit cccccccccc, with changes."
    )


def alone(kernels: dict[str, tuple[int, int]], wide_ms: float = 300.0) -> pd.DataFrame:
    ms = {"two-phase": 100.0, "interleaved": 101.0, "two-phase, GPU's budget": wide_ms}
    return pd.DataFrame(
        [("structure", name, 2048, chunk, ms[name], count, 0)
         for name, counts in kernels.items() for chunk, count in zip((32, 64), counts, strict=True)],
        columns=["kind", "name", "tokens", "chunk", "ms", "kernels", "syncs"],
    )  # fmt: skip


def test_structures_that_launch_the_same_kernels_are_called_one_computation():
    same = {"two-phase": (90, 60), "interleaved": (90, 60), "two-phase, GPU's budget": (9, 8)}
    said = layer_times.structure_reading(alone(same))
    assert "launch the same kernels at every chunk size" in said and "is one chunk a block" in said
    assert "launch 9 kernels at most in the place of up to 90, and are slower here: 3.00 to 3.00 times" in said
    assert "are faster here" in layer_times.structure_reading(alone(same, wide_ms=50.0))
    one = layer_times.structure_reading(alone({"two-phase": (90, 60), "interleaved": (90, 70)}))
    assert "launch the same kernels at chunks of 32:" in one and "GPU" not in one
    assert "different numbers of kernels" in layer_times.structure_reading(
        alone({"two-phase": (9, 6), "interleaved": (90, 70)})
    )


def test_a_result_of_other_cases_is_refused():
    with pytest.raises(InputError, match="gdn_layer_vs_transformers: expected cases such as"):
        layer_times.figures(result() | {"rows": result()["rows"][-1:]})


@pytest.mark.parametrize("has_solvers", [True, False])
def test_the_figure_shows_the_longest_input_and_solvers_if_timed(has_solvers):
    plate = plots.layer_times(*layer_times.figures(result(has_solvers=has_solvers)))
    assert "float32 2.00 (prefill of 512 tokens), 2.00 (decode step); float32, chunk 32 3.00" in plate.caption
    assert "two-phase with chunks of 64 takes the least time here (32 ms)" in plate.caption
    assert plate.caption.endswith("with changes.") and plate.svg() == plate.svg()
    titles = [axes.get_title(loc="left") for axes in plate.figure.axes]
    assert ("Solvers, 512 tokens: ms" in titles) is has_solvers
    assert [title for title in titles if title in LAYER] == list(LAYER) and "Rule alone, 2048 tokens: ms" in titles
    bars = [patch.get_width() for patch in plate.figure.axes[1].patches]
    assert bars == [3.0] * 4


def test_the_committed_result_can_be_drawn():
    found = bench.recorded_result(layer_times.RECORDED)
    assert plots.layer_times(*layer_times.figures(found)).caption.count("prefill of 2048 tokens") >= 2
