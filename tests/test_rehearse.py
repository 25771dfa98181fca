"""What a checkpoint would do on a card: verdict, changes with their price, and the page that says so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from models import mini, mini_dense, mini_next
from test_rehearsal import Witness

from workbench.analysis.half_precision import OVERFLOW
from workbench.analysis.rehearse import CANNOT_RUN, DOES_NOT_FIT, NOT_FINITE, rehearse
from workbench.cards import card_named
from workbench.checkpoint import read_checkpoint, write_checkpoint
from workbench.cli import main
from workbench.config import ModelConfig
from workbench.errors import BackendError
from workbench.kernels import Kernels, registry
from workbench.kernels.linear import torch_linear
from workbench.kernels.requirements import Requires
from workbench.model import CausalLM
from workbench.numerics import NumericsPolicy
from workbench.report.build import Request, _build_card
from workbench.report.card import card_page

MINIATURE = Path(__file__).resolve().parent.parent / "data" / "miniature"
IDS = list(range(300, 380))
BI_V100 = card_named("bi-v100")


@pytest.fixture(scope="module")
def bi_v100():
    """The whole report, and every operator that ran for it."""
    witness, lines = Witness(), []
    with witness:
        report = rehearse(MINIATURE, "bi-v100", IDS, progress=lines.append)
    return report, witness.ran, lines


@pytest.fixture
def overflowing(tmp_path):
    """The miniature with a value stream that leaves float16's range in one layer, and float32's nowhere."""
    checkpoint = read_checkpoint(MINIATURE)
    name = "layers.2.mlp.shared_expert.down_proj.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name] * 2.0**20
    write_checkpoint(tmp_path / "large", checkpoint.config, checkpoint.tensors)
    for file in MINIATURE.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "large")
    return tmp_path / "large"


def test_the_miniature_runs_on_the_card_of_the_bring_up(bi_v100):
    report, ran, lines = bi_v100
    assert not report.verdict.is_fault and report.error is None and report.verdict.confidence == "likely"
    assert report.verdict.verdict.startswith("Runs on Iluvatar BI-V100 32 GB in float16")
    assert len(ran) > 30 and not ran & set(BI_V100.absent_primitives)
    assert report.elapsed < 60 and len(lines) >= 3
    assert set(report.ops["op"]) >= {"linear", "experts", "gated_delta_rule", "attention", "routing", "rms_norm"}
    assert set(report.ops["tokens"]) == {"1", "2 and more"}
    assert report.accuracy["card"] < 0.05 and report.plan.fits and report.readiness is not None


def test_what_was_routed_has_a_reason_and_a_price(bi_v100):
    report, _, _ = bi_v100
    routed = report.products[report.products["outcome"] == "route"]
    assert set(routed["op"]) == {"gated_delta_rule"} and set(routed["dtype"]) == {"float32"}
    assert routed["factor"].tolist() == pytest.approx([147 / 37] * len(routed))
    (change,) = (c for c in report.changes if "gated_delta_rule" in c.what)
    assert "kHalf" in change.why and "3.97 times" in change.cost and "of the pass" in change.cost
    assert "stay in float32" in change.what
    prompt, token = report.seconds.values()
    assert prompt[0] > prompt[1] and token[0] == token[1]  # a step is bound by memory, which no rule changes
    first = report.costs[report.costs["part"] == "gdn.delta_rule"].iloc[0]
    assert (first["dtype"], first["bound"]) == ("float32", "compute")


def test_linear_would_be_the_vendors_there(bi_v100):
    rows = bi_v100[0].ops[bi_v100[0].ops["op"] == "linear"]
    assert set(rows["on_card"]) == {"ixformer"} and set(rows["backend"]) == {"torch_linear"}
    assert all("rule of the card: ixformer's matmul takes kHalf" in why for why in rows["why"])


def test_libraries_are_judged_by_the_limits_of_the_card(bi_v100):
    there = bi_v100[0].named.set_index(["op", "backend"])
    assert there.loc[("linear", "ixformer"), "can"] and there.loc[("experts", "ixformer"), "can"]
    assert "'vllm_moe_topk_softmax' not in the ixformer of one image" in there.loc[("routing", "ixformer"), "reason"]
    assert "CoreX MoE module not found" in there.loc[("experts", "corex_moe"), "reason"]
    here = rehearse(MINIATURE, "t4", IDS[:9], with_readiness=False).named.set_index(["op", "backend"])
    assert here.loc[("linear", "ixformer"), "reason"] == "a library of Iluvatar's cards alone"
    assert here.loc[("experts", "vllm"), "reason"] == "needs compute capability 8.0, found 7.5"


def test_a_backend_that_the_card_alone_can_run_comes_first_there(monkeypatch):
    ours = registry.OPERATIONS["linear"]
    entry = registry.Backend(
        op="linear", name="vendor", run=torch_linear.run, supports=torch_linear.supports,
        requires=Requires(devices=("cuda",), symbols=("no_such_package:matmul",)),
    )  # fmt: skip
    backends = {**ours.backends, "vendor": entry}
    monkeypatch.setitem(
        registry.OPERATIONS, "linear",
        replace(ours, backends=backends, automatic_order=lambda call: ("vendor", *ours.automatic_order(call))),
    )  # fmt: skip
    report = rehearse(MINIATURE, "h200", IDS[:9])
    rows = report.ops[report.ops["op"] == "linear"]
    assert set(rows["on_card"]) == {"vendor"} and set(rows["backend"]) == {"torch_linear"}
    assert "vendor: NVIDIA H200 SXM 141 GB can run it" in rows["refused"].iloc[0]
    assert "this machine cannot" in rows["why"].iloc[0]
    with pytest.raises(BackendError, match=r"can run it; .*leave it to the automatic choice"):
        rehearse(MINIATURE, "h200", IDS[:9], backend="linear=vendor")


def test_a_policy_that_the_card_cannot_serve_is_the_verdict_and_the_way_out_is_proven():
    policy = NumericsPolicy(solver="solve_triangular")
    report = rehearse(
        MINIATURE, "bi-v100", IDS[:70], policy=policy, backend="gated_delta_rule=torch_chunk", with_readiness=False
    )
    assert report.verdict.cause_id == CANNOT_RUN and report.verdict.exit_code == 1
    assert "libcusolver.so" in report.verdict.verdict and "gated_delta_rule" in report.error
    assert "automatic choice" in report.verdict.fix
    assert report.changes[0].must and "proven" in report.changes[0].cost
    assert len(report.ops) and report.accuracy is None


def test_the_same_policy_without_a_named_backend_is_served_another_way():
    policy = NumericsPolicy(solver="solve_triangular")
    report = rehearse(MINIATURE, "bi-v100", IDS[:70], policy=policy, with_readiness=False)
    assert not report.verdict.is_fault
    rows = report.ops[report.ops["op"] == "gated_delta_rule"]
    assert set(rows["backend"]) == {"torch_recurrent"}
    (change,) = (c for c in report.changes if "row_loop" in c.what and "torch_recurrent serves" in c.what)
    assert "libcusolver.so" in change.why
    assert rehearse(MINIATURE, "h200", IDS[:70], policy=policy).error is None


def test_a_card_that_is_too_small(tmp_path):
    card = replace(BI_V100, memory_bytes=8_000_000)
    report = rehearse(MINIATURE, card, IDS[:9], with_readiness=False)
    assert report.verdict.cause_id == DOES_NOT_FIT and "weights alone" in report.verdict.verdict
    assert "at least" in report.verdict.fix and report.changes[0].must
    card = replace(BI_V100, memory_bytes=80_000_000)
    report = rehearse(MINIATURE, card, IDS[:9], with_readiness=False, sequences=64)
    assert report.verdict.cause_id == DOES_NOT_FIT and "64 sequences of 8,192 tokens" in report.verdict.verdict
    assert f"at most {report.plan.most_sequences} sequences" in report.verdict.fix


def test_overflow_of_float16_is_found_with_a_remedy_and_its_price(overflowing):
    report = rehearse(overflowing, "bi-v100", IDS[:40])
    assert report.verdict.cause_id == OVERFLOW and "down_proj" in report.verdict.verdict
    assert report.verdict.where.layer == 2 and report.verdict.fix == report.readiness.verdict.fix
    remedy = next(c for c in report.changes if c.what.startswith(report.readiness.remedy.name))
    assert remedy.must and "proven by a rerun" in remedy.cost and "times 2^" in remedy.what
    plain = rehearse(overflowing, "bi-v100", IDS[:40], with_readiness=False)
    assert plain.verdict.cause_id == NOT_FINITE and "workbench trace --card bi-v100" in plain.verdict.fix
    assert not rehearse(overflowing, "a100", IDS[:40]).verdict.is_fault  # bfloat16 has the range


def test_a_card_with_bfloat16_needs_nothing():
    report = rehearse(MINIATURE, "h200", IDS[:9])
    assert report.dtype == report.stored == "bfloat16" and report.readiness is None
    assert not any(change.must for change in report.changes)
    assert set(report.products["outcome"]) == {"run"} or set(report.products["dtype"]) == {"bfloat16", "float32"}


@pytest.mark.parametrize(
    "fields",
    [
        mini_dense(), mini_next(), mini(layer_types=["linear_attention"] * 4, full_attention_interval=None),
        mini(layer_types=["full_attention"] * 4, full_attention_interval=None, mtp_num_hidden_layers=0),
    ],
    ids=["dense", "next", "linear layers alone", "full attention alone"],
)  # fmt: skip
def test_every_family_is_rehearsed_and_shown(fields, tmp_path):
    model = CausalLM(ModelConfig.from_hf(fields), Kernels()).init_weights(0)
    write_checkpoint(tmp_path / "model", model.config, model.state_dict())
    report = rehearse(tmp_path / "model", "v100", list(range(70)))
    assert not report.verdict.is_fault and report.readiness is not None
    assert {"linear", "rms_norm"} <= set(report.ops["op"]) and report.costs["seconds"].gt(0).all()
    assert card_page(report, "workbench rehearse").count("<h2>") == 8


def test_unknown_figures_are_said_to_be_unknown():
    report = rehearse(MINIATURE, "cpu", IDS[:9])
    assert report.verdict.verdict.endswith("whether it fits is not known") and not report.verdict.is_fault
    assert set(report.seconds.values()) == {(None, None)}
    page = card_page(report, "workbench rehearse")
    assert "Times cannot be given: unknown: " in page and "unknown" in page


def test_json_and_page(bi_v100):
    report, _, _ = bi_v100
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["cause_id"] is None and content["card"] == "bi-v100" and content["memory"]["fits"] is True
    assert {row["op"] for row in content["products"]} >= {"linear", "experts"}
    assert content["unknown"]["capability"]
    page = card_page(report, "workbench rehearse X --card bi-v100")
    place = [page.index(f"<h2>{heading}") for heading in (
        "What to change", "What runs for each op", "Products under", "Where float16 overflows", "Memory", "Least time",
        "The card",
    )]  # fmt: skip
    assert place == sorted(place) and page.index("Runs on Iluvatar") < place[0]
    assert "http" not in page and "<script" not in page


def test_the_report_command_writes_the_page_besides(tmp_path):
    parameters = {"checkpoint": "miniature", "prompt": "Shall I compare thee"}
    request = Request(out=tmp_path, command="workbench report --card t4")
    report = _build_card(card_named("t4"), MINIATURE.parent, parameters, request, lambda line: None)
    assert report.page == tmp_path / "card_t4.html" and 'href="index.html"' in report.page.read_text("utf-8")
    findings = json.loads(report.findings_file.read_text("utf-8"))
    assert findings["title"] == "miniature on NVIDIA T4 16 GB" and findings["fault_found"] is False
    assert findings["verdict"] and all(set(n) == {"label", "value", "note"} for n in findings["numbers"])


def test_command_line(tmp_path, capsys):
    arguments = ["rehearse", str(MINIATURE), "--card", "bi-v100", "--ids", "1,2,3,4,5", "--no-readiness"]
    assert main([*arguments, "--out", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("Runs on Iluvatar BI-V100") and "what to change:" in out.out
    assert "rehearse: " in out.err and (tmp_path / "page.html").is_file()
    assert main([*arguments, "--json", "-", "--length", "100", "--sequences", "2"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["memory"]["length"], content["memory"]["sequences"]) == (100, 2)
    assert main([*arguments, "--backend", "gated_delta_rule=reference", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["error"] is None


def test_a_plan_needs_no_run_and_no_prompt(capsys):
    witness = Witness()
    with witness:
        report = rehearse(MINIATURE, "bi-v100", (), with_run=False)
    assert "aten::mm" not in witness.ran and report.verdict.verdict.startswith("Fits Iluvatar BI-V100 32 GB in float16")
    assert report.ops.empty and report.seconds["prompt of 2,048 tokens"][0] > 0
    rule = report.costs[report.costs["op"] == "gated_delta_rule"].iloc[0]
    assert rule["dtype"] == "float32" and rule["factor"] > 1
    assert "Nothing was run." in card_page(report, "workbench rehearse")
    assert rehearse(MINIATURE, "cpu", (), with_run=False).verdict.confidence == "not_established"
    small = rehearse(MINIATURE, replace(BI_V100, memory_bytes=1_000_000), (), with_run=False)
    assert small.verdict.cause_id == DOES_NOT_FIT
    assert main(["rehearse", str(MINIATURE), "--card", "h200", "--plan-only"]) == 0
    assert capsys.readouterr().out.startswith("Fits NVIDIA H200")


def test_the_models_own_option_runs_under_the_limits(capsys):
    assert main(["generate", str(MINIATURE), "--ids", "5,6,7", "--card", "bi-v100", "--max-new-tokens", "3"]) == 0
    assert "routed from ixformer to torch" in capsys.readouterr().err


OWN_CARD = """
title = "Nova X1"
device = "cuda"
native_matmul = ["float16"]
model_dtype = "float16"

