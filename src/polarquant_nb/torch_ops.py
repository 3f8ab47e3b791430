"""Operators for torch.compile: appending and attending as single nodes of a traced graph.

:class:`KVCache` and :func:`attention` come here only while torch.compile traces them; eager calls
stay plain calls.  The operators take *tokens* (see :mod:`polarquant_nb.tracing`) and call the same
methods when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from polarquant_nb.attend import attention
from polarquant_nb.cache import KVCache
from polarquant_nb.pages import PolarPages
from polarquant_nb.tracing import OWNERS

__all__ = ["call_untraced", "traced_append", "traced_attend", "traced_attention", "traced_step"]

Tensor = torch.Tensor
Results = list[Tensor]


def call_untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call that breaks the graph; an error with ``fullgraph=True``.

    Parameters
    ----------
    function : callable
        What is called, outside of the graph.
    *args, **kwargs
        With what.

    Returns
    -------
    Any
        What it returns.
    """
    return _not_part_of_a_graph(function, *args, **kwargs)


@torch.compiler.disable
def _not_part_of_a_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def traced_append(
    function: Callable[..., Any],
    cache: KVCache,
    k: Any,
    v: Any,
    padding: Any = None,
    *,
    q: Any = None,
) -> None:
    """:meth:`KVCache.append` in a graph.

    Parameters
    ----------
    function : callable
        That method, for what is no torch tensor.
    cache : KVCache
        What is appended to.
    k, v, padding, q
        As there.
    """
    token = cache._token.tensor
    if token is None or not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        call_untraced(function, cache, k, v, padding, q=q)
    else:
        _OPS.append.default(token, k.detach(), v.detach(), _tensor(padding), _tensor(q))


