"""Memory and time that sharing blocks saves in parallel sampling and beam search (SOSP'23 sections 4.4 and 6.3).

    python benchmarks/sharing.py memory                  # blocks saved, the shipped checkpoint and a random model
    python benchmarks/sharing.py speed --threads 1       # beams and samples against plain `generate`, 135M shape
    python benchmarks/sharing.py first-token --threads 1 # 64 samples of one prompt of 1,024 tokens

Memory saved is defined as in the paper's Figure 15: blocks saved by sharing / blocks that the same sequences take
without sharing, each summed over all steps of a run. `--json` writes the numbers to a file; `--plot` draws the memory
figures (needs matplotlib).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import throughput
import torch
import transformers
import workloads

import hf_paged

SHIPPED = Path(__file__).parent.parent / "examples" / "pydoc-lm-base"
SAMPLES = (2, 4, 6, 8, 16, 64)
BEAMS = (2, 4, 6, 8, 16)


def options(new_tokens: int, *, beams: int = 1, samples: int = 1) -> Any:
    """Options under which every request runs to exactly `new_tokens` tokens."""
    return transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        num_beams=beams,
        num_return_sequences=max(beams, samples),
        do_sample=samples > 1,
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
    )


# -- memory ---------------------------------------------------------------------------------------------------------


def random_model() -> Any:
    config = transformers.LlamaConfig(**throughput.SHAPES["tiny"], initializer_range=0.2, eos_token_id=None)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def text_prompts(requests: list[workloads.TraceRequest]) -> list[list[int]]:
    """Prompts of the requested lengths, cut from the training text of the shipped checkpoint."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    stream = tokenizer("\n\n".join(topics.topics[name] for name in sorted(topics.topics)), verbose=False).input_ids
    step = len(stream) // len(requests)
    return [stream[i * step : i * step + r.input_length] for i, r in enumerate(requests)]


def saved(model: Any, prompts: list[list[int]], configs: list[Any], block_size: int) -> dict[str, float]:
    """Run all requests concurrently; returns the share of blocks saved over all steps."""
    cache = hf_paged.CacheConfig(block_size=block_size, memory="1GiB")
    scheduler = hf_paged.SchedulerConfig(max_num_seqs=1024, prefix_caching=False)
    used = without = copies = 0
    with hf_paged.Engine(model, cache, scheduler) as engine:
        for prompt, config in zip(prompts, configs):
            engine.add_request(prompt, config)
        while engine.has_unfinished_requests():
            engine.step()
            stats = engine.stats()
            used += stats.kv_bytes_used
            without += stats.kv_bytes_used + stats.kv_bytes_saved_by_sharing
        copies = engine.stats().cow_copies
        tokens = engine.stats().generated_tokens
    return {"saved": 1 - used / without, "cow_copies_per_token": copies / tokens}


def measure_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    shipped = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED).float().eval()
    for workload in ("alpaca", "sharegpt"):
        requests = workloads.synthesise(workload, args.requests, seed=args.seed)
        half = shipped.config.max_position_embeddings // 2
        requests = [
            dataclasses.replace(r, input_length=min(r.input_length, half), output_length=min(r.output_length, half))
            for r in requests
        ]
        for name, model in (("shipped", shipped), ("random", random_model())):
            prompts = (
                text_prompts(requests)
                if name == "shipped"
                else workloads.prompts_for(requests, model.config.vocab_size, args.seed)
            )
            for kind, widths in (("samples", SAMPLES), ("beams", BEAMS)):
                for width in widths:
                    if workload == "sharegpt" and width > args.widest_sharegpt:
                        continue
                    torch.manual_seed(args.seed)
                    configs = [options(r.output_length, **{kind: width}) for r in requests]
                    row = {"workload": workload, "model": name, "kind": kind, "width": width}
                    row |= saved(model, prompts, configs, args.block_size)
                    rows.append(row)
                    print(
                        f"{workload:9} {name:8} {kind:8} {width:3}: {row['saved']:6.1%} saved, "
                        f"{row['cow_copies_per_token']:.3f} copies a token",
                        flush=True,
                    )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    paper = {"samples": ((2, 4, 6), (6.1, 8.5, 9.8)), "beams": ((2, 4, 6), (37.6, 53.1, 55.2))}
    for axis, kind in zip(axes, ("samples", "beams")):
        for workload in ("alpaca", "sharegpt"):
            for model in ("shipped", "random"):
                points = [r for r in rows if (r["kind"], r["workload"], r["model"]) == (kind, workload, model)]
                if points:
                    shares = [100 * r["saved"] for r in points]
                    axis.plot([r["width"] for r in points], shares, "o-", label=f"{workload}, {model}")
        axis.plot(*paper[kind], "k--x", label="the paper, Alpaca (OPT-13B)")
        axis.set_xscale("log", base=2)
        axis.set_xlabel({"samples": "samples a prompt", "beams": "beam width"}[kind])
        axis.legend(fontsize=7)
    axes[0].set_ylabel("blocks saved by sharing, %")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# -- speed ----------------------------------------------------------------------------------------------------------


