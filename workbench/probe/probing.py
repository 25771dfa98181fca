"""The probe: all steps in their order, and what runs beside what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.analysis.verdict import Verdict
from workbench.errors import BackendError
from workbench.probe.child import Task, run_tasks
from workbench.probe.libraries import Place, check_search, find_libraries
from workbench.probe.steps import PASS, SKIP, Step, verdict_of
from workbench.probe.vendor_names import check_vendor

if TYPE_CHECKING:
    from workbench.probe.bridges import Bridge

#: Seconds that one check may take; when, from the start, torch.compile is stopped: the whole is to stay below 20.
PATIENCE_S, COMPILED_BY_S = 30.0, 16.0
#: Folders that a step shows.
SHOWN = 8
#: Where the checks are.
CHECKS = "workbench.probe.device"


@dataclass(frozen=True, slots=True)
class Probe:
    """All steps, the device that was probed, and the backends that bridges became, as ``op=name``."""

    steps: tuple[Step, ...]
    device: str
    registered: tuple[str, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.steps)


def probe(
    *, vendor: str | None = None, symbols: Sequence[str] = (), search: Sequence[Path] = (),
    bridges: Sequence[Bridge] = (), quick: bool = False, patience_s: float | None = None,
    started: Callable[[str], None] = lambda name: None,
) -> Probe:  # fmt: skip
    """Probe this machine, and the libraries of `vendor` with `symbols` to look for beside the known ones.

    `search` are folders and library files to look in; `bridges` declarations to build, try and register; `quick` leaves
    out torch.compile; `patience_s` is what one check may take; `started` hears the name of each step as it begins.
    Bridges that pass are backends of this process afterwards. Raises InputError for options that cannot be meant.
    """
    begun = time.monotonic()
    check_search(search)
    check_vendor(vendor, symbols)
    limit_s = patience_s or PATIENCE_S
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=3) as pool, _ended_by(stop):
        looking = pool.submit(find_libraries, search)
        # One child for both, since importing torch is most of what they cost.
        has_torch, gpu = run_tasks([_torch_imports(), _check("device", "gpu", {})], limit_s=limit_s, started=started)
        places, unreadable = looking.result()
        if has_torch.outcome != PASS:
            return Probe((has_torch,), "none", (), time.monotonic() - begun)
        device = "cuda" if gpu.outcome == PASS else "cpu"
        compile_limit_s = patience_s or max(COMPILED_BY_S - (time.monotonic() - begun), 1.0)
        compiling = None if quick else pool.submit(_compiled, device, compile_limit_s, stop)
        checking = pool.submit(
            run_tasks, _checks(device, places), limit_s=limit_s, started=started, stop=stop
        )  # fmt: skip
        # It imports torch into this process, which the check above has shown not to end it.
        from workbench.probe.vendor_steps import VendorSteps

        own = VendorSteps(device, places, search, limit_s, started)
        more = own.probed(vendor, tuple(symbols), tuple(bridges))
        steps = [has_torch, gpu, *checking.result()]
        steps.append(
            Step(name="torch.compile", outcome=SKIP, found="left out by --quick") if compiling is None
            else compiling.result()
        )  # fmt: skip
        steps += [_unreadable(unreadable)] if unreadable else []
    return Probe((*steps, *more), device, tuple(own.registered), time.monotonic() - begun)


def register_bridges(
    bridges: Sequence[Bridge], *, search: Sequence[Path] = (), device: str = "cpu", patience_s: float = PATIENCE_S
) -> list[str]:
    """Build, try and register bridges and nothing else: a process that names their backends does this first.

    Gives ``op=name`` of each. Raises BackendError with what the step found and what to do for one that is no backend
    afterwards, InputError for a folder to search that is not there.
    """
    from workbench.probe.vendor_steps import VendorSteps

    own = VendorSteps(device, find_libraries(search)[0] if search else [], search, patience_s, lambda name: None)
    for step in own.registered_bridges(bridges):
        if step.outcome != PASS:
            told = "; ".join([step.found, *step.details])
            raise BackendError(f"{step.name}: {told}; next: {step.next_step}")
    return own.registered


def _torch_imports() -> Task:
    return Task(
        name="torch", function="workbench.probe.bindings:imports", arguments={"modules": ["torch"]},
        next_step="reinstall torch; a missing .so in the text is a library that this build of it needs",
        cause_id="torch_broken",
    )  # fmt: skip


def _check(name: str, function: str, arguments: dict[str, Any], op: str | None = None) -> Task:
    """A check of `device`, for which any error is a fault of what is installed."""
    steps = {
        "triangular": "take a solver that needs no library: a policy with another `solver` (docs/policies.md)",
        "cusolver": "install the cuSOLVER that this torch was built for; without it take a policy with another "
        "`solver`",
        "matmul": "run in another dtype (--dtype), or another backend of op linear",
        "triton": "install the Triton that this torch asks for; backends named triton_* cannot run",
        "nvcc": "install the CUDA toolkit of the driver's release; backends named cuda_* cannot be built",
        "torch_compile": "set TORCH_COMPILE_DISABLE=1, or repair the compiler that the text names",
        "extension": "repair the C++ compiler, or name another in $CXX",
    }
    return Task(
        name=name, function=f"{CHECKS}:{function}", arguments=arguments, op=op, cause_id=f"{function}_fails",
        next_step=steps.get(function, "reinstall torch and the driver for this card; the text is what they say"),
    )  # fmt: skip


def _checks(device: str, places: Sequence[Place]) -> list[Task]:
    on = {"device": device}
    return [
        _check("memory", "memory", on),
        *(_check(f"matmul {dtype}", "matmul", {**on, "dtype": dtype}, "linear") for dtype in
          ("float32", "bfloat16", "float16")),
        _check("triangular solve", "triangular", on, "gated_delta_rule"),
        _check("cuBLAS", "cublas", {**on, "where": _first(places, "libcublas.so")}),
        _check("cuSOLVER", "cusolver", {**on, "where": _first(places, "libcusolver.so")}),
        _check("Triton", "triton", on),
        _check("C++ compiler", "extension", {}),
        _check("nvcc", "nvcc", on),
    ]  # fmt: skip


@contextmanager
def _ended_by(stop: threading.Event) -> Iterator[None]:
    """Stops what runs beside when something is raised, so that Ctrl-C does not wait for it."""
    try:
        yield
    except BaseException:
        stop.set()
        raise


def _compiled(device: str, limit_s: float, stop: threading.Event) -> Step:
    task = _check("torch.compile", "torch_compile", {"device": device})
    stopped = Step(name=task.name, outcome=SKIP, found="stopped")
    (step,) = run_tasks([task], limit_s=limit_s, late=SKIP, stop=stop) or [stopped]
    if step.outcome == SKIP and step.found.startswith("not finished"):
        return replace(step, next_step="give it more time with --patience SECONDS")
    return step


def _first(places: Iterable[Place], start: str) -> str | None:
    return next((str(place.path) for place in places if place.path.name.startswith(start)), None)


def _unreadable(folders: Sequence[str]) -> Step:
    return Step(name="folders", outcome=SKIP, found=f"{len(folders)} cannot be read, nothing of them is known",
                next_step="run as a user who may read them", details=tuple(folders[:SHOWN]))  # fmt: skip
