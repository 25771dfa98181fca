"""Tests of workbench.report: parameters, execution, pages, provenance."""

import dataclasses
import html
import json
import math
import os
import re
import subprocess
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from workbench import cli
from workbench.analysis.verdict import Verdict, Where
from workbench.errors import InputError, PolicyError, WorkbenchError
from workbench.report import build, display, execute, export, parameters, provenance, recording, session

SOURCE = """checkpoint = "data"  # where
prompt = "Thou art 'more'\\nlovely – §"; rate = 0.5
count = 3
flags = ["a", "b"]
full = False"""


def notebook(*cells: str, first: str = 'name = "x"') -> nbformat.NotebookNode:
    """A notebook of code cells; the first is tagged `parameters`."""
    made = [nbformat.v4.new_code_cell(source) for source in (first, *cells)]
    made[0].metadata["tags"] = ["parameters"]
    for i, cell in enumerate(made):
        cell["id"] = f"cell-{i}"
    return nbformat.v4.new_notebook(cells=made)


# ============================================================================================================
# Parameters
# ============================================================================================================


def test_parameters_are_read_without_running_anything():
    found = parameters.read_parameters(SOURCE, "x")
    assert found["prompt"] == "Thou art 'more'\nlovely – §" and found["flags"] == ["a", "b"]
    assert list(found) == ["checkpoint", "prompt", "rate", "count", "flags", "full"]


def test_replacing_changes_values_and_nothing_else():
    changes = {"prompt": 'a\n"b" # é\'', "count": 7, "full": True, "rate": 2}
    changed = parameters.replace_parameters(SOURCE, changes, "x")
    assert parameters.read_parameters(changed, "x") == {
        "checkpoint": "data", "prompt": "a\n\"b\" # é'", "rate": 2.0, "count": 7, "flags": ["a", "b"],
        "full": True,
    }  # fmt: skip
    assert changed.splitlines()[0] == SOURCE.splitlines()[0] and "rate = 2.0" in changed
    assert parameters.replace_parameters(SOURCE, {}, "x") == SOURCE


