"""TaskMethods: the methods of an engine whose requests have a task of ours. Each task is a file beside this one."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, Literal

import torch

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.tasks.answers import FirstOfTwo, answer_tokens, filled
from hf_paged.features.tasks.decision import decide
from hf_paged.features.tasks.embedding import Embedding, Pooling, check_dimensions
from hf_paged.features.tasks.labels import Labels
from hf_paged.features.tasks.results import results_of
from hf_paged.features.tasks.scoring import lists_of, one_for_each, rows_of, score, with_graph, with_graph_of
from hf_paged.model.heads import HeadModel, has_labels
from hf_paged.model.support import check
from hf_paged.registry import Variants

Prompt = SequenceOf[int] | torch.Tensor
ModelTask = Literal["generate", "embed", "classify", "classify_tokens"]
"""Names of what a model computes: tokens, hidden states alone, or labels, of a prompt or of each of its tokens."""


class TaskMethods:
    """A part of `Engine`: what it computes besides tokens. The other part has `generate`, which runs the requests."""

    _model: Model
    _variants: Variants
    generate: Any
    tokenizer: Any

    @property
    def task(self) -> ModelTask:
        """The name of what the model computes: "generate"; without a language-modelling head "embed", "classify" or
        "classify_tokens". A model that generates, or classifies, embeds too."""
        model: Any = self._model
        if not isinstance(model, HeadModel):
            return "generate"
        if not has_labels(model):
            return "embed"
        return "classify_tokens" if model.labels_tokens else "classify"

    def score(
        self,
        prompts: SequenceOf[Prompt],
        completions: SequenceOf[Prompt],
        grad: bool = False,
        *,
        adapter: str | SequenceOf[str | None] | None = None,
        cache_salt: str | SequenceOf[str | None] | None = None,
        inputs: SequenceOf[dict[str, torch.Tensor] | None] | None = None,
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
            inputs: As for `add_request`, one for each: images and such. Inputs with a column for each token have one
                for each but the completion's last one.

        Returns:
            For each prompt a tensor fp32 [length of the completion], on the CPU; with `grad`, on the model's device.

        Raises:
            ValueError: For wrong arguments, with `grad` in `torch.inference_mode()` and with `inputs`, and if backward
                would compute modules again without the row's adapter.
            UnsupportedModelError: For an encoder-decoder model.
            EngineError: If a row failed.
            RuntimeError: If a row was aborted.

        Example:
            ```python
            [logprobs] = engine.score([prompt], [tokenizer(" items", add_special_tokens=False).input_ids])
            print(logprobs.sum())
            ```
        """
        self._refuse_other_heads("score")
        if grad and torch.is_inference_mode_enabled():
            raise ValueError("grad=True within torch.inference_mode(), which makes no graph; leave it")
        if grad and inputs is not None:
            raise ValueError("grad=True with inputs: the graph is that of a forward of text alone; leave one out")
        rows = rows_of(self._model, prompts, completions)
        given = {"adapter": adapter, "cache_salt": cache_salt, "inputs": inputs}
        of_each = {name: one_for_each(name, value, len(rows)) for name, value in given.items()}
        for own in set(of_each["adapter"]):
            self._variants.choose(own)  # an empty completion makes no request
        results = score(self.generate, rows, of_each)
        if grad:
            for row, own in zip(rows, of_each["adapter"]):
                if row.completion:
                    # Backward may run modules again, with the adapters that are active then.
                    choice = self._variants.choose(own)
                    graph = with_graph if self._variants.is_active(choice) else partial(with_graph_of, own)
                    compute = partial(graph, self._model, row, results[row.place])
                    results[row.place] = self._variants.run(choice, compute)
        return results

    def embed(
        self,
        prompts: SequenceOf[Prompt],
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Compute a vector for each prompt from the hidden states that the model's head would get.

        Requests that generate may run in the same steps. What prompts have in common is computed once, unless the mean
        of all tokens is wanted.

        Args:
            prompts: Token ids of each prompt, with the special tokens that the model was trained with.
            pooling: The hidden state of the "last" token or of the first one ("cls"), or the "mean" of all.
            normalize: Whether vectors have length 1.
            dimensions: The first so many elements, of models that were trained for that. None = all.
            **options: Of requests, such as `adapter`, `priority` or `deadline`, as for `generate`.

        Returns:
            For each prompt a tensor fp32 [dimensions], on the CPU.

        Raises:
            ValueError: For wrong arguments.
            UnsupportedModelError: For an encoder-decoder model, and one without a base model.
            EngineError: If a request failed, for example because its vector is not finite.
            RuntimeError: If a request was aborted, or its deadline has passed.

        Example:
            ```python
            first, second = engine.embed([prompt, tokenizer("A tuple is a sequence of").input_ids], pooling="mean")
            print(first @ second)
            ```
        """
        rows = lists_of(self._model, prompts, "prompts")
        check_dimensions(self._model, dimensions)
        # Without a head, what the model returns are hidden states.
        has_head = self.task != "embed"
        tasks = [Embedding(pooling, dimensions, normalizes=normalize, has_head=has_head) for _ in rows]
        vectors: list[torch.Tensor] = results_of(self.generate, rows, tasks, options)
        return vectors

    def decide(self, prompt_ids: Prompt, options: SequenceOf[Prompt], **request_options: Any) -> list[float]:
        """Compute the log-probability of each of some options after a prompt, which is read once.

        Args:
            prompt_ids: Token ids of the prompt.
            options: Token ids of each option, for example of " yes" and " no".
            **request_options: Of the requests, such as `adapter`, `priority` or `deadline`, as for `generate`.

        Returns:
            For each option the sum of the log-probabilities of its tokens, as `score` gives them.

        Raises:
            ValueError: For wrong arguments.
            UnsupportedModelError: For an encoder-decoder model.
            EngineError: If a request failed.
            RuntimeError: If a request was aborted, or its deadline has passed.

        Example:
            ```python
            options = [tokenizer(word, add_special_tokens=False).input_ids for word in (" items", " numbers")]
            print(engine.decide(prompt, options))
            ```
        """
        self._refuse_other_heads("decide")
        # Refused here, where empty completions are not: an option without tokens would be certain.
        given = lists_of(self._model, options, "options")
        return decide(self.generate, rows_of(self._model, [prompt_ids] * len(given), given), request_options)

    def classify(
        self, prompts: SequenceOf[Prompt], token_types: SequenceOf[Prompt] | None = None, **options: Any
    ) -> list[torch.Tensor]:
        """Compute the scores of all labels for each prompt, of a model with a head for labels.

        The engine is made of an `AutoModelForSequenceClassification` or `AutoModelForTokenClassification`. Results are
        those of the model's forward for each prompt alone.

        Args:
            prompts: Token ids of each prompt.
            token_types: Of an encoder, for each prompt the type of each token, as its tokenizer gives them for pairs of
                texts (`token_type_ids`). None = all are 0.
            **options: Of requests, such as `adapter`, `priority` or `deadline`, as for `generate`.

        Returns:
            For each prompt a tensor fp32 [num_labels] of logits, or [num_tokens, num_labels], on the CPU.

        Raises:
            ValueError: For wrong arguments.
            UnsupportedModelError: For a model without such a head.
            EngineError: If a request failed.
            RuntimeError: If a request was aborted, or its deadline has passed.
        """
        rows = lists_of(self._model, prompts, "prompts")
        return self._labels("classify", rows, options, self._checked_types("classify", rows, token_types))

    def reward(
        self,
        prompts: SequenceOf[Prompt],
        completions: SequenceOf[Prompt],
        token_types: SequenceOf[Prompt] | None = None,
        **options: Any,
    ) -> list[float]:
        """Compute the reward of each completion, of a model whose head has one label.

        Args:
            prompts: Token ids of each prompt. Repeat a prompt for several completions, which share its blocks.
            completions: Token ids, one completion for each prompt.
            token_types: As for `classify`, of each prompt with its completion.
            **options: Of requests, such as `adapter`, `priority` or `deadline`, as for `generate`.

        Returns:
            The head's logit for each prompt with its completion.

        Raises:
            ValueError: For wrong arguments.
            UnsupportedModelError: For a model without such a head, or with several labels.
            EngineError: If a request failed.
            RuntimeError: If a request was aborted, or its deadline has passed.
        """
        rows = rows_of(self._model, prompts, completions)
        # The head's row is that of the last token, so that both are one prompt.
        texts = [[*row.prompt, *row.completion] for row in rows]
        return self._single_labels("reward", texts, options, self._checked_types("reward", texts, token_types))

    def rank(
        self,
        query: str,
        documents: SequenceOf[str],
        *,
        answers: SequenceOf[str] | None = None,
        template: str | None = None,
        **options: Any,
    ) -> list[float]:
        """Compute how well each document answers a query.

        The model has a head of one label (a cross-encoder); or it is a language model that was trained to answer a
        question about each pair with one of two words.

        Args:
            query: A text.
            documents: Texts. The engine's tokenizer joins each with the query, as a pair.
            answers: Of a language model, the two answers, such as ("yes", "no"), of one token each.
            template: The prompt for `answers`, with {query} and {document}, and with the special tokens that the model
                was trained with.
            **options: Of requests, such as `adapter`, `priority` or `deadline`, as for `generate`.

        Returns:
            For each document, in their order, the head's logit; or the first answer's logit less the second one's.

        Raises:
            ValueError: For wrong arguments, and for an engine without a tokenizer.
            UnsupportedModelError: For a model without a head of one label; with `answers`, without that of a language
                model.
            EngineError: If a request failed.
            RuntimeError: If a request was aborted, or its deadline has passed.
        """
        if self.tokenizer is None:
            raise ValueError("rank joins texts with the tokenizer; make the engine with Engine(model, tokenizer=...)")
        if isinstance(documents, str) or not all(isinstance(text, str) for text in (query, *documents)):
            raise ValueError("rank: a query and a list of documents are needed, which are strings")
        if (answers is None) != (template is None):
            raise ValueError("rank: answers= and template= belong together; give both, or none for a cross-encoder")
        if answers is not None and template is not None:
            self._refuse_other_heads("rank with answers")
            tokens = answer_tokens(self.tokenizer, answers)
            texts = [filled(template, query, document) for document in documents]
            # The template has the special tokens.
            prompts = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            tasks = [FirstOfTwo(tokens) for _ in prompts]
            found = results_of(self.generate, lists_of(self._model, prompts, "documents"), tasks, options)
            return [float(logit) for logit in found]
        pairs = [self.tokenizer(query, document) for document in documents]
        rows = lists_of(self._model, [pair["input_ids"] for pair in pairs], "documents")
        return self._single_labels("rank", rows, options, [pair.get("token_type_ids") for pair in pairs])

    def _checked_types(
        self, method: str, rows: list[list[int]], token_types: SequenceOf[Prompt] | None
    ) -> SequenceOf[Any]:
        """Return the types of the tokens of each row. Raises ValueError for those that no model would read."""
        if token_types is None:
            return [None] * len(rows)
        count = getattr(self._model.config, "type_vocab_size", 0) if check(self._model).encodes else 0
        if not count:
            name = type(self._model).__name__
            raise ValueError(f"{method}: tokens of {name} have no types here; leave token_types out")
        types = lists_of(self._model, token_types, "token_types")
        if [*map(len, types)] != [*map(len, rows)]:
            raise ValueError(f"{method}: token_types needs one number for each token of each prompt")
        others = sorted({each for row in types for each in row} - {*range(count)})
        if others:
            raise ValueError(f"{method}: token_types has {others[0]}; the types of this model are 0 to {count - 1}")
        return types

    def _single_labels(
        self, method: str, rows: list[list[int]], options: dict[str, Any], types: SequenceOf[Any]
    ) -> list[float]:
        # A language model's config counts labels too, which no head of it has.
        if has_labels(self._model) and (count := getattr(self._model.config, "num_labels", 1)) != 1:
            raise UnsupportedModelError(
                f"{method}: the head of {type(self._model).__name__} has {count} labels, not one; use classify"
            )
        return [float(labels) for labels in self._labels(method, rows, options, types)]

    def _labels(
        self, method: str, rows: list[list[int]], options: dict[str, Any], types: SequenceOf[Any]
    ) -> list[torch.Tensor]:
        model: Any = self._model
        if not has_labels(model):
            raise UnsupportedModelError(
                f"{method}: {type(model).__name__} has no head for labels; load the checkpoint with "
                "AutoModelForSequenceClassification" + (", or give answers= and template=" if method == "rank" else "")
            )
        pad = model.config.get_text_config(decoder=True).pad_token_id
        of_each = model.labels_tokens
        tasks = [Labels(pad, of_each_token=of_each, types=own) for own in types]
        found: list[torch.Tensor] = results_of(self.generate, rows, tasks, options)
        return found

    def _refuse_other_heads(self, method: str) -> None:
        """Raises UnsupportedModelError for a model whose logits are not those of the next token of its prompt alone."""
        name = type(self._model).__name__
        if self._model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{method}: {name} is an encoder-decoder model, whose tokens depend on an encoder's input too, which "
                "this method does not take"
            )
        if isinstance(self._model, HeadModel):
            raise UnsupportedModelError(
                f"{method}: {name} has no language-modelling head; load it with AutoModelForCausalLM"
            )
