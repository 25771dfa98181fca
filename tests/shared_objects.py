"""Small shared libraries, built by the tests that look into them."""

import shutil
import subprocess

import pytest

COMPILER = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")

#: A projection in plain loops, mangled, with C linkage, hidden, and as a method.
MATMUL = """
#include <stdexcept>
namespace vendor {
void matmul(const float* x, const float* w, float* y, int rows, int outputs, int features) {
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outputs; ++o) {
            float sum = 0;
            for (int i = 0; i < features; ++i) sum += x[r * features + i] * w[o * features + i];
            y[r * outputs + o] = sum;
        }
}
void throwing(const float*, const float*, float*, int, int, int) { throw std::runtime_error("Expected kHalf\\nhere"); }
void throwing_int(const float*, const float*, float*, int, int, int) { throw 7; }
void crashing(const float*, const float*, float* y, int, int, int) { *(volatile int*)8 = 1; y[0] = 0; }
void idle(const float*, const float*, float* y, int rows, int outputs, int) {
    for (int i = 0; i < rows * outputs; ++i) y[i] = 1;
}
int status(const float*, const float*, float*, int, int, int) { return 3; }
struct Plan { void run(const float*) const; };
void Plan::run(const float*) const {}
void by_text(const char*, int) {}
__attribute__((visibility("hidden"))) void secret_matmul(int) {}
}
extern "C" void plain_matmul(const float* x, const float* w, float* y, int rows, int outputs, int features) {
    vendor::matmul(x, w, y, rows, outputs, features);
    vendor::secret_matmul(0);
}
"""


def build(folder, source, name="libvendor.so", flags=()):
    """Compile a source to `folder`/`name`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / f"{name}.cpp"
    text.write_text(source, encoding="utf-8")
    command = [COMPILER, "-shared", "-fPIC", "-O0", f"-Wl,-soname,{name}", str(text), *flags, "-o", str(folder / name)]
    subprocess.run(command, check=True, capture_output=True)
    text.unlink()
    return folder / name
