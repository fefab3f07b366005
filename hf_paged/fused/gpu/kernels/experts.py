"""Experts in four launches: pairs sorted by expert, the products with the gate, the products down, and the sums.

Grids and shapes depend on the numbers of tokens and experts alone, never on which experts were chosen: a CUDA graph can
repeat them. There are no atomics, and no result depends on other tokens. Knows tensors; never modules. The definitions
are in `hf_paged/fused/experts.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hf_paged.fused.experts import SCALED_SILU, Assignment, Gate, Projection
from hf_paged.fused.gpu.kernels.gate import activate, sigmoid
from hf_paged.kernels import buffers
from hf_paged.kernels.triton.launch import INTERPRET, UNFUSED, Launch, RowLaunches, Target, next_power_of_2, target_of
from hf_paged.kernels.triton.tuning import has_little_memory, has_wide_products

_launches = RowLaunches()

# -- pairs sorted by expert ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pairs"])
def assign_kernel(index, pairs, starts, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program e: counts the pairs of the experts before expert e, and writes its own after them."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(index + first + offsets, mask=first + offsets < num_pairs, other=NUM_EXPERTS)
        before += (chosen < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(index + first + offsets, mask=first + offsets < num_pairs, other=NUM_EXPERTS)
        mine = (chosen == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(mine, 0) - mine, first + offsets, mask=mine != 0)
        place += tl.sum(mine, 0)
    if expert == NUM_EXPERTS - 1:
        tl.store(starts + NUM_EXPERTS, place)


def assign_launch(index: torch.Tensor, num_experts: int, result: Assignment) -> Launch:
    """See `assign`."""
    args = {
        "index": index, "pairs": result.pairs, "starts": result.starts, "num_pairs": index.numel(),
        "NUM_EXPERTS": num_experts, "BLOCK": 2048,
    }  # fmt: skip
    return Launch(assign_kernel, (num_experts,), args, {"num_warps": 4})


def assign(index: torch.Tensor, num_experts: int) -> Assignment:
    """index [num_tokens, top_k], int64 or int32, contiguous: the experts of each token."""
    pairs = buffers.empty((index.numel(),), torch.int32, index.device)
    result = Assignment(pairs, buffers.empty((num_experts + 1,), torch.int32, index.device))
    tensors: dict[str, torch.Tensor | None] = {"index": index, **result._asdict()}
    options = index.numel(), num_experts
    _launches.run(num_experts, index.device, tensors, options, lambda: assign_launch(index, num_experts, result))
    return result


# -- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Pairs (bm), columns (bn) and inputs (bk) of one iteration, and how the kernel is compiled. With a gate, a tile
    has bn / 2 gates and as many ups.

    group: tiles whose columns are computed together, so that the rows and weights that they read stay in the L2 cache;
    None: all of one column after the other.
    """

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int
    group: int | None = None


SIZES = ("small", "large", "wide")


def tile_of(target: Target, element_size: int, size: str) -> ProductTile:
    """A fixed table, not measured. small: experts have few pairs, and reading their weights takes all the time. wide:
    each has many, and the matrix units wait for what tiles read of the L2 cache, a byte for each bm * bn / (bm + bn)
    FLOP."""
    if element_size == 4:  # fp32 does not use the matrix units; small tiles fit into registers
        wide = 8 if size == "wide" else None
        return ProductTile(16, 32, 32, 4, 2) if size == "small" else ProductTile(32, 64, 32, 8, 2, wide)
    if size == "small":
        return ProductTile(16, 128, 64, 4, 2 if target.backend == "hip" else 4)
    if target.backend == "hip":
        return ProductTile(64, 128, 64, 8, 2, 8 if size == "wide" else None)
    if size == "large":
        return ProductTile(64, 128, 64, 4, 4)
    if has_wide_products(target):
        return ProductTile(128, 256, 64, 8, 4, 8)
    return ProductTile(128, 128, 64, 8, 3 if has_little_memory(target) else 4, 8)


def size_for(num_pairs: int, num_experts: int) -> str:
    """The tiles for so many pairs: small up to an average of 16 for each expert, wide from 256 on, with which the last
    tiles of the experts leave a fifth of the rows empty."""
    average = num_pairs / num_experts
    return "small" if average <= 16 else "large" if average < 256 else "wide"


def _num_tiles(num_pairs: int, num_experts: int, bm: int) -> int:
    """The most tiles of bm pairs that there may be: each expert with a pair may leave one partly empty."""
    used = min(num_experts, num_pairs)
    return used + (num_pairs - used) // bm


@triton.jit
def _load_weights(weight, columns, dims, valid, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TRANSPOSED: tl.constexpr,
                  EVEN: tl.constexpr):  # fmt: skip
    """[dims, columns] of one expert's weights; 0 outside, unless nothing is."""
    if TRANSPOSED:
        pointers = weight + dims[:, None] * OUTPUTS + columns[None, :]
    else:
        pointers = weight + columns[None, :] * INPUTS + dims[:, None]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(dims < INPUTS)[:, None] & valid[None, :], other=0.0)


