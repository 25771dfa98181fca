"""Model configuration: a Hugging Face `config.json` read field by field into one frozen, checked record.

>>> config = ModelConfig.from_file("data/miniature/config.json")
>>> config.layer_types[3], config.rotary_dim
('full_attention', 16)

Three families share this record: `qwen3_5_moe` (Qwen3.5 and Qwen3.6 mixture of experts), `qwen3_5` (their
dense relatives) and `qwen3_next`. A file may be nested (text model under `text_config`) or flat, and may hold
its rotary settings in `rope_parameters` or, as older files do, directly beside the other fields.

Nothing that changes what the model computes is filled in from a class default: such a field is either in the
file or an error that names it. The few fields that may be absent because the family fixes their value leave a
line in `ModelConfig.assumed`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError

LINEAR, FULL = "linear_attention", "full_attention"
SPARSE, DENSE = "sparse", "dense"

# `model_type` in the file -> family. The `_text` names are the text part of a nested file, or a flat file.
_MODEL_TYPES = {
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
}
_ARCHITECTURE_STEM = {"qwen3_5_moe": "Qwen3_5Moe", "qwen3_5": "Qwen3_5", "qwen3_next": "Qwen3Next"}

_SIZE_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
_EXPERT_FIELDS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip

# Far above any published model. Names of tensors are listed per layer and expert before a file is compared
# with them, so a damaged number here would exhaust the memory.
_LARGEST = {"num_hidden_layers": 4_096, "num_experts": 16_384}

# Fields of the text model that real nested files may state once, on the outer object.
_OUTER_FIELDS = {"tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "bos_token_id"}
_ROPE_VALUES = ("rope_theta", "partial_rotary_factor", "mrope_section")
_ROPE_KEYS = {"rope_type", "type", "mrope_interleaved", *_ROPE_VALUES}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything the model's shape and arithmetic depend on. Field names are those of the Hugging Face file.

    Building one directly checks it as thoroughly as reading it from a file; `dataclasses.replace` checks
    again. Raises `ConfigError` for a value that is out of range or contradicts another field.
    """

    family: str  # "qwen3_5_moe", "qwen3_5" (dense) or "qwen3_next"
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str  # always "silu"
    tie_word_embeddings: bool

    layer_types: tuple[str, ...]  # "linear_attention" or "full_attention" per layer
    # full attention; head_dim is a field of its own and not hidden_size / num_attention_heads
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, ...] | None = None  # text alone: the three-axis rotation equals the plain one
    # linear attention (gated delta rule)
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    mlp_types: tuple[str, ...]  # "sparse" (experts) or "dense" per layer
    intermediate_size: int | None = None  # width of the dense MLPs; None when there is none
    # mixture of experts; all None in the dense family
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None  # top-k weights divided by their sum; always True in qwen3_5_moe

    mtp_num_hidden_layers: int = 0  # layers of the multi-token-prediction head: 0 or 1
    eos_token_id: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None  # what the file says of its weights; the loader goes by the weights themselves
    # Used by training alone, so a file without them can still be run.
    initializer_range: float = 0.02
    router_aux_loss_coef: float = 0.001

    # One line per field that was absent and got the one value its family allows. No part of equality.
    assumed: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def key_dim(self) -> int:
        """Columns of all linear-attention key heads together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Columns of all linear-attention value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def rotary_dim(self) -> int:
        """Leading columns of each attention head that are rotated; the rest carry no position."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def is_moe(self) -> bool:
        """Whether the family routes tokens to experts."""
        return self.num_experts is not None

    def is_assumed(self, name: str) -> bool:
        """Whether the file did not state this field, so that the family's value stands for it."""
        return any(line.startswith(f"{name} = ") for line in self.assumed)

    @property
    def mtp_mlp_type(self) -> str:
        """MLP kind of the multi-token-prediction layer: experts wherever the family has them."""
        return SPARSE if self.is_moe else DENSE

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read a `config.json`, or the one in a checkpoint directory. Raises `ConfigError`."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_hf(read_json_object(path), source=str(path))

    @classmethod
    def from_hf(cls, raw: dict[str, Any], *, source: str = "config.json") -> "ModelConfig":
        """Read the parsed content of a `config.json`; `source` is the file name used in messages.

        Raises `ConfigError` with file, field, expected and found for anything missing, contradictory or
        unsupported.
        """
        try:
            return cls(**_read_fields(raw))
        except ConfigError as fault:
            raise ConfigError(f"{source}: {fault}") from None

    def to_hf(self, *, nested: bool | None = None) -> dict[str, Any]:
        """The content of a `config.json` that transformers loads and that reads back as this same record.

        nested: the text model under `text_config` as in official Qwen3.5 files (the default for those
        families), or flat as the text-only classes save it. Qwen3-Next is always flat.
        """
        if nested is None:
            nested = self.family != "qwen3_next"
        if nested and self.family == "qwen3_next":
            raise ConfigError("qwen3_next has no nested layout; pass nested=False")
        stem = _ARCHITECTURE_STEM[self.family]
        if not nested:
            model_type = self.family if self.family == "qwen3_next" else f"{self.family}_text"
            return {"architectures": [f"{stem}ForCausalLM"], "model_type": model_type, **_text_fields(self)}
        return {
            "architectures": [f"{stem}ForConditionalGeneration"],
            "model_type": self.family,
            "tie_word_embeddings": self.tie_word_embeddings,
            **({"dtype": self.dtype} if self.dtype else {}),
            "text_config": {"model_type": f"{self.family}_text", **_text_fields(self)},
        }


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Parse a JSON file whose top level must be an object. Duplicate keys, NaN and Infinity are refused.

    Raises `ConfigError`.
    """
    path = Path(path)
    try:
        value = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
        )
    except FileNotFoundError:
        raise ConfigError(f"{path}: file not found; expected a JSON file of a model checkpoint") from None
    except OSError as fault:
        raise ConfigError(f"{path}: cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {fault}") from None
    except json.JSONDecodeError as fault:
        where = f"line {fault.lineno} column {fault.colno}"
        raise ConfigError(f"{path}: invalid JSON at {where}: {fault.msg}; expected a JSON object") from None
    except RecursionError:
        raise ConfigError(f"{path}: JSON is nested too deeply; expected a plain object of fields") from None
    except ValueError as fault:  # an integer of thousands of digits
        raise ConfigError(f"{path}: invalid JSON: {fault}; expected a JSON object") from None
    except ConfigError as fault:
        raise ConfigError(f"{path}: {fault}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object at the top level, found {_describe(value)}")
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise ConfigError(f"key {name!r} appears twice in one JSON object; expected it once")
        value[name] = item
    return value


def _refuse_constant(name: str) -> None:
    raise ConfigError(f"{name} is not JSON; expected a finite number")


# ============================================================================================================
# Reading
# ============================================================================================================


class _Fields:
    """Typed access to the text model's fields of one file. A JSON null counts as absent.

    In a nested file, a field of `text_config` that the outer object repeats must agree with it: some
    exporters copy fields outwards, and programs differ in which copy they believe.
    """

    def __init__(self, raw: dict[str, Any]):
        if not isinstance(raw, dict):
            raise ConfigError(f"expected a JSON object at the top level, found {_describe(raw)}")
        nested = raw.get("text_config")
        if nested is not None and not isinstance(nested, dict):
            raise ConfigError(f"text_config: expected a JSON object, found {_describe(nested)}")
        self.outer = raw if nested is not None else {}
        self.text = nested if nested is not None else raw
        self.prefix = "text_config." if nested is not None else ""

    def get(self, name: str) -> Any:
        inner, outer = self.text.get(name), self.outer.get(name)
        if inner is not None and outer is not None and not _same(inner, outer):
            raise ConfigError(
                f"{name} is {_describe(outer)} at the top level but {_describe(inner)} in text_config; "
                "expected the same value, remove the wrong one"
            )
        return outer if inner is None and name in _OUTER_FIELDS else inner

    def wrong(self, name: str, expected: str, found: Any) -> ConfigError:
        if found is None:
            return ConfigError(f"{self.prefix}{name} is missing: expected {expected}")
        return ConfigError(f"{self.prefix}{name}: expected {expected}, found {_describe(found)}")

    def integer(self, name: str, expected: str = "a positive integer", *, low: int = 1) -> int:
        value = self.get(name)
        if type(value) is not int or value < low:  # a bool is an int in Python, not in JSON
            raise self.wrong(name, expected, value)
        if value > _LARGEST.get(name, value):
            raise self.wrong(name, f"{expected} of at most {_LARGEST[name]}", value)
        return value

    def number(self, name: str, expected: str, *, low: float | None = None, value: Any = None) -> float:
        """A finite number, at least `low`, or positive without it. `value`: one that was found elsewhere."""
        value = self.get(name) if value is None else value
        finite = type(value) in (int, float) and math.isfinite(value)
        if not finite or (value <= 0 if low is None else value < low):
            raise self.wrong(name, expected, value)
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if type(value) is not bool:
            raise self.wrong(name, "true or false", value)
        return value

    def only(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse any value but those the model computes with; absent is fine, the classes fix it too."""
        value = self.get(name)
        if value is not None and not any(_same(value, one) for one in allowed):
            raise self.wrong(name, f"{json.dumps(allowed[0])} ({why})", value)

    def optional(self, read: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """None for an absent field, else what the reader makes of it."""
        return None if self.get(name) is None else read(name, *args, **kwargs)


def _read_fields(raw: dict[str, Any]) -> dict[str, Any]:
    fields = _Fields(raw)
    family = _read_family(raw, fields)
    _refuse_unsupported(raw, fields)
    assumed: list[str] = []
    values: dict[str, Any] = {"family": family}
    for name in _SIZE_FIELDS:
        note = "; it is not hidden_size / num_attention_heads in these models" if name == "head_dim" else ""
        values[name] = fields.integer(name, "a positive integer" + note)
    layers = values["num_hidden_layers"]
    values |= {
        "layer_types": _read_layer_types(fields, layers),
        "hidden_act": fields.get("hidden_act"),
        "rms_norm_eps": fields.number("rms_norm_eps", "a positive number"),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings"),
        "dtype": _read_dtype(fields),
        "eos_token_id": _read_eos(fields),
        "bos_token_id": fields.optional(fields.integer, "bos_token_id", "a token id or null", low=0),
        "mtp_num_hidden_layers": _read_mtp_layers(fields, assumed),
    }
    if values["hidden_act"] != "silu":
        raise fields.wrong("hidden_act", '"silu"', values["hidden_act"])
    for name in ("initializer_range", "router_aux_loss_coef"):
        number = fields.optional(fields.number, name, "a number that is not negative", low=0.0)
        if number is not None:
            values[name] = number
    values |= _read_rope(fields)
    if family == "qwen3_5":
        fields.only("num_experts", (0,), "the dense family has no experts, qwen3_5_moe has")
        values |= {"mlp_types": (DENSE,) * layers, "intermediate_size": fields.integer("intermediate_size")}
    else:
        values |= _read_moe(fields, family, layers, assumed)
    return values | {"assumed": tuple(assumed)}


def _read_family(raw: dict[str, Any], fields: _Fields) -> str:
    expected = f"one of {', '.join(_MODEL_TYPES)}"
    outer, inner = raw.get("model_type"), fields.text.get("model_type")
    if outer is None:
        raise ConfigError(f"model_type is missing: expected {expected}")
    for name, value in (("model_type", outer), (fields.prefix + "model_type", inner)):
        if value is not None and (not isinstance(value, str) or value not in _MODEL_TYPES):
            raise ConfigError(f"{name}: expected {expected}, found {_describe(value)}")
    if inner is not None and _MODEL_TYPES[inner] != _MODEL_TYPES[outer]:
        raise ConfigError(
            f"model_type is {outer!r} but text_config.model_type is {inner!r}; expected the same family"
        )
    return _MODEL_TYPES[outer]


def _refuse_unsupported(raw: dict[str, Any], fields: _Fields) -> None:
    """Settings that name a computation this model lacks: ignoring one gives plausible wrong output."""
    for level, name in ((raw, "auto_map"), (fields.text, fields.prefix + "auto_map")):
        if level.get("auto_map") is not None:
            raise ConfigError(
                f"{name}: expected no code of the checkpoint's own, found {_describe(level['auto_map'])}; "
                "remote code is never run, remove the field to use the built-in model"
            )
    fields.only("attention_bias", (False,), "projections have no bias")
    fields.only("attn_output_gate", (True,), "attention output is always gated")
    fields.only("mtp_use_dedicated_embeddings", (False,), "the prediction head shares the embeddings")
    fields.only("mamba_ssm_dtype", ("float32",), "the recurrent state is kept in float32")
    fields.only("use_sliding_window", (False,), "attention sees the whole sequence")
    fields.only("output_gate_type", ("silu", "swish"), "gate after the delta rule")
    fields.only("attention_dropout", (0,), "the model has no dropout")


def _read_layer_types(fields: _Fields, layers: int) -> tuple[str, ...]:
    interval = fields.optional(fields.integer, "full_attention_interval")
    derived = None
    if interval is not None:
        derived = tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(layers))
    listed = fields.get("layer_types")
    if listed is None and derived is not None:
        return derived
    if not isinstance(listed, list):
        expected = "a list with one entry per layer, or full_attention_interval in its place"
        raise fields.wrong("layer_types", expected, listed)
    if len(listed) != layers:
        raise fields.wrong("layer_types", f"{layers} entries, one per hidden layer", listed)
    for layer, kind in enumerate(listed):
        if kind not in (LINEAR, FULL):
            raise fields.wrong(f"layer_types[{layer}]", f'"{LINEAR}" or "{FULL}"', kind)
        if derived is not None and kind != derived[layer]:
            raise ConfigError(
                f"{fields.prefix}layer_types[{layer}] is {kind!r} but full_attention_interval {interval} "
                f"makes it {derived[layer]!r}; expected both to agree, remove the wrong one"
            )
    return tuple(listed)


