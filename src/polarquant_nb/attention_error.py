"""Error of the attention outputs, layer by layer, with the queries that the model really asks.

A recording notes what each layer's attention is asked while the model reads tokens against the
exact cache: queries after the positional encoding, the tokens' own keys and values, mask and
scaling.  Asking the same of another cache shows what its keys and values do to this layer alone:
errors of the layers below are not in the queries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polarquant_nb.contenders import fresh

if TYPE_CHECKING:
    import torch

__all__ = ["Recording", "check_watched", "record_attention", "watch_attention"]


@dataclass(frozen=True)
class _Call:
    """A layer's attention, once; ``attend`` takes all keys and values that are visible."""

    layer: int
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Recording:
    """What attention was asked, and answered from the exact cache; see :func:`record_attention`.

    Parameters
    ----------
    calls : list
        One entry for each layer and forward pass.
    """

    calls: list[_Call] = field(default_factory=list, repr=False)

    def errors(self, cache: Any | Callable[[], Any]) -> tuple[float, ...]:
        """Relative error of each layer's attention output, from another cache.

        The error of a layer is Σ‖ô − o‖² / Σ‖o‖², over all recorded queries and heads: o is the
        attention output (softmax(q·k)·v of each head, before the output projection) from the exact
        keys and values, ô the one from this cache's, with the same queries q.  The keys and values
        of the recorded tokens themselves are appended exactly; what the cache makes of them then
        is its own affair.

        Parameters
        ----------
        cache : transformers.Cache, or callable that returns one
            Of the same context.  A cache is copied and left as it is; what a callable returns is
            used up.

        Returns
        -------
        tuple of float
            Of the attention layers, in the model's order.

        Raises
        ------
        ValueError
            If nothing was recorded.
        """
        if not self.calls:
            raise ValueError(
                "no attention was recorded: the model does not look its attention up in "
                "transformers' AttentionInterface"
            )
        import torch

        cache = fresh(cache)
        squared: dict[int, list[float]] = {}
        with torch.no_grad():
            for call in self.calls:
                keys, values = cache.update(call.key, call.value, call.layer)
                output = call.attend(keys, values).double()
                exact = call.output.double()
                sums = squared.setdefault(call.layer, [0.0, 0.0])
                sums[0] += (output - exact).square().sum().item()
                sums[1] += exact.square().sum().item()
        return tuple(error / norm for error, norm in (squared[layer] for layer in sorted(squared)))


@contextmanager
def record_attention(model: Any) -> Iterator[Recording]:
    """Note what a model's attention is asked meanwhile, for :meth:`Recording.errors`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        See :func:`watch_attention`.

    Yields
    ------
    Recording
        Filled by whatever the model reads against a cache until the end of the block.
    """
    recording = Recording()

    def note(
        module: Any, query: Any, key: Any, value: Any, output: Any, again: Callable[..., Any]
    ) -> None:
        q_len = query.shape[-2]
        key, value = (x[..., -q_len:, :].clone() for x in (key, value))  # its own tokens'
        recording.calls.append(_Call(module.layer_idx, key, value, output, again))

    with watch_attention(model, note):
        yield recording


@contextmanager
def watch_attention(model: Any, watch: Callable[..., None]) -> Iterator[None]:
    """Have a function called after each of a model's attentions meanwhile.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model that finds its attention by transformers' AttentionInterface, as all
        newer ones do.  It computes what it would anyway.
    watch : callable
        Takes the attention module; its queries, keys and values after the positional encoding,
        ``(batch, heads, n, head_dim)``; its output; and a function that attends with the same
        queries to other keys and values.

    Yields
    ------
    None
        Until the end of the block.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    modules = {id(module) for module in model.modules()}
    implementation = model.config._attn_implementation
    known = ALL_ATTENTION_FUNCTIONS.get(implementation)

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any
    ) -> Any:
        # 'eager' is not in the table: each model's file has its own
        function = known or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        answer = function(module, query, key, value, mask, *args, **options)
        if id(module) in modules:

            def again(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
                output: torch.Tensor = function(
                    module, query, keys, values, mask, *args, **options
                )[0]
                return output

            watch(module, query, key, value, answer[0], again)
        return answer

    ALL_ATTENTION_FUNCTIONS[implementation] = attend  # over the table's own, not instead of it
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(implementation)
        if known and ALL_ATTENTION_FUNCTIONS[implementation] is not known:
            ALL_ATTENTION_FUNCTIONS[implementation] = known  # that of a recording around this one


def check_watched(seen: Collection[int], layers: Collection[int]) -> None:
    """Refuse a model of which :func:`watch_attention` did not see all layers.

    Parameters
    ----------
    seen, layers : collection of int
        Those that were seen, and those that should have been.

    Raises
    ------
    ValueError
        If one is missing.
    """
    if not set(layers) <= set(seen):
        raise ValueError(
            "queries of some layers were not seen: the model does not look its attention up in "
            "transformers' AttentionInterface"
        )
