"""An engine in the place where a trainer of TRL generates: its model's `generate`, and what the loss reads.

Prompts, chat templates, tools, rewards and losses are TRL's own. Knows what TRL's trainers have in common, so that it
imports none of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_paged.bridges.rollout_weights import check_weights, is_divided, outdate, own_model, rollout_weights, whole_model
from hf_paged.config import CacheConfig, SchedulerConfig, as_config
from hf_paged.features.tasks.scoring import with_values
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.requests.outputs import CompletionOutput
from hf_paged.integration.names import TYPES
from hf_paged.model.support import draws_dropout

_DRAWS_OTHERWISE = ("use_vllm", "use_transformers_continuous_batching")
_TEXT_ARGUMENTS = {"input_ids", "attention_mask", "generation_config", "return_dict_in_generate"}
_OF_LOSS = {"batch_size", "compute_entropy", "compute_aux_loss"}
"""Arguments of TRL's function for log-probabilities that are not a batch's images or such."""
_HELD_BY = "_hf_paged_rollouts"
"""The attribute of a trainer that keeps its `Rollouts`."""
_EARLIER = "_hf_paged_earlier_generate"
"""The attribute of a model that keeps a `generate` that somebody had set on it; a copy of the model has its own."""

_rollouts: weakref.WeakKeyDictionary[Any, weakref.ref[Rollouts]] = weakref.WeakKeyDictionary()
"""By model. A trainer keeps its own, so that nothing is left when it goes."""


class Rollouts:
    """The completions of one trainer, drawn by an engine on the weights that it trains.

    The engine is made when it is first needed, sleeps while the optimizer works, and notices new weights by itself.

    Attributes:
        options: Those that `attach` was given.
        exact: Whether log-probabilities of the loss are the engine's.
    """

    def __init__(
        self, trainer: Any, options: dict[str, Any], cache_config: CacheConfig, scheduler_config: SchedulerConfig
    ) -> None:
        self.options = options
        self.exact: bool = options["exact"]
        self._trainer = trainer
        self._configs = cache_config, scheduler_config
        self._engine: Engine | None = None
        self._of: Any = None
        self._drawn: list[CompletionOutput] | None = None
        # Of what TRL draws now: for its own function, which divides a batch's images by rows.
        self.num_images: list[int] | None = None
        self.divide: Any = None

    @property
    def engine(self) -> Engine:
        """The engine on the trained model, awake. It is made when it is first needed: TRL may move the model before."""
        with rollout_weights(self._trainer) as model:
            if self._engine is None or self._of is not model:
                self.close()
                self._engine, self._of = self._make_engine(model), model
            self._engine.wake()
        return self._engine

    def _make_engine(self, model: Any) -> Engine:
        processor = self._trainer.processing_class
        try:
            return Engine(model, *self._configs, tokenizer=getattr(processor, "tokenizer", processor))
        except ValueError as error:
            if "batch_invariant" not in str(error):
                raise
            raise ValueError(f"{error}, with exact=False") from error

    def close(self) -> None:
        """Close the engine; another one is made when completions are drawn again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def sleep(self) -> None:
        """Give the engine's memory, and that of a whole copy, back until completions are drawn again."""
        if self._engine is not None:
            self._engine.sleep()
        outdate(self._trainer, free=True)

    def draw(
        self,
        prompts: Sequence[list[int]],
        generation_config: Any = None,
        inputs: Sequence[dict[str, torch.Tensor] | None] | None = None,
    ) -> list[CompletionOutput]:
        """Draw one completion of each prompt, with the weights and active adapters of now.

        A later turn of a conversation finds the K/V of the former ones, as long as the weights stay.

        Args:
            prompts: Token ids. Equal prompts are samples of one request, which share the prompt's K/V.
            generation_config: As for `generate`. None = the trainer's own.
            inputs: Of each prompt, as for `Engine.generate`: images and such. Prompts with some share no request.

        Returns:
            A completion for each prompt, with `token_ids` and `logprobs`, in the order of the prompts.

        Raises:
            ValueError: For an option that the engine does not take.
            EngineError: If a request has failed.
        """
        given = self._trainer.generation_config if generation_config is None else generation_config
        if _has_several(given):
            raise ValueError("num_beams and num_return_sequences above 1: one completion of each prompt is drawn")
        media = inputs or [None] * len(prompts)
        places: dict[tuple[Any, ...], list[int]] = {}
        for place, ids in enumerate(prompts):
            # Placeholders do not say what they show.
            places.setdefault((*ids, None if media[place] is None else (place,)), []).append(place)
        engine = self.engine
        with rollout_weights(self._trainer) as model:
            chosen = model.generation_config.do_sample if given.do_sample is None else given.do_sample
            configs = [_of_request(given, len(own) if chosen else 1) for own in places.values()]
            firsts = [own[0] for own in places.values()]
            shown = [media[place] for place in firsts]
            outputs = engine.generate([list(prompts[place]) for place in firsts], configs, progress=False, inputs=shown)
        # Without sampling, equal prompts have equal completions.
        rows = {
            place: output.outputs[number if chosen else 0]
            for output, own in zip(outputs, places.values())
            for number, place in enumerate(own)
        }
        return [rows[place] for place in range(len(prompts))]

    def _generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what the model's `generate` does: by the engine, or by paged `generate` for what no engine's prompt is."""
        self._drawn = None
        given = {name: value for name, value in kwargs.items() if value is not None}
        others = sorted(given.keys() - _TEXT_ARGUMENTS)
        media = {name: given[name] for name in others if self.exact and self.num_images is not None}
        others = ([] if media else others) or ["an argument by position"] * bool(args)
        ids, config = given.get("input_ids"), given.get("generation_config")
        if config is not None and _has_several(config):
            others.append("num_beams or num_return_sequences above 1")
        others += [f"no {name}" for name in ("input_ids", "generation_config") if name not in given]
        if ids is None or config is None or others:
            if self.exact:
                raise ValueError(f"{', '.join(others)}: exact=True is for one answer to a prompt; use exact=False")
            model = whole_model(self._trainer) if is_divided(self._trainer) else model
            return _earlier(model)(*args, **kwargs, cache_implementation="paged")
        mask = given.get("attention_mask", torch.ones_like(ids)).bool()
        inputs = self._divided(ids, mask, media | {"num_images": self.num_images}) if media else None
        self._drawn = self.draw([row[own].tolist() for row, own in zip(ids, mask)], config, inputs)
        rows = [torch.tensor(own.token_ids, dtype=ids.dtype, device=ids.device) for own in self._drawn]
        # Of the same width as plain `generate` gives, where the shorter rows end with padding.
        padding = 0 if config.pad_token_id is None else config.pad_token_id
        sequences = torch.cat([ids, torch.nn.utils.rnn.pad_sequence(rows, True, padding)], dim=1)
        if given.get("return_dict_in_generate", config.return_dict_in_generate):
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _divided(self, ids: torch.Tensor, mask: torch.Tensor, fields: dict[str, Any]) -> list[dict[str, Any] | None]:
        """Return the images and such of each row, as TRL divides those of a batch for its loss. None: it has none."""
        rows: list[dict[str, Any] | None] = []

        def note(**inputs: Any) -> Any:
            own = inputs["attention_mask"][0].bool()
            found = {name: value[:, own] if name in TYPES else value for name, value in inputs.items()}
            kept = {name: value for name, value in found.items() if name in fields and value.numel()}
            rows.append(kept if kept.keys() - {*TYPES} else None)
            nothing = torch.zeros(own.shape, dtype=torch.float32, device=own.device)[None]
            return SimpleNamespace(log_probs=nothing, entropy=nothing, aux_loss=nothing[0, 0])

        self.divide(note, ids, mask, 1, batch_size=1, **fields)
        return rows

    def _take_logprobs(self) -> list[list[float]] | None:
        """Return the log-probabilities of what was drawn last, if they are those of the trainer's distribution."""
        drawn, self._drawn = self._drawn, None
        is_own = getattr(self._trainer, "temperature", None) == 1.0
        return [list(own.logprobs) for own in drawn] if drawn is not None and is_own else None

    def _exact_logps(
        self, found: tuple[Any, ...], ids: torch.Tensor, mask: torch.Tensor, keep: int, fields: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Put the engine's log-probabilities in the place of TRL's, with the graph of TRL's own."""
        own, *rest = found
        prompts, completions = (
            [row[kept.bool()].tolist() for row, kept in zip(ids[:, part], mask[:, part])]
            for part in (slice(-keep), slice(-keep, None))
        )
        inputs = None
        if any(isinstance(value, torch.Tensor) for value in fields.values()):
            # A completion's last token is read by nobody.
            inputs = [
                row and {name: value[:, :-1] if name in TYPES else value for name, value in row.items()}
                for row in self._divided(ids, mask, fields)
            ]
        engine = self.engine
        with rollout_weights(self._trainer):
            scores = engine.score(prompts, completions, inputs=inputs)
        # TRL's own at padding, the engine's at tokens.
        values = own.detach().clone()
        values[mask[:, -keep:].bool()] = torch.cat(scores).to(values)
        return with_values(values, own), *rest


def attach(
    trainer: Any,
    *,
    cache_config: CacheConfig | dict[str, Any] | None = None,
    scheduler_config: SchedulerConfig | dict[str, Any] | None = None,
    exact: bool = False,
    sleeps: bool = True,
) -> Rollouts:
    """Have an engine draw the completions of one of TRL's trainers, wherever it calls its model's `generate`.

    Args:
        trainer: A trainer of TRL that generates. Its prompts, rewards and loss stay its own.
        cache_config: As for `Engine`.
        scheduler_config: As for `Engine`, with `batch_invariant=True` if `exact`.
        exact: Whether log-probabilities of the trained model in the loss are the engine's. The ratio between the model
            that drew a completion and the same model in training is then exactly 1. For GRPO and RLOO, on CPUs.
        sleeps: Whether the engine gives its K/V memory back before each optimizer step, and takes it again for the
            next rollout.

    Returns:
        The trainer's rollouts. A second call with the same options, or none, returns the same.

    Raises:
        ValueError: For a trainer that generates nothing or has vLLM or another engine do it, for FSDP1 and DeepSpeed's
            stages but the third, with `exact` for divided weights, a loss without log-probabilities, a temperature
            other than 1 and dropout, and for other options than those of a former call.

    Example:
        ```python
        trainer = RLOOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data)
        attach(trainer)
        trainer.train()
        ```
    """
    options = {"cache_config": cache_config, "scheduler_config": scheduler_config, "exact": exact, "sleeps": sleeps}
    if (known := vars(trainer).get(_HELD_BY)) is not None:
        if options not in (known.options, attach.__kwdefaults__):
            others = ", ".join(name for name, value in options.items() if value != known.options[name])
            raise ValueError(f"{others}: the trainer has an engine with other options; give all of them at once")
        rollouts: Rollouts = known
        return rollouts
    _check(trainer, exact)
    scheduler = as_config(SchedulerConfig, scheduler_config, "scheduler_config")
    if exact:
        scheduler = replace(scheduler, batch_invariant=True)
    rollouts = Rollouts(trainer, options, as_config(CacheConfig, cache_config, "cache_config"), scheduler)
    setattr(trainer, _HELD_BY, rollouts)
    model = own_model(trainer)
    _rollouts[model] = weakref.ref(rollouts)
    if (own := _set_on(model)) is not None:
        if is_divided(trainer):
            raise ValueError("the model has a `generate` set on itself, which a whole copy lacks; set it on the class")
        setattr(model, _EARLIER, own)
    # A bound method: a copy of the model then has one that is bound to the copy, which has no rollouts.
    model.generate = MethodType(_generate, model)
    _watch(trainer, rollouts)
    if sleeps:
        trainer.add_callback(_Sleep(rollouts))
    if is_divided(trainer):
        trainer.add_callback(_Divided(trainer))
    return rollouts


def rollout_func(prompts: list[Any], trainer: Any, **options: Any) -> dict[str, Any]:
    """Draw a completion for each prompt, as a `rollout_func` of TRL's GRPO trainer.

    `functools.partial` gives it the options of `attach`. Tools of the trainer are called as without it, and later
    turns find the K/V of the former ones.

    Args:
        prompts: Texts, or conversations.
        trainer: The trainer, of which TRL gives the prompts.
        **options: Those of `attach`.

    Returns:
        `prompt_ids`, `completion_ids` and `logprobs`, which is None where the trainer's temperature is not 1 and for
        prompts with images.

    Raises:
        ValueError: As for `attach`, and for prompts with images if the trainer has tools.
    """
    attach(trainer, **options)
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    # TRL calls `generate` of later turns without the images of a rollout function's prompts.
    if images and trainer.tools:
        raise ValueError("rollout_func with tools and images: use hf_paged.rollouts.attach(trainer) without it")
    count = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, count)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def _check(trainer: Any, exact: bool) -> None:
    """Raise ValueError for what would not draw with the engine, or not to the last bit."""
    kind = type(trainer).__name__
    for name in _DRAWS_OTHERWISE:
        if getattr(trainer.args, name, False):
            raise ValueError(f"{name}=True: the engine draws the completions; leave it out")
    config = getattr(trainer, "generation_config", None)
    if config is None:
        raise ValueError(f"{kind} calls no generate of its model, so that an engine has nothing to draw; leave it out")
    check_weights(trainer, exact)
    if not exact:
        return
    if not hasattr(trainer, "_get_per_token_logps_and_entropies"):
        raise ValueError(f"exact=True: the loss of {kind} is of no log-probabilities of completions; leave it out")
    if trainer.temperature != 1.0:
        raise ValueError(
            f"temperature={trainer.temperature}: the engine's log-probabilities are those of temperature 1; use that, "
            "or exact=False"
        )
    if draws_dropout(own_model(trainer)):
        raise ValueError("the model has dropout, so that its log-probabilities are random; set it to 0, or exact=False")
    # TRL has it also as an argument of its own, which the loss reads.
    if config.temperature not in (None, 1.0):
        raise ValueError(
            f"temperature={config.temperature} changes what is drawn, but not what is trained; leave it out, or "
            "exact=False"
        )


