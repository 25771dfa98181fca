"""Reading a checkpoint: plan everything from the headers, then read the data; nothing is half loaded."""

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workbench.checkpoint.accounting import (
    BLOCK_ELEMENTS,
    LOADED,
    MERGED,
    MISSING,
    SKIPPED,
    UNEXPECTED,
    Accounting,
    AccountingRow,
    NarrowedTensor,
    cast,
    file_bytes_of,
)
from workbench.checkpoint.expert_layouts import (
    PARTS,
    STACKED,
    Layout,
    fitting_layout,
    is_key,
    layout_named,
    layouts_with,
    open_layout,
    rearrange,
    split_name,
)
from workbench.checkpoint.header import StoredFile, StoredTensor, list_files
from workbench.checkpoint.layout import (
    ALWAYS_FLOAT32,
    SKIP_REASONS,
    canonical_name,
    expected_tensors,
    forms_of,
    split_ba,
    split_qkvz,
)
from workbench.config import ModelConfig, read_json_object
from workbench.errors import CheckpointError

# Key under which this program's files name the layout of their experts, which shapes alone may leave open.
LAYOUT_KEY = "expert_layout"
# Family -> (names of stored expert tensors, their layout) in its published checkpoints. Those of qwen3_next are
# `per_expert`, which shapes never leave open.
PUBLISHED_EXPERTS = {"qwen3_5_moe": (re.compile(r".*\.mlp\.experts\.(gate_up_proj|down_proj)"), STACKED)}
# dtype name of the file format -> torch dtype, for those the model can hold
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory: every tensor checked, under its canonical name, on the CPU."""

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    accounting: Accounting


@dataclass(slots=True)
class Plan:
    """What to do with every stored tensor, decided before any data is read."""

    config: ModelConfig
    files: list[StoredFile]
    notes: list[str]
    sources: dict[str, list[StoredTensor]]  # canonical name -> stored tensors in the order of its form
    rows: list[AccountingRow]
    tied_head: StoredTensor | None = None  # to be compared with the embedding
    layouts: dict[str, Layout] = field(default_factory=dict)  # experts of a layer -> how the files hold them
    recorded: list[tuple[Layout, Path]] = field(default_factory=list)  # what metadata says of them, and where
    assumptions: list[str] = field(default_factory=list)  # layouts that neither shapes nor metadata nor the caller tell


def read_checkpoint(
    path: str | Path,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    allow_unexpected: Iterable[str] = (),
    allow_missing: Iterable[str] = (),
    allow_nonfinite: Iterable[str] = (),
    skip: Mapping[str, str] = SKIP_REASONS,
    expert_layout: str | None = None,
) -> Checkpoint:
    """Read a safetensors checkpoint of any supported layout into canonical tensors.

    path: a directory (weights, index, config.json) or one .safetensors file with config.json beside it.
    config: replaces config.json. dtype: cast to this dtype; None leaves each tensor as stored. `A_log` and
    `dt_bias` always come as float32, and `linear_attn.norm.weight` stays float32 where the file has it so.
    Every narrowing cast is recorded in `accounting.narrowing`. The `allow_*` arguments are globs over
    canonical or stored names; `skip` maps globs over stored names to the reason for not reading them.
    expert_layout: how the files hold experts (`expert_layouts.LAYOUTS`), for all layers whose names are those
    of that layout; files whose metadata names another are refused. None takes it from the metadata, else from
    names and shapes. Where 2I == D or I == D leaves a stack open, it has to be named, with one exception:
    tensors of a `qwen3_5_moe` configuration named `mlp.experts.gate_up_proj` and `down_proj`, as that family's
    published checkpoints have them, are `stacked` as there; `accounting.assumptions` says so.

    All headers are checked before the first tensor is read. Raises `ConfigError` or `CheckpointError` with
    file, tensor, expected and found for damage, wrong shapes or dtypes, NaN or Inf, and for tensors that are
    missing or unexpected.

    With every `mtp.*` tensor absent and allowed to be, the returned configuration has no
    multi-token-prediction head. A configuration that does not say whether there is such a head takes the
    answer from the weights.
    """
    if dtype is not None and dtype not in FLOAT_DTYPES.values():
        names = ", ".join(map(str, FLOAT_DTYPES.values()))
        raise CheckpointError(f"dtype: expected one of {names}, found {dtype}")
    plan = plan_from_headers(
        path, config=config, skip=skip, allow_unexpected=allow_unexpected, allow_missing=allow_missing,
        expert_layout=expert_layout,
    )  # fmt: skip
    config = plan.config
    with ExitStack() as stack:
        reader = _Reader(stack, globs(allow_nonfinite))
        tensors, narrowing = _assemble(config, plan, reader, dtype)
        if plan.tied_head is not None:
            _check_tied_head(plan.tied_head, plan.sources.get("embed_tokens.weight", [None])[0], reader)
    layouts = tuple((block, layout.name) for block, layout in plan.layouts.items())
    accounting = Accounting(
        tuple(plan.rows), file_bytes_of(plan.files), tuple(plan.notes), narrowing, layouts, tuple(plan.assumptions)
    )
    return Checkpoint(config, tensors, accounting)


def expert_assumptions(path: str | Path) -> tuple[str, ...]:
    """`Accounting.assumptions` of a complete checkpoint from its headers alone. Raises as `read_checkpoint`."""
    return tuple(plan_from_headers(path).assumptions)


def plan_from_headers(
    path: str | Path,
    *,
    config: ModelConfig | None = None,
    skip: Mapping[str, str] = SKIP_REASONS,
    allow_unexpected: Iterable[str] = (),
    allow_missing: Iterable[str] = (),
    expert_layout: str | Layout | None = None,
) -> Plan:
    """Check all that shows without reading a tensor. Arguments and errors are those of `read_checkpoint`."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: not found; expected a checkpoint directory or a .safetensors file")
    missing_globs = globs(allow_missing)
    _refuse_quantised(path, config)
    if config is None:
        config = ModelConfig.from_file(path if path.is_dir() else path.with_name("config.json"))
    files, notes = list_files(path)
    config, note = _settle_mtp(config, files, missing_globs)
    notes += [note] if note else []
    told = None if expert_layout is None else layout_named(expert_layout)
    plan = Plan(config, files, notes, sources={}, rows=[])
    _fill_plan(path, plan, dict(skip), globs(allow_unexpected), missing_globs, told)
    plan.notes += plan.assumptions
    return plan


