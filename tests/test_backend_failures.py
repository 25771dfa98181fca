"""Faults put into every backend of every op: an import, a link, a compilation, a run. Each reaches the user as it is.

The faults are real: a module that raises, a shared object with a symbol that nobody has, source that does not compile.
"""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from test_attestation import CALLS

from workbench.errors import BackendError, BackendFailure
from workbench.kernels import Kernels, registry
from workbench.kernels.registry import OPERATIONS, Operation
from workbench.kernels.requirements import Requires, forget_symbols

BACKENDS = [(op, name) for op, operation in OPERATIONS.items() for name in operation.backends]

#: Ops of one automatic backend, whose refusal leaves none.
ALONE = ("rms_norm", "gated_rms_norm", "gdn_decode")

IMPORT = """
try:
    import vendor_base_that_nobody_has
except ImportError as error:
    raise RuntimeError("vendor needs driver 4.1, found 3.2") from error
"""
LINK = """
import ctypes
ctypes.CDLL({library!r}, mode=2)
"""
COMPILE = """
import subprocess
def build():
    command = [{compiler!r}, "-x", "c", "-c", {source!r}, "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("extension does not compile: " + done.stderr)
def run(*arguments, **named):
    build()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Modules with one fault each, importable by name."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to build a shared object with")
    folder = tmp_path_factory.mktemp("faults")
    source, library = folder / "half.c", folder / "libhalf.so"
    source.write_text("extern int vendor_only_symbol(void); int run(void) { return vendor_only_symbol(); }\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    wrong = folder / "wrong.c"
    wrong.write_text("int run(void) { return vendor_type_that_nobody_declared; }\n")
    (folder / "fault_import.py").write_text(IMPORT)
    (folder / "fault_link.py").write_text(LINK.format(library=str(library)))
    (folder / "fault_compile.py").write_text(COMPILE.format(compiler=compiler, source=str(wrong)))
    (folder / "fault_compile_at_import.py").write_text(
        COMPILE.format(compiler=compiler, source=str(wrong)) + "build()\n"
    )
    sys.path.insert(0, str(folder))
    forget_symbols()
    yield folder
    sys.path.remove(str(folder))
    forget_symbols()


def changed(monkeypatch, op: str, name: str, **fields) -> None:
    """The registry with one backend changed, and first of the automatic order."""
    operation = OPERATIONS[op]
    backends = dict(operation.backends)
    backends[name] = replace(backends[name], **fields)
    table = dict(OPERATIONS) | {
        op: Operation(op, backends, lambda call: (name, *(n for n in operation.automatic_order(call) if n != name)))
    }
    monkeypatch.setattr(registry, "OPERATIONS", table)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("fault_import", "RuntimeError: vendor needs driver 4.1, found 3.2, caused by ModuleNotFoundError: No module "
         "named 'vendor_base_that_nobody_has'"),
        ("fault_link", "undefined symbol: vendor_only_symbol"),
        ("fault_compile_at_import", "vendor_type_that_nobody_declared"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_what_fails_before_the_call(folder, monkeypatch, op, name, module, text):
    changed(monkeypatch, op, name, requires=Requires(symbols=(f"{module}:run",)), supports=lambda call: None)
    with pytest.raises(BackendError) as caught:
        CALLS[op](Kernels({op: name}))
    assert text in str(caught.value) and f"op {op}: backend {name} was asked for" in str(caught.value)
    kernels = Kernels()
    if op in ALONE and name in OPERATIONS[op].automatic_order(None):
        with pytest.raises(BackendError, match="no backend can serve") as caught:
            CALLS[op](kernels)
        assert text in str(caught.value)
        return
    CALLS[op](kernels)  # another serves, and the refusal is on record
    (row,) = [row for row in kernels.attestation() if row.op == op]
    assert row.backend != name and row.refused[0][0] == name and text in row.refused[0][1]


def out_of_order(*_arguments, **_named):
    raise OSError("device lost")


def of_the_compiler(*arguments, **named):
    import fault_compile

    return fault_compile.run(*arguments, **named)


@pytest.mark.parametrize(
    ("run", "text"),
    [(out_of_order, "OSError: device lost"), (of_the_compiler, "vendor_type_that_nobody_declared")],
    ids=["run", "compile"],
)
@pytest.mark.parametrize(("op", "name"), BACKENDS)
def test_what_fails_at_the_call(folder, monkeypatch, op, name, run, text):
    changed(monkeypatch, op, name, run=run, requires=Requires(), supports=lambda call: None)
    for requested in ({op: name}, None):
        with pytest.raises(BackendFailure) as caught:
            CALLS[op](Kernels(requested))
        assert text in str(caught.value) and f"op {op}: backend {name} failed at call" in str(caught.value)
