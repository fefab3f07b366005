"""Compare paged with plain generate on tiny models, each in a process: `python sweep.py [types or classes]`."""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import hf_paged  # before transformers, as in a typical user's script
from hf_paged.features.encoder_decoder.trial_inputs import encoder_batch
from tests.architectures.encoder_inputs import encoder_rows, on_page
from tests.architectures.tiny import other_classes, tiny_model
from tests.encoder_models import MODES

LENGTHS = (5, 19, 12, 26)
NEW_TOKENS = 24


def prompts(vocab: int = 90, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask int64 [4, 26], left-padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, vocab, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, : max(LENGTHS) - length] = 0
    return ids * mask, mask


def examine(model_type: str, engine: bool, speed: bool = False) -> dict[str, Any]:
    """The result of one type. `result`: identical, refused, different, crashed, or unrunnable (plain fails too)."""
    result = _compare(model_type, engine)
    if speed and result.get("engine") == "identical":
        result["speed"] = examine_speed(tiny_model(model_type))
    return result


def _compare(model_type: str, engine: bool) -> dict[str, Any]:
    try:
        model = tiny_model(model_type)
        if model.config.is_encoder_decoder:
            return _examine_encoder(model, engine)
        ids, mask = prompts()
        plain = {"greedy": _generate(model, ids, mask)}
        if plain["greedy"].ndim != 2:
            return {"result": "unrunnable", "reason": "a position has tokens of several codebooks"}
    except Exception as error:  # the model itself fails here, not hf_paged
        return {"result": "unrunnable", "reason": _line(error)}
    eos = int(plain["greedy"][1, -NEW_TOKENS // 2])
    calls = {
        "greedy": {},
        "again": {"eos_token_id": eos},
        "beams": {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": eos, "max_new_tokens": 16},
        "samples": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    }
    result: dict[str, Any] = {"class": type(model).__name__, "varied": _varied(model, plain["greedy"], ids)}
    for name, options in calls.items():
        if name not in plain:
            try:
                plain[name] = _generate(model, ids, mask, **options)
            except Exception as error:
                result.setdefault("plain_fails", {})[name] = _line(error)
    try:
        report = hf_paged.check(model)
    except Exception as error:
        return {**result, "result": "crashed", "reason": f"check: {_line(error)}", "trace": traceback.format_exc()}
    result["mode"] = "native" if report.native else "dense view" if report.supported else "refused"
    result["reason"] = report.reason
    result["layers"] = [layer.mode for layer in report.layers]
    if not report.supported:
        own = {"engine": examine_engine(model, ids, mask)} if engine and report.engine_only else {}
        return {**result, **own, "result": "refused"}
    different = []
    for name, options in calls.items():
        if name not in plain:
            continue
        try:
            with hf_paged.record_calls() as records:
                actual = _generate(model, ids, mask, cache_implementation="paged", **options)
        except hf_paged.UnsupportedModelError as error:
            return {**result, "result": "crashed", "call": name, "reason": f"refused too late: {_line(error)}"}
        except Exception as error:
            crash = {"call": name, "reason": _line(error), "trace": traceback.format_exc()}
            return {**result, "result": "crashed", **crash}
        result.setdefault("routes", {})[name] = records[0].route
        result["blocks"] = max(result.get("blocks", 0), records[0].peak_blocks_used)
        if not torch.equal(actual, plain[name]):
            different.append(name)
    if left := _blocks_in_use(model):
        different.append(f"{left} blocks left in use")
    if not result["blocks"]:
        different.append("nothing in blocks")
    result["result"] = "different" if different else "identical"
    if different:
        result["different"] = different
    if engine and not different:
        try:
            result["engine"] = examine_engine(model, ids, mask)
        except Exception as error:
            result["engine"], result["trace"] = f"crashed: {_line(error)}", traceback.format_exc()
    return result


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _examine_encoder(model: Any, engine: bool) -> dict[str, Any]:
    """Of an encoder-decoder model: four ragged texts, or three rows of states that an encoder might have computed."""
    from transformers import GenerationMixin

    report = hf_paged.check(model)
    mode = "native" if report.native else "dense view" if report.supported else "refused"
    result: dict[str, Any] = {"class": type(model).__name__, "mode": mode, "reason": report.reason, "blocks": 1}
    result["layers"] = [layer.mode for layer in report.layers]
    if not report.supported:
        return {**result, "result": "refused"}
    given: dict[str, Any] = dict(zip(("input_ids", "attention_mask"), prompts()))
    given |= on_page(model, given["input_ids"])
    if model.main_input_name != "input_ids":
        given = {"encoder_outputs": encoder_batch(model)["encoder_outputs"]}
    model.generation_config.decoder_start_token_id = model.generation_config.decoder_start_token_id or 1

    def tokens_of(model: Any, name: str, cache: dict[str, str]) -> torch.Tensor:
        torch.manual_seed(1)
        inputs = {**given, **MODES[name]}
        if model.dtype == torch.float64:
            inputs = {key: each.double() if _is_real(each) else each for key, each in inputs.items()}
        # transformers expands states in place
        return GenerationMixin.generate(model, **copy.deepcopy(inputs), max_new_tokens=16, **cache)

    different = []
    for name in MODES:
        tokens = []
        for cache in ({}, {"cache_implementation": "paged"}):
            try:
                with hf_paged.record_calls() as records:
                    tokens.append(tokens_of(model, name, cache))
            except Exception as error:
                if not cache:
                    result.setdefault("plain_fails", {})[name] = _line(error)
                    break
                return {**result, "result": "crashed", "reason": f"{name}: {_line(error)}"}
        else:
            result.setdefault("routes", {})[name] = records[0].route
            if not torch.equal(*tokens):
                different.append(name)
    if different and all(isinstance(each, torch.Tensor) for each in given.values()):
        # A near tie may fall the other way in fp32; in float64 it does not.
        precise = copy.deepcopy(model).double()
        paged = {"cache_implementation": "paged"}
        same = [name for name in different if tokens_of(precise, name, {}).equal(tokens_of(precise, name, paged))]
        different = [name for name in different if name not in same]
        if same:
            result["note"] = f"other tokens in fp32, the same in float64: {', '.join(same)}"
    if "routes" not in result:
        return {**result, "result": "unrunnable", "reason": result["plain_fails"]["greedy"]}
    if left := _blocks_in_use(model):
        different.append(f"{left} blocks left in use")
    if engine and not different:
        try:
            result["engine"] = _examine_encoder_engine(model, result)
        except Exception as error:
            result["engine"], result["trace"] = f"crashed: {_line(error)}", traceback.format_exc()
    return {**result, "result": "different" if different else "identical", "different": different}


def _examine_encoder_engine(model: Any, result: dict[str, Any]) -> str:
    """Four requests in every way of decoding, all at once: each must equal plain generate of its row alone."""
    from transformers import GenerationConfig, GenerationMixin

    rows = encoder_rows(model)
    asked, expected, distinct = [], [], set()
    for options in MODES.values():
        tokens = []
        for row, given in enumerate(rows):
            config = GenerationConfig(**options, max_new_tokens=12, pad_token_id=0)
            config.seed = row
            torch.manual_seed(row)
            alone = GenerationMixin.generate(model, **copy.deepcopy(given), generation_config=config)
            start = given.get("decoder_input_ids", torch.zeros(1, 1)).shape[1]
            tokens.append([_until_eos(own, model) for own in alone[:, start:].tolist()])
            inputs = dict(given)
            prompt = inputs.pop("input_ids", torch.zeros(1, 0, dtype=torch.int64))[0].tolist()
            asked.append((prompt, config, inputs))
        expected += tokens
        distinct = {token for own in tokens for sequence in own for token in sequence}
        result["distinct"] = min(result.get("distinct", 99), len(distinct))
    try:
        engine = hf_paged.Engine(model, hf_paged.CacheConfig(block_size=4, num_blocks=2000))
    except hf_paged.UnsupportedModelError as error:
        return f"refused: {_line(error)}"
    with engine:
        prompts, configs, inputs = zip(*asked)
        outputs = engine.generate(list(prompts), list(configs), inputs=list(inputs))
        engine.check_integrity()
        left = engine.stats().blocks_used
    found = [[list(completion.token_ids) for completion in output.outputs] for output in outputs]
    names = [name for name in MODES for _ in rows]
    wrong = sorted({name for name, own, other in zip(names, found, expected) if own != other})
    return f"different: {wrong}" if wrong else f"{left} blocks left" if left else "identical"


def _until_eos(tokens: list[int], model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)


def examine_engine(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> str:
    """Requests arrive in different steps and the last one forks: each must equal plain generate of its prompt alone."""
    from transformers import GenerationConfig

    solo, rows = [], []
    for row, keep in zip(ids, mask):
        rows.append(row[keep.bool()])
        solo.append(_generate(model, rows[-1][None])[0, len(rows[-1]) :].tolist())
    try:
        engine = hf_paged.Engine(model, hf_paged.CacheConfig(block_size=4))
    except hf_paged.UnsupportedModelError as error:
        return f"refused: {_line(error)}"
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    forked = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, top_k=1, num_return_sequences=2, eos_token_id=None, pad_token_id=0
    )
    waiting = [(row.tolist(), config) for row in rows] + [(rows[-1].tolist(), forked)]
    solo.append(solo[-1])
    order, done, step = [], {}, 0
    with engine:
        while waiting or engine.has_unfinished_requests():
            if waiting and step % 3 == 0:
                prompt, config = waiting.pop(0)
                try:
                    order.append(engine.add_request(prompt, config))
                except ValueError as error:
                    return f"refused: {_line(error)}"
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = [list(completion.token_ids) for completion in output.outputs]
            step += 1
    wrong = [i for i, name in enumerate(order) if any(tokens != solo[i] for tokens in done[name])]
    return f"different: requests {wrong}" if wrong else "identical"


def examine_speed(model: Any, repeats: int = 3) -> dict[str, float]:
    """How many times as fast 16 requests at once are as one by one, and as `generate`, in time of this thread."""
    from transformers import GenerationConfig

    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(6, 90, (5 + 7 * i % 22,), generator=generator) for i in range(16)]
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    config = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompts = [row.tolist() for row in rows]
    seconds: dict[str, list[float]] = {"engine": [], "plain": [], "one by one": []}

    def timed(name: str, call: Any) -> None:
        begin = time.thread_time()
        call()
        seconds[name].append(time.thread_time() - begin)

    memory = hf_paged.CacheConfig(memory="256MiB")
    with hf_paged.Engine(model, memory, hf_paged.SchedulerConfig(prefix_caching=False)) as engine:
        for turn in range(repeats + 1):
            timed("engine", lambda: engine.generate(prompts, config))
            timed("plain", lambda: model.generate(ids, attention_mask=(ids > 0).long(), generation_config=config))
            if turn == 1:
                timed("one by one", lambda: [engine.generate([prompt], config) for prompt in prompts])
    best = min(seconds["engine"][1:])
    one_by_one, plain = min(seconds["one by one"]) / best, min(seconds["plain"][1:]) / best
    return {"one by one": round(one_by_one, 1), "plain": round(plain, 2)}


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    options.setdefault("max_new_tokens", NEW_TOKENS)
    options.setdefault("do_sample", False)
    mask = torch.ones_like(ids) if mask is None else mask
    result: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, **options)
    return result


def _varied(model: Any, greedy: torch.Tensor, ids: torch.Tensor) -> dict[str, int]:
    """Number of distinct new tokens per row, and how many of 12 depend on the first tokens of the longest prompt."""
    changed = ids.clone()
    changed[3, -4:-1] = torch.tensor([11, 12, 13])
    other = _generate(model, changed, max_new_tokens=12)[3]
    same = _generate(model, ids, max_new_tokens=12)[3]
    return {
        "tokens": min(len(set(row.tolist())) for row in greedy[:, -NEW_TOKENS:]),
        "context": int((other[-12:] != same[-12:]).sum()),
    }


def _blocks_in_use(model: Any) -> int:
    from hf_paged.generation import paged_generate

    return sum(memory.stats().blocks_used for memory in paged_generate._idle_pools(model))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _child(model_type: str, engine: bool, speed: bool, path: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.set_verbosity_error()
    begin = time.perf_counter()
    result = {"type": model_type, **examine(model_type, engine, speed)}
    result["seconds"] = round(time.perf_counter() - begin, 2)
    Path(path).write_text(json.dumps(result))


def run(
    types: list[str], *, jobs: int = 2, timeout: float = 900.0, engine: bool = False, speed: bool = False
) -> list[dict[str, Any]]:
    """Examine the types, `jobs` at a time; returns one result per type, in the order of completion."""
    import tempfile

    import transformers.generation.utils  # imported once, before the forks
    import transformers.modeling_utils  # noqa: F401

    context = multiprocessing.get_context("fork")
    results: list[dict[str, Any]] = []
    waiting, running = list(types), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                path = os.path.join(folder, name)
                process = context.Process(target=_child, args=(name, engine, speed, path))
                process.start()
                running[name] = (process, path, time.monotonic() + timeout)
            time.sleep(0.02)
            for name, (process, path, limit) in list(running.items()):
                late = time.monotonic() > limit
                if late:
                    process.kill()
                if not process.is_alive() or late:
                    process.join()
                    del running[name]
                    if os.path.exists(path):
                        results.append(json.loads(Path(path).read_text()))
                    else:
                        why = f"no answer in {timeout:.0f} s" if late else f"exit code {process.exitcode}"
                        results.append({"type": name, "result": "crashed", "reason": why})
                    print(json.dumps(results[-1]), flush=True)
    return results


def summary(results: list[dict[str, Any]]) -> str:
    def count(**wanted: str) -> int:
        return sum(all(r.get(k) == v for k, v in wanted.items()) for r in results)

    runnable = [r for r in results if r["result"] != "unrunnable"]
    line = (
        f"{len(runnable)} of {len(results)} types run: identical {count(result='identical')} "
        f"(native {count(result='identical', mode='native')}, dense view "
        f"{count(result='identical', mode='dense view')}), refused {count(result='refused')}, "
        f"different {count(result='different')}, crashed {count(result='crashed')}"
    )
    engines = [r["engine"] for r in results if "engine" in r]
    if engines:
        kinds = {k: sum(e.startswith(k) for e in engines) for k in ("identical", "refused", "different", "crashed")}
        line += "; engine " + ", ".join(f"{kind} {n}" for kind, n in kinds.items())
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="types to run (default: all)")
    parser.add_argument("--others", action="store_true", help="all classes that generate and are not causal LMs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per type")
    parser.add_argument("--engine", action="store_true", help="also run the engine with staggered arrivals")
    parser.add_argument("--speed", action="store_true", help="also 16 requests at once; with --engine")
    parser.add_argument("--out", type=Path, help="write the results to this file as a JSON list, sorted by type")
    args = parser.parse_args()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    results = run(
        args.types or list(other_classes() if args.others else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), jobs=args.jobs,
        timeout=args.timeout, engine=args.engine, speed=args.speed,
    )  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(sorted(results, key=lambda r: r["type"]), indent=1) + "\n")
    print(summary(results))
    wrong = ("different", "crashed")
    return int(any(r["result"] in wrong or r.get("engine", "").startswith(wrong) for r in results))


if __name__ == "__main__":
    sys.exit(main())
