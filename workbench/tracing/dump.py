"""Tensors of chosen tap points, streamed to a bundle of kind `trace` as they are computed.

>>> with dump(model, "run", select=Selection(("*.gdn.state",), steps=(0, 2)), cap_bytes=1 << 30):
...     model(input_ids)
>>> read_trace("run").tensor("layers.00.gdn.state", step=1)

Each forward pass is one or more safetensors files. A tensor is written in pieces of BLOCK_BYTES while it passes its
tap point, so that the dump itself never holds more than one piece. `cap_bytes` is what the files may hold of tensors:
one that does not fit any more is left out and listed, and smaller ones after it may still fit. Where a selection wants
inner stages of an op (`taps.STAGES`) the op holds the stage of the whole pass, as it does for every observer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench import taps
from workbench.bundle import Origin, Unfinished, open_bundle, read_bundle
from workbench.errors import InputError
from workbench.provenance import versions
from workbench.taps import Tap
from workbench.tracing.observer import is_stage, tap_names
from workbench.tracing.selection import Selection

if TYPE_CHECKING:
    from workbench.model import CausalLM

KIND = "trace"

#: Bytes of tensors that a dump holds unless told otherwise.
CAP_BYTES = 1 << 30

#: What is copied to the host and written at a time.
BLOCK_BYTES = 1 << 22

#: Room for a tensor's entry in the header of a file, which is written last, in the place that was left for it.
_ENTRY_BYTES = 320

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def pieces(tensor: Tensor, limit: int = BLOCK_BYTES) -> Iterator[Tensor]:
    """The values of a tensor in row-major order as contiguous 1-d tensors of at most `limit` bytes."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(1, limit // tensor.element_size()))
    elif tensor.numel() * tensor.element_size() <= limit:
        yield tensor.reshape(-1)
    elif tensor.dim() == 1:
        for part in tensor.split(max(1, limit // tensor.element_size())):
            yield part.contiguous()
    else:
        for part in tensor.unbind(0):
            yield from pieces(part, limit)


class SafetensorsStream:
    """A safetensors file that is written tensor by tensor; the header goes last, into room left at the front.

    `room` is the number of tensors that the header has room for; `is_full` says that it has none left.
    """

    def __init__(self, path: Path, room: int):
        self.path = path
        self._header_bytes = 64 + _ENTRY_BYTES * room
        self._file: IO[bytes] = open(path, "wb")
        self._file.seek(8 + self._header_bytes)
        self._header: dict[str, Any] = {}
        self._end = 0
        self._length = 2

    @property
    def is_full(self) -> bool:
        return self._length + _ENTRY_BYTES > self._header_bytes

    def add(self, key: str, tensor: Tensor) -> None:
        """Write the values of a tensor on any device, piece by piece."""
        size = tensor.numel() * tensor.element_size()
        offsets = [self._end, self._end + size]
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        for piece in pieces(tensor.detach()):
            self._file.write(piece.cpu().view(torch.uint8).numpy().data)
        self._header[key] = entry
        self._end += size
        self._length += len(json.dumps({key: entry}))

    def close(self) -> None:
        text = json.dumps(self._header, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little") + text.ljust(self._header_bytes))
        self._file.close()


@dataclass(slots=True)
class TraceWriter:
    """Writes tensors of forward passes into an open bundle, up to `cap_bytes` of them."""

    unfinished: Unfinished
    cap_bytes: int
    room: int
    written_bytes: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    _stream: SafetensorsStream | None = None
    _step: int = -1
    _part: int = 0

    def add(self, name: str, step: int, tensor: Tensor, tokens: tuple[int, int] | None, occurrence: int) -> None:
        """One tensor; what a pass shows again at the same tap point is called ``name#1``, ``name#2``."""
        size = tensor.numel() * tensor.element_size()
        told = {"tap": name, "step": step, "occurrence": occurrence, "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape), "tokens": None if tokens is None else list(tokens)}  # fmt: skip
        if self.written_bytes + size > self.cap_bytes:
            self.left_out.append({**told, "bytes": size, "why": "cap"})
            return
        try:
            self._open(step)
            key = name if occurrence == 0 else f"{name}#{occurrence}"
            self._stream.add(key, tensor)
        except OSError as error:
            raise InputError(f"trace bundle: {self.unfinished.folder.parent}: cannot be written: {error}") from None
        self.entries.append({**told, "file": self._stream.path.name, "key": key})
        self.written_bytes += size

    def _open(self, step: int) -> None:
        """A file of the pass with room for another tensor."""
        if self._stream is not None and self._step == step and not self._stream.is_full:
            return
        self.close()
        self._step, self._part = step, self._part + 1 if self._step == step else 0
        name = f"step-{step:06d}-{self._part:03d}.safetensors"
        self._stream = SafetensorsStream(self.unfinished.folder / name, self.room)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def content(self, select: Selection, steps: int) -> dict[str, Any]:
        return {
            "steps": steps, "selection": select.to_json(), "cap_bytes": self.cap_bytes,
            "written_bytes": self.written_bytes, "tensors": self.entries, "left_out": self.left_out,
        }  # fmt: skip


class Chosen:
    """Shows chosen tensors to `receive(name, step, tensor, tokens, occurrence)`; see `Selection.cut` for the tokens.

    The embedding begins a pass; `ended(step)` is called after the logits. `occurrence` counts from 0 what one pass
    shows at one tap point.
    """

    def __init__(
        self, model: CausalLM, select: Selection, receive: Callable[[str, int, Tensor, tuple | None, int], None],
        ended: Callable[[int], None] | None = None,
    ):  # fmt: skip
        names = tap_names(model)
        self.select, self.names = select, select.names(names)
        self._receive, self._ended = receive, ended
        self.step = -1
        self._rows: tuple[int, int] | None = None
        self._shown: dict[str, int] = {}

    def see(self, name: str, tensor: Tensor) -> None:
        if name == taps.EMBED or self.step < 0:
            self.step += 1
            self._rows = tuple(tensor.shape[:2]) if name == taps.EMBED else None
            self._shown.clear()
        if name in self.names and self.select.has_step(self.step):
            occurrence = self._shown.get(name, 0)
            self._shown[name] = occurrence + 1
            part, tokens = self.select.cut(name, tensor, self._rows)
            if part is not None:
                self._receive(name, self.step, part, tokens, occurrence)
        if name == taps.LOGITS and self._ended is not None:
            self._ended(self.step)


class ChosenTap:
    """`Chosen` as the tap of a model whose tap was `outer`. Returns every tensor as it came.

    Layers of which nothing is wanted keep their pace.
    """

    def __init__(self, chosen: Chosen, outer: Tap | None, prefix: str = ""):
        self.chosen, self.outer, self.prefix = chosen, outer, prefix
        wants = any(name.startswith(prefix) and is_stage(name) for name in chosen.names)
        self.sees_inside = wants or getattr(outer, "sees_inside", outer is not None)
        # Which tokens a block of chunks holds, its shape does not tell: a range of tokens needs all of them at once.
        self.takes_parts = chosen.select.tokens is None and (outer is None or taps.takes_parts(outer))

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.outer is not None:
            tensor = self.outer(name, tensor)
        self.chosen.see(self.prefix + name, tensor)
        return tensor

    def scope(self, prefix: str) -> Tap | None:
        outer = None if self.outer is None else self.outer.scope(prefix)
        full = self.prefix + prefix
        if not any(name.startswith(full) for name in self.chosen.names):
            return outer
        return ChosenTap(self.chosen, outer, full)


@contextmanager
def tapping(model: CausalLM, tap: Tap) -> Iterator[None]:
    """Set the model's tap inside the context. Raises InputError where another one was left in its place."""
    before = model.tap
    model.tap = tap
    try:
        yield
        if model.tap is not tap:
            raise InputError(
                "trace: expected the model's tap to be the one that this context set, found another; "
                "leave nested contexts in reverse order and reset what was set inside"
            )
    finally:
        model.tap = before


def origin_of(model: CausalLM) -> Origin:
    """What a model computes by, as far as the model knows it; add `model_hash` where the checkpoint is known."""
    device = model.device
    rows = tuple(row.to_json() for row in model.kernels.attestation())
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return Origin(backends=rows, policy=model.kernels.policy.to_json(), versions=versions(), card=card)


@contextmanager
def dump(
    model: CausalLM, path: str | Path, *, select: Selection | None = None, cap_bytes: int = CAP_BYTES,
    origin: Origin | None = None,
) -> Iterator[TraceWriter]:  # fmt: skip
    """Write the selected tensors of every pass inside the context to the bundle `path`: see the module's text.

    `select` None is everything. `origin` is added to what the model says of itself (backends and policy are read at
    the end). The bundle is complete once the context has ended without an exception. Raises InputError for a selection
    that selects nothing, a cap below 1, and what `bundle.open_bundle` refuses.
    """
    if cap_bytes < 1:
        raise InputError(f"dump: cap_bytes: expected at least 1, found {cap_bytes}")
    select = select or Selection()
    with open_bundle(path, KIND, origin_of(model) if origin is None else origin) as unfinished:
        writer = TraceWriter(unfinished, cap_bytes, room=len(select.names(tap_names(model))) + 8)
        chosen = Chosen(model, select, writer.add)
        try:
            with tapping(model, ChosenTap(chosen, model.tap)):
                yield writer
        finally:
            writer.close()
        if not writer.entries and not writer.left_out:
            raise InputError(
                f"dump {path}: expected some tensor to write, found that the selection left none of {chosen.step + 1} "
                "passes; what was there before is untouched"
            )
        unfinished.content.update(writer.content(select, chosen.step + 1))
        unfinished.content["backends_run"] = list(origin_of(model).backends)


@dataclass(frozen=True, slots=True)
class SavedTrace:
    """A bundle of kind `trace` that was read: `content` as in `docs/bundle.md`, tensors by name and pass."""

    origin: Origin
    content: dict[str, Any]
    tensors: dict[tuple[str, int, int], Tensor]

    def tensor(self, tap: str, step: int = 0, occurrence: int = 0) -> Tensor:
        """The tensor of a tap point and pass. Raises InputError for one that the bundle lacks, and says why it does."""
        found = self.tensors.get((tap, step, occurrence))
        if found is None:
            left_out = any((e["tap"], e["step"], e["occurrence"]) == (tap, step, occurrence)
                           for e in self.content["left_out"])  # fmt: skip
            why = "it did not fit under the cap" if left_out else "it was not selected or not computed"
            raise InputError(f"trace bundle: expected {tap} of pass {step}, found none: {why}")
        return found


def read_trace(path: str | Path) -> SavedTrace:
    """A bundle that `dump` or the flight recorder wrote; raises InputError as `bundle.read_bundle` does."""
    bundle = read_bundle(path, KIND)
    try:
        tensors = {
            (entry["tap"], entry["step"], entry["occurrence"]): bundle.tensors[entry["file"]][entry["key"]]
            for entry in bundle.content["tensors"]
        }
        left_out = [(entry["tap"], entry["step"], entry["occurrence"]) for entry in bundle.content["left_out"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"bundle {path}: expected the content of a trace, found {error!r}") from None
    if doubled := set(left_out) & set(tensors):
        raise InputError(f"bundle {path}: {sorted(doubled)[0]} is both there and left out; write it anew")
    return SavedTrace(bundle.origin, bundle.content, tensors)
