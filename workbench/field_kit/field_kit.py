"""Field kit: probe a machine, record a model's tensors, bring them home. One file, nothing to install.

Copy this file to the machine (it needs Python 3.8 and whatever torch is there) and run one of

    python field_kit.py probe --json probe.json
    python field_kit.py record --out run SCRIPT.py ARGUMENTS...

or put three lines into the program that has the model:

    import field_kit
    with field_kit.record(model, "run"):
        model.generate(input_ids, max_new_tokens=4)

`run` is then a bundle of kind `trace`, version 1. At home:

    workbench compare CHECKPOINT --a auto --b run

What is no module is seen by `Tape.function` (a wrapper), `Tape.patched` (a name in a module, for a while) or
``--function MODULE:NAME``. Shapes: B batch, T tokens, D hidden, V value heads, W value dim, H key heads, K key dim.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fnmatch
import functools
import glob
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

KIT = 1

FORMAT, VERSION, KIND, MANIFEST = "workbench-bundle", 1, "trace", "manifest.json"

#: Tap points of the workbench inside a layer and outside. Its table is `workbench/taps.py`; a test holds them together.
LAYER_TAPS = (
    "input_norm", "gdn.qkv", "gdn.gate", "gdn.beta", "gdn.log_decay", "gdn.conv", "gdn.q", "gdn.k", "gdn.v",
    "gdn.cumsum", "gdn.decay", "gdn.kkt", "gdn.inverse", "gdn.u", "gdn.w", "gdn.intra", "gdn.inter", "gdn.state",
    "gdn.out", "gdn.norm", "attn.q", "attn.k", "attn.v", "attn.gate", "attn.scores", "attn.out", "mixer_out",
    "residual_mid", "post_norm", "moe.logits", "moe.topk", "moe.experts", "moe.shared", "moe.out", "residual",
)  # fmt: skip
MODEL_TAPS = ("embed", "final_norm", "logits")

#: Columns of the statistics, as in the trace of the workbench.
COLUMNS = (
    "layer", "tap", "step", "rank", "dtype", "shape", "min", "max", "absmax", "mean", "rms", "frac_nan", "frac_pinf",
    "frac_ninf", "frac_zero", "frac_subnormal", "frac_near_limit", "first_bad",
)  # fmt: skip

CAP_BYTES = 1 << 30  # of tensors in a bundle, unless told otherwise
PART_BYTES = 1 << 28  # of tensors that wait in memory until their file is written
BLOCK_VALUES = 1 << 20  # that are widened to float64 at a time
WRITE_BYTES = 1 << 22


class KitError(Exception):
    """What the user can put right, in one line: what, where, expected, found, next step."""


def _short(error):
    """Type and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def full_name(layer, tap):
    """``full_name(3, "gdn.out") == "layers.03.gdn.out"``."""
    return f"layers.{layer:02d}.{tap}"


def is_tap(name):
    """Whether a full name is a tap point of the workbench."""
    match = re.match(r"layers\.\d+\.(.+)$", name)
    return match.group(1) in LAYER_TAPS if match else name in MODEL_TAPS


def _torch():
    """torch, which everything but the probe cannot do without."""
    import torch

    return torch


def _named(dtype):
    return str(dtype).replace("torch.", "")


# ---- statistics


def statistics(x):
    """The last twelve COLUMNS of a floating-point CPU tensor of any shape, as plain values; None for any other dtype.

    min, max, absmax, mean, rms are taken over the finite values, in float64 (moments of x / absmax), and are None where
    there are none. Shares are of all values: zero, subnormal (0 < |x| < smallest normal number of the dtype), near the
    limit (finite, |x| above half of the largest). first_bad is the index of the first value that is not finite.
    """
    torch = _torch()
    if not x.is_floating_point():
        return None
    limits, total = torch.finfo(x.dtype), x.numel()
    if total == 0:
        return [None] * 5 + [0.0] * 6 + [None]
    flat = x.detach().reshape(-1)
    low, high, first = math.inf, -math.inf, None
    counts = [0] * 6  # nan, +inf, -inf, zero, subnormal, near the limit
    n_finite = 0
    for number, block in enumerate(flat.split(BLOCK_VALUES)):
        wide = block.double()
        finite = torch.isfinite(wide)
        magnitude = wide.abs()
        good = int(finite.sum())
        n_finite += good
        if good < wide.numel():
            if first is None:
                first = number * BLOCK_VALUES + int((~finite).nonzero()[0])
            counts[0] += int(torch.isnan(wide).sum())
            counts[1] += int((wide == math.inf).sum())
            counts[2] += int((wide == -math.inf).sum())
        counts[3] += int((wide == 0).sum())
        counts[4] += int(((magnitude > 0) & (magnitude < limits.tiny)).sum())
        counts[5] += int(((magnitude > 0.5 * limits.max) & finite).sum())
        if good:
            low = min(low, float(wide.masked_fill(~finite, math.inf).min()))
            high = max(high, float(wide.masked_fill(~finite, -math.inf).max()))
    shares = [count / total for count in counts]
    first_bad = None if first is None else _unravel(first, x.shape)
    if n_finite == 0:
        return [None] * 5 + shares + [first_bad]
    absmax = max(abs(low), abs(high))
    mean = rms = 0.0
    if absmax > 0:
        sums = squares = 0.0
        for block in flat.split(BLOCK_VALUES):
            wide = block.double()
            scaled = wide.masked_fill(~torch.isfinite(wide), 0.0) / absmax
            sums += float(scaled.sum())
            squares += float((scaled * scaled).sum())
        mean, rms = absmax * (sums / n_finite), absmax * math.sqrt(squares / n_finite)
    return [low, high, absmax, mean, rms, *shares, first_bad]


def _unravel(position, shape):
    index = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        index.append(rest)
    return index[::-1]


# ---- the bundle


def _safetensors_names():
    """dtype -> its name in a safetensors file, for those that this torch has."""
    torch = _torch()
    names = {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
        "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
    }  # fmt: skip
    return {getattr(torch, name): short for name, short in names.items() if hasattr(torch, name)}


def host_copy(x):
    """A contiguous copy on the CPU, which nothing that happens to `x` later can change."""
    torch = _torch()
    copy = torch.empty(tuple(x.shape), dtype=x.dtype)
    copy.copy_(x.detach())
    return copy


def write_safetensors(path, tensors):
    """Write (key, contiguous CPU tensor) pairs; return size and sha256 of the file."""
    names = _safetensors_names()
    # Wide values first: every tensor then begins at a multiple of its own width.
    ordered = sorted(tensors, key=lambda pair: -pair[1].element_size())
    header, end = {}, 0
    for key, x in ordered:
        size = x.numel() * x.element_size()
        header[key] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for piece in _pieces(struct.pack("<Q", len(text)) + text, ordered):
            file.write(piece)
            digest.update(piece)
            written += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return written, digest.hexdigest()


def _pieces(start, tensors):
    """The bytes of a file. Read from the tensor's memory: numpy may be missing, and it has no bfloat16."""
    yield start
    for _, x in tensors:
        size, address = x.numel() * x.element_size(), x.data_ptr()
        for offset in range(0, size, WRITE_BYTES):
            yield bytes((ctypes.c_char * min(WRITE_BYTES, size - offset)).from_address(address + offset))


class Bundle:
    """A directory that is a complete bundle after every `commit`: files first, the manifest last by a rename.

    Raises KitError for a directory that holds anything already.
    """

    def __init__(self, path):
        if sys.byteorder != "little":
            raise KitError("bundle: expected a little-endian machine, found a big-endian one; safetensors has no other")
        self.path = os.path.abspath(path)
        if os.path.exists(self.path) and (not os.path.isdir(self.path) or os.listdir(self.path)):
            raise KitError(
                f"bundle {path}: expected a new or empty directory, found something there; remove it or choose another"
            )
        try:
            os.makedirs(self.path, exist_ok=True)
            self._staging = tempfile.mkdtemp(prefix=".unfinished-", dir=self.path)
        except OSError as error:
            raise KitError(f"bundle {path}: cannot be written: {error}; choose another directory") from error
        self._files = {}
        self._waiting, self._waiting_bytes = [], 0
        self._step, self._part = -1, 0

    def file_of(self, step, size):
        """Name of the file that takes the next tensor of this pass."""
        if self._waiting and (step != self._step or self._waiting_bytes + size > PART_BYTES):
            self.flush()
        if step != self._step:
            self._step = step
            self._part = sum(name.startswith(f"step-{step:06d}-") for name in self._files)
        return f"step-{step:06d}-{self._part:03d}.safetensors"

    def add(self, key, tensor):
        self._waiting.append((key, tensor))
        self._waiting_bytes += tensor.numel() * tensor.element_size()

    def flush(self):
        """Write what waits to a file of its own."""
        if not self._waiting:
            return
        name = f"step-{self._step:06d}-{self._part:03d}.safetensors"
        staged = os.path.join(self._staging, name)
        with self._in_one_line():
            size, digest = write_safetensors(staged, self._waiting)
            os.replace(staged, os.path.join(self.path, name))
        self._files[name] = {"bytes": size, "sha256": digest}
        self._waiting, self._waiting_bytes = [], 0
        self._part += 1

    def commit(self, manifest):
        """Write all that waits, then the manifest, which replaces the one before in one step."""
        self.flush()
        whole = dict(manifest, format=FORMAT, version=VERSION, kind=KIND, files=self._files, complete=True)
        staged = os.path.join(self._staging, MANIFEST)
        with self._in_one_line():
            with open(staged, "w", encoding="utf-8") as file:
                json.dump(whole, file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, os.path.join(self.path, MANIFEST))

    @contextlib.contextmanager
    def _in_one_line(self):
        try:
            yield
        except OSError as error:
            raise KitError(f"bundle {self.path}: cannot be written: {error}; free space or lower --cap") from error

    def close(self):
        shutil.rmtree(self._staging, ignore_errors=True)


