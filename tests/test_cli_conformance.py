"""`workbench conformance`: backends of the registry, a function in the current folder, and the contract in print."""

import json
import sys

import pytest

from workbench.cli import conformance, main
from workbench.kernels.conformance import CONTRACTS, signature_text
from workbench.kernels.registry import OPERATIONS
from workbench.kernels.requirements import forget_symbols

KERNELS = """
import torch
from torch.nn.functional import linear as product

def scaled(x, weight):
    return 1.01 * product(x, weight)

def without_backward(x, weight):
    return product(x, weight.detach())

def swapped(weight, x):
    raise SystemExit("it was run")

number = 3
"""
OF_A_CARD = """
import torch
from workbench.kernels.requirements import Requires

REQUIRES = Requires(dtypes=(torch.float16,))
MUTATES = ("window",)
ROUNDS_INSIDE = True

def supports(call):
    return "written for one token" if call.tokens > 1 else None

def update(x, weight, *, window=None, cu_seqlens=None):
    from workbench.kernels.causal_conv.torch_shift import run
    y, new = run(x, weight, window=window, cu_seqlens=cu_seqlens)
    return y, new if window is None else window.copy_(new)
"""


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run the command in a folder with modules of somebody; returns (code, stdout, stderr)."""
    for name, text in (("kernels_of_mine", KERNELS), ("of_a_card", OF_A_CARD), ("broken_import", "import no_such_lib")):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget_symbols()

    def call(*arguments):
        code = main(["conformance", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    for name in ("kernels_of_mine", "of_a_card", "broken_import"):
        sys.modules.pop(name, None)
    forget_symbols()


def test_a_registered_backend_passes(run):
    code, out, err = run("rms_norm", "--backend", "torch_rms")
    assert (code, err) == (0, "") and out.startswith("rms_norm torch_rms on cpu: passed\n")
    row = next(line for line in out.splitlines() if line.startswith("value against the arbiter"))
    assert row.split()[-3:] == [str(4 * len(CONTRACTS["rms_norm"].cases())), "0", "0"]


def test_a_function_of_the_current_folder_fails_at_its_place(run, tmp_path):
    code, out, _ = run("linear", "--backend", "kernels_of_mine:scaled", "--dtype", "float32", "--json", "found.json")
    assert code == 1 and "linear kernels_of_mine:scaled on cpu: failed" in out
    lines = out[out.index("failures\n") :].splitlines()[1:]
    assert lines[0].startswith("value against the arbiter: case 'one row', float32, y: failed; error 0.01, limit")
    assert [line.split(":")[0] for line in lines[:4]] == [
        "value against the arbiter", "strides do not matter", "NaN stays visible and in its rows", "gradients",
    ]  # fmt: skip
    (result,) = json.loads((tmp_path / "found.json").read_text(encoding="ascii"))["results"]
    assert result["outcome"] == "failed" and result["backend"] == "kernels_of_mine:scaled"
    assert any(row["check"] == "value against the arbiter" and row["index"] for row in result["rows"])
    assert "kernels_of_mine:scaled" not in OPERATIONS["linear"].backends


def test_a_function_without_a_backward_pass_says_so_and_is_not_held_to_one(run):
    arguments = ("linear", "--backend", "kernels_of_mine:without_backward", "--dtype", "float32,bfloat16")
    code, out, _ = run(*arguments)
    assert code == 1 and "gradients: case 'one row', float32, weight: failed" in out
    code, out, _ = run(*arguments, "--inference")
    assert code == 0 and "16 checks" not in out.split("refused:")[0] and "it has no backward pass (--inference)" in out


def test_what_the_module_declares_is_heeded(run):
    """Its dtype, its limit of one token, and that it updates the window in place."""
    code, out, _ = run("causal_conv", "--backend", "of_a_card:update", "--inference")
    assert code == 0 and "passed" in out.splitlines()[0]
    assert "takes float16, found float32" in out and "written for one token" in out
    assert conformance._foreign(CONTRACTS["causal_conv"], "of_a_card:update", inference=True).rounds_inside


def test_several_backends_are_a_line_each(run):
    code, out, _ = run("linear", "--dtype", "float64")
    rows = {line.split()[1]: line for line in out.splitlines()}
    assert code == 0 and set(rows) == set(OPERATIONS["linear"].backends)
    assert "passed" in rows["torch_linear"] and "refused: written for float32" in rows["torch_onednn"]


def test_all_ops_take_a_name_that_some_have(run):
    code, out, _ = run("all", "--backend", "torch_sort", "--dtype", "float32", "--json", "-")
    results = json.loads(out)["results"]
    assert code == 0 and [(one["op"], one["outcome"]) for one in results] == [
        ("alignment", "passed"), ("routing", "passed"),
    ]  # fmt: skip


def test_nothing_served_is_nothing_known(run):
    code, out, err = run("linear", "--backend", "torch_onednn", "--dtype", "float64")
    assert code == 2 and "refused" in out and "nothing was served, so that nothing is known" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("linear --backend kernels_of_mine:swapped", "it has weight where x is passed, x where weight is passed; expe"),
        ("linear --backend kernels_of_mine:swapped", "found swapped(weight, x); `workbench conformance linear --contr"),
        ("gated_delta_rule --backend kernels_of_mine:scaled", "too many positional arguments; expected gated_delta_r"),
        ("linear --backend kernels_of_mine:number", "expected a function, found int"),
        ("linear --backend kernels_of_mine:nothing", "kernels_of_mine has no nothing"),
        ("linear --backend broken_import:f", "import of broken_import fails: ModuleNotFoundError: No module named 'no"),
        ("all --backend kernels_of_mine:scaled", "expected the function's op, found all"),
        ("linear --backend fast", "op linear has none of that name, expected one of"),
        ("linear --inference", "--inference: expected beside --backend MODULE:FUNCTION"),
        ("softmax", "unknown op 'softmax', expected one of alignment"),
        ("linear --dtype int3", "dtype: expected one of"),
        ("linear --device tpu", "--device tpu: expected cpu, cuda or cuda:N"),
        ("linear --case nowhere", "unknown case 'nowhere', expected one of one row"),
    ],
)
def test_unusable_input_is_one_line(run, arguments, expected):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "") and expected in err and err.count("\n") == 1


@pytest.mark.parametrize("op", CONTRACTS)
def test_the_contract_says_all_that_a_backend_has_to_know(run, op):
    code, out, _ = run(op, "--contract")
    contract, flat = CONTRACTS[op], " ".join(out.split())
    assert code == 0 and f"run{signature_text(op)}" in flat and " ".join(contract.tolerance.split()) in flat
    assert all(f"\n{name}: " in out for name in contract.cases())
    assert all(name in flat for name in (*contract.outputs, *contract.wide, *contract.may_update, *contract.probes()))
    assert " ".join(contract.spec.__doc__.split()) in flat


def test_the_contract_as_json(run):
    code, out, _ = run("all", "--contract", "--json", "-")
    contracts = {one["op"]: one for one in json.loads(out)["contracts"]}
    assert code == 0 and set(contracts) == set(CONTRACTS)
    assert contracts["gated_delta_rule"]["limits"]["state"]["bfloat16"] == 3e-6
    assert contracts["causal_conv"]["may_update"] == ["window"]
