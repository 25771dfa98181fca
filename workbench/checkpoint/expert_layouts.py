"""Layouts of routed experts: under which names, in which shapes and in which order of rows a layer's experts lie.

Canonical is `stacked`. E experts, D hidden width, I expert width; gate rows come before up rows unless a layout is
`interleaved` (gate row 0, up row 0, gate row 1, ...). `N` is the number of an expert.

    stacked               gate_up_proj [E, 2I, D]   down_proj [E, D, I]
    transposed            gate_up_proj [E, D, 2I]   down_proj [E, I, D]
    per_expert            N.gate_proj.weight, N.up_proj.weight [I, D]   N.down_proj.weight [D, I]
    w1_w2_w3              w1, w3 [E, I, D]          w2 [E, D, I]            w1 gate, w3 up, w2 down
    w1_w2_w3_per_expert   N.w1.weight, N.w3.weight [I, D]   N.w2.weight [D, I]
    w13_w2                w13 [E, 2I, D]            w2 [E, D, I]
    w13_w2_per_expert     N.w13.weight [2I, D]      N.w2.weight [D, I]

and `stacked_interleaved`, `transposed_interleaved`, `w13_w2_interleaved`, `w13_w2_per_expert_interleaved`. No shape
shows the order of rows, so these are never detected, only told.

Names may end in `.weight` or `_weight` in every layout, and may have a prefix that ends in `experts.`. What shapes
leave open is refused, not guessed: 2I == D or I == D where a stack may be its own transpose, and I == D where `w1`,
`w2` and `w3` are all square (projects differ in which of them is down). `per_expert` and `w13_w2_per_expert` are never
open: their names say which matrix it is, and a linear layer's weight is [out, in]. Functions of this module know only
names and shapes and make no exception. Reading a checkpoint (`read_checkpoint`) knows two things more: what a file's
metadata says (`expert_layout`), and the family, which fixes the layout of the names of its published checkpoints; the
latter is told in a note.

Every function here moves bits and computes nothing, so it holds for any dtype, NaN and 8-bit floats included.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from torch import Tensor

from workbench.errors import CheckpointError

GATE, UP, DOWN = "gate", "up", "down"
#: Canonical parts and the matrices they hold, in order.
PARTS: dict[str, tuple[str, ...]] = {"gate_up": (GATE, UP), "down": (DOWN,)}

_KEY = re.compile(r"(?:(0|[1-9]\d*)\.)?(gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)(?:[._]weight)?")


class HasExpertSizes(Protocol):
    """What must be known of a layer; a `ModelConfig` has it."""

    @property
    def num_experts(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """E, D and I of a layer's experts, for use without a configuration."""

    num_experts: int
    hidden_size: int
    moe_intermediate_size: int


