"""Loads what a process serves: model, tokenizer, adapters, and the engine over them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from typing import Any

from hf_paged.annotations import Model
from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.features.media.media import takes_media
from hf_paged.features.speculation.draft_model import vocabulary
from hf_paged.features.speculation.translation import number_alike
from hf_paged.generation.engine.engine import Engine
from hf_paged.model.state import unwrapped
from hf_paged.serving.adapters import load_adapter
from hf_paged.serving.checkpoints import load_model, pretrained
from hf_paged.serving.speculative import SpeculativeConfig


def load_extractor(checkpoint: str, model: Model, source: Mapping[str, Any] | None = None) -> Any:
    """Load the feature extractor of a model whose main input is audio; None for other models. Arguments as in
    `load_model`."""
    if getattr(model, "main_input_name", None) not in ("input_features", "input_values"):
        return None
    from transformers import AutoFeatureExtractor

    return pretrained(AutoFeatureExtractor, checkpoint, "feature extractor", **(source or {}))


def load_processor(checkpoint: str, model: Model, source: Mapping[str, Any] | None = None) -> Any:
    """Load the processor of a model that takes images, videos or audio; None for other models. Arguments as in
    `load_model`."""
    if not takes_media(unwrapped(model)):
        return None
    from transformers import AutoProcessor

    return pretrained(AutoProcessor, checkpoint, "processor", **(source or {}))


def load_engine(
    checkpoint: str,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    dtype: str = "auto",
    device: str | None = None,
    num_ranks: int = 1,
    adapters: Mapping[str, str] | None = None,
    switches: Mapping[str, bool] | None = None,
    source: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    weights: str | None = None,
    speculative: SpeculativeConfig | None = None,
) -> tuple[Engine, Any]:
    """The engine and its tokenizer, for a process that does nothing else: what exists now is kept until its end.

    adapters: name -> folder. switches: `fuse` and
    `prepack` of the engine. speculative: what drafts tokens. Raises
    ValueError for what cannot be loaded. The rest as in `load_model`.
    """
    from transformers import AutoTokenizer

    tokenizer = pretrained(AutoTokenizer, checkpoint, "tokenizer", **(source or {}))
    # After the tokenizer, which is read in a moment: a wrong name is told before gigabytes are loaded.
    model = load_model(
        checkpoint, dtype, device, num_ranks=num_ranks, source=source, quantization=quantization, weights=weights
    )
    for name, folder in (adapters or {}).items():
        load_adapter(model, name, folder)
    assistant = None if speculative is None else speculative.load(dtype, device, source)
    own_tokenizer = None
    if speculative is not None and speculative.model is not None:
        sizes_differ = vocabulary(assistant) != vocabulary(model)
        # The draft model's own tokenizer tells whether its tokens are the model's.
        try:
            own_tokenizer = pretrained(AutoTokenizer, speculative.model, "tokenizer", **(source or {}))
        except ValueError as error:
            if sizes_differ:
                raise
            warnings.warn(f"{error}. Its tokens are taken to be those of {checkpoint}", RuntimeWarning, stacklevel=2)
        # Equal numbers need no translation, which would cost time and drafts.
        if own_tokenizer is not None and not sizes_differ and number_alike(tokenizer, own_tokenizer):
            own_tokenizer = None
    drafts: dict[str, Any] = {"assistant_model": assistant, "assistant_tokenizer": own_tokenizer}
    engine = Engine(model, cache, scheduler, tokenizer=tokenizer, **drafts, **dict[str, Any](switches or {}))
    # First what is garbage goes, which would otherwise be kept for ever.
    gc.collect()
    gc.freeze()  # collections of garbage among requests need not look at the model and the modules
    return engine, tokenizer
