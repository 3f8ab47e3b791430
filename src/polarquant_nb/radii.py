"""Radii of 8 bits: a code for each radius, and one *anchor* for each page.

A radius is rounded to a grid of 128 numbers to the octave, those of bfloat16: the upper half of a
float32's bits, read as an integer, counts them.  A page stores every 2^s-th of them, s being the
smallest number with which its codes 1 to 254 reach from its smallest radius to its largest: two
octaves in steps of 1/128 for s = 0, four in steps of 1/64 for s = 1, and so on up to the 64 octaves
in steps of 1/4 that hold everything.  Code 0 is a radius of zero, or below 2⁻⁴⁶; code 255 is NaN.

The anchor says which numbers these are, in 16 bits: s, and above it the grid's index of code 0,
counted from 2⁻⁴⁷.  So a radius is the float32 with the bits

    (80 << 23) + (index << 16) + (code << (16 + s)),

and rounding adds half a step and shifts: every back end gets the same code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "GRID_START", "LARGEST_SHIFT", "LARGEST_SPAN", "NAN_BITS", "NAN_CODE", "SMALLEST_BITS",
    "Anchor", "merge_radii", "radii_of",
]  # fmt: skip

GRID_START = 80 << 23
"""Float32 bits of 2⁻⁴⁷, from where the grid is counted."""

SMALLEST_BITS = 81 << 23
"""Float32 bits of 2⁻⁴⁶, the smallest radius that is stored: code 0 then never is before 2⁻⁴⁷."""

NAN_BITS, NAN_CODE = 0x7FC00000, 255

LARGEST_SPAN = 253
"""Steps between the codes 1 and 254."""

LARGEST_SHIFT = 5
"""With steps of 32/128 octave the codes span 63 octaves; there are 62 from 2⁻⁴⁶ to 65504."""


class Anchor(NamedTuple):
    """What the codes of pages mean.

    Parameters
    ----------
    start : ndarray of int64
        The grid's index of code 0, for each page.
    shift : ndarray of int64
        A step is 2^shift numbers of the grid.
    """

    start: npt.NDArray[np.int64]
    shift: npt.NDArray[np.int64]

    @staticmethod
    def read(words: npt.NDArray[np.uint32]) -> Anchor:
        """From the words that have anchors in their upper halves."""
        anchors = words.astype(np.int64) >> 16
        return Anchor(anchors >> 3, anchors & 7)

    def write(self, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The words, with these anchors in their upper halves."""
        anchors = (self.start << 3 | self.shift) << 16
        return anchors.astype(np.uint32) | words & np.uint32(0xFFFF)


def radii_of(codes: npt.NDArray[np.uint8], anchor: Anchor) -> npt.NDArray[np.float32]:
    """Radii of pages.

    Parameters
    ----------
    codes : ndarray of uint8, shape ``(..., num_blocks, 128)``
        Codes.
    anchor : Anchor
        Of shape ``(...)``.

    Returns
    -------
    ndarray of float32, of the shape of the codes
        Radii.
    """
    bits = GRID_START + (_grid_indices(codes, anchor) << 16)
    bits = np.where(codes == NAN_CODE, NAN_BITS, np.where(codes == 0, 0, bits))
    return bits.astype(np.uint32).view(np.float32)


def merge_radii(
    codes: npt.NDArray[np.uint8], anchor: Anchor, new: npt.NDArray[np.uint8], new_anchor: Anchor,
    first: int,
) -> tuple[npt.NDArray[np.uint8], Anchor]:  # fmt: skip
    """Pages of which lanes ``first .. 127`` are taken from others.

    The anchor stays where its codes reach all radii; then the codes of the other lanes stay, too.
    Where only code 0 has to move they change by a constant; where steps grow, all are rounded
    again, to the coarser ones.

    Parameters
    ----------
    codes : ndarray of uint8, shape ``(..., num_blocks, 128)``
        The pages.
    anchor : Anchor
        Of the pages.
    new, new_anchor
        Of the pages that the lanes are taken from.
    first : int
        First lane.

    Returns
    -------
    codes : ndarray of uint8, shape ``(..., num_blocks, 128)``
        Of the merged pages.
    anchor : Anchor
        Of the merged pages.
    """
    lanes = np.arange(codes.shape[-1])
    codes = np.where(lanes < first, codes, new)
    old_indices = _grid_indices(codes, anchor)
    indices = np.where(lanes < first, old_indices, _grid_indices(new, new_anchor))
    stored = (codes != 0) & (codes != NAN_CODE)
    lowest = indices.min((-2, -1), initial=1 << 14, where=stored)
    highest = indices.max((-2, -1), initial=0, where=stored)

    top = anchor.start + ((LARGEST_SPAN + 1) << anchor.shift)
    coarse_enough = anchor.shift >= new_anchor.shift
    reached = coarse_enough & (lowest > anchor.start) & (highest <= top)
    shift = np.maximum(anchor.shift, new_anchor.shift)
    for _ in range(LARGEST_SHIFT):
        span = _steps(highest, shift) - _steps(lowest, shift)
        shift = np.where(span > LARGEST_SPAN, shift + 1, shift)
    start = (_steps(lowest, shift) - 1) << shift
    kept = reached | (highest == 0)
    merged = Anchor(np.where(kept, anchor.start, start), np.where(kept, anchor.shift, shift))
    shift = merged.shift[..., None, None]
    moved = _steps(indices, shift) - (merged.start[..., None, None] >> shift)
    return np.where(stored, moved, codes).astype(np.uint8), merged


def _grid_indices(codes: npt.NDArray[np.uint8], anchor: Anchor) -> npt.NDArray[np.int64]:
    start, shift = (part[..., None, None] for part in anchor)
    indices: npt.NDArray[np.int64] = start + (codes.astype(np.int64) << shift)
    return indices


def _steps(
    indices: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Numbers of the grid, in steps, rounded to nearest; upwards in the middle."""
    return (indices + (1 << shift >> 1)) >> shift
