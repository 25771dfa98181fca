"""Checks of the device, of torch on it, and of what compiles for it. Each runs in a process of its own (`child`).

A result is compared with the same computation in float64 on the CPU: an operation that ends without an error and with
the wrong numbers fails.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from workbench.probe import compiler
from workbench.probe.steps import Failed, Skipped

#: Side of the matrices of a product.
SIDE = 128
#: Bytes written and read back.
TOUCHED = 64 << 20
#: No program that is asked for its version is waited for longer.
PATIENCE_S = 30

Answer = tuple[str, list[str]]


def _no_gpu() -> str:
    """Why there is no CUDA device; the text of torch where it has one."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"no CUDA device: {error}"
    return "no CUDA device: torch finds none"


def gpu() -> Answer:
    """Name, compute capability, driver; FAIL where the system has a device and torch cannot use it."""
    if torch.cuda.is_available():
        seen = torch.cuda.get_device_properties(0)
        more = f", first of {torch.cuda.device_count()}" if torch.cuda.device_count() > 1 else ""
        return (f"{seen.name}{more}, compute capability {seen.major}.{seen.minor}, {seen.multi_processor_count} "
                f"multiprocessors, torch {torch.__version__} for CUDA {torch.version.cuda}"), []  # fmt: skip
    nodes = sorted(str(p) for p in Path("/dev").glob("*") if p.name.startswith(("nvidia0", "iluvatar0", "kfd")))
    if nodes:
        raise Failed(f"{_no_gpu()}, and the system has {nodes[0]}", "install the torch that the card's vendor builds, "
                     "and a driver that fits it (`nvidia-smi` or the vendor's own tool tells its version)",
                     "device_unusable")  # fmt: skip
    raise Skipped(_no_gpu(), "run on the machine with the card; the CPU is probed here")


def memory(device: str) -> Answer:
    """Memory of the device, and some of it written and read back."""
    values = torch.arange(TOUCHED // 4, dtype=torch.int32, device=device)
    total = int(values.sum(dtype=torch.int64))
    expected = (TOUCHED // 4) * (TOUCHED // 4 - 1) // 2
    if total != expected:
        raise Failed(f"{TOUCHED >> 20} MiB written and read back sum up to {total}, expected {expected}",
                     "test the card's memory with the vendor's tool before anything else", "memory_wrong")  # fmt: skip
    if device == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        free, pages = torch.cuda.mem_get_info()
    return f"{free / 2**30:.1f} of {pages / 2**30:.1f} GiB free, {TOUCHED >> 20} MiB written and read back", []


def matmul(device: str, dtype: str) -> Answer:
    """A product in a dtype, against float64 on the same rounded values."""
    kind = getattr(torch, dtype)
    seed = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, generator=seed).to(kind) for _ in "ab")
    # The largest sum is near 50, its square far below what float16 holds. fp32 may run as TF32 where that is allowed.
    torch.backends.cuda.matmul.allow_tf32 = False
    found = a.to(device) @ b.to(device)
    if found.dtype != kind:
        raise Failed(f"a product of {dtype} gives {found.dtype}", "report it to who built this torch", "matmul_wrong")
    error = _error(found, a.double() @ b.double())
    # One rounding of the result is most of what a 16-bit product may be off by: sums are of 32 bits or better.
    limit = (4 if kind.itemsize == 4 else 1) * torch.finfo(kind).eps
    if not error <= limit:
        raise Failed(f"a {dtype} product of {SIDE} x {SIDE} is off by {error:.3g} relative, at most {limit:.3g} "
                     "expected", f"run in another dtype; try {dtype} in the vendor's own examples",
                     "matmul_wrong")  # fmt: skip
    return f"{SIDE} x {SIDE} right, relative error {error:.2g} of at most {limit:.2g}", []


def triangular(device: str) -> Answer:
    """The solve that the chunked gated delta rule makes: unit lower triangular, batched."""
    seed = torch.Generator().manual_seed(0)
    lower = torch.eye(64) + torch.randn(4, 64, 64, generator=seed).tril(-1) / 16
    right = torch.randn(4, 64, 32, generator=seed)
    solved = torch.linalg.solve_triangular(lower.to(device), right.to(device), upper=False, unitriangular=True)
    error = _error(lower.double() @ solved.cpu().double(), right)
    if not error <= 1e-5:
        raise Failed(f"4 systems of 64 rows leave a residual of {error:.3g}, at most 1e-05 expected",
                     "take the solver of rows or blocks: `--policy` with solver `rows` or `blocked`",
                     "solve_wrong")  # fmt: skip
    return f"4 systems of 64 rows solved, residual {error:.2g}", []


