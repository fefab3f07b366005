"""Beam search of encoder-decoder models: `generate(cache_implementation="paged")` and the engine against plain
`generate`, and CTranslate2 beside them.

    python benchmarks/encoder_decoder.py --model whisper-base --dtype float32 --batches 1,16
    python benchmarks/encoder_decoder.py --model nllb-600m --dtype bfloat16 --ctranslate2-python env/bin/python

Random weights in the shapes of two published models. All rows make `--new-tokens` tokens, with `--beams` beams, and the
encoder runs in each call. Systems take turns; each figure is the median of `--repeats` runs, in seconds of wall time,
which a quiet machine needs. CTranslate2 has no bf16 on a CPU: it runs in fp32, and with int8 weights as `ct2-int8`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from engine_ctranslate2 import NO_TIMES, START
from peers import Peer, saved

import hf_paged

_EOS = 2


def whisper_base() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=51865, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, num_mel_bins=80, eos_token_id=_EOS,
        pad_token_id=1, bos_token_id=0, decoder_start_token_id=START, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def nllb_600m() -> Any:
    config = transformers.M2M100Config(
        vocab_size=256206, d_model=1024, encoder_layers=12, decoder_layers=12, encoder_attention_heads=16,
        decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096, scale_embedding=True,
        eos_token_id=_EOS, decoder_start_token_id=_EOS,
    )  # fmt: skip
    return transformers.M2M100ForConditionalGeneration(config)


_MODELS: dict[str, Callable[[], Any]] = {"whisper-base": whisper_base, "nllb-600m": nllb_600m}


def rows_of(model: Any, count: int) -> list[dict[str, torch.Tensor]]:
    """What the encoder reads: 30 seconds of noise, or texts of 16 to 61 tokens."""
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "input_features":
        noise = torch.randn(count, model.config.num_mel_bins, 3000, generator=generator).to(model.dtype)
        start = torch.tensor([[START, NO_TIMES]])
        return [{"input_features": row[None], "decoder_input_ids": start} for row in noise]
    lengths = [16 + 3 * row for row in range(count)]
    return [{"input_ids": torch.randint(4, 256000, (1, length), generator=generator)} for length in lengths]


def joined(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Arguments of one call, texts padded on the right."""
    if "input_ids" not in rows[0]:
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    texts = [row["input_ids"][0] for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=1)
    return {"input_ids": ids, "attention_mask": (ids != 1).long()}


def systems(model: Any, args: argparse.Namespace) -> dict[str, Callable[[int], Any]]:
    """Name -> what runs so many rows and returns their tokens, or their number."""
    config = transformers.GenerationConfig(
        num_beams=args.beams, max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, do_sample=False,
        eos_token_id=_EOS, pad_token_id=1,
    )  # fmt: skip

    def call(count: int, **cache: Any) -> Any:
        given = joined(rows_of(model, count))
        return transformers.GenerationMixin.generate(model, **given, generation_config=config, **cache)

    def engine(count: int) -> Any:
        rows = rows_of(model, count)
        prompts = [row.pop("input_ids", torch.zeros(1, 0, dtype=torch.int64))[0].tolist() for row in rows]
        outputs = opened.generate(prompts, config, inputs=rows)
        opened.clear_prefix_cache()
        return [list(output.outputs[0].token_ids) for output in outputs]

    found: dict[str, Callable[[int], Any]] = {"plain": call, "paged": lambda n: call(n, cache_implementation="paged")}
    if "engine" in args.systems:
        opened = hf_paged.Engine(model, hf_paged.CacheConfig(memory="6GiB"))
        found["engine"] = engine
    for name in ("ct2", "ct2-int8"):
        if name in args.systems:
            with saved(model.float()) as folder:
                peer = Peer(
                    "ctranslate2-translate", folder, "fp32" if name == "ct2" else "int8", own=args.ctranslate2_python,
                    threads=args.threads,
                )  # fmt: skip
            args.versions["ctranslate2"] = peer.version
            found[name] = lambda n, peer=peer: _peers(peer, model, n, args)  # type: ignore[misc]
    return {name: found[name] for name in args.systems}


def _peers(peer: Peer, model: Any, count: int, args: argparse.Namespace) -> Any:
    prompts = [row.get("input_ids", torch.zeros(1, 0))[0].tolist() for row in rows_of(model, count)]
    _, tokens = peer.run(prompts, [args.new_tokens] * count, beams=args.beams)
    if any(number != args.new_tokens for number in tokens):
        print(f"the peer made {tokens} tokens", file=sys.stderr)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=_MODELS, default="whisper-base")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="1,16", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--systems", default="plain,paged,engine", type=lambda text: text.split(","))
    parser.add_argument("--ctranslate2-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = _MODELS[args.model]().eval()
    peers = [name for name in args.systems if name.startswith("ct2")]
    own = systems(model, argparse.Namespace(**{**vars(args), "systems": peers}))  # in fp32, as they compute
    model = model.to(getattr(torch, args.dtype))
    own |= systems(model, argparse.Namespace(**{**vars(args), "systems": [n for n in args.systems if n not in peers]}))
    figures: dict[str, Any] = {}
    for batch in args.batches:
        times: dict[str, list[float]] = {name: [] for name in args.systems}
        results: dict[str, Any] = {}
        for turn in range(args.repeats + (batch == 1)):  # one turn warms up; in a large batch that costs minutes
            for name in args.systems:
                begin = time.perf_counter()
                results[name] = own[name](batch)
                if turn or batch > 1:
                    times[name].append(time.perf_counter() - begin)
        medians = {name: statistics.median(values) for name, values in times.items()}
        same = "paged" in results and torch.equal(results["plain"], results["paged"])
        figures[str(batch)] = {
            "seconds": medians,
            "tokens_per_second": {name: batch * args.new_tokens / each for name, each in medians.items()},
            "times_plain": {name: medians["plain"] / each for name, each in medians.items()},
            "paged_equals_plain": same,
        }
        print(batch, json.dumps(figures[str(batch)]), flush=True)
    if args.json:
        told = {name: value for name, value in vars(args).items() if name not in ("json", "ctranslate2_python")}
        machine = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
        args.json.write_text(json.dumps({**told, **machine, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
