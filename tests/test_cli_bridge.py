"""`--bridge FILE`: a vendor's symbol, built into a backend by the command that names it."""

import shutil
import subprocess

import pytest

from workbench.cli import main
from workbench.kernels import registry
from workbench.kernels.registry import OPERATIONS

SOURCE = """
namespace vendor {
void matmul(float const* x, float const* weight, float* y, int rows, int outputs, int features) {
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outputs; ++o) {
            double sum = 0;
            for (int f = 0; f < features; ++f) sum += double(x[r * features + f]) * weight[o * features + f];
            y[r * outputs + o] = float(sum SIGN);
        }
}
}
"""
BRIDGE = """
[[bridge]]
name = "vendor_matmul"
op = "linear"
symbol = "vendor::matmul"
signature = ["float const*", "float const*", "float*", "int", "int", "int"]
arguments = ["x", "weight", "y", "rows", "outputs", "features"]
returns = "void"
dtypes = ["float32"]
library = "libvendor.so"
"""


@pytest.fixture
def bridge(tmp_path, monkeypatch, request):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "OPERATIONS", dict(OPERATIONS))
    (tmp_path / "vendor.cpp").write_text(SOURCE.replace("SIGN", request.param))
    command = [compiler, "-O2", "-shared", "-fPIC", str(tmp_path / "vendor.cpp"), "-o", str(tmp_path / "libvendor.so")]
    subprocess.run(command, check=True)
    (tmp_path / "bridge.toml").write_text(BRIDGE)
    return str(tmp_path / "bridge.toml")


GENERATE = ("generate", "data/miniature", "--prompt", "Shall I compare", "--max-new-tokens", "4", "--dtype", "float32")


@pytest.mark.parametrize("bridge", [""], indirect=True)
def test_a_bridge_serves_by_name(bridge, capsys):
    assert main([*GENERATE]) == 0
    expected = capsys.readouterr().out
    assert main([*GENERATE, "--bridge", bridge, "--backend", "linear=vendor_matmul"]) == 0
    found = capsys.readouterr()
    assert found.out == expected and "workbench: bridge registered: linear=vendor_matmul" in found.err


@pytest.mark.parametrize("bridge", ["+ 1"], indirect=True)
def test_a_bridge_to_a_function_that_is_wrong_is_no_backend(bridge, capsys):
    assert main([*GENERATE, "--bridge", bridge, "--backend", "linear=vendor_matmul"]) == 2
    error = capsys.readouterr().err
    assert "vendor_matmul" in error and error.startswith("workbench: error: ") and error.count("\n") == 1


def test_a_file_of_no_bridges(tmp_path, capsys):
    assert main([*GENERATE, "--bridge", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
