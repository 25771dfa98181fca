"""Load of the experts: counted by hand, apart for the prediction head, complete for experts that nothing chose."""

import json
from pathlib import Path

import models
import pandas as pd
import pytest
import torch

import workbench
from workbench.analysis.routing import (
    KINDS,
    LOAD_COLUMNS,
    dead_experts,
    expert_load,
    largest_share,
    load_by_kind,
    load_summary,
    read_routing_texts,
)
from workbench.config import ModelConfig
from workbench.errors import InputError
from workbench.model import CausalLM

DATA = Path(__file__).parent.parent / "data"


def build(fields: dict) -> CausalLM:
    return CausalLM(ModelConfig.from_hf(fields)).init_weights(3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return build(models.mini())


def rows(*lengths: int) -> list[list[int]]:
    return [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def test_load_is_the_count_of_each_router_s_best_experts(model):
    texts = rows(40, 7)
    load = expert_load(model, texts)
    assert tuple(load.columns) == LOAD_COLUMNS
    assert load.groupby(["part", "layer"], sort=False).size().to_dict() == {
        ("model", 0): 8, ("model", 1): 8, ("model", 2): 8, ("model", 3): 8, ("mtp", 0): 8,
    }  # fmt: skip
    expected = dict.fromkeys(zip(load["part"], load["layer"], load["expert"], strict=True), 0)
    for text in texts:
        ids = torch.tensor([text])
        with workbench.trace(model, keep="*.moe.logits") as trace:
            out = model(ids)
            model.mtp_logits(out.hidden[:, :-1], ids[:, 1:])
        for name, logits in trace.tensors.items():
            place = ("mtp", 0) if name.startswith("mtp.") else ("model", int(name.split(".")[1]))
            for expert in logits.topk(2).indices.flatten().tolist():
                expected[(*place, expert)] += 1
    assert load["tokens"].tolist() == list(expected.values())
    for (part, _), layer in load.groupby(["part", "layer"]):
        read = 47 if part == "model" else 45  # the last token of a text has none after it
        assert layer["tokens"].sum() == 2 * read
        assert layer["share"].tolist() == pytest.approx((layer["tokens"] / (2 * read)).tolist())
        assert layer["token_share"].tolist() == pytest.approx((layer["tokens"] / read).tolist())


def test_a_model_that_always_chooses_the_same_shows_it():
    model = build(models.mini())
    for layer in model.layers:
        layer.mlp.gate.weight.zero_()  # equal logits: the lowest expert numbers win
    load = expert_load(model, rows(30))
    main = load[load["part"] == "model"]
    assert set(dead_experts(main)["expert"]) == set(range(2, 8)) and len(dead_experts(main)) == 4 * 6
    top = largest_share(main)
    assert top[["layer", "expert", "tokens"]].values.tolist() == [[i, 0, 30] for i in range(4)]
    assert (top["share"] == 0.5).all() and (top["token_share"] == 1.0).all()
    summary = load_summary(main)
    assert (summary["dead"] == 6).all() and (summary["largest_token_share"] == 1.0).all()
    assert summary["effective_experts"].tolist() == pytest.approx([2.0] * 4)


def test_an_even_load_has_all_experts_effective():
    load = pd.DataFrame([("model", 0, e, 5, 0.125, 0.25) for e in range(8)], columns=list(LOAD_COLUMNS))
    assert load_summary(load)["effective_experts"].tolist() == pytest.approx([8.0])
    assert dead_experts(load).empty


def test_kinds_stand_one_below_the_other(model):
    first, second = rows(20), rows(9, 12)
    load = load_by_kind(model, {"prose": first, "code": second})
    assert list(load.columns) == ["kind", *LOAD_COLUMNS]
    pd.testing.assert_frame_equal(
        load[load["kind"] == "code"].drop(columns="kind").reset_index(drop=True), expert_load(model, second)
    )
    assert len(load_summary(load)) == len(largest_share(load)) == 2 * 5


def test_a_dense_layer_is_left_out_and_a_dense_model_refused():
    load = expert_load(build(models.mini_next()), rows(10))  # layer 1 is dense
    assert list(dict.fromkeys(zip(load["part"], load["layer"], strict=True))) == [
        ("model", 0), ("model", 2), ("model", 3), ("mtp", 0),
    ]  # fmt: skip
    with pytest.raises(InputError, match="expected a model with experts, found a dense one"):
        expert_load(build(models.mini_dense()), rows(10))


def test_counting_leaves_tap_and_attestation_as_they_were_and_sees_interventions(model):
    plain = expert_load(model, rows(20))
    pulled = {"layers.02.moe.logits": lambda x: x + 100.0 * torch.eye(8)[5]}
    with workbench.intervene(model, pulled) as done:
        changed = expert_load(model, rows(20))
    assert model.tap is None and done.table["changed"].tolist() == [1]
    assert changed.query("part == 'model' and layer == 2 and expert == 5")["token_share"].item() == 1.0
    assert not plain.equals(changed)
    model.kernels.reset_attestation()
    expert_load(model, rows(20))
    (calls,) = [row.calls for row in model.kernels.attestation() if row.op == "routing"]
    assert calls == 5


@pytest.mark.parametrize(
    ("texts", "message"), [([[1]], "row 0: expected 2 to 4096 tokens, found 1"), ([], "found none")]
)
def test_rows_that_cannot_be_read_are_named(model, texts, message):
    with pytest.raises(InputError, match=message):
        expert_load(model, texts)
    assert model.tap is None


def test_no_kinds_at_all_are_refused(model):
    with pytest.raises(InputError, match="expected at least one kind of text, found none"):
        load_by_kind(model, {})


# ---- the corpus


def test_the_project_s_corpus_has_four_texts_of_each_kind():
    texts = read_routing_texts(DATA / "routing.jsonl")
    assert [text.kind for text in texts] == [kind for kind in KINDS for _ in range(4)]
    assert all(2_000 <= len(text.text) <= 3_500 for text in texts)
    assert len({text.text for text in texts}) == 16


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "prose"}', r"line 2: expected \{kind, title, text\}"),
        ("prose", r"line 2: expected \{kind, title, text\}"),
        ('{"kind": "prose", "title": "a", "text": 5}', r"line 2: expected \{kind, title, text\}"),
        ('{"kind": "prose", "title": null, "text": "a"}', r"line 2: expected \{kind, title, text\}"),
        ("[" * 100_000, r"line 2: expected \{kind, title, text\}"),
        (
            json.dumps({"kind": "verse", "title": "", "text": ""}),
            "line 2: kind: expected one of prose, .*found 'verse'",
        ),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path, line, message):
    path = tmp_path / "routing.jsonl"
    path.write_text(json.dumps({"kind": "prose", "title": "a", "text": "b"}) + "\n" + line + "\n")
    with pytest.raises(InputError, match=message):
        read_routing_texts(path)


def test_a_missing_corpus_is_named(tmp_path):
    with pytest.raises(InputError, match="expected a JSONL file"):
        read_routing_texts(tmp_path / "none.jsonl")
