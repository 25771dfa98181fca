"""What a model's routers did to every token of some prompts, as arrays that can be saved and compared.

Letters: L layers with experts, T tokens read, E experts, A experts per token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.bundle import Origin, read_bundle, write_bundle
from workbench.errors import InputError

#: Kind and file of a saved record.
BUNDLE_KIND, BUNDLE_FILE = "routing", "routing.safetensors"

#: Numbers of experts are kept in 16 bits.
MOST_EXPERTS = np.iinfo(np.int16).max

#: Dtype and axes of the arrays of a part.
ARRAYS: dict[str, tuple[type, str]] = {
    "token": (np.int64, "T"),
    "prompt": (np.int32, "T"),
    "position": (np.int32, "T"),
    "experts": (np.int16, "LTA"),
    "weights": (np.float32, "LTA"),
    "margin": (np.float32, "LT"),
    "mass": (np.float32, "LT"),
    "entropy": (np.float32, "LT"),
    "logits": (np.float32, "LTE"),
}


@dataclass(frozen=True, slots=True)
class RoutingPrompt:
    """Token ids of one prompt; `kind` groups prompts in tables, `title` names this one."""

    ids: tuple[int, ...]
    kind: str = "text"
    title: str = ""


def check_ids(ids: Sequence[int], vocabulary: int | None, where: str) -> None:
    """Raises InputError, beginning with `where`, for ids that are not in a vocabulary of so many tokens (None: any)."""
    if ids and (min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary)):
        expected = "token ids from 0 on" if vocabulary is None else f"token ids from 0 to {vocabulary - 1}"
        raise InputError(f"{where}: expected {expected}, found {min(ids)} to {max(ids)}")


@dataclass(frozen=True, slots=True, eq=False)
class RoutingPart:
    """The routers of the model's layers (`model`), or of its multi-token-prediction head (`mtp`).

    layers    numbers of the L layers with experts
    token     [T] id of the token; the head reads its hidden row and the token after it, so a prompt's last is missing
    prompt    [T] number of its prompt
    position  [T] its place in that prompt
    experts   [L, T, A] the router's choice, strongest first; -1 throughout where the router had no finite probabilities
    weights   [L, T, A] as the router returned them, NaN included
    margin    [L, T] logit A minus logit A + 1 in falling order: by how much the choice was one; inf where A = E. A
              router that computes in fewer bits than its logits have may choose against it
    mass      [L, T] sum of the chosen experts' probabilities, softmax over all E in fp32 before any renormalising
    entropy   [L, T] of that softmax, in nats: 0 to log E
    logits    [L, T, E] or None where they were not kept

    margin, mass and entropy are NaN where experts is -1.
    """

    name: str
    layers: tuple[int, ...]
    token: np.ndarray
    prompt: np.ndarray
    position: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    margin: np.ndarray
    mass: np.ndarray
    entropy: np.ndarray
    logits: np.ndarray | None = None

    @property
    def bad(self) -> np.ndarray:
        """[L, T] True where the router's logits gave no finite probabilities: NaN, +Inf, or -Inf alone."""
        return self.experts[..., 0] < 0

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, without those that were not kept."""
        return {name: array for name in ARRAYS if (array := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRecord:
    """Parts of one model over the same prompts.

    `num_experts` E, `top_k` A, `normalise` whether weights are divided by their sum, `dtype` of the model,
    `router_dtype` that its router was asked to compute in (None: logits in `dtype`, softmax in fp32 or better),
    `prompts` the kinds and titles with the ids, `origin` what computed it.
    Raises InputError where the arrays do not fit each other.
    """

    num_experts: int
    top_k: int
    normalise: bool
    dtype: str
    prompts: tuple[RoutingPrompt, ...]
    parts: tuple[RoutingPart, ...]
    router_dtype: str | None = None
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        if not self.parts:
            raise InputError("routing record: expected at least one part, found none")
        for part in self.parts:
            _check(part, self)

    def part(self, name: str) -> RoutingPart:
        """The part named `model` or `mtp`. Raises InputError for a name that there is not."""
        for part in self.parts:
            if part.name == name:
                return part
        raise InputError(f"routing record: expected a part of {[p.name for p in self.parts]}, found {name!r}")

    @property
    def bad_tokens(self) -> int:
        """Pairs of layer and token whose logits gave no finite probabilities, over all parts."""
        return sum(int(part.bad.sum()) for part in self.parts)

    def save(self, path: str | Path) -> None:
        """Write the record as a bundle of kind `routing` to the directory `path`; see `bundle.write_bundle`."""
        tensors = {
            f"{part.name}.{name}": torch.from_numpy(np.ascontiguousarray(array))
            for part in self.parts
            for name, array in part.arrays().items()
        }
        ids = [token for prompt in self.prompts for token in prompt.ids]
        tensors["prompts.ids"] = torch.tensor(ids, dtype=torch.int64)
        content = {
            "num_experts": self.num_experts, "top_k": self.top_k, "normalise": self.normalise, "dtype": self.dtype,
            "router_dtype": self.router_dtype,
            "parts": [{"name": part.name, "layers": list(part.layers)} for part in self.parts],
            "prompts": [{"kind": p.kind, "title": p.title, "tokens": len(p.ids)} for p in self.prompts],
        }  # fmt: skip
        write_bundle(path, BUNDLE_KIND, {BUNDLE_FILE: tensors}, self.origin, content=content)


def load_record(path: str | Path) -> RoutingRecord:
    """A record that `RoutingRecord.save` wrote.

    Raises InputError, in one line, for a directory that is no bundle, an unfinished or damaged one, one of another
    kind or version, and for arrays that do not fit each other.
    """
    bundle = read_bundle(path, BUNDLE_KIND)
    content, tensors = bundle.content, bundle.tensors.get(BUNDLE_FILE, {})
    try:
        _check_content(content)
        ids = _array(tensors, "prompts.ids", np.int64)
        ends = np.cumsum([entry["tokens"] for entry in content["prompts"]])
        if ids is None or ids.shape != (ends[-1],):
            found = "none" if ids is None else ids.shape
            raise InputError(f"routing record: prompts.ids: expected int64 ({ends[-1]},), found {found}")
        prompts = tuple(
            RoutingPrompt(tuple(row.tolist()), entry["kind"], entry["title"])
            for row, entry in zip(np.split(ids, ends[:-1]), content["prompts"], strict=True)
        )
        parts = []
        for entry in content["parts"]:
            name = entry["name"]
            arrays = {array: _array(tensors, f"{name}.{array}", dtype) for array, (dtype, _) in ARRAYS.items()}
            parts.append(RoutingPart(name, tuple(entry["layers"]), **arrays))
        settings = {name: content[name] for name in ("num_experts", "top_k", "normalise", "dtype", "router_dtype")}
        return RoutingRecord(**settings, prompts=prompts, parts=tuple(parts), origin=bundle.origin)
    except InputError as error:
        raise InputError(f"bundle {path}: {error}") from None


def _array(tensors: Mapping[str, torch.Tensor], name: str, dtype: type) -> np.ndarray | None:
    """A tensor of a bundle as an array; numpy has no word for some dtypes that a file may hold."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    found = str(tensor.dtype).removeprefix("torch.")
    if found != np.dtype(dtype).name:
        raise InputError(f"routing record: {name}: expected {np.dtype(dtype).name}, found {found}")
    return tensor.numpy()