def cusolver(device: str, where: str | None) -> Answer:
    """A factorisation that cuSOLVER makes."""
    if device == "cpu":
        raise Skipped(f"{_no_gpu()}; libcusolver: {where or 'not found'}")
    if where is not None:
        ctypes.CDLL(where)
    torch.backends.cuda.preferred_linalg_library("cusolver")
    seed = torch.Generator().manual_seed(0)
    a = torch.randn(64, 64, generator=seed, dtype=torch.float64)
    a = a @ a.T + torch.eye(64, dtype=torch.float64)
    factor = torch.linalg.cholesky(a.to(device)).cpu()
    error = _error(factor @ factor.T, a)
    if not error <= 1e-12:
        raise Failed(f"a Cholesky factor of 64 x 64 is off by {error:.3g}, at most 1e-12 expected",
                     "reinstall the CUDA libraries that this torch was built for", "solve_wrong")  # fmt: skip
    return f"Cholesky factor of 64 x 64 right, error {error:.2g}; {where or 'loaded by torch'}", []


def cublas(device: str, where: str | None) -> Answer:
    """A batched product with strides, which is a call of cuBLAS."""
    if device == "cpu":
        raise Skipped(f"{_no_gpu()}; libcublas: {where or 'not found'}")
    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.cuda.current_blas_handle() == 0:
        raise Failed("cuBLAS gives no handle", "reinstall the CUDA libraries that this torch was built for",
                     "library_broken")  # fmt: skip
    seed = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 48, 64, generator=seed), torch.randn(6, 32, 64, generator=seed)
    found = torch.bmm(a.to(device), b.to(device).mT)
    error = _error(found, a.double() @ b.double().mT)
    if not error <= 1e-6:
        raise Failed(f"6 products of 48 x 64 and 64 x 32 are off by {error:.3g}, at most 1e-06 expected",
                     "reinstall the CUDA libraries that this torch was built for", "matmul_wrong")  # fmt: skip
    library = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
    return f"6 products of 48 x 64 and 64 x 32 right, error {error:.2g}; torch prefers {library}", []


def _error(found: Tensor, expected: Tensor) -> float:
    """Relative error as norms, in float64 on the CPU; NaN where something is not finite."""
    expected = expected.double()
    return float((found.cpu().double() - expected).norm() / expected.norm())


def triton(device: str) -> Answer:
    """A small kernel of Triton, compiled and run."""
    if importlib.util.find_spec("triton") is None:
        raise Skipped("package triton is not installed", "install the extra `gpu`; a CUDA build of torch brings it")
    version = getattr(importlib.import_module("triton"), "__version__", "unknown")
    if device == "cpu":
        raise Skipped(f"version {version} imports; {_no_gpu()} to run a kernel on")
    from workbench.probe.triton_kernel import scaled

    x = torch.arange(1000, dtype=torch.float32, device=device)
    found = scaled(x, 3.0)
    if not torch.equal(found.cpu(), torch.arange(1000, dtype=torch.float32) * 3):
        raise Failed(f"version {version}: a kernel that scales by 3 gives {found[:4].tolist()} for 0, 1, 2, 3",
                     "install the Triton that this torch asks for", "kernel_wrong")  # fmt: skip
    return f"version {version}, a kernel compiled and run", []


def extension() -> Answer:
    """A C++ source compiled, linked, loaded and called."""
    command = compiler.find_compiler()
    if command is None:
        raise Skipped(compiler.no_compiler(), "install g++ or clang, or name one in $CXX; bridges need it")
    source = 'extern "C" double workbench_extension(const double* x, long n) {\n    double sum = 0;\n' \
             "    for (long i = 0; i < n; ++i) sum += x[i];\n    return sum;\n}\n"  # fmt: skip
    built = _built(source, command, "the C++ compiler")
    function = ctypes.CDLL(str(built.path)).workbench_extension
    function.restype = ctypes.c_double
    x = torch.arange(100, dtype=torch.float64)
    found = function(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(100))
    if found != 4950:
        raise Failed(f"a sum of 0 to 99 gives {found}, expected 4950", f"check {command[0]}: it compiles for another "
                     "machine or ABI than this Python's", "kernel_wrong")  # fmt: skip
    version = compiler.compiler_version(tuple(command)).splitlines()[0]
    return f"{version}: {_how(built)}, called, right", []


