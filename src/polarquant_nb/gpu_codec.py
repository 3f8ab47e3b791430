"""Encode and decode on a GPU: torch tensors in and out, nothing waits.

Every function takes tensors of any device.  On a GPU kernels are launched on torch's current
stream; in Numba's CUDA simulator they run at once on CPU tensors, which is how they are tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import torch_name
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import PolarFormat
from polarquant_nb.gpu_preconditioning import add_bias
from polarquant_nb.layout import PAGE
from polarquant_nb.preconditioning import Preconditioner, rotary_bias, row_signs
from polarquant_nb.rotations import rotation_for

if TYPE_CHECKING:
    import torch

    from polarquant_nb.pages import PolarPages

__all__ = [
    "DeviceRows",
    "Launcher",
    "Tables",
    "copied",
    "copied_integers",
    "decode_rows",
    "device_rows",
    "encode_rows",
]

Tensor = Any


@dataclass(frozen=True, eq=False)
class Tables:
    """What kernels read besides pages, on one device.

    Parameters
    ----------
    signs, order, inverse_order, mix, dense, back : torch.Tensor
        Factors of the rotation; signs are ``(heads, 2 d)``, with scales multiplied in.
    cosines, thresholds : torch.Tensor
        Of the codebooks.
    """

    signs: Tensor
    order: Tensor
    inverse_order: Tensor
    mix: Tensor
    dense: Tensor
    back: Tensor
    cosines: Tensor
    thresholds: Tensor

    @property
    def heads(self) -> int:
        """Rows of signs; row ``r`` of pages or queries takes row ``r`` modulo these."""
        return int(self.signs.shape[0])


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Pages of several rows on a device; see :class:`~polarquant_nb.rows.PackedRows`.

    Parameters
    ----------
    format, codebooks
        Of all pages.
    words : torch.Tensor of int32, 1-d
        Memory that holds the pages.
    starts : torch.Tensor of int64, shape ``(rows, num_pages)``
        Index of each page's first word; whatever it is where a row is shorter.
    lengths : torch.Tensor of int64, shape ``(rows,)``
        Tokens of each row.
    shortest : int
        Tokens of the shortest row.
    prepared : dict
        What attention works out once.
    preconditioner : Preconditioner, optional
        Of the vectors; of row ``r`` modulo the rows that it has.
    first_position : int
        Position of each row's first token, which a rotary bias depends on.
    """

    format: PolarFormat
    codebooks: Codebooks
    words: Tensor
    starts: Tensor
    lengths: Tensor
    shortest: int
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)
    preconditioner: Preconditioner | None = None
    first_position: int = 0


class Launcher:
    """Launches kernels on one device.

    Parameters
    ----------
    device : torch.device
        Where.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        from polarquant_nb.kernels.cuda_lanes import SIMULATED

        self.simulated, self.torch, self.device = SIMULATED, torch, device
        self.capability, self.processors = (0, 0), 2
        if not SIMULATED:
            properties = torch.cuda.get_device_properties(device)
            self.capability = properties.major, properties.minor
            self.processors = properties.multi_processor_count

    def kernel(self, name: str, program: Any, element: str = "float32", **options: Any) -> Any:
        """A kernel, compiled at the first call; see ``cuda_compile.KernelSpec``."""
        from polarquant_nb.kernels.cuda_compile import KernelSpec
        from polarquant_nb.kernels.cuda_launch import kernel_for

        if self.simulated:
            options["threads"] = simulated_threads(program, options.get("values"))
        return kernel_for(KernelSpec(name, program, element, **options), self.capability)

    def address(self, tensor: Tensor) -> Any:
        """What a kernel takes for a tensor: its address, or in the simulator its array."""
        if not self.simulated:
            return tensor.data_ptr()
        if tensor.element_size() == 2:
            tensor = tensor.view(self.torch.int16)
        if not tensor.numel():
            return tensor.numpy()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return tensor.as_strided((reach,), (1,)).numpy()

    def stream(self) -> int:
        """Handle of torch's current stream."""
        if self.simulated:
            return 0
        handle: int = self.torch.cuda.current_stream(self.device).cuda_stream
        return handle

    def active(self) -> Any:
        """Context in which launches go to the device."""
        if self.simulated:
            return self.torch.inference_mode(False)
        return self.torch.cuda.device(self.device)