def _read_rope(fields: _Fields) -> dict[str, Any]:
    """Rotary settings from `rope_parameters`, `rope_scaling` or beside the other fields; all must agree."""
    places: list[tuple[str, dict[str, Any]]] = []
    for name in ("rope_parameters", "rope_scaling"):
        group = fields.get(name)
        if group is None:
            continue
        if not isinstance(group, dict):
            raise fields.wrong(name, "a JSON object", group)
        # "mrope" is an older name of the plain rotation in three axes; every other type rescales frequencies.
        for key in ("rope_type", "type"):
            if group.get(key) not in (None, "default", "mrope"):
                raise fields.wrong(f"{name}.{key}", '"default"', group[key])
        for key in sorted(set(group) - _ROPE_KEYS):
            raise fields.wrong(f"{name}.{key}", f"only the keys {', '.join(sorted(_ROPE_KEYS))}", group[key])
        if group.get("mrope_interleaved") not in (None, True):
            raise fields.wrong(f"{name}.mrope_interleaved", "true", group["mrope_interleaved"])
        places.append((f"{name}.", group))
    places.append(("", {name: fields.get(name) for name in _ROPE_VALUES}))

    def agreed(key: str) -> tuple[str, Any]:
        stated = [(prefix + key, group[key]) for prefix, group in places if group.get(key) is not None]
        for name, value in stated[1:]:
            if not _same(value, stated[0][1]):
                raise ConfigError(
                    f"{fields.prefix}{stated[0][0]} is {_describe(stated[0][1])} but {fields.prefix}{name} "
                    f"is {_describe(value)}; expected the same value, remove the wrong one"
                )
        return stated[0] if stated else (places[0][0] + key, None)

    theta_name, theta = agreed("rope_theta")
    factor_name, factor = agreed("partial_rotary_factor")
    section_name, section = agreed("mrope_section")
    is_section = isinstance(section, list) and len(section) == 3 and all(type(n) is int for n in section)
    if section is not None and not is_section:
        raise fields.wrong(section_name, "three integers", section)
    return {
        "rope_theta": fields.number(theta_name, "a positive number, the rotary base", value=theta),
        "partial_rotary_factor": fields.number(factor_name, "the rotated share of head_dim", value=factor),
        "mrope_section": None if section is None else tuple(section),
    }


