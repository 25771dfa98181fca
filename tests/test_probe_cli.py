"""`workbench probe`: a whole run on this machine, its JSON and exit codes, and options that cannot be meant."""

import json
import shutil
import subprocess
import time

import pytest
import torch
from shared_objects import MATMUL, build, needs_compiler

from workbench.cli import main
from workbench.kernels import Kernels, registry
from workbench.probe import FAIL, PASS, SKIP, Probe, Step, probing, register_bridges
from workbench.probe.bridges import Bridge

NAMES = ("torch", "device", "memory", "matmul float32", "matmul bfloat16", "matmul float16", "triangular solve",
         "cuBLAS", "cuSOLVER", "Triton", "C++ compiler", "nvcc", "torch.compile")  # fmt: skip
VERDICT = {"verdict", "where", "cause_id", "evidence", "ruled_out", "fix", "confidence"}


@pytest.fixture(autouse=True)
def own_registry_and_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for op, operation in list(registry.OPERATIONS.items()):
        monkeypatch.setitem(registry.OPERATIONS, op, operation)


@needs_compiler
def test_a_whole_run(tmp_path, capsys):
    lib = build(tmp_path / "lib", MATMUL, "libwhole.so")
    (tmp_path / "b.toml").write_text(
        '[[bridge]]\nname = "by_file"\nop = "linear"\nsymbol = "vendor::matmul"\ndtypes = ["float32"]\n'
        'signature = ["float const*", "float const*", "float*", "int", "int", "int"]\n'
        'arguments = ["x", "weight", "y", "rows", "outputs", "features"]\n', encoding="utf-8",
    )  # fmt: skip
    code = main(["probe", "--quick", "--search", str(lib.parent), "--bridge", str(tmp_path / "b.toml"), "--json",
                 str(tmp_path / "probe.json")])  # fmt: skip
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "probe.json").read_text(encoding="ascii"))
    steps = {step["name"]: step for step in content["steps"]}
    assert tuple(steps)[: len(NAMES)] == NAMES and VERDICT <= set(content)
    for name in ("memory", "matmul float32", "matmul bfloat16", "matmul float16", "triangular solve", "C++ compiler",
                 "bridge to torch's mm", "bridge by_file"):  # fmt: skip
        assert steps[name]["outcome"] == PASS, steps[name]
        assert f"PASS  {name}: " in out
    assert steps["torch.compile"] | {"seconds": 0} == {
        "name": "torch.compile", "outcome": SKIP, "found": "left out by --quick", "next_step": None, "cause_id": None,
        "op": None, "details": [], "seconds": 0,
    }  # fmt: skip
    assert content["registered"] == ["linear=torch_mm_bridge", "linear=by_file"]
    assert "by_file" in registry.OPERATIONS["linear"].backends
    assert code == int(any(step["outcome"] == FAIL for step in content["steps"]))


