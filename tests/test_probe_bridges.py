"""Bridges: a library's function made a backend, run by name and attested; every misfit refused or failed in time."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shared_objects import MATMUL, build, needs_compiler

from workbench.errors import BackendError, InputError
from workbench.kernels import Kernels, registry
from workbench.probe import register_bridges
from workbench.probe.bridges import (
    Bridge,
    LoadedBridge,
    bridge_of,
    build_bridge,
    read_bridges,
    refusal,
    register_bridge,
    source_of,
)
from workbench.probe.compiler import find_compiler
from workbench.probe.libraries import Place, read_library
from workbench.probe.steps import FAIL, PASS, SKIP
from workbench.probe.symbols import functions
from workbench.probe.vendor_names import KNOWN
from workbench.probe.vendor_steps import VendorSteps
from workbench.probe.vendors import VENDORS, Vendor, Wanted, vendor_named

pytestmark = needs_compiler

LOOPS = Bridge(
    name="loops", op="linear", symbol="vendor::matmul", dtypes=("float32",), devices=("cpu",),
    signature=("float const*", "float const*", "float*", "int", "int", "int"),
    arguments=("x", "weight", "y", "rows", "outputs", "features"),
)  # fmt: skip

#: The forms of vLLM's router and alignment, over raw pointers.
CHAIN = """
#include <algorithm>
#include <cmath>
#include <vector>
namespace vendor {
void topk_softmax(float* weights, int* experts, int* rows, const float* logits, int tokens, int count, int top_k) {
    for (int t = 0; t < tokens; ++t) {
        const float* row = logits + t * count;
        float top = *std::max_element(row, row + count), sum = 0;
        for (int e = 0; e < count; ++e) sum += std::exp(row[e] - top);
        std::vector<int> order(count);
        for (int e = 0; e < count; ++e) order[e] = e;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
        for (int a = 0; a < top_k; ++a) {
            experts[t * top_k + a] = order[a];
            rows[t * top_k + a] = a * tokens + t;
            weights[t * top_k + a] = std::exp(row[order[a]] - top) / sum;
        }
    }
}
void align(const int* experts, long count, long block, int* sorted, int* blocks, int* padded, long pairs) {
    int row = 0;
    for (int e = 0; e < count; ++e) {
        int begin = row;
        for (int p = 0; p < pairs; ++p)
            if (experts[p] == e) sorted[row++] = p;
        row = (row + block - 1) / block * block;
        for (int b = begin; b < row; b += block) blocks[b / block] = e;
    }
    padded[0] = row;
}
}
"""
ROUTER = Bridge(
    name="vendor_router", op="routing", symbol="topk_softmax", devices=("cpu",),
    signature=("float*", "int*", "int*", "float const*", "int", "int", "int"),
    arguments=("weights", "experts", "token_rows", "logits_float32", "tokens", "num_experts", "top_k"),
)  # fmt: skip
ALIGN = Bridge(
    name="vendor_align", op="alignment", symbol="vendor::align", devices=("cpu",),
    signature=("int const*", "long", "long", "int*", "int*", "int*", "long"),
    arguments=("experts", "num_experts", "block", "sorted_pairs", "block_experts", "padded_rows", "pairs"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_registry_and_cache(tmp_path, monkeypatch):
    """Bridges registered by a test are gone after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    for op, operation in list(registry.OPERATIONS.items()):
        monkeypatch.setitem(registry.OPERATIONS, op, operation)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("vendor") / "lib", MATMUL)


def steps(*libraries):
    return VendorSteps("cpu", [Place(path, "--search") for path in libraries], [], 60.0, lambda name: None)


def made(library, bridge):
    own = steps(library)
    return own.of_bridge(bridge, own.places), own


