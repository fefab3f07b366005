"""`--speculative-config`: what drafts for the requests of a server, in vLLM's JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from hf_paged.config import DRAFT_LENGTH, LOOKUP_NGRAM
from hf_paged.features.speculation.drafts import Lookup
from hf_paged.generation.validation import LONGEST_DRAFT
from hf_paged.serving.checkpoints import load_model


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """method: "ngram" (drafts from the request's own tokens) or "draft_model". model: of a draft model, its checkpoint.
    num_speculative_tokens: of a draft, at most. prompt_lookup_max, prompt_lookup_min: tokens of the longest and the
    shortest run that "ngram" looks for."""

    method: str
    model: str | None = None
    num_speculative_tokens: int = DRAFT_LENGTH
    prompt_lookup_max: int = LOOKUP_NGRAM
    prompt_lookup_min: int = 1

    @classmethod
    def of(cls, text: str) -> SpeculativeConfig:
        """Read a configuration from JSON. Raises ValueError for other text."""
        try:
            given: Any = json.loads(text)
        except ValueError:
            given = None
        known = [field.name for field in fields(cls)]
        # First what the text is, then its fields: the example is for those who wrote no JSON.
        if not isinstance(given, dict) or given.get("method") not in ("ngram", "draft_model"):
            raise ValueError(
                f'{text}: write JSON such as {{"method": "ngram", "num_speculative_tokens": 5}}; methods are '
                "ngram and draft_model"
            )
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{name} is not known; use {', '.join(known)}")
            if name not in ("method", "model") and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: an integer of at least 1 is needed")
        # Before a model is loaded, which takes minutes.
        if given.get("num_speculative_tokens", 1) > LONGEST_DRAFT:
            length = given["num_speculative_tokens"]
            raise ValueError(f"num_speculative_tokens={length}: at most {LONGEST_DRAFT} are possible")
        config = cls(**given)
        if config.method == "draft_model" and not isinstance(config.model, str):
            raise ValueError('method draft_model needs "model", the name or folder of its checkpoint')
        if config.method == "ngram" and config.model is not None:
            raise ValueError("model is for the method draft_model; leave it out")
        least, most = config.prompt_lookup_min, config.prompt_lookup_max
        if least > most:
            raise ValueError(f"prompt_lookup_min={least} is more than prompt_lookup_max={most}")
        return config

    def load(self, dtype: str, device: str | None, source: Any) -> Any:
        """For `Engine(assistant_model=...)`. Raises ValueError for a model that cannot be loaded."""
        if self.model is None:
            return Lookup(self.num_speculative_tokens, self.prompt_lookup_max, self.prompt_lookup_min)
        model = load_model(self.model, dtype, device, source=source)
        model.generation_config.num_assistant_tokens = self.num_speculative_tokens
        return model