def _read_moe(fields: _Fields, family: str, layers: int, assumed: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: fields.integer(name) for name in _EXPERT_FIELDS}
    if family == "qwen3_5_moe":
        fields.only("decoder_sparse_step", (1,), "every layer of this family is sparse")
        fields.only("mlp_only_layers", ([],), "every layer of this family is sparse")
        fields.only("norm_topk_prob", (True,), "this family always renormalises the top-k weights")
        values["mlp_types"] = (SPARSE,) * layers
    else:
        step, dense_layers = fields.integer("decoder_sparse_step"), fields.get("mlp_only_layers")
        numbers = dense_layers if isinstance(dense_layers, list) else [None]
        if any(type(layer) is not int or not 0 <= layer < layers for layer in numbers):
            raise fields.wrong("mlp_only_layers", f"a list of layer numbers below {layers}", dense_layers)
        values["mlp_types"] = tuple(
            DENSE if layer in dense_layers or (layer + 1) % step else SPARSE for layer in range(layers)
        )
        if DENSE in values["mlp_types"]:
            values["intermediate_size"] = fields.integer("intermediate_size")
    norm = fields.optional(fields.boolean, "norm_topk_prob")
    if norm is None:
        # Reading "absent" as false, as some programs do, shrinks the output of every expert layer.
        assumed.append(f"norm_topk_prob = true (absent from the file; family default of {family})")
    values["norm_topk_prob"] = True if norm is None else norm
    return values


