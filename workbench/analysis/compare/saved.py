"""A saved run as a side: a bundle of kind `trace`, of this machine, of another one, or of another engine.

Names of another engine are given by a mapping, JSON that maps our names of tap points to theirs::

    {"layers.{layer}.gdn.conv": "model.layers.{layer}.linear_attn.conv_out",
     "layers.{layer}.attn.q": {"name": "model.layers.{layer}.self_attn.q", "transpose": [0, 2, 1, 3]},
     "logits": {"name": "lm_head", "slice": [null, [0, 97]]}}

``{layer}`` stands for the number of every layer that is there. Of a tensor given as an object `slice` acts first
(``[start, stop]`` for each axis, null for all of it), then `reshape` (-1 once for the rest), then `transpose` (the
order of the axes). Tensors that the mapping does not name are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import taps
from workbench.analysis.compare.hf import order_of
from workbench.analysis.compare.sides import UNKNOWN, Side, named
from workbench.analysis.nans import axes_of, relative_name
from workbench.analysis.stages import Seen
from workbench.bundle import Bundle, Origin, read_bundle, write_bundle
from workbench.errors import InputError
from workbench.provenance import versions

#: Kind of a bundle that holds tensors of tap points.
BUNDLE_KIND = "trace"

STEPS = ("slice", "reshape", "transpose")
LAYER = "{layer}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tap point is found in another engine's tensors, and what makes it ours."""

    name: str
    slice: tuple[tuple[int | None, int | None], ...] = ()
    reshape: tuple[int, ...] = ()
    transpose: tuple[int, ...] = ()

    def apply(self, tap: str, tensor: Tensor) -> Tensor:
        """Raises InputError where the tensor has other axes."""
        try:
            if self.slice:
                tensor = tensor[tuple(slice(*bounds) for bounds in self.slice)]
            if self.reshape:
                tensor = tensor.reshape(self.reshape)
            return tensor.permute(self.transpose) if self.transpose else tensor
        except (RuntimeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"mapping: {tap}: expected {self.name} to take {' and '.join(s for s in STEPS if getattr(self, s))}, "
                f"found shape {tuple(tensor.shape)}: {reason}"
            ) from None


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _bounds(tap: str, value: Any) -> tuple[tuple[int | None, int | None], ...]:
    whole = (None, None)
    is_list = isinstance(value, list)
    if not is_list or not all(v is None or (_is_integers(v) and len(v) == 2) for v in value):
        raise InputError(
            f"mapping: {tap}: slice: expected [start, stop] or null for each axis, found {str(value)[:60]!r}"
        )
    return tuple(whole if v is None else (v[0], v[1]) for v in value)