@triton.jit
def _with_bias(x, bias, columns, valid, DTYPE: tl.constexpr):
    """The product, rounded before and after its bias is added, in fp32."""
    x = x.to(DTYPE).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + columns, mask=valid, other=0.0).to(tl.float32)[None, :]
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _rounded(x, ROUNDS: tl.constexpr, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32) if ROUNDS else x


@triton.jit
def _gated(x, up, alpha, limit, ACTIVATION: tl.constexpr, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """GATE: a GateKind without its activation."""
    rounds: tl.constexpr = GATE[3]
    if GATE[1]:  # NaN stays NaN, as in torch
        x = tl.where(x > limit, limit, x)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "scaled_silu":
        x = x * _rounded(sigmoid(_rounded(x * alpha, rounds, DTYPE)), rounds, DTYPE)
    else:
        x = activate(x, ACTIVATION)
    if GATE[2]:
        up = _rounded(up + 1.0, rounds, DTYPE)
    return _rounded(x, rounds, DTYPE) * up


@triton.jit
def _pairs_of(starts, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """The expert of a tile, the place of its first pair, and that after the expert's last one; no place after the last
    tile."""
    each = tl.arange(0, EXPERTS)
    first = tl.load(starts + each, mask=each < NUM_EXPERTS, other=0)
    last = tl.load(starts + each + 1, mask=each < NUM_EXPERTS, other=0)
    num_tiles = (last - first + BM - 1) // BM
    before = tl.cumsum(num_tiles, 0) - num_tiles
    is_mine = (tile >= before) & (tile < before + num_tiles)
    expert = tl.sum(tl.where(is_mine, each, 0), 0).to(tl.int64)
    start = tl.sum(tl.where(is_mine, first + (tile - before) * BM, 0), 0)
    return expert, start, tl.sum(tl.where(is_mine, last, 0), 0)


@triton.jit
def product_kernel(
    rows, weight, bias, out, pairs, starts, alpha, limit,
    NUM_EXPERTS: tl.constexpr, PAIRS_OF_ROW: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    TRANSPOSED: tl.constexpr, ACTIVATION: tl.constexpr, GATE: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of all experts' tiles of BM pairs, and columns [j * BN, ...) of its result. With GROUP,
    programs in the order in which they start compute all columns of so many tiles before those of the next ones.

    ACTIVATION, GATE: a GateKind, with which a column is that of a gate and an up; or None. EXPERTS: a power of two, at
    least NUM_EXPERTS. Programs after the last tile return. UPCAST: multiply in fp32, for the interpreter.
    """
    tile, column = tl.program_id(0), tl.program_id(1)
    if GROUP is not None:
        place, columns_of_group = tile + column * tl.num_programs(0), GROUP * tl.num_programs(1)
        first = place // columns_of_group * GROUP
        count = tl.minimum(tl.num_programs(0) - first, GROUP)
        tile = first + place % columns_of_group % count
        column = place % columns_of_group // count
    expert, start, end = _pairs_of(starts, tile, NUM_EXPERTS, EXPERTS, BM)
    # The grid is an upper bound, because the host does not know which experts were chosen.
    if start == end:
        return
    dtype: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = OUTPUTS if GATE is None else OUTPUTS // 2  # of a result
    even: tl.constexpr = INPUTS % BK == 0 and size % BN == 0
    places = start + tl.arange(0, BM)
    inside = places < end
    pair = tl.load(pairs + places, mask=inside, other=0)
    sources = rows + (pair // PAIRS_OF_ROW).to(tl.int64)[:, None] * INPUTS
    # `expert` is int64: all experts' weights together may exceed 2^31 elements.
    weight += expert * (OUTPUTS * INPUTS)
    if bias is not None:
        bias += expert * OUTPUTS
    columns = column * BN + tl.arange(0, BN)
    valid = columns < size
    # Interleaved gates and ups are columns of one product, and are separated at the end.
    if GATE is None or not GATE[0]:
        acc = tl.zeros([BM, BN], tl.float32)
        ups = tl.zeros([BM, BN], tl.float32)
        both = columns
        both_valid = valid
    else:
        acc = tl.zeros([BM, 2 * BN], tl.float32)
        both = column * (2 * BN) + tl.arange(0, 2 * BN)
        both_valid = both < OUTPUTS
    for k in tl.range(0, INPUTS, BK, num_stages=STAGES):
        dims = k + tl.arange(0, BK)
        mask = inside[:, None]
        if INPUTS % BK != 0:
            mask = mask & (dims < INPUTS)[None, :]
        x = tl.load(sources + dims[None, :], mask=mask, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        w = _load_weights(weight, both, dims, both_valid, OUTPUTS, INPUTS, TRANSPOSED, even)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
        if GATE is not None and not GATE[0]:
            w = _load_weights(weight, size + columns, dims, valid, OUTPUTS, INPUTS, TRANSPOSED, even)
            ups = tl.dot(x, w.to(x.dtype), ups, input_precision="ieee")

    if GATE is None:
        result = _with_bias(acc, bias, columns, valid, dtype)
    else:
        if GATE[0]:
            wide = _with_bias(acc, bias, both, both_valid, dtype)
            gate, up = tl.split(tl.reshape(wide, (BM, BN, 2)))
        else:
            gate = _with_bias(acc, bias, columns, valid, dtype)
            up = _with_bias(ups, bias, size + columns, valid, dtype)
        result = _gated(gate, up, alpha, limit, ACTIVATION, GATE, dtype)
    targets = out + pair.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(targets, result.to(dtype), mask=inside[:, None] & valid[None, :])


def product_launch(
    rows: torch.Tensor,
    assignment: Assignment,
    projection: Projection,
    out: torch.Tensor,
    gate: Gate | None,
    tile: ProductTile,
) -> Launch:
    """See `product`; out [num_pairs, n], contiguous."""
    num_pairs, num_experts = assignment.pairs.numel(), projection.weight.shape[0]
    bn = tile.bn if gate is None else tile.bn // 2
    args = {
        "rows": rows, "weight": projection.weight, "bias": projection.bias, "out": out, "pairs": assignment.pairs,
        "starts": assignment.starts, "alpha": 1.0 if gate is None else gate.alpha,
        "limit": 0.0 if gate is None else gate.limit, "NUM_EXPERTS": num_experts,
        "PAIRS_OF_ROW": num_pairs // rows.shape[0], "OUTPUTS": projection.outputs, "INPUTS": projection.inputs,
        "TRANSPOSED": projection.is_transposed, "GATE": None if gate is None else tuple(gate.kind[1:]),
        "ACTIVATION": None if gate is None else gate.kind.activation,
        "EXPERTS": next_power_of_2(num_experts), "BM": tile.bm, "BN": bn, "BK": tile.bk, "STAGES": tile.num_stages,
        "GROUP": tile.group,
        "UPCAST": INTERPRET and rows.dtype != torch.float32,
    }  # fmt: skip
    grid = (_num_tiles(num_pairs, num_experts, tile.bm), triton.cdiv(out.shape[1], bn))
    return Launch(product_kernel, grid, args, {"num_warps": tile.num_warps, "num_stages": tile.num_stages})


def product(
    rows: torch.Tensor,
    assignment: Assignment,
    projection: Projection,
    *,
    gate: Gate | None = None,
    size: str | None = None,
) -> torch.Tensor:
    """The projection of each pair's row by its expert, with a gate the inner row that it gives: [num_pairs, n].

    rows [n, inputs], contiguous: one for each pair, or one for each token. size: of the tiles, if it is to be other
    than that for so many pairs.
    """
    num_pairs, num_experts = assignment.pairs.numel(), projection.weight.shape[0]
    size_of_result = projection.outputs // (1 if gate is None else 2)
    out = buffers.empty((num_pairs, size_of_result), rows.dtype, rows.device)
    tile = tile_of(target_of(rows.device), rows.element_size(), size or size_for(num_pairs, num_experts))
    tensors = {
        "rows": rows, "weight": projection.weight, "bias": projection.bias, "out": out, **assignment._asdict(),
    }  # fmt: skip
    # All sizes that the launch depends on, so that layers with equal ones share it.
    options = projection.weight.shape, projection.is_transposed, num_pairs // len(rows), gate, tile
    _launches.run(
        _num_tiles(num_pairs, num_experts, tile.bm), rows.device, tensors, options,
        lambda: product_launch(rows, assignment, projection, out, gate, tile),
    )  # fmt: skip
    return out


# -- sums ------------------------------------------------------------------------------------------------------------


@triton.jit
def combine_kernel(results, weights, out, TOP_K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, j): columns [j * BLOCK, ...) of token t. Products are rounded to the wider of both dtypes."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype: tl.constexpr = results.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        x = tl.load(results + pair * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        x *= tl.load(weights + pair).to(tl.float32)
        # torch rounds the product to this dtype, and to fp32 if the weights are wider.
        if weights.dtype.element_ty == dtype:
            x = x.to(dtype).to(tl.float32)
        total += x
    tl.store(out + token * SIZE + columns, total.to(dtype), mask=inside)


def combine_launch(results: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> Launch:
    """See `combine`; out [num_tokens, n], contiguous."""
    num_tokens, size = out.shape
    block = min(1024, next_power_of_2(size))
    args = {
        "results": results, "weights": weights, "out": out, "TOP_K": weights.shape[1], "SIZE": size, "BLOCK": block,
    }  # fmt: skip
    return Launch(combine_kernel, (num_tokens, triton.cdiv(size, block)), args, {"num_warps": 4, **UNFUSED})


def combine(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of each token's results times their weights, added in fp32: [num_tokens, n] of the results' dtype.

    results [num_pairs, n], weights [num_tokens, top_k], both contiguous. weights: of the results' dtype, or fp32.
    """
    out = buffers.empty((weights.shape[0], results.shape[1]), results.dtype, results.device)
    tensors: dict[str, torch.Tensor | None] = {"results": results, "weights": weights, "out": out}
    options = weights.shape[1], results.shape[1]
    _launches.run(len(out), out.device, tensors, options, lambda: combine_launch(results, weights, out))
    return out


assert SCALED_SILU == "scaled_silu"  # a kernel cannot name a variable of a module
