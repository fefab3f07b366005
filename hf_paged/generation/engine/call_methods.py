"""CallMethods: the methods of an engine that run whole requests."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from hf_paged.errors import EngineError
from hf_paged.generation.engine.binding import BoundEngine, Prompt
from hf_paged.generation.engine.delivery import RequestStream
from hf_paged.generation.prompts import as_prompts
from hf_paged.generation.request_options import options_of_each
from hf_paged.generation.requests.outputs import RequestOutput


class CallMethods(BoundEngine):
    """A part of `Engine`: calls that run requests to their end."""

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        generation_config: Any | SequenceOf[Any] = None,
        progress: bool | None = None,
        *,
        attention_mask: Any = None,
        raise_on_error: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Run all prompts to their end.

        Args:
            prompts: A list of prompts as for `add_request`, or an int tensor [num_prompts, length].
            generation_config: As for `generate`, with an attribute `seed` for random numbers of the request's own. One
                for all prompts or a list with one for each. None = the model's.
            progress: Whether a bar with tokens/s is on stderr. None = on a terminal.
            attention_mask: Of padded prompts, a tensor [num_prompts, length] or one mask for each. None = no padding.
            raise_on_error: Whether a request that has failed raises, when all have ended. False = the outputs are
                returned, with `error` set in those that failed.
            **options: Those of `add_request`, such as `adapter`, `priority`, `logits_processor` or `deadline`. Each is
                one for all prompts or a list with one for each. (A list of processors or criteria is for all; a list of
                such lists has one for each.)

        Returns:
            The last output of each request, in the order of the prompts.

        Raises:
            EngineError: If a request has failed and `raise_on_error` is True. It has the outputs of all.
            TypeError: For an option that does not exist.
            ValueError: As for `add_request`, or for a list of another length than `prompts`. No prompt has been queued.
            QueueFull: If the queue has no room for all of them. No prompt has been queued.
            RuntimeError: If the engine is closed, or this thread has paused it.

        Example:
            ```python
            sampling = GenerationConfig(max_new_tokens=8, do_sample=True, num_return_sequences=2)
            sampling.seed = 7
            greedy, sampled = engine.generate([prompt, prompt], [config, sampling], priority=[0, 1])
            print([tokenizer.decode(each.token_ids) for each in (*greedy.outputs, *sampled.outputs)])
            ```
        """
        self._check_usable()
        # Outputs of unfinished requests would be made for nobody.
        stream = self._open_stream(prompts, generation_config, attention_mask, options, finals_only=True)
        finished: dict[str, RequestOutput] = {}
        is_shown = sys.stderr.isatty() if progress is None else progress
        # Ctrl-C, or an error of another thread's step, aborts what is unfinished.
        with closing(stream), tqdm(total=len(stream.requests), unit="request", disable=not is_shown) as bar:
            started, before = time.monotonic(), self._stepper.generated_tokens
            for output in stream:
                finished[output.request_id] = output
                rate = (self._stepper.generated_tokens - before) / max(time.monotonic() - started, 1e-9)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update()
        outputs = [finished[request.request_id] for request in stream.requests]
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None and raise_on_error:
            raise EngineError(outputs) from failed.exception
        return outputs

    def stream(
        self, prompts: SequenceOf[Prompt], generation_config: Any = None, *, attention_mask: Any = None, **options: Any
    ) -> RequestStream:
        """Return an iterator that yields an output whenever a request has changed.

        A slow reader gets the latest state, not every one. The last output of a request that failed has `error` set
        (`RequestOutput.raise_for_error`). Closing the iterator early aborts what is unfinished.

        Args:
            prompts: As for `generate`.
            generation_config: As for `generate`.
            attention_mask: As for `generate`.
            **options: As for `generate`.

        Returns:
            An iterator over outputs. Its `close()` aborts the requests, which are queued now.

        Raises:
            TypeError: For an option that does not exist.
            ValueError: As for `generate`.
            QueueFull: If the queue has no room for all of them.

        Example:
            ```python
            for output in engine.stream([prompt], config):
                print(tokenizer.decode(output.outputs[0].new_token_ids), end="")
            ```
        """
        # No generator: arguments are refused and requests queued by the call itself.
        self._check_usable()
        return self._open_stream(prompts, generation_config, attention_mask, options)

    async def astream(
        self, prompts: SequenceOf[Prompt], generation_config: Any = None, *, attention_mask: Any = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as `stream` does, for asyncio: steps run in a worker thread, and several streams share them.

        With `request_id`, the request can be aborted before its first output; `abort` does not block the event loop.
        Leaving the loop, or cancelling the task, aborts what is unfinished with the engine's next step.

        Args:
            prompts: As for `generate`.
            generation_config: As for `generate`.
            attention_mask: As for `generate`.
            **options: As for `generate`.

        Yields:
            The latest state of a request that has changed.

        Raises:
            TypeError: For an option that does not exist, at the first output.
            ValueError: As for `generate`, at the first output.
            QueueFull: If the queue has no room for all of them, at the first output.

        Example:
            ```python
            import asyncio


            async def answer(prompt):
                async for output in engine.astream([prompt], config):
                    if output.finished:
                        return tokenizer.decode(output.outputs[0].token_ids)


            async def answers():
                return await asyncio.gather(answer(prompt), answer(prompt[:4]))


            print(asyncio.run(answers()))
            ```
        """
        self._check_usable()  # here: autocast is a thread's own
        opening = partial(self._open_stream, prompts, generation_config, attention_mask, options)
        outputs = await asyncio.to_thread(opening)
        try:
            while (output := await asyncio.to_thread(next, outputs, None)) is not None:
                yield output
        finally:
            # Not awaited: it may wait for the step of a reader that was cancelled, and must not be cancelled itself.
            outputs.abandon()

    def _open_stream(
        self,
        prompts: SequenceOf[Prompt],
        generation_config: Any,
        attention_mask: Any,
        options: Mapping[str, Any],
        *,
        finals_only: bool = False,
    ) -> RequestStream:
        """The caller has asked `_check_usable`."""
        rows = as_prompts(prompts, attention_mask)
        masks = [mask for _, mask in rows]
        each = options_of_each(generation_config, {**options, "attention_mask": masks}, len(rows))
        requests = [self._admission.request(row[0], own, self.tokenizer) for row, own in zip(rows, each)]
        stream = RequestStream(self, requests, finals_only=finals_only)
        self.follow(stream)
        return stream
