"""The stages inside `triton_chunk`, for an observer: the debug build of its kernels.

The kernels are the same with one parameter more, SEEN, and compute the same bits. What they hold in registers they also
write, as the observer takes it: whole (`taps.STAGES`, shapes as there, in the order in which `torch_chunk` shows them),
or only its ranges for each chunk and head (`taps.Ranges`). U and W, which the kernels never form, are formed here from
the inverse, which is stored either way.

    decay, kkt, inverse, intra    in `systems`, before they are rounded
    inter, state                  in `scan`; the state after each chunk
    cumsum                        what `gates` stores, in nats

A stage that the observer replaces cannot be gone on with, since the kernels have run: InputError. A state may be, as
everywhere: the last one of each sequence is what is handed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from workbench import taps
from workbench.errors import InputError
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.taps import Ranges, Tap

#: What SEEN says to the kernels.
NOTHING, TENSORS, RANGES = 0, 1, 2
#: Places of the stages in the buffers.
SQUARES = (taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INVERSE, taps.GDN_INTRA)
SCANNED = (taps.GDN_INTER, taps.GDN_STATE)
#: Numbers of a range: see `taps.Ranges`.
NUMBERS = 5
#: Values of U or W that are formed at a time where ranges are all that is asked for.
VALUES_AT_ONCE = 1 << 24


class Watch:
    """Buffers for one call, and what becomes of them.

    `seen` is the kernels' SEEN. They number chunks sequence by sequence; an observer sees them step by step, the
    sequences of a step side by side.
    """

    def __init__(self, tap: Tap):
        self.tap = tap
        self.seen = RANGES if taps.takes_ranges(tap) else TENSORS
        self.squares = self.scanned = self.cumsum = self.inverse = torch.empty(0)
        self.sizes = (0, 0, 0, 0, 0)

    def for_systems(self, cumsum: Tensor) -> tuple[Tensor, Tensor]:
        """Where `systems` writes its stages, fp32 [4, N, V, C, C] or ranges [4, N, V, 5], and the inverse [N, V, C, C].

        cumsum [N, V, 2, C] is what `gates` writes.
        """
        count, heads, _, chunk = cumsum.shape
        self.cumsum, self.inverse = cumsum, torch.empty(count, heads, chunk, chunk, device=cumsum.device)
        shape = (chunk, chunk) if self.seen == TENSORS else (NUMBERS,)
        self.squares = torch.empty(len(SQUARES), count, heads, *shape, dtype=torch.float32, device=cumsum.device)
        return self.squares, self.inverse

    def for_scan(self, key_dim: int, value_dim: int, blocks: int) -> Tensor:
        """Where `scan` writes: fp32, inter [N, V, C, W], then states [N, V, K, W]; or ranges [2, N, V, blocks, 5]."""
        count, heads, _, chunk = self.cumsum.shape
        self.sizes = (count * heads, chunk, key_dim, value_dim, blocks)
        size = count * heads * (chunk + key_dim) * value_dim
        if self.seen == RANGES:
            size = len(SCANNED) * count * heads * blocks * NUMBERS
        self.scanned = torch.empty(size, dtype=torch.float32, device=self.cumsum.device)
        return self.scanned

    def show(self, k: Tensor, v: Tensor, beta: Tensor, bounds: list[int] | None, final: Tensor) -> Tensor:
        """Show the observer all stages of the call on k, v and beta, and return the state to go on with.

        That is `final` [S, V, K, W] or, of an observer that replaced it, the last of each sequence. Raises InputError
        for another stage that was replaced.
        """
        batch, tokens = k.shape[:2]
        chunk = self.cumsum.shape[-1]
        seen = min(chunk, tokens)  # rows past the end of the only chunk of each sequence are the kernel's own
        layout = torch_chunk.chunk_layout(batch, tokens, chunk, bounds, k.device)
        places = torch.tensor(_places(layout, batch, bounds), dtype=torch.long, device=k.device)
        heads = self.cumsum.shape[1]

        def shown(name: str, tensor: Tensor) -> None:
            if self.tap(name, tensor) is not tensor:
                raise InputError(
                    f"op gated_delta_rule: backend triton_chunk: tap {name}: expected an observer, found one that "
                    f"replaces the stage, which the kernels have gone on from; name torch_chunk for it"
                )

        def square(name: str) -> None:
            stage = self.squares[SQUARES.index(name)][places]
            if self.seen == TENSORS:
                shown(name, stage[..., :seen, :seen])
            else:
                self.tap.see_ranges(name, Ranges(stage, (len(places), heads, seen, seen), torch.float32))

        def formed(name: str, width: int, form: Callable[[slice], Tensor]) -> None:
            """A stage [N, V, C, width] that is formed here, `form` of a range of chunks."""
            if self.seen == TENSORS:
                shown(name, form(slice(None))[..., :seen, :])
                return
            step = max(1, VALUES_AT_ONCE // (heads * chunk * width))
            found = [ranges_of(form(slice(n, n + step))) for n in range(0, len(places), step)]
            self.tap.see_ranges(name, Ranges(torch.cat(found), (len(places), heads, seen, width), torch.float32))

        cumsum = self.cumsum.double().sum(2).mul(math.log(2.0))[places].to(torch.float32)  # [N, V, C]
        if self.seen == TENSORS:
            shown(taps.GDN_CUMSUM, cumsum[..., :seen])
        else:
            self.tap.see_ranges(taps.GDN_CUMSUM, Ranges(ranges_of(cumsum), (*cumsum.shape[:2], seen), torch.float32))
        for name in (taps.GDN_DECAY, taps.GDN_KKT, taps.GDN_INVERSE):
            square(name)
        keys, values = layout.split(k), layout.split(v)  # [N, H, C, K], [N, V, C, W]
        keys = keys.repeat_interleave(heads // keys.shape[1], 1)
        inverse, write = self.inverse[places], layout.split(beta)[..., None].float()
        decayed = write * cumsum.exp()[..., None]
        formed(taps.GDN_U, v.shape[3], lambda part: inverse[part] @ (write[part] * values[part].float()))
        formed(taps.GDN_W, k.shape[3], lambda part: inverse[part] @ (decayed[part] * keys[part].float()))
        square(taps.GDN_INTRA)
        return self._show_scanned(shown, layout, places, seen, final)

    def _show_scanned(
        self, shown: Callable[[str, Tensor], None], layout: torch_chunk.ChunkLayout, places: Tensor, seen: int,
        final: Tensor,
    ) -> Tensor:  # fmt: skip
        count, chunk, key_dim, value_dim, blocks = self.sizes
        heads = self.cumsum.shape[1]
        if self.seen == RANGES:
            inter, states = joined(self.scanned.view(len(SCANNED), -1, heads, blocks, NUMBERS)[:, places])
            shape = (len(places), heads)
            self.tap.see_ranges(taps.GDN_STATE, Ranges(states, (*shape, key_dim, value_dim), torch.float32))
            self.tap.see_ranges(taps.GDN_INTER, Ranges(inter, (*shape, seen, value_dim), torch.float32))
            return final
        inter, states = self.scanned.split((count * chunk * value_dim, count * key_dim * value_dim))
        states = states.view(-1, heads, key_dim, value_dim)[places]
        replaced = self.tap(taps.GDN_STATE, states)
        if replaced is not states:
            final = final.clone()
            for sequence, place in _last_places(layout, final.shape[0]):
                final[sequence] = replaced[place]
        shown(taps.GDN_INTER, inter.view(-1, heads, chunk, value_dim)[places][:, :, :seen])
        return final


def ranges_of(x: Tensor) -> Tensor:
    """The `taps.Ranges.values` of x [N, V, ...], fp32 [N, V, 5]."""
    x = x.flatten(2)
    is_finite = x.isfinite()
    low, high = torch.where(is_finite, x, math.inf).amin(-1), torch.where(is_finite, x, -math.inf).amax(-1)
    counts = [kind.sum(-1) for kind in (x.isnan(), x == math.inf, x == -math.inf)]
    return torch.stack([low, high, *counts], -1).float()


def joined(ranges: Tensor) -> Tensor:
    """[..., blocks, 5] -> [..., 5]: the ranges of all value columns together."""
    return torch.cat([ranges[..., :1].amin(-2), ranges[..., 1:2].amax(-2), ranges[..., 2:].sum(-2)], -1)


def _sequences(layout: torch_chunk.ChunkLayout, step: int) -> list[int]:
    """Sequences with a chunk in a step, as they stand side by side."""
    order = _order(layout)
    return (list(range(layout.active[step])) if order is None else order)[: layout.active[step]]


def _order(layout: torch_chunk.ChunkLayout) -> list[int] | None:
    return None if layout.order is None else layout.order.tolist()


def _places(layout: torch_chunk.ChunkLayout, batch: int, bounds: list[int] | None) -> list[int]:
    """The kernels' number of each chunk, in the order of `torch_chunk`."""
    sequences = batch if bounds is None else len(bounds) - 1
    counts = [0] * sequences
    for step in range(len(layout.active)):
        for sequence in _sequences(layout, step):
            counts[sequence] += 1
    first = [sum(counts[:sequence]) for sequence in range(sequences)]
    return [first[sequence] + step for step in range(len(layout.active)) for sequence in _sequences(layout, step)]


def _last_places(layout: torch_chunk.ChunkLayout, sequences: int) -> list[tuple[int, int]]:
    """(sequence, place of its last chunk in the order of `torch_chunk`), of those with a token."""
    found: dict[int, int] = {}
    place = 0
    for step in range(len(layout.active)):
        for sequence in _sequences(layout, step):
            found[sequence] = place
            place += 1
    return sorted(found.items())