# ---- names of modules -> tap points


def _first(output):
    if isinstance(output, dict):
        output = list(output.values())
    return (output[0] if output else None) if isinstance(output, (tuple, list)) else output


def _rows(x):
    """[T, D] of an engine without a batch axis -> [1, T, D]."""
    return x.unsqueeze(0) if x.dim() == 2 else x


def _flat(x):
    """[B, T, E] -> [tokens, E]."""
    return x.reshape(-1, x.shape[-1])


def _heads(mixer):
    """(H, K, V, W) of a gated delta rule on this device."""
    share = getattr(mixer, "tp_size", 1)
    return mixer.num_k_heads // share, mixer.head_k_dim, mixer.num_v_heads // share, mixer.head_v_dim


def _is_interleaved(mixer):
    """Whether q, k, v, z of one projection stand key head by key head (Qwen3-Next); None where nothing says so."""
    said = getattr(mixer, "gqa_interleaved_layout", None)
    if said is not None:
        return bool(said)
    name = type(mixer).__name__.lower()
    return True if "next" in name else False if "qwen3_5" in name or "qwen35" in name else None


def _unknown_layout(mixer):
    return ValueError(
        f"in_proj_qkvz of {type(mixer).__name__}: unknown whether its heads are interleaved; give gdn.qkv in a --map"
    )


def _fused_qkv(see):
    """q|k|v of a projection that also has z: [.., 2HK+VW] of [.., 2HK+2VW]."""
    torch = _torch()
    heads, key, values, value = _heads(see.parent)
    x, layout = _first(see.output), _is_interleaved(see.parent)
    if layout is None:
        raise _unknown_layout(see.parent)
    if not layout:
        return _rows(x[..., : 2 * heads * key + values * value])
    group = values // heads * value
    q, k, v, _ = x.reshape((*x.shape[:-1], heads, -1)).split([key, key, group, group], dim=-1)
    return _rows(torch.cat([part.reshape((*x.shape[:-1], -1)) for part in (q, k, v)], dim=-1))


def _value_rows(see, x):
    """[B*T*V, W] or [B, T, VW] -> [B, T, V, W]."""
    _, _, values, value = _heads(see.parent)
    return x.reshape(see.batch, -1, values, value)


def _gate_of_query(see):
    """The gate half of q_proj, [B, T, heads * head_dim]; its rows are [query, gate] head by head."""
    x = _rows(_first(see.output))
    size = see.parent.head_dim
    heads = x.reshape((*x.shape[:-1], -1, 2 * size))
    return heads[..., size:].reshape((*x.shape[:-1], -1))


def _gate_of_fused(see):
    """The same of a joint projection of query, gate, keys and values."""
    if not getattr(see.parent, "attn_output_gate", True):
        return None
    x, size = _rows(_first(see.output)), see.parent.head_dim
    heads = x[..., : 2 * see.parent.q_size].reshape((*x.shape[:-1], -1, 2 * size))
    return heads[..., size:].reshape((*x.shape[:-1], -1))


def _middle(see):
    """The residual stream that a norm takes: its one argument, or, fused with the sum, its second result."""
    if isinstance(see.output, (tuple, list)) and len(see.output) > 1:
        return _rows(see.output[1])
    return None


def _middle_before(see):
    return _rows(see.inputs[0]) if len(see.inputs) == 1 else None


def _layer_out(see):
    """What leaves a layer; an engine that adds later returns the two summands, of one shape."""
    out = see.output
    if isinstance(out, (tuple, list)) and len(out) == 2 and hasattr(out[1], "shape") and out[0].shape == out[1].shape:
        return _rows(out[0] + out[1])
    return _rows(_first(out))


def _experts_out(see):
    """Routed experts alone; a module that adds the shared expert itself does not show them."""
    out = see.output
    if isinstance(out, (tuple, list)):
        return _flat(out[1] if len(out) == 2 else out[0])
    shared = getattr(see.module, "_shared_experts", None) or getattr(see.module, "shared_experts", None)
    return None if shared is not None else _flat(out)


def _shared_of_experts(see):
    out = see.output
    return _flat(out[0]) if isinstance(out, (tuple, list)) and len(out) == 2 and out[0] is not None else None


def _shared_out(see):
    """Only where the module multiplies by the shared expert's gate itself."""
    return _flat(_first(see.output)) if getattr(see.module, "expert_gate", None) is not None else None


def _attention_heads(position, heads):
    """Queries, keys or values handed to a vLLM attention module: [T, heads * head_dim] -> [1, T, heads, head_dim]."""

    def read(see):
        x = see.inputs[position]
        return x.reshape(1, -1, getattr(see.parent, heads), see.parent.head_dim)

    return read


def _attention_out(see):
    return _first(see.output).reshape(1, -1, see.parent.num_heads, see.parent.head_dim)


def _logits_rows(see):
    """[B, rows, vocabulary] of what a head or a processor of logits returns, and whether that is every token."""
    x = _rows(_first(see.output))
    return x, see.tokens is None or x.shape[1] == see.tokens


def _logits(see):
    """Logits of every token. A generation asks for those of the last one alone, see below."""
    x, is_whole = _logits_rows(see)
    return x if is_whole else None


def _last_logits(see):
    """Logits of some tokens alone, kept beside the tap points: what they are compared with has more rows."""
    x, is_whole = _logits_rows(see)
    return None if is_whole else x


BEFORE, AFTER = "before", "after"  # when a module's inputs are read: some kernels overwrite them

#: (tap, module relative to the layer, when, what of it). `see` has module, parent (the module that holds it), inputs,
#: output, batch, tokens. A reader that returns None says that this module does not show the tap point.
LAYER_MODULES = (
    ("input_norm", "input_layernorm", AFTER, lambda see: _rows(_first(see.output))),
    ("gdn.qkv", "linear_attn.in_proj_qkv", AFTER, lambda see: _rows(_first(see.output))),
    ("gdn.qkv", "linear_attn.in_proj_qkvz", AFTER, _fused_qkv),
    ("gdn.gate", "linear_attn.norm", BEFORE, lambda see: _value_rows(see, see.inputs[1])),
    ("gdn.out", "linear_attn.norm", BEFORE, lambda see: _value_rows(see, see.inputs[0])),
    ("gdn.norm", "linear_attn.norm", AFTER, lambda see: _value_rows(see, _first(see.output)).flatten(2)),
    ("attn.gate", "self_attn.q_proj", AFTER, _gate_of_query),
    ("attn.gate", "self_attn.qkv_proj", AFTER, _gate_of_fused),
    ("attn.q", "self_attn.attn", BEFORE, _attention_heads(0, "num_heads")),
    ("attn.k", "self_attn.attn", BEFORE, _attention_heads(1, "num_kv_heads")),
    ("attn.v", "self_attn.attn", BEFORE, _attention_heads(2, "num_kv_heads")),
    ("attn.out", "self_attn.attn", AFTER, _attention_out),
    ("mixer_out", "linear_attn.out_proj", AFTER, lambda see: _rows(_first(see.output))),
    ("mixer_out", "self_attn.o_proj", AFTER, lambda see: _rows(_first(see.output))),
    ("residual_mid", "post_attention_layernorm", BEFORE, _middle_before),
    ("residual_mid", "post_attention_layernorm", AFTER, _middle),
    ("post_norm", "post_attention_layernorm", AFTER, lambda see: _rows(_first(see.output))),
    ("moe.logits", "mlp.gate", AFTER, lambda see: _flat(_first(see.output))),
    ("moe.topk", "mlp.gate", AFTER,
     lambda see: see.output[1] if isinstance(see.output, tuple) and len(see.output) == 3 else None),
    ("moe.shared", "mlp.shared_expert", AFTER, _shared_out),
    ("moe.shared", "mlp.experts", AFTER, _shared_of_experts),
    ("moe.experts", "mlp.experts", AFTER, _experts_out),
    ("moe.out", "mlp", AFTER, lambda see: _rows(_first(see.output))),
    ("residual", "", AFTER, _layer_out),
)  # fmt: skip

