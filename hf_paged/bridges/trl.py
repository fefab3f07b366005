"""TRL's GRPO trainer with the rollouts of an engine on the trainer's own model, and its log-probabilities.

Prompts, chat templates, tools, rewards and the loss are TRL's own. The engine draws the completions: the generations of
a prompt fork from it, and rows have no padding. With `exact`, log-probabilities of the trained model are those with
which the completions were drawn, to the last bit, and gradients are TRL's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from hf_paged.annotations import Model
from hf_paged.config import CacheConfig, SchedulerConfig, as_config
from hf_paged.features.tasks.scoring import with_values
from hf_paged.generation.engine.engine import Engine
from hf_paged.model.support import draws_dropout

_NEUTRAL = {"temperature": 1.0}
"""Options of generation that TRL has also as arguments of its own, which the loss reads."""


class PagedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer`, with completions drawn by the engine.

    cache_config, scheduler_config: as for `Engine`, with `batch_invariant=True` if `exact`.
    exact: log-probabilities of the trained model are the engine's. The ratio between the model that drew a completion
    and the same model in training is then exactly 1.
    sleeps: the engine gives its K/V memory back before each optimizer step, and takes it again for the next rollout.
    Other arguments are those of `GRPOTrainer`.

    Raises ValueError for `use_vllm`, `use_transformers_continuous_batching`, DeepSpeed and FSDP; with `exact` for a
    temperature other than 1 and for dropout; for `rollout_func` and for prompts with images.
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
        # After TRL's constructor, which makes the arguments that are checked here.
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(self.args, name):
                raise ValueError(f"{name}=True: the engine draws the completions; leave it out")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("DeepSpeed and FSDP divide the weights, which the engine needs whole; train without them")
        if exact and self.temperature != 1.0:
            raise ValueError(
                f"temperature={self.temperature}: the engine's log-probabilities are those of temperature 1; use that, "
                "or exact=False"
            )
        if exact and draws_dropout(self._own_model()):
            raise ValueError(
                "the model has dropout, so that its log-probabilities are random; set it to 0, or exact=False"
            )
        if exact and (self.args.bf16 or self.args.fp16) and self._own_model().dtype == torch.float32:
            raise ValueError(
                "bf16=True or fp16=True computes a model in float32 under autocast, which rounds by the batch. TRL has"
                " bf16=True by default: give GRPOConfig(bf16=False), or load the model in bfloat16, or use exact=False"
            )
        for name, neutral in _NEUTRAL.items():
            if exact and (value := getattr(self.generation_config, name, None)) not in (None, neutral):
                raise ValueError(
                    f"{name}={value} changes what is drawn, but not what is trained; leave it out, or exact=False"
                )
        if self.rollout_func is not None:
            raise ValueError("rollout_func draws the completions in place of the engine; use GRPOTrainer")
        scheduler_config = as_config(SchedulerConfig, scheduler_config, "scheduler_config")
        if exact:
            scheduler_config = replace(scheduler_config, batch_invariant=True)
        # The engine is made when it is needed first; until then TRL may move or wrap the model.
        self._configs = cache_config, scheduler_config
        self._exact = exact
        self._engine: Engine | None = None
        if sleeps:
            self.add_callback(_Sleep(self))

    @property
    def engine(self) -> Engine:
        """The engine on the trained model, awake. It is made when it is first needed."""
        with self._evaluating():
            if self._engine is None:
                self._engine = self._make_engine()
            self._engine.wake()
        return self._engine

    def _make_engine(self) -> Engine:
        try:
            return Engine(self._own_model(), *self._configs, tokenizer=self.processing_class)
        except ValueError as error:
            if "batch_invariant" not in str(error):
                raise
            raise ValueError(f"{error}, with exact=False") from error

    def _own_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode while the engine runs: in training mode it may leave out the cache."""
        modes = [(module, module.training) for module in self._own_model().modules()]
        self._own_model().eval()
        try:
            yield
        finally:
            for module, mode in modes:  # a part may be frozen in evaluation mode
                module.training = mode

    def _generate_single_turn(
        self,
        prompt_ids: Sequence[list[int]],
        images: object,
        multimodal_fields: object,
        *args: object,
        **kwargs: object,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        if images or multimodal_fields:
            raise ValueError("prompts with images: the engine takes text; use GRPOTrainer")
        # Equal prompts are samples of one request, which share the K/V of the prompt.
        places: dict[tuple[int, ...], list[int]] = {}
        for place, ids in enumerate(prompt_ids):
            places.setdefault(tuple(ids), []).append(place)
        configs = [copy.copy(self.generation_config) for _ in places]
        for config, own in zip(configs, places.values()):
            config.num_return_sequences = len(own)
        with self._evaluating():
            outputs = self.engine.generate([list(ids) for ids in places], configs, progress=False)
        rows = {
            place: own for output, some in zip(outputs, places.values()) for place, own in zip(some, output.outputs)
        }
        drawn = [rows[place] for place in range(len(prompt_ids))]
        return [row.token_ids for row in drawn], [row.logprobs for row in drawn] if self._exact else None

    def _get_per_token_logps_and_entropies(
        self,
        model: Model,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        own, *rest = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        if not self._exact or self.accelerator.unwrap_model(model) is not self._own_model():  # a reference model
            return own, *rest
        prompts, completions = (
            [ids[mask.bool()].tolist() for ids, mask in zip(input_ids[:, part], attention_mask[:, part])]
            for part in (slice(-logits_to_keep), slice(-logits_to_keep, None))
        )
        with self._evaluating():
            scores = self.engine.score(prompts, completions)
        # TRL's own at padding, the engine's at tokens.
        values = own.detach().clone()
        values[attention_mask[:, -logits_to_keep:].bool()] = torch.cat(scores).to(values)
        return with_values(values, own), *rest


class _Sleep(TrainerCallback):
    """Lends the engine's memory to the optimizer while that works."""

    def __init__(self, trainer: PagedGRPOTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None:
        engine = self._trainer._engine
        if engine is not None:
            engine.sleep()
