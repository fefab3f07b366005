"""PauseMethods: the methods of an engine by which its model changes between steps, and its memory comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hf_paged.errors import RankError
from hf_paged.generation.engine.arrivals import SLEEP
from hf_paged.generation.engine.binding import BoundEngine


class PauseMethods(BoundEngine):
    """A part of `Engine`: pauses."""

    def weights_changed(self) -> None:
        """Report a change of the model's weights that may not be noticed (see `hf_paged.weights_changed`).

        No later request uses a prefix or packed copy of the old weights, and prefixes of `cache_prefix` are dropped.
        Running requests keep their K/V and cache no further blocks. A call during a step, for example from a logits
        processor, takes effect after the step.

        Example:
            ```python
            model.model.norm.weight.data.mul_(1.0)
            engine.weights_changed()
            ```
        """
        self._weights.changed()
        self._deferred.append(self._drop_stale_prefixes)
        # Waits for the step of another thread; within a step of this one, `settle` leaves it for the end.
        with self._lock:
            self.settle()

    def warm_up(self) -> None:
        """Capture the CUDA graphs that steps need with the model's present adapters, so that no request waits for one.

        An engine does this when it is made; do it again after an adapter was loaded. It does nothing without graphs.

        Raises:
            RuntimeError: Inside a step of this engine, and once it is closed.

        Example:
            ```python
            engine.warm_up()
            ```
        """
        with self._lock, torch.no_grad():
            self._check_not_stepping()
            with self._door:
                self._check_open()
            self._runner.look()
            self._follow_model()
            self._runner.capture_graphs()

    @contextmanager
    def pause(self, *, recompute: bool = False) -> Iterator[None]:
        """Run no step of this engine inside the `with` block, so that weights can change while requests are running.

        The block begins after the step in progress has finished and its results are on the host. Steps in other threads
        wait for the end of the block; requests may be added and aborted meanwhile, from any thread. The weights count
        as changed when the block ends, even with an exception: all cached prefixes are dropped, those of `cache_prefix`
        too, and packed copies are renewed. Other engines on the model, and its own `generate`, are not paused.

        Args:
            recompute: Whether running requests drop their K/V, which the new weights compute again. False = they keep
                it and cache no further blocks.

        Yields:
            Nothing, while no step runs.

        Raises:
            RuntimeError: Inside a step of this thread, if the engine is closed, and in `step` if the pausing thread
                runs one.

        Example:
            ```python
            engine.add_request(prompt, config)
            engine.step()
            with engine.pause(recompute=True):
                model.model.norm.weight.data.mul_(1.0)
            while engine.has_unfinished_requests():
                engine.step()
            ```
        """
        pause = object()
        try:
            with self._lock:
                self._check_open()
                self._between_steps(self._stepper.settle)
                self._runner.pause()
                # Last: if a rank does not hear of it, nothing is paused.
                self._pauses[pause] = threading.current_thread()
            yield
        finally:
            if pause in self._pauses:
                self._end_pause(pause, recompute)

    def _end_pause(self, pause: object, recompute: bool) -> None:
        with self._lock:
            try:
                if not self._closed:
                    self._between_steps(partial(self._resume, recompute))
            # Whatever the change of weights has raised, others must not wait for ever.
            finally:
                del self._pauses[pause]
                self._pause_ended.notify_all()
                self._wake()

    def sleep(self) -> None:
        """Give the memory for K/V back, and that of packed weights and CUDA graphs, until `wake`.

        For an optimizer that needs the memory between rollouts. Requests are kept, and computed again after `wake`;
        cached prefixes are dropped, those of `cache_prefix` too. It waits for the step in progress. As in `pause`,
        steps in other threads wait, and this thread may run none; requests may be added and aborted, and weights and
        modules may change. Packed weights and graphs that other engines and `generate` have made for the model go too,
        as with `release_memory`. Does nothing if the engine is asleep.

        Raises:
            RankError: For a model on several ranks; close the engine instead.
            RuntimeError: Inside a step of this engine, and if it is closed.

        Example:
            ```python
            engine.sleep()
            engine.wake()
            ```
        """
        with self._lock:
            self._check_open()
            if SLEEP in self._pauses:
                return
            # Refused before anything changes.
            self._refuse_ranks("sleep: each rank would have to give its memory back; close the engine instead")
            self._between_steps(self._fall_asleep)

    def _refuse_ranks(self, why: str) -> None:
        if not self._runner.is_alone:
            raise RankError(why)

    def wake(self) -> None:
        """Undo `sleep`: take memory for K/V as a new engine would, and resume the requests. From any thread.

        Does nothing if the engine is awake.

        Raises:
            ValueError: If the memory that was asked for does not hold a block now. The engine sleeps on; free memory
                first.
            UnsupportedModelError: If the model has changed and cannot be paged. The engine sleeps on.
            RuntimeError: If the engine is closed.
        """
        with self._lock:
            self._check_open()
            if SLEEP in self._pauses:
                self._between_steps(self._awake)
            # Also if Ctrl-C has ended an earlier call before this.
            self._pause_ended.notify_all()
            self._wake()
