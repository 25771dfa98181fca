"""Sweeps: one model, or the bare tensors of one delta rule, under every combination of policy, chunk, dtype and length.

>>> sweep("data/miniature", {"policy": ["safe", "factored"], "length": [64, 512]}, ["finite", "kl", "seconds"])
>>> sweep("layer.safetensors", {"policy": ["safe", "midpoint"], "chunk": [16, 64]}, resume="layer.jsonl", jobs=4)

A cell is one combination, and one row of the result. Each finished cell is appended to `resume` at once, so that a
sweep that was stopped goes on where it was; a cell that fails is a row with its error, and the others go on.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import socket
import statistics
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench import __version__, quality, taps
from workbench.analysis import nans, parity
from workbench.analysis.memory import peak_tensor_bytes
from workbench.analysis.runs import using_policy
from workbench.cards import Card, card_named
from workbench.dialogue import DATA, fixed_dialogues
from workbench.errors import InputError, WorkbenchError, one_line
from workbench.kernels import Attestation, Kernels
from workbench.kernels.gated_delta_rule import spec
from workbench.kernels.gated_delta_rule.reference import oracle
from workbench.kernels.registry import parse_selection
from workbench.loading import DTYPES, device_named, dtype_named, load
from workbench.model import CausalLM
from workbench.numerics import PRESETS, SAFE, NumericsPolicy, resolve_policy
from workbench.numerics.policy import shown, whole
from workbench.provenance import checkpoint_hash
from workbench.tokenizer import Tokenizer
from workbench.tracing import trace

#: The axes of a grid and the value of one that is not given. Chunk None is the policy's own; length None is 256 tokens
#: for a model and every token of a dump of tensors.
AXES: dict[str, Any] = {"policy": "safe", "chunk": None, "dtype": "float32", "length": None}
MODEL_LENGTH = 256

#: What can be measured in a cell: of which target, and what it is. Missing where there is no such number.
METRICS: dict[str, tuple[str, str]] = {
    "finite": ("any", "share of the logits, or of the output, that is finite"),
    "first_bad": ("any", "the first tap point with a value that is not finite, missing where all are"),
    "error_out": ("any", "relative error of the output against the fp64 oracle on the same inputs; of a model its "
                         "worst layer; missing where it, or the oracle on inputs with NaN or Inf, is not finite"),
    "error_state": ("any", "the same of the final state"),
    "kl": ("model", "mean KL divergence of the next token from the safe policy's in the same dtype, nats"),
    "flips": ("model", "share of positions whose most likely token is not the safe policy's, or is none"),
    "perplexity": ("model", "held-out perplexity over 4 windows of 512 tokens"),
    "dialogue": ("model", "share of the 20 fixed dialogues that are right"),
    "seconds": ("any", "median time of three forward passes; of a dump of the op alone"),
    "peak_bytes": ("any", "largest sum of tensors alive during a forward pass, inputs and weights not counted"),
}  # fmt: skip
#: Seconds each for the smallest model and independent of the length: measured only where they are named.
NAMED_ONLY = ("perplexity", "dialogue")
TEXT_WINDOWS = 4

#: Names in a dump of tensors and the arguments of the op that they are.
TENSOR_NAMES = {"q": "q", "k": "k", "v": "v", "g": "log_decay", "log_decay": "log_decay", "beta": "beta",
                "initial_state": "initial_state"}  # fmt: skip
DUMPED = "q, k, v, log_decay (or g), beta and perhaps initial_state"
NEEDED_TENSORS = ("q", "k", "v", "log_decay", "beta")

FORMATS = (".csv", ".json", ".parquet")

#: Seconds between two looks of a worker process at whether the sweep that started it is still there, and seconds
#: after which one without a cell ends.
PARENT_SECONDS, IDLE_SECONDS = 1.0, 10

Target = CausalLM | str | Path | Mapping[str, Tensor]
#: Gets the number of cells that are done, of all cells, and the row that was just measured (None at the start).
Progress = Callable[[int, int, dict[str, Any] | None], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination. `policy` is what the grid called it, `numerics` the policy itself with the chunk of the cell."""

    policy: str
    numerics: NumericsPolicy
    dtype: str
    length: int

    @property
    def labels(self) -> dict[str, Any]:
        return {"policy": self.policy, "chunk": self.numerics.chunk, "dtype": self.dtype, "length": self.length}


