"""What options of generation cost: the throughput of one engine's load under each set of options, as a ratio to greedy
decoding without any, and beside vLLM with its equivalent options.

The sets, and the two systems, run in turns, so that a change of the machine's speed meets all of them. No option ends a
request early: all runs generate the same number of tokens.

    python benchmarks/options.py --model 135m --requests 64 --scale 0.25 --threads 1
    python benchmarks/options.py --threads 1 --vllm-python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import peers
import throughput
import torch
import transformers
import workloads
from tokenizers import Tokenizer, models, pre_tokenizers

import hf_paged

EOS = 2
Options = dict[str, Any]


def tokenizer(vocab_size: int) -> Any:
    """Of random words, two to nine letters each."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {"7": 0, "<": 1, ".": EOS, "abcdef": 3}  # transformers asks for the text of "abcdef"
    while len(words) < vocab_size:
        words.setdefault("".join(rng.choices(letters, k=rng.randint(2, 9))), len(words))
    tokens = Tokenizer(models.WordLevel(words, unk_token="7"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens)


def bad_words(rng: random.Random, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 2]))] for _ in range(100)]


STOP_STRINGS = ["jqxzjqxz 7", "zqzqzqzq 7"]  # words that the vocabulary does not have, before one that it has
# A function of the number of new tokens, a source of random numbers and the size of the vocabulary.
SETS: dict[str, Callable[[int, random.Random, int], Options]] = {
    "bare": lambda count, rng, vocab: {},
    "min_new_tokens": lambda count, rng, vocab: {"min_new_tokens": count, "eos_token_id": EOS},
    "sampling": lambda count, rng, vocab: {"do_sample": True, "top_k": 0},
    "top_k": lambda count, rng, vocab: {"do_sample": True, "top_k": 50},
    "top_p": lambda count, rng, vocab: {"do_sample": True, "top_k": 0, "top_p": 0.9},
    "penalty and top_p": lambda count, rng, vocab: {
        "do_sample": True, "top_k": 0, "top_p": 0.9, "repetition_penalty": 1.2,
    },
    "top_k and top_p": lambda count, rng, vocab: {"do_sample": True, "top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "no_repeat_ngram": lambda count, rng, vocab: {"no_repeat_ngram_size": 3},
    "bad_words": lambda count, rng, vocab: {"bad_words_ids": bad_words(rng, vocab)},
    "stop_strings": lambda count, rng, vocab: {"stop_strings": STOP_STRINGS},
}  # fmt: skip


def mixed(count: int, rng: random.Random, vocab_size: int) -> Options:
    """One of the sets with settings of its own."""
    name = rng.choice([name for name in SETS if name != "bare"])
    options = SETS[name](count, rng, vocab_size)
    if options.get("do_sample"):
        options |= {"temperature": round(rng.uniform(0.5, 1.5), 2)}
        options |= {"top_p": round(rng.uniform(0.5, 0.99), 2)} if "top_p" in options else {}
    return options


SETS["mixed"] = mixed


def sampling_params(options: Options, count: int, words: Any) -> dict[str, Any]:
    """The options under the names of vLLM's `SamplingParams`, which has no `no_repeat_ngram_size`: left out."""
    params: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "temperature": 0.0, "detokenize": False}
    if options.get("do_sample"):
        params |= {"temperature": options.get("temperature", 1.0), "top_k": options["top_k"]}
    if "min_new_tokens" in options:
        params |= {"min_tokens": count, "ignore_eos": False, "stop_token_ids": [EOS]}
    if "stop_strings" in options:
        params |= {"stop": options["stop_strings"], "detokenize": True}
    if "bad_words_ids" in options:
        params |= {"bad_words": [words.decode(ids) for ids in options["bad_words_ids"]]}
    return params | {name: options[name] for name in ("top_p", "repetition_penalty") if name in options}


Runs = dict[str, Callable[[int], float]]
"""Set of options -> what runs that many of the requests with it, and returns tokens per second."""


def run(model: Any, prompts: list[list[int]], configs: list[Any], words: Any) -> float:
    """Tokens per second of all requests, which arrive together."""
    torch.manual_seed(0)
    with hf_paged.Engine(model, tokenizer=words) as engine:
        begin = time.perf_counter()
        for prompt, config in zip(prompts, configs):
            engine.add_request(prompt, config)
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(len(o.outputs[0].token_ids) for o in engine.step() if o.finished)
        seconds = time.perf_counter() - begin
    assert tokens == sum(config.max_new_tokens for config in configs), "an option has ended a request early"
    return tokens / seconds


