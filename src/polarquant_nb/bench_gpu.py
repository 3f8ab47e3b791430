"""The benchmark on an NVIDIA GPU: what is timed there, by CUDA's events, and what copies reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polarquant_nb.attend import attention
from polarquant_nb.bench_contenders import Contender, Inputs, folded_sdpa, gqa_sdpa
from polarquant_nb.codec import encode
from polarquant_nb.formats import FormatPair, PolarFormat

if TYPE_CHECKING:
    import torch

__all__ = ["GPU_STAGES", "copy_bandwidth", "describe_gpu", "event_seconds", "median_seconds"]

_COPIED_BYTES = 2**30
"""Far more than caches hold."""


def event_seconds(call: Callable[[], Any]) -> float:
    """Time of a call, from an event on the GPU's stream before it to one after it.

    Parameters
    ----------
    call : callable
        Launches kernels on torch's current stream.

    Returns
    -------
    float
        Seconds; with the time that Python takes where kernels are shorter.
    """
    import torch

    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def median_seconds(call: Callable[[], Any], repeat: int = 20) -> float:
    """Median of :func:`event_seconds`, after three calls that do not count.

    Parameters
    ----------
    call : callable
        What to time.
    repeat : int
        How often.

    Returns
    -------
    float
        Seconds.
    """
    for _ in range(3):
        call()
    return statistics.median(event_seconds(call) for _ in range(repeat))


def copy_bandwidth() -> float:
    """What copying a gibibyte reaches, the measure of all bandwidths.

    Returns
    -------
    float
        Bytes a second, read and written.
    """
    import torch

    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


def describe_gpu() -> dict[str, Any]:
    """The GPU that is measured, of those that there may be.

    Returns
    -------
    dict
        ``name``, ``capability``, ``multiprocessors``, ``memory`` (bytes) and ``torch_cuda``, the
        version of CUDA that torch was built with.
    """
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "capability": [found.major, found.minor],
        "multiprocessors": found.multi_processor_count,
        "memory": found.total_memory,
        "torch_cuda": torch.version.cuda,
    }


# ---- stages --------------------------------------------------------------------------------------


def _encode(x: torch.Tensor, fmt: PolarFormat) -> dict[str, Contender]:
    """Against the dense rotation that a codec without structure has to begin with, and a copy."""
    import torch

    half = x.bfloat16()
    dense = torch.randn(fmt.head_dim, fmt.head_dim, dtype=half.dtype, device=half.device)
    out, pages = torch.empty_like(half), encode(half, fmt)
    both = half.nbytes + pages.nbytes
    return {
        # 'propagate', as a cache does: nothing waits for the GPU
        "ours": Contender(lambda: encode(half, fmt, nan="propagate"), both),
        "dense rotation bf16": Contender(
            lambda: torch.matmul(half, dense, out=out), 2 * half.nbytes
        ),
        "copy bf16": Contender(lambda: out.copy_(half), 2 * half.nbytes),
    }


def _decompress(x: torch.Tensor, fmt: PolarFormat) -> dict[str, Contender]:
    """All vectors again, against copying them."""
    import torch

    half = x.bfloat16()
    out, pages = torch.empty_like(half), encode(half, fmt)
    return {
        "ours": Contender(pages.decode, half.nbytes + pages.nbytes),
        "copy bf16": Contender(lambda: out.copy_(half), 2 * half.nbytes),
    }


def _decode(inputs: Inputs, pair: FormatPair) -> dict[str, Contender]:
    """One query of each head against the whole cache."""
    q, k, v = inputs.q[:, :, -1:].bfloat16(), inputs.k.bfloat16(), inputs.v.bfloat16()
    keys, values = encode(k, pair.keys), encode(v, pair.values)
    q16, k16, v16 = (x.half() for x in (q, k, v))
    held = k.nbytes + v.nbytes
    return {
        "ours": Contender(lambda: attention(q, keys, values), keys.nbytes + values.nbytes),
        "SDPA bf16, folded": Contender(lambda: folded_sdpa(q, k, v), held),
        "SDPA fp16, folded": Contender(lambda: folded_sdpa(q16, k16, v16), held),
        "SDPA bf16, enable_gqa": Contender(lambda: gqa_sdpa(q, k, v), held),
    }


def _prefill(inputs: Inputs, pair: FormatPair) -> dict[str, Contender]:
    """Many queries, the last tokens, on a packed history."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = inputs.q.bfloat16(), inputs.k.bfloat16(), inputs.v.bfloat16()
    keys, values = encode(k, pair.keys), encode(v, pair.values)
    q16, k16, v16 = (x.half() for x in (q, k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    held = k.nbytes + v.nbytes
    return {
        "ours": Contender(
            lambda: attention(q, keys, values, is_causal=True), keys.nbytes + values.nbytes
        ),
        "SDPA bf16, enable_gqa": Contender(lambda: gqa_sdpa(q, k, v, mask), held),
        "SDPA fp16, enable_gqa": Contender(lambda: gqa_sdpa(q16, k16, v16, mask), held),
    }


GPU_STAGES: dict[str, Callable[[Inputs, FormatPair], dict[str, Contender]]] = {
    "encode keys": lambda inputs, pair: _encode(inputs.k, pair.keys),
    "encode values": lambda inputs, pair: _encode(inputs.v, pair.values),
    "decompress keys": lambda inputs, pair: _decompress(inputs.k, pair.keys),
    "decompress values": lambda inputs, pair: _decompress(inputs.v, pair.values),
    "decode": _decode,
    "prefill": _prefill,
}
"""What can be measured on a GPU; see ``bench_contenders.STAGES``.  Bytes of encoding and
decompressing are those read and written."""
