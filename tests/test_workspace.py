"""Scratch memory: misuse is loud and named, nothing is allocated after the start, unwritten memory shows."""

import copy
import gc
import pickle
import re
import subprocess
import sys
import threading
import warnings

import pytest
import torch

from workbench.errors import WorkbenchError, WorkspaceError, WorkspaceWarning
from workbench.kernels import workspace as module
from workbench.kernels.workspace import Workspace


@pytest.fixture
def workspace():
    made = Workspace()
    made.declare("hidden", (4, 6), torch.float32)
    made.declare("rows", 10, torch.int64)
    made.allocate()
    yield made
    with warnings.catch_warnings(action="ignore", category=WorkspaceWarning):
        made.close()


def refusal(call, *arguments, **options):
    with pytest.raises(WorkspaceError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_any_shape_that_fits_comes_from_the_same_memory(workspace):
    with workspace.take("hidden", (4, 6), torch.float32) as whole:
        assert whole.shape == (4, 6) and whole.dtype == torch.float32 and whole.is_contiguous()
        address = whole.data_ptr()
        whole.fill_(3)
    for shape in ((2, 3), (24,), (1, 2, 3), (0, 6), ()):
        with workspace.take("hidden", shape, torch.float32) as part:
            assert part.shape == shape and part.is_contiguous()
            assert part.numel() == 0 or part.data_ptr() == address
    x_taken = workspace.take("hidden", torch.Size((6, 4)), torch.float32)
    with x_taken as x, workspace.take("rows", (3,), torch.int64) as y:
        assert x.data_ptr() != y.data_ptr()
    assert workspace.unused == ()


def test_nothing_is_allocated_by_taking(workspace, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("allocates")

    for name in ("empty", "zeros", "full", "empty_like"):
        monkeypatch.setattr(torch, name, refuse)
    for rows in range(1, 5):
        with workspace.take("hidden", (rows, 6), torch.float32) as x:
            torch.mul(x, 0, out=x)
    assert len(workspace._buffers["hidden"].views) == 4


def test_kept_views_are_bounded(workspace, monkeypatch):
    monkeypatch.setattr(module, "KEPT_VIEWS", 3)
    for n in range(1, 20):
        with workspace.take("hidden", (n,), torch.float32) as x:
            assert x.shape == (n,)
        assert len(workspace._buffers["hidden"].views) <= 3


def test_misuse_names_the_buffer_with_expected_and_found(workspace):
    for arguments, wanted in (
        (("hiden", (1,), torch.float32), "'hiden': expected one of those declared (hidden, rows), found no such"),
        (("hidden", (1,), torch.bfloat16), "'hidden': expected dtype torch.float32 as declared, found torch.bfloat16"),
        (("hidden", (5, 6), torch.float32), "'hidden': expected at most 24 elements as declared, found [5, 6]"),
        (("hidden", (2**70,), torch.float32), "'hidden': expected at most 24 elements as declared, found [11805916207"),
    ):
        assert wanted in refusal(workspace.take, *arguments)
    with workspace.take("hidden", (1,), torch.float32):
        assert "'hidden': expected to be free, found it taken" in refusal(
            workspace.take, "hidden", (1,), torch.float32
        )
    with workspace.take("hidden", (1,), torch.float32):
        pass  # given back
    assert issubclass(WorkspaceError, WorkbenchError)


@pytest.mark.parametrize(
    "shape", [[2, 2], 2, None, "ab", b"ab", (-1, 6), (-1, -4), (2.0, 2), (True,), ((1,),), {1}, torch.ones(2)], ids=str
)
def test_what_is_no_shape_is_not_taken(workspace, shape):
    with workspace.take("hidden", (3, 4), torch.float32):  # a view is kept, and found by its shape
        pass
    message = refusal(workspace.take, "hidden", shape, torch.float32)
    assert "'hidden': expected a shape, a tuple of whole numbers of at least 0, found " in message
    assert f"({type(shape).__name__})" in message
    with workspace.take("hidden", (1,), torch.float32) as x:  # nothing stays taken
        assert x.shape == (1,)


@pytest.mark.parametrize("name", [None, 1, ["hidden"], {"hidden"}, b"hidden"], ids=str)
def test_what_is_no_name_is_neither_taken_nor_declared(workspace, name):
    assert f"{name!r}: expected a name, found {type(name).__name__}" in refusal(
        workspace.take, name, (1,), torch.float32
    )
    assert f"{name!r}: expected a name, found {type(name).__name__}" in refusal(
        Workspace().declare, name, 1, torch.float32
    )


def test_a_buffer_taken_without_with_stays_taken(workspace):
    workspace.take("hidden", (1,), torch.float32)
    assert "take it in a `with`" in refusal(workspace.take, "hidden", (1,), torch.float32)
    assert "found hidden taken" in refusal(workspace.close)
    with workspace._buffers["hidden"]:
        pass


def test_an_error_gives_the_buffer_back(workspace):
    with pytest.raises(ZeroDivisionError), workspace.take("hidden", (1,), torch.float32):
        raise ZeroDivisionError
    with workspace.take("hidden", (1,), torch.float32) as x:
        assert x.shape == (1,)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_order_of_declare_allocate_take():
    workspace = Workspace()
    workspace.declare("a", 4, torch.float32)
    assert "'a': expected a call of allocate before take" in refusal(workspace.take, "a", (1,), torch.float32)
    assert "'a': expected to be declared once" in refusal(workspace.declare, "a", 4, torch.float32)
    for size in (0, (), (4, -1), (2.0,), True, "4", b"4", 1.5, None, {4}, {4: 4}, [[4]], torch.ones(2), iter([4])):
        message = refusal(workspace.declare, "b", size, torch.float32)
        assert "'b': expected sizes of at least 1" in message and f"{type(size).__name__})" in message
    assert "'': expected a name, found an empty str" in refusal(workspace.declare, "", 4, torch.float32)
    for dtype in (torch.quint8, torch.bits8):
        assert f"'b': expected a dtype of numbers, found {dtype}" in refusal(workspace.declare, "b", 1, dtype)
    workspace.declare("c", [2, 3], torch.float32)
    workspace.declare("d", torch.Size((2, 3)), torch.float32)
    assert "'b': expected a torch dtype, found 'float32'" in refusal(workspace.declare, "b", 1, "float32")
    workspace.allocate()
    assert "'b': expected it declared before allocate, found all allocated" in refusal(
        workspace.declare, "b", 4, torch.float32
    )
    assert "expected one call, found the workspace allocated already" in refusal(workspace.allocate)
    for name in ("a", "c", "d"):
        with workspace.take(name, (1,), torch.float32):
            pass
    assert workspace.close() == workspace.close() == ()
    assert "found it closed" in refusal(workspace.take, "a", (1,), torch.float32)
    assert "found the workspace closed" in refusal(workspace.allocate)
    assert "found the workspace closed" in refusal(workspace.declare, "b", 4, torch.float32)


@pytest.mark.parametrize("device", ["foo", "", "cuda:x", "mps:7", "vulkan", "xla", "hpu", None, [1], -1, 999], ids=repr)
def test_devices_that_this_machine_does_not_have(device):
    message = refusal(Workspace, device)
    assert f"workspace: device: expected one of this machine, such as cpu, found {str(device)!r}: " in message
    assert len(message) < 400


def test_cuda_devices_beyond_those_of_this_machine():
    refusal(Workspace, f"cuda:{torch.cuda.device_count()}")
    if not torch.cuda.is_available():
        assert "found 'cuda': " in refusal(Workspace, "cuda")


@pytest.mark.parametrize("elements", [2**50, 2**62, 2**70])
def test_memory_that_is_not_to_be_had_is_named_and_nothing_is_allocated(elements):
    workspace = Workspace()
    workspace.declare("small", 4, torch.float32)
    workspace.declare("large", elements, torch.float32)
    message = refusal(workspace.allocate)
    assert f"allocate: buffer 'large': expected {elements:,} elements of torch.float32 ({elements * 4:,} B" in message
    assert "on cpu, found no such memory: " in message and len(message) < 600
    assert "expected a call of allocate before take" in refusal(workspace.take, "small", (1,), torch.float32)
    with pytest.warns(WorkspaceWarning):
        workspace.close()


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_is_not_copyable(workspace, copying):
    assert "two owners would write to the same scratch memory" in refusal(copying, workspace)
    with pytest.raises(WorkspaceError):
        copying({"inside": workspace} if copying is not copy.copy else workspace)


def test_another_thread_is_refused(workspace):
    messages = []
    thread = threading.Thread(
        target=lambda: messages.append(refusal(workspace.take, "hidden", (1,), torch.float32))
    )
    thread.start()
    thread.join()
    assert "'hidden': expected to be taken by thread" in messages[0] and "a workspace of its own" in messages[0]


# ---- what was never used


def declared_two(**options):
    workspace = Workspace(**options)
    workspace.declare("used", 4, torch.float32)
    workspace.declare("forgotten", 4, torch.float32)
    workspace.allocate()
    with workspace.take("used", (4,), torch.float32):
        pass
    return workspace


def test_never_taken_is_reported_by_close_and_at_the_end_of_with():
    with pytest.warns(WorkspaceWarning, match="never taken: forgotten"):
        assert declared_two().close() == ("forgotten",)
    with pytest.warns(WorkspaceWarning, match="never taken: forgotten"), declared_two():
        pass
    with pytest.warns(WorkspaceWarning, match="never taken: a"), Workspace() as workspace:
        workspace.declare("a", 1, torch.float32)  # not even allocated


def test_never_taken_says_that_the_backend_may_take_none():
    """`torch_grouped` takes fresh memory, so that what was declared for it on purpose stays untaken."""
    with pytest.warns(WorkspaceWarning) as caught:
        declared_two().close()
    (message,) = [str(warning.message) for warning in caught]
    assert "unless the backend that was chosen takes no scratch memory (`Kernels.attestation` names it)" in message


def test_never_taken_is_reported_by_a_workspace_that_nobody_closed():
    with pytest.warns(WorkspaceWarning, match="never taken: forgotten"):
        declared_two()
        gc.collect()


def test_teardown_raises_nothing_where_warnings_are_errors(capsys):
    def unraisable(what):
        raised.append(what)

    raised, before = [], sys.unraisablehook
    sys.unraisablehook = unraisable
    try:
        with warnings.catch_warnings(action="error"):
            declared_two()
            gc.collect()
    finally:
        sys.unraisablehook = before
    assert not raised and "never taken: forgotten" in capsys.readouterr().err


def test_the_end_of_the_process_reports_too():
    code = (
        "import torch\nfrom workbench.kernels.workspace import Workspace\n"
        "w = Workspace(); w.declare('forgotten', 4, torch.float32); w.allocate()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "never taken: forgotten" in done.stderr and "Traceback" not in done.stderr


def test_an_error_on_its_way_out_is_not_replaced():
    with pytest.raises(ZeroDivisionError), Workspace() as workspace:
        workspace.declare("a", 1, torch.float32)
        workspace.allocate()
        with workspace.take("a", (1,), torch.float32):
            raise ZeroDivisionError


# ---- debug


LOUD = {
    torch.float64: torch.isnan, torch.float32: torch.isnan, torch.bfloat16: torch.isnan, torch.float16: torch.isnan,
    torch.complex64: torch.isnan, torch.float8_e4m3fn: lambda x: x.float().isnan(),
    torch.float8_e5m2: lambda x: x.float().isnan(), torch.int64: lambda x: x == 2**63 - 1,
    torch.int32: lambda x: x == 2**31 - 1, torch.uint8: lambda x: x == 255, torch.bool: lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("dtype", LOUD, ids=str)
def test_debug_fills_with_what_shows_at_each_take_and_after(dtype):
    with Workspace(debug=True) as workspace:
        workspace.declare("scratch", 6, dtype)
        workspace.allocate()
        for shape in ((6,), (2, 3), (6,)):
            with workspace.take("scratch", shape, dtype) as x:
                assert LOUD[dtype](x).all()
                x.zero_()
                assert not LOUD[dtype](x).any()
            assert LOUD[dtype](x).all()  # a read that comes too late


def test_debug_shows_a_read_of_what_was_not_written():
    def sum_of_rows(debug):
        with Workspace(debug=debug) as workspace:
            workspace.declare("rows", (3, 2), torch.float32)
            workspace.allocate()
            with workspace.take("rows", (3, 2), torch.float32) as rows:
                rows.zero_()
            with workspace.take("rows", (3, 2), torch.float32) as rows:
                rows[:2] = 1.0  # and the third is forgotten
                return float(rows.sum())

    assert sum_of_rows(False) == 4.0  # passes by luck
    assert sum_of_rows(True) != sum_of_rows(True)  # NaN


# ---- figures, devices, autograd


def test_bytes_are_counted_and_shown(workspace):
    assert workspace.n_bytes == 24 * 4 + 10 * 8
    with workspace.take("rows", (1,), torch.int64):
        pass
    lines = str(workspace).splitlines()
    assert re.search(r"^hidden +24 float32 +96 B  taken 0 times$", lines[0])
    assert re.search(r"^rows +10 int64 +80 B  taken 1 times$", lines[1])
    assert re.search(r"^workspace +cpu +176 B$", lines[-1])
    waiting = Workspace("meta")
    waiting.declare("a", 5, torch.float16)
    assert "not allocated" in str(waiting) and waiting.n_bytes == 10
    waiting.allocate()
    with waiting.take("a", (5,), torch.float16) as x:
        assert x.device.type == "meta"
    assert waiting.close() == ()


def test_inference_mode_leaves_no_trace(workspace):
    with torch.inference_mode(), workspace.take("hidden", (2, 2), torch.float32) as x:
        x.zero_()
    with workspace.take("hidden", (2, 2), torch.float32) as x:
        x.add_(1)
        assert not x.is_inference() and not x.requires_grad
    weight = torch.ones(2, 2, requires_grad=True)
    with workspace.take("hidden", (2, 2), torch.float32) as x, pytest.raises(RuntimeError, match="out="):
        torch.mm(weight, weight, out=x)