@dataclass(frozen=True, slots=True, eq=False)  # there is one of each
class Layout:
    """One way to hold a layer's experts; `leaves` maps a tensor's name to the matrices in it, in order."""

    name: str
    leaves: Mapping[str, tuple[str, ...]]
    is_per_expert: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False

    def __str__(self) -> str:
        return self.name

    def keys(self, sizes: HasExpertSizes, part: str | None = None) -> list[str]:
        """Names of all tensors, or of those of one of PARTS, expert by expert."""
        leaves = [leaf for leaf, held in self.leaves.items() if part is None or held[0] in PARTS[part]]
        if not self.is_per_expert:
            return leaves
        return [f"{expert}.{leaf}.weight" for expert in range(sizes.num_experts) for leaf in leaves]

    def shape(self, key: str, sizes: HasExpertSizes) -> tuple[int, ...]:
        """Shape of the tensor `key`."""
        held = self.leaves[_leaf(key)]
        hidden, width = sizes.hidden_size, sizes.moe_intermediate_size
        rows, columns = (hidden, width) if held == (DOWN,) else (len(held) * width, hidden)
        if self.is_transposed:
            rows, columns = columns, rows
        return (rows, columns) if self.is_per_expert else (sizes.num_experts, rows, columns)

    def matrices(self, key: str, sizes: HasExpertSizes) -> list[tuple[str, int]]:
        """(matrix, expert) for all that the tensor `key` holds."""
        experts = [_expert(key)] if self.is_per_expert else range(sizes.num_experts)
        return [(matrix, expert) for expert in experts for matrix in self.leaves[_leaf(key)]]

    def key(self, matrix: str, expert: int) -> str:
        """The tensor that holds a matrix of an expert."""
        leaf = next(leaf for leaf, held in self.leaves.items() if matrix in held)
        return f"{expert}.{leaf}.weight" if self.is_per_expert else leaf

    def view(self, tensor: Tensor, matrix: str, expert: int) -> Tensor:
        """A matrix as a view of the tensor `key(matrix, expert)`: gate and up [I, D], down [D, I]."""
        rows = tensor if self.is_per_expert else tensor[expert]
        if self.is_transposed:
            rows = rows.T
        held = next(held for held in self.leaves.values() if matrix in held)
        place = held.index(matrix)
        return rows[place :: len(held)] if self.is_interleaved else rows.chunk(len(held))[place]

    def doubt(self, sizes: HasExpertSizes) -> str | None:
        """Why shapes of these sizes do not tell this layout from another reading of the same names, or None."""
        hidden, width = sizes.hidden_size, sizes.moe_intermediate_size
        if (GATE, UP) in self.leaves.values() and not self.is_per_expert:
            if 2 * width == hidden:
                return f"2 x moe_intermediate_size equals hidden_size ({hidden}): {self._of(GATE)} may be its transpose"
            if width == hidden:
                return f"moe_intermediate_size equals hidden_size ({hidden}): {self._of(DOWN)} may be its transpose"
        if "w1" in self.leaves and width == hidden:
            return f"moe_intermediate_size equals hidden_size ({hidden}): w1, w2 and w3 all have the same shape"
        return None

    def _of(self, matrix: str) -> str:
        return next(leaf for leaf, held in self.leaves.items() if matrix in held)


_STACK = {"gate_up_proj": (GATE, UP), "down_proj": (DOWN,)}
_W13 = {"w13": (GATE, UP), "w2": (DOWN,)}
_W123 = {"w1": (GATE,), "w3": (UP,), "w2": (DOWN,)}
_PROJECTIONS = {"gate_proj": (GATE,), "up_proj": (UP,), "down_proj": (DOWN,)}

STACKED = Layout("stacked", _STACK)
PER_EXPERT = Layout("per_expert", _PROJECTIONS, is_per_expert=True)

#: All layouts by name.
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        STACKED,
        Layout("transposed", _STACK, is_transposed=True),
        PER_EXPERT,
        Layout("w1_w2_w3", _W123),
        Layout("w1_w2_w3_per_expert", _W123, is_per_expert=True),
        Layout("w13_w2", _W13),
        Layout("w13_w2_per_expert", _W13, is_per_expert=True),
        Layout("stacked_interleaved", _STACK, is_interleaved=True),
        Layout("transposed_interleaved", _STACK, is_transposed=True, is_interleaved=True),
        Layout("w13_w2_interleaved", _W13, is_interleaved=True),
        Layout("w13_w2_per_expert_interleaved", _W13, is_per_expert=True, is_interleaved=True),
    )
}


def layout_named(name: str | Layout) -> Layout:
    """A layout from its name. Raises `CheckpointError` for any other."""
    if isinstance(name, Layout):
        return name
    if name not in LAYOUTS:
        raise CheckpointError(f"expert layout: expected one of {', '.join(LAYOUTS)}, found {name!r}")
    return LAYOUTS[name]


# ============================================================================================================
# Names
# ============================================================================================================


def split_name(name: str) -> tuple[str, str] | None:
    """`layers.3.mlp.experts.7.w1.weight` -> (`layers.3.mlp.experts`, `7.w1.weight`); None for any other tensor.

    The second is the name that a `Layout` has for it: without `.weight` or `_weight` for a stack.
    """
    before, dot, rest = name.rpartition("experts.")
    found = _KEY.fullmatch(rest if dot else name)
    if found is None or (before and not before.endswith(".")):
        return None
    expert, leaf = found.groups()
    return before + dot.removesuffix("."), leaf if expert is None else f"{expert}.{leaf}.weight"