def nvcc(device: str) -> Answer:
    """A CUDA source compiled for the device that is here, and run on it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    of_home = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    program = of_home or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if program is None:
        raise Skipped("no nvcc: neither on the PATH nor in $CUDA_HOME/bin nor in /usr/local/cuda/bin",
                      "install the CUDA toolkit to compile kernels in CUDA C++; Triton needs none")  # fmt: skip
    done = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace", timeout=PATIENCE_S)
    lines = [line for line in done.stdout.splitlines() if "release" in line]
    if done.returncode or not lines:
        said = (done.stdout + done.stderr).strip()[-300:]
        raise Failed(f"{program} --version ended with code {done.returncode}: {said}",
                     "reinstall the CUDA toolkit", "compiler_broken")  # fmt: skip
    if compiler.find_compiler() is None:
        raise Skipped(f"{program} is here, and it needs a C++ compiler of the system: {compiler.no_compiler()}",
                      "install g++ or clang")  # fmt: skip
    release = lines[0].partition("release ")[2].partition(",")[0]
    mixed = torch.version.cuda is not None and torch.version.cuda.split(".")[0] != release.split(".")[0]
    note = f"; torch is built for CUDA {torch.version.cuda}" if mixed else ""
    source = """
__global__ void scale(const float* x, float* y, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = 3 * x[i];
}
extern "C" int workbench_scale(const float* x, float* y, long n) {
    scale<<<(n + 127) / 128, 128>>>(x, y, n);
    int code = (int)cudaGetLastError();
    return code ? code : (int)cudaDeviceSynchronize();
}
"""
    flags = ["-shared", "-O1", "-Xcompiler", "-fPIC", "-cudart", "static"]
    if device != "cpu":
        major, minor = torch.cuda.get_device_capability()
        flags.append(f"-arch=sm_{major}{minor}")
    built = _built(source, [program], "nvcc", flags=flags, suffix=".cu")
    if device == "cpu":
        return f"release {release}{note}: {_how(built)}; not run: {_no_gpu()}", []
    x = torch.arange(1000, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    torch.cuda.synchronize()
    code = ctypes.CDLL(str(built.path)).workbench_scale(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(1000)
    )
    if code or not torch.equal(y, 3 * x):
        raise Failed(f"release {release}{note}: a kernel that scales by 3 ends with CUDA's code {code} and gives "
                     f"{y[:4].tolist()} for 0, 1, 2, 3", "install the toolkit of the CUDA release that torch and the "
                     "driver are for", "kernel_wrong")  # fmt: skip
    return f"release {release}{note}: {_how(built)}, run, right", []


def _built(
    source: str, command: list[str], what: str, *, flags: list[str] | None = None, suffix: str = ".cpp"
) -> compiler.Built:
    try:
        return compiler.build(source, command, suffix=suffix, **({} if flags is None else {"flags": flags}))
    except compiler.BuildError as error:
        raise Failed(str(error), f"read the compiler's lines; repair {what}, or name another ($CXX, $CUDA_HOME)",
                     "link_fails" if error.is_link else "compile_fails", error.lines) from error  # fmt: skip


def _how(built: compiler.Built) -> str:
    how = "from the cache" if built.was_cached else f"compiled and linked in {built.seconds:.1f} s"
    return how if built.note is None else f"{how} ({built.note})"


def torch_compile(device: str) -> Answer:
    """A function through torch.compile, with a cold cache of its own, against the same function without."""
    command = compiler.find_compiler()
    if device == "cpu" and command is None:
        raise Skipped(f"{compiler.no_compiler()}, which torch.compile needs on a CPU", "install g++ or clang")
    # Pools of processes, precompiled headers and trials of every vector instruction set cost more than one small
    # function does: 10 s with them, 6 without. The kernel is then a scalar one, which tells as well whether it works.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0",
                   "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="workbench-inductor-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder

        def silu_times(x: Tensor, y: Tensor) -> Tensor:
            return torch.nn.functional.silu(x) * y

        seed = torch.Generator().manual_seed(0)
        x, y = (torch.randn(64, 64, generator=seed) for _ in "xy")
        begun = time.monotonic()
        found = torch.compile(silu_times)(x.to(device), y.to(device))
        took = time.monotonic() - begun
        error = _error(found, silu_times(x.double(), y.double()))
    if not error <= 1e-6:
        raise Failed(f"silu(x) * y is off by {error:.3g}, at most 1e-06 expected", "run without torch.compile "
                     "(TORCH_COMPILE_DISABLE=1)", "kernel_wrong")  # fmt: skip
    return f"compiled and run in {took:.1f} s, right", []
