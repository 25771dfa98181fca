"""`workbench report`: find the notebooks, run each with its parameters, write the pages and an index."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import InputError, WorkbenchError
from workbench.report.parameters import (
    check_parameters,
    from_here,
    parameters_cell,
    parse_setting,
    read_parameters,
    replace_parameters,
)

if TYPE_CHECKING:
    from workbench.cards import Card

PROJECT = Path(__file__).resolve().parent.parent.parent

#: Packages of the `notebook` extra that a report needs.
NEEDED = ("nbformat", "nbclient", "nbconvert", "ipykernel")


@dataclass(frozen=True, slots=True)
class Request:
    """What to report on.

    `notebook` is a number such as `01`, None for all; `checkpoint` and `prompt` replace the notebook's own;
    `settings` are KEY=VALUE texts; `card` is a card to rehearse besides, with the checkpoint and prompt of the first
    notebook; `command` is what repeats the request, shown in the provenance.
    """

    notebook: str | None = None
    checkpoint: Path | None = None
    prompt: str | None = None
    settings: Sequence[str] = field(default_factory=tuple)
    full: bool = False
    card: str | None = None
    out: Path = Path("reports")
    command: str = "workbench report"


@dataclass(frozen=True, slots=True)
class Report:
    """One finished report, of a notebook or a card: its name, the files that were written, and its findings."""

    name: str
    page: Path
    findings_file: Path
    findings: dict


def build(request: Request, say: Callable[[str], None]) -> list[Report]:
    """Run the notebooks that `request` asks for and write their reports into `request.out`.

    `say` gets lines of progress. Raises InputError for a request that cannot be met, before anything is run
    as far as that can be seen then; no report is written of a notebook that failed.
    """
    _need_packages()
    import nbformat

    from workbench.cards import card_named

    card = None if request.card is None else card_named(request.card)
    sources = notebooks(request.notebook)
    common = _overrides(request)
    loaded = []
    for path in sources:
        notebook = nbformat.read(path, as_version=4)
        cell = parameters_cell(notebook, path.stem)
        loaded.append((path, notebook, cell, read_parameters(cell.source, path.stem)))
    changes = _changes(request, common, {path.stem: defaults for path, _, _, defaults in loaded},
                       sources[0].parent)  # fmt: skip
    for path, _, cell, _ in loaded:
        cell.source = replace_parameters(cell.source, changes[path.stem], path.stem)
        check_parameters(read_parameters(cell.source, path.stem), path.stem, path.parent)
    _prepare(request.out)
    reports = [
        _build_one(path, notebook, read_parameters(cell.source, path.stem), request, say)
        for path, notebook, cell, _ in loaded
    ]
    if card is not None:
        path, _, cell, _ = loaded[0]
        reports.append(_build_card(card, path.parent, read_parameters(cell.source, path.stem), request, say))
    (request.out / "index.html").write_text(_index(request.out), encoding="utf-8")
    return reports


def notebooks(number: str | None) -> list[Path]:
    """The notebooks of the project, or the one whose name begins with `number`; none is an InputError."""
    folders = [base / "notebooks" for base in (PROJECT, Path.cwd())]
    folder = next((path for path in folders if path.is_dir()), None)
    if folder is None:
        raise InputError(
            f"notebooks: expected the folder {folders[0]} or {folders[1]}, found neither; run "
            "this command in a clone of the project"
        )
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    chosen = [path for path in known if number is None or path.stem[:2] == number or path.stem == number]
    if not chosen:
        names = ", ".join(path.stem[:2] for path in known) or "none"
        raise InputError(f"--notebook {number}: no such notebook in {folder}, expected one of {names}")
    return chosen


def _need_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise WorkbenchError(
            f"reports need {', '.join(missing)}, not installed here; install the `notebook` extra: "
            "pip install 'hybrid-moe-workbench[notebook]'"
        )


def _overrides(request: Request) -> dict[str, object]:
    """Parameters set by options of their own."""
    overrides: dict[str, object] = {}
    if request.checkpoint is not None:
        if not request.checkpoint.is_dir():
            raise InputError(f"checkpoint {request.checkpoint}: expected a directory, found none")
        overrides["checkpoint"] = str(request.checkpoint.resolve())
    if request.prompt is not None:
        overrides["prompt"] = request.prompt
    if request.full:
        overrides["full"] = True
    return overrides


def _changes(
    request: Request, common: dict[str, object], defaults: dict[str, dict[str, object]], folder: Path
) -> dict[str, dict[str, object]]:
    """Per notebook in `folder` the parameters to change. An option or setting must be known to at least one of them."""
    changes: dict[str, dict[str, object]] = {
        name: {key: value for key, value in common.items() if key in known}
        for name, known in defaults.items()
    }
    everything = {key: value for known in defaults.values() for key, value in known.items()}
    names = " and ".join(defaults)
    for key in common:
        if key not in everything:
            raise InputError(f"option for {key!r}: no such parameter in {names}; leave the option out")
    for setting in request.settings:
        parse_setting(setting, everything, names)
        key = setting.partition("=")[0].strip()
        if key in common:
            raise InputError(f"--set {key}: given by an option of its own as well; give one of them")
        for name, known in defaults.items():
            if key in known:
                key, value = parse_setting(setting, known, name)
                changes[name][key] = from_here(key, value, known[key], folder, name)
    return changes


def _prepare(out: Path) -> None:
    """Make the folder and prove that it can be written, before minutes are spent on what goes there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out, prefix=".workbench-"):
            pass
    except OSError as error:
        raise InputError(
            f"--out {out}: expected a folder that can be written, found: {error.strerror}"
        ) from None


