"""`workbench backends`: what can compute each op, and why something cannot."""

import json

import pytest
import torch

from workbench.cli import main
from workbench.kernels import registry
from workbench.kernels.registry import OPERATIONS, register_backend
from workbench.kernels.requirements import Requires, forget_symbols


def table(tmp_path, *options: str) -> dict:
    file = tmp_path / "table.json"
    assert main(["backends", *options, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_every_backend_of_every_op_has_a_row_and_something_is_chosen(tmp_path, capsys):
    found = table(tmp_path)
    rows = {(row["op"], row["backend"]): row for row in found["backends"]}
    assert set(rows) == {(op, name) for op, operation in OPERATIONS.items() for name in operation.backends}
    for op in OPERATIONS:
        chosen = [phase for (of, _), row in rows.items() if of == op for phase in row["chosen"]]
        assert sorted(chosen) == ["decode", "prefill"]
    text = capsys.readouterr().out
    assert "torch_chunk" in text and "prefill*" in text
    for row in found["backends"]:
        assert set(row["available"]) | set(row["reasons"]) == {"decode", "prefill"}
        assert not set(row["available"]) & set(row["reasons"])


def test_the_reason_is_the_import_error_in_full(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "OPERATIONS", dict(OPERATIONS))
    (tmp_path / "broken_vendor.py").write_text(
        "raise ImportError('libbroken.so.2: undefined symbol: _ZN2at4_ops5addmm4callE')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    forget_symbols()
    register_backend("linear", "broken", None, lambda call: None, requires=Requires(symbols=("broken_vendor:run",)))
    found = table(tmp_path, "--op", "linear")
    (row,) = [row for row in found["backends"] if row["backend"] == "broken"]
    whole = "ImportError: libbroken.so.2: undefined symbol: _ZN2at4_ops5addmm4callE"
    assert row["available"] == [] and whole in row["reasons"]["prefill"]
    shown = capsys.readouterr().out.replace("\n", " ")
    assert whole in " ".join(shown.split()) and "not available" in shown
    forget_symbols()


def test_a_card_is_asked_in_its_own_terms(tmp_path):
    found = table(tmp_path, "--card", "bi-v100")
    rows = {(row["op"], row["backend"]): row for row in found["backends"]}
    assert found["rehearsed"] and found["device"] == "cuda" and found["dtype"] == "float16"
    assert "serves the CPU, not cuda" in rows["linear", "torch_onednn"]["reasons"]["prefill"]
    assert rows["gated_delta_rule", "torch_chunk"]["chosen"] == ["prefill"]
    asked = ("--dtype", "bfloat16", "--op", "experts")
    grouped = {name: table(tmp_path, "--card", name, *asked) for name in ("t4", "h200")}
    chosen = {
        name: [row["backend"] for row in content["backends"] if "prefill" in row["chosen"]]
        for name, content in grouped.items()
    }
    assert chosen == {"t4": ["torch_batched"], "h200": ["torch_grouped"]}
    (refused,) = [row for row in grouped["t4"]["backends"] if row["backend"] == "torch_grouped"]
    assert "from compute capability 9.0 on, found 7.5" in refused["reasons"]["prefill"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "softmax"], "unknown op 'softmax'"),
        (["--card", "gtx"], "gtx"),
        (["--card", "t4", "--device", "cpu"], "expected none beside --card t4"),
        (["--dtype", "int8"], "dtype: expected one of"),
    ],
)
def test_what_cannot_be_asked(options, message, capsys):
    assert main(["backends", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_device_that_is_not_here_is_judged_all_the_same(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    found = table(tmp_path, "--device", "cuda", "--dtype", "bfloat16", "--op", "experts")
    (row,) = [row for row in found["backends"] if row["backend"] == "torch_grouped"]
    assert "Torch not compiled with CUDA" in row["reasons"]["prefill"] and found["machine"] == "no cuda device"