def test_a_mangled_function_becomes_a_backend(library):
    step, own = made(library, LOOPS)
    assert step.outcome == PASS, step.found
    assert own.registered == ["linear=loops"]
    assert "attested: 1 call of op linear by backend loops, named by the user" in step.found
    kernels = Kernels("linear=loops")
    x, weight = torch.randn(3, 5, 7), torch.randn(11, 7)
    torch.testing.assert_close(kernels.linear(x.transpose(0, 1), weight), x.transpose(0, 1) @ weight.T)
    (row,) = kernels.attestation()
    assert (row.op, row.backend, row.calls) == ("linear", "loops", 1)
    with pytest.raises(BackendError, match="takes float32, found bfloat16"):
        Kernels("linear=loops").linear(x.bfloat16(), weight.bfloat16())
    with pytest.raises(BackendError, match="no backward pass"):
        Kernels("linear=loops").linear(x.requires_grad_(), weight)


def test_a_c_function_is_believed_and_held_to_the_reference(library):
    step, _ = made(library, replace(LOOPS, name="plain", symbol="plain_matmul"))
    assert step.outcome == PASS and "from the cache" not in step.found
    step, own = made(library, replace(LOOPS, name="swapped", symbol="plain_matmul",
                                      arguments=("weight", "x", "y", "outputs", "rows", "features")))  # fmt: skip
    assert step.outcome == FAIL and step.cause_id == "wrong_result" and "relative error" in step.found
    assert not own.registered and "swapped" not in registry.OPERATIONS["linear"].backends


@pytest.mark.parametrize("bridge", [ROUTER, ALIGN], ids=lambda b: b.op)
def test_the_chain_of_experts(tmp_path, bridge):
    step, _ = made(build(tmp_path / "lib", CHAIN, f"lib{bridge.name}.so"), bridge)
    assert step.outcome == PASS, step.found
    kernels = Kernels({bridge.op: bridge.name})
    if bridge is ROUTER:
        logits = torch.randn(9, 16)
        for dtype in (torch.float32, torch.bfloat16):
            weights, experts = kernels.routing(logits.to(dtype), top_k=3, normalise=False)
            expected, order = Kernels("routing=reference").routing(logits.to(dtype), top_k=3, normalise=False)
            assert torch.equal(experts, order) and weights.dtype == dtype
            torch.testing.assert_close(weights, expected)
        with pytest.raises(BackendError, match="takes the softmax in float32"):
            Kernels({"routing": bridge.name}, router_dtype=torch.bfloat16).routing(logits, top_k=3, normalise=True)
        return
    experts = torch.stack([torch.randperm(6)[:2] for _ in range(33)])
    found, expected = kernels.alignment(experts, 6, 8), Kernels("alignment=reference").alignment(experts, 6, 8)
    used = int(expected.offsets[-1])
    for name in ("rows", "position", "offsets"):
        assert torch.equal(getattr(found, name)[:used], getattr(expected, name)[:used]), name


@pytest.mark.parametrize(
    ("changes", "cause", "said"),
    [
        ({"symbol": "vendor::throwing"}, "bridge_fails", "throwing, called by bridge loops, says: Expected kHalf here"),
        ({"symbol": "vendor::crashing"}, "crashes", "SIGSEGV"),
        ({"symbol": "vendor::idle"}, "wrong_result", "begins with [1.0, 1.0, 1.0, 1.0]"),
    ],
)
def test_what_fails_when_called_never_becomes_a_backend(library, changes, cause, said):
    step, own = made(library, replace(LOOPS, **changes))
    assert (step.outcome, step.cause_id) == (FAIL, cause) and said in step.found, step
    assert not own.registered and "loops" not in registry.OPERATIONS["linear"].backends
    assert step.next_step and step.op == "linear"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"symbol": "throwing"}, "Expected kHalf here"),
        ({"symbol": "throwing_int"}, "threw something that is no std::exception"),
        ({"symbol": "status", "returns": "int", "is_status": True}, "it returned a status other than 0"),
    ],
)
def test_what_a_function_says_reaches_the_caller(library, changes, said):
    bridge = replace(LOOPS, **changes)
    loaded, x = loaded_bridge(bridge, library), torch.zeros(2, 2)
    with pytest.raises(BackendError, match=said) as caught:
        loaded.call({"x": x, "weight": x, "y": x, "rows": 2, "outputs": 2, "features": 2}, x.device)
    assert f"op linear: {changes['symbol']}, called by bridge loops" in str(caught.value)