def _refuse_quantised(path: Path, config: ModelConfig | None) -> None:
    config_file = (path if path.is_dir() else path.parent) / "config.json"
    if config is not None and not config_file.exists():
        return
    raw = read_json_object(config_file)
    text = raw.get("text_config")
    for level in (raw, text if isinstance(text, dict) else {}):
        for name in ("quantization_config", "quantization", "compression_config"):
            if level.get(name):
                found = level[name]
                method = found.get("quant_method", "unnamed") if isinstance(found, dict) else found
                raise CheckpointError(
                    f"{config_file}: {name}: expected unquantised weights, found method {method!r}; "
                    "use the BF16 checkpoint of this model or convert it back first"
                )


def _settle_mtp(
    config: ModelConfig, files: list[StoredFile], allow_missing: list[str]
) -> tuple[ModelConfig, str]:
    """The configuration with the prediction head that the weights have, and a note on any change."""
    present = any(canonical_name(tensor.name).startswith("mtp.") for file in files for tensor in file.tensors)
    if config.mtp_num_hidden_layers and not present:
        names = [name for name in expected_tensors(config) if name.startswith("mtp.")]
        if all(matches(name, allow_missing) for name in names):
            note = "no mtp.* tensors, as allowed: the model has no MTP head"
            return replace(config, mtp_num_hidden_layers=0), note
    if present and config.is_assumed("mtp_num_hidden_layers"):
        note = "the configuration does not mention an MTP head; taken from the mtp.* tensors"
        assumed = tuple(line for line in config.assumed if not line.startswith("mtp_num_hidden_layers"))
        return replace(config, mtp_num_hidden_layers=1, assumed=assumed), note
    return config, ""


# ============================================================================================================
# Plan
# ============================================================================================================