@dataclass(frozen=True, slots=True)
class Source:
    """What is swept, in a form that other processes can have. `digest` covers weights or tensors and the text.

    `model` is a checkpoint's path or a model; `tensors` the arguments of the op; exactly one of them is there.
    """

    digest: str
    model: CausalLM | Path | None = None
    tensors: dict[str, Tensor] | None = None
    ids: Tensor | None = None
    tokenizer: Tokenizer | Path | None = None
    backend: str | None = None
    device: str = "cpu"
    card: Card | None = None

    @property
    def kind(self) -> str:
        return "tensors" if self.model is None else "model"


# ============================================================================================================
# The sweep
# ============================================================================================================


def sweep(
    target: Target,
    grid: Mapping[str, Sequence],
    metrics: Sequence[str] | None = None,
    *,
    resume: str | Path | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    progress: Progress | None = None,
    ids: Sequence[int] | Tensor | None = None,
    tokenizer: Tokenizer | None = None,
    backend: str | None = None,
    device: str | torch.device = "cpu",
    card: Card | str | None = None,
) -> pd.DataFrame:
    """Measure every cell of `grid`; one row a cell: policy, chunk, dtype, length, each metric, ran, error.

    `ran` says which backend served each op of the cell's own pass, how often, why, and what was refused before it.

    target    a checkpoint's path or a CausalLM without a tap; or the tensors of one gated delta rule, as a .safetensors
              or .npz file or a mapping: q, k, v, log_decay (or g), beta, perhaps initial_state, shapes of its `spec`
    grid      axes of AXES, each a list or a row of numpy or pandas; policies as names, JSON files or NumericsPolicy,
              None for the safe one; None for a chunk or a length is the value of an axis that is not given
    metrics   names of METRICS; None: all that the target has, but those of NAMED_ONLY
    resume    JSONL file of finished cells. A cell is known by target, tokens, policy, dtype, length, metrics, backend,
              device and the versions of workbench and torch; a failed cell is measured again
    jobs      processes. They share the machine: `seconds` are those of a busy one. They end with this process, within
              seconds also where it is killed
    cluster   ``dask:ADDRESS`` or ``ray:ADDRESS``: the cells go to that cluster, `jobs` at once where given above 1. A
              checkpoint's path must lead to the same files on its workers
    ids       the text of a model as token ids; None: the held-out text by `tokenizer`, or by the checkpoint's own
    backend   ``[OP=]NAME``, as `load` takes it; the policy is an axis. `device` as `load` takes it
    card      to rehearse in every cell, a profile or a name of `cards.known_cards`; None: that of the model, if any

    Raises InputError, PolicyError, BackendError or CheckpointError, before any cell is measured, for a grid, a metric
    or a target that cannot be used. What goes wrong inside a cell is text in the column `error` of its row.
    """
    for name, given, kinds in (
        ("grid", grid, Mapping), ("resume", resume, str | os.PathLike | None), ("backend", backend, str | None),
        ("device", device, str | torch.device), ("cluster", cluster, str | None),
    ):  # fmt: skip
        if not isinstance(given, kinds):
            expected = {"grid": "a mapping of axes", "resume": "a path or None", "device": "a name"}
            raise InputError(f"{name}: expected {expected.get(name, 'a name or None')}, found {shown(given)}")
    if progress is not None and not callable(progress):
        raise InputError(f"progress: expected a function or None, found {shown(progress)}")
    if cluster is not None:
        _cluster_named(cluster)
    jobs = whole(jobs)
    if type(jobs) is not int or jobs < 1:
        raise InputError(f"jobs: expected a whole number of at least 1, found {shown(jobs)}")
    cells(grid)  # before anything is read
    card = card_named(card) if isinstance(card, str) else card
    source, tokens = _source_of(target, ids, tokenizer, backend, device, card, is_remote=cluster is not None)
    chosen = chosen_metrics(metrics, source)
    wanted = {cell: _key(source, cell, chosen) for cell in cells(grid, default_length=tokens)}
    with ExitStack() as stack:
        stack.callback(_KEPT.clear)
        record = None if resume is None else stack.enter_context(_Record.opened(Path(resume)))
        done = {} if record is None else {key: record.rows[key] for key in wanted.values() if key in record.rows}
        missing: dict[str, Cell] = {}
        for cell, key in wanted.items():
            if key not in done:
                missing.setdefault(key, cell)  # two names of one policy are one cell to measure
        if progress is not None:
            progress(sum(key in done for key in wanted.values()), len(wanted), None)
        # Cells of one dtype and length stand together, so that weights and oracles are made once.
        ordered = sorted(missing.items(), key=lambda item: (item[1].dtype, item[1].length))
        tasks = [(key, source, cell, chosen) for key, cell in ordered]
        for key, outcome in _outcomes(tasks, jobs, cluster, stack):
            done[key] = outcome
            if record is not None:
                record.add(key, missing[key], outcome)
            if progress is not None:
                row = missing[key].labels | outcome["values"] | {"error": outcome["error"]}
                progress(sum(key in done for key in wanted.values()), len(wanted), row)
    return _frame([(cell, done[key]) for cell, key in wanted.items()], chosen)


