"""Checks in processes of their own: whatever ends one, the others are done, and it is told in full."""

import os
import textwrap
import threading
import time

import pytest

from workbench.probe.child import Task, run_tasks
from workbench.probe.steps import FAIL, PASS, SKIP, Step, verdict_of

MODULE = """
import ctypes, os, signal, subprocess, sys, time
from workbench.probe.steps import Failed, Skipped
def fine(value=1):
    print("noise on stdout")
    return f"fine {value}", ["a detail"]
def raising():
    try:
        open("/nonexistent/file")
    except OSError as error:
        raise RuntimeError("no engine\\nat all") from error
def failing(): raise Failed("found 3", "do this", "broken", ["line"])
def skipping(): raise Skipped("nothing there", "get one")
def exiting(code): sys.stderr.write("last words\\n"); sys.stderr.flush(); os._exit(code)
def leaving(): sys.exit("vendor says no")
def crashing(): print("before it", flush=True); ctypes.string_at(0)
def hanging(file):
    child = subprocess.Popen(["sleep", "30"]); open(file, "w").write(str(child.pid)); time.sleep(30)
def leaving_files(file):
    import tempfile
    open(file, "w").write(tempfile.mkdtemp()); os.kill(os.getpid(), signal.SIGKILL)
def sleeping(): time.sleep(1); return "slept", []
def stopping(): raise KeyboardInterrupt
def of_cuda(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def number(): return f"process {os.getpid()}", []
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checks.py").write_text(MODULE, encoding="utf-8")

    def run(*functions, limit_s=20.0, late=FAIL, stop=None, **arguments):
        tasks = [
            Task(name=f, function=f"checks:{f}", next_step="look", cause_id="of_task", arguments=arguments.get(f, {}))
            for f in functions
        ]
        paths = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return run_tasks(tasks, limit_s=limit_s, late=late, stop=stop, environment=paths)

    return run


def test_outcomes(run):
    fine, failed, skipped = run("fine", "failing", "skipping", fine={"value": "ü"})
    assert (fine.outcome, fine.found, fine.details) == (PASS, "fine ü", ("a detail",))
    assert (failed.outcome, failed.found, failed.next_step, failed.cause_id) == (FAIL, "found 3", "do this", "broken")
    assert (skipped.outcome, skipped.found, skipped.next_step) == (SKIP, "nothing there", "get one")


def test_an_error_is_told_in_full(run):
    (step,) = run("raising")
    assert step.outcome == FAIL and (step.cause_id, step.next_step) == ("of_task", "look")
    assert step.found == ("RuntimeError: no engine at all, caused by FileNotFoundError: [Errno 2] No such file or "
                          "directory: '/nonexistent/file'")  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "cause", "found", "detail"),
    [
        ("exiting", {"code": 0}, "exits", "exit code 0 before the check was done", "last words"),
        ("exiting", {"code": 3}, "exits", "exit code 3", "last words"),
        ("crashing", {}, "crashes", "SIGSEGV", "Segmentation fault"),
        ("leaving", {}, "of_task", "SystemExit: vendor says no", None),
        ("stopping", {}, "of_task", "KeyboardInterrupt", None),
        ("absent", {}, "of_task", "has no attribute 'absent'", None),
    ],
)
def test_the_end_of_a_child_is_the_fault_of_one_check(run, function, arguments, cause, found, detail):
    before, step, after = run("fine", function, "fine", **{function: arguments})
    assert before.outcome == after.outcome == PASS
    assert step.outcome == FAIL and step.cause_id == cause and found in step.found
    assert not any("Warning" in line for line in step.details)
    if detail is not None:
        assert any(detail in line for line in step.details), step.details


@pytest.mark.parametrize("late", [FAIL, SKIP])
def test_a_check_that_hangs_is_stopped_with_all_it_started(run, tmp_path, late):
    begun = time.monotonic()
    step, after = run("hanging", "fine", limit_s=2.0, late=late, hanging={"file": str(tmp_path / "pid")})
    assert time.monotonic() - begun < 15 and after.outcome == PASS
    assert step.outcome == late and step.found == "not finished after 2 s and stopped"
    time.sleep(0.2)
    stat = f"/proc/{(tmp_path / 'pid').read_text()}/stat"
    is_gone = not os.path.exists(stat) or open(stat).read().split()[2] == "Z"
    assert is_gone


def test_a_stop_ends_what_runs_and_what_would(run):
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    begun = time.monotonic()
    steps = run(*["sleeping"] * 20, stop=stop)
    assert len(steps) < 3 and time.monotonic() - begun < 10


def test_what_a_killed_child_leaves_is_removed(run, tmp_path):
    (step,) = run("leaving_files", leaving_files={"file": str(tmp_path / "where")})
    assert step.outcome == FAIL and not os.path.exists((tmp_path / "where").read_text())


def test_each_check_has_its_own_time(run):
    steps = run(*["sleeping"] * 3, limit_s=2.0)
    assert [s.outcome for s in steps] == [PASS] * 3


def test_after_an_error_of_cuda_a_new_process_goes_on(run):
    first, error, second = run("number", "of_cuda", "number")
    assert error.outcome == FAIL and first.found != second.found and second.outcome == PASS


def test_step_needs_what_its_outcome_promises():
    with pytest.raises(ValueError, match="a FAIL needs a next step"):
        Step(name="x", outcome=FAIL, found="y")
    with pytest.raises(ValueError, match="expected PASS"):
        Step(name="x", outcome="OK", found="y")
    assert Step(name="x", outcome=PASS, found="a\x1b[31m\nb").found == "a\\x1b[31m b"


def test_verdict_is_the_first_fault():
    good = Step(name="memory", outcome=PASS, found="fine")
    bad = [Step(name=n, outcome=FAIL, found="is broken", next_step=f"mend {n}", cause_id=f"{n}_broken", op="linear")
           for n in ("first", "second")]  # fmt: skip
    verdict = verdict_of([good, *bad, Step(name="gpu", outcome=SKIP, found="none")])
    assert verdict.exit_code == 1 and (verdict.cause_id, verdict.fix, verdict.where.op) == (
        "first_broken", "mend first", "linear",
    )  # fmt: skip
    assert len(verdict.evidence) == 2 and verdict.ruled_out == ("memory: fine",)
    assert "1 PASS, 2 FAIL, 1 SKIP" in verdict.verdict
    fine = verdict_of([good])
    assert fine.exit_code == 0 and fine.cause_id is None


def package(folder, name, text):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(textwrap.dedent(text), encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "function", "outcome", "found"),
    [
        ("__version__ = '1.2'\ndef run(): pass", "imports", PASS, "vendor 1.2 imports, from"),
        ("raise ImportError('libvendor.so: undefined symbol: _ZN3foE')", "imports", FAIL, "undefined symbol: _ZN3foE"),
        ("import missing_of_vendor", "imports", FAIL, "No module named 'missing_of_vendor'"),
        ("import os; os._exit(1)", "imports", FAIL, "exit code 1"),
        ("import ctypes; ctypes.string_at(0)", "imports", FAIL, "SIGSEGV"),
        ("raise SystemExit(4)", "imports", FAIL, "SystemExit: 4"),
        ("def run(): pass", "has_function", PASS, "vendor.run is callable"),
        ("run = 3", "has_function", FAIL, "vendor.run is of type int, no function"),
        ("def rum(): pass", "has_function", FAIL, "vendor has no run (near: rum)"),
        (None, "imports", SKIP, "no Python module vendor.functions or vendor"),
        (None, "has_function", FAIL, "none of vendor.functions, vendor is there"),
    ],
)
def test_python_bindings(tmp_path, text, function, outcome, found):
    if text is not None:
        package(tmp_path, "vendor", text)
    arguments = {"modules": ["vendor.functions", "vendor"]} | ({"name": "run"} if function == "has_function" else {})
    task = Task(name="b", function=f"workbench.probe.bindings:{function}", arguments=arguments, next_step="n",
                cause_id="c")  # fmt: skip
    (step,) = run_tasks([task], limit_s=20, environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert step.outcome == outcome and found in step.found, step
