"""Writing a checkpoint: complete or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench.checkpoint.accounting import NarrowedTensor, cast
from workbench.checkpoint.expert_layouts import PARTS, PER_EXPERT, STACKED, Layout, layout_named, rearrange, split_name
from workbench.checkpoint.header import INDEX_NAME, WEIGHT_FILE, StoredFile, read_header
from workbench.checkpoint.layout import OFFICIAL_FLOAT32, expected_tensors, fuse_ba, fuse_qkvz
from workbench.checkpoint.read import FLOAT_DTYPES, LAYOUT_KEY, globs, matches, require_finite, summarise_names
from workbench.config import ModelConfig
from workbench.errors import CheckpointError

LAYOUTS = ("official", "split", "qwen3_next")


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: str | None = None,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    allow_nonfinite: Iterable[str] = (),
    extra_files: Mapping[str, str | bytes] | None = None,
    expert_layout: str | None = None,
) -> tuple[NarrowedTensor, ...]:
    """Write canonical tensors as a safetensors checkpoint directory; returns what the narrowing casts did.

    layout: "official" (nested configuration, `model.language_model.` names, experts stacked), "split" (flat
    configuration, `model.` names, one tensor per expert, as transformers saves the text-only classes) or
    "qwen3_next" (that family's own: split experts, fused projections). None: the family's official one.
    expert_layout: one of `expert_layouts.LAYOUTS` for the experts alone; None: what `layout` has, which is
    "stacked" or "per_expert". The files name it in their metadata, so that it is read back whatever the shapes.
    max_shard_bytes: start a new file before this is exceeded, with an index; None writes a single file.
    dtype: as in the official files, `linear_attn.{A_log,norm.weight}` are float32 whatever it is; None writes
    every tensor in the dtype it has. allow_nonfinite: globs of canonical names that may hold NaN or Inf.
    extra_files: name -> content, for example `tokenizer.json`.

    Everything is written beside the target first and moved in by renames, so that a crash leaves the old
    checkpoint, the new one, or (between two renames) a directory without `config.json`, which no reader takes
    for a checkpoint. Other files in an existing directory stay. Raises `CheckpointError` for tensors that are
    not exactly those of the configuration, for NaN or Inf, and for values that overflow in `dtype`.
    """
    path = Path(path)
    layout = layout or ("qwen3_next" if config.family == "qwen3_next" else "official")
    _check_request(config, tensors, layout, dtype, extra_files or {})
    experts = layout_named(expert_layout or (STACKED if layout == "official" else PER_EXPERT))
    allow = globs(allow_nonfinite)
    for name, tensor in tensors.items():
        if not matches(name, allow):
            require_finite(f"{path}: tensor {name}", tensor)
    converted, narrowing = _converted(path, tensors, dtype)
    if dtype is not None:
        config = replace(config, dtype=str(dtype).removeprefix("torch."))
    raw_config = config.to_hf(nested=layout == "official")

    try:
        with staging_directory(path) as staging:
            stored = _stored(config, converted, layout, experts)
            metadata = {"format": "pt"} | ({LAYOUT_KEY: experts.name} if config.is_moe else {})
            _write_weights(staging, stored, max_shard_bytes, metadata)
            for name, content in (extra_files or {}).items():
                write_bytes(staging / name, content.encode() if isinstance(content, str) else content)
            write_bytes(staging / "config.json", (json.dumps(raw_config, indent=2) + "\n").encode())
            if staging.parent == path:
                _move_into(path, staging)
            else:
                staging.rename(path)
    except (OSError, SafetensorError) as fault:
        raise CheckpointError(f"{path}: expected to write a checkpoint directory, found: {fault}") from None
    return narrowing


@contextmanager
def staging_directory(path: Path) -> Iterator[Path]:
    """A directory on the target's file system: inside it if it exists, else beside it. Gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path if path.exists() else path.parent))
    staging.chmod(0o777 & ~_umask())  # mkdtemp makes it private
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_request(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    layout: str,
    dtype: torch.dtype | None,
    extra_files: Mapping[str, str | bytes],
) -> None:
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout: expected one of {', '.join(LAYOUTS)}, found {layout!r}")
    if (layout == "qwen3_next") != (config.family == "qwen3_next"):
        raise CheckpointError(f"layout: expected one that family {config.family} has, found {layout!r}")
    if dtype is not None and dtype not in FLOAT_DTYPES.values():
        names = ", ".join(map(str, FLOAT_DTYPES.values()))
        raise CheckpointError(f"dtype: expected one of {names}, found {dtype}")
    expected = expected_tensors(config)
    differences = {"missing": set(expected) - set(tensors), "unexpected": set(tensors) - set(expected)}
    for verb, names in differences.items():
        if names:
            listed = summarise_names(sorted(names))
            raise CheckpointError(
                f"expected exactly the tensors of the configuration, found {len(names)} {verb}: {listed}"
            )
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype not in FLOAT_DTYPES.values():
            raise CheckpointError(
                f"tensor {name}: expected shape {list(shape)} of floating point numbers, found "
                f"{list(tensor.shape)} "
                f"of {tensor.dtype}"
            )
    for name in extra_files:
        taken = name in ("config.json", INDEX_NAME) or WEIGHT_FILE.fullmatch(name)
        if name != os.path.basename(name) or name in ("", ".", "..") or taken:
            raise CheckpointError(
                f"extra_files: expected plain file names other than the checkpoint's own, found {name!r}"
            )


def _converted(
    path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], tuple[NarrowedTensor, ...]]:
    converted, narrowing = {}, []
    for name, tensor in tensors.items():
        target = torch.float32 if OFFICIAL_FLOAT32.fullmatch(name) else dtype
        if dtype is None:
            target = tensor.dtype
        converted[name], record = cast(name, tensor.detach().cpu(), target)
        if record is None:
            continue
        if record.n_overflow:
            raise CheckpointError(
                f"{path}: tensor {name}: expected values within {record.to_dtype}, found {record.n_overflow} "
                "of "
                f"{record.numel} beyond it (largest {record.absmax:g}); write a wider dtype"
            )
        narrowing.append(record)
    return converted, tuple(narrowing)