def _fill_plan(
    path: Path,
    plan: Plan,
    skip: dict[str, str],
    allow_unexpected: list[str],
    allow_missing: list[str],
    told: Layout | None,
) -> None:
    config, files = plan.config, plan.files
    expected = expected_tensors(config)
    blocks: dict[str, dict[str, StoredTensor]] = {}  # experts of a layer -> layout's key -> stored tensor
    for name in expected:
        if split_name(name) is not None:
            blocks[split_name(name)[0]] = {}
    forms = {name: forms_of(config, name, shape) for name, shape in expected.items() if split_name(name) is None}
    source_shapes: dict[str, tuple[int, ...]] = {}
    for form in (form for group in forms.values() for form in group):
        source_shapes |= form.sources
    given: dict[str, StoredTensor] = {}  # source name -> stored tensor
    refused: list[str] = []
    for tensor in (tensor for file in files for tensor in file.tensors):
        name = canonical_name(tensor.name)
        reason = next((why for glob, why in skip.items() if fnmatchcase(tensor.name, glob)), None)
        if reason is not None:
            plan.rows.append(_row(SKIPPED, tensor, None, reason))
        elif name == "lm_head.weight" and config.tie_word_embeddings:
            _check_stored(tensor, expected["embed_tokens.weight"])
            plan.tied_head = tensor
            reason = "equal to the embedding, which the configuration ties it to"
            plan.rows.append(_row(SKIPPED, tensor, None, reason))
        elif (found := split_name(name)) is not None and found[0] in blocks and is_key(found[1], config):
            block, key = found
            _refuse_second(tensor, f"{block}.{key}", blocks[block].get(key))
            _check_dtype(tensor)
            blocks[block][key] = tensor
        elif name not in source_shapes:
            if matches(name, allow_unexpected) or matches(tensor.name, allow_unexpected):
                plan.rows.append(_row(UNEXPECTED, tensor, None, "not part of the model, allowed by name"))
            else:
                _refuse_scales(tensor)
                refused.append(tensor.name)
        else:
            _refuse_second(tensor, name, given.get(name))
            _check_stored(tensor, source_shapes[name])
            given[name] = tensor

    missing: list[str] = []
    for name in expected:
        if name not in forms:
            block, key = split_name(name)
            if key == STACKED.keys(config)[0]:  # the first of a layer's experts stands for all
                missing += _plan_experts(config, plan, block, blocks[block], told)
                given |= {f"{block}.{key}": tensor for key, tensor in blocks[block].items()}
            continue
        present = [form for form in forms[name] if any(source in given for source in form.sources)]
        if len(present) > 1:
            _refuse_two_forms(name, present, given)
        if not present:
            missing.append(name)
            continue
        form = present[0]
        gaps = [source for source in form.sources if source not in given]
        if gaps:
            missing += gaps
        else:
            plan.sources[name] = [given[source] for source in form.sources]
            _check_one_dtype(name, plan.sources[name])
    if told is not None and told not in plan.layouts.values():
        if plan.recorded:
            raise _told_otherwise(told, *plan.recorded[0])
        found = ", ".join(sorted({layout.name for layout in plan.layouts.values()})) or "no experts"
        raise CheckpointError(f"{path}: expected experts in the layout {told}, which was named, found {found}")
    absent = [name for name in missing if not matches(name, allow_missing)]
    if refused or absent:
        raise CheckpointError(_mismatch_message(path, config, refused, absent))
    for name in missing:
        plan.rows.append(AccountingRow(MISSING, None, None, name, "allowed by name", None, (), 0))
    plan.rows += _used_rows(plan, given)


def _used_rows(plan: Plan, given: dict[str, StoredTensor]) -> list[AccountingRow]:
    targets: dict[StoredTensor, list[str]] = {}
    for name, sources in plan.sources.items():
        for tensor in sources:
            targets.setdefault(tensor, []).append(name)
    rows = []
    for tensor in given.values():
        names = targets.get(tensor, [])
        if not names:
            reason = "part of a tensor whose other parts are absent, as allowed"
            rows.append(_row(SKIPPED, tensor, None, reason))
        elif len(names) > 1:
            rows.append(_row(MERGED, tensor, ", ".join(names), "split into the projections"))
        else:
            layout = plan.layouts.get(names[0].rpartition(".")[0])
            reason = "" if layout in (None, STACKED) else f"experts in the layout {layout}"
            rows.append(_row(MERGED if len(plan.sources[names[0]]) > 1 else LOADED, tensor, names[0], reason))
    return rows


