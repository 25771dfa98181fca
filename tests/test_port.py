"""The port board: what is missing, wrong, slow, unproven or right on a card, ranked, and what each claim rests on."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from models import mini, mini_dense

from workbench.analysis.port import (
    DECODE,
    MISSING,
    PREFILL,
    RIGHT,
    SLOW,
    STATES,
    UNPROVEN,
    WRONG,
    Traffic,
    port_board,
)
from workbench.cards import card_named
from workbench.cli import main
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.kernels import registry
from workbench.kernels.conformance import conform
from workbench.kernels.norms import torch_rms
from workbench.kernels.registry import OPERATIONS, Operation
from workbench.kernels.requirements import Requires
from workbench.report.port import findings, port_page

MINIATURE = Path(__file__).resolve().parent.parent / "data" / "miniature"
BI_V100, H200, CPU = card_named("bi-v100"), card_named("h200"), card_named("cpu")
#: A CPU with figures, of nobody.
MEASURED_CPU = dataclasses.replace(
    CPU, bandwidth=2e10, rates={"float32": 1e11}, unknown={"memory_bytes": "not asked for"}
)


@functools.cache
def conformed(op, name, device, dtypes):
    return conform(op, name, device=device, dtypes=dtypes)


@pytest.fixture(autouse=True, scope="module")
def _conformance_is_checked_once():
    """Of backends as they are: a test that changes one takes the check itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "workbench.analysis.port.conform",
            lambda op, name, *, device, dtypes: conformed(op, name, device, None if dtypes is None else tuple(dtypes)),
        )
        yield


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_file(MINIATURE)


@pytest.fixture(scope="module")
def board(config):
    return port_board(config, BI_V100, model="miniature")


def by_op(board):
    return {row.op: row for row in board.rows}


def test_every_op_of_the_model_is_on_the_board_ranked_by_its_share(board, config):
    rows = by_op(board)
    # The experts' backends ask for `alignment`; `gdn_decode` stands for ops that are here one by one.
    assert set(rows) == set(OPERATIONS) - {"alignment", "gdn_decode"}
    shares = [row.share for row in board.rows]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) + sum(share for _, share in board.others) == pytest.approx(1.0)
    for phase in ("prefill", "decode"):
        assert sum(getattr(row, phase) for row in board.rows) == pytest.approx(1.0, abs=0.1)  # add and embedding
        assert sum(getattr(row, phase) for row in board.rows) < 1.0
    dense = by_op(port_board(ModelConfig.from_hf(mini_dense()), BI_V100, prompt=64))
    assert set(rows) - set(dense) == {"experts", "routing"}


def test_what_the_poor_image_of_the_card_lacks_is_missing_with_every_reason(board):
    rows = by_op(board)
    delta = rows["gated_delta_rule"]
    assert (delta.state, delta.backend, delta.meanwhile) == (MISSING, "", "torch_chunk, torch_recurrent")
    others = {name for name in OPERATIONS["gated_delta_rule"].backends if not name.startswith("torch_")}
    assert set(dict(delta.libraries)) == others - {"reference"}
    assert "CoreX GDN module not found" in dict(delta.libraries)["corex_gdn"]
    assert "that of Iluvatar BI-V100 32 GB is unknown" in dict(delta.libraries)["fla"]
    assert "vllm_moe_topk_softmax" in dict(rows["routing"].libraries)["ixformer"] and rows["routing"].state == MISSING
    assert "workbench conformance gated_delta_rule --backend module:function --device cuda" in delta.todo
    assert "torch_chunk passed" in delta.checked and "this machine's CPU" in delta.checked
    assert not board.is_fault  # what is composed of torch's operators serves


def test_what_nothing_here_can_run_is_unproven_and_not_right(board):
    row = by_op(board)["experts"]
    assert (row.state, row.backend, row.kind) == (UNPROVEN, "ixformer", "library")
    assert row.checked == "not run: this machine cannot run it"
    assert row.todo == "on the card: `workbench conformance experts --backend ixformer --device cuda`"


def test_one_kernel_of_torch_is_right_at_its_least_time_and_composed_ones_are_priced_by_their_operators(board):
    rows = by_op(board)
    assert rows["linear"].state == rows["attention"].state == RIGHT
    assert all(part.ratio == 1.0 and part.how.startswith("priced: one kernel") for part in rows["linear"].parts)
    (prefill,) = (part for part in rows["rms_norm"].parts if part.phase == PREFILL and part.name == "norms")
    assert prefill.launches >= 5 and prefill.ratio > 3 and "operators of torch a call" in prefill.how
    assert not any(part.how.startswith("measured") for row in board.rows for part in row.parts)
    assert any("Nothing was measured on the card" in text for text in board.notes)


