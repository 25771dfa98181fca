"""Tests of notebook 01: thin and stripped as committed, and right about a checkpoint that overflows."""

import ast
import base64
import html
import json
import re
from pathlib import Path

import nbformat
import pytest
from small_checkpoint import PROMPT, write_small_checkpoint

from workbench import bench, controls
from workbench.numerics import CATALOGUE
from workbench.report import build

ROOT = Path(__file__).resolve().parent.parent
NAME = "01_gate_overflow"
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
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"gate-\d\d-[a-z]+", name) for name in ids)
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


def test_the_default_checkpoint_is_named_relative_to_the_notebook():
    cell = build.parameters_cell(nbformat.read(SOURCE, 4), NAME)
    parameters = build.read_parameters(cell.source, NAME)
    assert (SOURCE.parent / parameters["checkpoint"]).resolve() == ROOT / "data" / "miniature"
    assert parameters["full"] is False and len(parameters["prompt"]) > 300


# ============================================================================================================
# As run
# ============================================================================================================

EVIL = PROMPT + ' <script>alert("1")</script> & \N{BULLET} \\ \'"'


def report(folder: Path, checkpoint: Path, **changes) -> tuple[build.Report, list[str]]:
    said: list[str] = []
    request = build.Request(
        notebook="01",
        checkpoint=checkpoint,
        prompt=EVIL,
        settings=("max_new_tokens=4",),
        out=folder,
        **changes,
    )
    (made,) = build.build(request, said.append)
    return made, said


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("notebook") / "checkpoint")


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint) -> tuple[build.Report, list[str]]:
    return report(tmp_path_factory.mktemp("first"), checkpoint)


def test_findings_name_the_fault_and_its_cure(made):
    found = made[0].findings
    assert found["fault_found"] is False and found["tokens"] > 64
    assert found["gates"]["heads"] == 12 and found["gates"]["heads_over_float32"] >= 6
    unsafe, safe = found["unsafe"], found["safe"]
    assert (unsafe["policy"], unsafe["logits_bad_share"], unsafe["tokens_written"]) == ("factored", 1.0, [])
    assert unsafe["fault"]["cause_id"] == "exponent_overflow" and "expected finite values" in unsafe["error"]
    assert unsafe["fault"]["where"]["tap"] == "layers.00.gdn.decay"
    assert (safe["logits_bad_share"], len(safe["tokens_written"]), safe["error"]) == (0.0, 4, None)
    errors = {row["policy"]: row["error_out"] for row in found["errors"]}
    assert errors["safe"] < 1e-6 and errors["fp32_cumsum"] < 1e-4 and errors["factored"] is None
    assert found["conditions"]["threads"] == 1
    assert len(found["verdict"]) == 3 and len(found["numbers"]) == 4


def test_progress_names_every_code_cell(made, code_cells):
    assert [line.split()[2] for line in made[1][1:]] == [cell.id for cell in code_cells]


def test_the_page_shows_figures_with_words_and_needs_no_network(made):
    page = made[0].page.read_text(encoding="utf-8")
    images = re.findall(r"<img [^>]*>", page)
    frames = len(controls.RECORDED_LIMITS) * len(controls.RECORDED_POLICIES)
    of_kernels = 2 * (bench.recorded_result("gpu_kernels", "nvidia-h200") is not None)
    assert len(images) == 12 + of_kernels + frames and page.count('<div class="frame"') == frames
    for image in images:
        alt, data = re.search(r'alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)"', image).groups()
        assert len(alt) > 80
        svg = base64.b64decode(data).decode()
        assert set(re.findall(r"https?://[^/\"]+", svg)) <= {"http://www.w3.org"}
    bare = re.sub(r"base64,[^\"]+", "", page)
    assert "http" not in bare and re.findall(r'(?:src|href)="(?!data:)([^"]*)"', bare) == ["index.html"]
    for sentence in made[0].findings["verdict"]:
        assert page.index(sentence[:40]) < page.index("<details")
    assert "output_error" not in page and "Traceback" not in page


def test_the_page_answers_each_question_of_the_lab(made, code_cells):
    page = html.unescape(made[0].page.read_text(encoding="utf-8"))
    assert "Rows that are not finite in head" in page
    assert "Which backends ran, and why" in page and "first in order on cpu that can serve" in page
    assert "factored beside safe: the first tensor that differs is" in page and "gives layers.00.gdn.decay" in page
    assert "Under factored it refuses to draw a token." in page and "policy nan_to_num" in page
    assert "the sampled check says that they are clean" in page and "one head from a token on" in page
    for name in CATALOGUE:
        assert f"<td>{name}</td>" in page, name
    assert "policy_verdicts.py measured another checkpoint or dtype" in page  # the recorded result is the miniature's
    result = bench.recorded_result("gdn_layer_vs_transformers")
    assert f"by `{result['command']}` at commit {result['commit'][:10]}" in page
    assert f"transformers {result['versions']['transformers']}" in page and result["hardware"]["model"] in page


def test_a_prompt_with_markup_is_shown_as_text(made):
    page = made[0].page.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script.*?</script", page, flags=re.DOTALL)
    assert "section.frames" in script and "&lt;script&gt;alert" in page  # the one that moves the recorded sweep


def test_the_same_request_gives_the_same_bytes(made, tmp_path, checkpoint):
    first, second = made[0], report(tmp_path, checkpoint)[0]
    for name in (f"{NAME}.html", f"{NAME}.ipynb", f"{NAME}.findings.json", "index.html"):
        assert (first.page.parent / name).read_bytes() == (second.page.parent / name).read_bytes(), name


def test_the_miniature_overflows_as_recorded(tmp_path):
    """After a new training: `workbench report --notebook 01`, then copy the fields of the golden file."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    (made,) = build.build(build.Request(notebook="01", out=tmp_path), lambda line: None)
    found = made.findings
    assert found["gates"] == pytest.approx(golden["gates"], rel=1e-3)
    assert found["unsafe"]["fault"]["where"] == golden["unsafe"]["fault"]["where"]
    for run in ("unsafe", "safe"):
        for field in ("policy", "layers_bad", "logits_bad_share"):
            assert found[run][field] == golden[run][field], (run, field)
    errors = {row["policy"]: row for row in found["errors"]}
    assert list(errors) == ["safe", "fp32_cumsum", "segsum", "factored"]
    for policy in ("safe", "segsum"):
        assert max(errors[policy]["error_out"], errors[policy]["error_state"]) < 3e-6
    assert errors["factored"]["error_out"] is None
    page = html.unescape(made.page.read_text(encoding="utf-8"))
    assert "policy_verdicts.py measured it on this very checkpoint" in page and "recorded: dialogues right" in page
    assert "born at layers.00.gdn.decay (gated_delta_rule), it blames layers.00.mixer_out (out_proj)" in page
    assert "Under nan_to_num it goes on without a warning" in page


def test_full_compares_every_preset_on_a_mild_checkpoint(tmp_path):
    mild = write_small_checkpoint(tmp_path / "mild", "realistic")
    made = report(tmp_path / "out", mild, full=True)[0]
    found, page = made.findings, html.unescape(made.page.read_text(encoding="utf-8"))
    assert "there is no row to follow" in page and "there is nothing to miss" in page
    assert "no chat template, so no dialogue" in page
    assert len(found["errors"]) == 7
    assert found["gates"]["heads_over_float32"] == 0 and found["unsafe"]["fault"]["cause_id"] is None
    assert "finite on this prompt" in found["verdict"][1]
    json.dumps(found, allow_nan=False)