def loaded_bridge(bridge, library):
    wanted = [f for f in functions(read_library(library).defined) if f.last_name == bridge.symbol.rpartition("::")[2]]
    return LoadedBridge(bridge, build_bridge(bridge, wanted[0], library, find_compiler()).path, library)


def test_a_tensor_that_a_function_replaces_is_noticed(tmp_path):
    source = ("namespace at { struct Tensor { void* impl; Tensor(const Tensor&); ~Tensor(); }; }\n"
              "namespace vendor { void matmul(const at::Tensor&, at::Tensor, at::Tensor& y) { y.impl = nullptr; } }\n")
    library = build(tmp_path / "lib", source, "libreplaces.so", ("-Wl,-z,lazy",))
    types = ("at::Tensor const&", "at::Tensor", "at::Tensor&")
    bridge = replace(LOOPS, signature=types, arguments=("x", "weight", "y"))
    x = torch.zeros(2, 2)
    with pytest.raises(BackendError, match="put another tensor in the place of its argument y"):
        loaded_bridge(bridge, library).call({"x": x, "weight": x, "y": x}, x.device)


def test_of_two_libraries_with_one_soname_the_wrong_one_is_noticed(tmp_path):
    first, second = (build(tmp_path / n, MATMUL, "libtwin.so") for n in ("a", "b"))
    loaded_bridge(LOOPS, first)
    with pytest.raises(BackendError, match=r"expected vendor::matmul of .*/b/libtwin.* from .*/a/libtwin"):
        loaded_bridge(LOOPS, second)


@pytest.mark.parametrize(
    ("changes", "cause", "said"),
    [
        ({"symbol": "vendor::absent"}, "symbol_absent", "vendor::absent is exported by none of 1 searched"),
        ({"symbol": "secret_matmul"}, "symbol_absent", "exported by none"),
        ({"signature": ("float const*", "float const*", "float*", "long", "int", "int")}, "signature_differs",
         "vendor::matmul(float const*, float const*, float*, int, int, int): bridge loops is declared for (float "
         "const*, float const*, float*, long, int, int)"),
        ({"symbol": "by_text"}, "signature_differs", "its argument char const* cannot be bridged; a bridge takes"),
        ({"symbol": "Plan::run"}, "signature_differs", "is a method, which needs an object"),
    ],
)  # fmt: skip
def test_a_declaration_that_does_not_fit_is_refused(library, changes, cause, said):
    step, _ = made(library, replace(LOOPS, **changes))
    assert (step.outcome, step.cause_id) == (FAIL, cause) and said in step.found, step


def test_a_header_that_says_otherwise_refuses(tmp_path):
    folder = tmp_path / "sdk"
    path = build(folder / "lib", MATMUL, "libsdk.so")
    (folder / "include").mkdir()
    header = folder / "include" / "ops.h"
    header.write_text("at::Tensor matmul(const float* x);\n", encoding="utf-8")
    step, _ = made(path, LOOPS)
    assert step.outcome == FAIL
    assert "ops.h:1 says that it returns at::Tensor, bridge loops is declared with void" in step.found
    header.write_text("void matmul(const float* x);\n", encoding="utf-8")
    step, _ = made(path, LOOPS)
    assert step.outcome == PASS
    assert any("1 headers in" in line and "ops.h:1: void matmul" in line for line in step.details)


