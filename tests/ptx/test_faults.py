"""Faults that the machine must see: small programs with one each."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ptx.memory import Fault
from tests.ptx.programs import execute

LINE = "shl.b32 %r2, %r1, 2; "  # the address of a thread's word of shared memory
OTHER = "xor.b32 %r3, %r1, 32; shl.b32 %r3, %r3, 2; "  # that of a thread of the other warp
DESCRIPTOR = "mov.b64 %rd9, 0x4000004000010000; "  # of a tile of rows of 128 bytes at 0
ROWS = "shl.b32 %r4, %r1, 4; " + "".join(
    f"st.shared.v4.b32 [%r4+{place}], {{%r1, %r1, %r1, %r1}}; " for place in (0, 2048, 4096, 6144)
)
FENCE = "fence.proxy.async.shared::cta; bar.sync 0; "
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10, %r11, %r12, %r13}, %rd9, %rd9, 0, 1, 1, 0, 0; "
COMMIT = "wgmma.commit_group.sync.aligned; "
WAIT = "wgmma.wait_group.sync.aligned 0; "
MULTIPLY = ROWS + FENCE + DESCRIPTOR + PRODUCT + COMMIT
COPY = "shl.b32 %r2, %r1, 4; mad.wide.s32 %rd2, %r1, 16, %rd1; cp.async.cg.shared.global [%r2], [%rd2], 16; "

FAULTS = {
    "outside of all tensors": "ld.global.b32 %r2, [%rd1+4096]",
    "misaligned access of global": "ld.global.b32 %r2, [%rd1+2]",
    "misaligned access of shared": LINE + "st.shared.b32 [%r2+2], %r1",
    "global memory that was never written": "ld.global.b32 %r2, [%rd2]",
    "global memory read that another warp has written":
        "mad.wide.s32 %rd3, %r1, 4, %rd1; xor.b32 %r2, %r1, 32; mad.wide.s32 %rd4, %r2, 4, %rd1; "
        "st.global.b32 [%rd3], %r1; ld.global.b32 %r3, [%rd4]",
    "outside of shared memory": LINE + "st.shared.b32 [%r2+8000], %r1; st.shared.b32 [%r2+16000], %r1",
    "shared memory that was never written": LINE + "ld.shared.b32 %r3, [%r2]",
    "read that another warp has written": LINE + OTHER + "st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r3]",
    "overwritten that another warp has read":
        LINE + OTHER + "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r3]; st.shared.b32 [%r2], %r4",
    "overwritten that another warp has written": LINE + OTHER + "st.shared.b32 [%r2], %r1; st.shared.b32 [%r3], %r1",
    "before the wait for its asynchronous copy": COPY + "ld.shared.b32 %r3, [%r2]",
    "ends without a wait for its asynchronous": COPY + "cp.async.commit_group",
    "a barrier that not all threads reach": "setp.lt.s32 %p1, %r1, 5; @%p1 bar.sync 0",
    "a barrier that not all threads": "setp.lt.s32 %p1, %r1, 32; @%p1 bra $L_a; bar.sync 0; $L_a: bar.sync 0",
    "not all lanes of a warp": "setp.lt.s32 %p1, %r1, 5; @%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1",
    "a matrix instruction that not all":
        "setp.lt.s32 %p1, %r1, 5; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1]",
    "is read before it is written": "add.s32 %r2, %r3, %r1",
    "does not know: tanhx": "tanhx.f32 %r2, %r1",
    "without fence.proxy.async": ROWS + "bar.sync 0; " + DESCRIPTOR + PRODUCT + COMMIT + WAIT,
    "read before the wait for the wgmma":
        MULTIPLY + "add.f32 %r20, %r10, %r10",
    "overwritten while wgmma reads it":
        MULTIPLY + "bar.sync 0; st.shared.b32 [%r4], %r1",
    "ends without a wait for its wgmma":
        MULTIPLY,
    "written since the last barrier: wgmma":
        ROWS + "fence.proxy.async.shared::cta; " + DESCRIPTOR + PRODUCT + COMMIT + WAIT,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(name: str) -> None:
    given, blank = torch.zeros(1024, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    with pytest.raises(Fault, match=re.escape(name)):
        execute(FAULTS[name], given, blank, threads=128, shared=8192, blank=(1,))


def test_copies_for_wgmma_without_a_fence_are_noted() -> None:
    given = torch.zeros(2048, dtype=torch.int32)
    copies = "".join(f"cp.async.cg.shared.global [%r2+{n}], [%rd2+{n}], 16; " for n in (2048, 4096, 6144))
    arrived = COPY + copies + "cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; "
    product = DESCRIPTOR + PRODUCT + COMMIT + WAIT
    assert execute(arrived + product, given, threads=128, shared=8192).notes
    assert not execute(arrived + "fence.proxy.async.shared::cta; " + product, given, threads=128, shared=8192).notes


def test_programs_without_a_fault() -> None:
    """The same with what they lack."""
    given = torch.arange(1024, dtype=torch.int32)
    exchange = "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r4, [%r3]; bar.sync 0; st.shared.b32 [%r2], %r4"
    execute(LINE + OTHER + exchange, given, threads=128)
    after = "add.f32 %r20, %r10, %r10; bar.sync 0; st.shared.b32 [%r4], %r1"
    execute(MULTIPLY + WAIT + after, given, threads=128, shared=8192)


def test_values_of_copies_arrive_with_the_wait() -> None:
    given, out = torch.arange(512, dtype=torch.int32), torch.empty(128, dtype=torch.int32)
    execute(
        "shl.b32 %r2, %r1, 4; mad.wide.s32 %rd3, %r1, 16, %rd1; setp.lt.s32 %p1, %r1, 64; selp.b32 %r5, 16, 0, %p1; "
        "cp.async.cg.shared.global [%r2], [%rd3], 16, %r5; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; "
        "xor.b32 %r3, %r1, 32; shl.b32 %r3, %r3, 4; ld.shared.b32 %r4, [%r3+4]; mad.wide.s32 %rd4, %r1, 4, %rd2; "
        "st.global.b32 [%rd4], %r4", given, out, threads=128, shared=2048,
    )  # fmt: skip
    expected = [4 * (i ^ 32) + 1 if i < 64 else 0 for i in range(128)]  # the source's size is 0 for others
    assert out.tolist() == expected