#: The same outside the layers: modules relative to what holds the list of layers, then relative to the whole model.
STEM_MODULES = (
    ("embed", "embed_tokens", AFTER, lambda see: _rows(_first(see.output))),
    ("final_norm", "norm", AFTER, lambda see: _rows(_first(see.output))),
)
HEAD_MODULES = (
    ("logits", "lm_head", AFTER, _logits),
    ("logits", "logits_processor", AFTER, _logits),
    ("last_logits", "lm_head", AFTER, _last_logits),
    ("last_logits", "logits_processor", AFTER, _last_logits),
)

_LAYER = re.compile(r"(?:(.*)\.)?layers\.(\d+)$")


def decoder_layers(model):
    """(name of what holds the layers, {number: name}) of the decoder in a model; (None, {}) where there is none."""
    found = {}
    for name, module in model.named_modules():
        match = _LAYER.match(name)
        if not match or not hasattr(module, "input_layernorm") or re.search(r"(^|\.)(mtp|visual)(\.|$)", name):
            continue
        if hasattr(module, "linear_attn") or hasattr(module, "self_attn"):
            found.setdefault(match.group(1) or "", {})[int(match.group(2))] = name
    if not found:
        return None, {}
    stem = max(found, key=lambda name: len(found[name]))
    return stem, found[stem]


def read_map(path):
    """A mapping file of tap points to modules: {tap: name} or {tap: {name, of, index, slice, reshape, transpose}}.

    ``{layer}`` in both stands for the number of every layer. `of` is "out" (default) or "in", `index` the position in a
    tuple of results or among the arguments (0). `slice` ([start, stop] or null for each axis) acts first, then
    `reshape`, then `transpose` (the order of the axes). Raises KitError for anything else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise KitError(f"--map {path}: expected a JSON file, found: {error}") from error
    if not isinstance(content, dict) or not content:
        raise KitError(f"--map {path}: expected an object of tap points to names of modules")
    entries = []
    for tap, value in content.items():
        entry = {"name": value} if isinstance(value, str) else value
        known = {"name", "of", "index", "slice", "reshape", "transpose"}
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or set(entry) - known:
            raise KitError("--map {}: {}: expected a name or an object with name and {}, found {!r}".format(
                path, tap, ", ".join(sorted(known - {"name"})), value))  # fmt: skip
        if not is_tap(tap.replace("{layer}", "0")):
            raise KitError(f"--map {path}: expected a tap point such as layers.{{layer}}.gdn.out, found {tap!r}")
        if ("{layer}" in tap) != ("{layer}" in entry["name"]) or entry.get("of", "out") not in ("in", "out"):
            raise KitError(
                f"--map {path}: {tap}: expected {{layer}} on both sides or neither, and of in or out, found {value!r}"
            )
        entries.append((tap, entry))
    return entries


def _read_entry(entry):
    """The reader of an entry of a mapping file."""

    def read(see):
        given = see.inputs if entry.get("of") == "in" else see.output
        x = given[entry.get("index", 0)] if isinstance(given, (tuple, list)) else given
        if entry.get("slice"):
            x = x[tuple(slice(None) if bounds is None else slice(*bounds) for bounds in entry["slice"])]
        if entry.get("reshape"):
            x = x.reshape(entry["reshape"])
        return x.permute(entry["transpose"]) if entry.get("transpose") else x

    return read


# ---- functions -> tap points

#: Names of a gated delta rule that models look up in their own file or on their own mixer.
DELTA_RULES = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule", "recurrent_gated_delta_rule",
)  # fmt: skip
ATTENTIONS = ("eager_attention_forward",)

_ARGUMENTS = {"gdn.q": ("q", "query"), "gdn.k": ("k", "key"), "gdn.v": ("v", "value"), "gdn.beta": ("beta",),
              "gdn.log_decay": ("log_decay", "g", "gate")}  # fmt: skip


def _bound(function, args, kwargs):
    """Arguments by parameter name; by position where a function does not say its parameters."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return dict({str(number): value for number, value in enumerate(args)}, **kwargs)
    named = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind == inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind == inspect.Parameter.VAR_POSITIONAL:
            named.update({str(len(args) - len(value) + number): item for number, item in enumerate(value)})
        else:
            named[name] = value
    return named


def _of_arguments(arguments, tap):
    """The argument of a gated delta rule that a tap point shows."""
    for name in _ARGUMENTS[tap]:
        if name in arguments:
            return arguments[name]
    order = ("gdn.q", "gdn.k", "gdn.v", "gdn.log_decay", "gdn.beta")
    return arguments.get(str(order.index(tap)))