def test_link_failure_and_missing_compiler(library, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "cxx"
    text = "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'ld: undefined reference to `target'; exit 1\n"
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    step, _ = made(library, LOOPS)
    assert (step.outcome, step.cause_id) == (FAIL, "link_fails") and "undefined reference" in step.found
    assert any("undefined reference" in line for line in step.details)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    step, _ = made(library, LOOPS)
    assert (step.outcome, step.cause_id) == (FAIL, "no_compiler") and "install g++" in step.next_step
    own = steps().own_bridge()
    assert own.outcome == SKIP and "no C++ compiler" in own.found


def test_a_library_that_misses_another_is_told_by_the_linker_of_the_system(tmp_path):
    part = build(tmp_path / "part", 'extern "C" int part() { return 1; }\n', "libpart.so")
    path = build(
        tmp_path / "lib", f'extern "C" int part();\n{MATMUL}\nint uses_part() {{ return part(); }}\n', "libwhole.so",
        (str(part),),
    )  # fmt: skip
    part.unlink()
    step, _ = made(path, LOOPS)
    assert step.outcome == FAIL and step.cause_id in ("link_fails", "bridge_fails")
    assert "libpart.so" in step.found


def test_a_declared_device_that_is_not_here(library):
    step, own = made(library, replace(LOOPS, devices=("cuda",)))
    assert step.outcome == SKIP and "not called: it is declared for cuda, and this is cpu" in step.found
    assert not own.registered


def test_torch_itself_is_bridged_without_its_headers():
    """A function over at::Tensor references, in the one library that is always here."""
    own = steps()
    step = own.own_bridge()
    assert step.outcome == PASS, step.found
    kernels = Kernels("linear=torch_mm_bridge")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, weight = torch.randn(2, 3, 16, dtype=dtype), torch.randn(5, 16, dtype=dtype)
        torch.testing.assert_close(kernels.linear(x, weight), x @ weight.T)
    # Its own refusal reaches the user.
    with pytest.raises(BackendError, match=r"says: .*(?:same dtype|expected m1 and m2)"):
        kernels.linear(torch.randn(2, 16), torch.randn(5, 16, dtype=torch.float64))
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    before = sys.getrefcount(x)
    for _ in range(100):
        kernels.linear(x, weight)
    assert sys.getrefcount(x) == before


def test_the_same_name_twice(library, tmp_path):
    step, _ = made(library, LOOPS)
    assert step.outcome == PASS
    step, _ = made(library, LOOPS)
    assert step.outcome == PASS and "from the cache" in step.found
    own = steps(build(tmp_path / "other", MATMUL, "libother.so"))
    step = own.of_bridge(LOOPS, own.places)
    assert step.outcome == FAIL and "registered already" in step.found
    with pytest.raises(BackendError, match="registered already"):
        register_bridge(replace(LOOPS, name="reference"), tmp_path, library)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "No Name"}, "name: expected lower-case"), ({"op": "attention"}, "expected one of linear, routing"),
        ({"symbol": "f(int)"}, "without its arguments"), ({"arguments": ("x",)}, "found 1 and 6"),
        ({"signature": ("std::string",) * 6}, "'std::string' cannot be bridged"),
        ({"returns": "at::Tensor"}, "returns: expected one of void, int"),
        ({"is_status": True}, "expected returns = 'int'"), ({"dtypes": ("float33",)}, "'float33' is no dtype"),
        ({"arguments": ("x", "weight", "z", "rows", "outputs", "features")}, "argument 'z' of type float*: expected"),
        ({"arguments": ("x", "weight", "y", "rows", "outputs", "x")}, "argument 'x' of type int: expected one of rows"),
    ],
)  # fmt: skip
def test_a_bridge_that_cannot_be_is_refused_when_declared(changes, said):
    with pytest.raises(InputError, match=said.replace("(", r"\(").replace("*", r"\*")):
        replace(LOOPS, **changes)