def test_a_dtype_that_the_card_computes_elsewhere_costs_what_it_costs_there(config):
    rows = by_op(port_board(config, BI_V100, dtype="float32"))
    part = next(part for part in rows["linear"].parts if part.name == "gdn.in_proj" and part.phase == PREFILL)
    assert part.least > 0 and part.backend == "torch_linear"
    assert "takes float16, found float32" in dict(rows["experts"].libraries)["ixformer"]
    assert rows["experts"].state == MISSING


def test_a_vendors_library_is_not_expected_on_another_vendors_card(config):
    rows = by_op(port_board(config, H200, dtype="float16"))
    assert "Iluvatar's cards alone" in dict(rows["experts"].libraries)["ixformer"]
    assert rows["gated_delta_rule"].state == UNPROVEN and rows["gated_delta_rule"].backend == "cuda_chunk"


@pytest.fixture
def operations(monkeypatch):
    """A copy of the declared ops that the test may change."""
    copy = dict(OPERATIONS)
    for module in ("workbench.kernels.registry", "workbench.kernels.conformance", "workbench.analysis.port"):
        monkeypatch.setattr(f"{module}.OPERATIONS", copy)
    monkeypatch.setattr("workbench.analysis.port.conform", conform)
    return registry.OPERATIONS


def with_backend(operation: Operation, name: str, run) -> Operation:
    changed = dataclasses.replace(operation.backends[name], run=run)
    return dataclasses.replace(operation, backends=dict(operation.backends) | {name: changed})


def test_a_kernel_that_breaks_its_contract_is_wrong_with_the_place_of_the_fault(operations, config):
    def scaled(x, weight, *, eps):
        return 1.01 * torch_rms.run_rms_norm(x, weight, eps=eps)

    operations["rms_norm"] = with_backend(operations["rms_norm"], "torch_rms", scaled)
    board = port_board(config, BI_V100, prompt=64)
    row = by_op(board)["rms_norm"]
    assert row.state == WRONG and board.is_fault
    assert row.failure.startswith("torch_rms: value against the arbiter: case '2 x 5 x 33', float16, y: failed; error")
    assert row.todo == "mend torch_rms, or name another with --backend rms_norm=NAME"
    assert "failed" in row.checked


def test_nothing_but_the_arbiter_is_missing_and_a_fault(operations, config):
    operation = operations["rms_norm"]
    only = {name: backend for name, backend in operation.backends.items() if name != "torch_rms"}
    operations["rms_norm"] = dataclasses.replace(operation, backends=only, automatic_order=lambda call: ("reference",))
    board = port_board(config, BI_V100, prompt=64)
    row = by_op(board)["rms_norm"]
    assert (row.state, row.backend, row.meanwhile) == (MISSING, "", "") and board.is_fault


def test_measured_times_decide_what_is_slow(config):
    def board_at(seconds: float):
        return port_board(config, MEASURED_CPU, prompt=16, following=4, device="cpu", measure=lambda *_: seconds)

    quick, crawling = by_op(board_at(1e-9)), by_op(board_at(1.0))
    assert {row.state for row in quick.values()} == {RIGHT} and {row.state for row in crawling.values()} == {SLOW}
    part = crawling["linear"].worst
    assert part.seconds == part.calls * 1.0
    assert part.how == f"measured on CPU: the median of one call times {part.calls}"
    assert crawling["linear"].todo.startswith("profile torch_")


def test_a_card_without_figures_is_ranked_by_what_was_measured(config):
    seen = []

    def measure(call, device):
        call()
        seen.append(device)
        return 1.0

    board = port_board(config, CPU, prompt=8, following=2, device="cpu", measure=measure)
    assert board.least is None and any("whether an op is slow is not known" in text for text in board.notes)
    shares = [row.share for row in board.rows]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1.0)
    assert set(seen) == {"cpu"} and len(seen) == sum(len(row.parts) for row in board.rows)
    assert all(part.ratio is None and part.seconds == part.calls for row in board.rows for part in row.parts)
    unranked = port_board(config, CPU, prompt=8, following=2)
    assert {row.share for row in unranked.rows} == {None} and unranked.least is None