def timed(call: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure_speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Paged and plain `generate`, alternating: 8 prompts of 256 tokens, 64 new tokens."""
    model = throughput.build_model(args)
    ids = torch.randint(3, model.config.vocab_size, (args.prompts, args.prompt_tokens), device=args.device)
    rows = []
    for kind, widths in (("beams", args.beams), ("samples", args.samples)):
        for width in widths:
            config = options(args.new_tokens, **{kind: width})
            warm = options(2, **{kind: width})
            for call in ({}, {"cache_implementation": "paged"}):
                model.generate(ids[:1], generation_config=warm, **call)
            ratios, plain_s, paged_s, kv = [], [], [], 0.0
            for _ in range(args.rounds):
                plain, _ = timed(lambda c=config: model.generate(ids, generation_config=c))
                with hf_paged.record_calls() as records:
                    paged, _ = timed(
                        lambda c=config: model.generate(ids, generation_config=c, cache_implementation="paged")
                    )
                # Plain `generate` stores the K/V of all rows at the final length.
                kv = records[0].kv_bytes_used / records[0].kv_bytes_contiguous
                ratios.append(plain / paged)
                plain_s.append(plain)
                paged_s.append(paged)
            engine_s = []
            with hf_paged.Engine(model) as engine:
                for _ in range(args.rounds):
                    engine.clear_prefix_cache()
                    engine_s.append(timed(lambda e=engine, c=config: e.generate(list(ids), c, progress=False))[0])
            tokens = args.prompts * args.new_tokens * (width if kind == "samples" else 1)
            row = {
                "kind": kind, "width": width, "plain_s": statistics.median(plain_s),
                "paged_s": statistics.median(paged_s), "engine_s": statistics.median(engine_s),
                "paged_tokens_per_s": tokens / statistics.median(paged_s), "speed_up": statistics.median(ratios),
                "engine_speed_up": statistics.median(plain_s) / statistics.median(engine_s), "kv_share": kv,
            }  # fmt: skip
            rows.append(row)
            print(
                f"{kind} {width}: plain {row['plain_s']:.2f} s, paged generate {row['paged_s']:.2f} s "
                f"({row['speed_up']:.2f}x), engine {row['engine_s']:.2f} s ({row['engine_speed_up']:.2f}x); "
                f"peak K/V {kv:.0%} of plain's",
                flush=True,
            )
    return rows


def measure_first_token(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Many samples of one long prompt: time to the first token, and K/V memory at that time and at the end."""
    model = throughput.build_model(args)
    prompt = torch.randint(3, model.config.vocab_size, (1, 1024), device=args.device)
    width, new = 64, 128
    with hf_paged.Engine(model, hf_paged.CacheConfig(memory="4GiB")) as engine:
        engine.generate([prompt[0, :8]], options(1), progress=False)
        begin = time.perf_counter()
        engine.add_request(prompt, options(new, samples=width))
        while not engine.step()[-1:]:
            pass
        first = time.perf_counter() - begin
        at_first = engine.stats().kv_bytes_used
        peak = at_first
        while engine.has_unfinished_requests():
            engine.step()
            peak = max(peak, engine.stats().kv_bytes_used)
        per_token = engine.stats().kv_bytes_reserved / engine.stats().num_blocks / 16
    plain, _ = timed(lambda: model.generate(prompt, generation_config=options(1, samples=width)))
    row = {
        "samples": width, "ours_s": first, "plain_s": plain, "speed_up": plain / first,
        "kv_first": at_first / (width * 1024 * per_token), "kv_end": peak / (width * (1024 + new) * per_token),
    }  # fmt: skip
    print(
        f"{width} samples of 1,024 tokens: first token after {first:.2f} s, plain {plain:.2f} s "
        f"({row['speed_up']:.1f}x); "
        f"K/V {row['kv_first']:.2%} of plain's then, {row['kv_end']:.1%} after {new} tokens each"
    )
    return [row]


MEASURES = {"memory": measure_memory, "speed": measure_speed, "first-token": measure_first_token}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48, help="memory: requests in flight")
    parser.add_argument("--widest-sharegpt", type=int, default=8)
    parser.add_argument("--model", choices=throughput.SHAPES, default="135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--beams", type=int, nargs="*", default=[4])
    parser.add_argument("--samples", type=int, nargs="*", default=[4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    rows = MEASURES[args.measure](args)
    if args.json:
        command = "python benchmarks/sharing.py " + " ".join(argv if argv is not None else sys.argv[1:])
        report = {
            "command": command,
            "date": time.strftime("%Y-%m-%d"),
            "machine": throughput.machine(args),
            "results": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
