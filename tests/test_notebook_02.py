"""Tests of notebook 02: thin and stripped as committed, and right about checkpoints of few and of many experts."""

import ast
import base64
import html
import json
import re
from pathlib import Path

import nbformat
import pytest
from models import mini_dense
from small_checkpoint import write_small_checkpoint

from workbench import bench
from workbench.checkpoint import write_checkpoint
from workbench.config import ModelConfig
from workbench.controls.routing import RECORDED_LAYERS, RECORDED_TEMPERATURES
from workbench.errors import InputError
from workbench.model import CausalLM
from workbench.report import build

ROOT = Path(__file__).resolve().parent.parent
NAME = "02_moe_routing"
GOLDEN = ROOT / "tests" / "golden" / f"{NAME}.findings.json"
SOURCE = ROOT / "notebooks" / f"{NAME}.ipynb"


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(SOURCE, as_version=4)


@pytest.fixture(scope="module")
def code_cells(notebook) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# ============================================================================================================
# As committed
# ============================================================================================================


def test_it_is_valid_and_stripped(notebook, code_cells):
    nbformat.validate(notebook)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "title"}
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    assert SOURCE.stat().st_size < 20_000


def test_cell_ids_are_fixed_and_speak(notebook):
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"moe-\d\d-[a-z]+", name) for name in ids)
    assert ids == sorted(ids)


def test_cells_are_thin(code_cells):
    assert len(code_cells) <= 15
    for cell in code_cells:
        assert len(cell.source.splitlines()) <= 8, cell.id
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While | ast.If), cell.id


def test_the_first_code_cell_settles_the_defaults(code_cells):
    assert code_cells[0].source.startswith("import workbench as wb\n")
    assert code_cells[0].source.endswith("wb.notebook_defaults()")
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code_cells) == 1


def test_its_files_are_named_relative_to_the_notebook():
    parameters = build.read_parameters(build.parameters_cell(nbformat.read(SOURCE, 4), NAME).source, NAME)
    assert (SOURCE.parent / parameters["checkpoint"]).resolve() == ROOT / "data" / "miniature"
    assert (SOURCE.parent / parameters["texts"]).resolve() == ROOT / "data" / "routing.jsonl"
    assert parameters["full"] is False


# ============================================================================================================
# As run
# ============================================================================================================

EVIL = 'The king said <script>alert("1")</script> & the queen \N{BULLET} \\ \'"\nsaid the king.'


def report(folder: Path, checkpoint: Path, *settings: str) -> build.Report:
    request = build.Request(
        notebook="02", checkpoint=checkpoint, prompt=EVIL, out=folder,
        settings=("max_tokens=48", "flip_texts=1", *settings),
    )  # fmt: skip
    (made,) = build.build(request, lambda line: None)
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("notebook02") / "checkpoint")


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint) -> build.Report:
    return report(tmp_path_factory.mktemp("first"), checkpoint)


def test_findings_hold_what_was_measured(made):
    found = made.findings
    load = found["load"]
    assert (load["layers"], load["experts"], load["top_k"]) == (4, 8, 2)
    assert load["tokens"] == 16 * 48 and load["bad_tokens"] == 0
    assert 1.0 <= load["effective_least"] <= load["effective_most"] <= 8.0 and 1.0 <= load["hottest_times_even"] <= 4.0
    assert len(found["kind_distances"]) == 6 and all(0.0 <= d <= 1.0 for d in found["kind_distances"].values())
    flips = {name: row["set_flip_rate"] for name, row in found["flips"].items()}
    assert flips["whole router, bfloat16"] >= flips["whole router, float16"]
    assert found["host_syncs"]["torch_grouped"] == 0 and found["host_syncs"]["torch_sorted"] == 1
    assert found["conditions"]["threads"] == 1 and found["conditions"]["backends"]
    assert len(found["verdict"]) == 3 and len(found["numbers"]) == 4
    json.dumps(found, allow_nan=False)


def test_the_views_find_what_was_planted_at_full_width(made):
    wide = made.findings["wide"]
    assert (wide["layers"], wide["experts"], wide["top_k"]) == (40, 256, 8)
    assert wide["dead_found"] == wide["dead_planted"] == 120 and wide["bonds_found"] >= 36


