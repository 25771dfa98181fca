"""docs/patterns.md: every pattern is there, every place exists, every figure is that of its result file."""

import ast
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from workbench.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "patterns.md"
#: Row C7 of what the workbench must contain, word by word.
PATTERNS = (
    "batched device-to-host copy", "batch_memcpy size classes", "raking scan", "raking memoize", "dispatch_scan",
    "reduce-by-key", "scatter-direct", "segmented sort", "segmented scan", "radix-sort chain", "copy_mdspan",
    "overflow_cast", "checked_allocator", "deterministic reduce", "short-circuit all_of", "sync_handler",
    "shared-memory padding",
)  # fmt: skip


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("patterns_page", ROOT / "benchmarks" / "patterns_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def table(page) -> dict[str, list[str]]:
    """Cells of the first table by pattern: name, library's file and what it is; where it is here; what it gains."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| **")]
    return {re.match(r"\*\*(.+?)\*\*<br>`.+`<br>\w+", row[0])[1]: row for row in rows}


def defined(file: Path) -> set[str]:
    """Functions and classes of a module."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, kinds)}


def test_all_seventeen_patterns_have_one_row_of_three_cells(table):
    assert tuple(table) == PATTERNS
    assert all(len(cells) == 3 and all(cells) for cells in table.values())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_place_named_exists_and_holds_what_is_named(pattern, table):
    here = table[pattern][1]
    places = re.findall(r"\[`([\w/.]+)`\]\(\.\./([\w/.]+)\): ((?:`\w+`(?:, )?)+)", here)
    assert places and here.count("](") == len(places)
    for shown, link, names in places:
        file = ROOT / link
        assert f"/{link}".endswith(f"/{shown}") and file.is_file()
        missing = set(re.findall(r"`(\w+)`", names)) - defined(file)
        assert not missing, f"{link} has no {missing}"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_gain_has_a_figure_and_no_gain_a_reason(pattern, script, table):
    gain = table[pattern][2]
    assert re.search(r"\[\d+\]", gain)
    for sentence in re.split(r"\. ", gain):
        assert "no gain" not in sentence.lower() or "because" in sentence, sentence
    unsourced = re.findall(r"\d+\.\d+", script.FIGURE.sub("", gain))
    assert not unsourced, f"figures without a source: {unsourced}"


def test_every_figure_is_that_of_its_result_file(script, page):
    assert len(script.SOURCE.findall(page)) > 50
    assert script.refreshed(page) == page, "run benchmarks/patterns_page.py"


def test_a_result_that_changes_makes_the_page_out_of_date(script, page, tmp_path):
    results = tmp_path / "results"
    shutil.copytree(script.RESULTS, results)
    number, file, case, side, unit = script.SOURCE.search(page).groups()
    content = json.loads((results / file).read_text(encoding="utf-8"))
    row = script.found_row(content, file, case, side, unit)
    row["median"] = 123456.0
    content["commit"] = "f" * 40
    (results / file).write_text(json.dumps(content), encoding="utf-8")
    new = script.refreshed(page, results)
    assert f"123,456 [{number}]" in new and f"| {number} | `{file}` | {case} | {side} | {unit} | 123,456 |" in new
    assert "ffffffffff |" in new


def test_figures_without_a_row_and_rows_without_a_figure_are_refused(script, page):
    with pytest.raises(InputError, match=r"expected number 999 in the table"):
        script.refreshed(page + "\n7.5 [999]\n")
    last = script.SOURCE.findall(page)[-1]
    row = f"| 998 | `{last[1]}` | {last[2]} | {last[3]} | {last[4]} | 0 | 0 | 0 |"
    with pytest.raises(InputError, match=r"unused figures \['998'\]"):
        script.refreshed(f"{page}{row}\n")
    with pytest.raises(InputError, match="expected one row of case 'no such'"):
        script.refreshed(f"{page}{row.replace(last[2], 'no such')}\n")


def test_units_are_written_as_the_text_asks(script):
    row = "| 1 | `a.json` | case | side | {} | 0 | 0 | 0 |"
    assert script.SOURCE.search(row.format("us"))[5] == "us"
    assert script.shown(script.scale(" ms", "us") * 1500.0) == "1.5"
    assert script.shown(script.scale(" ms", "ms") * 1500.0) == "1,500"
    assert script.shown(script.scale(" %", "share") * 0.25) == "25"
    assert script.shown(script.scale(None, "kernels launched") * 7.0) == "7"


def test_the_readme_leads_to_the_page():
    assert "(docs/patterns.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
