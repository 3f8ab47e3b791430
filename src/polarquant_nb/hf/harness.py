"""lm-evaluation-harness on a compressed cache: its model ``polarquant``.

    python -m polarquant_nb.hf.harness run --model polarquant \
        --model_args pretrained=PATH,formats=compact --tasks TASK --device cpu

is ``lm_eval`` with that model beside its own.  Needs ``pip install lm-eval``.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from polarquant_nb.budgets import DEFAULT_PRESET
from polarquant_nb.hf.attention import enable
from polarquant_nb.hf.cache import PolarCache
from polarquant_nb.hf.versions import CACHE_ARGUMENT

__all__ = ["PolarLM"]


@register_model("polarquant")
class PolarLM(HFLM):
    """A model of transformers that generates, and scores, on a compressed cache.

    Parameters
    ----------
    pretrained : str or transformers.PreTrainedModel
        The model.
    formats : str
        Name of a preset.
    sink, recent : int
        See :class:`polarquant_nb.KVCache`.
    chunk : int
        Where likelihoods are asked for, texts go in by so many tokens, of which each attends to
        those of earlier parts by their codes.
    **options : Any
        Of lm_eval's own ``hf``.

    Raises
    ------
    ValueError
        If the model or the preset is not supported.
    """

    def __init__(
        self,
        pretrained: Any,
        formats: str = DEFAULT_PRESET,
        sink: int = 4,
        recent: int = 64,
        chunk: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(pretrained, **{"device": "cpu", **options})
        self.formats, self.sink, self.recent = formats, int(sink), int(recent)
        self.chunk = int(chunk)
        self.new_cache()  # what is not supported is said before anything runs
        enable(self.model)

    def new_cache(self) -> PolarCache:
        """An empty cache.

        Returns
        -------
        PolarCache
            For one batch.
        """
        return PolarCache(self.model.config, self.formats, sink=self.sink, recent=self.recent)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        generation_kwargs[CACHE_ARGUMENT] = self.new_cache()
        out: torch.Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return out

    def _model_call(
        self,
        inps: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # padding is on the right here, where causality hides it
        cache = self.new_cache()
        with torch.no_grad():
            logits = [
                self.model(part, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
                for part in torch.split(inps, self.chunk, 1)
            ]
        return torch.cat(logits, 1)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
