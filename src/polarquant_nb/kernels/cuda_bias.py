"""The logits of a rotary bias on a GPU, q·R_i b: what keys that are stored without it lack.

As the angle of position 128 P + t is the sum of those of 128 P and t, coefficients are turned once
for a page, and meet one table of 128 positions.  A coordinate that is not turned is a coefficient
that meets ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from polarquant_nb.kernels.array_lanes import Index, Vector
from polarquant_nb.kernels.cuda_codec import THREADS
from polarquant_nb.kernels.cuda_lanes import ALIGNMENT, compiled_kernel, device_stage
from polarquant_nb.kernels.cuda_stages import widened
from polarquant_nb.kernels.jit import Program
from polarquant_nb.layout import PAGE

__all__ = ["make_bias"]

float32 = np.float32


def make_bias(
    program: Program, element: str, group: int, threads: int = THREADS
) -> Callable[..., Any]:
    """The kernel that makes logits of a bias.

    Parameters
    ----------
    program : Program
        Format of the keys, of which head_dim alone matters.
    element : {'float32', 'float16', 'bfloat16'}
        What queries are.
    group : int
        Queries of a group.
    threads : int
        Threads of a block.

    Returns
    -------
    callable
        Kernel; blocks for rows and groups, and for pages.
    """
    D, G, COEFFICIENTS = program.head_dim, group, program.head_dim * group

    stage = partial(device_stage, program=program, stride=1)

    turn, still = stage(turn_pair, element=element, group=G), stage(multiply, element=element)
    add_up = stage(meet_table, group=G)

    def bias_logits(q, vectors, phases, table, out, scale, num_heads, q_len, per_row, groups, own,
                    pairs, pair_step, second, batch_stride, head_stride, query_stride,
                    coordinate_stride):  # fmt: skip
        """Logits of ``per_row`` queries a row with ``gridDim.y`` pages, queries and then tokens.

        ``vectors`` are those of ``own`` rows, in turn.  Pair j is the coordinates
        ``j * pair_step`` and ``second`` more; ``phases`` are pages, pairs, two numbers.
        """
        C = cuda.shared.array(COEFFICIENTS, float32, alignment=ALIGNMENT)
        # blockDim, not a constant: NVVM would unroll loops, and hoist what fills all registers
        thread, step = cuda.threadIdx.x, cuda.blockDim.x
        row, first_query = cuda.blockIdx.x // groups, cuda.blockIdx.x % groups * G
        page, columns = cuda.blockIdx.y, cuda.gridDim.y * PAGE
        for i in range(thread, (D - pairs) * G, step):
            item, g = i // G, i % G
            # queries that fill the group up are the last one again
            query = row * per_row + min(first_query + g, per_row - 1)
            batch, rest = query // (num_heads * q_len), query % (num_heads * q_len)
            index = batch * batch_stride + rest // q_len * head_stride + rest % q_len * query_stride
            b = row % own * D
            if item < pairs:
                at = item * pair_step
                turn(0, q, index + at * coordinate_stride, second * coordinate_stride, vectors,
                     b + at, second, phases, 2 * (page * pairs + item), scale, C,
                     2 * item * G + g)  # fmt: skip
            else:
                at = item + pairs
                still(0, q, index + at * coordinate_stride, vectors, b + at, scale, C, at * G + g)
        cuda.syncthreads()
        for t in range(thread, PAGE, step):
            place = (row * per_row + first_query) * columns + page * PAGE + t
            add_up(0, table, t, C, out, place, columns, first_query, per_row)

    return compiled_kernel(bias_logits)


def turn_pair(
    L: Any, program: Program, q: Any, first: Index, second: Index, vectors: Any, b: Index,
    b_second: Index, phases: Any, at: Index, scale: Vector, C: Any, to: Index, *, element: str,
    group: int,
) -> None:  # fmt: skip
    """Coefficients of a pair of query and bias, turned to a page, to ``C[to]`` and a group on.

    They are the parts of (q₁ + i q₂)(b₁ − i b₂) e^{−iφ}.
    """
    q1 = widened(L, q, first, element) * scale
    q2 = widened(L, q, first + second, element) * scale
    b1, b2 = L.splat(vectors, b), L.splat(vectors, b + b_second)
    real, imaginary = q1 * b1 + q2 * b2, q2 * b1 - q1 * b2
    x, y = L.splat(phases, at), L.splat(phases, at + 1)
    L.put(C, to, real * x - imaginary * y)
    L.put(C, to + group, real * y + imaginary * x)


def multiply(
    L: Any, program: Program, q: Any, index: Index, vectors: Any, b: Index, scale: Vector, C: Any,
    to: Index, *, element: str,
) -> None:  # fmt: skip
    """The product of a coordinate of query and bias, to ``C[to]``."""
    L.put(C, to, widened(L, q, index, element) * scale * L.splat(vectors, b))


def meet_table(
    L: Any, program: Program, table: Any, token: Index, C: Any, out: Any, place: Index,
    columns: Index, first_query: Index, per_row: Index, *, group: int,
) -> None:  # fmt: skip
    """Sums of coefficients times a token's numbers, to ``out[place]`` and ``columns`` on."""

    def add(i: Index, sums: list[Vector]) -> list[Vector]:
        number = L.splat(table, i * PAGE + token)
        coefficients = L.splats(C, i * group, group)
        return [L.fma(number, c, s) for c, s in zip(coefficients, sums, strict=True)]

    sums = L.loop(program.head_dim, [L.f(0.0)] * group, add)
    for g, total in enumerate(sums):

        def write(g: int = g, total: Vector = total) -> None:
            L.put(out, columns * g + place, total)

        L.when(first_query + g, per_row, write)