def simulated_threads(program: Any, values: Any = None) -> int:
    """Threads of a block in the simulator: few, as each costs time; see ``AttentionPlan``."""
    runs = max(p.head_dim for p in (program, values) if p is not None) // 8
    return 32 if runs <= 32 else 128


@lru_cache(maxsize=64)
def launcher(device: torch.device) -> Launcher:
    """The launcher of a device."""
    return Launcher(device)


@lru_cache(maxsize=256)
def tables(
    fmt: PolarFormat, codebooks: Codebooks, device: torch.device,
    preconditioner: Preconditioner | None = None, *, inverse: bool = False,
) -> Tables:  # fmt: skip
    """A format's tables on a device, copied there once; ``inverse`` divides by the scales."""
    import torch

    def copy(array: npt.NDArray[Any]) -> Tensor:
        flat = np.array(array, copy=True)
        flat = flat.view(np.int32) if flat.dtype == np.uint32 else flat
        return torch.from_numpy(flat if flat.size else np.zeros(1, flat.dtype)).to(device)

    if preconditioner is None and inverse:  # the same without scales
        return tables(fmt, codebooks, device)
    if preconditioner is not None:
        signs = row_signs(fmt, preconditioner, inverse=inverse).reshape(-1, 2 * fmt.head_dim)
        return replace(tables(fmt, codebooks, device), signs=copy(signs))
    rotation = rotation_for(fmt)
    thresholds = np.empty(0, np.float32) if codebooks.is_analytic else codebooks.thresholds()
    return Tables(
        copy(rotation.signs.reshape(1, -1)), copy(rotation.order),
        copy(np.argsort(rotation.order).astype(np.uint32)), copy(rotation.mix.ravel()),
        copy(rotation.dense.ravel()), copy(np.ascontiguousarray(rotation.dense.T).ravel()),
        copy(codebooks.cosines), copy(thresholds),
    )  # fmt: skip


def program_for(fmt: PolarFormat, codebooks: Codebooks) -> Any:
    """The program of pages; see ``cuda_compile.program_of``."""
    from polarquant_nb.kernels.cuda_compile import program_of

    return program_of(fmt, codebooks.is_analytic)


def device_rows(pages: PolarPages) -> DeviceRows:
    """Pages as kernels on a GPU take them.

    Parameters
    ----------
    pages : PolarPages
        With words on a device.

    Returns
    -------
    DeviceRows
        A row for each index of the leading axes.
    """
    import torch

    words = pages.words
    rows, page_words = prod(words.shape[:-2]), pages.format.layout.num_words
    starts = torch.arange(rows * pages.num_pages, device=words.device) * page_words
    lengths = torch.full((rows,), pages.seq_len, dtype=torch.int64, device=words.device)
    return DeviceRows(
        pages.format, pages.codebooks, words.reshape(-1), starts.reshape(rows, -1), lengths,
        pages.seq_len, {}, pages.preconditioner, pages.first_position,
    )  # fmt: skip