def test_a_value_over_several_lines_is_replaced_whole():
    source = 'a = (\n    "one "\n    "two"\n)\nb = 1'
    assert parameters.read_parameters(parameters.replace_parameters(source, {"a": "x"}, "x"), "x") == {
        "a": "x",
        "b": 1,
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os", "line 1: expected NAME = LITERAL, found 'import os'"),
        ("a = 1\nb = a + 1", "line 2: expected NAME = LITERAL"),
        ("a = print('run')", "line 1: expected NAME = LITERAL"),
        ("a = b = 1", "expected NAME = LITERAL"),
        ("a = = 1", "not Python"),
    ],
)
def test_parameters_are_literals_only(source, expected):
    with pytest.raises(InputError, match=re.escape(expected)):
        parameters.read_parameters(source, "x")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("count=12", ("count", 12)),
        ("rate=2", ("rate", 2)),
        ("prompt=a=b, 'c'", ("prompt", "a=b, 'c'")),
        ("full=True", ("full", True)),
        ("flags=['z']", ("flags", ["z"])),
        (" count = 12", ("count", 12)),
    ],
)
def test_settings_are_read_in_the_type_of_the_parameter(setting, expected):
    assert parameters.parse_setting(setting, parameters.read_parameters(SOURCE, "x"), "x") == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("count", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("cuont=3", "no such parameter in x, expected one of checkpoint, prompt"),
        ("count=three", "parameter count: expected int as in 3, found 'three'"),
        ("count=1.5", "expected int"),
        ("count=True", "expected int"),
        ("full=1", "expected bool"),
        ("flags=__import__('os')", "expected list"),
        ("count=" + "(" * 500, "expected int"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(setting, expected):
    with pytest.raises(InputError, match=re.escape(expected)):
        parameters.parse_setting(setting, parameters.read_parameters(SOURCE, "x"), "x")


def test_a_notebook_has_one_parameters_cell():
    with pytest.raises(InputError, match="expected one code cell tagged 'parameters', found 0"):
        parameters.parameters_cell(nbformat.v4.new_notebook(), "x")


# ============================================================================================================
# Findings and what notebooks show
# ============================================================================================================

FINDINGS = {
    "title": "T",
    "verdict": ["a", "b", "c"],
    "numbers": [{"label": "l", "value": "v", "note": "n"}] * 4,
}


def test_findings_are_plain_json_with_six_digits(tmp_path, monkeypatch):
    monkeypatch.setenv(session.FINDINGS_FOLDER, str(tmp_path / "new"))
    odd = {"x": 1 / 3, "nan": math.nan, "pair": (1, True), "none": None, 3: math.inf}
    path = session.write_findings("01_x", {**FINDINGS, "odd": odd})
    assert path == tmp_path / "new" / "01_x.findings.json"
    found = json.loads(path.read_text())
    assert (found["schema"], found["notebook"], found["title"]) == (1, "01_x", "T")
    assert found["odd"] == {"x": 0.333333, "nan": None, "pair": [1, True], "none": None, "3": None}


def test_findings_without_a_verdict_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(session.FINDINGS_FOLDER, str(tmp_path))
    with pytest.raises(InputError, match="expected the field 'verdict', found title"):
        session.write_findings("01_x", {"title": "T"})


def test_findings_of_a_notebook_worked_with_by_hand_go_to_reports(tmp_path, monkeypatch):
    monkeypatch.delenv(session.FINDINGS_FOLDER, raising=False)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert session.write_findings("01_x", FINDINGS).parent == tmp_path / "reports"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000123456, "0.000123"),
        (1234.5, "1234"),
        (99.96, "100"),
        (7, "7"),
        (math.nan, "–"),
        (None, "–"),
        (pd.NA, "–"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert display.number(value) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([2.0, 2.02], ["2.00", "2.02"]),
        ([14.655, 9.8, math.nan, None], ["14.7", "9.8", "–", "–"]),
        ([3.0, 4.0], ["3", "4"]),
        ([250.0, 0.0012], ["250", "0.0012"]),  # one number of digits would leave the second none
        ([12345.6, 2.5], ["12346", "2.5"]),
        ([141.2, 3.46], ["141.2", "3.5"]),
        ([12.3, 0.451], ["12.30", "0.45"]),
        ([0.00123, 0.002], ["0.00123", "0.00200"]),
        ([1.5e-9, 2e-9], ["1.5e-09", "2e-09"]),
        ([0.1, 0.25, 0.0], ["0.100", "0.250", "0.000"]),
        (["a", 1, pd.NA], ["a", "1", "–"]),
        ([math.inf, 2.5], ["inf", "2.50"]),
        ([], []),
    ],
)
def test_a_column_has_one_number_of_decimals(values, texts):
    assert display.column(values) == texts


def test_everything_shown_is_escaped():
    evil = "<script>alert(1)</script>&"
    frame = pd.DataFrame({evil: [evil, 1.0]})
    verdict = Verdict(evil, Where(), evil, (evil,), (evil,), evil)
    for shown in (
        display.table(frame, evil),
        display.verdict_card(verdict),
        display.passages([(evil, evil)], evil),
    ):
        assert "<script" not in shown._repr_html_()
        assert shown._repr_html_().count(html.escape(evil)) >= 3


def test_parts_of_one_answer_stand_below_each_other_and_may_be_folded():
    first, second = display.note("a < b"), display.Html("<i>2</i>", "two")
    both = display.stack(first, display.folded("more & more", second))
    assert both.page == (
        '<p class="note">a &lt; b</p>\n<details><summary>more &amp; more</summary><i>2</i></details>'
    )  # fmt: skip
    assert both.text == "a < b\n\nmore & more\ntwo"


def test_what_has_no_rows_is_a_sentence():
    frame = pd.DataFrame({"a": [1]})
    assert display.if_any(frame, lambda rows: display.note(f"{len(rows)} row"), "nothing").text == "1 row"
    assert display.if_any(frame[:0], lambda rows: display.note("no"), "nothing").text == "nothing"