def test_numbers_are_written_out():
    bridge = replace(LOOPS, signature=("float*", "double", "bool", "int", "CUstream_st*"),
                     arguments=("x", "0.5", "true", "-3", "stream"))  # fmt: skip
    text = source_of(bridge, "_Z1f")
    assert "target(pointers[0], static_cast<double>(reals[0]), static_cast<bool>(integers[1]), " in text
    assert "static_cast<int>(integers[2]), pointers[1])" in text and '__asm__("_Z1f")' in text


def test_a_number_that_does_not_fit_and_a_tensor_of_another_dtype(library):
    loaded, x = loaded_bridge(LOOPS, library), torch.zeros(2, 2)
    values = {"x": x, "weight": x, "y": x, "rows": 2**31, "outputs": 2, "features": 2}
    with pytest.raises(BackendError, match="rows = 2147483648 does not fit the argument of type int"):
        loaded.call(values, x.device)
    with pytest.raises(BackendError, match=r"takes float const\*, found a tensor of torch.float16"):
        loaded.call(values | {"x": x.half()}, x.device)
    with pytest.raises(BackendError, match="has no strides"):
        loaded.call(values | {"x": torch.zeros(2, 3).T}, x.device)


TOML = """
[[bridge]]
name = "loops"
op = "linear"
symbol = "vendor::matmul"
signature = ["float const*", "float const*", "float*", "int", "int", "int"]
arguments = ["x", "weight", "y", "rows", "outputs", "features"]
dtypes = ["float32"]
devices = ["cpu"]
"""


def test_bridges_of_a_file(tmp_path):
    path = tmp_path / "bridges.toml"
    path.write_text(TOML, encoding="utf-8")
    assert read_bridges(path) == [LOOPS] and bridge_of(LOOPS.to_json()) == LOOPS


def test_a_file_that_names_its_library_registers_in_one_call(tmp_path, library):
    path = tmp_path / "bridges.toml"
    path.write_text(TOML + 'library = "lib/libown.so"', encoding="utf-8")
    with pytest.raises(BackendError, match=r"lib/libown.so: cannot be read: No such file.*; next: "):
        register_bridges(read_bridges(path))
    build(tmp_path / "lib", MATMUL, "libown.so")
    assert register_bridges(read_bridges(path)) == ["linear=loops"]
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    torch.testing.assert_close(Kernels("linear=loops").linear(x, weight), x @ weight.T)
    with pytest.raises(InputError, match="--search /none"):
        register_bridges([LOOPS], search=[Path("/none")])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "expected TOML"), ("", "at least one table"), ("bridge = 3", "at least one table"),
        ("[[bridge]]\nname = 'x'", "field 'op' is missing"), (TOML + "speed = 1", "unknown field 'speed'"),
        (TOML.replace('["x", "weight", "y", "rows", "outputs", "features"]', '"x"'), "arguments: expected a list"),
        (TOML.replace('"loops"', "3"), "name: expected a string, found 3"),
        (TOML + "is_status = 1", "is_status: expected true or false"),
    ],
)  # fmt: skip
def test_a_file_that_declares_no_bridge(tmp_path, text, said):
    path = tmp_path / "bridges.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_bridges(path)


# A vendor's functions: symbol, binding and bridge together.

VENDOR = Vendor(
    name="vendor", modules=("vendor.functions", "vendor"), libraries=("libvendor",),
    wanted=(Wanted(binding="matmul", symbols=("vendor_matmul", "matmul"), op="linear", instead="torch_linear"),),
    bridges=(replace(LOOPS, name="vendor_bridge"),),
)  # fmt: skip


@pytest.fixture
def module(tmp_path, monkeypatch):
    def write(text):
        folder = tmp_path / "python" / "vendor"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))
        monkeypatch.syspath_prepend(str(folder.parent))

    return write


def by_name(found):
    return {step.name: step for step in found}


