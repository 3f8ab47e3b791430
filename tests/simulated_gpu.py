"""CPU tensors that are taken for a GPU's: in the simulator, or with the driver stubbed."""

import pytest

from polarquant_nb import gpu_arrays, gpu_status


@pytest.fixture
def gpu_tensors(monkeypatch):
    """Every tensor is on a GPU; NumPy arrays are not."""
    monkeypatch.setattr(gpu_arrays, "_is_cuda", lambda tensor: True)
    monkeypatch.setattr(gpu_status, "missing", lambda: None)
    monkeypatch.setattr(gpu_status, "_shadowed", lambda: None)
