"""TaskMethods: the methods of an engine whose requests have a task of ours. Each task is a file beside this one."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError
from hf_paged.generation.tasks.prompt_scores import task_of as task_of
from hf_paged.generation.tasks.scoring import one_for_each, rows_of, score, with_graph, with_graph_of
from hf_paged.model.adapters import Adapters

Prompt = SequenceOf[int] | torch.Tensor


class TaskMethods:
    """A part of `Engine`: what it computes besides tokens. The other part has `generate`, which runs the requests."""

    _model: Model
    _adapters: Adapters
    generate: Any

    def score(
        self,
        prompts: SequenceOf[Prompt],
        completions: SequenceOf[Prompt],
        grad: bool = False,
        *,
        adapter: str | SequenceOf[str | None] | None = None,
        cache_salt: str | SequenceOf[str | None] | None = None,
    ) -> list[torch.Tensor]:
        """Compute the log-probabilities of given completions.

        They are those of the logits, before any processor or temperature, as `CompletionOutput.logprobs` has them: with
        `SchedulerConfig(batch_invariant=True)` the same to the last bit. Each prompt with its completion is read once,
        and what equal prompts have in common from the prefix cache.

        Args:
            prompts: Token ids of each prompt. Repeat a prompt for several completions.
            completions: Token ids, one completion for each prompt. It may be empty.
            grad: Whether the results have a graph: that of the model's own forward, one for each row, whose gradients
                they pass on. The values are the same. (With K/V in eight bits, that forward is of unrounded K/V.)
            adapter: As for `add_request`, one for all or a list with one for each.
            cache_salt: As for `add_request`, one for all or a list with one for each.

        Returns:
            For each prompt a tensor fp32 [length of the completion], on the CPU; with `grad`, on the model's device.

        Raises:
            ValueError: For wrong arguments, with `grad` in `torch.inference_mode()`, and if backward would compute
                modules again without the row's adapter.
            UnsupportedModelError: For an encoder-decoder model.
            EngineError: If a row failed.
            RuntimeError: If a row was aborted.

        Example:
            ```python
            [logprobs] = engine.score([prompt], [tokenizer(" items", add_special_tokens=False).input_ids])
            print(logprobs.sum())
            ```
        """
        self._refuse_encoder("score")
        if grad and torch.is_inference_mode_enabled():
            raise ValueError("grad=True within torch.inference_mode(), which makes no graph; leave it")
        rows = rows_of(self._model, prompts, completions)
        given = {"adapter": adapter, "cache_salt": cache_salt}
        of_each = {name: one_for_each(name, value, len(rows)) for name, value in given.items()}
        for own in set(of_each["adapter"]):
            self._adapters.choose(own)  # an empty completion makes no request
        results = score(self.generate, rows, of_each)
        if grad:
            for row, own in zip(rows, of_each["adapter"]):
                if row.completion:
                    # Backward may run modules again, with the adapters that are active then.
                    choice = self._adapters.choose(own)
                    graph = with_graph if self._adapters.is_active(choice) else partial(with_graph_of, own)
                    compute = partial(graph, self._model, row, results[row.place])
                    results[row.place] = self._adapters.run(choice, compute)
        return results

    def _refuse_encoder(self, method: str) -> None:
        if self._model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{method}: {type(self._model).__name__} is an encoder-decoder model, whose tokens depend on "
                "an encoder's input too, which this method does not take"
            )
