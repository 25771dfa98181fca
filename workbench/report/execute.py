"""Running a notebook cell by cell in a kernel of this very interpreter, to the same bytes every time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from workbench import __version__, errors
from workbench.errors import InputError, WorkbenchError
from workbench.report.session import FINDINGS_FOLDER

PACKAGE_PARENT = Path(__file__).resolve().parent.parent.parent

#: One cell may take this long; a kernel that hangs must not hang the report for ever.
CELL_SECONDS = 1800


class ThisInterpreter(KernelSpecManager):
    """A kernel of this interpreter, whatever kernels the user has installed under the same name."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


class Client(NotebookClient):
    """Ends its kernel in every case, and stops when it is told to from the keyboard.

    The class above it takes SIGINT as a wish to end the kernel, and a cancelled cell as a dead kernel.
    """

    is_stopped = False

    @asynccontextmanager
    async def async_setup_kernel(self, **options: object) -> AsyncIterator[None]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop() -> None:
            self.is_stopped = True
            task.cancel()

        try:
            loop.add_signal_handler(signal.SIGINT, stop)
        except (NotImplementedError, RuntimeError):
            pass  # Windows, or not the main thread: the interrupt arrives as an exception or not at all
        try:
            await self.async_start_new_kernel(**options)
            await self.async_start_new_kernel_client()
            yield
        finally:
            if self.km is not None:
                await self._async_cleanup_kernel()


def execute(
    notebook: NotebookNode, *, name: str, folder: Path, findings_folder: Path, say: Callable[[str], None]
) -> NotebookNode:
    """Run every cell in `folder` and return the notebook with its outputs.

    `say` gets a line as each cell ends. An error in a cell that the workbench raised on purpose comes out
    as an InputError with the same message; any other as a WorkbenchError that names cell, kind and message.
    """
    code_cells = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    started: dict[int, float] = {}

    def on_start(cell: NotebookNode, cell_index: int) -> None:
        started[cell_index] = time.monotonic()

    def on_executed(cell: NotebookNode, cell_index: int, execute_reply: Mapping) -> None:
        seconds = time.monotonic() - started[cell_index]
        say(f"{name} [{code_cells.index(cell_index) + 1}/{len(code_cells)}] {cell.id} {seconds:.1f} s")

    with tempfile.TemporaryDirectory(prefix="workbench-report-") as scratch:
        said = Path(scratch) / "kernel-stderr"
        client = Client(
            notebook,
            km=AsyncKernelManager(
                kernel_spec_manager=ThisInterpreter(), connection_file=str(Path(scratch) / "connection.json")
            ),
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
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        except CellExecutionError as error:
            unseen = WorkbenchError(f"notebook {name}: {error.ename}: {error.evalue}")
            raise _cell_error(notebook, name) or unseen from error
        except CellTimeoutError as error:
            raise WorkbenchError(f"notebook {name}: a cell took longer than {CELL_SECONDS} s") from error
        except (DeadKernelError, RuntimeError) as error:
            if client.is_stopped:
                raise KeyboardInterrupt from None
            reason = last_words(said.read_text(errors="replace"))
            raise WorkbenchError(f"notebook {name}: its kernel ended or did not start: {reason}") from error
    shown = _cell_error(notebook, name)
    if shown is not None:  # the kernel went on after an object that could not be displayed
        raise shown
    return normalise(notebook)


def last_words(text: str) -> str:
    """The last line that a kernel wrote before it ended, its usual warning about transport left out."""
    lines = [line for line in text.splitlines() if line.strip() and "TCP without encryption" not in line]
    return lines[-1] if lines else "it said nothing, which is often a sign of too little memory"


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Take out what differs between two runs of the same notebook: times, addresses, and widgets.

    A widget is dead without the kernel that made it, its ids are random and its state holds times. The frames that it
    recorded take its place; of one that recorded none the text remains, and a view without an id, which tells a page
    that a control stood there.
    """
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            if WIDGET_VIEW in output.get("data", {}):
                output.data["text/plain"] = "interactive control"
                if output.data.get("text/html"):
                    del output.data[WIDGET_VIEW]
                else:
                    output.data[WIDGET_VIEW] = {}
            if "text/plain" in output.get("data", {}):
                output.data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", output.data["text/plain"])
    return notebook


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
        FINDINGS_FOLDER: str(findings_folder.resolve()),  # the kernel works in another folder
    }


def _cell_error(notebook: NotebookNode, name: str) -> WorkbenchError | None:
    """The error of the first cell that shows one, in one line; None where no cell does.

    Kind and message are those of the cell's own output: the kernel's reply knows neither where an object failed to
    show itself.
    """
    for cell in notebook.cells:
        for output in cell.outputs if cell.cell_type == "code" else ():
            if output.output_type != "error":
                continue
            kind, said = output.ename, output.evalue or "no message"
            raised = getattr(errors, kind, None)
            if isinstance(raised, type) and issubclass(raised, WorkbenchError):
                return InputError(f"{said} (notebook {name}, cell {cell.id})")
            return WorkbenchError(f"notebook {name}, cell {cell.id}: {kind}: {said} (workbench {__version__})")
    return None
