"""What a decoder remembers of the positions that it has read: the keys and values of every block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import host_int, shape_error
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, asarray, library_name
from npattn._arrays.trees import with_tree_repr
from npattn._attention.mask_kinds import causal_mask, length_mask, window_mask
from npattn._attention.masks import Mask
from npattn.models.config import BlockConfig

IN_PLACE = ("numpy", "cupy", "torch")  # libraries whose arrays can be written to


@with_tree_repr
class KeyValueCache(NamedTuple):
    """Keys (already rotated) and values of every block, with room for the positions to come.

    On NumPy, CuPy and PyTorch a step **writes into these arrays**, the one exception to pure functions: what it returns has the
    same arrays and a greater length. A cache is therefore continued once; to continue it in two ways, `select` a copy.
    """

    keys: tuple[Array, ...]  # of each block (..., K, N, D): N positions fit in
    values: tuple[Array, ...]  # of each block (..., K, N, E)
    length: Any = 0  # positions that are filled; an integer, or an array () inside jax.jit
    starts: Any = None  # integers (...): padding in front of each sequence

    @classmethod
    def init(cls, params: Any, /, *, capacity: int, batch: Sequence[int] = (), starts: Any = None) -> KeyValueCache:
        """An empty cache.

        Parameters
        ----------
        params : LanguageModelParams or DecoderParams
            Their blocks say how many heads there are, and of which sizes; library, device and dtype are theirs.
        capacity : int
            N, the number of positions that it has room for.
        batch : sequence of int, optional
            The axes before the positions: ``(B,)`` for B sequences.
        starts : integers (...), optional
            How many tokens of padding stand in front of each sequence. Nobody sees them, and position 0 comes after them.

        Returns
        -------
        KeyValueCache

        Raises
        ------
        ValueError
            If the capacity is less than 1, or starts have not the shape of the batch.
        TypeError
            If starts are not integers.

        Notes
        -----
        It holds 2·N·K·D numbers a block and sequence.

        Examples
        --------
        >>> import numpy as np
        >>> from npattn.models import LanguageModelParams
        >>> sizes = dict(vocabulary=50, context=16, blocks=1, width=8, heads=2)
        >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
        >>> KeyValueCache.init(params, capacity=16, batch=(3,))
        KeyValueCache(keys=[float64[3, 2, 16, 4]], values=[float64[3, 2, 16, 4]], length=0, starts=None)
        """
        op = "KeyValueCache.init"
        count, lead = host_int(op, "capacity", capacity, least=1), tuple(host_int(op, "batch", n, least=0) for n in batch)
        if starts is not None:
            starts = np.asarray(starts) if isinstance(starts, (int, list, tuple)) else starts
            if tuple(starts.shape) != lead:
                shape_error(op, "starts", f"{lead} as the batch", starts.shape)
            length_mask(starts)  # raises unless they are integers

        def empty(w: Array) -> Array:
            xp = array_namespace(op, w=w)
            shape = (*lead, w.shape[1], count, w.shape[2])
            return np.zeros(shape, w.dtype) if xp is np else xp.zeros(shape, dtype=w.dtype, device=array_device(w))

        attentions = [block.attention for block in params.blocks]
        return cls(tuple(empty(a.w_k) for a in attentions), tuple(empty(a.w_v) for a in attentions), 0, starts)

    @property
    def capacity(self) -> int:
        """N."""
        return int(self.keys[0].shape[-2])

    def select(self, indices: Any, /) -> KeyValueCache:
        """A new cache with these sequences of the first batch axis, each as often as it is named.

        Parameters
        ----------
        indices : sequence of int
            Sequences of this cache.

        Returns
        -------
        KeyValueCache
            It shares no memory with this one.
        """
        chosen = np.asarray(indices)

        def taken(x: Array) -> Array:
            xp = array_namespace("KeyValueCache.select", x=x)
            return xp.take(x, asarray(chosen, xp=xp, device=array_device(x)), axis=0)

        starts = None if self.starts is None else taken(self.starts)
        return KeyValueCache(tuple(map(taken, self.keys)), tuple(map(taken, self.values)), self.length, starts)

    def positions(self, count: int) -> Any:
        """The positions of the next tokens, as embeddings and rotary positions take them: of the first, or of every one."""
        if self.starts is None:
            return self.length
        if isinstance(self.starts, np.ndarray) and isinstance(self.length, int):
            return np.maximum(self.length + np.arange(count) - self.starts[..., None], 0)
        xp, device = array_namespace("cache", x=self.keys[0]), array_device(self.keys[0])
        starts = asarray(self.starts, xp=xp, device=device) if isinstance(self.starts, np.ndarray) else self.starts
        positions = self.length + xp.arange(count, device=device) - starts[..., None]
        return xp.where(positions < 0, xp.zeros_like(positions), positions)

    def mask(self, count: int, config: BlockConfig) -> Mask | None:
        """What the next tokens see of the keys that `extended` gives; ``None`` if it is all of them."""
        window = config.window
        assert not isinstance(window, tuple)  # a stack has told whose turn it is
        known = isinstance(self.length, int)
        needed = count > 1 or not known or (window is not None and window < self.length)
        mask: Mask | None = causal_mask(self.length) if needed else None
        if window is not None and mask is not None:
            mask = mask & window_mask(window, window, self.length)
        if self.starts is not None:
            begun = ~length_mask(self.starts)
            mask = begun if mask is None else mask & begun
        return mask

    def extended(self, n: int, k: Array, v: Array) -> tuple[Array, Array, Array, Array]:
        """Block n's keys and values with those of the next tokens; first those that are seen, then all that are kept."""
        xp = array_namespace("cache", k=self.keys[n], new=k)
        keys, values = (_put(old, new, self.length, xp) for old, new in ((self.keys[n], k), (self.values[n], v)))
        if not isinstance(self.length, int):
            return keys, values, keys, values
        end = self.length + k.shape[-2]
        return keys[..., :end, :], values[..., :end, :], keys, values

    def check_room(self, op: str, lead: tuple[int, ...], count: int) -> None:
        """Raise unless the next tokens fit in."""
        batch = tuple(self.keys[0].shape[:-3])
        if lead != batch:
            raise ValueError(f"{op}: the cache is for tokens of shape ({', '.join(map(str, batch))}, T), got {(*lead, count)}")
        if isinstance(self.length, int) and self.length + count > self.capacity:
            raise ValueError(f"{op}: the cache has room for {self.capacity} positions, and {self.length} + {count} are too many")


def _put(old: Array, new: Array, length: Any, xp: Namespace) -> Array:
    """``old`` with ``new`` from position ``length`` on: itself, written to, where that can be done."""
    if not new.shape[-2]:
        return old
    if isinstance(length, int) and (xp is np or library_name(xp) in IN_PLACE):
        old[..., length : length + new.shape[-2], :] = new
        return old
    place = xp.arange(old.shape[-2], device=array_device(old)) - length
    inside = (place >= 0) & (place < new.shape[-2])
    rows = xp.take(new, xp.clip(place, 0, new.shape[-2] - 1), axis=-2)
    return xp.where(inside[:, None], rows, old)