def test_a_symbol_without_a_binding_is_served_by_a_bridge(library, module):
    module("")
    own = steps(library)
    found = by_name(own.of_vendor(VENDOR, True))
    assert {name: step.outcome for name, step in found.items()} == {
        "vendor: libraries": PASS, "vendor: Python module": PASS, "vendor matmul: symbol": PASS,
        "vendor matmul: Python binding": SKIP, "vendor matmul: bridge": PASS,
    }  # fmt: skip
    assert "exports vendor::matmul(float const*" in found["vendor matmul: symbol"].found
    assert "the bridge serves in its place" in found["vendor matmul: Python binding"].found
    assert own.registered == ["linear=vendor_bridge"]


def test_a_binding_serves_where_no_signature_is_known(library, module):
    module("def matmul(): pass")
    found = by_name(steps(library).of_vendor(replace(VENDOR, bridges=()), False))
    assert found["vendor matmul: Python binding"].outcome == PASS
    bridge = found["vendor matmul: bridge"]
    assert bridge.outcome == SKIP and "no bridge is declared for it; no header beside the library" in bridge.found
    assert "(float const*, float const*, float*, int, int, int)" in bridge.next_step


def test_a_signature_that_no_bridge_takes_is_shown_with_those_that_one_takes(tmp_path, module):
    module("")
    source = "#include <string>\nnamespace vendor { void matmul(float*, std::string*) {} }\n"
    path = build(tmp_path / "lib", source, "libvendor_text.so")
    found = by_name(steps(path).of_vendor(replace(VENDOR, bridges=()), False))
    step = found["vendor matmul: bridge"]
    assert step.outcome == FAIL and "cannot be bridged; a bridge takes numbers (bool, int" in step.found
    assert "vendor::matmul(float*, std::" in step.found and "write a function around it" in step.next_step


def test_neither_binding_nor_bridge_is_a_fault(library, module):
    module("def matmull(): pass")
    found = by_name(steps(library).of_vendor(replace(VENDOR, bridges=()), False))
    binding = found["vendor matmul: Python binding"]
    assert binding.outcome == FAIL and "near: matmull" in binding.found
    assert found["vendor matmul: bridge"].cause_id == "signature_unknown"


def test_an_absent_symbol_names_the_one_link_to_replace(tmp_path, module):
    module("")
    path = build(tmp_path / "lib", 'extern "C" int other() { return 1; }\nextern "C" int matmul_of_old(int);\n'
                 'extern "C" __attribute__((visibility("hidden"))) int matmul_inside() { return 2; }\n'
                 'extern "C" int use() { return matmul_of_old(matmul_inside()); }\n')  # fmt: skip
    found = by_name(steps(path).of_vendor(VENDOR, False))
    step = found["vendor matmul: symbol"]
    assert (step.outcome, step.cause_id, step.op) == (FAIL, "symbol_absent", "linear")
    assert "--backend linear=torch_linear" in step.next_step
    assert "vendor_matmul or matmul: exported by none of the vendor's libraries (1 read)" in step.found
    assert any("matmul_of_old (wanted from another library" in line for line in step.details)
    assert any("matmul_inside (there, and not exported" in line for line in step.details)
    assert found["vendor matmul: bridge"].outcome == SKIP
    assert found["vendor matmul: Python binding"].outcome == FAIL