def delta_rule_inputs(tape, arguments):
    """gdn.conv, gdn.v, gdn.beta, gdn.log_decay of the arguments of a gated delta rule that takes q, k before the norm.

    q, k [B, T, H or V, K] (each key head once, or repeated for its value heads), v [B, T, V, W], beta and g [B, T, V].
    """
    torch = _torch()
    q, k, v = (_of_arguments(arguments, tap) for tap in ("gdn.q", "gdn.k", "gdn.v"))
    mixer = tape.mixer
    repeats = 1 if mixer is None else max(1, q.shape[2] // _heads(mixer)[0])
    seen = [("gdn.conv", torch.cat([x[:, :, ::repeats].flatten(2) for x in (q, k)] + [v.flatten(2)], dim=-1)),
            ("gdn.v", v)]  # fmt: skip
    for tap in ("gdn.beta", "gdn.log_decay"):
        if _of_arguments(arguments, tap) is not None:
            seen.append((tap, _of_arguments(arguments, tap)))
    return seen


def delta_rule_outputs(tape, arguments, out):
    """gdn.out, and gdn.state where the state is [B, V, K, W], which other layouts with K = W cannot be told from."""
    v, k = _of_arguments(arguments, "gdn.v"), _of_arguments(arguments, "gdn.k")
    seen = [("gdn.out", _first(out).reshape(v.shape))]
    state = out[1] if isinstance(out, (tuple, list)) and len(out) > 1 else None
    if state is not None and tuple(state.shape[-3:]) == (v.shape[2], k.shape[-1], v.shape[-1]):
        seen.append(("gdn.state", state))
    return seen


def attention_inputs(tape, arguments):
    """attn.q, attn.k, attn.v of (module, query, key, value), each [B, heads, T, head_dim]; keys of this pass alone."""
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    tokens = q.shape[2]
    return [("attn.q", q.transpose(1, 2)), ("attn.k", k[:, :, -tokens:].transpose(1, 2)),
            ("attn.v", v[:, :, -tokens:].transpose(1, 2))]  # fmt: skip


def attention_outputs(tape, arguments, out):
    return [("attn.out", _first(out))]


KINDS = {
    "gated_delta_rule": (delta_rule_inputs, delta_rule_outputs),
    "attention": (attention_inputs, attention_outputs),
}


# ---- the recorder


class _See:
    """What a reader of a module is given."""

    def __init__(self, tape, module, parent, inputs, output):
        self.module, self.parent, self.inputs, self.output = module, parent, inputs, output
        self.batch, self.tokens = tape.batch, tape.tokens


class Tape:
    """Records tensors of a model while it is open; see `record` for the options.

    step      number of the running pass, from 0; -1 before the first
    """

    def __init__(self, out, taps=("*",), layers=None, steps=None, cap_bytes=CAP_BYTES, map=None, raw=False,
                 functions=(), save_tensors=True, skip=0):  # fmt: skip
        if cap_bytes < 1:
            raise KitError(f"record: cap_bytes: expected at least 1, found {cap_bytes}")
        if steps is not None and not (len(steps) == 2 and 0 <= steps[0] < steps[1]):
            raise KitError(f"record: steps: expected (first, end) with 0 <= first < end, found {steps}")
        if isinstance(taps, str):
            taps = (taps,)
        self.taps, self.layers, self.steps = tuple(taps), None if layers is None else set(layers), steps
        self.cap_bytes, self.raw, self.save_tensors = cap_bytes, raw, save_tensors
        self._map = [] if map is None else read_map(map)
        self._functions = list(functions)
        self.rank, world = _rank()
        self.bundle = Bundle(os.path.join(out, f"rank-{self.rank:02d}") if world > 1 else out)
        self.step, self.batch, self.tokens, self.layer, self.mixer = -1, 1, None, None, None
        self.model = None
        self._undo = []
        self._entries, self._others, self._left_out, self._rows = [], [], [], []
        self._shown, self._ids, self._problems, self._hooked = {}, [], [], []
        self._written = 0
        self._last, self._state, self._failures = None, "open", []
        self._in_function = False
        self._skip = skip
        # One pass at a time: what runs, and in which layer, is kept here, and threads would mix theirs.
        self._passing, self._depth = threading.RLock(), 0
        self._committed, self._commit_seconds = 0.0, 0.0
        self._mixers = {}
        self._dtypes = _safetensors_names()

    # -- attaching

    def attach(self, model):
        """Put hooks on `model`. Raises KitError where it shows no tap point."""
        if self.model is not None:
            raise KitError("record: expected a tape without a model, found one that has one; open another")
        torch = _torch()
        if isinstance(model, torch.jit.ScriptModule):
            raise KitError(
                f"record: {type(model).__name__}: expected a model in Python, found a compiled TorchScript module, "
                "which takes no hooks; record the module that it was made from"
            )
        self.model = model
        modules = dict(model.named_modules())
        stem, layers = decoder_layers(model)
        if self.raw:
            for name, module in modules.items():
                if name:
                    self._hook(module, None, name, AFTER, lambda see: _first(see.output))
        else:
            self._hook_layers(modules, stem, layers)
        for number, name in layers.items():
            self._mixers[number] = getattr(modules[name], "linear_attn", None)
            self._keep(modules[name].register_forward_pre_hook(self._enter(number)))
        if not self._hooked:
            raise KitError(
                f"record: {type(model).__name__}: expected modules such as layers.0.input_layernorm, or those of a "
                "--map file, of selected taps and layers, found none; give --map, or --raw for every module by name"
            )
        if not self.raw:
            for mixer in {id(m): m for m in self._mixers.values() if m is not None}.values():
                self._wrap_mixer(mixer)
            files = {type(module).__module__ for name in layers.values() for module in modules[name].modules()}
            for file in sorted(files):
                for names, kind in ((DELTA_RULES, "gated_delta_rule"), (ATTENTIONS, "attention")):
                    for name in names:
                        if callable(getattr(sys.modules.get(file), name, None)) and not inspect.isclass(
                            getattr(sys.modules[file], name)
                        ):
                            self._patch(sys.modules[file], name, kind, file + ":" + name)
        self.watch_functions()
        self._wrap_forward(model)
        return self

    def watch_functions(self):
        """Record the functions that were named, until the tape is closed."""
        for given in self._functions:
            name, _, kind = given.partition("=")
            self._undo.append(self._start_patch(name, kind or None))

    def _hook_layers(self, modules, stem, layers):
        places, replaced = [], set()
        for tap, entry in self._map:
            when, read = (BEFORE if entry.get("of") == "in" else AFTER), _read_entry(entry)
            numbers = [None]
            if "{layer}" in tap:
                before, after = map(re.escape, entry["name"].split("{layer}"))
                matches = (re.match(before + r"(\d+)" + after + "$", name) for name in modules)
                numbers = sorted({int(match.group(1)) for match in matches if match})
            relative = tap.partition("{layer}.")[2] or tap
            for number in numbers:
                name = entry["name"].replace("{layer}", str(number))
                if name in modules:
                    places.append((number, relative, name, when, read))
                    replaced.add((number, relative))
            if not any(place[1] == relative for place in places):
                raise KitError("--map: {}: expected a module {}, found none; names of modules are those of "
                               "model.named_modules()".format(tap, entry["name"]))  # fmt: skip
        for number, layer in layers.items():
            places += [(number, tap, (layer + "." + path) if path else layer, when, read)
                       for tap, path, when, read in LAYER_MODULES if (number, tap) not in replaced]  # fmt: skip
        if layers:
            prefix = stem + "." if stem else ""
            places += [(None, tap, prefix + path, when, read) for tap, path, when, read in STEM_MODULES
                       if (None, tap) not in replaced]  # fmt: skip
            for tap, path, when, read in HEAD_MODULES:
                names = [name for name in modules if name == path or name.endswith("." + path)]
                names = [name for name in names if not re.search(r"(^|\.)(mtp|visual)(\.|$)", name)]
                if names and (None, tap) not in replaced:
                    places.append((None, tap, min(names, key=len), when, read))
        for number, tap, name, when, read in places:
            if name in modules:
                parent = modules.get(name.rpartition(".")[0])
                self._hook(modules[name], number, tap, when, read, parent)

    def _hook(self, module, layer, tap, when, read, parent=None):
        name = tap if layer is None else full_name(layer, tap)
        if not self._wants(name, layer):
            return

        def before(own, inputs):
            self._read(name, read, own, parent, inputs, None)

        def after(own, inputs, output):
            self._read(name, read, own, parent, inputs, output)

        register = module.register_forward_pre_hook if when == BEFORE else module.register_forward_hook
        try:
            self._keep(register(before if when == BEFORE else after))
        except RuntimeError as error:  # a TorchScript module inside a model in Python
            self._not_recorded(name, _short(error))
            return
        self._hooked.append(name)

    def _keep(self, handle):
        self._undo.append(handle.remove)

    def _enter(self, number):
        def enter(module, inputs):
            self.layer, self.mixer = number, self._mixers.get(number)

        return enter

    def _wrap_forward(self, model):
        """Every call of the model is a pass. Its arguments tell the tokens, also those given by name."""
        original, had_own = model.forward, "forward" in vars(model)

        @functools.wraps(original)
        def forward(*args, **kwargs):
            with self._passing:
                if self._depth:  # a model that calls itself is one pass
                    return original(*args, **kwargs)
                if self._skip > 0:
                    self._skip -= 1
                    return original(*args, **kwargs)
                self.begin_pass(*_tokens_of(original, args, kwargs))
                self._depth = 1
                try:
                    out = original(*args, **kwargs)
                except BaseException as error:
                    # An engine may catch it; the pass is then still known to have ended here.
                    self._failed(error)
                    self._commit(True)
                    raise
                finally:
                    self._depth = 0
                self._commit(False)
                return out

        model.forward = forward

        def restore():
            if had_own:
                model.forward = original
            else:
                del model.forward

        self._undo.append(restore)

    def _wrap_mixer(self, mixer):
        """A gated delta rule that a mixer holds: a function, or a module that is called with arguments by name."""
        torch = _torch()
        for name in DELTA_RULES:
            held = getattr(mixer, name, None)
            if isinstance(held, torch.nn.Module):
                self._patch(held, "forward", "gated_delta_rule", name)
            elif callable(held) and name in vars(mixer):
                self._patch(mixer, name, "gated_delta_rule", name)

    # -- functions

    def function(self, function, taps=None, name=None):
        """`function`, recorded at each call: its tensor arguments before the call, its results after.

        `taps` is "gated_delta_rule" or "attention" (of transformers), or {parameter or number of a result: tap point},
        such as ``{"q": "gdn.q", 0: "gdn.out"}``, relative to the running layer. None records everything beside the
        tap points, as NAME.in.PARAMETER and NAME.out.NUMBER.
        """
        if isinstance(taps, str) and taps not in KINDS:
            raise KitError("function: expected one of {}, found {!r}".format(", ".join(KINDS), taps))
        name = name or getattr(function, "__name__", type(function).__name__)

        @functools.wraps(function)
        def recorded(*args, **kwargs):
            if self._in_function or self._state != "open":  # a rule that calls another is one call
                return function(*args, **kwargs)
            arguments = _bound(function, args, kwargs)
            self._show(name, lambda: self._inputs_of(name, taps, arguments))
            self._in_function = True
            try:
                out = function(*args, **kwargs)
            finally:
                self._in_function = False
            self._show(name, lambda: self._outputs_of(name, taps, arguments, out))
            return out

        return recorded

    def _inputs_of(self, name, taps, arguments):
        torch = _torch()
        if isinstance(taps, str):
            return KINDS[taps][0](self, arguments)
        if taps is not None:
            return [(tap, arguments[key]) for key, tap in taps.items()
                    if key in arguments and torch.is_tensor(arguments[key])]  # fmt: skip
        return [(f"{name}.in.{key}", x) for key, x in arguments.items() if torch.is_tensor(x)]

    def _outputs_of(self, name, taps, arguments, out):
        torch = _torch()
        if isinstance(taps, str):
            return KINDS[taps][1](self, arguments, out)
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        if taps is not None:
            return [(tap, results[key]) for key, tap in taps.items() if isinstance(key, int) and key < len(results)]
        return [(f"{name}.out.{number}", x) for number, x in enumerate(results) if torch.is_tensor(x)]

    @contextlib.contextmanager
    def patched(self, name, taps=None):
        """Record the function ``MODULE:NAME`` inside the context, wherever MODULE looks it up by that name."""
        restore = self._start_patch(name, taps)
        try:
            yield self
        finally:
            restore()

    def _start_patch(self, name, taps):
        """Replace the function ``MODULE:NAME``; returns what puts it back."""
        module, _, attribute = name.partition(":")
        try:
            owner = importlib.import_module(module)
            for part in attribute.split(".")[:-1]:
                owner = getattr(owner, part)
            function = getattr(owner, attribute.split(".")[-1])
        except (ImportError, AttributeError, ValueError) as error:
            raise KitError(f"function {name}: expected MODULE:NAME of a function, found: {error!r}") from error
        setattr(owner, attribute.split(".")[-1], self.function(function, taps, attribute))
        return lambda: setattr(owner, attribute.split(".")[-1], function)

    def _patch(self, owner, attribute, kind, name):
        function, had_own = getattr(owner, attribute), attribute in vars(owner)
        setattr(owner, attribute, self.function(function, kind, name))

        def restore():
            if had_own:
                setattr(owner, attribute, function)
            else:
                delattr(owner, attribute)

        self._undo.append(restore)

    # -- recording

    def begin_pass(self, batch=1, tokens=None, ids=None):
        """A pass begins. A tape without a model is told so by its user."""
        self.step += 1
        self.batch, self.tokens, self.layer, self.mixer = batch, tokens, None, None
        self._ids.append(ids)
        self._shown.clear()

    def _wants(self, name, layer=None):
        match = re.match(r"layers\.(\d+)\.", name)
        number = int(match.group(1)) if match else layer
        if self.layers is not None and number not in self.layers:
            return False
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.taps)

    def _read(self, name, read, module, parent, inputs, output):
        if self._state == "open" and self._has_step():
            see = _See(self, module, parent, inputs, output)
            self._show(name, lambda: [(None, read(see))], name, id(module))

    def _has_step(self):
        # Before its first pass a model shows what belongs to none: logits of a warm-up that was skipped.
        is_running = self.step >= 0 or self.model is None
        return is_running and (self.steps is None or self.steps[0] <= max(self.step, 0) < self.steps[1])

    def _show(self, what, read, name=None, source=None):
        """Record what `read` gives: (tap point relative to the layer, tensor) pairs.

        A tensor of a layout that is not expected must not stop the model that is watched: it is listed, and said.
        """
        if not self._has_step():
            return
        try:
            pairs = read()
        except (RuntimeError, IndexError, AttributeError, TypeError, ValueError, KeyError) as error:
            self._not_recorded(what, _short(error))
            return
        for tap, x in pairs:
            if x is not None:
                self.see(name or (full_name(self.layer, tap) if self._is_relative(tap) else tap), x, source or what)

    def _not_recorded(self, what, reason):
        """Say once, here and in the bundle, what is missing and why."""
        if not any(p["what"] == what for p in self._problems):
            print(f"field_kit: {what} is not recorded: {reason}", file=sys.stderr)
            self._problems.append({"what": what, "step": max(self.step, 0), "error": reason})

    def _is_relative(self, tap):
        return self.layer is not None and tap not in MODEL_TAPS and not tap.startswith("layers.")

    def see(self, name, x, source=None):
        """Record a tensor under a full name: its statistics, and its values while there is room for them.

        Of several sources (anything that can be compared) that show one name in a pass the first is recorded.
        """
        if not self._wants(name):
            return
        if not _torch().is_tensor(x):
            self._not_recorded(name, f"expected a tensor, found {type(x).__name__}")
            return
        if x.dtype not in self._dtypes:
            self._not_recorded(name, f"safetensors has no {_named(x.dtype)} here")
            return
        with self._passing:
            self._see(name, x, source)

    def _see(self, name, x, source):
        if self.step < 0:
            self.begin_pass()
        times, first = self._shown.get(name, (0, source))
        if source != first:
            return  # what the rule gives is what the norm after it takes: one tensor, one row, of the first place
        try:
            own = host_copy(x)
            found = statistics(own)
        except (RuntimeError, TypeError, MemoryError) as error:  # without values, of another layout, or too large
            self._not_recorded(name, _short(error))
            return
        if name == "embed" and own.dim() > 1:
            self.batch, self.tokens = own.shape[0], own.shape[1]
        self._shown[name] = times + 1, source
        self._last = name
        dtype, shape = _named(own.dtype), list(own.shape)
        match = re.match(r"layers\.(\d+)\.", name)
        if found is not None:
            layer = int(match.group(1)) if match else None
            self._rows.append([layer, name, self.step, self.rank, dtype, shape, *found])
        if not self.save_tensors:
            return
        told = {"tap": name, "step": self.step, "occurrence": times, "dtype": dtype, "shape": shape, "tokens": None}
        size = own.numel() * own.element_size()
        if self._written + size > self.cap_bytes:
            self._left_out.append(dict(told, bytes=size, why="cap"))
            return
        file = self.bundle.file_of(self.step, size)
        key = name if times == 0 else f"{name}#{times}"
        self.bundle.add(key, own)
        rows = self._entries if self.raw or is_tap(name) else self._others
        rows.append(dict(told, file=file, key=key))
        self._written += size

    def _failed(self, error):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._failures.append({"step": self.step, "after": self._last, "type": type(error).__name__,
                               "text": str(error), "traceback": text[-8000:]})  # fmt: skip

    # -- saving

    def content(self):
        """What the manifest says of the tensors, see docs/bundle.md."""
        state = "failed" if self._failures else self._state
        content = {
            "steps": self.step + 1,
            "selection": {"taps": list(self.taps), "layers": None if self.layers is None else sorted(self.layers),
                          "steps": None if self.steps is None else list(self.steps), "tokens": None},
            "cap_bytes": self.cap_bytes, "written_bytes": self._written, "tensors": self._entries,
            "left_out": self._left_out, "others": self._others, "dtype": self._weights_dtype(),
            "statistics": {"columns": list(COLUMNS), "rows": self._rows},
            "run": {"state": state, "failures": self._failures, "last_tap": self._last},
            "not_recorded": self._problems, "recorded_by": f"field_kit {KIT}",
        }  # fmt: skip
        if self._ids and all(ids is not None for ids in self._ids):
            content["input_ids"] = self._ids
        return content

    def _weights_dtype(self):
        if self.model is None:
            return None
        return next((_named(p.dtype) for p in self.model.parameters() if p.is_floating_point()), None)

    def _commit(self, must):
        """Write the manifest, unless the last time is so close that saving would take most of the time."""
        if self._state != "open":
            return
        if must or time.time() - self._committed > 20 * self._commit_seconds:
            self.save()

    def save(self):
        """Make the directory a complete bundle of what was recorded so far."""
        start = time.time()
        found = versions()
        engine = next((f"{name} {found[name]}" for name in ("vllm", "transformers") if name in found
                       and type(self.model).__module__.startswith((name, "workbench"))), None)  # fmt: skip
        backends = [] if self.model is None else [{"op": "model", "backend": engine or type(self.model).__name__}]
        self.bundle.commit({
            "model_hash": None, "backends": backends, "policy": None, "versions": found, "card": card_name(),
            "seed": None, "content": self.content(),
        })  # fmt: skip
        self._committed = time.time()
        self._commit_seconds = self._committed - start

    def detach(self):
        """Take off every hook, the latest first."""
        while self._undo:
            self._undo.pop()()

    def close(self, error=None):
        """Take off the hooks and write the bundle, marked failed with `error` where that ended the run."""
        if self._state != "open":
            return
        self.detach()
        known = bool(self._failures) and error is not None and self._failures[-1]["text"] == str(error)
        if error is not None and not known:
            self._failed(error)
        self._state = "ended"
        try:
            self.save()
        finally:
            self.bundle.close()
        failed = ", {} pass{} FAILED".format(len(self._failures), "" if len(self._failures) == 1 else "es")
        print("field_kit: {}: {} passes, {} tensors, {:.1f} MB, {} left out{}{}".format(
            self.bundle.path, self.step + 1, len(self._entries) + len(self._others), self._written / 1e6,
            len(self._left_out), failed if self._failures else "",
            "" if self._rows else "; NOTHING was recorded"), file=sys.stderr)  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close(error)
        return False


