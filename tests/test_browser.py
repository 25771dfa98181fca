"""What only a browser can tell: the notebooks' controls in JupyterLab, and the exported pages without a network.

Needs the `browser` extra and a Chromium of the system; without one of them the tests are skipped and say which.
With WORKBENCH_SCREENSHOTS=FOLDER they leave pictures of what they saw there.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from small_checkpoint import PROMPT, write_small_checkpoint

from workbench.report import build, parameters

pytestmark = pytest.mark.browser

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the `browser` extra has it")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "01_gate_overflow.ipynb"
ROUTING = ROOT / "notebooks" / "02_moe_routing.ipynb"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SECONDS = 1000.0  # of playwright's milliseconds


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium here: looked for {', '.join(NAMES)}")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("browser") / "checkpoint")


def picture(what, name: str) -> None:
    if folder := os.environ.get("WORKBENCH_SCREENSHOTS"):
        what.screenshot(path=Path(folder) / name)


class Faults(list):
    """Whatever a page complains of: failed requests, errors on the console, addresses of other machines."""

    def __init__(self, page, home: str) -> None:
        page.on("requestfailed", lambda request: self.append(f"failed: {request.url[:120]}"))
        page.on("console", lambda message: message.type == "error" and self.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.append(f"script: {error}"))
        page.on("request", lambda request: self._seen(request.url, home))

    def _seen(self, address: str, home: str) -> None:
        if not address.startswith((home, "data:", "blob:")):
            self.append(f"outside: {address[:120]}")


# ============================================================================================================
# The exported page
# ============================================================================================================


@pytest.fixture(scope="module")
def report(tmp_path_factory, checkpoint) -> Path:
    request = build.Request(
        notebook="01", checkpoint=checkpoint, prompt=PROMPT, settings=("max_new_tokens=4",),
        out=tmp_path_factory.mktemp("page"),
    )  # fmt: skip
    return build.build(request, lambda line: None)[0].page


@pytest.fixture(scope="module")
def routing_report(tmp_path_factory, checkpoint) -> Path:
    request = build.Request(
        notebook="02", checkpoint=checkpoint, settings=("max_tokens=48", "flip_texts=1"),
        out=tmp_path_factory.mktemp("routing"),
    )  # fmt: skip
    return build.build(request, lambda line: None)[0].page


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 600)])
def test_the_page_moves_its_recorded_sweep_without_network_or_kernel(browser, report, scheme, width):
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    faults = Faults(page, "file:")
    page.goto(report.as_uri())
    outside = "[...document.querySelectorAll('[src], [href]')].map(e => e.src || e.href)"
    assert all(address.startswith(("data:", "file:")) for address in page.evaluate(outside))
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out at the side
    sweep = page.locator("section.frames")
    slider, shown = sweep.get_by_role("slider", name="clamp of the cumulative sum"), sweep.locator(".frame:visible img")
    seen = [shown.get_attribute("src")]
    slider.focus()
    for keys in (("ArrowRight", "ArrowRight"), ("End",), ("Home",)):
        for key in keys:
            page.keyboard.press(key)
        seen.append(shown.get_attribute("src"))
    assert seen[3] == seen[0] and len(set(seen[:3])) == 3, "the keyboard does not move the sweep"
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    assert shown.get_attribute("src") == seen[2] and sweep.locator("output").text_content() == "±5 nats"
    assert slider.get_attribute("aria-valuetext") == "±5 nats"
    page.keyboard.press("Home")
    sweep.get_by_role("combobox", name="policy").select_option("safe")
    assert sweep.locator(".frame:visible").count() == 1 and shown.get_attribute("src") not in seen
    picture(sweep, f"page_{scheme}_{width}.png")
    page.emulate_media(media="print")
    assert not slider.is_visible() and "policy: safe" in sweep.locator(".setting:visible").text_content()
    assert page.evaluate("[...document.images].every(i => i.alt && i.complete && i.naturalWidth)")
    context.close()
    assert not faults, faults


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 600)])
def test_the_page_on_routing_moves_both_of_its_sweeps(browser, routing_report, scheme, width):
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    faults = Faults(page, "file:")
    page.goto(routing_report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for place, (slider, choice, option) in enumerate((("temperature", "top-k", "1"), ("layer", "text", "code"))):
        sweep = page.locator("section.frames").nth(place)
        shown = sweep.locator(".frame:visible")
        seen = [shown.inner_html()]
        sweep.get_by_role("slider", name=slider).focus()
        page.keyboard.press("ArrowRight")
        seen.append(shown.inner_html())
        sweep.get_by_role("combobox", name=choice).select_option(option)
        seen.append(shown.inner_html())
        assert len(set(seen)) == 3 and shown.count() == 1, slider
        picture(sweep, f"routing_{slider}_{scheme}_{width}.png")
    # A token's number stands on the line of its token.
    apart = """[...document.querySelectorAll('.routed sup')].filter(sup => sup.offsetParent).filter(sup => {
        const rows = sup.parentElement.getClientRects(), own = sup.getBoundingClientRect();
        return own.top > rows[rows.length - 1].bottom || own.left < rows[rows.length - 1].left - 1; }).length"""
    assert page.evaluate(apart) == 0
    assert page.evaluate("[...document.images].every(i => i.alt && i.complete && i.naturalWidth)")
    context.close()
    assert not faults, faults


# ============================================================================================================
# JupyterLab
# ============================================================================================================


@contextmanager
def lab(notebook_file: Path, needed: Sequence[str], changes: dict[str, object], home: Path) -> Iterator[str]:
    """Address of a JupyterLab with a copy of a notebook: its cells whose ids end in one of `needed`."""
    work = home / "work"
    work.mkdir()
    notebook = nbformat.read(notebook_file, as_version=4)
    cell = parameters.parameters_cell(notebook, notebook_file.stem)
    cell.source = parameters.replace_parameters(cell.source, changes, notebook_file.stem)
    notebook.cells = [cell for cell in notebook.cells if cell.id.rpartition("-")[2] in needed]
    assert {cell.id.rpartition("-")[2] for cell in notebook.cells} == set(needed)
    nbformat.write(notebook, work / notebook_file.name)
    overrides = {
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
        "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    }
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(overrides))
    token = secrets.token_hex()
    environment = {
        **os.environ,
        **{f"JUPYTER_{kind.upper()}_DIR": str(home / kind) for kind in ("config", "data", "runtime")},
        "IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": str(ROOT), "JUPYTER_TOKEN": token,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root",
        "--expose-app-in-browser", f"--ServerApp.root_dir={work}", "--ServerApp.open_browser=False",
    ]  # fmt: skip
    with open(home / "log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=work)
    try:
        deadline = time.monotonic() + 60
        while not (files := list((home / "runtime").glob("jpserver-*.json"))):
            assert server.poll() is None and time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.2)
        yield f"{json.loads(files[0].read_text())['url']}lab/tree/{notebook_file.name}?token={token}"
    finally:
        server.terminate()
        server.wait(timeout=20)


KERNEL_IS_IDLE = """() => { const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.sessionContext?.session?.kernel?.status === 'idle'; }"""


def run_all(page, address: str):
    """Open a notebook, run its cells; the controls that they show."""
    page.goto(address)
    page.wait_for_function(KERNEL_IS_IDLE, timeout=60 * SECONDS)
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    controls = page.locator(".jp-OutputArea .workbench-controls")
    failed = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    controls.locator("img").or_(failed).first.wait_for(timeout=60 * SECONDS)
    assert failed.count() == 0, failed.first.text_content()
    page.wait_for_function(KERNEL_IS_IDLE, timeout=60 * SECONDS)
    return controls


class Answers:
    """Does something to the controls and waits for another figure."""

    def __init__(self, page, controls) -> None:
        self.page, self.figure = page, controls.locator("img")
        self.seen = [self.figure.get_attribute("src")]

    def to(self, press) -> None:
        press()
        self.page.wait_for_function(
            "([image, before]) => image.isConnected ? image.src !== before : true",
            arg=[self.figure.element_handle(), self.seen[-1]], timeout=10 * SECONDS,
        )  # fmt: skip
        self.figure.wait_for()
        self.seen.append(self.figure.get_attribute("src"))


def test_the_controls_answer_in_jupyterlab(browser, checkpoint, tmp_path):
    needed = ("setup", "parameters", "load", "try", "controls")
    with lab(NOTEBOOK, needed, {"checkpoint": str(checkpoint), "prompt": PROMPT}, tmp_path) as address:
        context = browser.new_context(viewport={"width": 1300, "height": 1000})
        page = context.new_page()
        faults = Faults(page, address[: address.index("/lab/")])
        controls = run_all(page, address)
        answers = Answers(page, controls)
        chunk = controls.get_by_role("slider").first
        chunk.focus()
        answers.to(lambda: page.keyboard.press("ArrowLeft"))
        exponent = controls.get_by_label("exponent")
        exponent.focus()
        answers.to(lambda: page.keyboard.press("End"))
        answers.to(lambda: controls.get_by_label("cumsum").select_option("float16"))
        assert len(set(answers.seen)) == len(answers.seen)
        picture(page, "jupyterlab.png")
        answers.to(lambda: controls.get_by_label("exponent").select_option("difference_then_mask"))
        answers.to(lambda: controls.get_by_label("cumsum").select_option("float64"))
        picture(controls, "controls.png")
        context.close()
    assert not [fault for fault in faults if not fault.startswith("console:")], faults


def test_the_routing_controls_answer_in_jupyterlab(browser, checkpoint, tmp_path):
    needed = ("setup", "parameters", "record", "load", "tokens", "counts", "try", "controls")
    changes = {"checkpoint": str(checkpoint), "prompt": PROMPT, "texts": str(ROOT / "data" / "routing.jsonl"),
               "max_tokens": 48}  # fmt: skip
    with lab(ROUTING, needed, changes, tmp_path) as address:
        context = browser.new_context(viewport={"width": 1300, "height": 1000})
        page = context.new_page()
        faults = Faults(page, address[: address.index("/lab/")])
        both = run_all(page, address)
        timings, controls = both.filter(has_text="tokens").first, both.last
        assert "torch_sorted" in timings.locator("table").text_content()
        answers = Answers(page, controls)
        sliders = controls.get_by_role("slider")
        for place, key in ((0, "ArrowLeft"), (1, "ArrowLeft"), (2, "End")):  # layer, top-k, temperature
            sliders.nth(place).focus()
            answers.to(lambda key=key: page.keyboard.press(key))
        answers.to(lambda: controls.get_by_label("prompt").select_option(index=5))
        assert len(set(answers.seen)) == 5 and controls.locator(".routed span").count() > 20
        picture(controls, "routing_controls.png")
        picture(timings, "routing_timings.png")
        context.close()
    assert not [fault for fault in faults if not fault.startswith("console:")], faults
