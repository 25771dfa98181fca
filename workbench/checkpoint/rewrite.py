"""Writing a checkpoint's experts in another layout: layer by layer, bit for bit, complete or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from workbench.checkpoint.expert_layouts import PARTS, STACKED, Layout, layout_named, rearrange, split_name
from workbench.checkpoint.header import INDEX_NAME, StoredFile, StoredTensor
from workbench.checkpoint.read import FLOAT_DTYPES, LAYOUT_KEY, Plan, plan_from_headers
from workbench.checkpoint.write import flush_to_disk, staging_directory, write_bytes
from workbench.errors import CheckpointError

#: Bytes copied at a time where tensors stay as they are.
COPIED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert_experts` wrote. Bytes of tensors are those of the source, which is checked."""

    source_layouts: tuple[str, ...]  # of all layers, each once
    target_layout: str
    n_blocks: int  # layers with experts
    n_expert_tensors: tuple[int, int]  # before, after
    expert_bytes: int
    n_other_tensors: int
    other_bytes: int
    header_bytes: int
    file_bytes: int
    files: tuple[str, ...]  # of weights
    copied_files: tuple[str, ...]
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Lines that add up to the size of the files written."""
        before, after = self.n_expert_tensors
        lines = [
            f"{'experts':<11}{after:>7} tensors {self.expert_bytes:>16,} B, from {before} in the layout "
            f"{', '.join(self.source_layouts)}",
            f"{'other':<11}{self.n_other_tensors:>7} tensors {self.other_bytes:>16,} B, copied",
            f"{'headers':<11}{len(self.files):>7} files   {self.header_bytes:>16,} B",
            f"{'sum':<11}{'':>7}         {self.file_bytes:>16,} B = size of the files",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class _Part:
    """One of PARTS of a layer's experts: the tensors that hold it before and after."""

    part: str
    source: Layout
    before: dict[str, StoredTensor]  # key of the source layout -> stored tensor
    after: dict[str, str]  # key of the target layout -> name in the file


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor of a file to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