def _read_mtp_layers(fields: _Fields, assumed: list[str]) -> int:
    names = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    stated = {
        name: fields.integer(name, "0 or 1", low=0) for name in names if fields.get(name) is not None
    }
    if not stated:
        assumed.append("mtp_num_hidden_layers = 0 (absent from the file)")
        return 0
    if len(set(stated.values())) > 1:
        raise ConfigError(f"{' and '.join(names)} disagree: expected the same value, found {stated}")
    return next(iter(stated.values()))


def _read_dtype(fields: _Fields) -> str | None:
    stated = {name: fields.get(name) for name in ("dtype", "torch_dtype") if fields.get(name) is not None}
    for name, value in stated.items():
        if not isinstance(value, str):
            raise fields.wrong(name, "the name of a dtype", value)
    if len(set(stated.values())) > 1:
        raise ConfigError(f"dtype and torch_dtype disagree: expected the same value, found {stated}")
    return next(iter(stated.values()), None)


def _read_eos(fields: _Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise fields.wrong("eos_token_id", "a token id, a list of them or null", value)
    return tuple(ids)


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON values: 1 equals 1.0 but not true."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _describe(value: Any) -> str:
    """A found value with its JSON type, short enough for one line."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{kinds[type(value)]} {shown}" if type(value) in kinds else shown


# ============================================================================================================
# Checking
# ============================================================================================================


def _require(condition: bool, name: str, expected: str, found: Any) -> None:
    if not condition:
        raise ConfigError(f"{name}: expected {expected}, found {_describe(found)}")


def _check(c: ModelConfig) -> None:
    """Rules that hold for every configuration, however it was made. Raises `ConfigError`."""
    _require(c.family in _ARCHITECTURE_STEM, "family", f"one of {', '.join(_ARCHITECTURE_STEM)}", c.family)
    for name in _SIZE_FIELDS:
        value = getattr(c, name)
        _require(type(value) is int and value >= 1, name, "a positive integer", value)
    _require(c.hidden_act == "silu", "hidden_act", '"silu"', c.hidden_act)
    for name, kinds in (("layer_types", (LINEAR, FULL)), ("mlp_types", (SPARSE, DENSE))):
        values = getattr(c, name)
        fits = isinstance(values, tuple) and len(values) == c.num_hidden_layers and set(values) <= set(kinds)
        expected = f"a tuple of {c.num_hidden_layers} entries out of {' and '.join(kinds)}"
        _require(fits, name, expected, list(values))
    multiples = (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    )
    for name, divisor in multiples:
        value, by = getattr(c, name), getattr(c, divisor)
        _require(value % by == 0, name, f"a multiple of {divisor} {by}", value)
    for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
        _require(getattr(c, name) > 0, name, "a positive number", getattr(c, name))
    rotated = c.head_dim * c.partial_rotary_factor
    _require(
        c.partial_rotary_factor <= 1 and rotated == c.rotary_dim and c.rotary_dim % 2 == 0,
        "partial_rotary_factor",
        f"head_dim {c.head_dim} x factor to be an even integer of at most {c.head_dim} (it is {rotated:g})",
        c.partial_rotary_factor,
    )
    if c.mrope_section is not None:
        fits = min(c.mrope_section) >= 0 and sum(c.mrope_section) == c.rotary_dim // 2
        expected = f"parts that sum to half the rotary dimension, {c.rotary_dim // 2}"
        _require(fits, "mrope_section", expected, list(c.mrope_section))
    _check_mlps(c)
    _require(c.mtp_num_hidden_layers in (0, 1), "mtp_num_hidden_layers", "0 or 1", c.mtp_num_hidden_layers)
    bos = () if c.bos_token_id is None else (c.bos_token_id,)
    for name, tokens in (("eos_token_id", c.eos_token_id), ("bos_token_id", bos)):
        for token in tokens:
            _require(0 <= token < c.vocab_size, name, f"a token id below vocab_size {c.vocab_size}", token)


def _check_mlps(c: ModelConfig) -> None:
    if c.family == "qwen3_5":
        for name in (*_EXPERT_FIELDS, "norm_topk_prob"):
            _require(getattr(c, name) is None, name, "None in the dense family qwen3_5", getattr(c, name))
        _require(SPARSE not in c.mlp_types, "mlp_types", "only dense layers in qwen3_5", list(c.mlp_types))
    else:
        for name in _EXPERT_FIELDS:
            value = getattr(c, name)
            _require(type(value) is int and value >= 1, name, "a positive integer", value)
        top_k, expected = c.num_experts_per_tok, f"at most num_experts {c.num_experts}"
        _require(top_k <= c.num_experts, "num_experts_per_tok", expected, top_k)
        _require(type(c.norm_topk_prob) is bool, "norm_topk_prob", "True or False", c.norm_topk_prob)
    if c.family == "qwen3_5_moe":
        _require(DENSE not in c.mlp_types, "mlp_types", "no dense layer in qwen3_5_moe", list(c.mlp_types))
        _require(c.norm_topk_prob is True, "norm_topk_prob", "True in family qwen3_5_moe", c.norm_topk_prob)
    width = c.intermediate_size
    if DENSE in c.mlp_types:
        fits = type(width) is int and width >= 1
        _require(fits, "intermediate_size", "a positive integer for the dense layers", width)
    else:
        _require(width is None, "intermediate_size", "None where no layer is dense", width)


# ============================================================================================================
# Writing
# ============================================================================================================


def _text_fields(c: ModelConfig) -> dict[str, Any]:
    """The text model's part of a file: every field of the official ones that is read or checked here."""
    factor = c.partial_rotary_factor
    rope = {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": factor}
    if c.mrope_section is not None:
        rope |= {"mrope_section": list(c.mrope_section), "mrope_interleaved": True}
    fields: dict[str, Any] = {name: getattr(c, name) for name in _SIZE_FIELDS} | {
        "layer_types": list(c.layer_types),
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "rope_parameters": rope,
        # In both places: some readers know the outer one alone, and transformers puts 0.25 there if absent.
        "partial_rotary_factor": factor,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": c.mtp_num_hidden_layers,
        "mtp_use_dedicated_embeddings": False,
        "initializer_range": c.initializer_range,
        "router_aux_loss_coef": c.router_aux_loss_coef,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id[0] if len(c.eos_token_id) == 1 else list(c.eos_token_id) or None,
    }
    if c.dtype is not None:
        fields["dtype"] = c.dtype
    if c.intermediate_size is not None:
        fields["intermediate_size"] = c.intermediate_size
    if c.is_moe:
        fields |= {name: getattr(c, name) for name in _EXPERT_FIELDS}
    if c.family == "qwen3_next":
        dense_layers = [layer for layer, kind in enumerate(c.mlp_types) if kind == DENSE]
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers}
        fields["norm_topk_prob"] = c.norm_topk_prob
    return fields