def traced_attend(
    function: Callable[..., Any],
    cache: KVCache,
    q: Any,
    mask: Any = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """:meth:`KVCache.attend` in a graph.

    Parameters
    ----------
    function : callable
        That method, for what is no torch tensor.
    cache : KVCache
        Keys and values.
    q, mask, scale, softcap, return_lse
        As there.

    Returns
    -------
    Tensor, or two
        As there.
    """
    token, width = cache._token.tensor, cache.formats.values.head_dim
    if token is None or not isinstance(q, Tensor):
        options = {"scale": scale, "softcap": softcap, "return_lse": return_lse}
        return call_untraced(function, cache, q, mask, **options)
    results = _OPS.attend.default(
        token, q.detach(), _tensor(mask), width, scale, softcap, return_lse
    )
    return tuple(results) if return_lse else results[0]


def traced_step(
    function: Callable[..., Any],
    cache: KVCache,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Any:
    """:meth:`KVCache.step` in a graph: both operators.

    Parameters
    ----------
    function : callable
        That method, for what is no torch tensor.
    cache : KVCache
        Keys and values.
    q, k, v, scale, softcap
        As there.

    Returns
    -------
    Tensor
        As there.
    """
    if cache._token.tensor is None or not all(isinstance(x, Tensor) for x in (q, k, v)):
        return call_untraced(function, cache, q, k, v, scale=scale, softcap=softcap)
    cache.append(k, v, q=q)
    return cache.attend(q, scale=scale, softcap=softcap)


def traced_attention(
    function: Callable[..., Any],
    q: Any,
    k_pages: PolarPages,
    v_pages: PolarPages,
    *,
    scale: float | None = None,
    mask: Any = None,
    is_causal: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """:func:`attention` in a graph.

    Parameters
    ----------
    function : callable
        That function, for what is no torch tensor.
    q, k_pages, v_pages, scale, mask, is_causal, softcap, return_lse
        As there.

    Returns
    -------
    Tensor, or two
        As there.
    """
    pages = isinstance(k_pages, PolarPages) and isinstance(v_pages, PolarPages)
    if not (
        pages
        and k_pages._token.tensor is not None
        and v_pages._token.tensor is not None
        and isinstance(q, Tensor)
    ):
        return call_untraced(
            function, q, k_pages, v_pages,
            scale=scale, mask=mask, is_causal=is_causal, softcap=softcap, return_lse=return_lse,
        )  # fmt: skip
    results = _OPS.attention.default(
        q.detach(), k_pages._token.tensor, v_pages._token.tensor, _tensor(mask),
        v_pages.format.head_dim, scale, softcap, is_causal, return_lse,
    )  # fmt: skip
    return tuple(results) if return_lse else results[0]


def _tensor(x: Any) -> Tensor | None:
    return None if x is None else torch.as_tensor(x).detach()


# ---- what runs in a graph ------------------------------------------------------------------------


def _append(
    token: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, q: Tensor | None = None
) -> None:
    """Append behind what the cache held at the token's count.

    So the operator is a function of its arguments: what runs twice on the same token, to check or
    to recompute a graph, appends once.
    """
    numbers = token.numpy()
    cache, count = _found(numbers)
    own = cache._token
    if own.numbers[1] == count + 1 and own.before:
        (cache._state,) = own.before
        own.numbers[1] = count
    _check_order(cache, count)
    before = cache._state
    cache.append(k, v, padding, q=q)
    own.before = (before,)
    numbers[1] = count + 1


def _attend(
    token: Tensor,
    q: Tensor,
    mask: Tensor | None,
    value_head_dim: int,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
) -> Results:
    cache, count = _found(token.numpy())
    _check_order(cache, count)
    out = cache.attend(q, mask, scale=scale, softcap=softcap, return_lse=return_lse)
    return list(out) if return_lse else [out]


def _attention(
    q: Tensor,
    k_token: Tensor,
    v_token: Tensor,
    mask: Tensor | None,
    value_head_dim: int,
    scale: float | None,
    softcap: float | None,
    is_causal: bool,
    return_lse: bool,
) -> Results:
    (k_pages, _), (v_pages, _) = _found(k_token.numpy()), _found(v_token.numpy())
    out = attention(
        q, k_pages, v_pages,
        scale=scale, mask=mask, is_causal=is_causal, softcap=softcap, return_lse=return_lse,
    )  # fmt: skip
    return list(out) if return_lse else [out]


def _found(numbers: npt.NDArray[np.int64]) -> tuple[Any, int]:
    name, count = numbers.tolist()
    owner = OWNERS.get(name)
    if owner is None:
        raise RuntimeError(
            "the cache or pages of this graph are gone, or were those of another process"
        )
    return owner, count


def _check_order(cache: KVCache, count: int) -> None:
    if cache._token.numbers[1] != count:
        raise RuntimeError(
            f"the graph is to use the cache after {count} changes, but it has had "
            f"{cache._token.numbers[1]}: something else changed it while the graph ran"
        )


# ---- what torch needs to trace it ----------------------------------------------------------------


def _results(q: Tensor, value_head_dim: int, return_lse: bool) -> Results:
    """Results without their numbers."""
    out = q.new_empty((*q.shape[:-1], value_head_dim))
    return [out, q.new_empty(q.shape[:-1], dtype=torch.float32)] if return_lse else [out]


_library: Any = torch.library  # has types in part
_LIBRARY = _library.Library("polarquant_nb", "DEF")  # what is registered goes with it

for _schema, _run, _pretend in (
    (
        "append(Tensor(a!) token, Tensor k, Tensor v, Tensor? padding, Tensor? q=None) -> ()",
        _append,
        lambda token, k, v, padding, q=None: None,
    ),
    (
        "attend(Tensor token, Tensor q, Tensor? mask, SymInt value_head_dim, float? scale, "
        "float? softcap, bool return_lse) -> Tensor[]",
        _attend,
        lambda token, q, mask, width, scale, softcap, lse: _results(q, width, lse),
    ),
    (
        "attention(Tensor q, Tensor k_token, Tensor v_token, Tensor? mask, SymInt value_head_dim, "
        "float? scale, float? softcap, bool is_causal, bool return_lse) -> Tensor[]",
        _attention,
        lambda q, k, v, mask, width, scale, softcap, is_causal, lse: _results(q, width, lse),
    ),
):
    _name = _LIBRARY.define(_schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    _library.register_fake(f"polarquant_nb::{_name}", _pretend, lib=_LIBRARY)

_OPS = torch.ops.polarquant_nb