def test_the_page_shows_figures_with_words_and_needs_no_network(made):
    page = made.page.read_text(encoding="utf-8")
    assert "Which backends ran, and why" in page and "first in order on cpu that can serve" in page
    images = re.findall(r"<img [^>]*>", page)
    frames = 3 * len(RECORDED_TEMPERATURES)
    has_times = made.findings["has_recorded_times"]
    of_kernels = 2 * (bench.recorded_result("gpu_kernels", "nvidia-h200") is not None)
    assert len(images) == 8 + has_times + of_kernels + frames
    assert page.count('<div class="frame"') == frames + 4 * min(4, RECORDED_LAYERS)
    for image in images:
        alt, data = re.search(r'alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)"', image).groups()
        assert len(alt) > 80
        svg = base64.b64decode(data).decode()
        assert set(re.findall(r"https?://[^/\"]+", svg)) <= {"http://www.w3.org"}
    bare = re.sub(r"base64,[^\"]+", "", page)
    assert "http" not in bare and re.findall(r'(?:src|href)="(?!data:)([^"]*)"', bare) == ["index.html"]
    assert "Traceback" not in page and len(page) < 4_000_000


def test_the_page_tells_times_where_there_are_any_and_says_so_where_not(made):
    page = html.unescape(made.page.read_text(encoding="utf-8"))
    recorded = bench.recorded_result("experts_vs_transformers")
    assert made.findings["has_recorded_times"] is (recorded is not None)
    if recorded is None:
        assert "No result of benchmarks/experts_vs_transformers.py is installed here" in page
    else:
        assert f"by `{recorded['command']}` at commit {recorded['commit'][:10]}" in page
    assert "torch_grouped" in page and "A page holds none" in page


def test_a_prompt_with_markup_is_shown_as_text(made):
    page = made.page.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script.*?</script", page, flags=re.DOTALL)
    assert "section.frames" in script
    body = page[page.index('<div class="routed">') :]
    pieces = re.sub(r"<sup>\d+</sup>|</?(?:span|i)\b[^>]*>|&#8288;|\u2060", "", body)
    assert "&lt;script&gt;alert" in pieces
    assert '<script>alert("1")</script> & the queen ··\N{BULLET} \\ \'"↵\nsaid' in html.unescape(pieces)


def test_the_same_request_gives_the_same_bytes(made, tmp_path, checkpoint):
    second = report(tmp_path, checkpoint)
    for name in (f"{NAME}.html", f"{NAME}.ipynb", f"{NAME}.findings.json", "index.html"):
        assert (made.page.parent / name).read_bytes() == (second.page.parent / name).read_bytes(), name


def test_a_checkpoint_of_256_experts_and_half_precision(tmp_path):
    wide = write_small_checkpoint(tmp_path / "wide", num_experts=256, num_experts_per_tok=8)
    made = report(tmp_path / "out", wide, "dtype=bfloat16")
    found, page = made.findings, html.unescape(made.page.read_text(encoding="utf-8"))
    assert (found["load"]["experts"], found["load"]["top_k"], found["conditions"]["dtype"]) == (256, 8, "bfloat16")
    assert "of 256 experts are the strongest for some token" in page and "on one set of 8" in page


def test_a_dense_checkpoint_is_refused_in_one_line(tmp_path):
    config = ModelConfig.from_hf(mini_dense(vocab_size=4096, eos_token_id=4064))
    dense = write_small_checkpoint(tmp_path / "dense")  # for its tokenizer
    write_checkpoint(tmp_path / "dense2", config, dict(CausalLM(config).init_weights(3).state_dict()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "dense2" / name).write_bytes((dense / name).read_bytes())
    with pytest.raises(InputError, match="a checkpoint with experts, found a dense one") as e:
        report(tmp_path / "out", tmp_path / "dense2")
    assert "\n" not in str(e.value) and not list((tmp_path / "out").glob("*.html"))


def test_the_miniature_routes_as_recorded(tmp_path):
    """After a new training: `workbench report --notebook 02`, then copy the fields of the golden file."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    (made,) = build.build(build.Request(notebook="02", out=tmp_path), lambda line: None)
    found = made.findings
    assert found["load"] == golden["load"] | {name: found["load"][name] for name in ("hot", "dead")} | {
        name: pytest.approx(value, rel=0.01) for name, value in golden["load"].items() if isinstance(value, float)
    }
    for name in ("hot", "dead"):  # an expert may stand at the border
        assert abs(found["load"][name] - golden["load"][name]) <= 1, name
    for name, values in golden["depth"].items():
        assert found["depth"][name] == pytest.approx(values, rel=0.02), name
    assert found["kind_distances"] == pytest.approx(golden["kind_distances"], abs=0.01)
    for setting, row in golden["flips"].items():  # a flip hangs on the last bits, which differ between machines
        assert found["flips"][setting]["set_flip_rate"] == pytest.approx(row["set_flip_rate"], rel=0.3, abs=4e-4)
    assert found["wide"] == golden["wide"] | {"dead_all": pytest.approx(golden["wide"]["dead_all"], abs=5)}
    page = html.unescape(made.page.read_text(encoding="utf-8"))
    assert all(f"{kind}</option>" in page for kind in ("prose", "code", "chat", "repeated"))
