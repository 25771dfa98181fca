"""Builds: cached by what they depend on, complete or absent, and a compiler's refusal shown with its own lines."""

import os
import stat

import pytest
from shared_objects import MATMUL, build, needs_compiler

from workbench.probe import compiler, device
from workbench.probe.steps import Failed, Skipped

pytestmark = needs_compiler

SOURCE = 'extern "C" int f() { return 1; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


def test_a_build_is_kept_and_found_again(cache, tmp_path):
    command = compiler.find_compiler()
    first = compiler.build(SOURCE, command)
    again = compiler.build(SOURCE, command)
    assert not first.was_cached and again.was_cached and first.path == again.path and first.path.is_relative_to(cache)
    assert sorted(p.name for p in first.path.parent.iterdir()) == ["bridge.cpp", "bridge.so"]
    assert first.path.with_name("bridge.cpp").read_text(encoding="utf-8") == SOURCE
    assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    library = build(tmp_path / "lib", MATMUL)
    others = [
        compiler.build(SOURCE + "\n", command), compiler.build(SOURCE, command, flags=[*compiler.FLAGS, "-g"]),
        compiler.build(SOURCE, command, key="x"), compiler.build(SOURCE, command, libraries=[library]),
    ]  # fmt: skip
    os.utime(library, ns=(1, 1))  # as if another version had been installed in its place
    others.append(compiler.build(SOURCE, command, libraries=[library]))
    assert not any(other.was_cached for other in others)
    assert len({first.path, *(other.path for other in others)}) == 6


def test_a_refusal_leaves_nothing_and_shows_the_lines(cache):
    with pytest.raises(compiler.BuildError, match=r"compiling fails with code 1: .*expected") as caught:
        compiler.build("int f( {", compiler.find_compiler())
    assert not caught.value.is_link and any("error" in line for line in caught.value.lines)
    assert "the command was:" in str(caught.value) and "\n" not in str(caught.value)
    assert [p for p in cache.rglob("*") if p.is_file() or p.name.startswith("building")] == []


def test_an_undefined_symbol_is_found_when_linked():
    with pytest.raises(compiler.BuildError, match=r"linking fails .*undefined reference to `absent") as caught:
        compiler.build('extern "C" int absent(); extern "C" int f() { return absent(); }\n', compiler.find_compiler())
    assert caught.value.is_link


def test_a_cache_that_cannot_be_written_is_told_of(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    built = compiler.build(SOURCE, compiler.find_compiler())
    assert built.path.is_file() and "Not a directory" in built.note and "built for this time alone" in built.note


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert compiler.find_compiler() is None
    with pytest.raises(Skipped, match=r"none of c\+\+, g\+\+, clang\+\+ is on the PATH"):
        device.extension()
    with pytest.raises(Skipped, match=r"no nvcc|needs a C"):
        device.nvcc("cpu")
    monkeypatch.setenv("CXX", "hipcc --flag")
    assert compiler.find_compiler() is None and "$CXX is 'hipcc --flag'" in compiler.no_compiler()


def test_a_named_compiler_goes_first(monkeypatch):
    monkeypatch.setenv("CXX", "g++ -Wall")
    assert compiler.find_compiler() == ["g++", "-Wall"]


@pytest.mark.parametrize(
    ("text", "cause", "said"),
    [
        ("#!/bin/sh\necho cannot find cc1plus >&2; exit 4\n", "compile_fails", "--version ended with code 4"),
        ("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'fatal error: out of memory'; exit 1\n", "compile_fails",
         "out of memory"),
        ("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\nexit 0\n", "compile_fails", "it wrote nothing"),
    ],
)  # fmt: skip
def test_a_broken_compiler_fails(tmp_path, monkeypatch, text, cause, said):
    program = tmp_path / "cxx"
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(Failed, match=said) as caught:
        device.extension()
    assert caught.value.cause_id == cause and "$CXX" in caught.value.next_step


def test_checks_of_the_cpu_pass():
    assert "right" in device.extension()[0]
    assert "read back" in device.memory("cpu")[0]
    assert "solved" in device.triangular("cpu")[0]
    for dtype in ("float32", "bfloat16", "float16"):
        assert "right" in device.matmul("cpu", dtype)[0]
    for check in (device.cublas, device.cusolver):
        with pytest.raises(Skipped, match=r"no CUDA device.*; libcu.*: not found"):
            check("cpu", None)


def test_a_wrong_product_fails(monkeypatch):
    import torch

    real = torch.Tensor.__matmul__
    def wrong(factor):
        return lambda a, b: real(a, b) * (1 if a.dtype == torch.float64 else factor)

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong(1.01))
    with pytest.raises(Failed, match=r"off by 0\.01 relative"):
        device.matmul("cpu", "float32")
    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong(torch.nan))
    with pytest.raises(Failed, match="off by nan relative"):
        device.matmul("cpu", "float16")


def test_a_wrong_solve_fails(monkeypatch):
    import torch

    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda a, b, **_: b)
    with pytest.raises(Failed, match="leave a residual of 0"):
        device.triangular("cpu")
