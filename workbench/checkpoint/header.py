"""What a checkpoint's files hold: safetensors headers and the shard index, checked before any data is read.

The `safetensors` library reads the data; its header errors name neither the tensor nor what was expected, and
it keeps the last of two equal names without a word, so the header is read here as well.

File format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then
the tensors back to back without gaps.
"""

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.config import read_json_object
from workbench.errors import CheckpointError, ConfigError

INDEX_NAME = "model.safetensors.index.json"

# Bits per element of every dtype the format knows, supported by the model or not.
_DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
# The library's own limit; a longer header is damage or an attempt to exhaust memory.
_MAX_HEADER_BYTES = 100_000_000

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}
# What training programs leave beside the weights. Never opened, and no weights are in them.
_TRAINER_FILES = re.compile(r"(training_args\.bin|optimizer\.pt|scheduler\.pt|scaler\.pt|rng_state.*\.pth)")
_SHARD_NAME = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
# The names that weight files of a whole checkpoint have.
WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file declares it. `dtype` is the format's own name, for example "BF16"."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    begin: int  # of its first byte, in the data part of the file


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One safetensors file: its size on disk is always `header_bytes` plus the bytes of its tensors."""

    path: Path
    file_bytes: int
    header_bytes: int  # the 8 length bytes included
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]  # what the writer says of the file

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


def list_files(path: Path) -> tuple[list[StoredFile], list[str]]:
    """Headers of all weight files of a checkpoint directory, or of one file; notes on what was left alone.

    Raises `CheckpointError` if the set of files is not exactly one complete safetensors checkpoint.
    """
    if path.is_file():
        if path.suffix.lower() in _PICKLE_SUFFIXES:
            raise CheckpointError(_pickle_message(path))
        return [read_header(path)], []
    notes = _refuse_code_and_pickles(path)
    weight_files = sorted(path.glob("*.safetensors"))
    index = path / INDEX_NAME
    if index.exists():
        return _read_indexed(index, weight_files, notes), notes
    if not weight_files:
        raise CheckpointError(f"{path}: expected model.safetensors or {INDEX_NAME}, found neither")
    if len(weight_files) > 1:
        names = ", ".join(file.name for file in weight_files[:4])
        raise CheckpointError(
            f"{path}: expected {INDEX_NAME} beside {len(weight_files)} weight files, found no index "
            f"({names}, ...)"
        )
    shard = _SHARD_NAME.fullmatch(weight_files[0].name)
    if shard and int(shard[2]) > 1:
        raise CheckpointError(
            f"{weight_files[0]}: is shard {int(shard[1])} of {int(shard[2])}; expected the other shards and "
            f"{INDEX_NAME} beside it, found neither"
        )
    return [read_header(weight_files[0])], notes


def _refuse_code_and_pickles(directory: Path) -> list[str]:
    notes = []
    for file in sorted(directory.iterdir()):
        if file.suffix.lower() == ".py":
            raise CheckpointError(
                f"{file}: Python code in a checkpoint; expected weights and JSON alone. Remote code is never "
                "run, "
                "remove the file to use the built-in model"
            )
        if file.suffix.lower() in _PICKLE_SUFFIXES:
            if not _TRAINER_FILES.fullmatch(file.name):
                raise CheckpointError(_pickle_message(file))
            notes.append(f"{file.name}: state of a training program, left alone")
    return notes


def _pickle_message(file: Path) -> str:
    return (
        f"{file}: expected .safetensors, found pickled weights, which can run code when opened; convert them "
        "to "
        "safetensors and remove this file"
    )


def _read_indexed(index: Path, weight_files: list[Path], notes: list[str]) -> list[StoredFile]:
    """Files named by a shard index, after a check that index and files agree in both directions."""
    try:
        content = read_json_object(index)
    except ConfigError as fault:
        raise CheckpointError(str(fault)) from None
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected an object of tensor name to file name")
    for tensor, name in weight_map.items():
        # A name with a folder in it could point anywhere on the disk. Links inside the directory are the
        # user's own.
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map[{tensor!r}]: expected the plain name of a .safetensors file, found "
                f"{name!r}"
            )
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (index.parent / name).is_file():
            tensors = [tensor for tensor, file in weight_map.items() if file == name]
            raise CheckpointError(
                f"{index}: names file {name}, which is missing from {index.parent}; expected it to hold "
                f"{len(tensors)} tensors, such as {tensors[0]}"
            )
    for file in weight_files:
        if file.name not in names:
            raise CheckpointError(
                f"{file}: expected in {INDEX_NAME}, found no entry for it; complete the index or remove the "
                "file"
            )
    files = [read_header(index.parent / name) for name in names]
    holder: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in holder:
                raise CheckpointError(
                    f"{file.path}: tensor {tensor.name}: expected in one file, found in "
                    f"{holder[tensor.name]} too"
                )
            holder[tensor.name] = file.path.name
            if weight_map.get(tensor.name) != file.path.name:
                listed = weight_map.get(tensor.name, "no entry")
                raise CheckpointError(
                    f"{file.path}: tensor {tensor.name}: expected {INDEX_NAME} to name {file.path.name} for "
                    "it, "
                    f"found {listed}"
                )
    for tensor, name in weight_map.items():
        if tensor not in holder:
            raise CheckpointError(
                f"{index.parent / name}: tensor {tensor}: expected there by {INDEX_NAME}, found no such "
                "tensor"
            )
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(file.tensor_bytes for file in files)
    if total is not None and total != found:
        notes.append(f"{INDEX_NAME}: total_size is {total} but the tensors take {found} bytes")
    return files


def read_header(path: Path) -> StoredFile:
    """Read and check the header of one safetensors file.

    Raises `CheckpointError` for a truncated file, an absurd header length, invalid JSON, an unknown dtype,
    and for tensors that overlap, leave gaps, reach outside the file or whose bytes do not fit their shape.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: truncated: expected at least 8 bytes, found {size}")
            (length,) = struct.unpack("<Q", prefix)
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: header length: expected at most {_MAX_HEADER_BYTES} bytes, found {length}; "
                    "this is no safetensors file or it is damaged"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated or no safetensors file: expected a header of {length} bytes, found a "
                    "file "
                    f"of {size} bytes"
                )
            text = file.read(length)
    except OSError as fault:
        raise CheckpointError(f"{path}: cannot be read: {fault.strerror}") from None
    header = _parse_header(path, text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: header: expected __metadata__ to map names to text, found {metadata!r}")
    tensors = [_stored_tensor(path, name, entry) for name, entry in header.items()]
    _check_offsets(path, tensors, data_bytes=size - 8 - length)
    return StoredFile(path, size, 8 + length, tuple(tensor for tensor, _ in tensors), metadata)


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, value in pairs:
            if name in entries:
                raise CheckpointError(f"{path}: header: expected each name once, found {name!r} twice")
            entries[name] = value
        return entries

    try:
        header = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path}: header: expected JSON, found invalid JSON: {fault}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header: expected a JSON object, found {type(header).__name__}")
    return header


