"""Table of GenerationConfig's options: each is carried out, without effect, or refused in a request.

One table for all fields. A field of a newer transformers is refused until it is in the table.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationConfig

PREPARED = frozenset({
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "eos_token_id",
    "bos_token_id", "do_sample", "num_beams", "num_return_sequences", "early_stopping", "length_penalty",
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "guidance_scale", "watermarking_config", "output_scores", "penalty_alpha", "dola_layers", "constraints",
    "force_words_ids", "prompt_lookup_num_tokens", "max_matching_ngram_size",
})  # fmt: skip
"""Options that the engine carries out, or that transformers' own preparation of a call refuses."""

WITHOUT_EFFECT = frozenset({
    "use_cache", "return_dict_in_generate", "pad_token_id", "decoder_start_token_id", "max_cache_len",
    "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config", "low_memory",
    "diversity_penalty", "num_beam_groups", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type", "_from_model_config", "transformers_version",
    "_commit_hash",
})  # fmt: skip
"""Options that change no token of a request, as they change none of a plain call for one prompt: how results are
returned, padded and compiled, what an assistant model does, and what only other models and engines read."""

_DRAFTS = (
    "the engine does not draft in this way; use model.generate(..., cache_implementation='paged'), or "
    "prompt_lookup_num_tokens"
)

REFUSED = {
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "the engine does not return them; use generate"),
    "output_logits": "the engine does not return them (logprobs=k of a request has log-probabilities); use generate",
    "use_mtp": _DRAFTS,
    "assistant_early_exit": "give Engine(model, assistant_model=hf_paged.first_layers(model, N)), or use "
    "model.generate(..., cache_implementation='paged')",
    "is_assistant": "a request drafts for no other model; leave it out",
    "token_healing": "the engine does not do this; use generate",
    "cache_implementation": "all requests share the engine's paged cache; leave it out",
    "cache_config": "all requests share the engine's cache; give it to Engine(model, cache_config)",
}
"""Why, and what to do instead."""

_OF_CALLS = ("cache_implementation", "cache_config")
"""A checkpoint's own values of these are for calls of `generate`, and do not count here."""


@functools.cache
def _unknown() -> frozenset[str]:
    return frozenset(vars(GenerationConfig())) - PREPARED - WITHOUT_EFFECT - REFUSED.keys()


def option(config: GenerationConfig | None, defaults: GenerationConfig, name: str) -> Any:
    """The value that counts: the config's, or else that of the model's `defaults`."""
    value = getattr(config, name, None)
    return getattr(defaults, name, None) if value is None else value


def check_options(config: GenerationConfig | None, defaults: GenerationConfig) -> None:
    """Raises ValueError for an option that the engine does not carry out, in a request's config or else in the model's
    `defaults`."""
    for name in (*REFUSED, *_unknown()):
        value = option(config, defaults, name)
        if not value or value == "paged" or (name in _OF_CALLS and value == getattr(defaults, name, None)):
            continue
        raise ValueError(f"{name}={value!r}: {REFUSED.get(name, 'this hf_paged does not know it; leave it out')}")