def _has_several(generation_config: Any) -> bool:
    """Return True if a prompt has several sequences."""
    return any((getattr(generation_config, name) or 1) > 1 for name in ("num_beams", "num_return_sequences"))


def _of_request(generation_config: Any, samples: int) -> Any:
    """Return the config for one request with so many samples."""
    config = copy.copy(generation_config)
    config.num_return_sequences = samples
    # TRL sets False where checkpointing keeps no K/V in training mode, which the engine does not run in.
    config.use_cache = True
    return config


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what `generate` of a model does that has rollouts. (A copy of the model has none.)"""
    found = _rollouts.get(model)
    rollouts = None if found is None else found()
    if rollouts is not None:
        return rollouts._generate(model, *args, **kwargs)
    generate = _earlier(model)
    # The trainer has gone, or this is a copy: the model is again as it was.
    own = vars(model)
    own.pop("generate", None)
    if _EARLIER in own:
        own["generate"] = own.pop(_EARLIER)
    return generate(*args, **kwargs)


def _set_on(model: Any) -> Any:
    """Return the `generate` that somebody has set on the model itself; None: nobody has, or it is ours."""
    own = vars(model).get("generate")
    # When training begins, FSDP2 wraps what it finds.
    while getattr(own, "__globals__", {}).get("__name__", "").startswith("torch.distributed.fsdp."):
        own = own.__wrapped__
    return None if getattr(own, "__func__", own) in (_generate, type(model).generate) else own


def _earlier(model: Any) -> Any:
    """Return `generate` as it was before rollouts replaced it: the class's, or what was set on the model."""
    return vars(model).get(_EARLIER) or MethodType(type(model).generate, model)


