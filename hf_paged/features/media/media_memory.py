"""Decide when features of a prompt's images, videos and audio are made, kept and dropped. Standard library only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from hf_paged.errors import LayersChanged, MediaError
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import Plan, SeqStatus, Sequence, SequenceGroup, by_adapters
from hf_paged.sockets import Executor, Parts, SideMemory


class MediaMemory(SideMemory):
    """Groups with media start when their media are encoded, and drop the features once the prompt is computed.

    store: a `MediaStore`, which runs the encoders and keeps features.
    """

    has_media = False  # some group has had media
    _has_run = False  # an encoder

    def __init__(self, store: Any) -> None:
        self._store = store

    def use(self, executor: Executor) -> None:
        # Weakly, so that its memory is freed with the last reference, not with the next collection of garbage.
        self._executor: Executor = weakref.proxy(executor)

    def bind(self, schedule: Scheduler) -> None:
        self._schedule = schedule

    def unready(self) -> list[SequenceGroup]:
        """Return the first group whose media are not encoded, and further ones until their placeholders are as many as
        a step has tokens."""
        found: list[SequenceGroup] = []
        budget = self._schedule.token_budget
        for group in self._schedule.next_in_line() if self._schedule.num_waiting else ():
            if group.media is not None and group.media.encoded is None:
                self.has_media = True
                # Features take memory until their prompts are computed, so no more are made than a step can use.
                budget -= group.media.num_missing
                if found and budget < 0:
                    break
                found.append(group)
        return found

    def is_ready(self, group: SequenceGroup) -> bool:
        return group.media is None or group.media.encoded is not None

    def take(self, group: SequenceGroup) -> None:
        # A group that was swapped out, or begins with its whole prompt cached, computes none of it.
        if group.media is not None and group.live[0].num_computed_tokens >= group.num_prompt_tokens:
            group.media.drop_features()

    def give_up(self, group: SequenceGroup, *, restarts: bool) -> None:
        if restarts and group.media is not None:
            group.media.encoded = None  # the weights may have changed since; features of the same ones are kept

    def computed(self, output: SchedulerOutput) -> None:
        for seq, num_tokens in output.scheduled if self.has_media else ():
            media, is_running = seq.group.media, seq.group.status is SeqStatus.RUNNING
            # The step's tokens are not counted yet: side memories hear of them first.
            ends_prompt = seq.num_computed_tokens + num_tokens == seq.num_prompt_tokens
            if media is not None and ends_prompt and is_running and seq.finish_reason is None:
                media.drop_features()

    def forget(self) -> None:
        # Only waiting ones: prompts in progress continue with the old features, as with their K/V.
        for group in self._schedule.waiting:
            if group.media is not None:
                group.media.encoded = None

    def close(self) -> None:
        self._store.clear()

    # -- encoders -----------------------------------------------------------------------------------------------

    def compute(
        self, groups: list[SequenceGroup], run: Callable[[Any, Callable[[], Any]], Any]
    ) -> list[tuple[SequenceGroup, Exception]]:
        """Run the encoders for these groups, in order, until about as many placeholders are encoded as a step has
        tokens, but for at least one image."""
        is_first, self._has_run = not self._has_run, True
        spent = 0
        failed: list[tuple[SequenceGroup, Exception]] = []
        # An adapter may change the encoder, so one run has groups with the same adapters only.
        for choice, own in by_adapters(groups, lambda group: group).items():
            try:
                spent, errors = self._encode(choice, [group.media for group in own], run, spent, is_first=is_first)
            except LayersChanged:
                raise
            except Exception as error:  # of these adapters, or media; other requests continue
                failed += [(group, error) for group in own]
                continue
            for group in own:
                media: Any = group.media
                found = [errors[unit] for unit in media.units if unit in errors]
                try:
                    if not found and not any(unit.features is None for unit in media.units):
                        self._complete(group, media)
                except Exception as error:  # of these media
                    found.append(error)
                failed += [(group, error) for error in found[:1]]
        return failed

    def _encode(
        self, choice: Any, media: list[Any], run: Callable[..., Any], spent: int, *, is_first: bool
    ) -> tuple[int, dict[Any, Exception]]:
        executor, weights = self._executor, self._executor.weights
        computed_with, alone = (weights.epoch, choice), executor.one_order is not None
        budget = self._schedule.token_budget
        encode = partial(self._store.encode, executor.model, media, computed_with, budget, spent, alone=alone)
        result: tuple[int, dict[Any, Exception]] = run(choice, encode)
        self.num_computed, self.num_hits = self._store.num_encoded, self._store.num_hits
        if is_first:  # transformers may leave hooks in modules at the first call, which change no result
            now = weights.look(), choice
            self._store.move(computed_with, now)
            for each in media:
                each.encoded_with = now
        return result

    def _complete(self, group: SequenceGroup, media: Any) -> None:
        """Make the group ready, because all of its media are encoded. Raises MediaError if no step can compute it."""
        prompt = group.live[0].token_ids[: group.num_prompt_tokens]  # it may have an answer already
        encoded = self._store.complete(self._executor.model, prompt, media)
        # The length of a span is known only now that its features are.
        longest = encoded.longest_run
        most = self._schedule.make_room_for(longest)
        if longest > most:
            raise MediaError(
                f"{longest} tokens of the prompt attend to one another both ways, and a step computes {most} tokens of "
                f"a prompt at most; give SchedulerConfig(max_num_batched_tokens={longest}) or more, or leave it out"
            )
        media.encoded = encoded

    # -- in a step ----------------------------------------------------------------------------------------------

    def apart(self, plan: Plan, executor: Executor) -> list[Plan]:
        """Keep prompts with media apart: packed ones with the same types of tokens in one run, others one by one."""
        alike: dict[Any, Plan] = {}
        for seq, count in plan if self.has_media else ():
            media: Any = seq.group.media  # of few rows, in a step of hundreds
            if media is not None and _is_read_by(seq):
                key = tuple(media.encoded.types) if executor.is_packed else seq
                alike.setdefault(key, []).append((seq, count))
        return list(alike.values())

    def extend(self, parts: Parts, plan: Plan, output: SchedulerOutput) -> None:
        """Add the media of prompts to their parts, and to later parts the offset of positions after media."""
        media: list[Any] = [seq.group.media for seq, _ in plan] if self.has_media else []
        if not any(media):  # most steps
            return
        reads = [_is_read_by(seq) for seq, _ in plan]
        self._store.show(parts, [each if is_read else None for each, is_read in zip(media, reads)])
        parts.extra["delta"] = [
            0 if each is None or is_read else each.encoded.delta for each, is_read in zip(media, reads)
        ]


def _is_read_by(seq: Sequence) -> bool:
    """Return True if the sequence computes tokens of its prompt, and so its media."""
    return seq.num_computed_tokens < seq.num_prompt_tokens