def test_a_binding_without_a_symbol_is_no_fault(tmp_path, module):
    module("def matmul(): pass")
    found = by_name(steps(build(tmp_path / "lib", 'extern "C" int other() { return 1; }\n')).of_vendor(VENDOR, False))
    assert found["vendor matmul: symbol"].outcome == SKIP and not any(s.outcome == FAIL for s in found.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [("raise ImportError('libcusolver.so.11: cannot open')", "libcusolver.so.11: cannot open"),
     ("import os; os._exit(0)", "exit code 0"), ("import ctypes; ctypes.string_at(0)", "SIGSEGV")],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_ends_nothing_else(library, module, text, said):
    module(text)
    found = by_name(steps(library).of_vendor(replace(VENDOR, bridges=()), False))
    step = found["vendor: Python module"]
    assert step.outcome == FAIL and said in step.found
    assert found["vendor matmul: Python binding"].found == "no Python module to ask: it does not import"
    assert found["vendor matmul: symbol"].outcome == PASS


def test_what_a_library_of_unknown_functions_exports_is_listed(library):
    unknown = replace(VENDOR, wanted=(Wanted(binding="matmul", word="matmul", op="linear", instead="torch_linear"),))
    found = by_name(steps(library).of_vendor(unknown, False))
    symbol = found["vendor matmul: symbol"]
    assert symbol.outcome == SKIP and "2 functions with 'matmul'" in symbol.found
    assert any("vendor::matmul(float const*" in line for line in symbol.details)
    binding = found["vendor matmul: Python binding"]
    assert (binding.outcome, binding.cause_id) == (FAIL, "binding_absent")


def test_broken_libraries_of_a_vendor_are_named(library, tmp_path):
    (tmp_path / "libvendor.so").write_bytes(b"no library")
    wrong = bytearray(library.read_bytes())
    wrong[0x12] = 183
    (tmp_path / "libvendor_arm.so").write_bytes(wrong)
    found = steps(library, tmp_path / "libvendor.so", tmp_path / "libvendor_arm.so").of_vendor(VENDOR, False)
    assert found[0].found == "1 of 3 can be linked against"
    assert [s.cause_id for s in found if s.outcome == FAIL] == ["not_an_elf_file", "wrong_architecture"]


def test_tables_that_disagree_are_a_fault(library, monkeypatch):
    from workbench.probe import vendor_steps

    monkeypatch.setattr(vendor_steps, "names_by_nm", lambda path: frozenset({"plain_matmul"}))
    step = steps(library).of_vendor(VENDOR, False)[0]
    assert (step.outcome, step.cause_id) == (FAIL, "tables_disagree") and "and nm 1;" in step.found
    monkeypatch.setattr(vendor_steps, "names_by_nm", lambda path: None)
    step = steps(library).of_vendor(replace(VENDOR, wanted=()), False)[0]
    assert step.outcome == PASS and "nm is not installed, so not read twice" in step.details[0]


def test_a_vendor_that_is_not_here():
    (step,) = steps().of_vendor(VENDOR, False)
    assert step.outcome == SKIP and "not here" in step.found
    (step,) = steps().of_vendor(VENDOR, True)
    assert (step.outcome, step.cause_id) == (FAIL, "vendor_absent") and "--search" in step.next_step


def test_vendors_by_name():
    known = vendor_named("ixformer", ("extra",))
    assert {"vllm_moe_topk_softmax", "vllm_moe_align_block_size", "vllm_invoke_fused_moe_kernel", "matmul",
            "extra"} == {w.binding for w in known.wanted}  # fmt: skip
    assert vendor_named("my.pkg", ("ns::f",)).wanted[0].binding == "f"
    refused = (("../x", (), "expected one of"), ("other", (), "with --symbol"), ("", ("f",), "Python"))
    for name, symbols, said in refused:
        with pytest.raises(InputError, match=said):
            vendor_named(name, symbols)
    assert tuple(VENDORS) == KNOWN
    # What our own backends of these vendors call is what is looked for.
    for operation in registry.OPERATIONS.values():
        for backend in operation.backends.values():
            for symbol in backend.requires.symbols if backend.name in VENDORS else ():
                module, _, attribute = symbol.partition(":")
                vendor = VENDORS[backend.name]
                assert module in vendor.modules, symbol
                assert (attribute, operation.name) in {(w.binding, w.op) for w in vendor.wanted}, symbol
    # A declaration of the table fits what it is declared for.
    (function,) = functions(["_ZN8ixformer12topk_softmaxERN2at6TensorES2_S2_S2_"])
    bridge = next(b for b in known.bridges if b.symbol == "topk_softmax")
    assert refusal(bridge, function) is None
