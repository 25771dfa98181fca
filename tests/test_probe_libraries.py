"""Libraries found and read: symbols as nm has them, and every kind of file that is none named for what it is."""

import os
import random
import shutil
import struct
import subprocess
import time

import pytest
from shared_objects import MATMUL, build, needs_compiler

from workbench.errors import BackendError, InputError
from workbench.probe import symbols as symbols_module
from workbench.probe.headers import inventory
from workbench.probe.libraries import (
    Library,
    LibraryFault,
    find_libraries,
    holds,
    local_functions,
    names_by_nm,
    read_library,
)
from workbench.probe.symbols import functions

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("vendor"), MATMUL)


def changed(library, folder, change):
    data = bytearray(library.read_bytes())
    data = change(data) or data
    path = folder / "libchanged.so"
    path.write_bytes(data)
    return path


def put(offset, kind, value):
    return lambda data: struct.pack_into(kind, data, offset, value)


def test_symbols_of_a_library(library):
    found = read_library(library)
    assert found.soname == "libvendor.so" and any(name.startswith("libstdc++") for name in found.needed)
    assert {"plain_matmul", "_ZN6vendor6matmulEPKfS1_Pfiii"} <= found.defined
    assert not any("secret" in name for name in found.defined), "a hidden function cannot be linked against"
    wanted = {s.name for s in found.symbols if not s.is_defined}
    assert any("runtime_error" in name for name in wanted) and not wanted & found.defined
    assert any("secret_matmul" in name for name in local_functions(library))
    assert holds(library, ["secret_matmul"]) and not holds(library, ["no_such_word"])


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_nm_finds_the_same(library):
    assert names_by_nm(library) == read_library(library).defined