def _build_one(
    path: Path, notebook, parameters: dict[str, object], request: Request, say: Callable[[str], None]
) -> Report:
    import nbformat

    from workbench.report.execute import execute

    name = path.stem
    say(f"{name}: starting a kernel")
    with tempfile.TemporaryDirectory(dir=request.out, prefix=".workbench-") as scratch:
        execute(notebook, name=name, folder=path.parent, findings_folder=Path(scratch), say=say)
        written = Path(scratch) / f"{name}.findings.json"
        if not written.is_file():
            raise WorkbenchError(f"notebook {name}: expected it to write its findings, found none")
        findings = json.loads(written.read_text(encoding="utf-8"))
        page = Path(scratch) / f"{name}.html"
        executed = Path(scratch) / f"{name}.ipynb"
        page.write_text(_page(path, notebook, parameters, findings, request), encoding="utf-8")
        nbformat.write(notebook, executed)
        for file in (page, executed, written):  # each appears whole
            os.replace(file, request.out / file.name)
    return Report(name, request.out / page.name, request.out / written.name, findings)


def _build_card(
    card: Card, folder: Path, parameters: dict[str, object], request: Request, say: Callable[[str], None]
) -> Report:
    """The report of a rehearsal; `parameters` are those of a notebook in `folder`."""
    from workbench.analysis.rehearse import rehearse
    from workbench.report.card import card_findings, card_page
    from workbench.tokenizer import Tokenizer

    found = {name: parameters.get(name) for name in ("checkpoint", "prompt")}
    if not all(isinstance(value, str) and value for value in found.values()):
        raise InputError(f"--card {card.name}: expected a notebook with a checkpoint and a prompt, found {found}")
    checkpoint = folder / found["checkpoint"]
    ids = Tokenizer.from_directory(checkpoint).encode(found["prompt"])
    name = f"card_{card.name}"
    result = rehearse(checkpoint.resolve(), card, ids, progress=lambda line: say(f"{name}: {line}"))
    findings = card_findings(result)
    files = {f"{name}.html": card_page(result, request.command, "index.html"),
             f"{name}.findings.json": json.dumps(findings, indent=1, allow_nan=False)}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=request.out, prefix=".workbench-") as scratch:
        for file, text in files.items():
            (Path(scratch) / file).write_text(text, encoding="utf-8")
        for file in files:  # each appears whole
            os.replace(Path(scratch) / file, request.out / file)
    return Report(name, *(request.out / file for file in files), findings)


def _page(
    path: Path, notebook, parameters: dict[str, object], findings: dict, request: Request
) -> str:
    from workbench.report.export import notebook_page
    from workbench.report.provenance import provenance

    checkpoint = parameters.get("checkpoint")
    rows = provenance(
        project=PROJECT,
        checkpoint=(path.parent / checkpoint) if isinstance(checkpoint, str) else None,
        parameters=parameters,
        conditions=findings.get("conditions", {}),
        command=request.command,
    )
    return notebook_page(notebook, name=path.stem, findings=findings, provenance=rows)


def _index(out: Path) -> str:
    """The index over every report in the folder, also those of earlier runs."""
    from workbench.report.export import index_page

    entries = []
    for file in sorted(out.glob("*.findings.json")):
        page = out / file.name.replace(".findings.json", ".html")
        if not page.is_file():
            continue
        try:
            entries.append({"page": page.name, "findings": json.loads(file.read_text(encoding="utf-8"))})
        except ValueError as error:
            raise InputError(
                f"{file}: expected findings of an earlier report, found {error}; remove it"
            ) from None
    return index_page(entries)
