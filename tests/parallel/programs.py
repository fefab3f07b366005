"""What the ranks of tests/parallel/test_ranks.py run: each function is a program, and `say` reports to the test."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig, tokenwise
from tests import models
from tests.generation.solo import config

Say = Callable[[Any], None]
SIZES = {**models._ROTARY, "hidden_size": 32, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 4},
}
NAMES = ["greedy", "four samples", "beams", "sample", "processors", "greedy with eos", "beam sampling"]
LENGTHS = [5, 9, 13, 17, 6, 21, 11]


def save(family: str, folder: str) -> None:
    made = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(folder)


def load(folder: str) -> Any:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    options = {"distributed_config": DistributedConfig(tp_size=size)} if size > 1 else {}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def generate(model: Any, way: str, **options: Any) -> list[list[int]]:
    inputs = models.batch(5, 9, 7)
    torch.manual_seed(0)
    limits = {"max_new_tokens": 12, "pad_token_id": models.PAD, "eos_token_id": models.EOS}
    tokens: list[list[int]] = model.generate(**inputs, **limits, **WAYS[way], **options).tolist()
    return tokens


def serve(engine: Engine) -> list[list[list[int]]]:
    """Requests of all kinds, of which some arrive when others run; their tokens."""
    prompts = models.prompts(*LENGTHS)
    ids = [engine.add_request(p, config(name, max_new_tokens=16)) for p, name in zip(prompts[:4], NAMES)]
    outputs = {}
    for step in itertools.count():
        if step == 3:
            ids += [engine.add_request(p, config(n, max_new_tokens=16)) for p, n in zip(prompts[4:], NAMES[4:])]
        outputs |= {output.request_id: output for output in engine.step()}
        if step % 4 == 0:
            engine.check_integrity()
        if step > 3 and not engine.has_unfinished_requests():
            break
    return [[list(each.token_ids) for each in outputs[request_id].outputs] for request_id in ids]


def small_engine(model: Any, preemption: Any) -> Engine:
    return Engine(
        model,
        CacheConfig(num_blocks=18, block_size=4, swap_memory="1MiB"),
        SchedulerConfig(preemption=preemption, max_num_batched_tokens=24),
    )


def all_doors(say: Say, folder: str) -> None:
    """Both doors: `generate` on every rank, the engine driven by rank 0."""
    model = load(folder)
    for way in WAYS:
        say((way, generate(model, way, cache_implementation="paged")))
    for preemption in ("swap", "recompute"):
        with small_engine(model, preemption) as engine:
            if not engine.is_driver:
                engine.run_worker()
                continue
            say((preemption, serve(engine)))
            stats = engine.stats()
            assert stats.preemptions_swap if preemption == "swap" else stats.preemptions_recompute


def without_pickle(say: Say, folder: str) -> None:
    """`all_doors` in a process that cannot unpickle."""
    from torch.distributed import distributed_c10d

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something is unpickled")

    model = load(folder)
    model.generation_config = GenerationConfig(pad_token_id=0)
    pickle.loads = pickle.load = distributed_c10d._unpickler = refuse  # type: ignore[assignment, attr-defined]
    with small_engine(model, "swap") as engine:
        if engine.is_driver:
            say(serve(engine))
        else:
            engine.run_worker()


def shares(say: Say, folder: str) -> None:
    """Elements of weights, and bytes of K/V, on this rank; blocks where one rank has less memory."""
    model = load(folder)
    rank = int(os.environ["RANK"])
    say(("weights", sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())))
    with Engine(model, CacheConfig(memory=(4 - rank) * 2**20)) as engine:
        say(("blocks", engine.stats().num_blocks))
        say(("bytes", engine._memory.nbytes))
        if not engine.is_driver:
            engine.run_worker()


def long_requests(say: Say, folder: str, silence: float = 15.0) -> None:
    """Requests without an end, until a rank is killed or stopped. silence: seconds until a rank hangs."""
    from hf_paged import RankError
    from hf_paged.features.ranks import ranks

    ranks.SILENCE_SECONDS, ranks.BEAT_SECONDS = silence, min(ranks.BEAT_SECONDS, silence / 10)
    model = load(folder)
    engine = small_engine(model, "swap")
    try:
        if not engine.is_driver:
            say("ready")
            engine.run_worker()
        endless = GenerationConfig(max_new_tokens=40, eos_token_id=[], pad_token_id=0)
        for turn in itertools.count():
            for prompt in models.prompts(*LENGTHS):
                engine.add_request(prompt, endless)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.exception is not None:
                        raise output.exception
            if turn == 0:
                say("ready")
    except RankError as error:
        say(str(error))
        raise SystemExit(3) from None


def hanging_forward(say: Say, folder: str, where: int) -> None:
    """A forward of one rank never ends, although its process is alive."""
    from hf_paged.features.ranks import ranks

    model = load(folder)
    ranks.STEP_SECONDS, ranks.BEAT_SECONDS = 1.0, 0.1
    with small_engine(model, "swap") as engine:
        if int(os.environ["RANK"]) == where:
            model.model.layers[1].mlp.register_forward_pre_hook(tokenwise(lambda *_: threading.Event().wait()))
        if engine.is_driver:
            outputs = engine.generate(models.prompts(*LENGTHS), config("greedy"), raise_on_error=False)
            say(sorted({str(output.error) for output in outputs}))
        else:
            engine.run_worker()


def failing_forward(say: Say, folder: str, where: int) -> None:
    from hf_paged import RankError

    model = load(folder)
    rank = int(os.environ["RANK"])
    with small_engine(model, "swap") as engine:
        if rank == where:
            calls = itertools.count()

            def fail(module: Any, args: Any) -> None:
                if next(calls) == 7:
                    raise MemoryError("no memory for this layer")

            model.model.layers[1].mlp.register_forward_pre_hook(tokenwise(fail))
        try:
            if engine.is_driver:
                outputs = engine.generate(models.prompts(*LENGTHS), config("greedy"), raise_on_error=False)
                say(sorted({str(output.error) for output in outputs}))
                engine.add_request(models.prompts(5)[0])
            else:
                engine.run_worker()
        except (RankError, MemoryError) as error:
            say(f"{type(error).__name__}: {error}")


def weights_of_all(say: Say, folder: str) -> None:
    """All ranks change their weights while rank 0 pauses."""
    model = load(folder)

    def halve() -> None:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.mul_(0.5)

    prompt = models.prompts(20)[0]
    with Engine(model, CacheConfig(block_size=4)) as engine:
        if not engine.is_driver:
            engine.run_worker(on_pause=halve)
            return
        say([list(engine.generate([prompt], config("greedy"))[0].outputs[0].token_ids)])
        with engine.pause():
            halve()
        say([list(engine.generate([prompt], config("greedy"))[0].outputs[0].token_ids)])