def _row(kind: str, tensor: StoredTensor, canonical: str | None, reason: str) -> AccountingRow:
    return AccountingRow(
        kind, tensor.file.name, tensor.name, canonical, reason, tensor.dtype, tensor.shape, tensor.n_bytes
    )


def _plan_experts(
    config: ModelConfig,
    plan: Plan,
    block: str,
    present: dict[str, StoredTensor],
    told: Layout | None,
) -> list[str]:
    """Settle the layout of one layer's experts and plan their tensors; returns the names that are missing."""
    names = {part: f"{block}.{STACKED.keys(config, part)[0]}" for part in PARTS}
    if not present:
        return list(names.values())

    def where(key: str) -> str:
        return f"{present[key].file}: tensor {present[key].name}"

    layouts = layouts_with(present, where)
    shapes = {key: tensor.shape for key, tensor in present.items()}
    recorded = _recorded_layout(present, layouts, plan.files)
    plan.recorded += [recorded] if recorded else []
    if recorded and told in layouts and told is not recorded[0]:
        raise _told_otherwise(told, *recorded)
    named = recorded[0] if recorded else told if told in layouts else None
    layout = fitting_layout(shapes, layouts if named is None else [named], config, where)
    doubt = layout.doubt(config) if named is None else None
    if doubt is not None:
        if not _is_published(config, layout, present.values()):
            raise open_layout(doubt, layout, where(next(iter(present))))
        assumption = f"expert layout: {doubt}; taken as {layout}, as published checkpoints of {config.family} have it"
        plan.assumptions += [assumption] if assumption not in plan.assumptions else []
    plan.layouts[block] = layout
    missing = []
    for part, name in names.items():
        keys = layout.keys(config, part)
        gaps = [key for key in keys if key not in present]
        if len(gaps) == len(keys):
            missing.append(name)
        elif gaps:
            missing += [f"{block}.{key}" for key in gaps]
        else:
            plan.sources[name] = [present[key] for key in keys]
            _check_one_dtype(name, plan.sources[name])
    return missing


def _is_published(config: ModelConfig, layout: Layout, tensors: Iterable[StoredTensor]) -> bool:
    """Whether the published checkpoints of the family have experts in this layout under these very names."""
    if config.family not in PUBLISHED_EXPERTS:
        return False
    names, published = PUBLISHED_EXPERTS[config.family]
    return layout is published and all(names.fullmatch(tensor.name) for tensor in tensors)


def _recorded_layout(
    present: dict[str, StoredTensor], layouts: list[Layout], files: list[StoredFile]
) -> tuple[Layout, Path] | None:
    """The layout that the metadata of the files with these tensors names, and the file that does."""
    holding = {tensor.file for tensor in present.values()}
    named = {file.metadata[LAYOUT_KEY]: file for file in files if file.path in holding and LAYOUT_KEY in file.metadata}
    if len(named) > 1:
        first, second = named
        raise CheckpointError(
            f"{named[second].path}: metadata {LAYOUT_KEY}: expected {first!r} as in {named[first].path.name}, found "
            f"{second!r}; correct the metadata of one of the two"
        )
    for name, file in named.items():
        for layout in layouts:
            if layout.name == name:
                return layout, file.path
        raise CheckpointError(
            f"{file.path}: metadata {LAYOUT_KEY}: expected {' or '.join(map(str, layouts))}, which have a tensor "
            f"{next(iter(present.values())).name}, found {name!r}; correct the metadata"
        )
    return None


def _told_otherwise(told: Layout, recorded: Layout, file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file}: metadata {LAYOUT_KEY}: expected {told} as told (expert_layout=, --expert-layout), found that it says "
        f"{recorded}; leave the option out, or rewrite the metadata if it is wrong"
    )


def _check_stored(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    _check_dtype(tensor)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name}: expected shape {list(shape)} by the configuration, "
            f"found {list(tensor.shape)}"
        )


def _refuse_second(tensor: StoredTensor, name: str, first: StoredTensor | None) -> None:
    if first is not None:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name}: expected one tensor for {name}, found {first.name} in "
            f"{first.file.name} too"
        )


