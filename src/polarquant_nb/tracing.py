"""What torch.compile sees of caches and pages: tensors that name them.

A traced graph can hold neither.  It holds a *token*: two int64 numbers, a name under which the
operators of :mod:`polarquant_nb.torch_ops` find the object when the graph runs, and how often it
has changed.  Appending writes the token and attending reads it, so torch keeps the order of both;
and as the name is a number in a tensor, one graph serves all caches.  Nothing here imports torch.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from functools import wraps
from itertools import count
from types import FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

__all__ = ["OWNERS", "Token", "traced_by", "untraced", "untraced_methods"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

OWNERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Caches and pages by name."""

# not from 0: what outlives a process must not find another object in the next
_names = count(secrets.randbits(62))


class Token:
    """Names a cache or pages in traced graphs.

    Parameters
    ----------
    owner : KVCache or PolarPages
        What is named; not kept alive.

    Attributes
    ----------
    numbers : ndarray of int64, shape ``(2,)``
        Name, and number of changes.
    tensor : torch.Tensor or None
        The same memory; None until torch is there.
    before : tuple or None
        The owner's state before its last change, if that was an append of a graph.
    """

    __slots__ = ("before", "numbers", "tensor")

    def __init__(self, owner: Any) -> None:
        self.numbers = np.array([next(_names), 0], np.int64)
        self.tensor = _as_tensor(self.numbers)
        self.before: tuple[Any] | None = None
        OWNERS[int(self.numbers[0])] = owner

    def count(self) -> None:
        """Count a change."""
        self.numbers[1] += 1
        self.before = None
        if self.tensor is None:
            self.tensor = _as_tensor(self.numbers)


def _as_tensor(numbers: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    with torch.inference_mode(False):  # graphs may run inside and outside of it
        return torch.from_numpy(numbers)


def traced_by(name: str) -> Callable[[F], F]:
    """Have torch.compile trace another function instead.

    Traced, NumPy code would become torch code, and what a cache holds would be constants of the
    graph; so nothing that the function calls is traced either.

    Parameters
    ----------
    name : str
        A function of :mod:`polarquant_nb.torch_ops`.  It is called with the function that is
        decorated and that one's arguments.

    Returns
    -------
    callable
        The decorator.
    """

    def decorate(function: F) -> F:
        shielded: Callable[..., Any] | None = None

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal shielded
            torch = sys.modules.get("torch")
            if torch is None:
                return function(*args, **kwargs)
            # not is_compiling(), which is True in what really runs while any thread compiles
            if torch.compiler.is_dynamo_compiling():
                from polarquant_nb import torch_ops

                return getattr(torch_ops, name)(function, *args, **kwargs)
            if shielded is None:
                if "torch._dynamo" not in sys.modules:  # it takes a second to import
                    return function(*args, **kwargs)
                shielded = torch.compiler.disable(function)
            return shielded(*args, **kwargs)

        return cast(F, call)

    return decorate


untraced = traced_by("call_untraced")
"""Decorator: torch.compile breaks the graph at a function, and calls it as it is."""


def untraced_methods(*traced: str) -> Callable[[C], C]:
    """Class decorator: all methods and properties are untraced, but for private and named ones.

    Parameters
    ----------
    *traced : str
        Names of those that may be traced.

    Returns
    -------
    callable
        The decorator.
    """

    def decorate(cls: C) -> C:
        for name, member in list(vars(cls).items()):
            if name in traced or (name.startswith("_") and not name.endswith("__")):
                continue
            if isinstance(member, FunctionType):
                setattr(cls, name, untraced(member))
            elif isinstance(member, property) and member.fget:
                setattr(cls, name, property(untraced(member.fget), doc=member.__doc__))
            elif isinstance(member, classmethod):
                setattr(cls, name, classmethod(untraced(member.__func__)))
        return cls

    return decorate