def test_a_result_that_is_not_installed_is_said_to_be_missing():
    shown = display.recorded("name", {"rows": 3}, lambda result: display.note(str(result["rows"])))
    assert shown.text == "3"
    assert display.recorded("name", None, lambda result: display.note("")).text == (
        "No result of benchmarks/name.py is installed here; run it in the project's clone for one."
    )


def test_table_takes_headings_and_shows_missing_whole_numbers():
    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [0.5, 2.0]})
    page = display.table(frame, "reading", {"a": "first"})._repr_html_()
    assert "<th scope=col>first</th><th scope=col>b</th>" in page
    assert "<tr><td>1</td><td>0.50</td></tr><tr><td>–</td><td>2.00</td></tr>" in page


# ============================================================================================================
# Recorded sweeps
# ============================================================================================================

SWEEP = {"limit": ("none", "20"), "form": ("a", "b", "c")}


def test_frames_stand_in_the_order_of_the_controls_and_the_first_is_seen():
    shown = [display.Html(f"<i>{i}</i>", "") for i in range(6)]
    page = recording.frames("sweep", SWEEP, shown)._repr_html_()
    found = re.findall(r'<div class="frame"( hidden)?><p class="setting">([^<]*)</p><i>(\d)</i></div>', page)
    assert [number for _, _, number in found] == list("012345")
    assert [bool(hidden) for hidden, _, _ in found] == [False] + [True] * 5
    assert [setting for _, setting, _ in found][1::3] == ["limit: none, form: b", "limit: 20, form: b"]
    slider, choice = re.search(r"<input [^>]*>", page)[0], re.search(r"<select [^>]*>", page)[0]
    assert 'type="range"' in slider and 'max="1"' in slider and 'data-stride="3"' in slider
    assert 'data-stride="1"' in choice and page.count("<option") == 3 and page.count("<label>") == 2
    assert '<div class="controls" hidden>' in page  # until a script is there to answer them


@pytest.mark.parametrize(("controls", "count"), [(SWEEP, 5), (SWEEP, 7), ({}, 1), ({"limit": ()}, 0)])
def test_a_sweep_has_one_frame_for_each_setting(controls, count):
    with pytest.raises(InputError, match=rf"frames of 'sweep': expected one for each setting .*, found {count}"):
        recording.frames("sweep", controls, [display.Html("", "")] * count)


def test_words_of_a_sweep_are_escaped():
    evil = "<script>alert(1)</script>\""
    page = recording.frames(evil, {evil: [evil], evil + "2": [evil]}, [display.Html("", "")])._repr_html_()
    assert "<script" not in page and '"&quot;' not in page and page.count("&lt;script") >= 8


def test_a_page_has_the_script_of_sweeps_only_where_one_stands():
    sweep = recording.frames("sweep", SWEEP, [display.Html("<i>", "")] * 6)
    page = page_of(code("x", shown(text_html=sweep.page)))
    assert page.count("<script>") == 1 and "section.frames" in page and "http" not in page and "url(" not in page
    assert "<script" not in page_of(code("x", shown(text_html="<i>")))


def test_recorded_frames_take_the_place_of_a_widget_that_has_them():
    made = nbformat.v4.new_notebook(cells=[code("x", widget(), widget(text_html="<b>frames</b>"))])
    first, second = execute.normalise(made).cells[0].outputs
    assert first.data == {execute.WIDGET_VIEW: {}, "text/plain": "interactive control"}
    assert second.data == {"text/html": "<b>frames</b>", "text/plain": "interactive control"}
    page = page_of(*made.cells)
    assert page.count("An interactive control stands here in the notebook.") == 1 and "<b>frames</b>" in page


# ============================================================================================================
# Execution
# ============================================================================================================


def run_cells(tmp_path, *cells: str) -> tuple[nbformat.NotebookNode, list[str]]:
    said: list[str] = []
    done = execute.execute(
        notebook(*cells), name="x", folder=tmp_path, findings_folder=tmp_path / "findings", say=said.append
    )
    return done, said