def _leaf(key: str) -> str:
    return key.removesuffix(".weight").rpartition(".")[2]


def _expert(key: str) -> int:
    return int(key.partition(".")[0])


def is_key(key: str, sizes: HasExpertSizes) -> bool:
    """Whether any layout of these sizes has a tensor of this name."""
    if key.endswith(".weight") and _expert(key) >= sizes.num_experts:
        return False
    return bool(_layouts_holding([key]))


def layouts_with(keys: Iterable[str], where: Callable[[str], str] = str) -> list[Layout]:
    """The layouts that have all of these names, the interleaved last; those with the fewest tensors if several fit.

    Raises `CheckpointError` where no layout has them all. `where` says where a tensor is, for messages.
    """
    keys = list(keys)
    fitting = _layouts_holding(keys)
    if not fitting:
        first, other = next(pair for pair in combinations(keys, 2) if not _layouts_holding(pair))
        raise CheckpointError(
            f"{where(other)}: expected the experts of a layer in one form, found them as {_form(first)} "
            f"({where(first)}) and as {_form(other)}; remove one of the two"
        )
    fewest = min(len(layout.leaves) for layout in fitting)
    return [layout for layout in fitting if len(layout.leaves) == fewest]


def _layouts_holding(keys: Iterable[str]) -> list[Layout]:
    found = {(key.endswith(".weight"), _leaf(key)) for key in keys}
    return [x for x in LAYOUTS.values() if found <= {(x.is_per_expert, leaf) for leaf in x.leaves}]


def _form(key: str) -> str:
    return "one tensor per expert" if key.endswith(".weight") else f"one tensor {key}"


# ============================================================================================================
# Shapes
# ============================================================================================================


def fitting_layout(
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Iterable[Layout],
    sizes: HasExpertSizes,
    where: Callable[[str], str] = str,
) -> Layout:
    """The first of `layouts` whose shapes these are; `CheckpointError` names what lies in the wrong place."""
    wrong = {layout: [key for key in shapes if shapes[key] != layout.shape(key, sizes)] for layout in layouts}
    layout = min(wrong, key=lambda layout: len(wrong[layout]))  # the first of those with the fewest
    if wrong[layout]:
        raise CheckpointError(_wrong_shape(shapes, wrong[layout], layout, sizes, where))
    return layout


def _wrong_shape(
    shapes: Mapping[str, tuple[int, ...]],
    wrong: list[str],
    layout: Layout,
    sizes: HasExpertSizes,
    where: Callable[[str], str],
) -> str:
    key = wrong[0]
    expected, found = layout.shape(key, sizes), shapes[key]
    turned = _turned(expected)
    message = f"{where(key)}: expected shape {list(expected)} of {_role(layout, key)}, found {list(found)}"
    owners = [other for other in _siblings(layout, key) if layout.shape(other, sizes) == found]
    if owners:
        message += f", the shape of {' or '.join(_role(layout, other) for other in owners)}"
    elif found == turned:
        message += ", its transpose"
    partner = next((x for x in owners if x in wrong and shapes[x] == expected), None)
    is_turned = all(
        len(shapes[k]) == len(layout.shape(k, sizes)) and shapes[k] == _turned(layout.shape(k, sizes)) for k in shapes
    )
    if is_turned and len(shapes) == len(layout.keys(sizes)):
        return f"{message}; all {len(shapes)} tensors are the transposes of what {layout} has: transpose them"
    if partner is not None:
        return f"{message}; {where(partner)} has that of {_leaf(key)}: exchange the two"
    if owners:
        return f"{message}; it lies in the wrong slot: pass it as {_leaf(owners[0])}"
    both = LAYOUTS["w13_w2_per_expert" if layout.is_per_expert else "w13_w2"]
    if GATE in layout.leaves[_leaf(key)] and found == both.shape(both.key(GATE, 0), sizes):
        return f"{message}, the shape of gate and up rows in one: name it w13, or split its rows"
    if found == turned:
        return f"{message}, and not all tensors are transposed: no layout has this, transpose it"
    return (
        f"{message}; check num_experts {sizes.num_experts}, hidden_size {sizes.hidden_size} and "
        f"moe_intermediate_size {sizes.moe_intermediate_size} of the configuration"
    )


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _role(layout: Layout, key: str) -> str:
    return f"{_leaf(key)} ({' and '.join(layout.leaves[_leaf(key)])})"