def test_a_vendor_that_is_missing_is_a_fault(monkeypatch, capsys):
    import workbench.probe.vendor_steps as vendor_steps

    monkeypatch.setattr(probing, "run_tasks", lambda tasks, **_: [_passed(task) for task in tasks])
    monkeypatch.setattr(vendor_steps.VendorSteps, "own_bridge", lambda self: _passed(None))
    assert main(["probe", "--quick", "--vendor", "ixformer", "--json", "-"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["cause_id"] == "vendor_absent" and content["verdict"].startswith("ixformer fails: not here")
    assert content["fix"].startswith("name the folder")


def _passed(task):
    return Step(name="own" if task is None else task.name, outcome=PASS, found="fine")


def test_a_torch_that_cannot_be_imported_ends_the_probe(monkeypatch, capsys):
    broken = Step(name="torch", outcome=FAIL, found="OSError: libcusolver.so.11", next_step="reinstall", cause_id="x")
    monkeypatch.setattr(probing, "run_tasks", lambda tasks, **_: [broken, *map(_passed, tasks[1:])])
    assert main(["probe"]) == 1
    assert "torch fails: OSError: libcusolver.so.11 (0 PASS, 1 FAIL, 0 SKIP)" in capsys.readouterr().out


def test_torch_compile_has_what_is_left(monkeypatch):
    """The whole stays below 20 seconds: a slow start leaves torch.compile less time, and not done is no fault."""
    seen = {}

    def run_tasks(tasks, *, limit_s, started=None, late=FAIL, stop=None):
        if tasks[0].name == "torch":
            time.sleep(0.2)
        seen[tasks[0].name] = (limit_s, late)
        if late == SKIP:
            return [Step(name=tasks[0].name, outcome=SKIP, found="not finished after 2 s and stopped")]
        return [_passed(task) for task in tasks]

    import workbench.probe.vendor_steps as vendor_steps

    monkeypatch.setattr(probing, "run_tasks", run_tasks)
    monkeypatch.setattr(vendor_steps.VendorSteps, "probed", lambda self, *_: [])
    result = probing.probe()
    limit_s, late = seen["torch.compile"]
    assert limit_s < probing.COMPILED_BY_S - 0.2 < 20 and late == SKIP
    (step,) = [step for step in result.steps if step.name == "torch.compile"]
    assert step.outcome == SKIP and "--patience" in step.next_step and result.verdict.exit_code == 0
    probing.probe(patience_s=77)
    assert {limit for limit, _ in seen.values()} == {77}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--search", "/no/such/folder"], "--search /no/such/folder: expected a folder or a library file"),
        (["--patience", "0"], "--patience: expected a finite number"), (["--patience", "nan"], "--patience"),
        (["--patience", "soon"], "invalid float value"), (["--symbol", "f"], "expected with --vendor"),
        (["--vendor", "unheard_of"], "expected one of ixformer"),
        (["--vendor", "a b", "--symbol", "f"], "--vendor 'a b'"),
        (["--bridge", "/no/file.toml"], "/no/file.toml: No such file"), (["--device"], "unrecognized"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant(monkeypatch, capsys, arguments, said):
    def none_runs(tasks, **_):
        raise AssertionError("nothing may be run before the options are checked")

    monkeypatch.setattr(probing, "run_tasks", none_runs)
    assert main(["probe", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error


def test_text_shows_details_and_the_next_step(monkeypatch, capsys):
    import workbench.probe as package

    steps = (
        Step(name="memory", outcome=PASS, found="fine", details=("a " * 90,)),
        Step(name="C++ compiler", outcome=FAIL, found="compiling fails", next_step="mend it", cause_id="compile_fails",
             details=("error: no such file",)),
    )  # fmt: skip
    monkeypatch.setattr(package, "probe", lambda **_: Probe(steps, "cpu", (), 1.5))
    assert main(["probe"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  C++ compiler: compiling fails\n      | error: no such file\n      next: mend it\n" in out
    assert "cpu, 1.5 s: C++ compiler fails: compiling fails (1 PASS, 1 FAIL, 0 SKIP)\nnext: mend it" in out
    assert max(map(len, out.splitlines())) <= 120


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.gpu
@needs_gpu
def test_a_whole_run_on_a_gpu():
    result = probing.probe()
    steps = {step.name: step for step in result.steps}
    assert not [step for step in result.steps if step.outcome == FAIL], result.verdict
    assert result.device == "cuda" and "compute capability" in steps["device"].found and result.seconds < 20
    for name in NAMES[2:9]:
        assert steps[name].outcome == PASS, steps[name]
    for name in ("Triton", "nvcc", "torch.compile", "bridge to torch's mm"):
        assert steps[name].outcome in (PASS, SKIP), steps[name]


CUDA_MATMUL = """
namespace vendor {
__global__ void rows_times(const float* x, const float* w, float* y, int rows, int outputs, int features) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * outputs) return;
    float sum = 0;
    for (int i = 0; i < features; ++i) sum += x[at / outputs * features + i] * w[at % outputs * features + i];
    y[at] = sum;
}
int matmul(const float* x, const float* w, float* y, int rows, int outputs, int features, cudaStream_t stream) {
    rows_times<<<(rows * outputs + 127) / 128, 128, 0, stream>>>(x, w, y, rows, outputs, features);
    return (int)cudaGetLastError();
}
}
"""


@pytest.mark.gpu
@needs_gpu
@needs_compiler
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
def test_a_cuda_library_is_bridged_on_the_stream_of_the_caller(tmp_path):
    (tmp_path / "v.cu").write_text(CUDA_MATMUL, encoding="utf-8")
    library = tmp_path / "libcudavendor.so"
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", str(tmp_path / "v.cu"), "-o", str(library)], check=True)
    bridge = Bridge(
        name="cuda_loops", op="linear", symbol="vendor::matmul", dtypes=("float32",), devices=("cuda",), returns="int",
        signature=("float const*", "float const*", "float*", "int", "int", "int", "CUstream_st*"), is_status=True,
        arguments=("x", "weight", "y", "rows", "outputs", "features", "stream"), library=str(library),
    )  # fmt: skip
    assert register_bridges([bridge], device="cuda") == ["linear=cuda_loops"]
    x, weight = torch.randn(64, 128, device="cuda"), torch.randn(32, 128, device="cuda")
    kernels = Kernels("linear=cuda_loops")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)  # what the bridge reads is written after it, on this stream
        late = x * 2
        found = kernels.linear(late, weight)
    torch.cuda.synchronize()
    assert (found - 2 * x @ weight.T).norm() < 1e-4 * found.norm()
    assert [row.backend for row in kernels.attestation()] == ["cuda_loops"]
