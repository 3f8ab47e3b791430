"""On a GPU: codes equal the CPU's, decode and attention are close, graphs can be captured."""

import pytest

import polarquant_nb as pq

torch = pytest.importorskip("torch")
gpu_check = pytest.importorskip("gpu_check")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("preset", pq.presets())
def test_a_preset_gives_what_it_gives_on_the_cpu(preset):
    gpu_check.check_all("cuda", head_dim=128, tokens=1000, presets=(preset,))


def test_a_captured_graph_gives_what_an_eager_call_gives():
    gpu_check.check_graph()
