"""What the benchmark times: ours, and what torch does with keys and values that are not packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polarquant_nb.attend import attention
from polarquant_nb.codec import encode
from polarquant_nb.formats import FormatPair, PolarFormat

if TYPE_CHECKING:
    import torch

__all__ = [
    "STAGES",
    "Contender",
    "Inputs",
    "Int4",
    "folded_sdpa",
    "gqa_sdpa",
    "grouped_matmul",
]


@dataclass(frozen=True)
class Contender:
    """Something to time, and the bytes of the keys and values that it reads.

    Parameters
    ----------
    call : callable
        What is timed.
    nbytes : int, optional
        Bytes of the cache in the form that ``call`` needs.
    """

    call: Callable[[], Any]
    nbytes: int | None = None


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values in float32, of numbers that bfloat16 holds too.

    Parameters
    ----------
    q : torch.Tensor, shape ``(1, num_heads, q_len, head_dim)``
        Of the last tokens; the last one is the query of a decoding step.
    k, v : torch.Tensor, shape ``(1, num_kv_heads, seq_len, head_dim)``
        Keys, with a mean as real ones have, and values.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def draw(
        shape: tuple[int, int, int], seq_len: int, q_len: int, seed: int, device: str = "cpu"
    ) -> Inputs:
        """Draw normal numbers.

        Parameters
        ----------
        shape : (num_kv_heads, num_heads, head_dim)
            Shape of a layer.
        seq_len, q_len : int
            Tokens and queries.
        seed : int
            Same seed, same numbers on the same device.
        device : str
            Of torch.

        Returns
        -------
        Inputs
            Drawn.
        """
        import torch

        kv_heads, heads, head_dim = shape
        source = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, tokens: int) -> torch.Tensor:
            return torch.randn(1, rows, tokens, head_dim, generator=source, device=device)

        mean = 2 * normal(kv_heads, 1)
        drawn = normal(heads, q_len), normal(kv_heads, seq_len) + mean, normal(kv_heads, seq_len)
        return Inputs(*(x.bfloat16().float() for x in drawn))


# ---- stages --------------------------------------------------------------------------------------


def _encode(x: torch.Tensor, fmt: PolarFormat) -> dict[str, Contender]:
    """Against the dense rotation that a codec without structure has to begin with."""
    import torch

    dense = torch.randn(fmt.head_dim, fmt.head_dim)
    out = torch.empty_like(x)
    return {
        "ours": Contender(lambda: encode(x, fmt)),
        "dense rotation fp32": Contender(lambda: torch.matmul(x, dense, out=out)),
    }


def _decode(inputs: Inputs, pair: FormatPair) -> dict[str, Contender]:
    """One query of each head against the whole cache."""
    keys, values = encode(inputs.k, pair.keys), encode(inputs.v, pair.values)
    exact = inputs.q[:, :, -1:], inputs.k, inputs.v
    q, k, v = _bfloat16(*exact)
    k4, v4 = Int4.quantise(k), Int4.quantise(v)
    in_bf16, in_fp32 = _nbytes(k, v), _nbytes(*exact[1:])
    return {
        "ours": Contender(lambda: attention(q, keys, values), keys.nbytes + values.nbytes),
        "matmul bf16": Contender(lambda: grouped_matmul(q, k, v), in_bf16),
        "matmul fp32": Contender(lambda: grouped_matmul(*exact), in_fp32),
        "SDPA bf16, folded": Contender(lambda: folded_sdpa(q, k, v), in_bf16),
        "int4 to bf16, SDPA": Contender(
            lambda: folded_sdpa(q, k4.dequantise(), v4.dequantise()), k4.nbytes + v4.nbytes
        ),
        "SDPA bf16, enable_gqa": Contender(lambda: gqa_sdpa(q, k, v), in_bf16),
    }


def _prefill(inputs: Inputs, pair: FormatPair) -> dict[str, Contender]:
    """Many queries, the last tokens, on a packed history."""
    import torch

    keys, values = encode(inputs.k, pair.keys), encode(inputs.v, pair.values)
    exact = inputs.q, inputs.k, inputs.v
    q, k, v = _bfloat16(*exact)
    q_len, seq_len = inputs.q.shape[2], inputs.k.shape[2]
    mask = torch.ones(q_len, seq_len, dtype=torch.bool).tril(seq_len - q_len)
    mask = mask.repeat(inputs.q.shape[1] // inputs.k.shape[1], 1)
    return {
        "ours": Contender(
            lambda: attention(inputs.q, keys, values, is_causal=True), keys.nbytes + values.nbytes
        ),
        "SDPA fp32, folded": Contender(lambda: folded_sdpa(*exact, mask), _nbytes(*exact[1:])),
        "SDPA bf16, folded": Contender(lambda: folded_sdpa(q, k, v, mask), _nbytes(k, v)),
    }


STAGES: dict[str, Callable[[Inputs, FormatPair], dict[str, Contender]]] = {
    # encoding first: the others encode too, and its first call is to be seen
    "encode keys": lambda inputs, pair: _encode(inputs.k, pair.keys),
    "encode values": lambda inputs, pair: _encode(inputs.v, pair.values),
    "decode": _decode,
    "prefill": _prefill,
}
"""What can be measured; each makes, from inputs and formats, contenders by name: ours is first."""


# ---- baselines -----------------------------------------------------------------------------------


def grouped_matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention as two matrix products for each kv head: the fastest that torch has for one query.

    Parameters
    ----------
    q : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Queries.
    k, v : torch.Tensor, shape ``(batch, num_kv_heads, seq_len, head_dim)``
        Keys and values.

    Returns
    -------
    torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Attention.
    """
    weights = (_folded(q, k) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).reshape(q.shape)