def test_without_nm_nothing_is_claimed(library, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert names_by_nm(library) is None


def test_a_library_without_section_headers(library, tmp_path):
    def strip(data):
        for offset, kind in ((0x28, "<Q"), (0x3C, "<H"), (0x3E, "<H")):
            struct.pack_into(kind, data, offset, 0)

    stripped = read_library(changed(library, tmp_path, strip))
    assert stripped.defined == read_library(library).defined


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        (lambda data: bytearray(b"PK\x03\x04 a wheel"), "not_an_elf_file", "begins with 50 4b 03 04"),
        (lambda data: bytearray(b"/* GNU ld script */ INPUT(libx.so)"), "not_an_elf_file", "linker script"),
        (lambda data: bytearray(b"version https://git-lfs.github.com/spec/v1"), "not_an_elf_file", "git lfs pull"),
        (put(0x12, "<H", 183), "wrong_architecture", "built for aarch64, expected x86_64"),
        (put(0x12, "<H", 0x7777), "wrong_architecture", "machine"),
        (put(0x10, "<H", 1), "not_a_shared_library", "found ET_REL"),
        (lambda data: data[: len(data) // 2], "truncated_library", "cut short"),
        (lambda data: data[:-1], "truncated_library", "and the file has"),
        (lambda data: data[:40], "truncated_library", "has 40 bytes, no whole ELF header"),
    ],
)  # fmt: skip
def test_what_is_no_usable_library_is_named(library, tmp_path, change, cause, said):
    path = changed(library, tmp_path, change)
    with pytest.raises(LibraryFault, match=said) as caught:
        read_library(path)
    assert caught.value.cause_id == cause and str(path) in str(caught.value)


def test_an_empty_file_and_one_that_is_gone(tmp_path):
    path = tmp_path / "libempty.so"
    path.touch()
    with pytest.raises(LibraryFault, match="found an empty one"):
        read_library(path)
    assert not holds(path, ["x"])
    with pytest.raises(LibraryFault, match="cannot be read: No such file") as caught:
        read_library(tmp_path / "libgone.so")
    assert caught.value.cause_id == "unreadable_library"


def test_every_cut_is_told(library, tmp_path):
    size = library.stat().st_size
    for share in range(1, 100, 3):
        path = changed(library, tmp_path, lambda data, end=size * share // 100: data[:end])
        with pytest.raises(LibraryFault):
            read_library(path)


def test_flipped_bytes_end_in_a_library_or_a_named_fault(library, tmp_path):
    chance = random.Random(0)
    faults = 0
    for _ in range(150):
        def flip(data):
            for _ in range(3):
                data[chance.randrange(min(len(data), 4096))] = chance.randrange(256)

        try:
            assert isinstance(read_library(changed(library, tmp_path, flip)), Library)
        except LibraryFault:
            faults += 1
    assert faults > 10


def test_flipped_bytes_anywhere_leave_local_names_or_a_named_fault(library, tmp_path):
    chance = random.Random(1)
    faults = 0
    for _ in range(60):
        def flip(data):
            for _ in range(200):  # the table of sections, at the end, names where .symtab is
                data[-chance.randrange(1, 2100)] = chance.randrange(256)

        try:
            assert isinstance(local_functions(changed(library, tmp_path, flip)), tuple)
        except LibraryFault:
            faults += 1
    assert faults > 10


def test_places(library, tmp_path, monkeypatch):
    folder = tmp_path / "here" / "deeper"
    folder.mkdir(parents=True)
    shutil.copy(library, folder / "libone.so.1.2")
    (folder / "libone.so").symlink_to("libone.so.1.2")
    (folder / "libdangling.so").symlink_to("nothing")
    (folder / "module.cpython-311-x86_64-linux-gnu.so").touch()
    (folder / "notes.so.txt").touch()
    ours = [p for p in find_libraries([tmp_path / "here"])[0] if str(p.path).startswith(str(tmp_path))]
    assert sorted(os.path.realpath(p.path).rpartition("/")[2] for p in ours) == [
        "libone.so.1.2", "module.cpython-311-x86_64-linux-gnu.so",
    ]  # fmt: skip
    assert {p.how for p in ours} == {f"--search {tmp_path / 'here'}"}
    single = [p for p in find_libraries([folder / "libone.so"])[0] if p.how.startswith("--search")]
    assert len(single) == 1
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'none'}:{folder}")
    assert {p.how for p in find_libraries()[0] if str(p.path).startswith(str(tmp_path))} == {"LD_LIBRARY_PATH"}
    with pytest.raises(InputError, match="found nothing there"):
        find_libraries([tmp_path / "none"])


#: Linker name -> function's name, last name, argument types.
NAMES = {
    "_ZN6vendor6matmulEPKfS1_Pfiii": ("vendor::matmul", "matmul", ("float const*", "float const*", "float*", "int",
                                                                  "int", "int")),
    "_ZN2at4_ops6mm_out4callERKNS_6TensorES4_RS2_": ("at::_ops::mm_out::call", "call", ("at::Tensor const&",
                                                     "at::Tensor const&", "at::Tensor&")),
    "_Z3runv": ("run", "run", ()),
    "plain_matmul": ("plain_matmul", "plain_matmul", None),
    "_ZN12_GLOBAL__N_13runEi": ("(anonymous namespace)::run", "run", ("int",)),
    "_Z6kernelIfLi4EEvPT_St6vectorIS0_SaIS0_EE": ("kernel<float, 4>", "kernel", ("float*",
                                                  "std::vector<float, std::allocator<float> >")),
    "_Z5applyPFivE": ("apply", "apply", ("int (*)()",)),
    "_ZNK6vendor4Plan3runEPKf": ("vendor::Plan::run", "run", ("float const*",)),
    "_ZlsR1Ai": ("operator<<", "operator<<", ("A&", "int")),
    "_ZN1AclEi": ("A::operator()", "operator()", ("int",)),
    "_Znonsense": ("_Znonsense", "_Znonsense", None),
}  # fmt: skip


@pytest.mark.parametrize("by_program", [False, True])
def test_names_are_taken_apart(monkeypatch, by_program):
    if by_program:
        if shutil.which("c++filt") is None:
            pytest.skip("c++filt is not installed")
        monkeypatch.setattr(symbols_module, "_abi", lambda: None)
    for function, (name, last, arguments) in zip(functions(NAMES), NAMES.values(), strict=True):
        assert (function.name, function.last_name, function.arguments) == (name, last, arguments)
        assert function.is_member == (function.mangled == "_ZNK6vendor4Plan3runEPKf")


def test_without_a_demangler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(symbols_module, "_abi", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendError, match="install libstdc"):
        functions(["_Z3runv"])


def test_demangled_names_of_the_library_are_those_of_the_compiler(library):
    names = sorted(n for n in read_library(library).defined if n.startswith("_Z"))
    shown = subprocess.run(["nm", "-DC", str(library)], capture_output=True, text=True, check=True).stdout
    assert names and all(f.shown in shown for f in functions(names))


def test_headers_tell_the_result(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "ops.h").write_text(
        "// int matmul(float);\n/* long matmul(\nint); */\n#pragma once\nnamespace vendor {\n"
        'VENDOR_API extern "C" torch::Tensor&\n  matmul(const float* x,\n    int rows);\n'
        "inline const int64_t* other() { return matmul(3); }\n}\n", encoding="utf-8",
    )  # fmt: skip
    (tmp_path / "empty.hpp").touch()
    (tmp_path / "gone.h").symlink_to("nothing")
    found = inventory([tmp_path, tmp_path], "matmul")
    assert found.count == 3 and "1 of them cannot be read" in found.told()
    (declared,) = found.declarations
    assert (declared.returns, declared.line) == ("at::Tensor&", 6) and "3 headers" in found.told()
    assert inventory([tmp_path], "absent").told().endswith("none declares it")
    assert inventory([], "absent").told() == "no header beside the library"


def test_a_declaration_is_found_in_long_headers_at_once_and_on_its_own_line(tmp_path):
    names = "\n".join(f"using type_{i} : std::pair<int, type_{i + 1}>," for i in range(4000))
    text = (
        f"{names}\nint l;\nMACRO(call(1))\n\n\n  static inline at::Tensor &\n  call(int a,\n       float b) noexcept;"
        "\nstruct S { void call(int); };\nint x = call(2);\nreturn call(3);\n"
    )
    (tmp_path / "long.h").write_text(text)
    begun = time.monotonic()
    (declared,) = inventory([tmp_path], "call").declarations
    assert time.monotonic() - begun < 1.0  # 0.01 s; with a pattern that begins at each line, more than ten
    assert declared.returns == "at::Tensor&" and declared.line == 4005
    assert declared.text == "static inline at::Tensor & call(int a, float b)"