def record(model, out, taps=("*",), layers=None, steps=None, cap_bytes=CAP_BYTES, map=None, raw=False, functions=(),
           save_tensors=True, skip=0):  # fmt: skip
    """Record what `model` computes inside ``with record(model, "DIR"):`` to the bundle DIR.

    model      any torch.nn.Module that is called once a pass; names of transformers and vLLM of Qwen3.5, Qwen3.6 and
               Qwen3-Next are known. None: only `Tape.function` records, and `Tape.begin_pass` counts
    taps       patterns of full names, with * and ?: ("*.gdn.*", "logits")
    layers     numbers; None: all, and what is outside the layers
    steps      (first, end) of the passes that are recorded; None: all
    cap_bytes  most bytes of tensors; what does not fit is listed in the manifest, its statistics are kept
    map        JSON file of tap points to modules, see `read_map`
    raw        the first result of every module, by the module's own name: map them at home, `compare --map-b`
    functions  "MODULE:NAME" or "MODULE:NAME=gated_delta_rule" of functions that are no modules
    save_tensors  False: statistics alone
    skip       passes at the beginning that are not even counted, such as an engine's warm-up

    The bundle is complete after every pass. An exception inside is passed on; what was recorded until then is written
    with `content.run.state` "failed", the exception and the last tap point before it. With several processes
    (torch.distributed) each writes DIR/rank-NN.
    """
    tape = Tape(out, taps, layers, steps, cap_bytes, map, raw, functions, save_tensors, skip)
    try:
        if model is None:
            tape.watch_functions()
        else:
            tape.attach(model)
        return tape
    except BaseException:
        tape.detach()
        tape.bundle.close()
        raise