def _siblings(layout: Layout, key: str) -> list[str]:
    """The other tensors of the layout, of the same expert where it has one tensor per expert."""
    leaves = [leaf for leaf in layout.leaves if leaf != _leaf(key)]
    return [f"{_expert(key)}.{leaf}.weight" for leaf in leaves] if layout.is_per_expert else leaves


def open_layout(doubt: str, layout: Layout, where: str) -> CheckpointError:
    """The error for shapes that leave the layout open."""
    names = [x.name for x in LAYOUTS.values() if x.leaves == layout.leaves and x.is_per_expert == layout.is_per_expert]
    return CheckpointError(
        f"{where}: expected experts whose layout shows in their shapes, found {doubt}; "
        f"name the layout, one of {', '.join(names)} (expert_layout=, --expert-layout)"
    )


# ============================================================================================================
# Tensors of one layer
# ============================================================================================================


def detect_layout(tensors: Mapping[str, Tensor], config: HasExpertSizes) -> Layout:
    """The layout of one layer's experts from names and shapes.

    tensors: all of one layer, by any names of the module's list. config: a `ModelConfig` or `ExpertSizes`.
    Raises `CheckpointError` for names of no layout or of two, tensors that are missing, shapes that do not fit (with
    the slot that they belong to, where one is known by shape) and shapes that leave the layout open.
    """
    by_key = _by_key(tensors, config)
    layout = fitting_layout(_shapes(by_key), layouts_with(by_key), config)
    _require_all(by_key, layout, config)
    doubt = layout.doubt(config)
    if doubt is not None:
        raise open_layout(doubt, layout, "experts")
    return layout


def to_canonical(
    tensors: Mapping[str, Tensor], config: HasExpertSizes, layout: str | Layout | None = None
) -> dict[str, Tensor]:
    """One layer's experts as {"gate_up": [E, 2I, D], "down": [E, D, I]}, bit for bit.

    layout: a name of `LAYOUTS`; None detects it. Tensors that lie as they should are returned themselves, others are
    copied once. The results take no part in autograd. Raises as `detect_layout`, and for tensors of one part that
    differ in dtype or device.
    """
    return dict(zip(PARTS, convert(tensors, config, STACKED, layout=layout).values(), strict=True))


def from_canonical(
    experts: Mapping[str, Tensor], config: HasExpertSizes, layout: str | Layout
) -> dict[str, Tensor]:
    """Inverse of `to_canonical`: {"gate_up", "down"} as the tensors of a layout. Parts of a stack may be views of it.

    Raises `CheckpointError` for other keys and for shapes that do not fit.
    """
    if set(experts) != set(PARTS):
        raise CheckpointError(f"experts: expected {' and '.join(PARTS)}, found {', '.join(experts) or 'none'}")
    stack = {STACKED.keys(config, part)[0]: experts[part] for part in PARTS}
    return convert(stack, config, layout, layout=STACKED)


def convert(
    tensors: Mapping[str, Tensor],
    config: HasExpertSizes,
    to: str | Layout,
    *,
    layout: str | Layout | None = None,
) -> dict[str, Tensor]:
    """One layer's experts from `layout` (None detects it) into the layout `to`, bit for bit, in the order of its keys.

    In memory there is never more than the input and the result: no canonical copy lies between. Raises as
    `to_canonical`.
    """
    target = layout_named(to)
    by_key = _by_key(tensors, config)
    if layout is None:
        source = detect_layout(tensors, config)
    else:
        source = layout_named(layout)
        _require_names(by_key, source)
        fitting_layout(_shapes(by_key), [source], config)
        _require_all(by_key, source, config)
    result: dict[str, Tensor] = {}
    for part in PARTS:
        result |= rearrange(part, source, target, config, by_key.__getitem__)
    return {key: result[key] for key in target.keys(config)}