def cells(grid: Mapping[str, Sequence], default_length: int = MODEL_LENGTH) -> list[Cell]:
    """Every combination once, in the order of AXES. Raises InputError or PolicyError for an axis that is none."""
    unknown = [axis for axis in grid if axis not in AXES]
    if unknown:
        raise InputError(f"grid: unknown axis {unknown[0]!r}, expected {', '.join(AXES)}")
    values: dict[str, list] = {}
    for axis, default in AXES.items():
        given = grid.get(axis, [default])
        if isinstance(given, np.ndarray | pd.Series | pd.Index) and given.ndim == 1:
            given = given.tolist()
        if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
            raise InputError(f"grid: axis {axis}: expected a list of at least one value, found {shown(given)}")
        values[axis] = list(given)
    lengths = [default_length if length is None else whole(length) for length in values["length"]]
    for length in lengths:
        if type(length) is not int or not 1 <= length < 1 << 63:
            raise InputError(f"grid: axis length: expected whole numbers of at least 1, found {shown(length)}")
    for dtype in values["dtype"]:
        if not isinstance(dtype, str):
            raise InputError(f"grid: axis dtype: expected names ({', '.join(DTYPES)}), found {shown(dtype)}")
        dtype_named(dtype)
    policies = [(_label(policy), resolve_policy(policy)) for policy in values["policy"]]
    found = [
        Cell(label, policy if chunk is None else dataclasses.replace(policy, chunk=chunk), dtype, length)
        for (label, policy), chunk, dtype, length in itertools.product(
            policies, values["chunk"], values["dtype"], lengths
        )
    ]
    return list(dict.fromkeys(found))


def _label(policy: NumericsPolicy | str | Path | None) -> str:
    policy = SAFE if policy is None else policy
    if not isinstance(policy, NumericsPolicy):
        return str(policy)
    names = [name for name, known in PRESETS.items() if known == policy]
    return names[0] if names else json.dumps(policy.to_json(), sort_keys=True)


def chosen_metrics(metrics: Sequence[str] | None, source: Source) -> list[str]:
    """The metrics that are measured, in the order of METRICS. Raises InputError for one that the target lacks."""
    possible = [name for name, (kind, _) in METRICS.items() if kind in ("any", source.kind)]
    if metrics is None:
        return [name for name in possible if name not in NAMED_ONLY]
    if isinstance(metrics, str | Mapping) or not isinstance(metrics, Collection) or not len(metrics):
        raise InputError(f"metrics: expected a list of at least one of {', '.join(possible)}, found {shown(metrics)}")
    for name in metrics:
        if not isinstance(name, str) or name not in possible:
            raise InputError(f"metrics: expected some of {', '.join(possible)} for {source.kind}, found {shown(name)}")
        if name in NAMED_ONLY and source.tokenizer is None:
            raise InputError(f"metrics: {name}: expected a tokenizer, found none; give tokenizer=")
    return [name for name in possible if name in metrics]


