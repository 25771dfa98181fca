"""Running a notebook cell by cell in a kernel of this very interpreter, to the same bytes every time."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from workbench import __version__
from workbench.errors import InputError, WorkbenchError
from workbench.report.session import FINDINGS_FOLDER

if TYPE_CHECKING:
    from nbformat import NotebookNode

PACKAGE_PARENT = Path(__file__).resolve().parent.parent.parent

#: One cell may take this long; a kernel that hangs must not hang the report for ever.
CELL_SECONDS = 1800


def execute(
    notebook: NotebookNode, *, name: str, folder: Path, findings_folder: Path, say: Callable[[str], None]
) -> NotebookNode:
    """Run every cell in `folder` and return the notebook with its outputs.

    `say` gets a line as each cell ends. An error in a cell that the workbench raised on purpose comes out
    as an InputError with the same message; any other as a WorkbenchError that names cell, kind and message.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    code_cells = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    started: dict[int, float] = {}

    def on_start(cell: NotebookNode, cell_index: int) -> None:
        started[cell_index] = time.monotonic()

    def on_executed(cell: NotebookNode, cell_index: int, execute_reply: Mapping) -> None:
        seconds = time.monotonic() - started[cell_index]
        say(f"{name} [{code_cells.index(cell_index) + 1}/{len(code_cells)}] {cell.id} {seconds:.1f} s")

    with tempfile.TemporaryDirectory(prefix="workbench-report-") as scratch:
        said = Path(scratch) / "kernel-stderr"
        client = NotebookClient(
            notebook,
            km=_kernel_manager(),
            timeout=CELL_SECONDS,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
            extra_arguments=["--HistoryManager.enabled=False"],
            on_cell_start=on_start,
            on_cell_executed=on_executed,
        )
        try:
            with open(said, "wb") as stderr:
                client.execute(env=_environment(Path(scratch), findings_folder), stderr=stderr)
        except CellExecutionError as error:
            raise _cell_error(notebook, name, error) from error
        except CellTimeoutError as error:
            raise WorkbenchError(f"notebook {name}: a cell took longer than {CELL_SECONDS} s") from error
        except (DeadKernelError, RuntimeError) as error:
            last = [line for line in said.read_text(errors="replace").splitlines() if line.strip()][-1:]
            reason = last[0] if last else "it said nothing, which is often a sign of too little memory"
            raise WorkbenchError(f"notebook {name}: its kernel ended or did not start: {reason}") from error
    return normalise(notebook)


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Take out what differs between two runs of the same notebook: times, and addresses of objects."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            if "text/plain" in output.get("data", {}):
                output.data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", output.data["text/plain"])
    return notebook


def _kernel_manager():
    """A kernel of this interpreter, whatever kernels the user has installed under the same name."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=command, display_name="Python 3", language="python")

    return AsyncKernelManager(kernel_spec_manager=ThisInterpreter())


def _environment(scratch: Path, findings_folder: Path) -> dict[str, str]:
    """Variables of the kernel: pinned threads, fixed hashes and dates, no settings of the user's IPython."""
    paths = [str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MPLCONFIGDIR": str(scratch / "matplotlib"),
        **os.environ,
        "IPYTHONDIR": str(scratch / "ipython"),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": "0",
        "TOKENIZERS_PARALLELISM": "false",
        FINDINGS_FOLDER: str(findings_folder),
    }


def _cell_error(notebook: NotebookNode, name: str, error) -> WorkbenchError:
    """The error of the cell that failed, in one line."""
    failed = next(
        cell.id
        for cell in notebook.cells
        if cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
    )
    from workbench import errors

    message = f"notebook {name}, cell {failed}: {error.ename}: {error.evalue}"
    raised = getattr(errors, error.ename, None)
    if isinstance(raised, type) and issubclass(raised, WorkbenchError):
        return InputError(f"{error.evalue} (notebook {name}, cell {failed})")
    return WorkbenchError(f"{message} (workbench {__version__})")