def read_mapping(given: str | Path | Mapping[str, Any] | None) -> dict[str, Entry] | None:
    """Our names -> theirs, from a JSON file or its content; see the module. Raises InputError for anything else."""
    if given is None:
        return None
    content = given
    if not isinstance(given, Mapping):
        try:
            content = json.loads(Path(given).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"mapping {given}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"mapping {given}: expected JSON, found: {error}") from None
    if not isinstance(content, Mapping) or not content:
        raise InputError(f"mapping: expected an object of our tap names to theirs, found {str(content)[:60]!r}")
    return {tap: _entry(tap, value) for tap, value in content.items()}


def _entry(tap: str, value: Any) -> Entry:
    plain = tap.replace(LAYER, "0")
    known = taps.split_name(plain)[1] in taps.LAYER_TAPS if plain.startswith("layers.") else plain in taps.MODEL_TAPS
    if not known:
        raise InputError(f"mapping: expected a name of `workbench.taps` such as layers.{LAYER}.gdn.out, found {tap!r}")
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or set(value) - {"name", *STEPS}:
        raise InputError(
            f"mapping: {tap}: expected a name, or an object with name and {', '.join(STEPS)}, found {str(value)[:60]!r}"
        )
    if (LAYER in tap) != (LAYER in value["name"]) or value["name"].count(LAYER) > 1:
        raise InputError(f"mapping: {tap}: expected {LAYER} once on both sides or on neither, found {value['name']!r}")
    for name in ("reshape", "transpose"):
        if name in value and not _is_integers(value[name]):
            raise InputError(f"mapping: {tap}: {name}: expected whole numbers, found {str(value[name])[:60]!r}")
    return Entry(
        value["name"], _bounds(tap, value.get("slice", [])), tuple(value.get("reshape", ())),
        tuple(value.get("transpose", ())),
    )  # fmt: skip


def renamed(tensors: Mapping[str, Tensor], mapping: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors that `mapping` names, by our names."""
    found: dict[str, Tensor] = {}
    for tap, entry in mapping.items():
        if LAYER not in tap:
            if entry.name in tensors:
                found[tap] = entry.apply(tap, tensors[entry.name])
            continue
        before, after = map(re.escape, entry.name.split(LAYER))
        for name, tensor in tensors.items():
            match = re.fullmatch(f"{before}(\\d+){after}", name)
            if match:
                own = taps.full_name(int(match[1]), tap.partition(f"{LAYER}.")[2])
                found[own] = entry.apply(own, tensor)
    return found


#: Tap points whose first axis is chunks.
IN_CHUNKS = {name for name, what in taps.LAYER_TAPS.items() if "[N, " in what}


def _kept(path: Path, bundle: Bundle) -> dict[int, dict[str, tuple[Tensor, Any]]]:
    """Pass -> name -> (tensor, its tokens (first, end), None where whole)."""
    by_step: dict[int, dict[str, tuple[Tensor, Any]]] = {}
    try:
        for entry in bundle.content["tensors"]:
            seen, tap = by_step.setdefault(int(entry["step"]), {}), entry["tap"]
            tensor = bundle.tensors[entry["file"]][entry["key"]]
            if entry.get("occurrence", 0):
                if relative_name(tap) not in IN_CHUNKS or tap not in seen:
                    raise InputError(
                        f"bundle {path}: expected each tap point once in a pass, found {tap} several times (packed "
                        "sequences); save the sequences one by one"
                    )
                tensor = torch.cat([seen[tap][0], tensor])  # blocks of chunks, in their order
            seen[tap] = tensor, entry.get("tokens")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"bundle {path}: expected the content of a trace, found {error!r}") from None
    if not by_step:
        raise InputError(f"bundle {path}: expected tensors of tap points, found none")
    return by_step


def _tokens_of(seen: Mapping[str, Tensor]) -> int | None:
    """Number of tokens of a pass, from any whole tensor with an axis of them."""
    for name, tensor in seen.items():
        axes = axes_of(name)
        for axis in ("T", "tokens"):
            if name != taps.LOGITS and axis in axes and len(axes) == tensor.dim():
                return tensor.shape[axes.index(axis)]
    return None


def read_side(path: Path, mapping: str | Path | Mapping[str, Any] | None = None) -> Side:
    """The run that a bundle of kind `trace` holds (`tracing.dump`, `save_side`).

    Where its content has no `input_ids`, tokens are UNKNOWN and only their number is known. Raises InputError, in one
    line, for what is no bundle, an unfinished or damaged one, one of another kind, one with several sequences, and for
    names that are no tap points and not in `mapping`.
    """
    entries = read_mapping(mapping)
    bundle = read_bundle(path, BUNDLE_KIND)
    by_step = _kept(path, bundle)
    tokens = bundle.content.get("input_ids")
    if tokens is not None:
        is_lists = isinstance(tokens, list) and all(_is_integers(ids) and ids for ids in tokens)
        if not is_lists or len(tokens) <= max(by_step):
            raise InputError(
                f"bundle {path}: content: input_ids: expected the token ids of each of {max(by_step) + 1} passes, "
                f"found {str(tokens)[:60]!r}"
            )
    count = max(by_step) + 1 if tokens is None else len(tokens)
    passes, past, is_cut = [], 0, False
    for step in range(count):
        kept = by_step.get(step, {})
        seen = {name: tensor for name, (tensor, _) in kept.items()}
        is_cut = is_cut or any(range_ is not None for _, range_ in kept.values())
        if entries is not None:
            seen = renamed(seen, entries)
        for name in seen:
            layer, tap = taps.split_name(name)
            if tap not in (taps.MODEL_TAPS if layer is None else taps.LAYER_TAPS):
                raise InputError(
                    f"bundle {path}: expected names of tap points (`workbench.taps`), found {name!r}; give a mapping "
                    "file"
                )
        if tokens is not None:
            ids = torch.tensor([tokens[step]])
        else:
            number = _tokens_of(seen)
            is_cut = is_cut or number is None  # later passes then begin at a position that nobody knows
            ids = torch.full((1, number or 1), UNKNOWN)
        order = order_of(list(seen))
        passes.append(Seen(ids, past, [], {name: seen[name] for name in order}, {}, order))
        past += ids.shape[1]
    origin = bundle.origin
    return Side(
        str(path), "bundle", passes, None, bundle.content.get("dtype"), origin.policy, list(origin.backends), is_cut,
        origin.model_hash, _interruption(bundle.content.get("run")),
    )  # fmt: skip


def _interruption(run: Any) -> str | None:
    """One sentence of how a run ended that a recorder saw fail, or never saw end; None for any other."""
    if not isinstance(run, Mapping) or run.get("state") not in ("open", "failed"):
        return None
    if run["state"] == "open":
        return f"was never closed: it was killed, or still ran; the last tensor is {run.get('last_tap')}"
    failures = run.get("failures")
    first = failures[0] if isinstance(failures, list) and failures and isinstance(failures[0], Mapping) else {}
    text = (str(first.get("text")).splitlines() or [""])[0]
    return f"failed in pass {first.get('step')} after {first.get('after')}: {first.get('type')}: {text}"


def save_side(side: Side, path: str | Path, *, model_hash: str | None = None) -> None:
    """Write all tensors of a side and its tokens as a bundle of kind `trace`, to be compared elsewhere.

    Raises InputError as `bundle.write_bundle` does.
    """
    files, entries = {}, []
    for step, seen in enumerate(side.passes):
        name = f"step-{step:06d}-000.safetensors"
        files[name] = seen.tensors
        entries += [
            {
                "tap": tap, "step": step, "occurrence": 0, "dtype": named(tensor.dtype), "shape": list(tensor.shape),
                "tokens": None, "file": name, "key": tap,
            }
            for tap, tensor in seen.tensors.items()
        ]  # fmt: skip
    content = {
        "steps": len(side.passes), "tensors": entries, "left_out": [], "dtype": side.dtype,
        "input_ids": [ids.flatten().tolist() for ids in side.feeds],
    }  # fmt: skip
    origin = Origin(model_hash, tuple(side.backends), side.policy, versions())
    write_bundle(path, BUNDLE_KIND, files, origin, content=content)