def _frame(rows: Iterable[tuple[Cell, dict[str, Any]]], metrics: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame([
        cell.labels | {name: outcome["values"].get(name) for name in metrics}
        | {"ran": "; ".join(outcome["ran"]) or None, "error": outcome["error"]}
        for cell, outcome in rows
    ])  # fmt: skip
    kinds = {"first_bad": "string", "peak_bytes": "Int64"}
    kinds = {name: kinds.get(name, "float64") for name in metrics}
    return frame.astype({"policy": "string", "dtype": "string", **kinds, "ran": "string", "error": "string"})


# ============================================================================================================
# What is swept
# ============================================================================================================


def _source_of(
    target: Target, ids: Sequence[int] | Tensor | None, tokenizer: Tokenizer | None, backend: str | None, device: str,
    card: Card | None, *, is_remote: bool,
) -> tuple[Source, int]:  # fmt: skip
    """The source and the length of a cell that names none."""
    if backend is not None and parse_selection(backend).policy is not None:
        raise InputError(f"backend {backend!r}: expected no policy in it, found one; policies are an axis of the grid")
    if not is_remote:  # a cluster has devices of its own
        device_named(device)
    shared: dict[str, Any] = {"backend": backend, "device": str(device), "card": card}
    tensors = _tensors_of(target)
    if tensors is not None:
        if ids is not None or tokenizer is not None:
            raise InputError("sweep: expected ids and tokenizer with a model alone, found them with tensors")
        return Source(_digest_of(tensors), tensors=tensors, **shared), tensors["q"].shape[1]
    words: Tokenizer | Path | None = tokenizer
    if isinstance(target, CausalLM):
        if target.tap is not None:
            raise InputError("sweep: expected a model without a tap, found one; leave the trace or intervention first")
        if any(weight.is_meta for weight in target.state_dict().values()):
            raise InputError("sweep: expected a model with weights, found tensors without data (meta); load it first")
        model: CausalLM | Path = target
        digest = _digest_of(target.state_dict()) + repr(target.config)
        if backend is None and target.kernels.requested:
            shared["backend"] = ",".join(f"{op}={name}" for op, name in target.kernels.requested.items())
        shared |= {"device": str(target.device), "card": card or target.kernels.card}
    else:
        model = Path(target)
        if not model.exists():
            raise InputError(f"{target}: expected a checkpoint or a file of tensors, found nothing there")
        folder = model.parent if model.suffix == ".safetensors" and model.is_file() else model
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise InputError(
                f"{target}: neither a checkpoint nor a dump: expected a folder with config.json and .safetensors, or a "
                f".safetensors or .npz file of {DUMPED}"
            )
        digest = checkpoint_hash(folder)
        if words is None and (folder / "tokenizer.json").exists():
            words = folder
            digest += _digest_of_files(folder.glob("*token*.json"), folder.glob("chat_template*"))
    text = _text(ids, words)
    return Source(digest, model=model, ids=text, tokenizer=words, **shared), min(MODEL_LENGTH, len(text))


def _text(ids: Sequence[int] | Tensor | None, tokenizer: Tokenizer | Path | None) -> Tensor:
    """Token ids, [T] of int64."""
    if ids is None:
        if tokenizer is None:
            raise InputError("sweep: expected ids or a tokenizer to read the held-out text, found neither; give one")
        return torch.from_numpy(quality.heldout_tokens(_tokenizer(tokenizer), windows=None))
    try:
        text = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"ids: expected token ids, found: {error}") from None
    if text.is_floating_point() or text.dim() != 1 or not len(text):
        raise InputError(f"ids: expected one row of token ids, found {text.dtype} of shape {tuple(text.shape)}")
    return text.long()


def _tokenizer(given: Tokenizer | Path) -> Tokenizer:
    return Tokenizer.from_directory(given) if isinstance(given, Path) else given


def _tensors_of(target: Target) -> dict[str, Tensor] | None:
    """The arguments of the op where the target is a dump of them; None for a model."""
    if isinstance(target, Mapping):
        return named_tensors(target, "tensors")
    if isinstance(target, CausalLM):
        return None
    if not isinstance(target, str | Path):
        raise InputError(f"sweep: expected a path, a CausalLM or tensors by name, found {type(target).__name__}")
    path = Path(target)
    if path.suffix == ".npz" or (path.suffix == ".safetensors" and path.is_file() and not _is_weights(path)):
        return read_tensors(path)
    return None


