"""Checks in a process of their own, since what they touch may raise, exit, crash or hang.

The parent names functions; the child calls one after the other and writes a line of JSON before and after each. A
child that ends in between ends one check alone: its exit code or signal and the last lines that it wrote are that
check's FAIL, and a new child goes on with the next one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import one_line
from workbench.probe.steps import FAIL, PASS, SKIP, Failed, Skipped, Step

#: Folder that has the package, for the child to import it from.
ROOT = Path(__file__).resolve().parents[2]
#: Lines and characters of a dead child's output that are shown.
LAST_LINES, LAST_CHARACTERS = 12, 4000
#: What the child runs.
PROGRAM = "import sys; from workbench.probe.child import serve; serve(*sys.argv[1:])"
#: How often the parent looks.
TICK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One check: `function` is ``module:name``; it gives (found, details) or raises Failed or Skipped.

    `next_step` and `cause_id` are of the FAIL that any other end of it is.
    """

    name: str
    function: str
    next_step: str
    cause_id: str
    arguments: dict[str, Any] = field(default_factory=dict)
    op: str | None = None


def run_tasks(
    tasks: Sequence[Task], *, limit_s: float, started: Callable[[str], None] = lambda name: None,
    environment: dict[str, str] | None = None, late: str = FAIL, stop: threading.Event | None = None,
) -> list[Step]:  # fmt: skip
    """One step for each task, in their order. A check that is not done after `limit_s` seconds is killed, with its
    child and all that this one started, and becomes a FAIL, or the outcome `late`. Setting `stop` ends it all at once,
    with what is done by then."""
    steps: list[Step] = []
    stop = stop or threading.Event()
    while len(steps) < len(tasks) and not stop.is_set():
        steps += _one_child(tasks[len(steps) :], limit_s, started, environment, late, stop)
    return steps


def _one_child(
    tasks: Sequence[Task], limit_s: float, started: Callable[[str], None], environment: dict[str, str] | None,
    late: str, stop: threading.Event,
) -> list[Step]:  # fmt: skip
    """What one child got done: at least one step, the last of them possibly the one that it died of."""
    with tempfile.TemporaryDirectory(prefix="workbench-probe-", ignore_cleanup_errors=True) as folder:
        order, results, output = (Path(folder) / name for name in ("tasks.json", "results", "output"))
        scratch = Path(folder) / "scratch"  # what a killed child leaves goes with it
        scratch.mkdir()
        order.write_text(json.dumps([[t.function, t.arguments] for t in tasks]), encoding="utf-8")
        results.touch()
        inherited = os.environ if environment is None else environment
        paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
        with open(output, "wb") as stream:
            child = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(order), str(results)],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
                env={**inherited, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(scratch)},
            )  # fmt: skip
        begun = time.monotonic()  # of the check that it is at
        is_late, seen = False, 0
        try:
            while child.poll() is None and not stop.is_set():
                if time.monotonic() - begun > limit_s:
                    is_late = True
                    break
                lines = _lines(results)
                for line in lines[seen:]:
                    begun = time.monotonic()
                    if "start" in line:
                        started(tasks[line["start"]].name)
                seen = len(lines)
                time.sleep(TICK_S)
        finally:
            # The whole group: a compiler that it started must not live on.
            _kill_group(child.pid)
            child.wait()
        lines = _lines(results)
        steps = [_step(tasks[n], line) for n, line in enumerate(line for line in lines if "outcome" in line)]
        if len(steps) < len(tasks) and not stop.is_set() and not (lines and "handed_back" in lines[-1]):
            steps.append(_dead(tasks[len(steps)], child.returncode, is_late, limit_s, late, output))
        return steps


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # all of it ended by itself
        return


def _lines(results: Path) -> list[dict[str, Any]]:
    """Complete lines only: the child may be writing the last one."""
    text = results.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _step(task: Task, line: dict[str, Any]) -> Step:
    is_fail = line["outcome"] == FAIL
    return Step(
        name=task.name, outcome=line["outcome"], found=line["found"], op=task.op, details=tuple(line["details"]),
        next_step=line["next_step"] or (task.next_step if is_fail else None),
        cause_id=(line["cause_id"] or task.cause_id) if is_fail else None, seconds=line["seconds"],
    )  # fmt: skip


def _dead(task: Task, code: int, is_late: bool, limit_s: float, late: str, output: Path) -> Step:
    """The step of a task during which the child ended."""
    last = last_lines(output.read_bytes().decode("utf-8", errors="replace"))
    if is_late:
        found = f"not finished after {limit_s:.0f} s and stopped"
        if late == SKIP:
            return Step(name=task.name, outcome=SKIP, found=found, op=task.op, seconds=limit_s)
        return Step(name=task.name, outcome=FAIL, found=found, next_step=task.next_step, cause_id="hangs", op=task.op,
                    details=last, seconds=limit_s)  # fmt: skip
    if code < 0:
        kind = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
        found, cause = f"the process was ended by {kind}", "crashes"
    else:
        found, cause = f"the process ended with exit code {code} before the check was done", "exits"
    return Step(
        name=task.name, outcome=FAIL, found=found, next_step=task.next_step, cause_id=cause, op=task.op, details=last,
    )  # fmt: skip


def last_lines(text: str) -> tuple[str, ...]:
    """The end of what a program wrote, empty lines left out."""
    lines = [line.rstrip() for line in text[-LAST_CHARACTERS:].splitlines() if line.strip()]
    return tuple(lines[-LAST_LINES:])


def serve(order: str, results: str) -> None:
    """The child: every task once, a line before and after each."""
    tasks = json.loads(Path(order).read_text(encoding="utf-8"))
    with open(results, "a", encoding="utf-8") as stream:

        def write(**line: Any) -> None:
            stream.write(json.dumps(line) + "\n")
            stream.flush()

        for number, (function, arguments) in enumerate(tasks):
            write(start=number)
            begun = time.monotonic()
            outcome, found, details, next_step, cause_id = _outcome(function, arguments)
            write(outcome=outcome, found=found, details=list(details), next_step=next_step, cause_id=cause_id,
                  seconds=time.monotonic() - begun)  # fmt: skip
            if "CUDA error" in found or "CUDA_ERROR" in found:
                # Such an error stays with the process: all that follows would fail of it.
                write(handed_back=True)
                break
    # What a vendor's library does when a process is taken down is no part of any check.
    sys.stdout.flush()
    os._exit(0)


def _outcome(function: str, arguments: dict[str, Any]) -> tuple[str, str, Sequence[str], str | None, str | None]:
    module, _, name = function.partition(":")
    try:
        found, details = getattr(importlib.import_module(module), name)(**arguments)
    except Skipped as skipped:
        return SKIP, str(skipped), (), skipped.next_step, None
    except Failed as failed:
        return FAIL, str(failed), failed.details, failed.next_step, failed.cause_id
    except BaseException as error:  # noqa: BLE001 - a library may raise anything, SystemExit too; all of it is told
        return FAIL, told(error), (), None, None
    return PASS, found, details, None, None


def told(error: BaseException) -> str:
    """An exception's type and text, with those of what caused it."""
    texts: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(f"{type(seen).__name__}: {seen}" if str(seen) else type(seen).__name__)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return one_line(", caused by ".join(texts))