def _stored(
    config: ModelConfig, tensors: dict[str, torch.Tensor], layout: str, experts: Layout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as the layout's files hold them, in the order of the forward pass."""
    prefix = "model.language_model." if layout == "official" else "model."
    for name in expected_tensors(config):
        stored_name = name if name.startswith(("mtp.", "lm_head.")) else prefix + name
        tensor = tensors[name]
        if (found := split_name(stored_name)) is not None:
            block, key = found
            part = next(part for part in PARTS if key in STACKED.keys(config, part))
            parts = rearrange(part, STACKED, experts, config, lambda _, tensor=tensor: tensor)
            yield from ((f"{block}.{key}", tensor) for key, tensor in parts.items())
        elif layout == "qwen3_next" and name.endswith("in_proj_qkv.weight"):
            z = tensors[name.replace("in_proj_qkv", "in_proj_z")]
            yield stored_name.replace("in_proj_qkv", "in_proj_qkvz"), fuse_qkvz(config, tensor, z)
        elif layout == "qwen3_next" and name.endswith("in_proj_b.weight"):
            a = tensors[name.replace("in_proj_b", "in_proj_a")]
            yield stored_name.replace("in_proj_b", "in_proj_ba"), fuse_ba(config, tensor, a)
        elif layout == "qwen3_next" and name.endswith(("in_proj_z.weight", "in_proj_a.weight")):
            continue  # inside the fused tensor of its neighbour
        else:
            yield stored_name, tensor


def _write_weights(
    directory: Path,
    stored: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int | None,
    metadata: dict[str, str],
) -> None:
    """One file, or numbered shards and an index. Names say "of how many", so they are given at the end."""
    written: list[StoredFile] = []
    shard: dict[str, torch.Tensor] = {}

    def write_shard() -> None:
        file = directory / f"shard-{len(written)}"
        save_file(shard, file, metadata=metadata)
        file.chmod(0o666 & ~_umask())  # the library makes its files private
        flush_to_disk(file)
        written.append(read_header(file))
        shard.clear()

    shard_bytes = 0
    for name, tensor in stored:
        if max_shard_bytes is not None and shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            write_shard()
            shard_bytes = 0
        shard[name] = _with_own_memory(tensor)
        shard_bytes += tensor.nbytes
    write_shard()
    if len(written) == 1:
        written[0].path.rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, file in enumerate(written, start=1):
        file_name = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        file.path.rename(directory / file_name)
        weight_map |= {tensor.name: file_name for tensor in file.tensors}
    index = {"metadata": {"total_size": sum(file.tensor_bytes for file in written)}, "weight_map": weight_map}
    write_bytes(directory / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())


def _with_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The library refuses tensors that share memory, as the parts of a stack do."""
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor.contiguous()


def _move_into(path: Path, staging: Path) -> None:
    """Put finished files into a directory. Without config.json it is no checkpoint, so that moves last."""
    (path / "config.json").unlink(missing_ok=True)
    new = {file.name for file in staging.iterdir()}
    for file in path.iterdir():
        if (WEIGHT_FILE.fullmatch(file.name) or file.name == INDEX_NAME) and file.name not in new:
            file.unlink()
    for name in sorted(new, key=lambda name: name == "config.json"):
        (staging / name).replace(path / name)


def write_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    flush_to_disk(file)


def flush_to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's file creation mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
