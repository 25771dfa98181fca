"""benchmarks/patterns.py on tiny sizes: its sides compute the same, its counts are right, its result is complete."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from workbench import bench
from workbench.analysis.launches import count_launches
from workbench.errors import InputError
from workbench.tracing.casts import count_cast

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("patterns_benchmark", ROOT / "benchmarks" / "patterns.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def compared(script, pattern: str) -> list:
    return list(script.COMPARISONS[pattern](script.SMALL, "cpu"))


def counts(script, pattern: str, number: int = 0) -> dict:
    comparison = compared(script, pattern)[number]
    return {name: count_launches(run) for name, run in comparison.sides.items()}


def test_every_side_gives_what_the_plain_way_gives(script):
    for pattern, comparisons in script.COMPARISONS.items():
        for comparison in comparisons(script.SMALL, "cpu"):
            assert comparison.pattern == pattern and len(comparison.sides) >= 2
            assert script.gate(comparison) <= 1.0, comparison.case


def test_a_side_that_computes_something_else_is_seen(script):
    off = script.Comparison("a", "b", {"plain": lambda: torch.ones(3), "off": lambda: torch.ones(3) * 1.01}, limit=1e-3)
    assert script.gate(off) == pytest.approx(10.0, rel=1e-4)
    exact = script.Comparison("a", "b", {"plain": lambda: [1, 2], "off": lambda: [1, 3]})
    assert script.gate(exact) == math.inf
    shorter = script.Comparison("a", "b", {"plain": lambda: [torch.ones(1)], "off": lambda: []})
    assert script.gate(shorter) == math.inf


def test_bounds_one_by_one_wait_four_times_for_each_segment(script):
    found = counts(script, "batched device-to-host copy")
    (comparison,) = compared(script, "batched device-to-host copy")
    hit = len(comparison.sides["one tolist"]())
    empty = script.SMALL.experts - hit
    assert found["int() for each bound"].syncs == 4 * hit + 2 * empty and found["one tolist"].syncs == 1


def test_blocks_two_phases_and_shared_exponentials_save_launches(script):
    solve = counts(script, "raking scan")
    assert solve["solve_triangular"].kernels < solve["block_substitution"].kernels < solve["row_loop"].kernels
    for pattern, plain in (("raking memoize", "in the loop over chunks"), ("dispatch_scan", "interleaved")):
        found = counts(script, pattern)
        assert all(one.kernels < found[plain].kernels for name, one in found.items() if name != plain), pattern


def test_views_and_one_activation_launch_less_than_their_plain_ways(script):
    views = counts(script, "copy_mdspan")
    assert views["views"].kernels == 0 and views["gathered"].kernels == script.SMALL.top_k
    activation = counts(script, "segmented sort", 1)
    assert activation["once over all pairs"].kernels == 2 < activation["for each segment"].kernels


def test_three_classes_round_as_the_backend_does_and_one_class_rounds_all_alike(script):
    assert [script.torch_onednn.rounded(rows) for rows in (3, 9, 65)] == [3, 16, 96]
    assert [script.one_class(rows) for rows in (3, 9, 65)] == [32, 32, 96]


def test_a_new_number_of_rows_is_timed_apart_from_one_that_came_before(script):
    rows = {row.backend: row for row in script.compile_rows(script.SMALL, "cpu")}
    assert set(rows) in ({"first time", "second time"}, set())  # a torch without oneDNN has none
    assert all(row.n == script.NEW_NUMBERS and row.median > 0 for row in rows.values())
    assert script.compile_rows(script.SMALL, "cuda") == []


def test_one_missing_link_leaves_the_rest_of_the_chain(script):
    (comparison,) = compared(script, "radix-sort chain")
    ran = {}
    for name, run in comparison.sides.items():
        run()
        ran[name] = {row.op: row.backend for row in comparison.chosen[name].attestation()}
    assert ran["whole chain replaced"]["experts"] == "torch_loop"
    assert ran["one link replaced"]["routing"] == "torch_sort"
    assert ran["one link replaced"]["experts"] == ran["nothing missing"]["experts"] != "torch_loop"


def test_the_values_to_cast_hold_what_the_checks_are_for(script):
    (comparison,) = compared(script, "overflow_cast")
    plain = comparison.sides["plain cast"]
    found = count_cast(plain.func.__self__, plain())
    assert (found.overflowed, found.flushed) == (8, 8)


def test_a_search_that_stops_reads_no_further_than_the_first_bad_block(script):
    x = torch.ones(3 * script.STOP_BLOCK)
    assert script.stops_early(x) and count_launches(lambda: script.stops_early(x)).syncs == 3
    x[script.STOP_BLOCK + 5] = math.inf
    assert not script.stops_early(x) and count_launches(lambda: script.stops_early(x)).syncs == 2


def test_rank_order_does_not_depend_on_the_numbers_of_the_experts(script):
    found = {(row.backend, row.unit): row.median for row in script.order_rows(script.SMALL, "cpu")}
    unit = "share of values changed by renumbering experts"
    assert found["torch_sorted (gathered in rank order)", unit] == 0.0
    assert found["torch_loop (index_add)", unit] > 0.0
    assert found["gathered in rank order", f"different results of {script.REPEATS} runs"] == 1


def test_a_result_file_has_every_comparison_and_only_prints_with_only(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.result, "commit", lambda folder: ("0" * 40, False))  # a copy without a clone
    monkeypatch.setattr(bench, "pin_threads", lambda count: None)
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: False)  # this process goes on
    monkeypatch.setattr("workbench.recovery.free_memory", lambda device: None)  # slow in a process with much in it
    few = ["--rounds", "1", "--out", str(tmp_path)]
    assert script.main([*few, "--only", "raking scan"], script.SMALL) == 0
    assert "block_substitution" in capsys.readouterr().out and not list(tmp_path.iterdir())

    assert script.main([*few, "--clock", "processor"], script.SMALL) == 0
    result = bench.read_result(tmp_path / "patterns.cpu.json")
    patterns = {row["case"].partition(":")[0] for row in result["rows"]}
    assert patterns == {*script.COMPARISONS, "deterministic reduce"}
    assert result["hardware"]["clock"] == "processor" and result["correctness"]["value"] <= 1.0
    recovered = {
        row["backend"]: row["median"] for row in result["rows"] if row["unit"] == "share of layers with the same logits"
    }
    assert recovered == {"plain step": 0.0, "step with recovery": 1.0}
    attested = [row["attested"] for row in result["rows"] if row["backend"] == "torch_sized" and row["unit"] == "us"]
    ran = [text for text in attested[0] if text.startswith("experts=torch_sized in float32, ")]
    assert len(ran) == 1 and re.search(r", \d+ calls of 2 and more tokens: named by the user$", ran[0])
    assert all(re.search(r"\d", json.dumps(row["median"])) for row in result["rows"])


def test_a_gpu_has_no_processor_clock(script):
    with pytest.raises(InputError, match="--clock processor: expected the CPU"):
        script.main(["--device", "cuda", "--clock", "processor"], script.SMALL)
