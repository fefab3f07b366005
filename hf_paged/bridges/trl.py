"""TRL's GRPO trainer with the rollouts of an engine on the trainer's own model, and its log-probabilities."""

from __future__ import annotations

from typing import Any

from trl import GRPOTrainer

from hf_paged.bridges.rollouts import attach
from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.generation.engine.engine import Engine


class PagedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer`, with completions drawn by the engine: `hf_paged.rollouts.attach` in its constructor.

    cache_config, scheduler_config, exact, sleeps: as for `attach`. Other arguments are those of `GRPOTrainer`.

    Raises ValueError as `attach` does, and for `rollout_func`.
    """

    def __init__(
        self,
        *args: object,
        cache_config: CacheConfig | dict[str, Any] | None = None,
        scheduler_config: SchedulerConfig | dict[str, Any] | None = None,
        exact: bool = True,
        sleeps: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.rollout_func is not None:
            raise ValueError("rollout_func draws the completions in place of the engine; use GRPOTrainer")
        # After TRL's constructor, which makes what is checked.
        self.rollouts = attach(
            self, cache_config=cache_config, scheduler_config=scheduler_config, exact=exact, sleeps=sleeps
        )

    @property
    def engine(self) -> Engine:
        """The engine on the trained model, awake. It is made when it is first needed."""
        return self.rollouts.engine
