"""The model `hf-paged` of lm-evaluation-harness: its `hf` model with the engine of hf_paged.

Tokenization, truncation, chat templates and post-processing are lm-eval's own, so that the numbers are those of `hf`.
Requests run without padding, batched continuously, and what several requests begin with is computed once: the choices
of a question share its context, and questions share their few-shot examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import GenerationConfig

from hf_paged.config import CacheConfig, SchedulerConfig, configs_of_arguments
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.serving.processors import StopText

# lm-eval hands over one batch at a time: a small one would leave steps half empty at its end.
_CHUNK = 4096  # requests that are handed to the engine at once


@register_model("hf-paged")
class PagedLM(HFLM):
    """Takes the arguments of `hf`, and those of `hf_paged.config.configs_of_arguments`.

    batch_size: sequences in a step, where it is given as a number other than 1; the memory bounds them in any case.
    Raises ValueError for encoder-decoder models, virtual tokens, classifier-free guidance, `mixed_precision_dtype` and
    `softmax_dtype`.
    """

    def __init__(self, pretrained: Any, batch_size: int | str | None = 1, **kwargs: object) -> None:
        cache, scheduler = configs_of_arguments(kwargs)
        for name in ("mixed_precision_dtype", "softmax_dtype"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}={kwargs[name]!r}: the engine computes in the model's dtype, and log-probabilities in "
                    "float32; leave it out"
                )
        size = str(batch_size)
        if size.isdigit() and size != "1":
            # What was given by name goes before lm-eval's batch size.
            scheduler.setdefault("max_num_seqs", int(size))
        super().__init__(pretrained, batch_size=_CHUNK, **kwargs)
        if self.backend != "causal":
            raise ValueError(f"{type(self.model).__name__} is an encoder-decoder model; use --model hf")
        self._engine = Engine(self.model, CacheConfig(**cache), SchedulerConfig(**scheduler))

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(sum of the log-probabilities of the continuation, whether it is what greedy search finds) of each request.

        requests: (strings or None, tokens of the context, tokens of the continuation).
        """
        families: dict[tuple[int, ...], list[_Scored]] = {}
        for place, (key, context, continuation) in enumerate(requests):
            each = _Scored(place, key, context, continuation, self.max_length)
            families.setdefault(tuple(context), []).append(each)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(
            total=len(requests), desc="Running loglikelihood requests", disable=self._is_silent(disable_tqdm)
        ) as bar:
            # In this order, contexts that begin alike are neighbours and find their common blocks in the cache.
            for each, output in self._scored([families[context] for context in sorted(families)]):
                answers[each.place] = each.answer(output)
                if each.key is not None:
                    self.cache_hook.add_partial("loglikelihood", each.key, answers[each.place])
                bar.update()
        return answers

    def _scored(self, families: list[list[_Scored]]) -> Iterator[tuple[_Scored, RequestOutput]]:
        """The final output of each. The first of a family runs alone, and the others then on its context in the cache,
        before other families. Raises EngineError if one failed."""
        engine = self._engine
        running: dict[str, tuple[_Scored, list[_Scored]]] = {}

        def submit(family: list[_Scored], priority: int) -> None:
            first, *rest = family
            request_id = engine.add_request(
                first.prompt,
                first.config,
                priority=priority,
                attention_mask=[1] * len(first.prompt),  # it may begin with what is else the padding token
                logprobs=1,
                prompt_logprobs=1,
                prompt_logprobs_start=first.start,
            )
            running[request_id] = first, rest

        try:
            for family in families:
                submit(family, 0)
            while running:
                for output in engine.step():
                    # The outputs of a call that was interrupted come with the next step.
                    found = running.pop(output.request_id, None) if output.finished else None
                    if found is not None:
                        each, rest = found
                        for other in rest:
                            submit([other], -1)
                        yield each, output.raise_for_error()
        finally:
            for request_id in running:
                engine.abort(request_id)

    def _is_silent(self, disable_tqdm: bool) -> bool:
        return disable_tqdm or self.rank != 0

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> torch.Tensor:
        """context int64 [rows, length], padded on the left -> int64 [rows, length + new tokens], padded on the right.

        generation_kwargs: attention_mask, and fields of a GenerationConfig, as for `generate`.
        """
        mask = generation_kwargs.pop("attention_mask")
        processors = generation_kwargs.pop("logits_processor", None)
        length, pad = context.shape[1], self.tokenizer.pad_token_id
        config = self._options(max_length - length, generation_kwargs)
        # Without lm-eval's padding, which the engine does not need.
        prompts = [row[kept.bool()].tolist() for row, kept in zip(context, mask)]
        criteria = [
            [StopText(self.tokenizer, stop, len(p), skip_special_tokens=False)] if stop else None for p in prompts
        ]
        outputs = self._generated(prompts, config, stopping_criteria=criteria, logits_processor=processors)
        rows = [output.outputs[0].token_ids for output in outputs]
        longest = max(map(len, rows))
        new = torch.tensor(
            [row + [pad] * (longest - len(row)) for row in rows], dtype=torch.int64, device=context.device
        )
        return torch.cat([context, new.reshape(len(rows), longest)], dim=1)

    def _options(self, max_new_tokens: int, options: dict[str, Any]) -> GenerationConfig:
        """Return the options with which HFLM._model_generate would call `generate`."""
        options = {"temperature": 0.0, **options}
        if options["temperature"] == 0.0 and options.get("do_sample") is None:
            options["do_sample"] = False
        if options.get("do_sample") is False and options["temperature"] == 0.0:
            del options["temperature"]
        known = vars(GenerationConfig())
        unknown = [name for name in options if name not in known and name not in ("use_cache", "seed")]
        if unknown:
            raise ValueError(f"{unknown[0]}={options[unknown[0]]!r}: a GenerationConfig has no such field")
        config = GenerationConfig(max_new_tokens=max_new_tokens, pad_token_id=self.tokenizer.pad_token_id)
        for name, value in options.items():
            setattr(config, name, value)
        return config

    def _generated(self, prompts: list[list[int]], config: Any, **options: object) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts. Raises EngineError if one failed."""
        masks = [[1] * len(prompt) for prompt in prompts]
        stream = self._engine.stream(prompts, config, attention_mask=masks, **options)
        places = {request.request_id: place for place, request in enumerate(stream.requests)}
        outputs: list[Any] = [None] * len(prompts)
        with tqdm(total=len(prompts), desc="Generating", disable=self._is_silent(False)) as bar:
            for output in stream:
                if output.finished:
                    outputs[places[output.request_id]] = output.raise_for_error()
                    bar.update()
        return outputs


class _Scored:
    """A continuation to score: a prompt up to the last token, which is forced.

    All but the last token are scored as tokens of the prompt, from `start` on.
    """

    def __init__(self, place: int, key: object, context: list[int], continuation: list[int], max_length: int) -> None:
        """place: among all requests. key: lm-eval's for its cache of answers, or None."""
        self.place, self.key = place, key
        # Cut on the left, as lm-eval's `hf` does: the continuation must stay whole.
        whole = (context + continuation)[-(max_length + 1) :]
        self._continuation = continuation
        self.prompt = whole[:-1]
        self.start = len(whole) - len(continuation)
        self.config = GenerationConfig(
            max_new_tokens=1, do_sample=False, num_beams=1, forced_eos_token_id=whole[-1], eos_token_id=whole[-1]
        )

    def answer(self, output: RequestOutput) -> tuple[float, bool]:
        last = output.outputs[0]
        assert last.top_logprobs is not None and output.prompt_logprobs is not None
        assert output.prompt_top_logprobs is not None
        inner, tops = output.prompt_logprobs[self.start :], output.prompt_top_logprobs[self.start :]
        likeliest = [top[0][0] for top in tops if top] + [last.top_logprobs[0][0][0]]
        total = sum(value for value in [*inner, *last.logprobs] if value is not None)
        return total, likeliest == self._continuation