def _stored_tensor(path: Path, name: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    def wrong(field: str, expected: str, found: Any) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name}: {field}: expected {expected}, found {found!r}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("header entry", "dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise wrong("dtype", f"one of {', '.join(_DTYPE_BITS)}", dtype)
    for field, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or any(type(number) is not int or number < 0 for number in value):
            raise wrong(field, "a list of non-negative integers", value)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets", "begin and end", offsets)
    bits = math.prod(shape) * _DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise wrong("data_offsets", f"{bits // 8} bytes for {dtype} {shape}", offsets)
    return StoredTensor(path, name, dtype, tuple(shape), bits // 8, offsets[0]), (offsets[0], offsets[1])


def _check_offsets(path: Path, tensors: list[tuple[StoredTensor, tuple[int, int]]], data_bytes: int) -> None:
    """The tensors must lie back to back over the whole data part: every byte belongs to exactly one."""
    for tensor, (_, end) in tensors:
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {tensor.name} ends at byte {end} of the data part: expected at "
                "least "
                f"as many, found {data_bytes}"
            )
    position = 0
    for tensor, (begin, end) in sorted(tensors, key=lambda item: item[1]):
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor {tensor.name} {fault}: expected it to begin at byte {position}, found "
                f"{begin}"
            )
        position = end
    if position != data_bytes:
        raise CheckpointError(
            f"{path}: expected {position} bytes of data, found {data_bytes}: {data_bytes - position} bytes "
            "at the "
            "end belong to no tensor"
        )
