"""Engine: continuous batching of requests over one model (SOSP'23 sections 4 and 5).

The public class: takes requests. Its other methods are in files that end with `_methods.py`; `loop.py` runs the steps,
`binding.py` binds the model to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Never, Unpack

from hf_paged.annotations import Model, Tokenizer
from hf_paged.config import CacheConfig, SchedulerConfig, Switches, as_config, refuse_fields
from hf_paged.features.parts import TaskMethods, WeightMethods
from hf_paged.generation.engine.binding import Prompt
from hf_paged.generation.engine.call_methods import CallMethods
from hf_paged.generation.engine.pause_methods import PauseMethods
from hf_paged.generation.engine.prefix_methods import PrefixMethods
from hf_paged.generation.engine.stats import EngineStats, collect_stats
from hf_paged.generation.request_options import OptionArguments, options_of
from hf_paged.generation.validation import check_engine
from hf_paged.locks import RefusingLock


class Engine(TaskMethods, CallMethods, PrefixMethods, PauseMethods, WeightMethods):
    """Serve requests that arrive and end at any step, each with its own GenerationConfig.

    This is continuous batching over a K/V cache in blocks (PagedAttention, sections 4 and 5). Results equal those of
    `model.generate` for the same request alone. The engine does not change the model, but on a GPU it may move weights
    to other memory (`prepack`).

    Every method may be called from any thread; the thread that asks for outputs (`step`, `generate`, `stream`) runs the
    steps. In a forked child the parent's engine takes no requests and runs no steps (RuntimeError), and `close` does
    nothing: create an engine in the child.

    Requests that sample without a seed draw from torch's default generator. Concurrent paged draws never get the same
    random numbers; a concurrent draw by torch's own functions in another thread may. Give requests a seed if that
    matters.

    With PEFT adapters, each request of a step may have its own (`add_request`). A step activates them for its thread
    alone. Load and delete adapters only between steps. Steps of any thread compute under the autocast of the thread
    that has made the engine; requests of threads under another one are refused.

    Args:
        model: A transformers model that generates text, or a PEFT model over one: a causal LM, an encoder-decoder
            model, or one that takes images, videos or audio. In eval mode, if it has dropout.
        cache_config: The K/V pool: a CacheConfig, or a dict of its fields. None = the defaults.
        scheduler_config: The limits of a step: a SchedulerConfig, or a dict of its fields. None = the defaults.
        tokenizer: The model's tokenizer. `stop_strings` and `assistant_tokenizer` need it; with it, prompts that begin
            or end with its padding token are refused too.
        prepack: On a CPU, keep copies of the linear weights in the layout that is fastest there. None = in bf16 on CPUs
            with AVX-512 and BF16, if they take at most a quarter of the free memory; other linear weights are moved
            from a mapped file into large pages on the same condition, and no other thread may change them meanwhile.
            On a GPU, move linear weights that read the same rows beside one another, for one product instead of
            several, without copies; no other thread may compute with the model meanwhile. None = where `fuse` knows the
            layers (docs/gpu.md). True = raise if nothing can be packed. Sums may then be in another order than torch's.
        cuda_graphs: Capture decode steps and replay them. None = on a CUDA device, where the model runs packed, with a
            warning if a capture fails; True = raise if it is impossible.
        warmup: Before the first request, compile all kernels and capture the graphs of all batch sizes, so that no
            request waits for that. It takes a minute when Triton has not compiled them on this machine before, else
            seconds. None = on a CUDA device, where the model runs packed; False = when a step needs them; True = raise
            if there is nothing to warm up.
        fuse: Compute what lies between matrix products and attention in fewer kernels, where the model's layers are
            known. None = on a CUDA device; True = raise if no layer is known. See docs/gpu.md for what may round
            differently.
        assistant_model: Drafts the next tokens of requests with one sequence, which a step then verifies together: a
            smaller model, or a `Drafter`. No result changes (docs/speculation.md).
        assistant_tokenizer: The tokenizer of a smaller model with another one than `tokenizer`.

    Raises:
        TypeError: If `model` is not a transformers model, or for an unknown argument. A field of a config is told where
            it goes.
        ValueError: For a wrong argument, a model in training mode whose results would be random (call `model.eval()`),
            or memory that holds no block. The message names the value and the remedy.
        UnsupportedModelError: If the model cannot be paged; `hf_paged.check(model)` says why.
        UnsupportedVersionError: If hf_paged does not run with this transformers.

    Example:
        The examples of the methods continue from here.

        ```python
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
        from hf_paged import CacheConfig, Engine

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        tokenizer = AutoTokenizer.from_pretrained("examples/pydoc-lm-base")
        engine = Engine(model, CacheConfig(num_blocks=64), tokenizer=tokenizer)
        prompt, config = tokenizer("A list is a sequence of").input_ids, GenerationConfig(max_new_tokens=8)
        ```
    """

    def __init__(
        self,
        model: Model,
        cache_config: CacheConfig | Mapping[str, Any] | None = None,
        scheduler_config: SchedulerConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        prepack: bool | None = None,
        cuda_graphs: bool | None = None,
        warmup: bool | None = None,
        fuse: bool | None = None,
        assistant_model: Any = None,
        assistant_tokenizer: Tokenizer | None = None,
        **unknown: Never,
    ) -> None:
        # Arguments are refused before memory is taken, and before a rank waits for the others.
        refuse_fields(unknown)
        switches = Switches(prepack, cuda_graphs, warmup, fuse)
        check_engine(model, switches, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer)
        self.model = model
        self.cache_config = as_config(CacheConfig, cache_config, "cache_config")
        asked = as_config(SchedulerConfig, scheduler_config, "scheduler_config")
        super().__init__(
            model,
            self.cache_config,
            asked,
            switches,
            assistant=assistant_model,
            tokenizers={"tokenizer": tokenizer, "own_tokenizer": assistant_tokenizer},
        )

    # -- one request --------------------------------------------------------------------------------------------

    def add_request(self, prompt_ids: Prompt, generation_config: Any = None, **options: Unpack[OptionArguments]) -> str:
        """Queue a request and return its id. `step` computes it.

        It waits for no step in progress; with PEFT adapters it waits for the forward. If the adapter is deleted, or
        merged into the weights, requests that use it end with an error. If its weights are changed in place, they
        continue with the new weights.

        Args:
            prompt_ids: Token ids: a list, or an int tensor [length] or [1, length]. Of an encoder-decoder model, the
                encoder's text, [] where it reads none.
            generation_config: As for `generate`; its attribute `seed` seeds the request's own random numbers. None =
                the model's.
            request_id: A name that no unfinished request has. None = one made by the engine.
            priority: A finite number; lower runs first, and equal ones run in order of arrival. 0 by default.
            client: Whose request it is, for `SchedulerConfig(policy="fair")`. None = of no named client.
            logits_processor: A list of the caller's processors, as for `generate`.
            stopping_criteria: A list of the caller's criteria, as for `generate`.
            streamer: A streamer of transformers, fed as by `generate`: the prompt now, the tokens in the thread that
                runs the step. Only for requests with one sequence.
            adapter: Name of the PEFT adapter for this request, independent of the model's active adapters and of other
                requests. `"__base__"` = the base model without adapters. None = the adapters that are active in the
                PEFT model now, until the request ends, so not the base model.
            cache_salt: Requests share cached prefixes only with requests of the same salt and adapter. None = no salt.
            attention_mask: Of a padded prompt, [length] or [1, length], 0 for padding at its ends. None = no padding.
            deadline: Seconds after which the request ends with finish_reason "deadline", waiting included. None =
                never. (The config's `max_time` ends a running request after its next token, and a waiting one at once.)
            logprobs: k, from 0 to 1024, to have the k most likely tokens at each generated position in the outputs. Not
                with beams. None = no such lists.
            prompt_logprobs: k, from 0 to 1024, to have the log-probabilities of the prompt's tokens, and the k most
                likely tokens at the position of each. A step then needs memory for the logits of all its tokens. None =
                neither.
            prompt_logprobs_start: Position of the prompt's first token that has them. Only what stands before it is
                taken from cached prefixes. 0 by default.
            inputs: Of an encoder-decoder model, every other tensor of one row that `generate` takes, [1, ...], by name:
                input_features, input_values, pixel_values, attention_mask, decoder_input_ids (what the decoder begins
                with; without it, what `generate` would choose). The tokens of the output are those after that
                beginning, which the output has as its prompt. Requests with equal inputs, adapter and cache_salt share
                what the encoder computes. Of a model that takes images, videos or audio, what its processor returns
                beside the token ids, for this prompt (docs/images.md). None = nothing.
            task: A `hf_paged.sockets.Task`: what it wants of the model's output at positions of the prompt, instead of
                new tokens or beside them. Its result is the output's `result`. None = tokens alone.

        Returns:
            The id that outputs have, and that `abort` takes.

        Raises:
            TypeError: For an option that does not exist.
            ValueError: For a wrong argument, an id in use, and a request that cannot reach its length limit in the
                memory of this engine. The engine is unchanged.
            QueueFull: If `max_waiting` requests wait already; add it again later. The engine is unchanged.
            UnsupportedModelError: If the model has been moved or cast since the engine was made, or put into training
                mode with dropout, or this thread is under another autocast than the one that made the engine.
            RuntimeError: If the engine is closed, or rank 0 takes the requests (`is_driver`).

        Example:
            ```python
            first = engine.add_request(prompt, config)
            urgent = engine.add_request(prompt, config, priority=-1, deadline=60.0, logprobs=2)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        print(output.request_id, output.outputs[0].token_ids)
            ```
        """
        # Without a lock of the engine, so that it waits for no step in progress; `submit` holds `_door` only.
        request = self.prepare_request(prompt_ids, options_of(generation_config, options))
        self.submit([request])
        return request.request_id

    def longest_request(self, num_beams: int = 1) -> int:
        """Return the most tokens, prompt included, that the model and an empty cache allow a request.

        Args:
            num_beams: Beams of the request.

        Returns:
            A `max_length` that is safe for any such request.

        Example:
            ```python
            assert engine.longest_request() == 1024  # 64 blocks of 16 tokens; the model has 1,024 positions
            ```
        """
        return self._admission.longest_request(num_beams)

    # -- several ranks ------------------------------------------------------------------------------------------

    @property
    def is_driver(self) -> bool:
        """True if this engine takes requests; False only on the ranks above 0 of a tensor-parallel model."""
        return self._runner.takes_requests

    def run_worker(self, on_pause: Callable[[], Any] | None = None) -> None:
        """Compute what rank 0 plans, until its engine is closed. For the ranks above 0 of a tensor-parallel model.

        Let its errors end the process, because other ranks may wait for it. An error of this rank's own forward is
        raised too.

        Args:
            on_pause: Called when rank 0 has begun a `pause`, for changes of weights that all ranks make together. None
                = nothing is called.

        Raises:
            RuntimeError: On rank 0, which takes the requests itself (`is_driver`).
            RankError: If any rank fails or ends.

        Example:
            ```python
            if engine.is_driver:  # rank 0, or a model that is not tensor-parallel
                engine.generate([prompt], config)
            else:
                engine.run_worker()
            ```
        """
        if self.is_driver:
            raise RuntimeError("this engine takes the requests itself: run_worker() is for ranks above 0 (is_driver)")
        # Here, because a closed engine has left the group, and would wait for a message for ever.
        self._check_open()
        self._runner.follow(on_pause)

    def when_ranks_fail(self, call: Callable[[str], Any]) -> None:
        """Have a function called when a rank fails, ends or hangs, also while no step runs.

        It does nothing for a model on one rank.

        Args:
            call: Gets the reason in words, in any thread.

        Example:
            ```python
            engine.when_ranks_fail(lambda reason: print(f"the engine has ended: {reason}"))
            ```
        """
        self._runner.when_ranks_fail(call)

    # -- figures, the end ---------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the current figures of the engine: memory, queues and counters.

        It does not wait for a step in progress, whose work is then partly in the figures.

        Returns:
            An EngineStats of this moment.

        Example:
            ```python
            stats = engine.stats()
            print(stats.num_running, stats.blocks_used, stats.kv_waste_ratio)
            ```
        """
        self.settle()
        return collect_stats(
            self._runner,
            self._scheduler,
            self._stepper,
            num_arriving=self.num_arriving,
            prompt_tokens=self._prompt_tokens,
        )

    def __repr__(self) -> str:
        memory = self._memory.stats()
        return (
            f"<Engine of {type(self._model).__name__}: {memory.num_blocks} blocks of {self._memory.block_size} tokens, "
            f"{memory.bytes_reserved / 2**20:.1f} MiB reserved, {memory.bytes_touched / 2**20:.1f} MiB touched>"
        )

    def block_tables(self, request_id: str) -> list[tuple[list[int], list[int]]]:
        """Return the block tables of a running request, for tools that show or measure sharing.

        Args:
            request_id: The request's id.

        Returns:
            A pair for every live sequence, which is a snapshot (tokens computed so far, block ids of the first layer
            group). Empty for a request that is unknown or holds no block.

        Example:
            ```python
            running = engine.add_request(prompt, config)
            engine.step()
            [(tokens, blocks)] = engine.block_tables(running)
            assert len(blocks) == 1 and tokens == prompt
            engine.abort(running)
            engine.step()
            ```
        """
        with self._lock:
            group, manager = self._scheduler.get(request_id), self._memory.manager
            seqs = [] if group is None or not manager.groups else [seq for seq in group.live if seq.seq_id in manager]
            return [(seq.token_ids[: seq.num_computed_tokens], list(manager.block_table(seq.seq_id))) for seq in seqs]

    def close(self) -> None:
        """Abort all unfinished requests and free the memory. Idempotent; leaving `with Engine(...)` does it too.

        In a forked child this does nothing, because the engine belongs to the parent.

        Raises:
            RuntimeError: Inside a step of this engine.

        Example:
            ```python
            other = Engine(model, CacheConfig(num_blocks=64))
            other.close()
            with Engine(model, CacheConfig(num_blocks=64)) as another:
                another.generate([prompt], config)
            ```
        """
        if isinstance(self._lock, RefusingLock):
            return
        with self._lock:
            if self._is_released:
                return
            self._shut_down()
            self._let_memory_go()
            self._weights.release_views()
            # From now on another engine may use it.
            self._scheduler.release_policy()
            self._is_released = True  # last: Ctrl-C may end a call of `close`, and the next one does the rest

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