def test_cells_run_in_their_folder_with_fixed_surroundings(tmp_path, monkeypatch):
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("surprise = 1\n")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    done, said = run_cells(
        tmp_path,
        "import os, sys, workbench\n"
        "from workbench.report.session import FINDINGS_FOLDER\n"
        "names = ['SOURCE_DATE_EPOCH', 'PYTHONHASHSEED', 'OMP_NUM_THREADS']\n"
        "print(sys.executable, os.getcwd(), *[os.environ[n] for n in names], os.environ[FINDINGS_FOLDER],\n"
        "      'surprise' in globals())",
        "object()",
    )
    import sys

    expected = [sys.executable, str(tmp_path), "0", "0", "1", str(tmp_path / "findings"), "False"]
    assert done.cells[1].outputs[0].text.split() == expected
    assert done.cells[2].outputs[0].data["text/plain"] == "<object>"  # no address
    assert not any("execution" in cell.metadata for cell in done.cells)
    assert [re.sub(r"[\d.]+ s$", "", line) for line in said] == [
        f"x [{i}/3] cell-{i - 1} " for i in (1, 2, 3)
    ]


def test_an_error_of_the_workbench_in_a_cell_keeps_its_message(tmp_path):
    with pytest.raises(InputError, match=r"^prompt: too long \(notebook x, cell cell-1\)$"):
        run_cells(tmp_path, "from workbench.errors import InputError\nraise InputError('prompt: too long')")


def test_any_other_error_in_a_cell_names_cell_and_kind(tmp_path):
    with pytest.raises(
        WorkbenchError, match=r"notebook x, cell cell-2: ZeroDivisionError: division by zero"
    ) as caught:
        run_cells(tmp_path, "pass", "1 / 0")
    assert not isinstance(caught.value, InputError)


UNSHOWN = """
from workbench.errors import InputError
class Unshown:
    def {method}(self, **options):
        raise {error}
"""


@pytest.mark.parametrize(
    ("method", "shown", "error", "kind", "said"),
    [
        ("_repr_mimebundle_", "Unshown()", "KeyError('inside')", WorkbenchError, "cell cell-1: KeyError: 'inside'"),
        ("_repr_html_", "Unshown()", "ValueError()", WorkbenchError, "cell cell-1: ValueError: no message"),
        ("__repr__", "display(Unshown())\n1", "KeyError('inside')", WorkbenchError, "cell cell-1: KeyError: 'inside'"),
        ("_repr_html_", "Unshown()", "InputError('no head')", InputError, r"^no head \(notebook x, cell cell-1\)$"),
    ],
)
def test_an_object_that_cannot_show_itself_is_an_error_with_its_reason(tmp_path, method, shown, error, kind, said):
    with pytest.raises(kind, match=said) as caught:
        run_cells(tmp_path, UNSHOWN.format(method=method, error=error) + shown)
    assert "NoneType" not in str(caught.value) and type(caught.value) is kind


def test_a_kernel_that_dies_is_reported_with_its_last_words(tmp_path):
    with pytest.raises(WorkbenchError, match=r"its kernel ended.*: last words"):
        run_cells(tmp_path, "import os, sys\nos.write(2, b'last words\\n')\nos._exit(3)")


# ============================================================================================================
# Pages
# ============================================================================================================


def page_of(*cells: nbformat.NotebookNode, findings: dict = FINDINGS) -> str:
    made = nbformat.v4.new_notebook(cells=list(cells))
    return export.notebook_page(made, name="01_x", findings=findings, provenance=[("Commit", "<abc>")])


def code(source: str, *outputs, tags=()) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def shown(**data) -> nbformat.NotebookNode:
    return nbformat.v4.new_output(
        "display_data", data={key.replace("_", "/"): value for key, value in data.items()}
    )


def widget(**data) -> nbformat.NotebookNode:
    view = shown(text_plain="IntSlider()", **data)
    view["data"][execute.WIDGET_VIEW] = {"model_id": "x"}
    return view


def test_verdict_and_numbers_come_before_the_notebook_and_code_is_folded():
    page = page_of(code("x = 1", shown(text_html="<b>shown</b>")))
    order = [
        page.index(part)
        for part in ('class="findings"', 'class="numbers"', "<main>", "<b>shown</b>", "<details")
    ]
    assert order == sorted(order)
    assert page.count("<li>") == 3 and page.count("<dt>l</dt>") == 4
    assert "<summary>Code</summary>" in page and "<details open" not in page