def _is_weights(path: Path) -> bool:
    """Whether a .safetensors file is that of a checkpoint, whose names all have dots."""
    try:
        with safe_open(path, framework="pt") as file:
            return all("." in name for name in file.keys())
    except (OSError, SafetensorError):
        return (path.parent / "config.json").exists()  # the reader of it says what is wrong


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """q, k, v, log_decay (or g), beta and, where there, initial_state of a .safetensors or .npz file."""
    path = Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                stored = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        else:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise InputError(f"{path}: expected a .safetensors or .npz file of tensors, found: {error}") from None
    return named_tensors(stored, str(path))


def named_tensors(stored: Mapping[str, Tensor], source: str = "tensors") -> dict[str, Tensor]:
    """The arguments of the op by their names, checked against its contract. Raises InputError for any other."""
    what = DUMPED
    unknown = [name for name in stored if name not in TENSOR_NAMES]
    names = [TENSOR_NAMES[name] for name in stored if name in TENSOR_NAMES]
    missing = [name for name in NEEDED_TENSORS if name not in names]
    if unknown or missing:
        raise InputError(f"{source}: expected {what}, found {f'no {missing[0]}' if missing else repr(unknown[0])}")
    if len(set(names)) < len(names):
        raise InputError(f"{source}: expected one of g and log_decay, found both")
    found = {TENSOR_NAMES[name]: tensor for name, tensor in stored.items()}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{source}: {name}: expected a tensor, found {type(tensor).__name__}")
        if tensor.is_meta:
            raise InputError(f"{source}: {name}: expected numbers, found a tensor without data (meta); fill it first")
    try:
        spec.check(**{"initial_state": None, **found}, cu_seqlens=None)
        spec.check_gates(found["log_decay"])
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return found


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()}"


