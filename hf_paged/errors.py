"""The exceptions of hf_paged. Knows nothing else; standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OutOfBlocks(MemoryError):
    """The pool has too few free blocks for an operation, which has changed nothing.

    An engine preempts requests instead. Callers meet it with a PagedKVCache of their own: free or crop rows, or make
    the cache with more `num_blocks`.

    Args:
        needed: Blocks that the operation takes.
        available: Blocks that are free.
        hint: What to do, for the message; "" = nothing is said.

    Attributes:
        needed: Blocks that the operation takes.
        available: Blocks that are free.

    Example:
        ```python
        import torch
        from hf_paged import OutOfBlocks, PagedKVCache

        cache, states = PagedKVCache(num_blocks=1), torch.rand(1, 2, 40, 64)
        try:
            cache.update(states, states, layer_idx=0)
        except OutOfBlocks as error:
            assert error.needed == 3
        ```
    """

    def __init__(self, needed: int, available: int, hint: str = "") -> None:
        self.needed = needed
        self.available = available
        message = f"{needed} block(s) needed, {available} available"
        super().__init__(f"{message}: {hint}" if hint else message)


def raise_mistake(error: Exception) -> None:
    """Raise `error` if it is a mistake of this package: its code has used a variable that does not exist, or such an
    attribute of an object of its own. A trial of a model takes other errors as the model's."""
    if not isinstance(error, NameError | AttributeError):
        return
    trace = error.__traceback__
    # Only the innermost frame counts, because third-party code may lie between ours and the error.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    names = [trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""]
    if isinstance(error, AttributeError):
        names.append((error.obj if isinstance(error.obj, type) else type(error.obj)).__module__)
    if all(name.partition(".")[0] == __package__ for name in names):
        raise error


def described(error: BaseException) -> str:
    """The error's class and what it says; for what torch.compile raises of fullgraph=True, the remedy."""
    kind, text = type(error), f"{type(error).__name__}: {error}"
    if kind.__module__ == "torch._dynamo.exc" and kind.__name__ in ("Unsupported", "FailOnRecompileLimitHit"):
        text = (
            f"{text.splitlines()[0]}: a module that is compiled with fullgraph=True does not run in steps; leave it out"
        )
    return text


class UnsupportedModelError(ValueError):
    """A paged cache cannot serve this model or this call. Raised before any token is generated.

    `print(hf_paged.check(model))` gives the reason, layer by layer. Without `cache_implementation="paged"`, the call
    runs as plain `generate`.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM
        import hf_paged

        model, prompt = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base"), torch.tensor([[1, 5, 6]])
        try:
            output = model.generate(prompt, max_new_tokens=4, cache_implementation="paged")
        except hf_paged.UnsupportedModelError:
            output = model.generate(prompt, max_new_tokens=4)
        ```
    """


class UnsupportedVersionError(RuntimeError):
    """hf_paged does not run with this version of transformers. Raised before any model is tried.

    The message names the tested versions; install one of them.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        try:
            engine = hf_paged.Engine(model, {"num_blocks": 64})
        except hf_paged.UnsupportedVersionError as error:
            raise SystemExit(str(error))
        engine.close()
        ```
    """


class LayersChanged(UnsupportedModelError):
    """The model has other modules than when it was bound to its K/V memory. Raised before anything is computed."""


class QueueFull(RuntimeError):
    """The queue of waiting requests is full (`SchedulerConfig.max_waiting`); submit the request again later.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        from hf_paged import Engine, QueueFull

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}, {"max_waiting": 1}) as engine:
            engine.add_request([1, 5, 6])
            try:
                engine.add_request([1, 7])
            except QueueFull:
                print("try again later")
        ```
    """


class EngineStopped(RuntimeError):
    """The engine is closed, or its thread has ended; `__cause__` is the error that ended it, if it was one."""


class RankError(RuntimeError):
    """A process of a tensor-parallel engine has failed or ended, and the engine with it, on all ranks.

    Let it end the process, because other ranks may wait for this one. Methods that an engine on several ranks does not
    have, such as `Engine.sleep`, raise it too.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        from hf_paged import Engine, RankError

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}) as engine:
            try:
                engine.sleep()  # frees memory; on several ranks, close the engine instead
            except RankError:
                engine.close()
        ```
    """


class EngineError(RuntimeError):
    """At least one request of a call, such as `Engine.generate`, has failed; the others have run to their end.

    `__cause__` is the exception of the first one that failed. `Engine.generate(..., raise_on_error=False)` returns the
    outputs instead. `RequestOutput.raise_for_error` raises it for a single output.

    Args:
        outputs: The RequestOutput of every prompt.

    Attributes:
        outputs: The RequestOutput of every prompt in the order of the prompts, successful ones included.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        from hf_paged import Engine, EngineError


        def fail(tokens, scores):
            raise RuntimeError("no tokens today")


        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}) as engine:
            try:
                engine.generate([[1, 5], [1, 6]], GenerationConfig(max_new_tokens=4), logits_processor=[[fail], []])
            except EngineError as error:
                assert [output.error is None for output in error.outputs] == [False, True]
        ```
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)
        failed = [(number, output) for number, output in enumerate(self.outputs, 1) if output.error is not None]
        number, first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(self.outputs)} requests failed, the first for prompt {number} "
            f"({first.request_id!r}): {first.error}. The outputs of all requests are in this exception's `outputs`; "
            "raise_on_error=False returns them"
        )
