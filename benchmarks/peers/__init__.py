"""Other ways to compress a cache, as small baselines: what they compute, not how fast.

Each is written from its description, for quality alone: vectors go in, decoded vectors and the
bytes of all that is stored come out.  Numbers are rounded where a real implementation rounds them
(scales and norms to 16 bits), and bytes are counted alike: codes at their bits, and every scale,
zero point and norm.  All keep the same first and last tokens exact, but for transformers' own
caches, which cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from polarquant_nb.evaluate import Contender, compress_with

from . import ggml, hugging_face, kivi, turboquant

__all__ = ["contenders"]


def contenders(sink: int, recent: int) -> tuple[list[Contender], dict[str, str]]:
    """All peers, and why those that are missing are."""

    def peer(family: str, kind: str, code: Callable[..., Any], multiple: int = 1) -> Contender:
        compress = partial(compress_with, code=code, sink=sink, recent=recent, multiple=multiple)
        return Contender(f"{family}, {kind}", compress, family)

    found = [
        peer("KIVI", f"{bits} bits", partial(kivi.code, bits=bits), kivi.GROUP) for bits in (4, 2)
    ]
    found += [
        peer("TurboQuant_mse", f"{bits} bits", partial(turboquant.code, bits=bits))
        for bits in (4, 3, 2)
    ]
    for fmt, code in {"q8_0": ggml.q8_0, "q4_0": ggml.q4_0}.items():
        found.append(peer("llama.cpp", fmt, partial(ggml.code, quantise=code)))
        found.append(
            peer("llama.cpp, Hadamard", fmt, partial(ggml.code, quantise=code, rotate=True))
        )
    missing = {}
    for backend in hugging_face.PACKAGES:
        reason = hugging_face.missing(backend)
        if reason:
            missing[backend] = reason
            continue
        family = f"QuantizedCache, {backend}"
        found += [
            Contender(
                f"{family}, {bits} bits",
                partial(hugging_face.compress, backend=backend, bits=bits),
                family,
            )
            for bits in (4, 2)
        ]
    return found, missing
