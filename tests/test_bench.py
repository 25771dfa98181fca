"""The timing harness: order of runs, spread, the gate before the timing, the result file."""

import json
import math
import subprocess
from importlib import metadata

import pytest
import torch

from workbench import bench
from workbench.bench.result import RESULTS, command_of
from workbench.errors import InputError
from workbench.provenance import commit


class Clock:
    """Moves on by a second when read, and by what a run costs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_runs_alternate_and_the_order_turns_each_round():
    clock, order = Clock(), []

    def run(name: str, cost: float):
        def work():
            order.append(name)
            clock.now += cost

        return work

    samples = bench.interleave({"a": run("a", 2.0), "b": run("b", 5.0)}, rounds=3, warmup=1, clock=clock)
    assert "".join(order) == "abbaabba"
    assert samples == {"a": [3.0] * 3, "b": [6.0] * 3}, "warm-up is not measured, one tick of the clock is"


@pytest.mark.parametrize(("runs", "rounds"), [({}, 3), ({"a": print}, 0)])
def test_nothing_to_time_is_an_error(runs, rounds):
    with pytest.raises(InputError, match="expected at least one run and one round"):
        bench.interleave(runs, rounds=rounds)


def test_spread_is_median_and_interquartile_range():
    assert bench.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0)
    assert bench.spread([1.0, 1.0, 1.0, 100.0]) == (1.0, 24.75)
    assert bench.spread([7.0]) == (7.0, 0.0)
    with pytest.raises(InputError, match="expected at least one sample"):
        bench.spread([])


@pytest.fixture
def clone(tmp_path):
    """A git clone with one commit."""
    (tmp_path / "file").write_text("1")
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return tmp_path


GREEN = bench.Correctness("difference", 1e-7, 1e-5)
ROWS = [
    bench.Row.of("case", "ours", "ms", [2.0, 1.0, 3.0], share_of_limit=0.5, attested=["linear=torch_linear"]),
    bench.Row.of("case", "theirs", "ms", [4.0]),
]


def test_a_result_file_holds_the_conditions_and_comes_back(clone):
    path = bench.write_result(clone / "results", "prefill", GREEN, ROWS, conditions={"dtype": "float32"})
    assert path.name == "prefill.cpu.json"
    assert not list(path.parent.glob("*.partial"))
    content = bench.read_result(path)
    assert content == json.loads(path.read_text())
    assert (content["schema"], content["dirty"]) == (1, False)
    assert len(content["commit"]) == 40
    assert content["hardware"]["threads"] == torch.get_num_threads()
    assert content["hardware"]["dtype"] == "float32"
    assert content["versions"]["torch"] == metadata.version("torch")
    assert content["correctness"] == {"metric": "difference", "value": 1e-7, "limit": 1e-5}
    assert content["rows"] == [
        {
            "case": "case", "backend": "ours", "unit": "ms", "median": 2.0, "iqr": 1.0, "n": 3,
            "share_of_limit": 0.5, "attested": ["linear=torch_linear"],
        },
        {
            "case": "case", "backend": "theirs", "unit": "ms", "median": 4.0, "iqr": 0.0, "n": 1,
            "share_of_limit": None, "attested": [],
        },
    ]  # fmt: skip


def test_a_changed_file_makes_the_clone_dirty(clone):
    (clone / "file").write_text("2")
    assert commit(clone)[1] is True


def test_there_is_no_file_without_a_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match="expected a git clone to name the commit"):
        bench.write_result(tmp_path, "prefill", GREEN, ROWS)


@pytest.mark.parametrize("value", [2e-5, math.inf, math.nan])
def test_a_red_gate_leaves_no_file(clone, value):
    red = bench.Correctness("difference", value, 1e-5)
    with pytest.raises(InputError, match=r"difference: expected at most 1e-05.*no timing"):
        bench.write_result(clone / "results", "prefill", red, ROWS)
    assert not (clone / "results").exists()


def test_rows_must_be_there_and_finite(clone):
    with pytest.raises(InputError, match="expected at least one row"):
        bench.write_result(clone, "prefill", GREEN, [])
    with pytest.raises(InputError, match="case x, ours: expected finite numbers"):
        bench.write_result(clone, "prefill", GREEN, [bench.Row.of("x", "ours", "ms", [math.nan])])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"schema": 2}, "expected schema 1, found 2"),
        (lambda c: [c], "expected schema 1, found"),
        (lambda c: {k: v for k, v in c.items() if k != "commit"}, "expected the fields"),
        (lambda c: c | {"rows": [{"case": "x"}]}, "expected rows with"),
        (lambda c: c | {"correctness": c["correctness"] | {"value": 1.0}}, "no timing is reported"),
    ],
)
def test_a_damaged_result_file_is_refused(clone, change, message):
    path = bench.write_result(clone, "prefill", GREEN, ROWS)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=message):
        bench.read_result(path)


def test_a_missing_result_file_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.cpu\.json: expected a JSON result file"):
        bench.read_result(tmp_path / "nothing.cpu.json")


def test_threads_are_pinned():
    before = torch.get_num_threads()
    try:
        bench.pin_threads(1)
        assert bench.hardware()["threads"] == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(InputError, match="threads: expected at least 1, found 0"):
        bench.pin_threads(0)


def test_cases_that_are_over_are_kept_until_the_result_is_there(tmp_path):
    said: list[str] = []
    kept = bench.Unfinished(tmp_path / "new", "name", {"commit": "a"}, said.append)
    kept.add("first", [{"case": "x"}])
    assert bench.Unfinished(tmp_path / "new", "name", {"commit": "a"}, said.append).done == {"first": [{"case": "x"}]}
    assert bench.Unfinished(tmp_path / "new", "name", {"commit": "b"}, said.append).done == {}
    assert "going on after 1 cases" in said[0] and "starting anew" in said[1]
    kept.path.write_text("[]")
    with pytest.raises(InputError, match=r"name\.unfinished\.json: expected cases of an interrupted run"):
        bench.Unfinished(tmp_path / "new", "name", {}, said.append)
    kept.remove()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("out", [["--out", "/somewhere/of mine"], ["--out=/somewhere"], ["--out"], []])
def test_the_recorded_command_says_how_it_was_measured_and_not_where_the_file_went(out):
    assert command_of(["b.py", "--rounds", "9", *out]) == "python b.py --rounds 9"


def test_committed_results_name_no_folder_of_a_machine():
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for path in files:
        command = bench.read_result(path)["command"].split()
        assert not [word for word in command if word.startswith("/")], path.name
