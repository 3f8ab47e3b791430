"""Hugging Face transformers: generation on a compressed cache.

>>> import polarquant_nb as pq
>>> cache = pq.hf.PolarCache(model.config)  # doctest: +SKIP
>>> pq.hf.enable(model).generate(**inputs, past_key_values=cache)  # doctest: +SKIP

transformers 4.57 and newer; models on the CPU or NVIDIA GPUs, for inference.
"""

from polarquant_nb.hf.attention import disable, enable
from polarquant_nb.hf.cache import PolarCache
from polarquant_nb.hf.report import CacheReport, LayerReport

__all__ = ["CacheReport", "LayerReport", "PolarCache", "disable", "enable"]