def _rank():
    torch = _torch()
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _tokens_of(forward, args, kwargs):
    """(batch, tokens, ids of the one sequence or None) of the arguments of a model."""
    torch = _torch()
    ids = _bound(forward, args, kwargs).get("input_ids")
    if ids is None and args and torch.is_tensor(args[0]) and args[0].dtype in (torch.int32, torch.int64):
        ids = args[0]
    if ids is None or not torch.is_tensor(ids):
        return 1, None, None
    batch, tokens = (1, ids.shape[0]) if ids.dim() == 1 else (ids.shape[0], ids.shape[1])
    return batch, tokens, ids.reshape(-1).tolist() if batch == 1 else None


def card_name():
    torch = _torch()
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def versions():
    """Versions of Python and of what is loaded of a list of packages."""
    found = {"python": platform.python_version(), "field_kit": str(KIT)}
    for name in ("torch", "transformers", "vllm", "triton", "ixformer", "fla", "numpy"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


# ---- probe: ELF files

_ELF_MACHINES = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv", 258: "loongarch"}


class NotElf(Exception):
    """A file that is no ELF file, or a damaged one; the text says which."""


def elf_symbols(path):
    """(machine, {name: whether it is defined}) of the dynamic symbols of a shared object.

    Sections .dynsym and .dynstr as the System V ABI lays them out, 32 and 64 bit, both byte orders. Raises NotElf.
    """
    with open(path, "rb") as file:
        data = file.read()
    if data[:4] != b"\x7fELF":
        raise NotElf(f"expected an ELF file, found one that begins with {data[:4]!r}")
    try:
        return _parse_elf(data)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise NotElf(f"damaged ELF file: {error}") from error


def _parse_elf(data):
    is_wide, order = data[4] == 2, "<" if data[5] == 1 else ">"
    machine = struct.unpack_from(order + "H", data, 18)[0]
    if is_wide:
        table, = struct.unpack_from(order + "Q", data, 40)
        size, count = struct.unpack_from(order + "HH", data, 58)
        section = order + "IIQQQQIIQQ"
    else:
        table, = struct.unpack_from(order + "I", data, 32)
        size, count = struct.unpack_from(order + "HH", data, 46)
        section = order + "IIIIIIIIII"
    sections = [struct.unpack_from(section, data, table + number * size) for number in range(count)]
    names = {}
    for entry in sections:
        kind, offset, length, link, step = entry[1], entry[4], entry[5], entry[6], entry[9]
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = sections[link]
        text = data[strings[4] : strings[4] + strings[5]]
        if step < (24 if is_wide else 16) or offset + length > len(data):
            raise ValueError("its table of symbols ends beyond the file")
        for place in range(offset, offset + length, step):
            name = struct.unpack_from(order + "I", data, place)[0]
            index = struct.unpack_from(order + "H", data, place + (6 if is_wide else 14))[0]
            if name:
                word = text[name : text.index(b"\0", name)].decode("utf-8", "replace")
                names[word] = names.get(word, False) or index != 0
    return _ELF_MACHINES.get(machine, f"machine {machine}"), names


def _nm_symbols(path):
    """The same by `nm`, where there is one: for files whose section headers were stripped."""
    nm = shutil.which("nm")
    if nm is None:
        return {}
    out = subprocess.run([nm, "-D", path], capture_output=True, text=True)
    found = {}
    for line in out.stdout.splitlines():
        words = line.split()
        if len(words) >= 2:
            found[words[-1].partition("@")[0]] = words[-2] not in ("U", "w")
    return found


def find_symbol(path, symbol):
    """(status, text) of a symbol in a file: defined, defined under a C++ name, only asked for, absent."""
    try:
        machine, names = elf_symbols(path)
    except (NotElf, OSError) as error:
        return "FAIL", str(error)
    names = names or _nm_symbols(path)
    if not names:
        return "FAIL", "no dynamic symbols that could be read"
    here = "aarch64" if platform.machine() in ("arm64", "aarch64") else platform.machine()
    is_other = machine != here and here in _ELF_MACHINES.values()
    wrong = f" (built for {machine}, this is {here})" if is_other else ""
    status = "FAIL" if wrong else "PASS"
    if names.get(symbol):
        return status, "defined" + wrong
    mangled = sorted(name for name, is_defined in names.items() if is_defined and symbol in name)
    if mangled:
        return status, "defined as {}{}{}".format(
            ", ".join(mangled[:3]), f" and {len(mangled) - 3} more" if len(mangled) > 3 else "", wrong)
    if symbol in names:
        return "FAIL", "only asked for, defined elsewhere"
    return "FAIL", f"absent among {len(names)} dynamic symbols{wrong}"


def library_folders(given=()):
    """Folders that may hold a vendor's shared objects, in the order in which they are searched."""
    folders = [path for path in given if os.path.isdir(path)]
    folders += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    for base in ("CUDA_HOME", "CUDA_PATH", "COREX_HOME"):
        if os.environ.get(base):
            folders += [os.path.join(os.environ[base], part) for part in ("lib64", "lib")]
    for pattern in ("/usr/local/cuda*/lib64", "/usr/local/corex*/lib*", "/opt/sw_home/local/cuda/lib64"):
        folders += sorted(glob.glob(pattern))
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        folders.append(os.path.join(os.path.dirname(spec.origin), "lib"))
        folders += sorted(glob.glob(os.path.join(os.path.dirname(os.path.dirname(spec.origin)), "nvidia", "*", "lib")))
    folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
    seen = set()
    return [path for path in folders if os.path.isdir(path) and not (path in seen or seen.add(path))]


# ---- probe: the steps

#: Packages that a probe looks for unasked. Their absence is told and is no fault.
PACKAGES = ("numpy", "triton", "transformers", "vllm", "flash_attn", "fla", "flash_qla", "flashinfer", "causal_conv1d",
            "ixformer", "corex_gdn", "corex_moe", "corex_fa2")  # fmt: skip
LIBRARIES = ("libcudart", "libcublas", "libcusolver")
IMPORT_SECONDS = 60
FILES_SHOWN = 8  # of those that just lack a symbol

PASS, FAIL, ABSENT = "PASS", "FAIL", "-"


class Probe:
    """Steps with their outcome, in the order in which they were made."""

    def __init__(self):
        self.steps = []

    def add(self, name, status, text, next_step=None, error=None):
        self.steps.append({"step": name, "status": status, "text": text, "next": next_step if status == FAIL else None,
                           "error": error})  # fmt: skip
        return status == PASS

    def lines(self):
        for step in self.steps:
            yield "{:4} {:34} {}".format(step["status"], step["step"], step["text"])
            if step["status"] == FAIL:
                if step["error"]:
                    for line in step["error"].rstrip().splitlines():
                        yield "       | " + line
                if step["next"]:
                    yield "       next: " + step["next"]

    def to_json(self, machine):
        """The verdict that all commands of the workbench share, with the steps and the machine."""
        failed = [step for step in self.steps if step["status"] == FAIL]
        return {
            "verdict": f"{len(failed)} of {len(self.steps)} steps failed" if failed else "every step passed",
            "where": {"layer": None, "op": None, "tap": None, "token": None, "head": None},
            "cause_id": "probe_step_failed" if failed else None,
            "evidence": ["{}: {}".format(step["step"], step["text"]) for step in failed],
            "ruled_out": [step["step"] for step in self.steps if step["status"] == PASS],
            "fix": failed[0]["next"] if failed else None, "confidence": "established",
            "recorded_by": f"field_kit {KIT}", "machine": machine, "steps": self.steps,
        }  # fmt: skip


def probe(modules=(), symbols=(), libraries=(), device=None, quick=False):
    """A Probe of this machine and a dict that describes it.

    modules    packages that must import, besides PACKAGES, which may be absent
    symbols    names looked for in the dynamic symbols of the files of `libraries` (files or folders) and of the
               packages in `modules`
    device     "cpu", "cuda:0", ...; None: the first accelerator, else the CPU
    quick      leave out the imports of PACKAGES
    """
    found = Probe()
    machine = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": sys.version.split()[0],
               "executable": sys.executable, "system": platform.platform(), "processor": platform.machine(),
               "cores": os.cpu_count()}  # fmt: skip
    found.add("python", PASS if sys.version_info >= (3, 8) else FAIL, machine["python"], "run Python 3.8 or newer")
    torch = _probe_torch(found, machine)
    if torch is not None:
        device = _probe_device(found, machine, torch, device)
        _probe_arithmetic(found, torch, device)
    for name in LIBRARIES:
        _probe_library(found, name, torch, libraries)
    _probe_packages(found, machine, () if quick else PACKAGES, modules)
    if symbols:
        _probe_symbols(found, symbols, libraries, modules)
    return found, machine