def test_page_holds_all_it_needs():
    page = page_of(
        nbformat.v4.new_markdown_cell("## Heading\n\ntext `code`"), code("import os", shown(text_html="<i>"))
    )
    assert "<script" not in page and "@import" not in page and "url(" not in page
    assert re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', page) == ["index.html"]
    assert "http" not in page and "¶" not in page
    assert "<h2" in page and 'lang="en"' in page and "prefers-color-scheme" in page and "@media print" in page


def test_words_from_outside_are_escaped():
    evil = "<script>alert(1)</script>"
    stream = nbformat.v4.new_output("stream", name="stdout", text=evil)
    error = nbformat.v4.new_output("error", ename=evil, evalue=evil, traceback=[])
    findings = {
        "title": evil, "verdict": [evil] * 3, "numbers": [{"label": evil, "value": evil, "note": evil}] * 4
    }  # fmt: skip
    page = page_of(code(f"prompt = '{evil}'", stream, error, shown(text_plain=evil)), findings=findings)
    assert "<script" not in page and "&lt;abc&gt;" in page
    assert "<script" not in export.index_page([{"page": "x.html", "findings": findings}])


def test_widget_views_leave_a_note_and_titles_are_not_repeated():
    title = nbformat.v4.new_markdown_cell("# The title", metadata={"tags": ["title"]})
    page = page_of(title, code("slider", widget()), code("a = 1", tags=["parameters"]))
    assert "An interactive control stands here in the notebook." in page and "The title" not in page
    assert "<summary>Parameters</summary>" in page


def test_index_links_every_report_with_its_verdict():
    page = export.index_page(
        [{"page": "01_x.html", "findings": FINDINGS}, {"page": "02_y.html", "findings": FINDINGS}]
    )
    assert re.findall(r'href="([^"]*)"', page) == ["01_x.html", "02_y.html"] and page.count("<li>") == 6
    assert "No report has been made yet" in export.index_page([])


# ============================================================================================================
# Provenance
# ============================================================================================================


def test_checkpoint_hash_depends_on_names_and_contents(tmp_path):
    def folder(name: str, **files: str):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file.replace("_", ".")).write_text(text)
        return provenance.checkpoint_hash(tmp_path / name)

    first = folder("a", config_json="{}", model_safetensors="x")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", first)
    assert first == folder("b", config_json="{}", model_safetensors="x", readme_md="not part of it")
    assert (
        len(
            {
                first,
                folder("c", config_json="{}", model_safetensors="y"),
                folder("d", config_json="{ }", model_safetensors="x"),
            }
        )
        == 3
    )
    assert first != folder("e", config_json="{}", other_safetensors="x")


