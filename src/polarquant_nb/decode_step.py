"""DecodeStep: a token more in each row and its attention, with all else prepared.

Between two new pages a cache changes in one slot of its exact tokens.  So what kernels are called
with stays in memory, and a step is to copy a token in, to run them, and to copy the result out.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, new_array, open_elements
from polarquant_nb.cache_state import CacheState
from polarquant_nb.codec import element_kind
from polarquant_nb.kernels.call_list import Call, CallList, Phase
from polarquant_nb.kernels.exact_cpu import add_exact, start_empty, store_token
from polarquant_nb.packed_attention import PAGES_PER_HELPER, FusedAttention, fills_groups
from polarquant_nb.queries import Logits
from polarquant_nb.storable import MAX_NORM, check_storable
from polarquant_nb.threads import get_num_threads
from polarquant_nb.token_store import most_exact

__all__ = ["DecodeStep"]

_CODE: dict[Any, dict[Any, Any]] = {}
"""What is known of the kernels for exact tokens, by the dtype of these."""


class DecodeStep:
    """Appends a token to each row and attends to all of it, as often as there is room.

    Results are those of append and attend.

    Parameters
    ----------
    state : CacheState
        What is appended to; see :meth:`is_possible`.
    num_heads : int
        Of queries.
    kind : ArrayKind
        Of queries, and of results; of the family of the state.
    logits : Logits
        Scale and softcap.

    Attributes
    ----------
    state : CacheState
        With all tokens so far.
    """

    def __init__(self, state: CacheState, num_heads: int, kind: ArrayKind, logits: Logits) -> None:
        self.state, self._logits, self._room = state, logits, _room(state)
        self._thread, self._num_threads = get_ident(), get_num_threads()
        (batch, kv_heads, _, head_dim), width = state.keys.exact.shape, state.values.exact.shape[3]
        wide = ArrayKind(kind.family, "float32")
        self._q = _Place((batch, num_heads, 1, head_dim), wide, kind)
        self._k = _Place((batch, kv_heads, 1, head_dim), state.kind, state.kind)
        self._v = _Place((batch, kv_heads, 1, width), state.kind, state.kind)
        self._out = _Place((batch, num_heads, 1, width), wide, kind)
        self._counts = np.repeat(np.array(state.exact), kv_heads)
        self._good = np.ones(1, np.bool)
        self._calls = CallList(self._phases(batch * kv_heads, num_heads // kv_heads))

    @staticmethod
    def is_possible(state: CacheState, num_heads: int) -> bool:
        """Whether there can be a step from a state on.

        Parameters
        ----------
        state : CacheState
            Of a cache.
        num_heads : int
            Of queries.

        Returns
        -------
        bool
            False on a GPU; and if there is no room for a token before the next page or buffer, keys
            have a rotary bias, are not fitted yet or float64, heads do not fill groups or there are
            none, or the buffer is not contiguous.
        """
        return (
            state.kind.device is None
            and _room(state) > 0
            and state.keys.table.rows.rotary_bias is None
            and (state.fitting is None or all(state.fitting.fixed))
            and state.kind.dtype != "float64"
            and num_heads > 0
            and fills_groups(num_heads // state.num_kv_heads)
            and all(store.exact.flags.c_contiguous for store in (state.keys, state.values))
        )

    def fits(self, q: Any, k: Any, v: Any, logits: Logits) -> bool:
        """Whether the next token can be appended in this way.

        Parameters
        ----------
        q, k, v : object
            Queries, key and value.
        logits : Logits
            Scale and softcap.

        Returns
        -------
        bool
            False if there is no room left, or something is not as it was.
        """
        return (
            self._room > 0
            and self._q.fits(q)
            and self._k.fits(k)
            and self._v.fits(v)
            and logits == self._logits
            and self._thread == get_ident()
            and self._num_threads == get_num_threads()
        )

    def announce(self) -> None:
        """Have threads ready: a step follows within some hundred microseconds."""
        self._calls.announce()

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """Append and attend; arguments have been looked at by :meth:`fits`.

        Parameters
        ----------
        q, k, v : ndarray or torch.Tensor
            Queries, key and value.

        Returns
        -------
        ndarray or torch.Tensor, shape ``(batch, num_heads, 1, value_head_dim)``
            Of the dtype of ``q``.

        Raises
        ------
        ValueError
            If the token cannot be stored.  After an error there is no other step: the state is what
            it was, but what is prepared is not.
        """
        self._q.put(q)
        self._k.put(k)
        self._v.put(v)
        self._calls()
        state = self.state
        if not self._good[0] and state.settings.nan == "raise":
            nothing = (0,) * len(state.exact)
            for x, name, longest in ((k, "k", state.longest_key), (v, "v", MAX_NORM)):
                # norms that are at the limit to within rounding are let through
                check_storable(*open_elements(x, name), name, nothing, longest)
        self._room -= 1
        exact = tuple([count + 1 for count in state.exact])
        self.state = CacheState(state.settings, state.keys, state.values, exact, state.fitting)
        return self._out.copy()

    def _phases(self, rows: int, group: int) -> list[Phase]:
        state, (scale, softcap) = self.state, (self._logits.scale, self._logits.softcap)
        q, k, v, out = (
            place.elements.reshape(rows, -1, place.elements.shape[-1])
            for place in (self._q, self._k, self._v, self._out)
        )  # fmt: skip
        keys, values = (
            store.exact.reshape(rows, -1, store.exact.shape[3])
            for store in (state.keys, state.values)
        )
        kind, lse = element_kind(state.kind), np.full((rows, group), -np.inf, np.float32)
        longest, code = (state.longest_key, MAX_NORM), _CODE.setdefault(keys.dtype, {})
        storing = Call(
            store_token, (k[:, 0], v[:, 0], keys, values, kind, self._counts, longest, self._good),
            code,
        )  # fmt: skip
        adding = Call(
            add_exact, (q, keys, values, kind, self._counts, scale, softcap, out, lse), code
        )
        pages = state.keys.table.rows, state.values.table.rows
        if pages[0].num_pages:
            fused = FusedAttention(*pages, group, PAGES_PER_HELPER)
            attending = fused.phases(q, scale, softcap, out, lse)
        else:
            attending = [[[Call(start_empty, (out, lse), code)]]]
        return [[[storing]], *attending, [[adding]]]


class _Place:
    """Memory that arrays of one shape are copied to, or from.

    Parameters
    ----------
    shape : tuple of int
        Shape.
    kind : ArrayKind
        Of the memory.
    outer : ArrayKind
        Of what is copied.
    """

    def __init__(self, shape: tuple[int, ...], kind: ArrayKind, outer: ArrayKind) -> None:
        self._array, flat = new_array(shape, kind)
        self.elements: npt.NDArray[Any] = flat.reshape(shape)
        self._shape, self._type = self._array.shape, type(self._array)
        self._dtype = new_array((), outer)[0].dtype
        self._is_torch = kind.family == "torch"

    def fits(self, x: Any) -> bool:
        """Whether an array can be copied to it as it is."""
        return (
            type(x) is self._type
            and x.shape == self._shape
            and x.dtype == self._dtype
            and (not self._is_torch or (x.is_cpu and not (x.requires_grad or x.is_sparse)))
        )

    def put(self, x: Any) -> None:
        """Copy an array to it."""
        if self._is_torch:
            self._array.copy_(x)
        else:
            with np.errstate(over="ignore"):
                np.copyto(self._array, x)

    def copy(self) -> Any:
        """A copy."""
        if self._is_torch:
            return self._array.to(self._dtype, copy=True)
        with np.errstate(over="ignore"):
            return self._array.astype(self._dtype)


def _room(state: CacheState) -> int:
    """Tokens until a row has a new page, or the buffer is full."""
    sink, recent = state.settings.sink, state.settings.recent
    rooms = [
        min(most_exact(packed, sink, recent), state.keys.exact.shape[2]) - exact
        for exact, packed in zip(state.exact, state.packed, strict=True)
    ]
    return min(rooms, default=0)
