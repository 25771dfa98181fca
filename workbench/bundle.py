"""Bundle v1: tensors and what they were computed by, in a directory that is complete or refused.

A directory with safetensors files and ``manifest.json``::

    {"format": "workbench-bundle", "version": 1, "kind": "routing", "model_hash", "backends", "policy", "versions",
     "card", "seed", "content": {...}, "files": {"routing.safetensors": {"bytes", "sha256"}}, "complete": true}

The manifest is written last, by a rename, so that a directory without one is an unfinished bundle.

>>> write_bundle("run", "routing", {"routing.safetensors": tensors}, Origin(seed=3), content={"experts": 256})
>>> read_bundle("run", "routing").tensors["routing.safetensors"]
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from workbench.errors import InputError

FORMAT, VERSION, MANIFEST = "workbench-bundle", 1, "manifest.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors")
_STAGING = ".unfinished-"


@dataclass(frozen=True, slots=True)
class Origin:
    """What the tensors of a bundle were computed by; plain JSON values, None where unknown or without meaning.

    `model_hash` as by `provenance.checkpoint_hash`, `backends` rows {op, backend, ...}, `policy` the fields of a
    NumericsPolicy, `versions` by distribution, `card` the accelerator's name, `seed` of whatever was random.
    """

    model_hash: str | None = None
    backends: tuple[dict[str, Any], ...] = ()
    policy: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    card: str | None = None
    seed: int | None = None


#: What each field of an Origin is in a manifest, where it is not null: in words, and whether a value is one.
_ORIGIN_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model_hash": ("text", lambda value: isinstance(value, str)),
    "backends": ("a list of objects", lambda value: isinstance(value, list) and all(type(r) is dict for r in value)),
    "policy": ("an object", lambda value: isinstance(value, dict)),
    "versions": ("an object of texts",
                 lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values())),
    "card": ("text", lambda value: isinstance(value, str)),
    "seed": ("a whole number", lambda value: type(value) is int),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read: `tensors` by file and name, on the CPU; `content` is what its kind put there."""

    path: Path
    kind: str
    origin: Origin
    content: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def write_bundle(
    path: str | Path,
    kind: str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    origin: Origin,
    *,
    content: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` (file name -> name -> tensor) and the manifest to the directory `path`.

    An earlier bundle of the same kind, and the rest of one that was never finished, are replaced. All files are
    written and flushed under another name first; a crash leaves the old bundle, the new one, or, between two renames,
    a directory without a manifest, which `read_bundle` refuses. Raises InputError for a file name that is none, for a
    directory that holds anything else, and where the disk refuses.
    """
    names = set(tensors)
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise InputError(f"bundle {path}: expected names of files that end in .safetensors, found {name!r}")
    with open_bundle(path, kind, origin, names=names) as unfinished:
        unfinished.content.update(content or {})
        for name, group in tensors.items():
            own = {key: tensor.detach().cpu().contiguous() for key, tensor in group.items()}
            with _in_one_line(path):
                save_file(own, unfinished.folder / name)


@dataclass(slots=True)
class Unfinished:
    """A bundle that is being written: files go into `folder`, what its kind says of them into `content`."""

    folder: Path
    content: dict[str, Any] = field(default_factory=dict)


@contextmanager
def open_bundle(
    path: str | Path, kind: str, origin: Origin, *, names: Collection[str] | None = None
) -> Iterator[Unfinished]:
    """Write files one after another, then the bundle: for tensors that never are in memory together.

    All *.safetensors of `Unfinished.folder` are flushed, hashed and moved to `path` at the end of the context, the
    manifest last, as `write_bundle` says. `names` are the files, where they are known before: what else the directory
    holds is then refused at once. An exception inside leaves whatever `path` held before.
    """
    path = Path(path)
    _replaceable(path, kind, names)
    with _in_one_line(path):
        path.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=path))
    try:
        unfinished = Unfinished(staging)
        yield unfinished
        with _in_one_line(path):
            _finish(path, kind, origin, unfinished)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _finish(path: Path, kind: str, origin: Origin, unfinished: Unfinished) -> None:
    """Hash and move the files of a staging directory, the manifest last."""
    staging, files = unfinished.folder, {}
    for file in sorted(staging.glob("*.safetensors")):
        file.chmod(0o644)  # the library makes its files private
        _flush(file)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
    obsolete = _replaceable(path, kind, set(files))
    manifest = {
        "format": FORMAT, "version": VERSION, "kind": kind, **dataclasses.asdict(origin),
        "content": unfinished.content, "files": files, "complete": True,
    }  # fmt: skip
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _flush(staging / MANIFEST)
    (path / MANIFEST).unlink(missing_ok=True)
    for name in obsolete:
        (path / name).unlink(missing_ok=True)
    for name in files:
        os.replace(staging / name, path / name)
    os.replace(staging / MANIFEST, path / MANIFEST)
    if os.name == "posix":  # elsewhere a directory has no such call
        _flush(path)


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"bundle {path}: cannot be written: {error}; choose another directory") from None


def read_bundle(path: str | Path, kind: str) -> Bundle:
    """The bundle in the directory `path`, every file compared with the size and the sha256 of its manifest.

    Raises InputError, in one line, for a directory that is no bundle, an unfinished or damaged one, and one of another
    kind or version.
    """
    path = Path(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        raise InputError(f"bundle {path}: expected a directory with {MANIFEST}, found {found}")
    manifest = _read_manifest(path)
    if manifest["kind"] != kind:
        raise InputError(f"bundle {path}: expected one of kind {kind!r}, found {manifest['kind']!r}")
    tensors = {}
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise InputError(f"bundle {path}: expected the file {name} of {MANIFEST}, found none; write it anew")
        try:
            size = file.stat().st_size
            if size != expected["bytes"] or _digest(file) != expected["sha256"]:
                raise InputError(
                    f"bundle {path}: {name}: expected the {expected['bytes']} bytes that {MANIFEST} describes, found "
                    f"{'others' if size == expected['bytes'] else size}; the file was changed or cut, write it anew"
                )
            tensors[name] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"bundle {path}: {name}: cannot be read: {error}") from None
    origin = Origin(**{f.name: manifest.get(f.name) for f in dataclasses.fields(Origin)})
    origin = dataclasses.replace(origin, backends=tuple(origin.backends or ()), versions=origin.versions or {})
    return Bundle(path, kind, origin, manifest["content"], tensors)


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest with the fields that reading needs, checked."""
    file = path / MANIFEST
    if not file.exists():
        raise InputError(f"bundle {path}: expected {MANIFEST}, found none: no bundle, or one that was never finished")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"bundle {path}: {MANIFEST}: expected JSON, found: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise InputError(f"bundle {path}: {MANIFEST}: expected format {FORMAT!r}, found {found!r}")
    if manifest.get("version") != VERSION:
        raise InputError(
            f"bundle {path}: expected version {VERSION}, found {manifest.get('version')!r}; read it with the workbench "
            "that wrote it"
        )
    if manifest.get("complete") is not True:
        raise InputError(f"bundle {path}: {MANIFEST}: expected complete true, found {manifest.get('complete')!r}")
    kinds = {"kind": str, "content": dict, "files": dict}
    for name, kind in kinds.items():
        if not isinstance(manifest.get(name), kind):
            raise InputError(
                f"bundle {path}: {MANIFEST}: {name}: expected {kind.__name__}, found {manifest.get(name)!r:.60}"
            )
    for name, (expected, fits) in _ORIGIN_FIELDS.items():
        value = manifest.get(name)
        if value is not None and not fits(value):
            raise InputError(f"bundle {path}: {MANIFEST}: {name}: expected {expected} or null, found {value!r:.60}")
    for name, entry in manifest["files"].items():
        is_entry = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
        if not _FILE_NAME.fullmatch(name) or not is_entry:
            raise InputError(
                f"bundle {path}: {MANIFEST}: files: expected NAME.safetensors with bytes and sha256, found {name!r:.60}"
            )
    return manifest


def _replaceable(path: Path, kind: str, names: Collection[str] | None) -> set[str]:
    """Files of an earlier bundle that the new one lacks. Raises InputError for a directory that holds other things.

    `names` None: they are not known yet, and any file named like one of a bundle may be from an unfinished one.
    """
    if not path.exists():
        return set()
    if not path.is_dir():
        raise InputError(f"bundle {path}: expected a directory or nothing, found a file")
    present = {entry.name for entry in path.iterdir() if not entry.name.startswith(_STAGING)}
    if names is None:
        names = {name for name in present if _FILE_NAME.fullmatch(name)}
    names = set(names)
    before: set[str] = set()
    if MANIFEST in present:
        manifest = _read_manifest(path)
        if manifest["kind"] != kind:
            raise InputError(
                f"bundle {path}: expected a new directory or a bundle of kind {kind!r}, found one of kind "
                f"{manifest['kind']!r}; choose another directory"
            )
        before = set(manifest["files"])
    if foreign := sorted(present - before - names - {MANIFEST}):
        raise InputError(
            f"bundle {path}: expected a new or empty directory, or a bundle, found {foreign[0]!r} in it; choose another"
        )
    return before - names


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """To the disk: a rename that outlives the content it names would be worth nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