def test_commit_tells_a_clean_clone_from_a_changed_one(tmp_path):
    assert provenance.commit_line(tmp_path) == "unknown: not a git clone"

    def git(*arguments):
        settings = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "x")
    clean = provenance.commit_line(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", clean)
    (tmp_path / "file").write_text("b")
    assert provenance.commit_line(tmp_path) == clean + " + uncommitted changes"


def test_provenance_names_versions_machine_and_parameters(tmp_path):
    rows = dict(
        provenance.provenance(
            project=tmp_path, checkpoint=None, parameters={"prompt": "x" * 500, "full": False},
            conditions={"dtype": "float32", "policy": {"exponent": "e", "clamps": []}},
            command="workbench report",
        )
    )  # fmt: skip
    assert rows["Command"] == "workbench report" and rows["Dtype"] == "float32"
    assert rows["Policy"] == "exponent: e, clamps: none"
    assert "torch 2." in rows["Versions"] and "python 3." in rows["Versions"] and rows["Machine"]
    assert "(502 characters)" in rows["Parameters"] and "full = False" in rows["Parameters"]
    assert "Checkpoint" not in rows


# ============================================================================================================
# Requests
# ============================================================================================================


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with two small notebooks that share one parameter."""
    (tmp_path / "notebooks").mkdir()
    for name, extra in (("01_one", ""), ("02_two", "\nother = 1")):
        write = (
            "from workbench.report import write_findings\n"
            f"write_findings('{name}', dict(title='{name} ' + prompt, verdict=['a', 'b', 'c'], numbers=[]))"
        )
        cells = notebook(write, first='prompt = "default"' + extra)
        nbformat.write(cells, tmp_path / "notebooks" / f"{name}.ipynb")
    monkeypatch.setattr(build, "PROJECT", tmp_path)
    return tmp_path


def test_reports_are_written_with_an_index_over_all_of_them(project, monkeypatch):
    monkeypatch.chdir(project)
    out = Path("deep") / "reports"  # relative to where the command is given, not to the notebook
    request = build.Request(notebook="01", prompt="<given>", out=out)
    (report,) = build.build(request, lambda line: None)
    assert report.findings["title"] == "01_one <given>" and "&lt;given&gt;" in report.page.read_text()
    assert sorted(path.name for path in out.iterdir()) == [
        "01_one.findings.json", "01_one.html", "01_one.ipynb", "index.html"
    ]  # fmt: skip
    build.build(build.Request(notebook="02_two", settings=("other=5",), out=out), lambda line: None)
    index = (out / "index.html").read_text()
    assert "01_one.html" in index and "02_two.html" in index
    assert "other = 5" in nbformat.read(out / "02_two.ipynb", 4).cells[0].source
    source = nbformat.read(project / "notebooks" / "01_one.ipynb", 4)
    assert (
        "default" in source.cells[0].source and not source.cells[1].outputs
    )  # the notebook itself is left alone


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (build.Request(notebook="03"), "--notebook 03: no such notebook in .* expected one of 01, 02"),
        (
            build.Request(settings=("prompt=x",), prompt="y"),
            "--set prompt: given by an option of its own as well",
        ),
        (build.Request(notebook="01", settings=("other=5",)), "--set other: no such parameter in 01_one"),
        (build.Request(full=True), "option for 'full': no such parameter in 01_one and 02_two"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_before_anything_runs(project, request_, expected):
    with pytest.raises(InputError, match=expected):
        build.build(request_, lambda line: pytest.fail("nothing may run"))
    assert not (project / "reports").exists()


@pytest.fixture
def modelled(project):
    """The project with a notebook that names a checkpoint beside it, a policy, a dtype and numbers of tokens."""
    (project / "notebooks" / "small").mkdir()
    first = 'checkpoint = "small"\npolicy = "safe"\ndtype = "float32"\nmax_tokens = 8\nmax_new_tokens = 4\nprompt = "x"'
    (project / "notebooks" / "words").write_text("{}")
    first += '\ncorpus = "words"\nflip_texts = 2'
    write = (
        "from workbench.report import write_findings\n"
        "found = dict(title='|'.join((checkpoint, policy, corpus, prompt)), verdict=['a', 'b', 'c'], numbers=[])\n"
        "write_findings('01_one', found)"
    )
    cells = notebook(write, first=first)
    nbformat.write(cells, project / "notebooks" / "01_one.ipynb")
    return project


@pytest.mark.parametrize(
    ("setting", "kind", "expected"),
    [
        ("policy=nosuch", PolicyError, "policy 'nosuch': neither a preset .* nor a file"),
        ("policy=broken.json", PolicyError, "policy file .*broken.json: not JSON"),
        ("policy=wrong.json", PolicyError, "policy field exponent: expected one of"),
        ("dtype=bf16", InputError, "dtype: expected one of float64, .*, found 'bf16'"),
        ("max_tokens=0", InputError, r"max_tokens: expected at least 1, found 0 \(notebook 01_one\)"),
        ("max_new_tokens=-3", InputError, r"max_new_tokens: expected at least 1, found -3"),
        ("checkpoint=elsewhere", InputError, "checkpoint 'elsewhere': expected a folder here or by the notebook"),
        ("flip_texts=0", InputError, r"flip_texts: expected at least 1, found 0 \(notebook 01_one\)"),
        ("corpus=elsewhere", InputError, "corpus 'elsewhere': expected a file here or by the notebook, found none"),
        ("corpus=notebooks", InputError, "corpus 'notebooks': expected a file .*, found a folder"),
        ("corpus=", InputError, "corpus '': expected a file .*, found none"),
        ("corpus=" + 5000 * "x", InputError, "expected a file .*, found none"),
        ("checkpoint=wrong.json", InputError, "checkpoint 'wrong.json': expected a folder .*, found a file"),
    ],
)
def test_values_that_cannot_be_met_are_refused_before_a_kernel_starts(modelled, monkeypatch, setting, kind, expected):
    monkeypatch.chdir(modelled)
    (modelled / "broken.json").write_text("{")
    (modelled / "wrong.json").write_text('{"exponent": "none"}')
    with pytest.raises(kind, match=expected):
        build.build(build.Request(notebook="01", settings=(setting,)), lambda line: pytest.fail("nothing may run"))
    assert not (modelled / "reports").exists()


@pytest.mark.parametrize("value", ["mine.json", "safe", "beside.json"])
def test_paths_of_settings_begin_where_the_command_is_given(modelled, monkeypatch, value):
    here = modelled / "here"
    (here / "data").mkdir(parents=True)
    (here / "mine.json").write_text("{}")
    (here / "safe").write_text("{}")  # a preset's name is no path
    (modelled / "notebooks" / "beside.json").write_text("{}")
    (here / "text").write_text("")
    monkeypatch.chdir(here)
    settings = (f"policy={value}", "checkpoint=data", "corpus=mine.json", "prompt=text")
    request = build.Request(notebook="01", settings=settings, out=modelled / "out")
    (report,) = build.build(request, lambda line: None)
    policy = str(here / value) if value == "mine.json" else value
    assert report.findings["title"] == f"{here / 'data'}|{policy}|{here / 'mine.json'}|text"  # a prompt is no path


def test_help_names_the_notebooks_and_the_parameters_of_each(capsys):
    assert cli.main(["report", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for path in build.notebooks(None):
        cell = build.parameters_cell(nbformat.read(path, as_version=4), path.stem)
        assert f"{path.stem[:2]}: {', '.join(build.read_parameters(cell.source, path.stem))}" in words
        assert f"{path.stem[:2]} (" in words


def test_a_page_that_cannot_be_made_leaves_the_earlier_report_whole(project, monkeypatch):
    request = build.Request(notebook="01", out=project / "out")
    build.build(request, lambda line: None)
    before = {path.name: path.read_bytes() for path in (project / "out").iterdir()}

    def fails(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.report.export.notebook_page", fails)
    with pytest.raises(OSError, match="No space left"):
        build.build(dataclasses.replace(request, prompt="another"), lambda line: None)
    assert {path.name: path.read_bytes() for path in (project / "out").iterdir()} == before


def test_a_notebook_without_findings_leaves_no_report(project):
    nbformat.write(notebook("pass", first='prompt = "x"'), project / "notebooks" / "01_one.ipynb")
    with pytest.raises(WorkbenchError, match="01_one: expected it to write its findings"):
        build.build(build.Request(notebook="01", out=project / "reports"), lambda line: None)
    assert list((project / "reports").iterdir()) == []


def test_no_notebooks_folder_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PROJECT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="run this command in a clone"):
        build.notebooks(None)


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setattr(build, "NEEDED", ("nbformat", "no_such_package"))
    with pytest.raises(
        WorkbenchError, match=r"reports need no_such_package.*hybrid-moe-workbench\[notebook\]"
    ):
        build.build(build.Request(), lambda line: None)


def test_findings_of_an_earlier_report_that_are_damaged_are_named(project):
    out = project / "reports"
    out.mkdir()
    (out / "09_z.findings.json").write_text("{")
    (out / "09_z.html").write_text("")
    with pytest.raises(InputError, match=r"09_z\.findings\.json: expected findings"):
        build.build(build.Request(notebook="01", out=out), lambda line: None)


def test_template_files_are_package_data():
    import tomllib

    root = Path(__file__).resolve().parent.parent
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "workbench"
    ]
    for file in (export.HERE / export.TEMPLATE).iterdir():
        assert f"**/*{file.suffix}" in patterns, file
    assert os.sep not in export.TEMPLATE
