"""PrefixMethods: the methods of an engine that keep prefixes in its cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from hf_paged.generation.engine.binding import BoundEngine, Prompt
from hf_paged.generation.engine.delivery import RequestStream
from hf_paged.generation.prompts import as_prompt
from hf_paged.generation.request_options import RequestOptions


class PrefixMethods(BoundEngine):
    """A part of `Engine`: prefixes that are kept."""

    _refuse_other_heads: Callable[[str], None]

    def cache_prefix(self, prompt_ids: Prompt, *, adapter: str | None = None, cache_salt: str | None = None) -> int:
        """Compute a prefix, for example a system prompt, and keep its full blocks until `release_prefix`.

        Requests that begin with it share its blocks (PagedAttention, section 4.4). It is dropped when the weights
        change.

        Args:
            prompt_ids: Token ids of the prefix, as for `add_request`.
            adapter: That of the requests that will use it.
            cache_salt: That of the requests that will use it.

        Returns:
            The number of cached tokens, a multiple of `block_size`.

        Raises:
            ValueError: For a wrong prompt, without a prefix cache, and if the prefixes that are kept leave no room for
                another state.
            UnsupportedModelError: For an encoder-decoder model.
            RuntimeError: If the prefix could not be computed, or the weights have changed meanwhile; try again then.

        Example:
            ```python
            system = tokenizer("Answer in one short sentence, without examples. " * 4).input_ids
            assert engine.cache_prefix(system) == len(system) // 16 * 16
            [output] = engine.generate([system + prompt[1:]], config)
            assert output.metrics.num_cached_tokens > 0
            assert engine.release_prefix(system)
            ```
        """
        self._refuse_other_heads("cache_prefix")
        ids = as_prompt(self._model, prompt_ids, tokenizer=self.tokenizer)
        cache = self._scheduler.prefix_cache
        if cache is None:
            why = self._opened.no_prefixes if self._opened is not None else ""
            raise ValueError(f"there is no prefix cache: {why or 'prefix_caching=False'}")
        if cache.ends is not None:  # the state at the end of the prompt is the one to keep
            ids = ids[: len(ids) // cache.block_size * cache.block_size]
            if not ids:
                return 0
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=1, do_sample=False, num_beams=1, num_return_sequences=1)
        # Before all that waits, because the caller waits for it.
        options = RequestOptions(generation_config=config, adapter=adapter, cache_salt=cache_salt, priority=-(2**31))
        # Other threads run no step until the blocks are pinned: one could evict them.
        with self._lock:
            request = self.prepare_request(ids, options)
            if cache.ends is not None:
                request.group.stops = (len(ids),)
            with closing(RequestStream(self, [request], finals_only=True)) as stream:
                self.follow(stream)
                (output,) = stream
            if output.error is not None:
                raise RuntimeError(f"the prefix was not computed: {output.error}") from output.exception
            root, cache = request.group.cache_root, self._scheduler.prefix_cache  # of the model as it is now
            if root is None or cache is None:
                raise RuntimeError("the prefix was not cached: the weights have changed meanwhile; try again")
            with self._door:
                num_tokens = cache.pin(ids, root)
        return num_tokens

    def release_prefix(self, prompt_ids: Prompt, *, adapter: str | None = None, cache_salt: str | None = None) -> bool:
        """Undo `cache_prefix` with the same arguments: the prefix may be evicted again.

        Args:
            prompt_ids: As for `cache_prefix`.
            adapter: As for `cache_prefix`.
            cache_salt: As for `cache_prefix`.

        Returns:
            False if it was not kept.

        Raises:
            ValueError: For a wrong prompt or adapter.
            RuntimeError: Inside a step of this engine.
        """
        ids = as_prompt(self._model, prompt_ids, tokenizer=self.tokenizer)
        cache = self._scheduler.prefix_cache
        root = self._admission.cache_root(self._variants.choose(adapter), cache_salt)
        with self._lock, self._door:
            self._check_not_stepping()
            return cache is not None and cache.unpin(ids, root)

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix, those of `cache_prefix` too. Running requests cache no further blocks.

        Raises:
            RuntimeError: Inside a step of this engine.

        Example:
            ```python
            engine.clear_prefix_cache()
            assert engine.stats().blocks_cached == 0
            ```
        """
        with self._lock, self._door:
            self._check_not_stepping()
            self._scheduler.forget_prefixes()
