"""Arrays on a GPU: torch tensors as they are, others through DLPack, without a copy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from polarquant_nb.arrays import ArrayKind, tensor_dtype, torch_name

__all__ = ["as_tensor", "give_back", "gpu_of", "on_gpu", "open_tensor", "same_device"]

_CUDA = 2  # DLPack's number of the device type


def on_gpu(x: Any) -> bool:
    """Whether an argument is an array on an NVIDIA GPU.

    Parameters
    ----------
    x : object
        Anything.

    Returns
    -------
    bool
        True for torch tensors on CUDA devices, and for other arrays that have
        ``__cuda_array_interface__`` or DLPack's device.
    """
    if isinstance(x, np.ndarray):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _is_cuda(x)
    if hasattr(x, "__cuda_array_interface__"):
        return True
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and int(where()[0]) == _CUDA


def _is_cuda(tensor: Any) -> bool:
    """What decides for tensors; tests in the simulator have it say True of the CPU's."""
    return bool(tensor.is_cuda)


def gpu_of(device: Any) -> Any:
    """Where something is to be moved.

    Parameters
    ----------
    device : str or torch.device
        The CPU or a GPU.

    Returns
    -------
    torch.device or None
        With its index; None for the CPU.

    Raises
    ------
    ValueError
        If it is another device.
    """
    import torch

    probe = torch.empty(0, device=device)
    if _is_cuda(probe):
        return probe.device
    if not probe.is_cpu:
        raise ValueError(f"device is {device!r}; it must be 'cpu' or a CUDA device")
    return None


def open_tensor(x: Any, name: str) -> tuple[Any, ArrayKind]:
    """Look at an array on a GPU in place, as ``arrays.open_elements`` does at one on the CPU.

    Parameters
    ----------
    x, name
        See :func:`as_tensor`.

    Returns
    -------
    tensor : torch.Tensor
        Detached.
    kind : ArrayKind
        What ``x`` is, and where.
    """
    tensor, family = as_tensor(x, name)
    return tensor, ArrayKind(family, torch_name(tensor.dtype), tensor.device)


def as_tensor(x: Any, name: str) -> tuple[Any, str]:
    """An array on a GPU as a torch tensor in the same memory.

    Parameters
    ----------
    x : array
        One that :func:`on_gpu` finds there.
    name : str
        For messages.

    Returns
    -------
    tensor : torch.Tensor
        Detached.
    family : str
        'torch', or the module that :func:`give_back` returns arrays of.

    Raises
    ------
    ImportError
        If torch is missing.
    TypeError
        If the array's dtype is not one of ``DTYPES``, or it is no dense array.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{name} is on a GPU, where torch allocates results: pip install torch"
        ) from error
    family = "torch"
    if not isinstance(x, torch.Tensor):
        family = type(x).__module__.partition(".")[0]
        x = (
            torch.utils.dlpack.from_dlpack(x)
            if hasattr(x, "__dlpack__")
            else torch.as_tensor(x, device="cuda")
        )
    tensor_dtype(torch, x, name)
    return x.detach().resolve_neg(), family


def give_back(tensor: Any, family: str) -> Any:
    """A result as an array of the library that its argument came from.

    Parameters
    ----------
    tensor : torch.Tensor
        Result.
    family : str
        From :func:`as_tensor`.

    Returns
    -------
    array
        In the same memory; the tensor itself if that library cannot take it.
    """
    if family == "torch":
        return tensor
    take = getattr(sys.modules.get(family), "from_dlpack", None)
    return tensor if take is None else take(tensor)


def same_device(name: str, tensor: Any, device: Any, holder: str) -> None:
    """Make sure that an argument is where the others are.

    Parameters
    ----------
    name : str
        For the message.
    tensor : torch.Tensor
        Argument.
    device : torch.device
        Where it has to be.
    holder : str
        What is there, for the message.

    Raises
    ------
    ValueError
        If it is elsewhere.
    """
    if tensor.device != device:
        raise ValueError(
            f"{name} is on device {tensor.device}, but {holder} on {device}; move one of them, "
            f"for instance by {name}.to('{device}')"
        )
