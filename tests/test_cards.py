"""Profiles of cards: those of the repository are complete and name their sources; a wrong one says where."""

import re
import tomllib

import pytest

from workbench.analysis.rehearse import rehearse
from workbench.cards import card_named, known_cards, read
from workbench.cards.profile import MATMUL, OPS
from workbench.errors import InputError
from workbench.kernels.registry import OPERATIONS

NAMES = ("a100", "bi-v100", "cpu", "h200", "t4", "v100")

GOOD = """
title = "Test card"
device = "cuda"
capability = [7, 0]
memory_bytes = 16_000_000_000
bandwidth = 1e12
native_matmul = ["float16", "float32"]
model_dtype = "float16"
notes = ["one"]

[rates]
float16 = 100e12
float32 = 10e12

[sources]
capability = "datasheet"
memory_bytes = "datasheet"
bandwidth = "datasheet"
"rates.float16" = "datasheet"
"rates.float32" = "datasheet"

[unknown]
"rates.bfloat16" = "not stated"
"rates.float64" = "not stated"

[[rules]]
op = "matmul"
library = "vendor"
dtypes = ["float32"]
outcome = "route"
to = "torch"
why = "float16 alone"
source = "a run"
"""


def write(folder, text):
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_repository_has_the_cards_that_the_documents_name():
    assert known_cards() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_card_has_a_source_or_is_unknown_with_a_reason(name):
    card = card_named(name)
    assert card.name == name and card.model_dtype in card.native_matmul
    given = {f"rates.{dtype}" for dtype in card.rates}
    given |= {field for field in ("memory_bytes", "bandwidth", "capability") if getattr(card, field) is not None}
    assert given <= set(card.sources)
    assert not given & set(card.unknown)
    assert all(len(text) > 8 for text in (*card.sources.values(), *card.unknown.values()))


def test_the_bring_up_card_is_what_the_notes_say():
    card = card_named("bi-v100")
    assert 31.7 < card.memory_bytes / 2**30 < 31.73 and card.model_dtype == "float16"
    assert card.absent_primitives["aten::linalg_solve_triangular"].library == "libcusolver.so"
    assert card.rule("matmul", "float16").outcome == "run"
    routed = card.rule("matmul", "float32")
    assert (routed.outcome, routed.library, routed.to) == ("route", "ixformer", "torch")
    assert "corex_gdn" in card.absent_modules and "capability" in card.unknown


def test_slowdown_is_the_ratio_of_peak_rates_or_the_price_of_the_rule(tmp_path):
    card = card_named("v100")
    factor, how = card.slowdown("float32")
    assert factor == pytest.approx(125 / 15.7) and "1.25e+14" in how
    assert card.slowdown("bfloat16")[0] is None
    assert "rates.bfloat16" in card.slowdown("bfloat16")[1]
    priced = card_named(write(tmp_path, GOOD.replace('source = "a run"', 'source = "a run"\nprice = 12.5')))
    assert priced.slowdown("float32", priced.rule("matmul", "float32")) == (12.5, "a run")


