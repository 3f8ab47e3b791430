"""encode, decode and attention for arrays on a GPU: what the public functions hand over."""

from __future__ import annotations

from typing import Any

import numpy as np

from polarquant_nb.arrays import ArrayKind, open_elements, torch_name
from polarquant_nb.formats import PolarFormat
from polarquant_nb.gpu_arrays import as_tensor, give_back, on_gpu, same_device
from polarquant_nb.gpu_attention import attend_rows
from polarquant_nb.gpu_codec import decode_rows, encode_rows
from polarquant_nb.gpu_preconditioning import scaled, subtract_bias
from polarquant_nb.gpu_status import check
from polarquant_nb.layout import PAGE
from polarquant_nb.pages import PolarPages
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.queries import check_causal, check_query_shape, mask_shape, open_logits

__all__ = [
    "attention",
    "attention_of_tensors",
    "decode",
    "encode",
    "encode_tensor",
    "open_mask",
]

Tensor = Any


def encode(
    x: Any, fmt: PolarFormat, codebooks: Any, nan: str, preconditioner: Preconditioner | None,
    first_position: int,
) -> PolarPages:  # fmt: skip
    """:func:`polarquant_nb.encode` of an array on a GPU."""
    check()
    tensor, family = as_tensor(x, "x")
    return encode_tensor(tensor, fmt, codebooks, nan, family, preconditioner, first_position)


