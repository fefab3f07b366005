"""Linear layers of int8 weights, and of weights in groups of 4 or 8 bits, in native kernels."""

from __future__ import annotations

import pytest
import torch

from hf_paged.fused.cpu import gguf_blocks, groups
from hf_paged.fused.cpu import ops as fused_ops
from tests.fused.test_layers import in_one_order

pytestmark = pytest.mark.usefixtures("bf16_kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(32, 64), (50, 40), (7, 33), (200, 2100), (96, 1)]  # columns, depth
COUNTS = [1, 2, 3, 4, 5, 8, 9, 12, 13, 40, 70]  # of rows: each tile of the kernels, and more than one block


def layer(columns: int, depth: int, dtype: torch.dtype, *, biased: bool, rounds: bool) -> fused_ops.LinearWeight:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randint(-128, 128, (columns, depth), generator=generator).to(torch.int8)
    scales = torch.rand(columns, generator=generator) * 0.01 + 0.001
    bias = torch.randn(columns, generator=generator).to(dtype) if biased else None
    return fused_ops.LinearWeight(
        weight, bias, columns, depth, is_packed=False, int8=fused_ops.Int8Scales(scales, dtype, rounds)
    )


def packed(weight: fused_ops.LinearWeight) -> fused_ops.LinearWeight:
    arena = fused_ops.WeightArena([(weight.columns, weight.depth)], torch.int8)
    fused_ops.pack(weight.memory, arena.parts[0])
    return weight._replace(memory=arena.parts[0], is_packed=True)


def expected(weight: fused_ops.LinearWeight, rows: torch.Tensor) -> torch.Tensor:
    """With sums in fp64, rounded where the kernels round."""
    assert weight.int8 is not None
    sums = rows.double() @ weight.memory.double().T
    if weight.int8.rounds:
        sums = sums.to(rows.dtype).double()
    found = (sums * weight.int8.scales.double()).to(rows.dtype)
    return found if weight.bias is None else found + weight.bias


@pytest.mark.parametrize("columns, depth", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased, rounds", [(False, True), (True, False), (True, True)])
@pytest.mark.covering(2)
def test_sums_times_scales(columns: int, depth: int, dtype: torch.dtype, biased: bool, rounds: bool) -> None:
    if not fused_ops.is_available(dtype):
        pytest.skip(f"no kernels for {dtype}")
    weight = layer(columns, depth, dtype, biased=biased, rounds=rounds)
    weights = [weight, packed(weight)] if dtype == torch.bfloat16 and fused_ops.packs() else [weight]
    rows = (torch.randn(max(COUNTS), depth, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)
    known = expected(weight, rows).double()
    bound = 3 * torch.finfo(dtype).eps * (known.abs() + (rows.double().abs() @ weight.memory.double().abs().T) * 0.01)
    alone = fused_ops.linear(weight, rows[:1])
    for each in weights:
        for count in COUNTS:
            found = fused_ops.linear(each, rows[:count])
            assert found.dtype == dtype and found.shape == (count, columns)
            assert ((found.double() - known[:count]).abs() <= bound[:count]).all()
            with in_one_order():  # the same bits in any batch, and whether the weight is packed or not
                found = fused_ops.linear(each, rows[:count])
                assert found[:1].equal(alone)
                assert found.equal(fused_ops.linear(weight, rows)[:count])


def of_zeros(columns: int, depth: int, generator: torch.Generator) -> groups.Codes:
    made = groups.empty(columns, depth, groups.Form(4, 64, groups.Kind.ZEROS))
    units = made.memory.shape[1]
    codes, zeros = (torch.randint(0, 16, (columns, each), generator=generator) for each in (units * 64, units))
    scales = torch.rand(columns, units, generator=generator).half() / 50
    groups.store(made, 0, codes.to(torch.uint8), groups.Heads(scales, zeros.half()))
    known = (codes - zeros.repeat_interleave(64, 1)) * scales.float().repeat_interleave(64, 1)
    assert made.values().equal(known[:, :depth])
    return made


def of_table(columns: int, depth: int, generator: torch.Generator) -> groups.Codes:
    table = tuple(torch.randn(16, generator=generator).tolist())
    made = groups.empty(columns, depth, groups.Form(4, 32, groups.Kind.TABLE, table=table))
    units = made.memory.shape[1]
    codes = torch.randint(0, 16, (columns, units * 32), generator=generator)
    scales = torch.rand(columns, units, generator=generator) / 50
    groups.store(made, 0, codes.to(torch.uint8), groups.Heads(scales))
    assert made.values().equal((torch.tensor(table)[codes] * scales.repeat_interleave(32, 1))[:, :depth])
    return made


def of_file(kind: str, columns: int, depth: int) -> groups.Codes:
    """Codes with the values of a GGUF file. A single block, whose strides are its own, is read too."""
    if columns > 1:
        of_file(kind, 1, gguf_blocks.BLOCKS[kind].elements)
    gguf_files = pytest.importorskip("tests.gguf_files")
    found, block = gguf_files.blocks(kind, columns, depth), gguf_blocks.BLOCKS[kind]
    made = groups.empty(columns, depth, block.form)
    for first in range(0, columns, 32):
        groups.store(made, first, *gguf_blocks.read(torch.from_numpy(found[first : first + 32]), kind))
    assert made.values().equal(torch.from_numpy(gguf_files.values(kind, found)))
    return made


FORMS = [groups.Form(bits, size) for bits in (4, 8) for size in (16, *groups.SIZES)]  # files have 16 too


def in_eight_bits(rows: torch.Tensor, size: int) -> torch.Tensor:
    """What the kernels multiply: the largest element of a group becomes 127 or -127."""
    parts = torch.nn.functional.pad(rows.float(), (0, -rows.shape[-1] % size)).unflatten(-1, (-1, size))
    most = parts.abs().amax(-1, keepdim=True)
    inverse = torch.tensor(127.0) / most  # `127 / most` would be rounded twice
    parts = ((parts * inverse).round().double() * (most / 127).double()).nan_to_num()  # groups of zeros
    return parts.flatten(-2)[..., : rows.shape[-1]]


@pytest.mark.covering(2)
@pytest.mark.parametrize("columns, depth", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [*FORMS, "zeros", "table", *gguf_blocks.BLOCKS], ids=str)
@pytest.mark.parametrize("activations", [32, 16, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_sums_of_groups(
    columns: int, depth: int, dtype: torch.dtype, form: groups.Form | str, activations: int, biased: bool
) -> None:
    if not fused_ops.is_available(dtype):
        pytest.skip(f"no kernels for {dtype}")
    activations = 32 if form == "table" else activations  # others are refused
    generator = torch.Generator().manual_seed(1)
    if form in (kinds := {"zeros": of_zeros, "table": of_table}):
        codes = kinds[form](columns, depth, generator)
    elif isinstance(form, str):
        depth = -(-depth // 256) * 256  # files have whole blocks
        codes = of_file(form, columns, depth)
    else:
        codes = groups.rounded(torch.randn(columns, depth, generator=generator) * 0.1, form)
    rows = torch.randn(max(COUNTS), depth, generator=generator) * torch.logspace(-1.5, 1, max(COUNTS))[:, None]
    # Most elements are small beside a few, as in models.
    rows[:, ::37] *= 1000
    rows, bias, weight = rows.to(dtype), torch.randn(columns, generator=generator).to(dtype), codes.values().double()
    multiplied = in_eight_bits(rows, codes.form.size) if activations == 8 else rows.double()
    known = multiplied @ weight.T + (bias.double() if biased else 0)
    # A large element may have a small weight, which is the difference of larger numbers.
    terms = rows.double().abs().sum(1, keepdim=True) * weight.abs().amax(1) + bias.double().abs()
    how = fused_ops.InGroups(*codes.form._replace(activations=activations), dtype)
    native = fused_ops.LinearWeight(codes.memory, bias if biased else None, columns, depth, True, None, how)
    many = fused_ops.linear(native, rows)
    with in_one_order():  # the same bits in any batch
        all_rows = fused_ops.linear(native, rows)
        for count in COUNTS:
            assert fused_ops.linear(native, rows[:count]).equal(all_rows[:count])
    if activations == 8:  # always, and in more than one turn of many rows
        assert many.equal(all_rows) and fused_ops.linear(native, rows.repeat(3, 1)).equal(all_rows.repeat(3, 1))
    # Of short rows, each element of a group is rounded to 2**-15 of the largest one.
    is_short = activations == 16 or (activations == 32 and dtype.itemsize == 2)
    # Many rows have sums in fp32 along the whole depth, others sums of groups.
    for found, part in (all_rows, 3e-7), (many, 2**-20):
        bound = torch.finfo(dtype).eps * known.abs() + (2**-12 if is_short else part) * terms + 1e-7
        assert ((found.double() - known).abs() <= bound).all()
    rows[0, -1] = torch.inf
    assert not (found := fused_ops.linear(native, rows))[0].isfinite().any() and found[1:].equal(many[1:])


@pytest.mark.parametrize("bits, most", [(4, 0.076), (8, 0.0048)])
def test_rounding_of_groups(bits: int, most: float) -> None:
    """Least squares leave 0.074 of normal numbers; the range of a group alone, 0.078."""
    weight = torch.randn(300, 2050, generator=torch.Generator().manual_seed(0))
    codes = groups.rounded(weight, groups.Form(bits, 32))
    assert (codes.values() - weight).square().mean().sqrt() < most
    index = torch.tensor([[299, 0], [17, 299]])
    assert codes.columns_at(index).equal(codes.values()[index])
    with pytest.raises(IndexError, match=r"ids \[-1, 300, 303\] are not in a weight of 300 rows; give"):
        codes.columns_at(torch.tensor([5, 303, 300, -1]))  # there are 304 in memory
    assert groups.rounded(torch.full((16, 32), 0.5), groups.Form(bits, 32)).values().eq(0.5).all()
    kept = torch.randint(-7, 8, (16, 320)) * 2.0**-7
    kept[:, ::32] = (-8 if bits == 4 else 127) * 2.0**-7  # as blocks of GGUF files have it
    assert groups.rounded(kept, groups.Form(bits, 32)).values().equal(kept)
