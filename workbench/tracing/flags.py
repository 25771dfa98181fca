"""Flags: one check per tap point for values that are not finite or near the limit, with no wait for the device.

    with trace(model, check="flags") as seen:
        model(input_ids)
    seen.flags.tripped()          # the only place where the host waits

**The buffer.** This is the layout that a kernel writes which is given the `flags` pointer; PyTorch writes the same.

    words   int32 [points, 2], contiguous, on the device of the model; a point is a tap point, numbered as in
            `Flags.points`, so a kernel's pointer is ``words.data_ptr() + 8 * point``
    word 0  bits of the largest value as float32, at least +0.0; NaN as any pattern above 0x7f800000
    word 1  the same of the largest -x: both words of a tensor that holds a NaN are above 0x7f800000
    -1      not written in this forward pass

Bits of float32 values that are not negative order as int32 do, NaN last. So a kernel ends with one ``atomicMax`` of
``bits & 0x7fffffff`` per word, in any order and from any number of blocks, and never reads. What a narrower dtype
holds is exact in float32; float64 is judged by the limit of float32, and what is finite beyond it counts as the largest
finite float32. The words may hold
more than the largest magnitude as long as that bound itself is below NEAR_LIMIT_SHARE of the dtype's limit: a norm
that small proves all values finite and far from the limit with one read. Above it they are exact.

**Who writes when.** A forward pass starts with all words at -1. Each tap point raises its own two, or the kernel that
computes its tensor does (`FlagTap.flag_rows`), and then nothing reads the tensor for it once more. The end
of the pass (the logits, or `Flags.end_step`) moves `words` into row ``count % steps`` of `ring`, int32
[steps, points, 2], adds 1 to `count` (int64 [1]) and sets `words` to -1; all on the device, in operators of a fixed
number and shape, so a captured CUDA graph does the same at each replay. The host reads `ring` and `count` when asked.

Under `torch.compile` a function with taps stays one graph. A layer of the model breaks into several by itself (`Joint`
compares addresses of weights); its flags are the same with the breaks.

Tap points inside an op (`taps.STAGES`) exist only for an observer that pays for them: they are written with
``inside=True``, in PyTorch, as is every tensor that an outer tap has seen, since it may have been replaced there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from workbench import taps
from workbench.errors import InputError
from workbench.taps import Tap
from workbench.tracing.statistics import NEAR_LIMIT_SHARE

#: Forward passes that the buffer holds unless told otherwise.
FLAG_STEPS = 64

WORDS = 2
UNWRITTEN = -1
INFINITY_BITS = 0x7F800000
_FLOAT32_MAX = torch.finfo(torch.float32).max

#: Columns of `Flags.table`.
FLAG_COLUMNS = ("step", "tap", "dtype", "shape", "has_nan", "has_pinf", "has_ninf", "is_near_limit")

#: Norms in float32 below which no value of a dtype is near its limit, with room for the norm's own rounding.
_NORM_BELOW = {
    torch.float32: math.inf, torch.bfloat16: math.inf, torch.float16: 0.99 * NEAR_LIMIT_SHARE * 65504.0,
}  # fmt: skip

#: Fewer values than this are read twice: as fast, and squares of small numbers are subnormal, which is slow.
_FEW_VALUES = 1 << 15

#: Memory from the first to the last value of a view, in times of its values, up to which the norm of all of it is the
#: faster check; of views with rows of fewer than _NARROW values, which torch reduces one by one.
_SPAN, _WIDE_SPAN, _NARROW = 2, 16, 32


@dataclass(frozen=True, slots=True)
class _Proven:
    """Memory in one piece whose norm proved it finite; held so that nothing else can come to lie there."""

    memory: Tensor
    norm: float

    def holds(self, x: Tensor) -> bool:
        """Whether all values of x lie in it."""
        start, size = self.memory.data_ptr(), self.memory.element_size()
        first = x.data_ptr()
        last = first + size * sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return x.dtype == self.memory.dtype and start <= first and last < start + size * self.memory.numel()


@dataclass(slots=True)
class _Lane:
    """Smallest and largest value of each point in one dtype, [points] each; the smallest above the largest: unwritten.

    `lows`, `highs` are the same memory as one 0-d tensor per point.
    """

    low: Tensor
    high: Tensor
    lows: Sequence[Tensor]
    highs: Sequence[Tensor]

    @classmethod
    def of(cls, points: int, dtype: torch.dtype, device: torch.device) -> _Lane:
        low = torch.full((points,), math.inf, dtype=dtype, device=device)
        high = torch.full((points,), -math.inf, dtype=dtype, device=device)
        return cls(low, high, low.unbind(), high.unbind())


class Flags:
    """The buffer of the module's text for the tap points `points`, with the writer in PyTorch.

    `words`, `ring`, `count` as above. Memory: 8 bytes times points times steps + 1, and one pair of values per point
    and dtype. `end_step` and `write` never wait for the device; `tripped`, `table` and `steps_seen` do.
    """

    def __init__(self, points: Sequence[str], *, steps: int = FLAG_STEPS, device: torch.device | str = "cpu"):
        if steps < 1 or not points:
            raise InputError(f"flags: expected at least one tap point and one step, found {len(points)} and {steps}")
        self.points, self.steps, self.device = tuple(points), steps, torch.device(device)
        self.index = {name: number for number, name in enumerate(self.points)}
        self._lanes: dict[torch.dtype, _Lane] = {}
        with torch.inference_mode(False), torch.no_grad():  # written in inference mode and out of it
            self.words = torch.full((len(points), WORDS), UNWRITTEN, dtype=torch.int32, device=device)
            self.ring = torch.full((steps, len(points), WORDS), UNWRITTEN, dtype=torch.int32, device=device)
            self.count = torch.zeros(1, dtype=torch.int64, device=device)
            #: On a CPU the norm of each point, below 0 where there is none: as 0-d tensors, and as the host reads it.
            self._norm = torch.full((len(points),), -1.0)
            self._norms, self._norm_array = self._norm.unbind(), self._norm.numpy()
        self._proven: _Proven | None = None
        self._written: set[int] = set()
        #: Points that a kernel raises before they are next seen.
        self._by_kernel: set[int] = set()
        self._rows_of: dict[tuple[int, int], Tensor] = {}
        #: What each point last held, and the same for each pass that the host has seen: (dtype, shape) by point.
        self._kinds: dict[int, tuple[torch.dtype, torch.Size]] = {}
        self._passes: deque[dict[int, tuple[torch.dtype, torch.Size]]] = deque(maxlen=steps)
        self._ended = 0

    def pointer(self, name: str) -> int:
        """Address of the two words of a tap point, for a kernel that writes them itself."""
        return self.words.data_ptr() + WORDS * self.words.element_size() * self.index[name]

    def given_away(self, first: int, end: int) -> Tensor:
        """The words of the points `first` to `end` - 1, for a kernel that raises them before those are next written."""
        self._by_kernel.update(range(first, end))
        rows = self._rows_of.get((first, end))
        if rows is None:
            rows = self._rows_of[first, end] = self.words[first:end]
        return rows

    def write(self, name: str, x: Tensor) -> None:
        """Check a floating-point tensor of any shape at the point `name`; a second one in the same pass is joined."""
        self.write_point(self.index[name], x)

    def write_point(self, point: int, x: Tensor) -> None:
        """`write` for the point of this number."""
        if x.requires_grad:
            x = x.detach()
        self._kinds[point] = (x.dtype, x.shape)
        if point in self._by_kernel:
            self._by_kernel.discard(point)
            self._written.add(point)
            return
        if point in self._written:
            self._join(point, x)
            return
        self._written.add(point)
        if torch.compiler.is_compiling():
            self._join(point, x)
        elif x.device.type != "cpu":
            x = _ordered(x)
            lane = self._lane(x.dtype)
            if x.numel():
                torch.aminmax(x, out=(lane.lows[point], lane.highs[point]))
        elif not self._is_small(point, x) and x.numel():
            x = _ordered(x)
            lane = self._lane(x.dtype)
            torch.amin(x, (), out=lane.lows[point])
            torch.amax(x, (), out=lane.highs[point])

    def _lane(self, dtype: torch.dtype) -> _Lane:
        lane = self._lanes.get(dtype)
        if lane is None:
            with torch.inference_mode(False), torch.no_grad():  # written in inference mode and out of it
                lane = self._lanes[dtype] = _Lane.of(len(self.points), dtype, self.device)
        return lane

    def _join(self, point: int, x: Tensor) -> None:
        """Into a point that is written already, and into any point of a compiled graph."""
        if x.numel() == 0:
            return
        x = _ordered(x)
        lane = self._lane(x.dtype)
        lane.low[point].copy_(torch.minimum(lane.low[point], x.amin()))
        lane.high[point].copy_(torch.maximum(lane.high[point], x.amax()))

    def _is_small(self, point: int, x: Tensor) -> bool:
        """Whether the norm proves every value finite and far from the limit of its dtype: half the work, on a CPU.

        torch's norm is fast in one piece alone. Of a view it is taken of all memory from the first value to the end of
        the last row where that is not much more; what else lies there may spoil the proof, and never makes one. A view
        inside memory that the call before this one has proven is proven too. The host may look at the norm: there is
        no device to wait for, and it reads memory, no tensor.
        """
        proven, self._proven = self._proven, None
        share = _NORM_BELOW.get(x.dtype)
        if share is None:
            return False
        is_view = not x.is_contiguous()
        if not is_view:
            if x.numel() < _FEW_VALUES:
                return False
        else:
            if proven is not None and proven.holds(x):
                self._proven, self._norm_array[point] = proven, proven.norm
                return True
            most = _WIDE_SPAN if x.shape[-1] < _NARROW else _SPAN
            # Whole rows, for the sake of the view beside this one.
            rows = max((size * stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1), default=0)
            span = min(rows, x.untyped_storage().nbytes() // x.element_size() - x.storage_offset())
            if not _FEW_VALUES <= span <= most * x.numel():
                return False
            x = x.as_strided((span,), (1,))
        torch.linalg.vector_norm(x, 2, dtype=torch.float32, out=self._norms[point])
        norm = self._norm_array[point]
        if norm < share:  # not so of NaN
            self._proven = _Proven(x, norm) if is_view else None  # what is no view has none beside it
            return True
        self._norm_array[point] = -1.0
        return False

    @torch.no_grad()
    def end_step(self) -> None:
        """Fold what was written since the last call into the next row of `ring`."""
        for lane in self._lanes.values():
            self.words.copy_(torch.maximum(self.words, _folded(lane)))
            lane.low.fill_(math.inf)
            lane.high.fill_(-math.inf)
        if self.device.type == "cpu":
            norm = self._norm.view(torch.int32)[:, None]
            self.words.copy_(torch.where(norm < 0, self.words, torch.maximum(self.words, norm)))
            self._norm.fill_(-1.0)
        self.ring.index_copy_(0, self.count.remainder(self.steps), self.words[None])
        self.count.add_(1)
        self.words.fill_(UNWRITTEN)
        self._passes.append({point: self._kinds[point] for point in self._written})
        self._ended += 1
        self._written.clear()
        self._by_kernel.clear()
        self._proven = None

    @property
    def has_open_step(self) -> bool:
        """Whether anything was written since the last `end_step`."""
        return bool(self._written)

    def end_open_step(self) -> None:
        """`end_step` if anything was written since the last one."""
        if self._written:
            self.end_step()

    def _rows(self) -> tuple[int, Tensor]:
        """(number of the first pass still held, words of it and the later ones [passes, points, 2] on the CPU)."""
        total = int(self.count)
        first = max(0, total - self.steps)
        ring = self.ring.cpu()
        return first, ring[[number % self.steps for number in range(first, total)]]

    @property
    def steps_seen(self) -> int:
        """Forward passes since the start, also those that a captured graph has replayed."""
        return int(self.count)

    def _kind(self, step: int, point: int, total: int) -> tuple[torch.dtype, torch.Size] | None:
        """What a point held in a pass; of replayed passes what it held when it was last seen in Python."""
        place = step - total + len(self._passes)
        if self._ended == total and 0 <= place and point in self._passes[place]:
            return self._passes[place][point]
        return self._kinds.get(point)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each pass still held and point that was written in it, in that order; waits for the device.

        `has_nan` says of both infinities that they are unknown: None. `is_near_limit`: finite, above NEAR_LIMIT_SHARE
        of the dtype's limit. A point that only a kernel has written lacks dtype and shape and counts as float32.
        """
        first, rows = self._rows()
        total = first + len(rows)
        found = []
        for step, words in enumerate(rows.tolist(), first):
            for point, (high, low) in enumerate(words):
                if high == low == UNWRITTEN:
                    continue
                dtype, shape = self._kind(step, point, total) or (None, None)
                has_nan = max(high, low) > INFINITY_BITS
                limit = _near_bits(dtype or torch.float32)
                near = any(limit < word < INFINITY_BITS for word in (high, low))
                infinite = (None, None) if has_nan else (high == INFINITY_BITS, low == INFINITY_BITS)
                name = None if dtype is None else str(dtype).removeprefix("torch.")
                shape = None if shape is None else tuple(shape)
                found.append((step, self.points[point], name, shape, has_nan, *infinite, near and not has_nan))
        return pd.DataFrame(found, columns=list(FLAG_COLUMNS))

    def magnitudes(self) -> pd.DataFrame:
        """`step`, `tap`, `high`, `low`: the words as float32 numbers, see the module's text for what they are."""
        first, rows = self._rows()
        values = rows.view(torch.float32).tolist()
        found = [
            (step, self.points[point], high, low)
            for step, (words, numbers) in enumerate(zip(rows.tolist(), values, strict=True), first)
            for point, ((a, b), (high, low)) in enumerate(zip(words, numbers, strict=True))
            if not a == b == UNWRITTEN
        ]
        return pd.DataFrame(found, columns=["step", "tap", "high", "low"])

    def tripped(self, *, near_limit: bool = False) -> list[tuple[int, str]]:
        """(pass, tap point) of each tensor with a value that is not finite, in order; waits for the device once.

        `near_limit` True names those near the limit of their dtype too.
        """
        table = self.table
        bad = table["has_nan"] | table["has_pinf"].eq(True) | table["has_ninf"].eq(True)
        if near_limit:
            bad |= table["is_near_limit"]
        return list(table.loc[bad, ["step", "tap"]].itertuples(index=False, name=None))

    def last_is_bad(self) -> bool:
        """Whether the pass that ended last has a value that is not finite: one number read back."""
        row = self.ring.index_select(0, (self.count - 1).clamp_(min=0).remainder_(self.steps))
        return bool(row.amax() >= INFINITY_BITS)


