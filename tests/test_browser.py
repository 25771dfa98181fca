"""What only a browser can tell: the notebook's controls in JupyterLab, and the exported page without a network.

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
from pathlib import Path

import nbformat
import pytest
from small_checkpoint import PROMPT, write_small_checkpoint

from workbench.report import build, parameters

pytestmark = pytest.mark.browser

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the `browser` extra has it")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "01_gate_overflow.ipynb"
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


# ============================================================================================================
# JupyterLab
# ============================================================================================================


@pytest.fixture(scope="module")
def lab(tmp_path_factory, checkpoint):
    """Address of a JupyterLab with a copy of the notebook: what the controls need of it, on a small checkpoint."""
    home = tmp_path_factory.mktemp("lab")
    work = home / "work"
    work.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = parameters.parameters_cell(notebook, NOTEBOOK.stem)
    changes = {"checkpoint": str(checkpoint), "prompt": PROMPT}
    cell.source = parameters.replace_parameters(cell.source, changes, NOTEBOOK.stem)
    needed = ("setup", "parameters", "load", "try", "controls")
    notebook.cells = [cell for cell in notebook.cells if cell.id.rpartition("-")[2] in needed]
    assert len(notebook.cells) == len(needed)
    nbformat.write(notebook, work / NOTEBOOK.name)
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
        yield f"{json.loads(files[0].read_text())['url']}lab/tree/{NOTEBOOK.name}?token={token}"
    finally:
        server.terminate()
        server.wait(timeout=20)


KERNEL_IS_IDLE = """() => { const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.sessionContext?.session?.kernel?.status === 'idle'; }"""


def test_the_controls_answer_in_jupyterlab(browser, lab):
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    page = context.new_page()
    faults = Faults(page, lab[: lab.index("/lab/")])
    page.goto(lab)
    page.wait_for_function(KERNEL_IS_IDLE, timeout=60 * SECONDS)
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    controls = page.locator(".jp-OutputArea .workbench-controls")
    figure = controls.locator("img")
    failed = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    figure.or_(failed).first.wait_for(timeout=60 * SECONDS)
    assert failed.count() == 0, failed.first.text_content()
    page.wait_for_function(KERNEL_IS_IDLE, timeout=60 * SECONDS)
    seen = [figure.get_attribute("src")]

    def answers(press) -> None:
        """Do `press` and wait for another figure."""
        press()
        page.wait_for_function(
            "([image, before]) => image.isConnected ? image.src !== before : true",
            arg=[figure.element_handle(), seen[-1]], timeout=10 * SECONDS,
        )  # fmt: skip
        figure.wait_for()
        seen.append(figure.get_attribute("src"))

    chunk = controls.get_by_role("slider").first
    chunk.focus()
    answers(lambda: page.keyboard.press("ArrowLeft"))
    exponent = controls.get_by_label("exponent")
    exponent.focus()
    answers(lambda: page.keyboard.press("End"))
    answers(lambda: controls.get_by_label("cumsum").select_option("float16"))
    assert len(set(seen)) == len(seen)
    picture(page, "jupyterlab.png")
    answers(lambda: controls.get_by_label("exponent").select_option("difference_then_mask"))
    answers(lambda: controls.get_by_label("cumsum").select_option("float64"))
    picture(controls, "controls.png")
    context.close()
    assert not [fault for fault in faults if not fault.startswith("console:")], faults