def peer_run(peer: peers.Peer, prompts: list[list[int]], params: list[dict[str, Any]]) -> float:
    """As `run`."""
    counts = [each["max_tokens"] for each in params]
    seconds, tokens = peer.run(prompts, counts, options=params)
    assert tokens == counts, "an option has ended a request of vLLM early"
    return sum(tokens) / seconds


def measured(systems: dict[str, Runs], count: int, num_runs: int) -> dict[str, dict[str, list[float]]]:
    """System -> set of options -> tokens per second of each run, of `count` requests."""
    turns = [(system, name) for name in systems["hf-paged"] for system, runs in systems.items() if name in runs]
    speeds: dict[str, dict[str, list[float]]] = {system: {name: [] for name in systems[system]} for system in systems}
    for system, name in turns:
        systems[system][name](2)
    for _ in range(num_runs):
        for system, name in turns:
            speeds[system][name].append(systems[system][name](count))
            print(f"{system}, {name}: {speeds[system][name][-1]:.1f} tokens/s", file=sys.stderr)
    return speeds


def table(ours: dict[str, list[float]], peers: dict[str, list[float]] | None) -> str:
    """The median run of each set of options. peers: vLLM's runs, if it ran."""
    lines = ["| options | tokens/s | of bare |", "|---|---|---|"]
    if peers is not None:
        lines = [lines[0] + " vLLM, tokens/s | ours is |", lines[1] + "---|---|"]
    bare = statistics.median(ours["bare"])
    for name, runs in ours.items():
        speed = statistics.median(runs)
        row = f"| {name} | {speed:.1f} | {speed / bare:.2f} |"
        if peers is not None and name in peers:
            peer = statistics.median(peers[name])
            row += f" {peer:.1f} | {speed / peer:.2f}x |"
        elif peers is not None:
            row += " (no such option) | |"
        lines.append(row)
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=throughput.SHAPES, default="135m", help="shape of the random Llama")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the shape's own")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default="sharegpt")
    parser.add_argument("--scale", type=float, default=0.25, help="lengths are multiplied by this")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated: " + ", ".join(SETS))
    parser.add_argument("--runs", type=int, default=3, help="the median run of each set is shown")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--vllm-python", help="the interpreter of vLLM's environment: run it beside ours")
    parser.add_argument("--vllm-options", default="{}", help="further arguments of vllm.LLM as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    if args.layers:
        throughput.SHAPES[args.model]["num_hidden_layers"] = args.layers

    model = throughput.build_model(args)
    vocab_size = model.config.vocab_size
    requests = workloads.synthesise(args.workload, args.requests, scale=args.scale, seed=args.seed)
    prompts = workloads.prompts_for(requests, vocab_size, args.seed)
    words = tokenizer(vocab_size)
    rng = random.Random(args.seed)
    names = list(dict.fromkeys(["bare", *args.sets.split(",")]))
    lengths = [r.output_length for r in requests]
    systems: dict[str, Runs] = {"hf-paged": {}}
    peer = None
    if args.vllm_python:
        form = {"float32": "fp32", "bfloat16": "bf16"}[args.dtype]
        given = {"skip_tokenizer_init": False, **json.loads(args.vllm_options)}
        with peers.saved(model, words) as folder:
            peer = peers.Peer("vllm", folder, form, own=args.vllm_python, threads=args.threads or 1, options=given)
        systems["vLLM"] = {}
    for name in names:
        options = [SETS[name](length, rng, vocab_size) for length in lengths]
        configs = [
            transformers.GenerationConfig(max_new_tokens=length, pad_token_id=0, **each)
            for length, each in zip(lengths, options)
        ]
        systems["hf-paged"][name] = lambda count, configs=configs: run(model, prompts[:count], configs[:count], words)
        if peer and name != "no_repeat_ngram":
            params = [sampling_params(each, length, words) for length, each in zip(lengths, options)]
            systems["vLLM"][name] = lambda count, params=params: peer_run(peer, prompts[:count], params[:count])
    speeds = measured(systems, len(requests), args.runs)
    print(f"{len(requests)} requests of {args.workload} x {args.scale}; {throughput.machine(args)}\n")
    print(table(speeds["hf-paged"], speeds.get("vLLM")))
    if args.json:
        report = {"date": time.strftime("%Y-%m-%d"), "machine": throughput.machine(args)}
        report["tokens_per_s"] = speeds["hf-paged"]
        if peer:
            report |= {"vllm": peer.version, "vllm_tokens_per_s": speeds["vLLM"]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if peer:
        peer.close()


if __name__ == "__main__":
    main()