def _ordered(x: Tensor) -> Tensor:
    """x, of 8-bit formats a wider copy: they have no order of their own."""
    return x.float() if x.dtype.itemsize == 1 else x


def _folded(lane: _Lane) -> Tensor:
    """The words of a lane, int32 [points, 2]; -1 where it was not written."""
    largest = torch.stack([lane.high, -lane.low], dim=1)
    if largest.dtype == torch.float64:
        largest = torch.where(largest.isfinite(), largest.clamp(-_FLOAT32_MAX, _FLOAT32_MAX), largest)
    bits = largest.float().clamp(min=0.0).view(torch.int32).bitwise_and(0x7FFFFFFF)  # no sign of a zero or a NaN
    return torch.where((lane.low > lane.high)[:, None], UNWRITTEN, bits)


def _near_bits(dtype: torch.dtype) -> int:
    limit = NEAR_LIMIT_SHARE * min(torch.finfo(dtype).max, _FLOAT32_MAX)
    return int(torch.tensor(limit, dtype=torch.float32).view(torch.int32))


class FlagTap:
    """The tap that writes `flags`. Returns every tensor as it came.

    `outer` sees each tensor first. The logits end a pass; an embedding begins one, whatever the last one came to.
    Without an outer tap, and with `inside` False, no op shows its inner stages.
    """

    def __init__(self, flags: Flags, outer: Tap | None, *, inside: bool = False, prefix: str = ""):
        self.flags, self.outer, self.prefix, self.inside = flags, outer, prefix, inside
        self.sees_inside = inside or (outer is not None and getattr(outer, "sees_inside", True))
        self._points = {
            name.removeprefix(prefix): point for name, point in flags.index.items() if name.startswith(prefix)
        }
        self._scopes: dict[str, FlagTap] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if self.outer is not None:
            tensor = self.outer(name, tensor)
        if name == taps.EMBED:
            self.flags.end_open_step()
        point = self._points.get(name)
        if point is not None:  # not one that was left out on purpose
            self.flags.write_point(point, tensor)
        if name == taps.LOGITS:
            self.flags.end_step()
        return tensor

    def flag_rows(self, names: tuple[str, ...]) -> Tensor | None:
        """The words of these points, int32 [len(names), 2], for a kernel that raises them; each is then seen once.

        None where they have to be read off the tensors: where an outer tap may replace those, with `inside`, and where
        the buffer lacks one of the points or has others between them.
        """
        if self.outer is not None or self.inside:
            return None
        points = [self._points.get(name) for name in names]
        if None in points or points != list(range(points[0], points[0] + len(points))):
            return None
        return self.flags.given_away(points[0], points[0] + len(points))

    def scope(self, prefix: str) -> FlagTap:
        if self.outer is None and prefix in self._scopes:
            return self._scopes[prefix]
        outer = None if self.outer is None else self.outer.scope(prefix)
        found = FlagTap(self.flags, outer, inside=self.inside, prefix=self.prefix + prefix)
        if self.outer is None:
            self._scopes[prefix] = found
        return found
