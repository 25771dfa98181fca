"""What a model remembers of its sequences: keys and values, convolution windows, recurrent states.

One `Cache` serves S sequences of possibly different length. Full-attention layers hold keys after norm and rotation,
[S, capacity, kv heads, head_dim], of which `lengths[s]` rows are valid; linear layers hold the last width - 1 raw
inputs of the convolution and the fp32 recurrent state, whose size does not depend on the length.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.config import ModelConfig
from workbench.errors import InputError

#: Rows by which the key store grows at least; then it doubles.
GROWTH_ROWS = 64


@dataclass(slots=True)
class KeyValueCache:
    """Keys and values of one full-attention layer, [S, capacity, kv heads, head_dim], in the model's dtype."""

    keys: Tensor
    values: Tensor

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows per sequence; valid rows are kept."""
        capacity = self.keys.shape[1]
        if rows > capacity:
            extra = max(rows, 2 * capacity, GROWTH_ROWS) - capacity
            self.keys, self.values = (
                torch.cat([x, x.new_zeros(x.shape[0], extra, *x.shape[2:])], dim=1) for x in (self.keys, self.values)
            )

    def append(
        self, keys: Tensor, values: Tensor, lengths: list[int], bounds: list[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Write new rows behind the `lengths` valid ones; return the stores cut to the longest sequence.

        keys, values [S, T, kv heads, head_dim], or [1, total, ...] packed between `bounds`.
        """
        sequences = len(lengths)
        added = [keys.shape[1]] * sequences if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
        longest = max(n + t for n, t in zip(lengths, added, strict=True))
        self.reserve(longest)
        for store, new in ((self.keys, keys.detach()), (self.values, values.detach())):
            if bounds is None and len(set(lengths)) == 1:
                store[:, lengths[0] : lengths[0] + keys.shape[1]] = new
                continue
            for s, (n, t) in enumerate(zip(lengths, added, strict=True)):
                store[s, n : n + t] = new[s] if bounds is None else new[0, bounds[s] : bounds[s + 1]]
        return self.keys[:, :longest], self.values[:, :longest]


@dataclass(slots=True)
class DeltaCache:
    """Convolution window [S, width - 1, channels] and recurrent state [S, V, K, W] (fp32) of one linear layer."""

    window: Tensor
    state: Tensor


@dataclass(slots=True)
class Cache:
    """The memory of all layers; `lengths` is the number of tokens that each sequence has seen."""

    layers: list[KeyValueCache | DeltaCache]
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, config: ModelConfig, sequences: int, *, device: torch.device, dtype: torch.dtype) -> Cache:
        """A cache that has seen nothing."""
        layers: list[KeyValueCache | DeltaCache] = []
        # fp64 models keep an fp64 state; every narrower one keeps fp32.
        state_dtype = torch.promote_types(dtype, torch.float32)
        for kind in config.layer_types:
            if kind == "full_attention":
                shape = (sequences, 0, config.num_key_value_heads, config.head_dim)
                keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
                layers.append(KeyValueCache(keys, values))
            else:
                window = (sequences, config.linear_conv_kernel_dim - 1, config.conv_dim)
                state = (
                    sequences, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
                )  # fmt: skip
                layers.append(
                    DeltaCache(
                        torch.zeros(window, device=device, dtype=dtype),
                        torch.zeros(state, device=device, dtype=state_dtype),
                    )
                )
        return cls(layers, [0] * sequences)

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def is_inference(self) -> bool:
        """Whether its key stores are tensors of torch.inference_mode(), which nothing outside it may write to."""
        return any(isinstance(layer, KeyValueCache) and layer.keys.is_inference() for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, spare capacity included."""
        return sum(
            t.nbytes
            for layer in self.layers
            for t in ((layer.keys, layer.values) if isinstance(layer, KeyValueCache) else (layer.window, layer.state))
        )

    def clone(self) -> Cache:
        """An independent copy: continuing one leaves the other as it is."""
        layers = [
            KeyValueCache(layer.keys.clone(), layer.values.clone())
            if isinstance(layer, KeyValueCache)
            else DeltaCache(layer.window.clone(), layer.state.clone())
            for layer in self.layers
        ]
        return Cache(layers, list(self.lengths))

    def check(self, sequences: int, dtype: torch.dtype) -> None:
        """Raise InputError unless the cache is of `sequences` sequences and `dtype` and can be written to here."""
        if self.sequences != sequences:
            raise InputError(f"cache: expected {sequences} sequences as in the input, found {self.sequences}")
        found = self.layers[0].keys.dtype if isinstance(self.layers[0], KeyValueCache) else self.layers[0].window.dtype
        if found != dtype:
            raise InputError(f"cache: expected {dtype} as in the model, found {found}")
        if self.is_inference and not torch.is_inference_mode_enabled():
            raise InputError(
                "cache: expected one that can be written to, found one filled under torch.inference_mode(); "
                "go on under it, or continue from cache.clone()"
            )