def _full_error(error):
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _probe_torch(found, machine):
    try:
        import torch
    except Exception as error:  # noqa: BLE001  a broken installation raises anything; the whole text is what is wanted
        found.add("torch", FAIL, f"{type(error).__name__}: {error}",
                  "install a torch for this Python and card, or repair the one whose error stands above",
                  _full_error(error))  # fmt: skip
        return None
    machine["torch"], machine["cuda"] = torch.__version__, torch.version.cuda
    is_old = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < (1, 10)
    found.add("torch", FAIL if is_old else PASS, f"{torch.__version__} (CUDA {torch.version.cuda})",
              "the kit needs torch 1.10 or newer")  # fmt: skip
    return torch


def _probe_device(found, machine, torch, wanted):
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    machine["devices"] = []
    if wanted not in (None, "cpu"):
        # Vendors have device types of their own; only a try says whether torch knows one.
        try:
            torch.ones(1, device=wanted).cpu()
        except Exception as error:  # noqa: BLE001  vendors raise their own types; the whole text is printed
            found.add(f"device {wanted}", FAIL, _short(error) + "; the steps below run on the CPU",
                      "look at nvidia-smi or the vendor's own, and at CUDA_VISIBLE_DEVICES", _full_error(error))
            wanted = "cpu"
        else:
            found.add(f"device {wanted}", PASS, "holds a tensor")
    if not count:
        found.add("devices", ABSENT, "no CUDA device, as torch sees it")
        return wanted or "cpu"
    for number in range(count):
        try:
            about = torch.cuda.get_device_properties(number)
            with torch.cuda.device(number):
                free = torch.cuda.mem_get_info()[0] if hasattr(torch.cuda, "mem_get_info") else None
            row = {"number": number, "name": about.name, "capability": [about.major, about.minor],
                   "total_bytes": about.total_memory, "free_bytes": free}  # fmt: skip
        except (RuntimeError, AssertionError) as error:
            found.add(f"device cuda:{number}", FAIL, _short(error),
                      "another process may hold the card, or its driver is older than this torch", _full_error(error))
            continue
        machine["devices"].append(row)
        found.add(f"device cuda:{number}", PASS, "{}, compute capability {}.{}, {:.1f} GiB, {} free".format(
            about.name, about.major, about.minor, about.total_memory / 2**30,
            "unknown" if free is None else f"{free / 2**30:.1f} GiB"))  # fmt: skip
    return wanted or "cuda:0"


def matmul_error(torch, dtype, device, size=256):
    """norm(AB - exact)_F / norm(exact)_F in unit roundoffs of `dtype`, [size, size], exact in float64.

    A float32 sum rounded once gives about 1; a product in a narrower format, thousands.
    """
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    out = (a.to(device) @ b.to(device)).cpu().double()
    return float((out - exact).norm() / exact.norm()) / (torch.finfo(dtype).eps / 2)


#: Unit roundoffs that a product of 256 terms may be off. Sums in the dtype itself stay below, narrower formats do not.
MATMUL_LIMIT = 32.0


def _probe_arithmetic(found, torch, device):
    for name in ("float32", "float16", "bfloat16", "float64"):
        step = f"matmul {name} on {device}"
        try:
            error = matmul_error(torch, getattr(torch, name), device)
        except Exception as problem:  # noqa: BLE001  vendors raise their own types; the whole text is printed
            found.add(step, FAIL, _short(problem),
                      "this dtype does not multiply here: cast before it, or route it to a library that can",
                      _full_error(problem))  # fmt: skip
            continue
        is_right = error <= MATMUL_LIMIT  # False for NaN too
        found.add(step, PASS if is_right else FAIL, f"error {error:.3g} unit roundoffs",
                  "it multiplies in a narrower format (TF32?) or wrongly: set "
                  "torch.backends.cuda.matmul.allow_tf32 = False, else keep it out of this dtype")  # fmt: skip
    for name, check, advice in (
        ("triangular solve", _solve_error, "solve by substitution with matmul: cuSOLVER or cuBLAS is missing or wrong"),
        ("cumsum float32", _cumsum_error, "sum on the CPU or by a matmul with a triangle of ones"),
        ("softmax and topk", _topk_error, "take the router's softmax and topk on the CPU"),
    ):
        step = f"{name} on {device}"
        try:
            error = check(torch, device)
        except Exception as problem:  # noqa: BLE001  vendors raise their own types; the whole text is printed
            text = _short(problem)
            found.add(step, FAIL, text, advice, _full_error(problem))
            continue
        found.add(step, PASS if error < 1e-4 else FAIL, f"relative error {error:.2g}", advice)


def _solve_error(torch, device):
    """norm(AX - B)_F / norm(B)_F in float64 for X solved on the device in float32; A [64, 64] unit lower triangular."""
    generator = torch.Generator().manual_seed(7)
    a = torch.eye(64) + 0.1 * torch.randn(64, 64, generator=generator).tril(-1)
    b = torch.randn(64, 32, generator=generator)
    if hasattr(torch.linalg, "solve_triangular"):  # from torch 1.11 on
        x = torch.linalg.solve_triangular(a.to(device), b.to(device), upper=False)
    else:
        x = torch.triangular_solve(b.to(device), a.to(device), upper=False)[0]
    return float((a.double() @ x.cpu().double() - b.double()).norm() / b.double().norm())


def _cumsum_error(torch, device):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))
    exact = x.double().cumsum(-1)
    return float((x.to(device).cumsum(-1).cpu().double() - exact).norm() / exact.norm())


def _topk_error(torch, device):
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(7))
    weights, chosen = torch.softmax(x.to(device), dim=-1).topk(8, dim=-1)
    exact, expected = torch.softmax(x.double(), dim=-1).topk(8, dim=-1)
    same = float((chosen.cpu() == expected).double().mean())
    return max(1.0 - same, float((weights.cpu().double() - exact).norm() / exact.norm()))


def _probe_library(found, name, torch, libraries):
    files = []
    for folder in library_folders(libraries):
        files += glob.glob(os.path.join(folder, name + ".so*"))
    if not files:
        has_card = torch is not None and torch.cuda.is_available()
        found.add(name, FAIL if has_card else ABSENT, f"no {name}.so in the folders of libraries",
                  "give its folder by --lib, or set LD_LIBRARY_PATH; what torch takes from it fails without")
        return
    errors = []
    for path in files:
        try:
            ctypes.CDLL(path)
        except OSError as error:
            errors.append(f"{path}: {error}")
            continue
        found.add(name, PASS, path)
        return
    found.add(name, FAIL, f"{files[0]} found, cannot be loaded", "look at the loader's text for what it lacks",
              "\n".join(errors))  # fmt: skip


_IMPORT = """import importlib, sys
module = importlib.import_module({name!r})
print("VERSION", getattr(module, "__version__", "unknown"))
print("FILE", getattr(module, "__file__", None))
"""


def _probe_packages(found, machine, unasked, asked):
    machine["packages"] = {}
    for name in list(asked) + [name for name in unasked if name not in asked]:
        step = f"import {name}"
        try:
            is_there = importlib.util.find_spec(name) is not None
            reason = f"No module named {name!r}"
        except (ImportError, ValueError) as error:
            is_there, reason = False, str(error)
        if not is_there and name not in asked:
            found.add(step, ABSENT, "not installed")
            continue
        if not is_there:
            found.add(step, FAIL, reason, "install it, or add its folder to PYTHONPATH",
                      "searched: " + ", ".join(sys.path))  # fmt: skip
            continue
        # In a process of its own: a vendor's module may end the one that imports it.
        started = time.time()
        try:
            # PYTHONPATH, not sys.path: what only this process can see, the vendor's server cannot either.
            out = subprocess.run([sys.executable, "-c", _IMPORT.format(name=name)], capture_output=True,
                                 text=True, timeout=IMPORT_SECONDS)  # fmt: skip
        except subprocess.TimeoutExpired:
            found.add(step, FAIL, f"no end after {IMPORT_SECONDS} s", "import it by hand and look where it hangs")
            continue
        lines = [line for line in out.stdout.splitlines() if line.startswith(("VERSION", "FILE"))]
        said = dict(line.partition(" ")[::2] for line in lines)
        if out.returncode:
            last = out.stderr.strip().splitlines()[-1] if out.stderr.strip() else "nothing on stderr"
            ended = f"ended by signal {-out.returncode}: {last}" if out.returncode < 0 else last
            found.add(step, FAIL, ended, "the text above names the file or symbol that is missing",
                      out.stderr)  # fmt: skip
            continue
        machine["packages"][name] = said.get("VERSION")
        found.add(step, PASS, "{} in {:.1f} s, {}".format(said.get("VERSION"), time.time() - started, said.get("FILE")))


