"""A Llama-style decoder with random weights; docs/how-to/custom-decoder.md shows this file.

The caches are made by the caller and handed in, one for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes."""

    vocab_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 384


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: Any, padding: Tensor | None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        cache.append(k, v, padding)
        return self.out(cache.attend(q).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated MLP (SwiGLU), each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, config.hidden, bias=False)
        self.up = nn.Linear(width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, cache: Any, padding: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, cache, padding)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TinyLlama(nn.Module):
    """Tokens and their positions, ``(batch, n)``, to logits, ``(batch, n, vocab_size)``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        self.embed = nn.Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        half = torch.arange(config.head_dim // 2)
        self.register_buffer("frequencies", 10000.0 ** (-half / len(half)))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        padding: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(tokens)
        angles = positions[:, None, :, None] * self.frequencies  # one axis for the heads
        rotary = torch.stack([angles.cos(), angles.sin()])
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, rotary, cache, padding)
        return self.head(self.norm(x))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary positional encoding of queries or keys, ``(batch, heads, n, head_dim)``."""
    (a, b), (cos, sin) = x.float().chunk(2, -1), rotary
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).type_as(x)


class ExactCache:
    """What such a decoder has without this package: all keys and values as they are."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.padding: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, padding: Tensor | None = None) -> None:
        if self.k is None:
            self.k, self.v, self.padding = k, v, padding
        else:
            self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)

    def attend(self, q: Tensor) -> Tensor:
        seq_len, q_len = self.k.shape[2], q.shape[2]
        mask = torch.ones(q_len, seq_len, dtype=torch.bool).tril(seq_len - q_len)
        if self.padding is not None:
            mask = mask & (torch.arange(seq_len) >= self.padding[:, None, None, None])
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask, enable_gqa=True)


@torch.inference_mode()
def greedy(
    model: nn.Module,
    prompt: Tensor,
    num_tokens: int,
    caches: Sequence[Any],
    padding: Tensor | None = None,
) -> Tensor:
    """The ``num_tokens`` likeliest next tokens, ``(batch, num_tokens)``; caches start empty."""
    positions = torch.arange(prompt.shape[1])[None]
    if padding is not None:
        positions = (positions - padding[:, None]).clamp(min=0)
    logits = model(prompt, positions, caches, padding)
    tokens = [logits[:, -1:].argmax(-1)]
    while len(tokens) < num_tokens:
        positions = positions[:, -1:] + 1
        logits = model(tokens[-1], positions, caches)
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)