def _check_dtype(tensor: StoredTensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        is_fp8 = tensor.dtype.startswith("F")
        kind = "scaled weights of 8 bits or fewer" if is_fp8 else "integers, as in quantised checkpoints,"
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name}: expected dtype {', '.join(FLOAT_DTYPES)}, found "
            f"{tensor.dtype}: "
            f"{kind} are not supported, use the BF16 checkpoint of this model"
        )


def _refuse_scales(tensor: StoredTensor) -> None:
    if re.search(r"(_scale(_inv)?|\.scales|\.qweight|\.qzeros|\.g_idx|_packed)$", tensor.name):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name}: expected unquantised weights, found {tensor.dtype} data "
            "of a "
            "quantisation scheme; use the BF16 checkpoint of this model or convert it back first"
        )


def _refuse_two_forms(name: str, present: list, given: dict[str, StoredTensor]) -> None:
    examples = [next(given[source] for source in form.sources if source in given) for form in present]
    raise CheckpointError(
        f"{examples[1].file}: tensor {examples[1].name}: expected one form of {name}, found it as "
        f"{present[0].label} "
        f"({examples[0].name} in {examples[0].file.name}) and as {present[1].label}"
    )


def _check_one_dtype(name: str, sources: list[StoredTensor]) -> None:
    for tensor in sources[1:]:
        if tensor.dtype != sources[0].dtype:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name}: expected dtype {sources[0].dtype} as in "
                f"{sources[0].name}, "
                f"found {tensor.dtype}; both become {name}"
            )