def convert_experts(
    source: str | Path,
    target: str | Path,
    to: str | Layout,
    *,
    expert_layout: str | Layout | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write the checkpoint directory `source` as a new one, `target`, with all experts in the layout `to`.

    No bit of a weight changes: NaN stay as they are, nothing is cast. Every file of weights becomes one of the same
    name; a layer's experts lie where their first tensor was. All else is copied: other tensors, which keep their names
    and dtypes, `config.json`, the tokenizer. In memory there is one layer's gate and up, or down, at a time, before
    and after. The metadata names the layout, so that the result is read whatever its shapes.
    expert_layout: how the source holds experts, as for `read_checkpoint`. progress: called with the layers done and
    their number, first with 0.

    The result is written beside the target, its headers are read back and must account for every tensor and byte, and
    a rename then makes it the target. Raises `CheckpointError` as `read_checkpoint` does for all that headers show,
    for a target that exists, for experts that are absent or whose dtypes differ, and for too little room on the disk.
    """
    source, target, layout = Path(source), Path(target), layout_named(to)
    if not source.is_dir():
        raise CheckpointError(f"{source}: expected a checkpoint directory, found {_what_is(source)}")
    if os.path.lexists(target):
        found = _what_is(target)
        raise CheckpointError(f"{target}: expected a name that is free, found {found}; nothing is overwritten")
    plan = plan_from_headers(source, expert_layout=expert_layout)
    if not plan.layouts:
        raise CheckpointError(f"{source}: expected experts to convert, found none: the model is {plan.config.family}")
    parts = _parts(plan, layout)
    copied, left = _other_files(source, plan)
    _require_room(source, target, plan, copied)
    try:
        with staging_directory(target) as staging:
            _write_files(staging, plan, layout, parts, progress)
            for file in copied:
                shutil.copyfile(file, staging / file.name)
                flush_to_disk(staging / file.name)
            conversion = _accounted(plan, parts, layout, staging, tuple(file.name for file in copied), left)
            staging.rename(target)
    except OSError as fault:
        raise CheckpointError(f"{target}: expected to write a checkpoint directory, found: {fault}") from None
    return conversion


def _what_is(path: Path) -> str:
    if not os.path.lexists(path):
        return "nothing there"
    return "a link" if path.is_symlink() else "a directory" if path.is_dir() else "a file"


def _parts(plan: Plan, layout: Layout) -> list[_Part]:
    """Both parts of every layer with experts, in the order of the forward pass."""
    parts = []
    for block, source in plan.layouts.items():
        for part in PARTS:
            stored = plan.sources[f"{block}.{STACKED.keys(plan.config, part)[0]}"]
            before = dict(zip(source.keys(plan.config, part), stored, strict=True))
            prefix = split_name(stored[0].name)[0]  # as this file has it, not as canonical names do
            after = {key: f"{prefix}.{key}" for key in layout.keys(plan.config, part)}
            parts.append(_Part(part, source, before, after))
    return parts


def _other_files(source: Path, plan: Plan) -> tuple[list[Path], tuple[str, ...]]:
    """Files to be copied beside the weights, and notes on what is not."""
    weights = {file.path.name for file in plan.files}
    left = [note for note in plan.notes if "left alone" in note]
    copied = []
    for path in sorted(source.iterdir()):
        if path.name in weights or path.name == INDEX_NAME or any(note.startswith(f"{path.name}: ") for note in left):
            continue
        if path.is_file():
            copied.append(path)
        else:
            left.append(f"{path.name}: no file, left alone")
    return copied, tuple(left)


def _require_room(source: Path, target: Path, plan: Plan, copied: list[Path]) -> None:
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    needed = sum(file.file_bytes for file in plan.files) + sum(file.stat().st_size for file in copied)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{target}: expected {needed:,} B of room for a copy of {source}, found {free:,} B free; "
            "choose another disk"
        )


# ============================================================================================================
# Files
# ============================================================================================================


def _write_files(
    staging: Path, plan: Plan, layout: Layout, parts: list[_Part], progress: Callable[[int, int], None] | None
) -> None:
    home = {part.before[next(iter(part.before))]: part for part in parts}  # where the first tensor was
    moved = {tensor for part in parts for tensor in part.before.values()}
    n_blocks, n_parts = len(plan.layouts), 0
    if progress is not None:
        progress(0, n_blocks)
    weight_map: dict[str, str] = {}
    header_bytes = {file.path: file.header_bytes for file in plan.files}
    for file in plan.files:
        here = [home[tensor] for tensor in file.tensors if tensor in home]
        kept = [tensor for tensor in file.tensors if tensor not in moved]
        if not here and not kept:
            continue  # all that it held lies with the first tensors of its layers
        written = [_Written(t.name, t.dtype, t.shape, t.n_bytes) for t in kept]
        for part in here:
            written += _converted(part, plan, layout)
        path = staging / file.path.name
        with path.open("wb") as out:
            begin = _write_header(out, written, {**file.metadata, LAYOUT_KEY: layout.name})
            for tensor in kept:
                out.seek(begin[tensor.name])
                _copy_bytes(file, tensor, out)
            for part in here:
                tensors = rearrange(
                    part.part, part.source, layout, plan.config,
                    lambda key, before=part.before: _fetch(before[key], header_bytes),
                )  # fmt: skip
                for key, tensor in tensors.items():
                    out.seek(begin[part.after[key]])
                    out.write(_bytes_of(tensor))
                del tensors
                n_parts += 1
                if progress is not None and n_parts % len(PARTS) == 0:
                    progress(n_parts // len(PARTS), n_blocks)
        flush_to_disk(path)
        weight_map |= dict.fromkeys((tensor.name for tensor in written), path.name)
    if (plan.files[0].path.parent / INDEX_NAME).exists():
        total = sum(file.tensor_bytes for file in plan.files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_bytes(staging / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())


def _converted(part: _Part, plan: Plan, layout: Layout) -> Iterator[_Written]:
    first = next(iter(part.before.values()))  # all have its dtype, as the plan requires
    itemsize = first.n_bytes // math.prod(first.shape)
    for key, name in part.after.items():
        shape = layout.shape(key, plan.config)
        yield _Written(name, first.dtype, shape, math.prod(shape) * itemsize)


def _write_header(out: BinaryIO, tensors: list[_Written], metadata: dict[str, str]) -> dict[str, int]:
    """The header of a file; returns where in the file each tensor begins. Wide dtypes come first: all lie aligned."""
    entries: dict[str, object] = {"__metadata__": metadata}
    begin, position = {}, 0
    for tensor in sorted(tensors, key=lambda tensor: -_alignment(tensor)):
        begin[tensor.name] = position
        end = position + tensor.n_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    return {name: place + 8 + len(text) for name, place in begin.items()}


def _alignment(tensor: _Written) -> int:
    elements = math.prod(tensor.shape)
    return tensor.n_bytes // elements if elements else 0


def _copy_bytes(file: StoredFile, tensor: StoredTensor, out: BinaryIO) -> None:
    with file.path.open("rb") as source:
        source.seek(file.header_bytes + tensor.begin)
        left = tensor.n_bytes
        while left:
            block = source.read(min(left, COPIED_BYTES))
            if not block:
                _require_whole(tensor, left)
            out.write(block)
            left -= len(block)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _fetch(tensor: StoredTensor, header_bytes: Mapping[Path, int]) -> torch.Tensor:
    """A stored tensor as it is, in memory of its own: pages of a mapped file would stay in this process."""
    with tensor.file.open("rb") as file:
        file.seek(header_bytes[tensor.file] + tensor.begin)
        data = bytearray(tensor.n_bytes)
        _require_whole(tensor, tensor.n_bytes - file.readinto(data))
    return torch.frombuffer(data, dtype=FLOAT_DTYPES[tensor.dtype]).view(tensor.shape)


def _require_whole(tensor: StoredTensor, n_missing: int) -> None:
    if n_missing:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name}: expected {n_missing:,} B more, found the file's end: it was changed "
            "while it was read"
        )


# ============================================================================================================
# Accounting
# ============================================================================================================


def _accounted(
    plan: Plan, parts: list[_Part], layout: Layout, staging: Path, copied: tuple[str, ...], left: tuple[str, ...]
) -> Conversion:
    """Read the headers back as those of any checkpoint, and hold their sums against the source's."""
    result = plan_from_headers(staging)
    moved = {tensor for part in parts for tensor in part.before.values()}
    made = {name for part in parts for name in part.after.values()}
    before = [tensor for file in plan.files for tensor in file.tensors]
    after = [tensor for file in result.files for tensor in file.tensors]
    kept = {(t.name, t.dtype, t.shape, t.n_bytes) for t in before if t not in moved}
    found = {(t.name, t.dtype, t.shape, t.n_bytes) for t in after if t.name not in made}
    expert_bytes = sum(tensor.n_bytes for tensor in moved)
    sums = (expert_bytes, kept, set(plan.layouts), {layout})
    read = (sum(t.n_bytes for t in after if t.name in made), found, set(result.layouts), set(result.layouts.values()))
    if sums != read:
        raise CheckpointError(
            f"{staging}: expected {expert_bytes:,} B of experts in the layout {layout} and all else as it was, found "
            f"{read[0]:,} B in {', '.join(x.name for x in result.layouts.values())}"
        )
    return Conversion(
        source_layouts=tuple(dict.fromkeys(x.name for x in plan.layouts.values())),
        target_layout=layout.name,
        n_blocks=len(plan.layouts),
        n_expert_tensors=(len(moved), len(made)),
        expert_bytes=expert_bytes,
        n_other_tensors=len(kept),
        other_bytes=sum(n_bytes for *_, n_bytes in kept),
        header_bytes=sum(file.header_bytes for file in result.files),
        file_bytes=sum(file.file_bytes for file in result.files),
        files=tuple(file.path.name for file in result.files),
        copied_files=copied,
        notes=(*plan.assumptions, *left),
    )
