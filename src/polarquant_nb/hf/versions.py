"""What differs between versions of transformers, from 4.57 on."""

from __future__ import annotations

from typing import Any

import transformers

__all__ = ["CACHE_ARGUMENT", "CROP_TAKES_LENGTH", "query_length", "tokens_to_remove"]

_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

CACHE_ARGUMENT = "cache" if _VERSION >= (5, 24) else "past_key_values"
"""What models and ``generate`` call the cache."""

CROP_TAKES_LENGTH = _VERSION < (5, 15)
"""Whether a positive number given to ``crop`` is a length to keep; later it is refused."""


def query_length(given: Any) -> int:
    """How many queries a mask is for.

    Parameters
    ----------
    given : int or torch.Tensor
        A number; up to 5.3 the positions of the queries.

    Returns
    -------
    int
        Queries.
    """
    return given if isinstance(given, int) else int(given.shape[0])


def tokens_to_remove(given: int, length: int) -> int:
    """How many last tokens ``crop`` takes away.

    Parameters
    ----------
    given : int
        Minus that many; up to 5.14 also a length to keep, if it is positive.
    length : int
        What there is.

    Returns
    -------
    int
        0 to ``length``.

    Raises
    ------
    ValueError
        If ``given`` is positive where that has no meaning.
    """
    if given > 0 and not CROP_TAKES_LENGTH:
        raise ValueError(
            f"crop was given {given}; it takes minus the number of tokens to remove, or 0"
        )
    return max(0, length - given) if given > 0 else min(-given, length)