def _digest_of_files(*files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(itertools.chain(*files)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _key(source: Source, cell: Cell, metrics: Sequence[str]) -> str:
    """What a finished cell is known by: everything that its values depend on, but not the name of its policy."""
    parts: list[Any] = [
        __version__, torch.__version__, source.digest, source.backend, source.device, list(metrics),
        cell.numerics.to_json(), cell.dtype, cell.length,
    ]  # fmt: skip
    if source.card is not None:
        parts.append(repr(source.card))
    if source.ids is not None:
        parts.append(hashlib.sha256(source.ids[: cell.length].numpy().tobytes()).hexdigest())
    for metric, name in (("perplexity", "heldout.jsonl"), ("dialogue", "dialogues.jsonl")):
        if metric in metrics:
            parts.append(_digest_of_files([DATA / name]))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ============================================================================================================
# One cell
# ============================================================================================================

#: The model and the oracle's results that were last used in this process, by what they were made from.
_KEPT: dict[str, tuple[tuple, Any]] = {}
#: A worker of a cluster may have several threads, and a cell changes the model's policy.
_ONE_AT_A_TIME = threading.Lock()


def _measure(key: str, source: Source, cell: Cell, metrics: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Key and outcome of one cell: `values` by metric and what `ran`, or the `error` that it ended with."""
    with _ONE_AT_A_TIME, torch.inference_mode():
        try:
            values, rows = (_measure_model if source.tensors is None else _measure_tensors)(source, cell, metrics)
        except (WorkbenchError, RuntimeError, MemoryError) as error:  # torch reports what it cannot do by the second
            return key, {"values": {}, "ran": [], "error": one_line(f"{type(error).__name__}: {error}")[:500]}
    ran = [row.in_words() for row in rows]
    return key, {"values": {name: _plain(values[name]) for name in metrics}, "ran": ran, "error": None}


def _plain(value: Any) -> Any:
    """JSON and tables have no infinity: what is not finite is missing."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep(kind: str, key: tuple, make: Callable[[], Any]) -> Any:
    """What `make` returns, kept until another key of this kind is asked for."""
    if kind not in _KEPT or _KEPT[kind][0] != key:
        _KEPT.pop(kind, None)  # before the next is made: a large model has no room for two
        _KEPT[kind] = key, make()
    return _KEPT[kind][1]


def _measure_model(source: Source, cell: Cell, metrics: Sequence[str]) -> tuple[dict[str, Any], list[Attestation]]:
    """(the metrics, what served the traced pass)."""
    if len(source.ids) < cell.length:
        raise InputError(f"length: expected at most the {len(source.ids)} tokens of the text, found {cell.length}")

    def make() -> CausalLM:
        if isinstance(source.model, Path):
            return load(source.model, cell.dtype, source.device)
        return copy.deepcopy(source.model).to(dtype_named(cell.dtype))

    model = _keep("model", (source.digest, cell.dtype, source.device), make)
    if cell.length > model.config.max_position_embeddings:
        raise InputError(
            f"length: expected at most {model.config.max_position_embeddings} tokens (max_position_embeddings), "
            f"found {cell.length}"
        )
    model.kernels = model.kernels.altered(requested=source.backend, policy=cell.numerics, card=source.card)
    input_ids = source.ids[None, : cell.length].to(model.device)

    def forward() -> Tensor:
        return model(input_ids, use_cache=False).logits

    has_errors = not {"error_out", "error_state"}.isdisjoint(metrics)
    with trace(model, parity.KEEP_DELTA_RULE_INPUTS if has_errors else ()) as seen:
        logits = forward()
    ran = model.kernels.attestation()
    bad = nans.first_bad(seen.table)
    values: dict[str, Any] = {
        "finite": torch.isfinite(logits).double().mean().item(), "first_bad": None if bad is None else bad["tap"]
    }  # fmt: skip
    if has_errors:
        layers = [_errors(model.kernels, inputs) for inputs in parity.kept_inputs(seen.tensors).values()]
        values["error_out"], values["error_state"] = (max(column) for column in zip(*layers, strict=True))
    if not {"kl", "flips"}.isdisjoint(metrics):
        with using_policy(model, SAFE):
            values["kl"], values["flips"] = divergence(logits, forward())
    if "perplexity" in metrics:
        tokens = quality.heldout_tokens(_tokenizer(source.tokenizer), windows=TEXT_WINDOWS)
        values["perplexity"] = quality.perplexity(model, tokens).perplexity
    if "dialogue" in metrics:
        score = quality.dialogue_score(model, _tokenizer(source.tokenizer), fixed_dialogues(20))
        values["dialogue"] = score.share
    return values | _costs(forward, model.device, metrics), ran


def _errors(kernels: Kernels, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """Errors of output and state on the inputs of one layer; inf where those are not finite themselves."""
    with kernels.rehearsal():  # the arbiter is no part of it
        found = kernels.gated_delta_rule(**inputs)
    exact = oracle(**inputs)
    return parity.error(found[0], exact[0]), parity.error(found[1], exact[1])


def divergence(logits: Tensor, reference: Tensor, rows: int = 256) -> tuple[float, float]:
    """(mean KL, share of flips) of the next token, both [B, T, vocabulary].

    KL = sum over tokens of p_reference (log p_reference - log p), in float64, nats, averaged over positions; NaN as
    soon as a logit is not finite. A position of `logits` that is not finite has no most likely token and counts as
    flipped; both numbers are NaN where the reference is not finite.
    """
    if not torch.isfinite(reference).all():
        return math.nan, math.nan
    total, flips = 0.0, 0
    positions = logits.shape[:-1].numel()
    for mine, its in zip(logits.flatten(0, 1).split(rows), reference.flatten(0, 1).split(rows), strict=True):
        log_p = F.log_softmax(its.double(), -1)
        total += F.kl_div(F.log_softmax(mine.double(), -1), log_p, reduction="sum", log_target=True).item()
        flips += int(((mine.argmax(-1) != its.argmax(-1)) | ~torch.isfinite(mine).all(-1)).sum())
    return total / positions, flips / positions


class FirstBad:
    """A tap that keeps the `name` of the first tensor with a value that is not finite."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.name is None and not torch.isfinite(tensor).all():
            self.name = name
        return tensor

    def scope(self, prefix: str) -> FirstBad:
        return self


def _measure_tensors(source: Source, cell: Cell, metrics: Sequence[str]) -> tuple[dict[str, Any], list[Attestation]]:
    """(the metrics, what served the op)."""
    inputs = _inputs(source, cell)
    kernels = Kernels(source.backend, cell.numerics, card=source.card)
    watch = FirstBad()
    for argument, tap in parity.ARGUMENT_TAPS.items():
        watch(tap, inputs[argument])
    with kernels.rehearsal():  # as a model calls it: named_tensors has read the gates
        out, state = kernels.gated_delta_rule(**inputs, tap=kernels.watched_by(watch))
    ran = kernels.attestation()
    watch(taps.GDN_STATE, state)
    watch(taps.GDN_OUT, out)
    values: dict[str, Any] = {"finite": torch.isfinite(out).double().mean().item(), "first_bad": watch.name}
    if not {"error_out", "error_state"}.isdisjoint(metrics):
        exact = _keep("oracle", (source.digest, cell.dtype, cell.length, source.device), lambda: oracle(**inputs))
        values["error_out"], values["error_state"] = parity.error(out, exact[0]), parity.error(state, exact[1])
    call: Callable[[], Any] = lambda: kernels.gated_delta_rule(**inputs)  # noqa: E731
    return values | _costs(call, inputs["q"].device, metrics), ran


def _inputs(source: Source, cell: Cell) -> dict[str, Tensor]:
    """The first tokens in the dtype of the cell; gates and state at least as wide as fp32, as in the contract."""
    stored = source.tensors["q"].shape[1]
    if stored < cell.length:
        raise InputError(f"length: expected at most the {stored} tokens of the tensors, found {cell.length}")
    dtype = dtype_named(cell.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    found = {}
    for name, tensor in source.tensors.items():
        part = tensor if name == "initial_state" else tensor[:, : cell.length]
        found[name] = part.to(device=source.device, dtype=wide if name in ("log_decay", "initial_state") else dtype)
    return found


def _costs(call: Callable[[], Any], device: torch.device, metrics: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "seconds" in metrics:
        call()  # the passes before may have had a tap, and other kernels with it
        values["seconds"] = statistics.median(_seconds(call, device) for _ in range(3))
    if "peak_bytes" in metrics:
        values["peak_bytes"] = peak_tensor_bytes(call)
    return values


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


# ============================================================================================================
# Where cells run, and where they are kept
# ============================================================================================================


def _outcomes(
    tasks: list[tuple], jobs: int, cluster: str | None, stack: ExitStack
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and outcome of each task, as soon as it is there."""
    if not tasks:
        return
    if cluster is None and jobs == 1:
        for task in tasks:
            yield _measure(*task)
        return
    if cluster is not None:
        stack.enter_context(_on_cluster(cluster))
        jobs = -1 if jobs == 1 else jobs
    if cluster is None:
        settings = {"backend": "loky", "idle_worker_timeout": IDLE_SECONDS, "initializer": _end_with,
                    "initargs": (os.getpid(),)}  # fmt: skip
    else:
        settings = {}
    streams = cluster is None or not cluster.startswith("ray:")  # Ray's backend returns all of its results at once
    at_once = len(tasks) if streams else joblib.effective_n_jobs(jobs)
    try:
        for start in range(0, len(tasks), at_once):
            pool = joblib.Parallel(
                n_jobs=jobs, batch_size=1, return_as="generator_unordered" if streams else "list", **settings
            )
            yield from pool(joblib.delayed(_measure)(*task) for task in tasks[start : start + at_once])
    except BrokenProcessPool as error:
        raise WorkbenchError(
            f"sweep: expected every process to live, found one that ended, perhaps for want of memory ({error}); "
            "with resume the finished cells are kept, run it again with fewer jobs"
        ) from None


def _end_with(parent: int) -> None:
    """Ends this process, soon and whatever it is at, once `parent` has gone: nobody would read what it finds.

    A worker of loky is a child of the sweep and is told to end by it. One that is killed tells nobody, and the
    worker would finish its cell and then wait for the next.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end with the sweep", daemon=True).start()


def _cluster_named(cluster: str) -> tuple[str, str]:
    """("dask" or "ray", address) of ``dask:ADDRESS`` or ``ray:ADDRESS``."""
    kind, _, address = cluster.partition(":")
    if kind not in ("dask", "ray") or not address:
        raise InputError(f"cluster: expected dask:ADDRESS or ray:ADDRESS, found {cluster!r}")
    return kind, address


@contextmanager
def _on_cluster(cluster: str) -> Iterator[None]:
    """joblib on the existing cluster of ``dask:ADDRESS`` or ``ray:ADDRESS``."""
    kind, address = _cluster_named(cluster)
    try:
        if kind == "dask":
            from distributed import Client
            from distributed.comm import get_address_host_port
        else:
            import ray
            from ray.util.joblib import register_ray
    except ModuleNotFoundError as error:
        package = "distributed" if kind == "dask" else "ray"
        raise InputError(
            f"cluster {cluster}: expected the package {package}, found no module {error.name}; "
            f"install it beside the workbench: pip install {package}"
        ) from None
    if kind == "ray":
        try:
            ray.init(address=address, ignore_reinit_error=True)
        except (ConnectionError, ValueError) as error:
            raise InputError(f"cluster {cluster}: expected a Ray cluster there, found none: {error}") from None
        register_ray()
        with joblib.parallel_config(backend="ray"):
            yield
        return
    try:
        # Asked first, since a client that found nobody goes on trying when the program ends.
        socket.create_connection(get_address_host_port(address), timeout=10).close()
        client = Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError, NotImplementedError) as error:  # the last: an address inside one process
        raise InputError(f"cluster {cluster}: expected a Dask scheduler there, found none: {error}") from None
    with client, client.as_current():
        if not client.scheduler_info()["workers"]:
            raise InputError(f"cluster {cluster}: expected at least one worker, found none; start some")
        with joblib.parallel_config(backend="dask"):
            yield


class _Record:
    """The file of finished cells: one JSON object a line, {key, policy, chunk, dtype, length, values, ran, error}."""

    def __init__(self, path: Path, rows: dict[str, dict[str, Any]], file: Any):
        self.path, self.rows, self._file = path, rows, file

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[_Record]:
        """Reads what is there. A last line that was cut off when a sweep was killed is dropped."""
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            rows = cls._rows(whole, path)
            with open(path, "ab") as file:
                file.truncate(len(whole))
                yield cls(path, rows, file)
        except OSError as error:
            raise InputError(f"{path}: cannot keep finished cells: {error.strerror or error}") from None

    @staticmethod
    def _rows(content: bytes, path: Path) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                row = json.loads(line)
                # Files of before have not said what ran.
                key, outcome = row["key"], {"values": row["values"], "ran": row.get("ran", []), "error": row["error"]}
                if not isinstance(key, str) or not isinstance(row["values"], dict) or type(outcome["ran"]) is not list:
                    raise TypeError("another type of key or values")
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise InputError(
                    f"{path}: line {number}: expected a finished cell of a sweep, found: {error!r}; name another file"
                ) from None
            if outcome["error"] is None:  # what failed is tried again
                rows[key] = outcome
        return rows

    def add(self, key: str, cell: Cell, outcome: dict[str, Any]) -> None:
        line = json.dumps({"key": key, **cell.labels, **outcome}, allow_nan=False)
        self._file.write(line.encode("ascii") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def check_output(path: str | Path) -> None:
    """Raise InputError where `write_sweep` could not write, before the time of a sweep is spent.

    It writes an empty file where `write_sweep` writes its own, and removes it: permissions, a full disk, a name that is
    too long or a folder in its place all show. What is at `path` stays as it is.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: expected a name that ends in one of {', '.join(FORMATS)}, found {path.suffix!r}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: cannot be written: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: expected a file or nothing there, found a folder; name a file")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"{path}: expected the package pyarrow, found none; install it or name a .csv or .json file")
    scratch = _scratch(path)
    try:
        with open(scratch, "wb") as file:
            file.write(b" ")
        scratch.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def _scratch(path: Path) -> Path:
    """Where a table is written before it takes the place of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_sweep(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a sweep as .csv, .json (a list of rows) or .parquet; the file appears complete or not at all.

    Raises InputError for another suffix and where it cannot be written.
    """
    path = Path(path)
    check_output(path)
    scratch = _scratch(path)
    try:
        if path.suffix == ".csv":
            frame.to_csv(scratch, index=False)
        elif path.suffix == ".json":
            frame.to_json(scratch, orient="records", indent=1, double_precision=15)
        else:
            frame.to_parquet(scratch, engine="pyarrow", index=False)
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):  # it may never have come to be
            scratch.unlink()
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
