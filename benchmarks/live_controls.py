"""Seconds from a change of one control of notebook 01 to the new figure, for every setting of every control.

    python benchmarks/live_controls.py [--rounds 3]

One control is moved at a time, from the first look at the miniature and the notebook's own prompt, and moved back.
Computing, drawing and the SVG are measured, in seconds of the clock and of the processor (one thread); the browser's
part is not. The gate: the error of the first look, which is the safe policy's. Writes
benchmarks/results/live_controls.cpu.json.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat

import workbench
from workbench import bench, controls
from workbench.errors import WorkbenchError
from workbench.numerics import PRESETS
from workbench.report.parameters import parameters_cell, read_parameters
from workbench.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
NAME = "live_controls"
NOTEBOOK = ROOT / "notebooks" / "01_gate_overflow.ipynb"
#: Settings of the controls that take any value.
OTHERS = {"limit": (5.0, 80.0, 1000.0), "prompt": ("And the king said", "To be, or not to be\n" * 40)}
CONTROLS = ("exponent", "cumsum", "solver", "chunk", "site", "limit", "dtype", "layer", "head", "prompt")


def settings(live: controls.NumericsControls, name: str) -> list[object]:
    """What `name` can be set to besides what it is."""
    control = getattr(live, name)
    return [value for value in OTHERS.get(name) or control.options if value != control.value]


def measure(live: controls.NumericsControls, name: str) -> list[tuple[float, float, bool]]:
    """(seconds of the clock, of the processor, whether it was refused) of every setting of one control."""
    control, first, found = getattr(live, name), getattr(live, name).value, []
    live.site.value = "cumsum" if name == "limit" else controls.NO_CLAMP
    for value in settings(live, name):
        started, used = time.perf_counter(), time.process_time()
        control.value = value
        found.append((time.perf_counter() - started, time.process_time() - used, not live.figure.value))
        control.value = first
    return found


def rows_of(name: str, found: Sequence[tuple[float, float, bool]]) -> list[bench.Row]:
    said = [f"refused={sum(refused for _, _, refused in found)}"]
    drawn = [(wall, used) for wall, used, refused in found if not refused]
    rows = []
    for backend, samples in zip(("clock", "processor"), zip(*drawn, strict=True), strict=True):
        rows.append(bench.Row.of(f"change of {name}", backend, "s", samples, attested=said))
        rows.append(bench.Row(f"change of {name}, slowest", backend, "s", max(samples), 0.0, len(samples)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "data" / "miniature")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    bench.pin_threads(1)
    cell = parameters_cell(nbformat.read(NOTEBOOK, as_version=4), NOTEBOOK.stem)
    prompt = read_parameters(cell.source, NOTEBOOK.stem)["prompt"]
    model = workbench.load(arguments.checkpoint, dtype="float32")
    started = time.perf_counter()
    live = controls.NumericsControls(model, Tokenizer.from_directory(arguments.checkpoint), prompt)
    built = time.perf_counter() - started
    setting = {"dtype": live.dtype.value, "layer": live.layer.value, "head": live.head.value}
    error = float(live.lab.probe(prompt, PRESETS["safe"], **setting).errors["error"].max())
    started, used = time.perf_counter(), time.process_time()
    sweep = live.recorded()
    rows = [
        bench.Row("first look, made ready for every dtype", "clock", "s", built, 0.0, 1),
        bench.Row("recorded sweep", "clock", "s", time.perf_counter() - started, 0.0, 1),
        bench.Row("recorded sweep", "processor", "s", time.process_time() - used, 0.0, 1),
        bench.Row("recorded sweep", "size", "MB", len(sweep.page) / 1e6, 0.0, 1),
    ]
    for name in CONTROLS:
        rows += rows_of(name, [sample for _ in range(arguments.rounds) for sample in measure(live, name)])
    for row in rows:
        print(f"{row.case:40} {row.backend:10} {row.median:7.3f} {row.unit:3} IQR {row.iqr:.3f}, n {row.n}")
    correctness = bench.Correctness("relative error of the first look", error, 3e-6)
    print(bench.write_result(arguments.out, NAME, correctness, rows, project=ROOT))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
