"""When the features of a prompt's images, videos and audio are needed. Standard library only."""

from __future__ import annotations

from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import SeqStatus, SequenceGroup
from hf_paged.sockets import SideMemory


class MediaMemory(SideMemory):
    """Groups with media start when their media are encoded, and drop the features once the prompt is computed."""

    has_media = False  # some group has had media

    def bind(self, schedule: Scheduler) -> None:
        self._schedule = schedule

    def unencoded(self) -> list[SequenceGroup]:
        """The groups that may start in the next step if the encoders of their images, videos and audio run before it:
        the first one, and others as far as the tokens of a step go."""
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