def _shared_objects(libraries, modules):
    """Files given, those of folders given, and those of the packages, in that order."""
    files = [path for path in libraries if os.path.isfile(path)]
    folders = [path for path in libraries if os.path.isdir(path)]
    for name in modules:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue  # its own step has said so
        folders += list(spec.submodule_search_locations or []) if spec is not None else []
        if spec is not None and spec.origin and ".so" in os.path.basename(spec.origin):
            files.append(spec.origin)
    for folder in folders:
        for root, _, names in os.walk(folder):
            files += [os.path.join(root, name) for name in sorted(names) if re.search(r"\.so(\.\d+)*$", name)]
    return list(dict.fromkeys(files))


def _probe_symbols(found, symbols, libraries, modules):
    files = _shared_objects(libraries, modules)
    for path in libraries:
        if not os.path.exists(path):
            found.add(f"library {path}", FAIL, "nothing there", "correct the path of --lib")
    for symbol in symbols:
        step = f"symbol {symbol}"
        results = [(path, *find_symbol(path, symbol)) for path in files]
        good = [(path, text) for path, status, text in results if status == PASS]
        if good:
            found.add(step, PASS, "{}: {}".format(*good[0]), error=None)
            continue
        detail = "\n".join(
            [f"{path}: {text}" for path, _, text in results if not text.startswith("absent")]
            + [f"{path}: {text}" for path, _, text in results if text.startswith("absent")][:FILES_SHOWN]
        )
        found.add(step, FAIL, f"in none of {len(files)} shared objects",
                  "look with --lib in other folders, or ask the vendor for a build that has it" if files else
                  "say where to look: --lib FILE or DIR, or --module NAME", detail)  # fmt: skip


# ---- command line


def _numbers(text):
    """``0,2,5-8`` -> [0, 2, 5, 6, 7, 8]."""
    found = []
    for part in text.split(","):
        match = re.match(r"^(\d+)(?:-(\d+))?$", part.strip())
        if not match:
            raise argparse.ArgumentTypeError(f"expected numbers such as 0,2,5-8, found {text!r}")
        found += range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)
    return found


def _range(text):
    match = re.match(r"^(\d+):(\d+)$", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected FIRST:END such as 0:4, found {text!r}")
    return int(match.group(1)), int(match.group(2))


def _bytes(text):
    match = re.match(r"^(\d+(?:\.\d+)?)([kMG]?)B?$", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected bytes such as 500M or 2G, found {text!r}")
    return int(float(match.group(1)) * {"": 1, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match.group(2)])


def _parser():
    parser = argparse.ArgumentParser(
        prog="field_kit.py", description="Probe a machine and record a model's tensors; one file, nothing to install.",
        epilog="example: python field_kit.py probe --module ixformer --symbol vllm_moe_topk_softmax",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command")
    sub = commands.add_parser(
        "probe", help="what Python, torch, the card and the vendor's libraries can do",
        description="PASS or FAIL for each step, with the next step to take. Exit code 1 where one failed.",
        epilog="example: python field_kit.py probe --module ixformer --symbol vllm_moe_topk_softmax --json probe.json",
    )  # fmt: skip
    sub.add_argument("--module", metavar="NAME", action="append", default=[],
                     help="package that must import; repeat it")  # fmt: skip
    sub.add_argument("--symbol", metavar="NAME", action="append", default=[], help="symbol that a .so must define")
    sub.add_argument("--lib", metavar="FILE|DIR", action="append", default=[], help="where to look for .so files")
    sub.add_argument("--device", metavar="DEVICE", help="cpu or cuda:N (default: the first card, else cpu)")
    sub.add_argument("--quick", action="store_true", help="do not import packages that were not asked for")
    sub.add_argument("--json", metavar="FILE|-", help="write everything as JSON")
    sub = commands.add_parser(
        "record", help="run a script and record the first decoder that it calls",
        description="Runs SCRIPT.py as it would run by itself and records the first model with decoder layers that it "
        "calls in this process. An engine that runs its model in another process must be told not to "
        "(vLLM: VLLM_ENABLE_V1_MULTIPROCESSING=0 and enforce_eager=True).",
        epilog="example: python field_kit.py record --out run --taps '*.gdn.*' --layers 0-3 generate.py --prompt Hello",
    )  # fmt: skip
    sub.add_argument("--out", metavar="DIR", required=True, help="bundle to write, a new or empty directory")
    sub.add_argument("--taps", metavar="PATTERN", action="append", help="such as '*.gdn.*'; repeat it (all)")
    sub.add_argument("--layers", metavar="N,N-N", type=_numbers, help="layers alone, such as 0,2,5-8 (all)")
    sub.add_argument("--steps", metavar="FIRST:END", type=_range, help="passes to record, from 0 (all)")
    sub.add_argument("--skip", metavar="N", type=int, default=0,
                     help="passes at the beginning that are not counted, such as an engine's warm-up (0)")  # fmt: skip
    sub.add_argument("--cap", metavar="BYTES", type=_bytes, default=CAP_BYTES, help="most bytes of tensors (1G)")
    sub.add_argument("--map", metavar="FILE", help="JSON, tap points to the names of modules")
    sub.add_argument("--raw", action="store_true", help="every module by its own name; map them at home")
    sub.add_argument("--function", metavar="MODULE:NAME[=KIND]", action="append", default=[],
                     help="function that is no module; KIND: {}".format(", ".join(KINDS)))
    sub.add_argument("--no-tensors", action="store_true", help="statistics alone")
    sub.add_argument("--class", metavar="NAME", dest="class_name", help="class of the model, where several are called")
    sub.add_argument("script", metavar="SCRIPT.py")
    sub.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    return parser


def main(argv=None):
    """0 fine, 1 a step or the script failed, 2 unusable input."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return _run_probe(options) if options.command == "probe" else _run_record(options)
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run_probe(options):
    found, machine = probe(options.module, options.symbol, options.lib, options.device, options.quick)
    content = found.to_json(machine)
    text = json.dumps(content, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        for line in found.lines():
            print(line)
        print(content["verdict"])
        if options.json is not None:
            try:
                with open(options.json, "w", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                raise KitError(f"--json {options.json}: cannot be written: {error}") from error
    return 1 if content["cause_id"] else 0


@contextlib.contextmanager
def _watching(tape, class_name):
    """Attach the tape to the first decoder that is called. Ends itself then: later calls cost nothing."""
    torch = _torch()
    owner = torch.nn.Module
    original = owner.__call__

    def restore():
        owner.__call__ = original

    def is_wanted(module):
        if class_name is not None:
            return type(module).__name__ == class_name
        return tape.raw or bool(decoder_layers(module)[1])

    def called(module, *args, **kwargs):
        if tape.model is None and is_wanted(module):
            restore()
            tape.attach(module)
            print(f"field_kit: recording {type(module).__name__}", file=sys.stderr)
        return original(module, *args, **kwargs)

    owner.__call__ = called
    try:
        yield
    finally:
        restore()


def _run_record(options):
    if not os.path.isfile(options.script):
        raise KitError(f"{options.script}: expected a Python script, found none")
    _torch()
    tape = Tape(
        options.out, options.taps or ("*",), options.layers, options.steps, options.cap, options.map, options.raw,
        options.function, not options.no_tensors, options.skip,
    )  # fmt: skip
    before, code, problem = (sys.argv, list(sys.path)), 0, None
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    # A script that imports the kit itself gets this one, not a second copy.
    sys.modules.setdefault("field_kit", sys.modules[__name__])
    try:
        with _watching(tape, options.class_name):
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        problem = error if code else None
    except KitError:
        tape.detach()
        tape.bundle.close()
        raise
    except BaseException as error:  # noqa: BLE001  the script's own, printed in full below
        traceback.print_exc()
        code, problem = 1, error
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
    tape.close(problem)
    if tape.model is None:
        print(f"error: {options.script}: expected a call of a model with decoder layers in this process, found none; "
              "an engine may run it in another (vLLM: set VLLM_ENABLE_V1_MULTIPROCESSING=0), or give --class NAME or "
              "--raw", file=sys.stderr)  # fmt: skip
        return code or 2
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
