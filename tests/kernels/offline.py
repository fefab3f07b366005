"""Compile launches for an absent chip, without TRITON_INTERPRET: `python offline.py CHIP` prints lines of JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from hf_paged.fused.experts import SCALED_SILU, Assignment, Gate, GateKind, Projection
from hf_paged.fused.gpu.kernels.experts import SIZES, assign_launch, combine_launch, product_launch, tile_of
from hf_paged.fused.gpu.kernels.gate import gate_launch
from hf_paged.fused.gpu.kernels.norm import NormedSum, add_norm_launch
from hf_paged.fused.gpu.kernels.rotary import rotate_launch
from hf_paged.fused.gpu.kernels.router import route_launch
from hf_paged.fused.router import Router, RouterKind
from hf_paged.fused.rows import NORM_KINDS, Norm, NormKind, RotaryKind
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.bounds import Bounds
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.quantised import NO_SCALES, Scales
from hf_paged.kernels.triton.launch import Launch, Target
from hf_paged.kernels.triton.nucleus import nucleus_launches, scratch_of
from hf_paged.kernels.triton.ops import attention_launches
from hf_paged.kernels.triton.sampling import greedy_launches
from hf_paged.kernels.triton.write import copy_blocks_launch, write_kv_launch

# The chip's name: target, shared memory a program may use (bytes).
CHIPS = {
    "sm80": (Target("cuda", 80, 108), 163 * 1024), "sm89": (Target("cuda", 89, 142), 99 * 1024),
    "sm90": (Target("cuda", 90, 132), 227 * 1024), "sm100": (Target("cuda", 100, 148), 227 * 1024),
    "sm103": (Target("cuda", 103, 148), 227 * 1024), "sm120": (Target("cuda", 120, 170), 99 * 1024),
    "gfx942": (Target("hip", "gfx942", 304), 64 * 1024), "gfx1100": (Target("hip", "gfx1100", 96), 64 * 1024),
}  # fmt: skip
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.int32: "i32",
    torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


def gpu_target(target: Target) -> GPUTarget:
    warp_size = 64 if target.backend == "hip" and str(target.arch).startswith("gfx9") else 32
    return GPUTarget(target.backend, target.arch, warp_size)


def source_of(launch: Launch) -> ASTSource:
    """The source as triton would specialise it for this launch: types, constants, divisibility by 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            hints[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                hints[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, hints)


def measure(launch: Launch, chip: str) -> dict[str, Any]:
    """registers of a thread, bytes of its stack, accesses of the stack in innermost loops (spills; for AMD: registers),
    shared (bytes), warps, and counts of the relevant instructions."""
    target, _ = CHIPS[chip]
    compiled = triton.compile(source_of(launch), target=gpu_target(target), options=launch.options)
    found: dict[str, Any] = {"shared": compiled.metadata.shared, "warps": launch.options["num_warps"], "stack": 0}
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        found["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
        found["mfma"] = text.count("v_mfma") + text.count("v_wmma")
        return found
    text = compiled.asm["ptx"]
    patterns = {
        "cp_async": r"cp\.async\.c[ga]", "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma",
        "arrivals": r"atom\.global\.gpu\.acq_rel\.add",
        "wide_loads": r"ld\.global\S*\.v[24]\.", "wide_stores": r"st\.global\S*\.v[24]\.",
    }  # fmt: skip
    found |= {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
    found["fused_halves"] = len(fused_halves(text))
    found["in_flight"] = _copies_in_flight(text)
    return found | _resources(compiled.asm["cubin"])


def fused_halves(ptx: str) -> list[str]:
    """The `fma` of half precision that do not round products; not sm80's of bf16 with -0 or 1, which are plain."""
    numbers = {0x8000: "-0", 0x80008000: "-0", 0x3F80: "1", 0x3F803F80: "1"}
    written = re.findall(r"\bmov\.b(16|32)\s+(%\w+), (-?\d+|0x\w+);", ptx)
    constants = {name: numbers.get(int(number, 0) % 2 ** int(bits)) for bits, name, number in written}
    found = re.finditer(r"\bfma\.\S*f16\S*\s+\S+, (\S+), (\S+), (\S+);", ptx)
    return [each[0] for each in found if constants.get(each[3]) != "-0" and constants.get(each[2]) != "1"]


def _copies_in_flight(ptx: str) -> list[int]:
    """Copy groups in flight in each innermost loop with matrix instructions. 0 means that it waits for all copies."""
    lines = ptx.splitlines()
    inner = _inner_loops(lines, r"(\$L__BB\w+):", r"\bbra\S*\s+(\$L__BB\w+)")
    found = []
    for start, end in inner:
        body = "\n".join(lines[start:end])
        waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", body)
        if waits and re.search(r"mma", body):
            found.append(min(map(int, waits)))
    return found


def _resources(cubin: bytes) -> dict[str, int]:
    """See `measure`. Of what Triton itself has compiled: with other options ptxas spills other registers."""
    stack = re.search(r"REG:(\d+) STACK:(\d+)", _told("cuobjdump", "-res-usage", cubin))
    assert stack is not None
    found = {"registers": int(stack[1]), "stack": int(stack[2]), "spills": 0}
    if found["stack"]:
        lines = _told("nvdisasm", "-c", cubin).splitlines()
        inner = _inner_loops(lines, r"\s*(\.L_x_\d+):", r"\bBRA\b.*\((\.L_x_\d+)\)")
        spilled = [i for i, line in enumerate(lines) if re.search(r"\b(STL|LDL)\b", line)]
        found["spills"] = sum(start <= i <= end for i in spilled for start, end in inner)
    return found


def _told(tool: str, option: str, cubin: bytes) -> str:
    """What one of the tools that Triton brings along prints about machine code."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(path), option, file.name], capture_output=True, text=True, check=True).stdout


def _inner_loops(lines: list[str], label: str, jump: str) -> list[tuple[int, int]]:
    """The first and last lines of loops that contain no other loop. label, jump: patterns with the label's name."""
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(label, line))}
    found = ((match[1], i) for i, line in enumerate(lines) if (match := re.search(jump, line)))
    loops = [(labels[name], i) for name, i in found if labels.get(name, i) < i]
    return [loop for loop in loops if not any(loop != o and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]


def _attention(chip: str, query_len: int, head_dim: int, **options: Any) -> list[Launch]:
    """32 query heads on 8 KV heads; options as in `attention_launches`, and v_head_dim, dtype, sizes and shares."""
    dtype, block_size = options.pop("dtype", torch.bfloat16), options.pop("block_size", 16)
    v_head_dim, num_seqs, max_seq_len = options.pop("v_head_dim", head_dim), options.pop("num_seqs", 64), 4096
    num_tokens = query_len * num_seqs

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    metadata = AttentionMetadata(
        block_tables=empty(num_seqs, max_seq_len // block_size, dtype=torch.int32),
        seq_lens=empty(num_seqs, dtype=torch.int32), query_start_loc=empty(num_seqs + 1, dtype=torch.int32),
        slot_mapping=empty(num_tokens, dtype=torch.int64), max_query_len=query_len,
        max_seq_len=options.pop("max_seq_len", max_seq_len), shares=options.pop("shares", False),
    )  # fmt: skip
    stored = options.pop("stored", None)
    key_cache, value_cache = (empty(9, block_size, 8, size, dtype=stored or dtype) for size in (head_dim, v_head_dim))
    scales = NO_SCALES
    if stored is not None:
        scales = Scales(*(empty(9, block_size, 8, dtype=torch.float32) for _ in range(2)))
    lse = None
    if options:
        lse = empty(32, dtype=torch.float32)
        options |= {"sinks": lse, "alibi_slopes": lse}
    return attention_launches(
        empty(num_tokens, 32, head_dim), LayerKV(key_cache, value_cache, scales), metadata,
        Attention(**{"scale": 0.1} | options), empty(num_tokens, 32, v_head_dim), lse, CHIPS[chip][0],
    )  # fmt: skip


def _between_attentions() -> dict[str, Launch]:
    """What lies between two attentions, for 8 tokens of a model with 32 query heads on 8 KV heads of 128."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    found = {}
    for size in (4096, 16_384):
        rows, norm = empty(8, size), Norm(empty(size), None, 1e-6, NormKind(rounds_first=True))
        found[f"norm {size}"] = add_norm_launch(rows, rows, NormedSum(rows, rows), None, norm)
        both = add_norm_launch(
            rows, rows, NormedSum(rows, rows), norm, Norm(empty(size), empty(size), 1e-6, NORM_KINDS[3])
        )
        found[f"norms before and after {size}"] = both
    bias = add_norm_launch(
        empty(8, 4096), empty(8, 4096), NormedSum(empty(8, 4096), empty(8, 4096)), None, None, bias=empty(4096)
    )
    found["sum with a bias"] = bias
    found["activation"] = gate_launch(empty(8, 16_384), None, empty(8, 16_384), "relu_squared")
    found["gate"] = gate_launch(empty(8, 14_336), empty(8, 14_336), empty(8, 14_336), "silu")
    for dim, norm in ((128, None), (256, Norm(empty(256), None, 1e-6, NormKind(adds_one=True)))):
        query, key, cache, angles = empty(8, 32, dim), empty(8, 8, dim), empty(9, 16, 8, dim), empty(8, dim)
        found[f"rotate d{dim}"] = rotate_launch(
            query, key, key, (query, cache, cache), torch.empty(8, dtype=torch.int64, device="meta"),
            (angles, angles), RotaryKind(), (norm, norm),
        )  # fmt: skip
    heads, angles = empty(8, 32, 128), empty(8, 128)
    found["rotate without values"] = rotate_launch(
        heads, empty(8, 8, 128), None, (heads, empty(8, 8, 128), None), None, (angles, angles), RotaryKind()
    )
    query, key, cache, slots = empty(8, 32, 128), empty(8, 8, 128), empty(9, 16, 8, 128), torch.empty(8, device="meta")
    centered = Norm(empty(128), empty(128), 1e-6, NormKind(is_centered=True))
    found["rotate a part after layer norms"] = rotate_launch(
        query, key, key, (query, cache, cache), slots.long(), (empty(8, 64), empty(8, 64)), RotaryKind(),
        (centered, centered),
    )  # fmt: skip
    found["rotate by complex angles, norms, a factor"] = rotate_launch(
        query, key, key, (query, cache, cache), slots.long(), torch.empty(8, 64, dtype=torch.complex64, device="meta"),
        RotaryKind(True, True, True, False), (Norm(None, None, 1e-6, NormKind()),) * 2, True, slots.float(),
    )  # fmt: skip
    return found


def _experts(chip: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Launch]:
    """Experts of the sizes of Qwen3-30B-A3B, and interleaved ones of GPT-OSS; routers, one with a bias and groups."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    num_tokens, top_k, num_experts = 64, 8, 128
    index, logits = empty(num_tokens, top_k, dtype=torch.int64), empty(num_tokens, 256, dtype=torch.float32)
    pairs = Assignment(empty(num_tokens * top_k, dtype=torch.int32), empty(num_experts + 1, dtype=torch.int32))
    weights, total = empty(num_tokens, top_k), empty(num_tokens, 2048)
    found = {
        "assign": assign_launch(index, num_experts, pairs),
        "combine": combine_launch(empty(num_tokens * top_k, 2048), weights, total),
        "route": route_launch(empty(num_tokens, 128), None, Router(RouterKind("softmax", "sum"), 8), weights, index),
        "route groups": route_launch(
            logits, logits[0], Router(RouterKind("sigmoid", "sum", False, 8, 4), 8, 1e-20, 2.5), weights, index
        ),
    }
    gate, oss = Gate(GateKind()), Gate(GateKind(SCALED_SILU, True, True, True), 1.702, 7.0)
    for size in SIZES:
        tile = tile_of(CHIPS[chip][0], dtype.itemsize, size)
        for name, hidden, inner, transposed, gates in (
            ("", 2048, 768, False, gate),
            ("transposed ", 2048, 768, True, gate),
            ("interleaved ", 2880, 2880, True, oss),
        ):
            for part, inputs, outputs in (("up", hidden, 2 * inner), ("down", inner, hidden)):
                shape = (inputs, outputs) if transposed else (outputs, inputs)
                bias = empty(num_experts, outputs) if gates is oss else None
                projection = Projection(empty(num_experts, *shape), bias, transposed)
                rows = empty(num_tokens * (1 if part == "up" else top_k), inputs)
                out = empty(num_tokens * top_k, inner if part == "up" else hidden)
                launch = product_launch(rows, pairs, projection, out, gates if part == "up" else None, tile)
                found[f"experts {name}{part} {size}"] = launch
    return found


def variants(chip: str) -> dict[str, Launch]:
    """Every kernel at the shapes for which it is tuned; more of them on sm90, whose code paths other chips share."""
    every_feature = {"bounds": Bounds(sliding_window=1024), "softcap": 30.0}
    depth, prefix, shared_plan, shared, reduce = _attention(chip, 1, 128, shares=True)
    plan, decode = _attention(chip, 1, 128)[:2]
    found = {
        "prefix depth": depth, "prefix": prefix, "shared plan": shared_plan, "shared decode d128": shared,
        "reduce": reduce, "plan": plan, "decode d128": decode,
    }  # fmt: skip
    found["prefill d128"] = _attention(chip, 4096, 128)[-1]
    for head_dim in (64,) if chip == "gfx1100" else (64, 256, 512):
        found[f"decode d{head_dim}"] = _attention(chip, 1, head_dim)[1]
        found[f"shared decode d{head_dim}"] = _attention(chip, 1, head_dim, shares=True)[-2]
        found[f"prefill d{head_dim}"] = _attention(chip, 4096, head_dim)[-1]
    found["decode d128 features"] = _attention(chip, 1, 128, **every_feature)[1]
    found["prefill d128 features"] = _attention(chip, 4096, 128, **every_feature)[-1]
    found["verify d128"] = _attention(chip, 16, 128)[-2]
    rows, cache = (torch.empty(n, 8, 128, dtype=torch.bfloat16) for n in (1024, 16))
    cache = cache.unflatten(0, (1, 16))
    found["write"] = write_kv_launch(NewKV(rows, rows), LayerKV(cache, cache), torch.empty(1024, dtype=torch.int64))
    small = cache.to(torch.int8)
    scales = Scales(*(torch.empty(1, 16, 8) for _ in range(2)))
    found["quantise"] = write_kv_launch(
        NewKV(rows, rows), LayerKV(small, small, scales), torch.empty(1024, dtype=torch.int64)
    )
    found["decode int8 d128"] = _attention(chip, 1, 128, stored=torch.int8)[1]
    if not chip.startswith("gfx"):  # not tuned: its registers spill
        found["prefill int8 d128"] = _attention(chip, 4096, 128, stored=torch.int8)[-1]
    if chip != "sm80" and not chip.startswith("gfx"):
        found["decode fp8 d128"] = _attention(chip, 1, 128, stored=torch.float8_e4m3fn)[1]
    found["copy"] = copy_blocks_launch([cache, cache], torch.zeros(1, 2, dtype=torch.int64), [cache, cache])
    found |= _between_attentions() | _experts(chip)
    logits, *results = (torch.empty(256, 128_256, dtype=torch.bfloat16, device="meta"), *(
        torch.empty(256 * 16, dtype=dtype, device="meta") for dtype in (torch.int64, *[torch.float32] * 3, torch.int32)
    ))  # fmt: skip
    found["greedy pieces"], found["greedy best"] = greedy_launches(logits, results[0], results[1], results[2:])
    scratch = scratch_of(*logits.shape, torch.device("meta"))
    _, first, then, *_, ties, removes = nucleus_launches(logits.float(), torch.empty(256, device="meta"), scratch)
    found |= {"top-p first": first, "top-p": then, "top-p ties": ties, "top-p removes": removes}
    if chip == "sm90":
        found["decode d80"] = _attention(chip, 1, 80)[1]
        found["decode d192 v128"] = _attention(chip, 1, 192, v_head_dim=128)[1]
        found["decode d128 blocks of 48"] = _attention(chip, 1, 128, block_size=48)[1]
        found["decode d128 blocks of 128"] = _attention(chip, 1, 128, block_size=128)[1]
        found["decode d64 fp32"] = _attention(chip, 1, 64, dtype=torch.float32)[1]
        found["short decode d128"] = _attention(chip, 1, 128, max_seq_len=200)[-1]
        found["prefill d80"] = _attention(chip, 4096, 80)[-1]
        # fp32 does not use the matrix units, and has no pipeline to speak of.
        found |= {f"fp32 {name}": each for name, each in _experts(chip, torch.float32).items() if "experts" in name}
        found["prefill d128 fp16"] = _attention(chip, 4096, 128, dtype=torch.float16)[-1]
    return found


class Binder:
    """Triton's own specialisation of launches for a chip."""

    def __init__(self, chip: str) -> None:
        target = CHIPS[chip][0]
        self._backend = make_backend(gpu_target(target))
        self._binders: dict[Any, Any] = {}

    def variant(self, launch: Launch) -> tuple[str, str]:
        """The kernel's name, and what distinguishes the machine code that triton compiles for this launch."""
        kernel = launch.kernel
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        _, specialization, options = self._binders[kernel](**launch.args, **launch.options)
        return kernel.fn.__name__, f"{specialization} {options}"


if __name__ == "__main__":
    for name, launch in variants(sys.argv[1]).items():
        print(json.dumps(measure(launch, sys.argv[1]) | {"name": name}), flush=True)
