"""One round of the soak: some hundred random requests through one engine, each compared with its solo run.

All random choices are seeded by the number of the round. Rounds of one World share models, as in a long-lived process.
"""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_paged import CacheConfig, Engine, RequestOutput, SchedulerConfig, check
from tests import models
from tests.preempting import force_preempt
from tests.soaking.options import FAULT, RaisingCriterion, RaisingProcessor, options
from tests.soaking.world import (
    ADAPTERS,
    BASE,
    ENCODERS,
    KINDS,
    NUM_PROMPTS,
    NUM_VERSIONS,
    UNNOTICED,
    World,
    columns,
    prompts,
)

PROMPT_TOKENS, NEW_TOKENS, WIDTH = 34, 13, 4
"""Blocks of the largest request and one more: the pool holds little more than that request."""

MODES = ("steps", "steps", "steps", "steps", "threads", "stream")


@dataclass(frozen=True, slots=True)
class Ask:
    """The options of one request, and the weights with which it must be computed."""

    number: int
    prompt: int
    option: int
    adapter: str | None
    salt: str | None
    priority: int
    fault: str | None
    fault_at: int
    version: int = 0


@dataclass(slots=True)
class Flight:
    """A request in progress. changes: (version, token ids so far, whether their K/V is computed again)."""

    ask: Ask
    aborted: bool = False
    changes: list[tuple[int, tuple[int, ...], bool]] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What happened in a round. `counts`: how many requests ended how; `wrong`: enough to do each again."""

    first: int
    kind: str
    mode: str
    setting: str
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    leaked: int = 0


class Round:
    def __init__(self, world: World, first: int, count: int, kind: str | None = None, mode: str | None = None) -> None:
        self.rng = rng = random.Random(first)
        self.world = world
        chosen = rng.choices(list(KINDS), list(KINDS.values()))[0]
        self.kind = kind or chosen
        self.model = world.model(self.kind)
        self.count = count
        self.flights: dict[str, Flight] = {}
        self.lock = threading.Lock()
        self.drains = False
        self.pinned: list[tuple[int, str | None, str | None]] = []
        chosen = rng.choice(MODES)
        mode = mode or chosen
        # Remove what earlier rounds have left, so that a round can be repeated alone.
        world.set_version(self.kind, rng.randrange(NUM_VERSIONS), random.Random(first))
        if self.kind == "lora":
            world.activate(self.kind, rng.choice([*ADAPTERS, BASE]))
        self.active = self._active()
        cache, scheduler = self._settings()
        self.engine = Engine(self.model, cache, scheduler, tokenizer=models.tokenizer())
        self.report = Report(first, self.kind, mode, f"{cache} {scheduler}")

    def _settings(self) -> tuple[CacheConfig, SchedulerConfig]:
        rng = self.rng
        size = rng.choice((1, 2, 4, 4, 8, 16))
        needed = 2 * -(-PROMPT_TOKENS // size) + WIDTH * (-(-NEW_TOKENS // size) + 2)
        factor = rng.choice((1, 1.2, 1.5, 2, 6))
        blocks = {"num_blocks": int(needed * factor)}
        swap = rng.choice((None, None, 0, "64KiB"))
        report = check(self.model)
        of_states, of_token = report.state_bytes[0], sum(layer.bytes_per_token for layer in report.layers)
        if of_states and of_token and rng.random() < 0.7:  # states and blocks share a memory
            blocks = {"memory": int(factor * (needed * size * of_token + WIDTH * of_states)) + 1}
        cache = CacheConfig(block_size=size, **({} if report.engine_only else {"swap_memory": swap, **blocks}))
        preemption = rng.choice(("auto", "recompute", "swap"))
        if preemption == "swap" and (report.engine_only or swap == 0):
            preemption = "auto"
        return cache, SchedulerConfig(
            max_num_seqs=rng.choice((4, 16, 24, 32)), max_num_batched_tokens=rng.choice((8, 32, 64, 256)),
            preemption=preemption, prefix_caching=rng.random() < 0.8, watermark=rng.choice((0.0, 0.01, 0.2)),
            async_scheduling=report.native and not report.has_encoder and rng.random() < 0.4,
        )  # fmt: skip

    # -- the round -------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        run = {"steps": self._steps, "threads": self._threads, "stream": self._stream}[self.report.mode]
        try:
            with self.engine:
                run()
                self.report.leaked = self._leaked()
        except Exception:  # any error is a finding; the next round uses a new engine
            self.report.wrong.append({"round": self.report.first, "what": traceback.format_exc()})
        return self.report

    def _leaked(self) -> int:
        for prompt, adapter, salt in self.pinned:
            self.engine.release_prefix(prompts()[prompt], adapter=adapter, cache_salt=salt)
        self.engine.check_integrity()
        stats = self.engine.stats()
        lost = stats.num_blocks - stats.blocks_free - stats.blocks_cached
        self.report.counts["preempted"] += stats.preemptions_recompute + stats.preemptions_swap
        self.report.counts["swapped"] += stats.preemptions_swap
        self.report.counts["prefix tokens"] += stats.prefix_cache_hit_tokens
        self.report.counts["copies"] += stats.cow_copies
        return lost + stats.blocks_swapped + len(self.flights)

    def _steps(self) -> None:
        rng, added = self.rng, 0
        most = rng.choice((3, 12, 24, 24, 40))
        while added < self.count or self.engine.has_unfinished_requests():
            if self.drains and not self.flights:
                self._change_weights()
                self.drains = False
            while added < self.count and not self.drains and len(self.flights) < most and rng.random() < 0.7:
                self._add(self._ask(self.report.first + added))
                added += 1
            self._happen()
            self._collect(self.engine.step())

    def _happen(self) -> None:
        rng, engine = self.rng, self.engine
        event = rng.random()
        if event < 0.02:
            self._abort(rng)
        elif event < 0.025:
            self._change_weights()
        elif event < 0.035:
            self.drains = True  # for a change of weights between requests
        elif event < 0.04:
            with engine.pause(recompute=rng.random() < 0.5):
                self.report.counts["pauses"] += 1
        elif event < 0.043:
            engine.clear_prefix_cache()
        elif event < 0.05:
            engine.check_integrity()
        elif event < 0.055 and self.kind == "lora":
            self.world.activate(self.kind, rng.choice([*ADAPTERS, BASE]))
            self.active = self._active()
        elif event < 0.06:
            self._call_generate()
        elif (
            event < 0.065 and engine._scheduler.prefix_cache is not None and not (self.pinned or self.kind in ENCODERS)
        ):
            adapter = rng.choice([*ADAPTERS, BASE]) if self.kind == "lora" else None
            self.pinned.append((rng.randrange(NUM_PROMPTS), adapter, rng.choice((None, "a"))))
            prompt, adapter, salt = self.pinned[-1]
            engine.cache_prefix(prompts()[prompt], adapter=adapter, cache_salt=salt)
        elif event < 0.12 and self.flights:
            mode = rng.choice(["recompute", "swap"] if engine._scheduler.host_manager else ["recompute"])
            force_preempt(engine._scheduler, rng.choice(list(self.flights)), mode)

    def _threads(self) -> None:
        """Three threads add requests and run steps; one aborts requests and pauses the engine."""
        errors: list[BaseException] = []
        asks = [self._ask(self.report.first + i) for i in range(self.count)]

        def work(mine: list[Ask], seed: int) -> None:
            rng = random.Random(seed)
            while mine or self.flights:
                for _ in range(rng.randrange(4)):
                    if mine:
                        self._add(mine.pop())
                self._collect(self.engine.step())

        def disturb(seed: int) -> None:
            rng = random.Random(seed)
            while self.flights or any(lists):
                stop.wait(0.002)
                if rng.random() < 0.2:
                    self._abort(rng)
                elif rng.random() < 0.05:
                    with self.engine.pause(recompute=rng.random() < 0.5):
                        self.report.counts["pauses"] += 1

        def guarded(function: Callable[..., None], *args: Any) -> None:
            try:
                function(*args)
            except BaseException as error:  # reported by the thread that joins
                errors.append(error)
                raise

        lists, stop = [asks[index::3] for index in range(3)], threading.Event()
        threads = [threading.Thread(target=guarded, args=(work, lists[i], i)) for i in range(3)]
        threads.append(threading.Thread(target=guarded, args=(disturb, self.report.first)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _stream(self) -> None:
        """Use `stream` and `generate`; some streams are closed before their end."""
        rng, left = self.rng, [self._ask(self.report.first + i, whole=True) for i in range(self.count)]
        while left:
            part, left = left[: (size := rng.randrange(1, 12))], left[size:]
            ids = [prompts()[ask.prompt] for ask in part]
            configs = [options()[ask.option].config(columns(self.kind, p)) for ask, p in zip(part, ids)]
            names = [ask.adapter for ask in part]
            if rng.random() < 0.5:
                for ask, output in zip(part, self.engine.generate(ids, configs, progress=False, adapter=names)):
                    self._check(Flight(ask), output)
                continue
            with contextlib.closing(self.engine.stream(ids, configs, adapter=names)) as stream:
                by_id = {request.request_id: ask for request, ask in zip(stream.requests, part)}
                ended = 0
                for output in stream:
                    if output.finished:
                        ended += 1
                        self._check(Flight(by_id[output.request_id]), output)
                    if rng.random() < 0.01:
                        break
                self.report.counts["aborted"] += len(part) - ended

    # -- requests --------------------------------------------------------------------------------------------------

    def _ask(self, number: int, *, whole: bool = False) -> Ask:
        """A random request. whole: without options that only `add_request` takes."""
        rng, adapter, option = self.rng, None, rng_option(self.rng, whole=whole)
        if self.kind == "lora":
            adapter = rng.choice([*ADAPTERS, BASE, None])
        return Ask(
            number, rng.randrange(NUM_PROMPTS), option, adapter,
            None if whole else rng.choice((None, None, None, "a", "b")),
            0 if whole else rng.choice((0, 0, 0, -1, 1, 5)),
            None if whole or rng.random() > 0.03 else rng.choice(("processor", "criterion")), rng.randrange(6),
        )  # fmt: skip

    def _add(self, ask: Ask) -> None:
        made = options()[ask.option]
        processors, criteria = made.processors(), made.criteria()
        if ask.fault == "processor":
            processors.append(RaisingProcessor(ask.fault_at))
        elif ask.fault == "criterion":
            criteria.append(RaisingCriterion(ask.fault_at))
        prompt = prompts()[ask.prompt]
        with self.lock:
            flight = self.flights[str(ask.number)] = Flight(self._at_present(ask))
        try:
            self.engine.add_request(
                prompt if ask.number % 2 else torch.tensor(prompt), made.config(columns(self.kind, prompt)),
                request_id=str(ask.number), priority=ask.priority, logits_processor=processors,
                stopping_criteria=criteria, adapter=ask.adapter, cache_salt=ask.salt,
            )  # fmt: skip
        except ValueError as error:
            with self.lock:
                del self.flights[str(ask.number)]
                self.report.counts["refused"] += 1
                if self._expected(flight.ask) is not None:
                    self._wrong(flight.ask, f"refused: {error}", None)

    def _at_present(self, ask: Ask) -> Ask:
        adapter = self.active if ask.adapter is None else ask.adapter
        fields = {name: getattr(ask, name) for name in Ask.__slots__}
        return Ask(**{**fields, "adapter": adapter, "version": self.world.version[self.kind]})

    def _active(self) -> str | None:
        if self.kind != "lora":
            return None
        layer = next(m for m in self.model.modules() if hasattr(m, "active_adapters") and hasattr(m, "lora_A"))
        return BASE if layer.disable_adapters else layer.active_adapters[0]

    def _abort(self, rng: random.Random) -> None:
        with self.lock:
            name = rng.choice(list(self.flights) or ["none"])
            if name in self.flights:
                self.flights[name].aborted = True
        self.engine.abort(name)

    def _change_weights(self) -> None:
        """Change the weights: inside a pause if requests are in flight, else in any way that an idle engine permits."""
        flights = [flight for name, flight in self.flights.items()]
        if not flights:
            way = self.world.change(self.kind, self.rng)
            if way in UNNOTICED:
                self.engine.weights_changed()
            return
        recompute = self.rng.random() < 0.5
        with self.engine.pause(recompute=recompute):
            for name, flight in self.flights.items():
                flight.changes.append((self.world.version[self.kind], self._so_far(name), recompute))
            self.world.change(self.kind, self.rng)
        for flight in flights:
            flight.changes.append((self.world.version[self.kind], (), recompute))
        self.report.counts["weight changes in flight"] += 1

    def _so_far(self, name: str) -> tuple[int, ...]:
        request = self.engine._requests.get(name)
        outputs = request.output().outputs if request is not None else []
        return tuple(outputs[0].token_ids) if outputs else ()

    def _call_generate(self) -> None:
        rng = self.rng
        option, prompt = rng_option(rng, whole=True), rng.randrange(NUM_PROMPTS)
        made, ids = options()[option], torch.tensor([prompts()[prompt]])
        expected = self.world.known(self.kind, self.world.version[self.kind], self.active, prompt, option)
        if expected is None or check(self.model).engine_only:
            return
        if made.seed is not None:
            torch.manual_seed(made.seed)
        result = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=made.config(columns(self.kind, ids[0])),
            tokenizer=models.tokenizer(), cache_implementation="paged",
            cache_config={"num_blocks": 200 + rng.randrange(6), "block_size": 4},
        )  # fmt: skip
        rows = tuple(tuple(row) for row in result[:, columns(self.kind, ids[0]) :].tolist())
        self.report.counts["generate"] += 1
        if any(row[: len(known)] != known for row, known in zip(rows, expected)):
            ask = Ask(self.report.first, prompt, option, self.active, None, 0, None, 0, self.world.version[self.kind])
            self._wrong(ask, "generate", rows)

    # -- results ---------------------------------------------------------------------------------------------------

    def _collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                with self.lock:  # solo runs too: their random numbers come from the process's generator
                    flight = self.flights.pop(output.request_id, None)
                    if flight is None:
                        self.report.wrong.append({"request": output.request_id, "what": "finished twice"})
                    else:
                        self._check(flight, output)

    def _expected(self, ask: Ask) -> Any:
        return self.world.known(self.kind, ask.version, ask.adapter, ask.prompt, ask.option)

    def _check(self, flight: Flight, output: RequestOutput) -> None:
        ask, counts = flight.ask, self.report.counts
        if self.report.mode == "stream":
            ask = self._at_present(ask)
        rows = tuple(tuple(c.token_ids) for c in output.outputs)
        reasons = {c.finish_reason for c in output.outputs}
        expected = self._expected(ask)
        is_beams = "num_beams" in options()[ask.option].fields
        if flight.aborted and "abort" in reasons | ({"abort"} if not reasons else set()):
            counts["aborted"] += 1
            if flight.changes or is_beams or expected is None:
                return
        elif output.error is not None:
            counts["failed"] += 1
            if expected is not None and (ask.fault is None or FAULT not in output.error):
                self._wrong(ask, output.error, rows)
            return
        elif flight.changes:
            self._check_changed(flight, rows)
            return
        else:
            counts["checked"] += 1
            if rows != expected:
                self._wrong(ask, "tokens", rows)
            return
        if expected is not None and any(row != whole[: len(row)] for row, whole in zip(rows, expected)):
            self._wrong(ask, "tokens before an abort", rows)

    def _check_changed(self, flight: Flight, rows: tuple[tuple[int, ...], ...]) -> None:
        """Weights changed during the request: check plain greedy runs, which can be split at the change."""
        ask, made = flight.ask, options()[flight.ask.option]
        self.report.counts["changed in flight"] += 1
        if len(flight.changes) > 2 or not made.is_plain:
            return
        (_, before, recompute), (version, _, _) = flight.changes
        expected = self._expected(ask)
        wrong = rows[0][: len(before)] != before or before != expected[0][: len(before)]
        count = made.fields["max_new_tokens"] - len(before)
        if not wrong and recompute and count > 0 and self.kind not in ENCODERS:
            prompt = (*prompts()[ask.prompt], *before)
            (rest,) = self.world.solo(self.kind, version, ask.adapter, prompt, ask.option, max_new_tokens=count)
            self.report.counts["changed in flight, checked"] += 1
            wrong = rows[0] != (*before, *rest)
        if wrong:
            self._wrong(ask, f"tokens, weights changed to {version} after {before}", rows)

    def _wrong(self, ask: Ask, what: str, got: Any) -> None:
        self.report.wrong.append(
            {
                "round": self.report.first, "request": ask.number, "what": what, "kind": self.kind,
                "version": ask.version, "adapter": ask.adapter, "prompt": ask.prompt, "option": ask.option,
                "got": got, "expected": self._expected(ask),
            }
        )  # fmt: skip


def rng_option(rng: random.Random, *, whole: bool) -> int:
    while True:
        index = rng.randrange(len(options()))
        made = options()[index]
        if not whole or not (made.nudges or made.has_criterion):
            return index