def encode_tensor(
    x: Tensor, fmt: PolarFormat, codebooks: Any, nan: str, family: str = "torch",
    preconditioner: Preconditioner | None = None, first_position: int = 0,
) -> PolarPages:  # fmt: skip
    """Encode a tensor where it is; types and ``nan`` are checked already.

    Parameters
    ----------
    x : torch.Tensor, shape ``(..., seq_len, head_dim)``
        Vectors.
    fmt, codebooks, nan
        As :func:`polarquant_nb.encode` takes them.
    family : str
        What decoding returns; see :func:`~polarquant_nb.gpu_arrays.as_tensor`.
    preconditioner, first_position
        As :func:`polarquant_nb.encode` takes them.

    Returns
    -------
    PolarPages
        With words on the tensor's device.

    Raises
    ------
    ValueError
        If shapes do not fit, or with ``nan="raise"`` a row cannot be stored: only then is the GPU
        waited for.
    """
    import torch

    from polarquant_nb.codec import chosen_codebooks

    if x.ndim < 2 or x.shape[-1] != fmt.head_dim:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be (..., seq_len, head_dim), with "
            f"fmt.head_dim = {fmt.head_dim}"
        )
    *leading, seq_len, _ = x.shape
    given, rotated = x, x
    if preconditioner is not None:
        preconditioner.check(fmt, leading)
        x = subtract_bias(x, preconditioner, first_position)
        if isinstance(codebooks, str):  # fitted to what is rotated
            rotated = scaled(x, preconditioner)
    books = chosen_codebooks(codebooks, rotated, fmt)
    num_pages, page_words = -(-seq_len // PAGE), fmt.layout.num_words
    words: Any = torch.empty((*leading, num_pages, page_words), dtype=torch.int32, device=x.device)
    starts = torch.arange(words.numel() // page_words, device=x.device) * page_words
    events = encode_rows(x, fmt, books, words.reshape(-1), starts, preconditioner)
    nonfinite, saturated = events.sum(0).unbind()
    kind = ArrayKind(family, torch_name(given.dtype))
    if nan == "raise":
        nonfinite, saturated = int(nonfinite), int(saturated)
        if nonfinite or saturated:
            raise ValueError(_describe(given, words, fmt, nonfinite, preconditioner))
    return PolarPages(
        fmt, words, seq_len, books, kind, nonfinite, saturated, preconditioner, first_position
    )


def _describe(
    x: Tensor, words: Tensor, fmt: PolarFormat, nonfinite: int,
    preconditioner: Preconditioner | None,
) -> str:  # fmt: skip
    """Which row cannot be stored; the slow path of an error, on the CPU."""
    from polarquant_nb.codec import describe_nonfinite, describe_saturated

    elements, kind = open_elements(x.cpu())
    if nonfinite:
        return describe_nonfinite(elements, kind, preconditioner)
    found = words.cpu().numpy().view(np.uint32)
    return describe_saturated(elements, kind, found, fmt, preconditioner)


def decode(pages: PolarPages, start: int, stop: int, kind: ArrayKind) -> Any:
    """:func:`polarquant_nb.decode` of pages on a device; arguments are checked already.

    Parameters
    ----------
    pages : PolarPages
        With words on a device.
    start, stop : int
        Range of tokens.
    kind : ArrayKind
        What to return.

    Returns
    -------
    array
        On that device.
    """
    import torch

    shape = (*pages.shape[:-2], stop - start, pages.format.head_dim)
    dtype = getattr(torch, kind.dtype)
    out = torch.empty(
        shape, dtype=torch.float32 if dtype == torch.float64 else dtype, device=pages.device
    )
    decode_rows(pages.device_rows, start, stop, out)
    return give_back(out.to(dtype), kind.family)


def attention(
    q: Any, k_pages: PolarPages, v_pages: PolarPages, scale: float | None, mask: Any,
    is_causal: bool, softcap: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    """:func:`polarquant_nb.attention` where queries or pages are on a GPU."""
    check()
    if not on_gpu(q):
        raise ValueError(
            f"q is on the CPU, but k_pages on {k_pages.device}; move q there, or the pages by "
            "k_pages.to('cpu')"
        )
    tensor, family = as_tensor(q, "q")
    results = attention_of_tensors(
        tensor, k_pages, v_pages, scale, mask, is_causal, softcap, return_lse
    )
    if return_lse:
        return tuple(give_back(result, family) for result in results)
    return give_back(results, family)


def attention_of_tensors(
    q: Tensor, k_pages: PolarPages, v_pages: PolarPages, scale: float | None = None,
    mask: Any = None, is_causal: bool = False, softcap: float | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of a tensor to pages on its device; pages are checked already.

    Parameters
    ----------
    q : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Queries.
    k_pages, v_pages, scale, mask, is_causal, softcap, return_lse
        As :func:`polarquant_nb.attention` takes them.

    Returns
    -------
    torch.Tensor, or two
        As there.

    Raises
    ------
    TypeError
        If the mask is of another dtype than bool or floats.
    ValueError
        If shapes do not fit, or something is on another device.
    """
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.device != q.device:
            raise ValueError(
                f"q is on device {q.device}, but {name} on {pages.device}; move q there, or the "
                f"pages by {name}.to('{q.device}')"
            )
    *_, seq_len, head_dim = k_pages.shape
    check_query_shape(tuple(q.shape), k_pages.shape, "k_pages")
    if is_causal:
        check_causal(q.shape[2], seq_len)
    logits = open_logits(scale, softcap, head_dim)
    numbers = None if mask is None else open_mask(mask, q, seq_len)
    wide = q.float() if q.element_size() == 8 else q
    out, lse = attend_rows(
        wide,
        k_pages.device_rows,
        v_pages.device_rows,
        logits,
        numbers,
        int(is_causal),
        longest=seq_len,
    )
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def open_mask(mask: Any, q: Tensor, seq_len: int) -> Tensor:
    """The mask of attention on a GPU.

    Parameters
    ----------
    mask : torch.Tensor of bool or float, or another array on the GPU
        What the user gave.
    q : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Queries.
    seq_len : int
        Columns.

    Returns
    -------
    torch.Tensor of float32, of four axes
        Numbers to add; each axis as long as in ``(batch, num_heads, q_len, seq_len)``, or 1.

    Raises
    ------
    TypeError
        If it is of another dtype.
    ValueError
        If it cannot be broadcast, or is elsewhere than the queries.
    """
    import torch

    if not isinstance(mask, torch.Tensor):
        if not on_gpu(mask):
            raise ValueError(
                f"mask is a {type(mask).__name__} on the CPU, but q on device {q.device}; give a "
                "torch tensor on that device"
            )
        mask = torch.utils.dlpack.from_dlpack(mask)
    same_device("mask", mask, q.device, "q")
    if mask.dtype == torch.bool:
        numbers = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -float("inf"))
    elif mask.is_floating_point():
        numbers = mask.detach().float()
    else:
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool or a float type")
    return numbers.reshape(mask_shape(tuple(mask.shape), (*q.shape[:3], seq_len)))