def copied(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array of the CPU on a device, in memory of its own; nothing waits.

    Parameters
    ----------
    array : ndarray
        Signed integers or floats.
    device : torch.device
        Where to.

    Returns
    -------
    torch.Tensor
        No inference tensor.
    """
    import torch

    with torch.inference_mode(False):
        return torch.from_numpy(np.array(array)).to(device, non_blocking=True)


def copied_integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A few integers on a device, copied there when they were not used of late.

    Parameters
    ----------
    numbers : tuple of int
        Numbers.
    device : torch.device
        Where to.

    Returns
    -------
    torch.Tensor of int64, shape ``(len(numbers),)``
        Not to be written to, and for the current stream only.
    """
    return _copied_integers(numbers, device, launcher(device).stream())


@lru_cache(maxsize=256)
def _copied_integers(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    # another stream may run before the copy is made
    return copied(np.array(numbers, np.int64), device)


def encode_rows(
    x: Tensor, fmt: PolarFormat, codebooks: Codebooks, words: Tensor, starts: Tensor,
    preconditioner: Preconditioner | None = None, *, frozen: bool = False,
) -> Tensor:  # fmt: skip
    """Encode vectors into pages that may lie anywhere; arguments are not checked.

    Parameters
    ----------
    x : torch.Tensor, shape ``(..., seq_len, head_dim)``
        float16, bfloat16, float32 or float64, of any strides.
    fmt, codebooks
        Format and codebooks.
    words : torch.Tensor of int32, 1-d
        Memory that holds the pages.
    starts : torch.Tensor of int64, 1-d
        Each page's first word, rows after one another.
    preconditioner : Preconditioner, optional
        Its scales are used; its bias is subtracted already, by
        :func:`~polarquant_nb.gpu_preconditioning.subtract_bias`.
    frozen : bool
        The pages are whole and hold their offsets already; those are kept.

    Returns
    -------
    torch.Tensor of int32, shape ``(pages, 2)``
        Rows of each page that are not finite, and rows whose radius is beyond float16.
    """
    import torch

    if x.dtype == torch.float64:
        x = x.float()
    here, kit = launcher(x.device), tables(fmt, codebooks, x.device, preconditioner)
    x, inner, (outer_stride, inner_stride) = _two_axes(x)
    seq_len = x.shape[-2]
    events = torch.empty((starts.numel(), 2), dtype=torch.int32, device=x.device)
    if not x.numel():
        return events
    kernel = here.kernel("encode", program_for(fmt, codebooks), torch_name(x.dtype))
    with here.active():
        kernel.launch(
            (starts.numel(), 1), here.stream(),
            *map(here.address, (x, words, starts, kit.signs, kit.order, kit.mix, kit.dense,
                                kit.thresholds, events)),
            seq_len, -(-seq_len // PAGE), kit.heads, inner, outer_stride, inner_stride,
            x.stride(-2), x.stride(-1), int(frozen),
        )  # fmt: skip
    return events


def decode_rows(rows: DeviceRows, start: int, stop: int, target: Tensor) -> None:
    """Reconstruct tokens ``start .. stop−1`` of rows that all have them.

    Parameters
    ----------
    rows : DeviceRows
        Pages.
    start, stop : int
        Range of tokens.
    target : torch.Tensor, contiguous
        Where vectors go, rows after one another; float16, bfloat16 or float32.
    """
    if not target.numel():
        return
    bias = rotary_bias(rows.preconditioner)
    if bias is None:
        _decode_without_bias(rows, start, stop, target)
        return
    import torch

    # the sum is what is to be rounded
    in_place = target.dtype == torch.float32
    x = target if in_place else torch.empty_like(target, dtype=torch.float32)
    _decode_without_bias(rows, start, stop, x)
    add_bias(x.view(len(rows.starts), stop - start, -1), bias, rows.first_position + start)
    if not in_place:
        target.copy_(x)


def _decode_without_bias(rows: DeviceRows, start: int, stop: int, target: Tensor) -> None:
    device = target.device
    here = launcher(device)
    kit = tables(rows.format, rows.codebooks, device, rows.preconditioner, inverse=True)
    count, columns = rows.starts.shape
    first, touched = start // PAGE, -(-stop // PAGE) - start // PAGE
    kernel = here.kernel(
        "decode", program_for(rows.format, rows.codebooks), torch_name(target.dtype)
    )
    with here.active():
        kernel.launch(
            (count * touched, 1), here.stream(),
            *map(here.address, (rows.words, rows.starts, kit.signs, kit.inverse_order, kit.mix,
                                kit.back, kit.cosines, target)),
            start, stop, first, touched, columns, kit.heads,
        )  # fmt: skip


def _two_axes(x: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
    """Leading axes as two: the inner one's length, and the strides of both.

    Axes that follow each other in memory are one; a copy is made where more than two are left.
    """
    axes: list[tuple[int, int]] = []
    for n, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * stride:
            axes[-1] = axes[-1][0] * n, stride
        else:
            axes.append((n, stride))
    if len(axes) > 2:
        return _two_axes(x.contiguous())
    if not axes:
        return x, 1, (0, 0)
    if len(axes) == 1:
        return x, axes[0][0], (0, axes[0][1])
    return x, axes[1][0], (axes[0][1], axes[1][1])
