"""A SentenceTransformer whose transformer is computed by an engine: texts without padding, prefixes once.

Texts, prompts by name, batches, outputs, truncation and similarity are sentence-transformers' own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.features.tasks.embedding import Pooling
from hf_paged.generation.engine.engine import Engine

_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_READ = ("input_ids", "attention_mask", "prompt_length")


class PagedSentenceTransformer(SentenceTransformer):
    """Takes the arguments of `SentenceTransformer`, and the configs of `hf_paged.Engine`.

    `encode` hands the engine `batch_size` texts at a time, so give it some hundreds. It computes the vectors of texts
    alone: other values of `output_value` are refused, and so are gradients.

    Raises:
        ValueError: For modules other than a transformer, a pooling ("lasttoken", "mean", "cls") and a normalisation.
        UnsupportedModelError: If an engine does not run the transformer.

    Example:
        ```python
        model = PagedSentenceTransformer("folder")
        first, second = model.encode(["A list is a sequence.", "A tuple is one."], batch_size=512)
        ```
    """

    def __init__(
        self,
        *args: Any,
        cache_config: CacheConfig | dict[str, Any] | None = None,
        scheduler_config: SchedulerConfig | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        transformer, *others = self
        kinds = [type(module).__name__ for module in others]
        mode = getattr(others[0], "pooling_mode", None) if kinds else None
        if kinds not in (["Pooling"], ["Pooling", "Normalize"]) or mode not in _POOLINGS:
            raise ValueError(
                f"modules {[type(transformer).__name__, *kinds]} with pooling_mode={mode!r}: an engine computes a "
                f"transformer, a pooling of {', '.join(map(repr, _POOLINGS))} and a normalisation; use "
                "SentenceTransformer"
            )
        if not getattr(others[0], "include_prompt", True):
            raise ValueError("include_prompt=False: the engine pools all tokens of a text; use SentenceTransformer")
        self._pooling, self._normalizes = _POOLINGS[mode], len(kinds) == 2
        self.eval()
        self.engine = Engine(transformer.auto_model, cache_config, scheduler_config)
        # At the exit of the process nobody needs its memory.
        weakref.finalize(self, self.engine.close).atexit = False

    def close(self) -> None:
        """Close the engine, and give its memory back. It is closed too when the model is no longer used."""
        self.engine.close()

    def encode(self, *args: Any, output_value: Any = "sentence_embedding", **kwargs: Any) -> Any:
        """Compute the vectors of texts, as `SentenceTransformer.encode` does."""
        if output_value != "sentence_embedding":
            raise ValueError(f"output_value={output_value!r}: the engine returns the vectors of texts alone; leave it")
        return super().encode(*args, output_value=output_value, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Replace the modules' forward: what `encode` has tokenized, in one call of the engine."""
        if self.training:
            raise ValueError("the engine computes no gradients; call eval(), or train a SentenceTransformer")
        # `encode` passes these on too: routers, which have tasks, are refused, and the texts are processed already.
        unread = sorted(kwargs.keys() - {"task", "processing_kwargs"})
        # Pairs of texts have token types, and images and such have tensors of their own.
        unread += [
            name for name, value in input.items() if name not in _READ and torch.is_tensor(value) and value.any()
        ]
        if unread:
            raise ValueError(f"{', '.join(unread)}: the engine takes texts alone, no pairs and no media; leave it out")
        rows = [ids[seen.bool()] for ids, seen in zip(input["input_ids"], input["attention_mask"])]
        vectors = self.engine.embed(rows, self._pooling, self._normalizes)
        return {**input, "sentence_embedding": torch.stack(vectors).to(input["input_ids"].device)}