[unknown]
capability = "not asked"
memory_bytes = "not asked"
bandwidth = "not asked"
"rates.float16" = "not asked"
"rates.bfloat16" = "not asked"
"rates.float32" = "not asked"
"rates.float64" = "not asked"

[[absent_primitives]]
names = ["aten::linalg_qr"]
library = "libother.so"
error = "no such library"
instead = "nothing of it"

[[absent_primitives]]
names = ["{primitive}"]
library = "libscan.so"
error = "scan not implemented"
instead = "a product with a triangle of ones"

[[rules]]
op = "matmul"
library = "novablas"
dtypes = ["float32"]
outcome = "{outcome}"
to = "{to}"
why = "float16 alone"
source = "its error"
"""


IDS_OPTION = ("--ids", "300,301,302")


def own_card(folder, primitive, outcome, to):
    path = folder / "nova.toml"
    path.write_text(OWN_CARD.format(primitive=primitive, outcome=outcome, to=to))
    return path


def test_a_card_on_which_nothing_runs_gets_a_verdict_all_the_same(tmp_path, capsys):
    card = own_card(tmp_path, "aten::ormqr", "cast", "float16")
    arguments = ["rehearse", str(MINIATURE), "--card", str(card), *IDS_OPTION]
    assert main([*arguments, "--json", str(tmp_path / "r.json"), "--out", str(tmp_path / "r.html")]) == 1
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["verdict"].startswith("Does not run on Nova X1: op gated_delta_rule")
    assert "nothing narrows the state, the log decays or their sum; route it to" in found["verdict"]
    assert "; given q [" in found["error"] and found["error"] in found["evidence"]
    assert found["ended"] == "gated_delta_rule" and found["readiness"]["verdict"].startswith("Float16 serves")
    assert any("float16 was judged with this machine's arithmetic" in line for line in found["evidence"])
    assert found["changes"][0]["must"] and "find another way for gated_delta_rule" in found["changes"][0]["what"]
    told = {change["what"]: change["cost"] for change in found["changes"]}
    assert not any("operands of gated_delta_rule to float16" in what for what in told)  # it must not be done
    libraries = [what.partition(";")[0] for what in told if what.startswith("do without ")]
    assert libraries == ["do without libother.so", "do without libscan.so"]  # each for itself
    assert told["do without libscan.so; in the place of ormqr: a product with a triangle of ones"].startswith("unknown")
    assert "the run ended in gated_delta_rule" in capsys.readouterr().out
    assert "The run ended in gated_delta_rule" in (tmp_path / "r.html").read_text()


def test_an_op_that_the_automatic_choice_cannot_run_there_is_led_to_a_backend_that_a_run_proves(tmp_path, capsys):
    card = own_card(tmp_path, "aten::cumsum", "route", "torch")
    report = rehearse(MINIATURE, card, IDS[:9])
    assert report.verdict.cause_id == CANNOT_RUN and "aten::cumsum, called by gated_delta_rule" in report.error
    assert "card nova lacks libscan.so: scan not implemented; use a product with" in report.verdict.verdict
    assert report.verdict.fix.startswith("--backend gated_delta_rule=torch_recurrent: that run ends well")
    assert report.changes[0].what.startswith("--backend gated_delta_rule=torch_recurrent, in the place of torch_chunk")
    assert report.changes[0].must and report.changes[0].why.startswith("AbsentPrimitive: aten::cumsum")
    assert "proven by a run" in report.changes[0].cost and report.ended is None
    assert set(report.ops["op"]) >= {"gated_delta_rule", "experts", "attention"}  # the whole model ran
    assert len({change.what for change in report.changes}) == len(report.changes)
    named = report.verdict.fix.partition(": ")[0].split()
    assert main(["rehearse", str(MINIATURE), "--card", str(card), *IDS_OPTION, "--no-readiness", *named]) == 0
    assert "retried" not in capsys.readouterr().err  # nothing is replaced in a run that was asked for