def _mismatch_message(path: Path, config: ModelConfig, unexpected: list[str], missing: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors missing: {summarise_names(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} tensors unexpected: {summarise_names(unexpected)}")
    hints = []
    if missing and all(name.startswith("mtp.") for name in missing):
        hints.append(
            "the configuration promises an MTP head: copy mtp.* from the base model, or read without it by "
            'allow_missing=("mtp.*",)'
        )
    if "lm_head.weight" in missing:
        hints.append("lm_head.weight may be absent only with tie_word_embeddings true")
    only_mtp = unexpected and all(name.startswith("mtp.") for name in unexpected)
    if only_mtp and not config.mtp_num_hidden_layers:
        hints.append(
            "the configuration says mtp_num_hidden_layers 0: correct it, or leave them out by "
            'allow_unexpected=("mtp.*",)'
        )
    expected = f"expected every tensor of {config.family} with {config.num_hidden_layers} layers and no other"
    return f"{path}: {expected}, found {'; '.join(parts)}{'. ' if hints else ''}{'; '.join(hints)}"


def summarise_names(names: list[str], limit: int = 6) -> str:
    """Names grouped by layer and expert: `layers.{0-3}.mlp.experts.gate_up_proj, norm.weight`."""
    groups: dict[str, list[list[int]]] = {}
    for name in names:
        numbers = [int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", name)]
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{}", name), []).append(numbers)
    shown = [group.format(*(_ranges(set(column)) for column in zip(*numbers, strict=True)))
             for group, numbers in list(groups.items())[:limit]]  # fmt: skip
    rest = len(groups) - limit
    return ", ".join(shown) + (f" and {rest} more kinds" if rest > 0 else "")


def _ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} -> "{0-2,5}"; a single number stands alone."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def globs(patterns: str | Iterable[str]) -> list[str]:
    """A single pattern counts as a list of one; taken letter by letter, "mtp.*" would allow everything."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def matches(name: str, patterns: list[str]) -> bool:
    """Whether any of the glob patterns matches the whole name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ============================================================================================================
# Data
# ============================================================================================================


class _Reader:
    """Stored tensors by memory map, each checked for NaN and Inf when it is read."""

    def __init__(self, stack: ExitStack, allow_nonfinite: list[str]):
        self._stack = stack
        self._open: dict[Path, safe_open] = {}
        self._allow_nonfinite = allow_nonfinite

    def fetch(self, tensor: StoredTensor) -> torch.Tensor:
        try:
            if tensor.file not in self._open:
                self._open[tensor.file] = self._stack.enter_context(safe_open(tensor.file, framework="pt"))
            data = self._open[tensor.file].get_tensor(tensor.name)
        except (SafetensorError, OSError) as fault:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: cannot be read: {fault}") from None
        if data.data_ptr() % data.element_size():
            data = data.clone()  # legal in the format, but not every kernel takes unaligned memory
        names = (tensor.name, canonical_name(tensor.name))
        if not any(matches(name, self._allow_nonfinite) for name in names):
            require_finite(f"{tensor.file}: tensor {tensor.name}", data)
        return data


def require_finite(where: str, tensor: torch.Tensor) -> None:
    """Raise `CheckpointError` with the count and the first place of NaN and Inf, if there are any."""
    n_nan = n_inf = 0
    first = None
    for start, block in enumerate(tensor.flatten().split(BLOCK_ELEMENTS)):
        bad = ~block.isfinite()
        if bad.any():
            n_nan += int(block.isnan().sum())
            n_inf += int(block.isinf().sum())
            if first is None:
                first = start * BLOCK_ELEMENTS + int(bad.nonzero()[0])
    if first is None:
        return
    place = [int(n) for n in torch.unravel_index(torch.tensor(first), tensor.shape)]
    value = float(tensor.flatten()[first])
    message = f"{where}: expected finite values, found {n_nan} NaN and {n_inf} Inf, first {value} at {place}"
    if where.endswith(".A_log") and n_nan == 0 and bool((tensor != float("inf")).all()):
        message += (
            f": A is exactly 0, so {'this head' if n_inf == 1 else 'these heads'} never forget and get no "
            "gradient "
            '(A was drawn as 0, as in bf16); to load it all the same, allow_nonfinite=("*.A_log",)'
        )
    raise CheckpointError(message)


def _assemble(
    config: ModelConfig, plan: Plan, reader: _Reader, dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], tuple[NarrowedTensor, ...]]:
    tensors: dict[str, torch.Tensor] = {}
    narrowing = []
    for name, sources in plan.sources.items():
        tensor = _canonical_tensor(config, name, sources, reader, plan.layouts.get(name.rpartition(".")[0]))
        target = target_dtype(name, tensor.dtype, dtype)
        tensors[name], record = cast(name, tensor, target)
        narrowing += [record] if record else []
    return tensors, tuple(narrowing)


def target_dtype(name: str, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """In which dtype a canonical tensor is held, stored in one and asked for in another (None: as stored)."""
    if ALWAYS_FLOAT32.fullmatch(name):
        return torch.float32
    if asked is None or (name.endswith(".linear_attn.norm.weight") and stored == torch.float32):
        return stored
    return asked


def _canonical_tensor(
    config: ModelConfig, name: str, sources: list[StoredTensor], reader: _Reader, layout: Layout | None
) -> torch.Tensor:
    if layout is not None:
        part = next(part for part in PARTS if name.endswith(f".{STACKED.keys(config, part)[0]}"))
        by_key = dict(zip(layout.keys(config, part), sources, strict=True))
        (tensor,) = rearrange(part, layout, STACKED, config, lambda key: reader.fetch(by_key[key])).values()
        return tensor
    first = canonical_name(sources[0].name)
    if first == name:
        return reader.fetch(sources[0])
    if first.endswith("in_proj_qkvz.weight"):
        qkv, z = split_qkvz(config, reader.fetch(sources[0]))
        return qkv if name.endswith("in_proj_qkv.weight") else z.contiguous()
    b, a = split_ba(config, reader.fetch(sources[0]))
    return (b if name.endswith("in_proj_b.weight") else a).contiguous()


def _check_tied_head(head: StoredTensor, embedding: StoredTensor | None, reader: _Reader) -> None:
    expected = "expected a copy of embed_tokens.weight because tie_word_embeddings is true"
    if embedding is None:
        raise CheckpointError(f"{head.file}: tensor {head.name}: {expected}, found no embedding")
    if head.dtype != embedding.dtype or not torch.equal(reader.fetch(head), reader.fetch(embedding)):
        raise CheckpointError(
            f"{head.file}: tensor {head.name}: {expected}, found other values; set tie_word_embeddings to "
            "false or "
            "remove the tensor"
        )