def rearrange(
    part: str,
    source: Layout,
    target: Layout,
    sizes: HasExpertSizes,
    fetch: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """The tensors of one of PARTS in the layout `target`; `fetch` gives those of `source`, each asked for once.

    Only one fetched tensor is needed at a time where the source has one per expert, so that a file's tensors need not
    be in memory together. Raises `CheckpointError` for different dtypes or devices.
    """
    source_keys, target_keys = source.keys(sizes, part), target.keys(sizes, part)
    if _order(source, part) == _order(target, part):
        return {new: fetch(old).detach() for new, old in zip(target_keys, source_keys, strict=True)}
    first = fetch(source_keys[0]).detach()
    if _is_cut(source, target, part):
        fetched = {key: first if key == source_keys[0] else fetch(key).detach() for key in source_keys}
        _require_alike(fetched)
        cut = {}
        for key in target_keys:
            ((matrix, expert),) = target.matrices(key, sizes)
            cut[key] = source.view(fetched[source.key(matrix, expert)], matrix, expert).contiguous()
        return cut
    result = {key: first.new_empty(target.shape(key, sizes)) for key in target_keys}
    for key in source_keys:
        tensor = first if key == source_keys[0] else fetch(key).detach()
        _require_alike({source_keys[0]: first, key: tensor})
        for matrix, expert in source.matrices(key, sizes):
            place = target.view(result[target.key(matrix, expert)], matrix, expert)
            place.copy_(source.view(tensor, matrix, expert))
    return result


def _order(layout: Layout, part: str) -> tuple:
    """What two layouts have in common that hold the same values of a part in the same shapes and order."""
    held = tuple(matrices for matrices in layout.leaves.values() if matrices[0] in PARTS[part])
    is_interleaved = layout.is_interleaved and part == "gate_up"
    return held, layout.is_per_expert, layout.is_transposed, is_interleaved


def _is_cut(source: Layout, target: Layout, part: str) -> bool:
    """Whether each tensor of the target is one matrix of a stack, which needs no place of its own."""
    single = all(len(held) == 1 for held in target.leaves.values() if held[0] in PARTS[part])
    return target.is_per_expert and single and not source.is_per_expert


def _by_key(tensors: Mapping[str, Tensor], sizes: HasExpertSizes) -> dict[str, Tensor]:
    by_key: dict[str, Tensor] = {}
    blocks: dict[str, str] = {}
    for name, tensor in tensors.items():
        found = split_name(name)
        if found is None or not is_key(found[1], sizes):
            raise CheckpointError(
                f"experts: expected names such as gate_up_proj, w1, w13 or 0.gate_proj.weight of "
                f"{sizes.num_experts} experts, found {name!r}"
            )
        block, key = found
        blocks.setdefault(block, name)
        if len(blocks) > 1:
            first, second = blocks.values()
            raise CheckpointError(f"experts: expected the tensors of one layer, found {first!r} and {second!r}")
        if key in by_key:
            raise CheckpointError(f"experts: expected one tensor for {key}, found {name!r} as a second one")
        by_key[key] = tensor
    if not by_key:
        raise CheckpointError("experts: expected the tensors of one layer, found none")
    return by_key


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def _require_names(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    for key in tensors:
        if _leaf(key) not in layout.leaves or key.endswith(".weight") != layout.is_per_expert:
            expected = ", ".join(("N." if layout.is_per_expert else "") + leaf for leaf in layout.leaves)
            raise CheckpointError(f"experts: layout {layout}: expected the names {expected}, found {key!r}")


def _require_all(tensors: Mapping[str, Tensor], layout: Layout, sizes: HasExpertSizes) -> None:
    missing = [key for key in layout.keys(sizes) if key not in tensors]
    if missing:
        raise CheckpointError(
            f"experts: layout {layout}: expected {len(layout.keys(sizes))} tensors, found {len(missing)} of them "
            f"missing, first {missing[0]}"
        )


def _require_alike(tensors: Mapping[str, Tensor]) -> None:
    (first_key, first), *others = tensors.items()
    for key, tensor in others:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise CheckpointError(
                f"experts: tensor {key}: expected {first.dtype} on {first.device} as {first_key}, found "
                f"{tensor.dtype} on {tensor.device}"
            )
