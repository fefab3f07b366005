"""The first contact of every kernel with a device: one line a check, each group of checks in a process of its own.

    python scripts/gpu/smoke.py OUT.json [--device cpu] [--limit SECONDS]

The groups run at once, so that an illegal access ends its own group only. With `--device cpu` the sizes are a
sixteenth, attention is torch's, and Triton's interpreter computes the other kernels: it shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

import hf_paged
from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.swap import HostPool
from hf_paged.fused import rows
from hf_paged.fused.gpu.kernels.gate import gated
from hf_paged.fused.gpu.kernels.norm import add_norm
from hf_paged.fused.gpu.kernels.rotary import rotate
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import LayerKV, NewKV
from hf_paged.kernels.quantised import Scales
from hf_paged.kernels.triton import nucleus, sampling
from tests.kernels.cases import Case, make_batch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FP32: 2e-5, FP16: 3e-3, BF16: 1.6e-2}
Outcome = tuple[bool, str]
"""Whether a check holds, and a note."""
Checks = Iterator[tuple[str, Callable[[], Outcome]]]


@dataclass(frozen=True)
class Place:
    """device: "cuda", or "cpu" for a dry run. small: by what sizes are divided."""

    device: str

    @property
    def small(self) -> int:
        return 1 if self.device == "cuda" else 16

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape).to(self.device, dtype)

    def attends(
        self, lens: Any, heads: tuple[int, int], dim: int, dtype: torch.dtype = BF16, **options: Any
    ) -> Outcome:
        """Attention against the reference. Every run gives the same bits."""
        batch = make_batch(Case(tuple(lens), heads=heads, head_dim=dim, dtype=dtype, **options), self.device)
        impl = "triton" if self.device == "cuda" else "torch"
        expected, actual, again = batch.run("reference"), batch.run(impl), batch.run(impl)
        same = torch.equal(actual, again)
        ok, note = _close(actual, expected, BOUNDS[dtype])
        return ok and same, f"{note}, same bits twice: {same}"


def _close(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> Outcome:
    apart = float((actual.double() - expected.double()).abs().max())
    unequal = float((actual != expected).double().mean())
    ok = torch.allclose(actual.double(), expected.double(), atol=bound, rtol=bound)
    return ok, f"largest difference {apart:.2g}, unequal {unequal:.4f}"


# -- groups ----------------------------------------------------------------------------------------------------------


def decode(place: Place) -> Checks:
    lens = [(1, max(n // place.small, 20)) for n in (4096, 523, 37, 9000)]
    for heads, dim in (((32, 8), 128), ((8, 8), 64), ((28, 4), 128), ((64, 1), 80), ((4, 2), 256), ((8, 4), 96)):
        yield f"heads {heads} of {dim}", lambda h=heads, d=dim: place.attends(lens, h, d)  # type: ignore[misc]
    yield "fp32, heads of 64", lambda: place.attends(lens[:3], (8, 2), 64, FP32)
    yield "fp32, heads of 256", lambda: place.attends(lens[1:3], (4, 2), 256, FP32)


def features(place: Place) -> Checks:
    lens = [(1, max(n // place.small, 20)) for n in (4096, 523, 37, 9000)]
    window = 1024 // place.small
    yield "window, sinks", lambda: place.attends(lens, (32, 8), 128, sliding_window=window, sinks=True)
    yield "soft cap", lambda: place.attends(lens, (32, 8), 128, softcap=50.0)
    yield "ALiBi", lambda: place.attends(lens, (32, 8), 128, alibi=True)
    yield "values of 128, keys of 192", lambda: place.attends(lens, (16, 16), 192, v_head_dim=128)
    many = [(1, 1024 // place.small)] * (256 // place.small)
    yield "256 rows of 1,024 keys", lambda: place.attends(many, (32, 8), 128)


def shared(place: Place) -> Checks:
    lens = [(1, (4100 + 17 * i) // place.small + 300) for i in range(32 // min(place.small, 4))]
    yield "32 sequences share 4,096 keys", lambda: place.attends(lens, (32, 8), 128, shared=256 // place.small)
    some = [(1, 600 + i) for i in range(8)]
    yield "8 sequences share 512 keys", lambda: place.attends(some, (8, 2), 64, shared=32)


def prefill(place: Place) -> Checks:
    small = place.small
    lens = [(1500 // small, 1500 // small), (700 // small, 3000 // small), (1, 2000 // small), (5, 300)]
    for dim in (64, 128, 80, 256):
        yield f"heads of {dim}", lambda d=dim: place.attends(lens, (8, 2), d)  # type: ignore[misc]


def prefill_features(place: Place) -> Checks:
    small = place.small
    yield "fp16", lambda: place.attends([(900 // small, 1300 // small)], (8, 2), 128, FP16)
    yield "fp32", lambda: place.attends([(300 // small, 500 // small), (1, 200)], (4, 2), 128, FP32)
    both_ways = [(900 // small, 900 // small)]
    yield "spans that attend both ways", lambda: place.attends(both_ways, (8, 2), 128, ahead=64)


def eight_bits(place: Place) -> Checks:
    impl = "triton" if place.device == "cuda" else "torch"

    def run(dtype: torch.dtype, bound: float) -> Outcome:
        num, heads, dim = 600 // place.small, 8, 128
        blocks = -(-num // 16) + 2
        new = NewKV(place.random(num, heads, dim), place.random(num, heads, dim))
        caches = [torch.zeros(blocks, 16, heads, dim, device=place.device).to(dtype) for _ in "kv"]
        scales = Scales(*(torch.zeros(blocks, 16, heads, device=place.device) for _ in "kv"))
        slots = torch.arange(num, device=place.device) + 16
        ops.write_kv(new, LayerKV(*caches, scales), slots, impl=impl)
        assert scales.key is not None
        read = caches[0].flatten(0, 1)[slots].float() * scales.key.flatten(0, 1)[slots][..., None]
        apart = float((read - new.key.float()).abs().max())
        return apart < bound, f"largest error of keys {apart:.3g}"

    yield "write int8", lambda: run(torch.int8, 0.05)
    yield "write fp8", lambda: run(torch.float8_e4m3fn, 0.3)


def between_attentions(place: Place) -> Checks:
    for count in (1, 7, 256):
        x, residual = place.random(count, 4096 // place.small), place.random(count, 4096 // place.small)
        norm = rows.Norm(place.random(4096 // place.small), None, 1e-5, rows.NormKind(rounds_first=True))
        yield (
            f"norm of {count} rows",
            lambda x=x, r=residual, n=norm: _close(  # type: ignore[misc]
                add_norm(x, r, after=n).out, rows.normalise(x + r, n), 3e-2
            ),
        )
        gate, up = place.random(count, 14336 // place.small), place.random(count, 14336 // place.small)
        yield (
            f"gate of {count} rows",
            lambda g=gate, u=up: _close(  # type: ignore[misc]
                gated(g, u, "silu"), torch.nn.functional.silu(g) * u, 3e-2
            ),
        )


def bits(place: Place) -> Checks:
    """What rounds where torch rounds has torch's bits. (Triton's interpreter truncates to bf16.)"""
    query, key = place.random(64, 32, 128), place.random(64, 8, 128)
    angles = torch.rand(64, 64).repeat(1, 2) * 6
    cos, sin = (each.to(place.device, BF16) for each in (angles.cos(), angles.sin()))

    def rotary() -> Outcome:
        turned, _ = rotate(query, key, angles=(cos, sin), kind=rows.RotaryKind())
        expected = rows.rotate(query, cos, sin, rows.RotaryKind())
        unequal = float((turned != expected).float().mean())
        return unequal == 0 or place.device == "cpu", f"unequal {unequal:.4f} (0.22 if products were not rounded)"

    yield "rotary positions in bf16", rotary


def sampled(place: Place) -> Checks:
    def greedy(num_rows: int) -> Outcome:
        logits = place.random(num_rows, 128256 // place.small) * 3
        tokens, logprobs = sampling.greedy(logits)
        expected = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        close = torch.allclose(logprobs, logits.float().log_softmax(-1).amax(-1), atol=1e-4)
        return torch.equal(tokens, expected) and close, ""

    def top_p() -> Outcome:
        scores = place.random(4, 32000 // place.small, dtype=FP32) * 2
        probabilities = scores.softmax(-1)
        kept = nucleus.keep_nucleus_unsorted(scores, torch.full((4,), 0.1, device=place.device)) > -1e30
        mass = (probabilities * kept).sum(-1)
        ok = (mass >= 0.9 - 1e-4).all() and (mass < 0.9 + float(probabilities.amax()) + 1e-3).all()
        return bool(ok), f"mass kept {[round(x, 4) for x in mass.tolist()]}"

    yield "greedy, 1 row", lambda: greedy(1)
    yield "greedy, 64 rows", lambda: greedy(64)
    yield "top-p", top_p


def memory(place: Place) -> Checks:
    def swap() -> Outcome:
        pool = KVPool(64, 16)
        like = torch.empty(1, 8, 128, dtype=BF16, device=place.device)
        for layer in range(8):
            for tensor in pool.layer_for(layer, like, like).tensors:
                tensor.normal_()
        tensors = [tensor for layer in pool.layers.values() for tensor in layer.tensors]
        before, host, ids = [tensor.clone() for tensor in tensors], HostPool(pool, 32), torch.randperm(64)[:32].tolist()
        host.swap_out(list(zip(ids, range(32))))
        for tensor in tensors:
            tensor[ids] = 0
        host.swap_in(list(zip(range(32), ids)))
        return all(map(torch.equal, before, tensors)), ""

    yield "swap out and in", swap


def _engine(place: Place, dtype: torch.dtype, *, long: bool = False) -> Checks:
    """Engines and paged `generate` against plain `generate`; with graphs and without."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).to(place.device, dtype).eval()
    greedy = transformers.GenerationConfig(max_new_tokens=24, eos_token_id=None, pad_token_id=0, do_sample=False)
    prompts = [torch.randint(3, 500, (n,)).tolist() for n in ((900, 700, 40) if long else (5, 30, 90))]
    if long:  # a common prefix
        prompts = [prompts[0] + each for each in ([7], [8, 9], [11] * 5)] + prompts[1:]

    def alone(prompt: list[int], **options: Any) -> list[int]:
        ids = torch.tensor([prompt], device=place.device)
        return model.generate(ids, generation_config=greedy, **options)[0, len(prompt) :].tolist()

    plain = [alone(prompt) for prompt in prompts]

    def served(graphs: bool | None) -> Outcome:
        start = time.time()
        with hf_paged.Engine(model, {"num_blocks": 600}, {"max_num_seqs": 8}, cuda_graphs=graphs) as engine:
            started = time.time() - start
            texts = [output.outputs[0].token_ids for output in engine.generate(prompts, greedy)]
            replays = engine.stats().graph_replays
        firsts = [
            next((i for i, pair in enumerate(zip(*both)) if pair[0] != pair[1]), 24) for both in zip(texts, plain)
        ]
        # In half precision a near tie may fall the other way.
        ok = min(firsts) == 24 if dtype == FP32 else min(firsts) > 0
        if place.device == "cuda" and graphs is None:
            ok = ok and replays > 0
        return ok, f"first differences at tokens {firsts} of 24, {replays} replays, started in {started:.1f} s"

    def called() -> Outcome:
        text = alone(prompts[0], cache_implementation="paged")
        return text == plain[0] or dtype != FP32, ""

    if place.device == "cuda":
        yield "engine with graphs", lambda: served(None)
    yield "engine without graphs", lambda: served(False)
    yield "generate", called