def test_a_path_names_a_card_of_ones_own(tmp_path):
    card = card_named(write(tmp_path, GOOD))
    assert (card.name, card.title, card.capability) == ("mine", "Test card", (7, 0))
    assert card.memory_bytes == 16_000_000_000 and type(card.memory_bytes) is int


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('device = "cuda"', 'device = "tpu"', "device: expected one of cuda, cpu, found 'tpu'"),
        ('title = "Test card"', "", "title: expected some text, found nothing"),
        ("bandwidth = 1e12", "bandwith = 1e12", "bandwith: expected one of the keys"),
        ("bandwidth = 1e12", "", "bandwidth: expected a figure, or unknown.bandwidth with the reason, found neither"),
        ("bandwidth = 1e12", "bandwidth = -1", "bandwidth: expected a number above 0, found -1"),
        ("bandwidth = 1e12", "bandwidth = true", "bandwidth: expected a number above 0, found True"),
        ("bandwidth = 1e12", "bandwidth = nan", "bandwidth: expected a number above 0, found nan"),
        ("memory_bytes = 16_000_000_000", "memory_bytes = 1.5", "memory_bytes: expected a whole number of bytes"),
        ("capability = [7, 0]", "capability = 7.0", "capability: expected two whole numbers, [major, minor]"),
        ("float16 = 100e12", "float8 = 100e12", "rates.float8: expected one of the keys float16"),
        ('"rates.float16" = "datasheet"', "", "sources.rates.float16: expected who states the figure, found nothing"),
        ('"rates.float64" = "not stated"', "", "rates.float64: expected a figure, or unknown.rates.float64"),
        ('"rates.float64" = "not stated"', '"rates.float32" = "x"', "unknown.rates.float32: expected nothing beside"),
        ('bandwidth = "datasheet"', 'bandwidth = "datasheet"\nspeed = "x"', "sources.speed: expected one of"),
        ('outcome = "route"', 'outcome = "skip"', "rules[0].outcome: expected one of run, route, cast, found 'skip'"),
        ('outcome = "route"', 'outcome = "run"', "rules[0].to: expected nothing beside outcome"),
        ('outcome = "route"', 'outcome = "cast"', "rules[0].to: expected one of float16"),
        ('dtypes = ["float32"]', 'dtypes = ["fp32"]', "rules[0].dtypes: expected a list of float16"),
        ('dtypes = ["float32"]', "dtypes = []", "rules[0].dtypes: expected at least one"),
        ('why = "float16 alone"', 'because = "x"', "rules[0].because: expected one of the keys op, library"),
        ("[[rules]]", "[rules]", "rules: expected tables, each headed [[rules]], found dict"),
        ('to = "torch"', 'to = "vendor"', "rules[0].to: expected a library that runs matmul in float32, found vendor"),
        ("notes = [", "notes = [1, ", "notes: expected a list of texts"),
        ('op = "matmul"', 'op = "matmull"', "rules[0].op: expected one of matmul, alignment, attention"),
        ('device = "cuda"', 'device = "cpu"', 'capability: expected nothing beside device = "cpu", found [7, 0]'),
        ('model_dtype = "float16"', 'model_dtype = "bfloat16"', "model_dtype: expected a dtype of native_matmul, or"),
        ('outcome = "route"\nto = "torch"', 'outcome = "cast"\nto = "bfloat16"', "rules[0].to: expected a dtype of"),
    ],
)
def test_a_wrong_profile_says_in_one_line_where_it_is_wrong(tmp_path, old, new, expected):
    assert GOOD.count(old) >= 1
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        card_named(path)
    text = str(caught.value)
    assert text.startswith(f"card {path}: {expected}") and "\n" not in text


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "at least one operator of torch, aten::NAME, found none"),
        (["linalg_qr"], "operators of torch, aten::NAME, found 'linalg_qr'"),
        (["aten::solve_triangle"], "operators of torch, aten::NAME, that torch"),
        (["aten::"], "operators of torch, aten::NAME, found 'aten::'"),
        (["aten::topk.values"], "operators of torch, aten::NAME, without overload, found 'aten::topk.values'"),
        (["aten::linalg_inv"], "operators that torch does not make of others; name those, found 'aten::linalg_inv'"),
        (["aten::topk", "aten::topk"], "every operator once, found aten::topk a second time"),
    ],
)
def test_a_missing_operator_that_torch_never_calls_is_no_limit(tmp_path, names, expected):
    table = f'[[absent_primitives]]\nnames = {names}\nlibrary = "l"\nerror = "e"\ninstead = "i"\n'
    path = write(tmp_path, GOOD + table)
    with pytest.raises(InputError) as caught:
        card_named(path)
    assert str(caught.value).startswith(f"card {path}: absent_primitives[0].names: expected {expected}")


def test_rules_may_name_every_op_of_the_workbench_and_no_other():
    assert set(OPS) == {MATMUL, *OPERATIONS}


def test_a_profile_may_be_written_on_windows(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert card_named(path).title == "Test card"


def test_no_toml_no_file_and_no_such_name(tmp_path):
    with pytest.raises(InputError, match=re.escape("expected TOML, found: ")):
        card_named(write(tmp_path, "title = "))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        card_named(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"card 'b200': expected one of a100, bi-v100, .*or the path of a \.toml file"):
        card_named("b200")


def test_installed_without_the_repository_a_path_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "FOLDER", tmp_path / "data" / "cards")
    assert known_cards() == ()
    with pytest.raises(InputError, match=r"expected the path of a \.toml file .*without data/cards"):
        card_named("v100")


def test_the_profile_that_the_documents_begin_with_can_be_rehearsed(tmp_path):
    text = (read.FOLDER.parent / "README.md").read_text(encoding="utf-8")
    card = card_named(write(tmp_path, text.partition("```toml\n")[2].partition("```")[0]))
    assert card.memory_bytes is None and not card.rates
    assert rehearse(read.FOLDER.parent / "miniature", card, [1, 2], with_readiness=False).error is None


def test_every_key_that_the_reader_takes_is_documented():
    text = (read.FOLDER.parent / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Cards")[2].partition("\n## ")[0]
    for key in (*read.KEYS, *tomllib.loads(GOOD)["rules"][0], "price", "names", "instead", "error"):
        assert f"`{key}`" in section, key