def test_operators_are_counted_with_what_they_read_and_write():
    card = dataclasses.replace(H200, bandwidth=1e6, rates={"float32": 1e9})
    x, weight = torch.empty(4, 8, device="meta"), torch.empty(16, 8, device="meta")
    for run, operators, seconds in (
        (lambda: x + 1.0, 1, 2 * 128 / 1e6),
        (lambda: x.view(8, 4).transpose(0, 1), 0, 0.0),
        (lambda: torch.empty_like(x), 0, 0.0),
        (lambda: x.expand(3, 4, 8) * 2.0, 1, (128 + 384) / 1e6),
        (lambda: weight.index_select(0, torch.empty(2, dtype=torch.int64, device="meta")), 1, (64 + 16 + 64) / 1e6),
        (lambda: x @ weight.T, 1, (128 + 512 + 256) / 1e6),
    ):
        traffic = Traffic(card, "float32")
        with traffic:
            run()
        assert traffic.operators == operators and traffic.seconds == pytest.approx(seconds)
    bound = Traffic(dataclasses.replace(card, bandwidth=1e12, rates={"float32": 1e3}), "float32")
    with bound:
        _ = x @ weight.T
    assert bound.seconds == pytest.approx(2 * 4 * 8 * 16 / 1e3)
    unknown = Traffic(dataclasses.replace(card, rates={}), "float32")
    with unknown:
        _ = x @ weight.T
    assert unknown.unknown == "rate of float32 products"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"following": 0}, "at least one token that follows"),
        ({"multiple": 0.0}, "a multiple above 0"),
        ({"prompt": 0}, "tokens: expected at least 1"),
        ({"device": "cpu"}, "card bi-v100 is a cuda device"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_what_cannot_be_asked_is_told(config, arguments, expected):
    with pytest.raises(InputError, match=expected):
        port_board(config, H200 if arguments == {"device": "cuda"} else BI_V100, **arguments)


def test_the_result_is_plain_json(board):
    read = json.loads(json.dumps(board.to_json(), allow_nan=False))
    assert read["counts"] == board.counts() and list(read["counts"]) == list(STATES)
    row = next(row for row in read["rows"] if row["op"] == "gated_delta_rule")
    assert {part["phase"] for part in row["parts"]} == {PREFILL, DECODE} and row["libraries"]
    assert read["device"] is None and read["title"] == BI_V100.title


def test_the_page_shows_every_op_and_what_the_board_rests_on(board):
    page = port_page(board, "workbench port --card bi-v100 --checkpoint data/miniature")
    assert all(f"<strong>{row.op}: {row.state}</strong>" in page for row in board.rows)
    assert "Nothing was measured on the card" in page and "<code>workbench conformance" in page
    assert findings(board)[0].startswith(f"Begin with {next(r.op for r in board.rows if r.state != RIGHT)} (")


def test_the_command_writes_the_page_and_the_json(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(mini()), encoding="utf-8")
    folder = tmp_path / "o"
    code = main(["port", "--card", "bi-v100", "--config", str(file), "--prompt-tokens", "64", "--out", str(folder)])
    out = capsys.readouterr().out
    assert code == 0 and "priced by the card's profile, nothing measured on it" in out
    assert "gated_delta_rule: missing" in out and "Nothing was measured on the card." in out
    assert json.loads((folder / "port.json").read_text(encoding="ascii"))["prompt"] == 64
    assert "--prompt-tokens 64" in (folder / "port.html").read_text(encoding="utf-8")
    assert main(["port", "--card", "nobody", "--config", str(file)]) == 2
    assert main(["port"]) == 2
    capsys.readouterr()
    code = main(["port", "--card", "cpu", "--checkpoint", str(MINIATURE), "--device", "cpu", "--prompt-tokens", "16",
                 "--json", "-"])  # fmt: skip
    measured = json.loads(capsys.readouterr().out)
    assert code == 0 and all(part["seconds"] > 0 for row in measured["rows"] for part in row["parts"])


def test_a_library_that_says_no_capability_is_doubted_where_the_profile_has_none(config, monkeypatch):
    monkeypatch.setitem(OPERATIONS, "causal_conv", OPERATIONS["causal_conv"])
    registry.register_backend(
        "causal_conv", "somebodys", lambda *given: None, lambda call: None,
        requires=Requires(devices=("cuda",), symbols=("somebodys_library:convolve",)),
    )
    boards = {card.name: by_op(port_board(config, card, prompt=64)) for card in (BI_V100, H200)}
    said = {name: dict(rows["causal_conv"].libraries)["somebodys"] for name, rows in boards.items()}
    assert said["bi-v100"] == (
        "not known to work there: bi-v100's profile has no compute capability and does not name it"
    )
    assert "does not rule it out" in said["h200"]
