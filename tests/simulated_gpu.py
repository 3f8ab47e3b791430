"""CPU tensors that are taken for a GPU's: in the simulator, or with the driver stubbed."""

import pytest
import torch

from polarquant_nb import gpu_arrays, gpu_status


@pytest.fixture
def gpu_tensors(monkeypatch):
    """Every tensor is on a GPU; NumPy arrays are not."""
    monkeypatch.setattr(gpu_arrays, "_is_cuda", lambda tensor: True)
    for name in ("missing", "_shadowed", "_old_driver"):
        monkeypatch.setattr(gpu_status, name, lambda: None)
    yield
    gpu_status.check.cache_clear()  # what it remembers was not true


@pytest.fixture
def looked(monkeypatch):
    """What was done, since this was cleared, that makes the CPU wait for a tensor's numbers."""
    calls = []
    for name in ("__int__", "__float__", "__bool__", "__index__", "item", "tolist", "cpu",
                 "nonzero", "equal"):  # fmt: skip
        original = getattr(torch.Tensor, name)

        def spy(tensor, *args, name=name, original=original):
            calls.append(name)
            return original(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    return calls
