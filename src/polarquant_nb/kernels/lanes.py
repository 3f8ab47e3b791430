"""Lane programs: arithmetic written once, run on vector registers or on NumPy arrays.

A *stage* is a plain Python function ``stage(L, program, ...)`` whose values are vectors with one
token per lane.  It is straight-line code: Python loops and conditions are evaluated while the code
is written down, so a loop over 16 coordinates becomes 16 copies of its body, held in registers.

``L`` writes the operations down in one of two ways.  :class:`RegisterLanes` emits LLVM
instructions, and :func:`stage` makes the function callable from an njit kernel;
:class:`ArrayLanes` computes at once with NumPy, which is what runs when Numba's JIT is disabled.
Additions and multiplications are single IEEE float32 operations in both, so codes agree bit for
bit; :meth:`fma` is for results that need not.

Vectors support ``+ - *`` and comparisons (float), ``& | ^ << >> +`` and ``>=`` (unsigned), and
``& ^ ~`` (masks).  Arrays are one-dimensional, of float32 or uint32, and indices count elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import config, types
from numba.extending import intrinsic

from polarquant_nb.kernels.array_lanes import ArrayLanes, Index, Mask, Vector
from polarquant_nb.kernels.jit import Program, ProgramType
from polarquant_nb.kernels.register_lanes import RegisterLanes

__all__ = ["ArrayLanes", "Index", "Mask", "RegisterLanes", "Vector", "stage"]


def stage(function: Callable[..., None]) -> Callable[..., None]:
    """Make ``function(L, program, *arguments)`` callable from njit kernels.

    Arguments are a :class:`Program`, then one-dimensional contiguous arrays of float32, uint32 or
    int64, and integers (element indices).  The function itself stays there as ``lane_program``, for
    other back ends.
    """
    if config.DISABLE_JIT:

        def run(program: Program, *arguments: Any) -> None:
            with np.errstate(all="ignore"):
                function(ArrayLanes(program.lanes), program, *arguments)

        run.lane_program = function  # type: ignore[attr-defined]
        return run

    def write(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        program_type, *kinds = signature.args
        lanes = RegisterLanes(builder, program_type.program)
        values: list[Any] = []
        for kind, value in zip(kinds, arguments[1:], strict=True):
            if isinstance(kind, types.Array):
                values.append(context.make_array(kind)(context, builder, value).data)
            else:
                element = context.cast(builder, value, kind, types.int64)
                values.append(lanes.as_index(element))
        function(lanes, program_type.program, *values)
        return context.get_dummy_value()

    def typed(_context: Any, program: Any, *kinds: Any) -> Any:
        ok = all(
            isinstance(kind, types.Integer)
            or (isinstance(kind, types.Array) and kind.ndim == 1 and kind.layout == "C")
            for kind in kinds
        )
        return (
            (types.void(program, *kinds), write)
            if isinstance(program, ProgramType) and ok
            else None
        )

    # Numba matches calls by signature and takes no *arguments: show it the stage's own, in which
    # the typing context takes the place of L.
    typed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    typed.__name__ = function.__name__
    typed.__doc__ = function.__doc__
    written = intrinsic(typed)
    written.lane_program = function
    return written