def _check_content(content: Mapping[str, Any]) -> None:
    """Raises InputError, naming the field, for settings, prompts or parts of a manifest that are none."""
    _expect(content, "content", "num_experts", f"1 to {MOST_EXPERTS}", lambda v: _is_whole(v, 1, MOST_EXPERTS))
    experts = content["num_experts"]
    _expect(content, "content", "top_k", f"1 to {experts}", lambda v: _is_whole(v, 1, experts))
    _expect(content, "content", "normalise", "true or false", lambda v: isinstance(v, bool))
    _expect(content, "content", "dtype", "text", _is_text)
    _expect(content, "content", "router_dtype", "text or null", lambda v: v is None or _is_text(v))
    for name in ("prompts", "parts"):
        _expect(content, "content", name, "a list of objects, at least one",
                lambda v: isinstance(v, list) and v and all(isinstance(entry, dict) for entry in v))  # fmt: skip
    for number, entry in enumerate(content["prompts"]):
        where = f"content.prompts[{number}]"
        _expect(entry, where, "kind", "text", _is_text)
        _expect(entry, where, "title", "text", _is_text)
        _expect(entry, where, "tokens", "a whole number from 1 on", lambda v: _is_whole(v, 1, 2**31))
    for number, entry in enumerate(content["parts"]):
        where = f"content.parts[{number}]"
        _expect(entry, where, "name", "text", _is_text)
        _expect(entry, where, "layers", "different whole numbers from 0 on",
                lambda v: isinstance(v, list) and all(_is_whole(n, 0, 2**31) for n in v) and len(set(v)) == len(v))
    names = [entry["name"] for entry in content["parts"]]
    if len(set(names)) != len(names):
        raise InputError(f"routing record: content.parts: expected each name once, found {names}")


def _expect(fields: Mapping[str, Any], where: str, name: str, expected: str, fits: Callable[[Any], object]) -> None:
    if name not in fields:
        raise InputError(f"routing record: {where}.{name}: expected {expected}, found nothing")
    if not fits(fields[name]):
        raise InputError(f"routing record: {where}.{name}: expected {expected}, found {json.dumps(fields[name])[:60]}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _check(part: RoutingPart, record: RoutingRecord) -> None:
    where = f"routing record: part {part.name}"
    tokens = 0 if part.token is None else len(part.token)
    sizes = {"L": len(part.layers), "T": tokens, "A": record.top_k, "E": record.num_experts}
    for name, (dtype, axes) in ARRAYS.items():
        array = getattr(part, name)
        if array is None and name == "logits":
            continue
        expected = tuple(sizes[axis] for axis in axes)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != expected:
            kind = "none" if array is None else type(array).__name__
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else kind
            raise InputError(f"{where}: {name}: expected {np.dtype(dtype)} {expected}, found {found}")
    limits = {"experts": (-1, record.num_experts - 1), "prompt": (0, len(record.prompts) - 1)}
    for name, (low, high) in limits.items():
        array = getattr(part, name)
        if array.size and not (low <= array.min() and array.max() <= high):
            raise InputError(f"{where}: {name}: expected {low} to {high}, found {array.min()} to {array.max()}")
    chosen = part.experts >= 0
    if (chosen.any(-1) != chosen.all(-1)).any():
        raise InputError(f"{where}: experts: expected -1 for all experts of a token or for none, found it for some")


def stack_parts(name: str, layers: Sequence[int], pieces: Sequence[dict[str, Any]]) -> RoutingPart:
    """One part from its prompts' arrays: [T] side by side, [L, T, ...] along the tokens."""
    joined = {}
    for array, (_, axes) in ARRAYS.items():
        found = [piece[array] for piece in pieces]
        joined[array] = None if found[0] is None else np.concatenate(found, axis=axes.index("T"))
    return RoutingPart(name, tuple(layers), **joined)
