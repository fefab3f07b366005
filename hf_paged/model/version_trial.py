"""Tries a version of transformers with which hf_paged is not tested, once in a process, before any model is judged.

What fails because transformers has renamed or moved something would otherwise be taken for a property of the model.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hf_paged.annotations import Model
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.errors import UnsupportedVersionError
from hf_paged.integration.names import CACHE
from hf_paged.locks import usable_after_fork
from hf_paged.model.trial import is_trying, trying
from hf_paged.versions import installed, is_older, is_tested, tested, unsupported

_lock = usable_after_fork(threading.RLock())
_failures: dict[str, UnsupportedVersionError | None] = {}  # by version of transformers; None: the trial has passed


def require_known_version(runs_packed: Callable[[Model], bool]) -> None:
    """Return if this transformers is tested, or if a tiny model gives the tokens of plain `generate` with it.

    Args:
        runs_packed: tells whether a model runs on packed rows.

    Raises:
        UnsupportedVersionError: This transformers is too old, or the tiny model fails.
    """
    version = installed()
    if is_tested(version) or is_trying():
        return
    if is_older(version):
        raise unsupported("it is too old")
    # Threads that ask meanwhile wait for the same trial.
    with _lock:
        if version not in _failures:
            _failures[version] = _failure(runs_packed)
            if _failures[version] is None:
                warnings.warn(
                    f"transformers {version} is newer than those that this hf_paged is tested with ({tested()}); a "
                    "tiny model gave the tokens of plain generate",
                    RuntimeWarning,
                    stacklevel=2,
                )
    if (failure := _failures[version]) is not None:
        # A new one each time: a raised error collects tracebacks. What it says is about no model, the cause may be.
        raise UnsupportedVersionError(str(failure)) from failure.__cause__


def _failure(runs_packed: Callable[[Model], bool]) -> UnsupportedVersionError | None:
    """Return the error that says what a tiny Llama does otherwise over blocks than without; None if nothing."""
    error = None
    try:
        with trying(torch.device("cpu")), torch.inference_mode(False):
            # The weights are random: with this seed a trial says the same in each process.
            torch.default_generator.manual_seed(0)
            found = _difference(_tiny_model(), runs_packed)
    except Exception as raised:  # of transformers, or what looks like our mistake because it has renamed something
        found, error = "a tiny model does not run over blocks", raised
    if found is None:
        return None
    failure = unsupported(found)
    failure.__cause__ = error
    return failure


def _difference(model: Any, runs_packed: Callable[[Model], bool]) -> str | None:
    ids = torch.tensor([[5, 9, 11, 3, 8], [0, 0, 7, 4, 6]], dtype=torch.int64, device="cpu")
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 8}
    given |= {"do_sample": False, "pad_token_id": 0}
    # Beams are forked and reordered, which greedy decoding does not do.
    for options in ({}, {"num_beams": 2}):
        # A call that names its cache is plain, whatever calls are by default.
        plain = model.generate(**given, **options, **{CACHE: DynamicCache(config=model.config)})
        paged = model.generate(**given, **options, **{CACHE: PagedKVCache(model.config)})
        if not torch.equal(plain, paged):
            return "a tiny model generates other tokens over blocks than without"
    return None if runs_packed(model) else "a tiny model does not run on packed rows"


def _tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    # Weights with this spread give tokens that vary and depend on the prompt.
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.5)).float().eval()
