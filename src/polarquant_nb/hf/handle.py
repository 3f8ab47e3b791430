"""Handles: tensors that stand for the keys and values of a layer, and hold none of them.

A model gets them from the cache and passes them on to attention.  Ours asks the layer instead of
looking at the numbers; for whatever else looks, they are decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from polarquant_nb.hf.layer import PolarLayer

__all__ = ["Counts", "Handle", "HandlePair", "untraced"]

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Counts:
    """How often attention ran, over all layers of a cache.

    Parameters
    ----------
    exact : int
        On the exact keys and values of a first prefill.
    coded : int
        On the codes.
    decoded : int
        On decoded keys and values, each of them as long as the cache.
    """

    exact: int = 0
    coded: int = 0
    decoded: int = 0
    _has_warned: bool = field(default=False, repr=False)

    def warn_once(self) -> None:
        """Say what a model that is not enabled does."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "keys and values of a PolarCache are used by attention that does not know it: they "
                "are decoded for every token, which is slow, and as padding cannot be told here, "
                "it is stored, as tokens that are masked.  Call polarquant_nb.hf.enable(model)",
                stacklevel=2,
            )


class HandlePair:
    """What the handles of a layer's keys and of its values share.

    They are decoded together, and kept no longer than it takes to ask for both.

    Parameters
    ----------
    layer : PolarLayer
        The layer.
    changes : int
        How often it has changed: handles are of no use later.
    """

    def __init__(self, layer: PolarLayer, changes: int) -> None:
        self.layer, self.changes = layer, changes
        self._other: tuple[int, Tensor] | None = None

    def check(self) -> None:
        """Refuse to go on after a change.

        Raises
        ------
        RuntimeError
            If there was one.
        """
        if self.layer._changes != self.changes:
            raise RuntimeError(
                "keys and values of a PolarCache were used after the cache had changed; clone() "
                "them to keep them"
            )

    def decode(self, which: int) -> Tensor:
        """The numbers.

        Parameters
        ----------
        which : int
            0 for keys, 1 for values.

        Returns
        -------
        torch.Tensor, shape ``(batch, num_kv_heads, length, head_dim)``
            Zeros for padding.
        """
        self.check()
        if self._other is not None and self._other[0] == which:
            (_, x), self._other = self._other, None
            return x
        both = self.layer.decode()
        self._other = 1 - which, both[1 - which]
        return both[which]


class Handle(torch.Tensor):
    """Stands for the keys, or the values, of a layer; holds none.

    Attention that :func:`enable` has registered asks the layer instead.  Whatever else uses the
    handle gets decoded tensors.

    Parameters
    ----------
    pair : HandlePair
        The layer and the state of it that is meant.
    which : int
        0 for keys, 1 for values.
    shape : tuple of int
        ``(batch, num_kv_heads, length, head_dim)``.
    dtype : torch.dtype
        What was appended.
    device : torch.device
        Where the layer is.
    exact : torch.Tensor, optional
        The numbers, where they are all that was ever appended.
    """

    pair: HandlePair
    which: int
    exact: Tensor | None

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        pair: HandlePair,
        which: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        exact: Tensor | None,
    ) -> Handle:
        handle: Handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        handle.pair, handle.which, handle.exact = pair, which, exact
        return handle

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def real(x: Any) -> Any:
            return x.real_tensor() if isinstance(x, cls) else x

        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))

    def real_tensor(self) -> Tensor:
        """The numbers, ``(batch, num_kv_heads, length, head_dim)``."""
        self.pair.check()
        layer = self.pair.layer
        if layer._waiting is not None:  # whoever asks is not our attention
            layer.counts.warn_once()
        if self.exact is not None:
            layer.settle()
            return self.exact
        return self.pair.decode(self.which)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Handle({('keys', 'values')[self.which]} of {self.pair.layer!r})"


def untraced(function: F) -> F:
    """Have torch.compile call a function as it is, in a break of the graph.

    Parameters
    ----------
    function : callable
        Not slowed down outside of torch.compile, as by torch.compiler.disable.

    Returns
    -------
    callable
        The same function.
    """
    shielded = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return shielded(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)