def folded_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """SDPA with the query heads of a kv head as if they were further queries.

    Parameters
    ----------
    q, k, v
        As in :func:`grouped_matmul`.
    mask : torch.Tensor of bool, shape ``(num_heads / num_kv_heads * q_len, seq_len)``, optional
        True where a query may attend.

    Returns
    -------
    torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Attention.
    """
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    return sdpa(_folded(q, k), k, v, attn_mask=mask).reshape(q.shape)


def gqa_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """SDPA as it is meant for grouped heads, which for one query in bf16 is slow on CPUs.

    Parameters
    ----------
    q, k, v
        As in :func:`grouped_matmul`.
    mask : torch.Tensor, optional
        What SDPA takes as such.

    Returns
    -------
    torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Attention.
    """
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)


@dataclass(frozen=True)
class Int4:
    """Vectors in asymmetric int4 for each token and group, two codes a byte.

    Packages that quantise caches do this, and decode everything at every step.  A byte holds codes
    from the two halves of its group, which torch unpacks faster than neighbours.

    Parameters
    ----------
    codes : torch.Tensor of uint8, shape ``(..., num_groups, group / 2)``
        Packed codes.
    scale, low : torch.Tensor of bfloat16, shape ``(..., num_groups, 1)``
        Step and smallest value of each group.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def quantise(x: torch.Tensor) -> Int4:
        """Quantise in groups of 64, or of 32 or 16 where 64 does not divide head_dim.

        Parameters
        ----------
        x : torch.Tensor, shape ``(..., head_dim)``
            Vectors.

        Returns
        -------
        Int4
            Quantised.
        """
        import torch

        group = next(n for n in (64, 32, 16) if x.shape[-1] % n == 0)
        groups = x.float().reshape(*x.shape[:-1], -1, group)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        low = low.bfloat16()
        scale = ((high - low) / 15).clamp_min(1e-30).bfloat16()
        codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8)
        return Int4(codes[..., : group // 2] | codes[..., group // 2 :] << 4, scale, low)

    def dequantise(self) -> torch.Tensor:
        """Decode everything, in the fastest of several ways tried: one buffer, changed in place.

        Returns
        -------
        torch.Tensor of bfloat16, shape ``(..., head_dim)``
            Vectors.
        """
        import torch

        half = self.codes.shape[-1]
        x = torch.empty(*self.codes.shape[:-1], 2 * half, dtype=torch.bfloat16)
        x[..., :half] = self.codes & 15
        x[..., half:] = self.codes >> 4
        return x.mul_(self.scale).add_(self.low).flatten(-2)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return _nbytes(self.codes, self.scale, self.low)


def _folded(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Queries ``(batch, num_kv_heads, group * q_len, head_dim)``, the heads of a group in turn."""
    return q.reshape(*k.shape[:2], -1, q.shape[-1])


def _bfloat16(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.bfloat16() for x in tensors)


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(x.nbytes for x in tensors)
