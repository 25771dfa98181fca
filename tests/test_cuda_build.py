"""The build of CUDA C++ sources: what it needs, what a failure says, and that every architecture compiles them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from workbench.errors import BackendError
from workbench.kernels import cuda_build
from workbench.kernels.gated_delta_rule import cuda_chunk

CSRC = cuda_chunk.SOURCE.parent
SOURCES = sorted(CSRC.glob("*.cu"))
SMALL = {
    "BUILD_ELEMENT": "Bfloat16", "BUILD_KEYS": "64", "BUILD_ROWS": "16", "BUILD_WARPS": "2", "BUILD_KEY_PARTS": "2",
}  # fmt: skip

#: What ninja and nvcc print when a source does not compile, as torch raises it.
FAILED = """Error building extension 'workbench_chunk': [1/2] /usr/local/cuda/bin/nvcc -c chunk.cu -o chunk.cuda.o
FAILED: chunk.cuda.o
/somewhere/csrc/chunk.cuh(12): error: identifier "Nonsense" is undefined
/somewhere/csrc/chunk.cuh(13): error: expected a ";"

2 errors detected in the compilation of "chunk.cu".
ninja: build stopped: subcommand failed.
"""


@pytest.fixture(autouse=True)
def builds_afresh(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    cuda_build._built.cache_clear()
    cuda_build.refusal.cache_clear()
    yield
    monkeypatch.undo()
    cuda_build._built.cache_clear()
    cuda_build.refusal.cache_clear()


@pytest.fixture
def can_build(monkeypatch):
    monkeypatch.setattr(cuda_build, "refusal", lambda: None)


def test_a_failed_build_shows_the_compilers_lines_and_the_next_step_in_one_line(monkeypatch, can_build):
    def load(*_args, **_named):
        raise RuntimeError(FAILED)

    monkeypatch.setattr(cpp_extension, "load", load)
    with pytest.raises(BackendError) as raised:
        cuda_build.built(cuda_chunk.SOURCE, SMALL, (9, 0))
    message = str(raised.value)
    assert "\n" not in message and message.startswith("chunk.cu for sm_90: the build failed: ")
    assert 'identifier "Nonsense" is undefined' in message and 'expected a ";"' in message
    assert "next: run `ninja -v` in " in message


def test_torch_is_asked_for_the_sources_macros_and_architecture_once(monkeypatch, can_build, tmp_path):
    calls = []

    def load(name, sources, **named):
        calls.append((name, sources, named))
        library = tmp_path / "empty.so"
        code = 'extern "C" const char* error_text(int) { return ""; }'
        subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", str(library)], input=code.encode(), check=True)
        return str(library)

    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(cpp_extension, "load", load)
    first = cuda_build.built(cuda_chunk.SOURCE, SMALL, (12, 0))
    assert cuda_build.built(cuda_chunk.SOURCE, dict(reversed(SMALL.items())), (12, 0)) is first
    ((name, sources, named),) = calls
    assert sources == [str(cuda_chunk.SOURCE)] and not named["is_python_module"]
    flags = named["extra_cuda_cflags"]
    assert "-gencode=arch=compute_120,code=sm_120" in flags and "-DBUILD_ELEMENT=Bfloat16" in flags
    assert Path(named["build_directory"]) == tmp_path / name or name in named["build_directory"]


def test_a_lock_that_an_interrupted_build_left_is_an_error_and_not_a_wait(can_build):
    name = cuda_build.library_name(cuda_chunk.SOURCE, SMALL, (9, 0))
    lock = Path(cpp_extension._get_build_directory(name, verbose=False)) / "lock"
    lock.touch()
    os.utime(lock, (1, 1))
    with pytest.raises(BackendError, match=r"lock is \d+ minutes old.*remove it"):
        cuda_build.built(cuda_chunk.SOURCE, SMALL, (9, 0))


def test_another_source_macro_or_architecture_is_another_library(tmp_path):
    source = Path(shutil.copytree(CSRC, tmp_path / "csrc")) / "chunk.cu"
    names = [cuda_build.library_name(source, SMALL, (9, 0))]
    assert cuda_build.library_name(cuda_chunk.SOURCE, SMALL, (9, 0)) == names[0]
    names.append(cuda_build.library_name(source, SMALL, (8, 0)))
    names.append(cuda_build.library_name(source, SMALL | {"BUILD_ROWS": "32"}, (9, 0)))
    header = source.with_name("device.cuh")
    header.write_text(header.read_text() + "// changed\n")
    names.append(cuda_build.library_name(source, SMALL, (9, 0)))
    assert len(set(names)) == 4 and all(name.isidentifier() for name in names)


def test_what_is_missing_is_the_reason(monkeypatch, tmp_path):
    def reason():
        cuda_build.refusal.cache_clear()
        return cuda_build.refusal()

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a CUDA build of torch" in reason()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "nvcc" in reason() and "install the CUDA toolkit 13.0" in reason()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "found no no-such-compiler" in reason()
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    assert "pip install ninja" in reason()
    with pytest.raises(BackendError, match="pip install ninja"):
        cuda_build.built(cuda_chunk.SOURCE, SMALL, (9, 0))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    assert reason() is None


#: Architectures by dtype: with tensor cores for the dtype and without, and all of those that differ in anything else.
ARCHITECTURES = {"float": ("75", "80"), "Float16": ("75", "80"), "Bfloat16": ("75", "80", "90", "100", "120")}


@pytest.mark.slow
@pytest.mark.parametrize("element", ARCHITECTURES)
def test_nvcc_compiles_the_sources_for_every_architecture_without_torch(tmp_path, element):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    targets = [
        f"-gencode=arch=compute_{name},code=sm_{name}" for name in ARCHITECTURES[element] if f"compute_{name}" in known
    ]
    assert len(targets) > 1
    macros = [f"-D{key}={value}" for key, value in (SMALL | {"BUILD_ELEMENT": element}).items()]
    for source in SOURCES if element == "float" else [cuda_chunk.SOURCE]:
        subprocess.run(
            [nvcc, "-std=c++17", "-Werror=all-warnings", "-c", *macros, *targets, str(source), "-o", tmp_path / "x.o"],
            check=True,
        )


#: Every kernel once for each dtype: what a run-time compiler is asked for by name.
INSTANCES = (
    '#include "chunk.cuh"\n#include "recurrent.cuh"\ntemplate __global__ void recurrent<64>(RecurrentArguments);\n'
)
INSTANCES += "".join(
    f"template __global__ void chunk_prepare<{element}, 64, 16>(ChunkArguments);\n"
    f"template __global__ void chunk_scan<{element}, 64, 16, 2, 2>(ChunkArguments, int);\n"
    for element in ("float", "Float16", "Bfloat16")
)


@pytest.mark.slow
def test_a_run_time_compiler_of_cuda_12_compiles_the_kernels_for_sm_70(tmp_path):
    """CUDA 13's nvcc no longer knows sm_70; NVRTC 12 from PyPI does, and needs no GPU and no toolkit."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cuda_nvrtc") is None:
        pytest.skip("needs nvidia-cuda-nvrtc-cu12")
    folder = Path(next(iter(importlib.util.find_spec("nvidia.cuda_nvrtc").submodule_search_locations)))
    nvrtc = ctypes.CDLL(str(folder / "lib" / "libnvrtc.so.12"))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), INSTANCES.encode(), b"instances.cu", 0, None, None)
    options = [b"--std=c++17", b"--gpu-architecture=sm_70", f"-I{CSRC}".encode()]
    result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == 0, log.value.decode()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 10_000
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