GROUPS: dict[str, Callable[[Place], Checks]] = {
    "decode": decode, "features": features, "shared": shared, "prefill": prefill, "prefill_features": prefill_features,
    "eight_bits": eight_bits, "between": between_attentions, "bits": bits, "sampling": sampled, "memory": memory,
    "engine_fp32": lambda place: _engine(place, FP32), "engine_bf16": lambda place: _engine(place, BF16),
    "engine_long": lambda place: _engine(place, BF16, long=True),
}  # fmt: skip


# -- processes -------------------------------------------------------------------------------------------------------


def run_groups(names: list[str], device: str) -> None:
    """Print a line of JSON for each check."""
    torch.manual_seed(0)
    for check, call in chain.from_iterable(GROUPS[name](Place(device)) for name in names):
        start = time.time()
        try:
            ok, note = call()
        except Exception as error:  # any fault of a kernel, of which the next check may be free
            traceback.print_exc()
            ok, note = False, f"{type(error).__name__}: {str(error)[:160]}".splitlines()[0]
        seconds = round(time.time() - start, 1)
        print(json.dumps({"check": check, "ok": ok, "note": note, "seconds": seconds}), flush=True)
    if device == "cuda":
        torch.cuda.synchronize()


def in_a_process(names: list[str], device: str, limit: float) -> dict[str, Any]:
    start = time.time()
    command = [sys.executable, __file__, "-", "--device", device, "--groups", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        out, error, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as ended:
        out, error, status = (ended.stdout or b"").decode(), (ended.stderr or b"").decode(), 124
    checks = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    seconds = round(time.time() - start, 1)
    return {"group": ", ".join(names), "status": status, "seconds": seconds, "checks": checks, "stderr": error[-1500:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--limit", type=float, default=80, help="seconds of a group")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, help="of these, in this process")
    args = parser.parse_args()
    if args.groups:
        run_groups(args.groups, args.device)
        return 0
    names = list(GROUPS)
    together = [[name] for name in names] if args.device == "cuda" else [names[::2], names[1::2]]
    with ThreadPoolExecutor(len(together)) as pool:
        found = list(pool.map(lambda names: in_a_process(names, args.device, args.limit), together))
    bad = 0
    for group in found:
        for check in group["checks"]:
            bad += not check["ok"]
            print(f"{'ok  ' if check['ok'] else 'FAIL'} {group['group'][:16]:16} {check['check']:36} {check['note']}")
        if group["status"] or not group["checks"]:
            bad += 1
            last = (group["stderr"].strip().splitlines() or [""])[-1][:200]
            print(f"FAIL {group['group'][:16]:16} ended with status {group['status']}: {last}")
    count = sum(len(group["checks"]) for group in found)
    print(f"smoke: {count} checks, {bad} bad, {max(group['seconds'] for group in found)} s")
    args.out.write_text(json.dumps({"checks": count, "bad": bad, "groups": found}, indent=1) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