def _watch(trainer: Any, rollouts: Rollouts) -> None:
    """Replace the methods of one trainer that read log-probabilities, where it has them."""
    turn: Any = getattr(trainer, "_generate_single_turn", None)
    logps: Any = getattr(trainer, "_get_per_token_logps_and_entropies", None)

    def drawing(prompt_ids: Any, images: Any = None, *args: Any, **kwargs: Any) -> Any:
        rollouts.num_images = [len(own or ()) for own in images] if images else None
        try:
            result = turn(prompt_ids, images, *args, **kwargs)
        finally:
            rollouts.num_images = None  # a later call of `generate` has other images
        if not isinstance(result, tuple):  # a trainer that reads none
            return result
        ids, _ = result
        logprobs = rollouts._take_logprobs()
        return ids, logprobs and [own[: len(row)] for own, row in zip(logprobs, ids)]

    def scoring(model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int, *args: Any, **kwargs: Any) -> Any:
        found = logps(model, ids, mask, keep, *args, **kwargs)
        if trainer.accelerator.unwrap_model(model) is not own_model(trainer):  # a reference model
            return found
        # Names of images and such are those of the model's processor.
        fields = {name: value for name, value in kwargs.items() if name not in _OF_LOSS and value is not None}
        return rollouts._exact_logps(found, ids, mask, keep, fields)

    if turn is not None:
        trainer._generate_single_turn = drawing
    if rollouts.exact:
        rollouts.divide = logps
        trainer._get_per_token_logps_and_entropies = scoring


class _Sleep(TrainerCallback):
    """Lends the engine's memory to the optimizer while that works."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None:
        self._rollouts.sleep()

    # The model may then be saved or used; a later rollout wakes the engine.
    on_train_end = on_pre_optimizer_step


class _Divided(TrainerCallback):
    """Has a whole copy made anew where a checkpoint may have been loaded."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        outdate(self._trainer)

    on_train_end = on_train_begin
