"""The activation of a gate times the other half of a gated MLP, in one launch. Knows rows; never modules."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_paged.kernels import buffers
from hf_paged.kernels.triton.launch import Launch, RowLaunches, next_power_of_2


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """x in fp32. ACTIVATION: one of `rows.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    # (1 + tanh(z)) / 2 is the sigmoid of 2z, and Triton's language has no tanh.
    elif ACTIVATION == "gelu_tanh":
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "sigmoid":
        x = sigmoid(x)
    else:
        x = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN, as in torch
        if ACTIVATION == "relu_squared":
            x = x * x
    return x


@triton.jit
def gate_kernel(
    gate, up, out, gate_stride, up_stride, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, i): columns [i * BLOCK, ...) of row r. The activation is rounded before it is multiplied."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype: tl.constexpr = out.dtype.element_ty
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = activate(x, ACTIVATION)
    if up is not None:
        other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32) * other
    tl.store(out + row * SIZE + columns, x.to(dtype), mask=inside)


_launches = RowLaunches()


def gate_launch(gate: torch.Tensor, up: torch.Tensor | None, out: torch.Tensor, activation: str) -> Launch:
    """See `gated`; out [num_rows, size], contiguous."""
    num_rows, size = gate.shape
    block = min(1024, next_power_of_2(size))
    # The stride of a single row is arbitrary; a kernel must not be compiled for each.
    strides = [out.stride(0) if x is None or num_rows == 1 else x.stride(0) for x in (gate, up)]
    args = {
        "gate": gate, "up": up, "out": out, "gate_stride": strides[0], "up_stride": strides[1],
        "ACTIVATION": activation, "SIZE": size, "BLOCK": block,
    }  # fmt: skip
    return Launch(gate_kernel, (num_rows, triton.cdiv(size, block)), args, {"num_warps": 4})


def gated(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    """activation(gate) * up, or activation(gate). gate, up [num_rows, size], contiguous in their last dimension, of one
    dtype; activation: one of `rows.ACTIVATIONS`."""
    out = buffers.empty(gate.shape, gate.dtype, gate.device)
    num_rows, size = gate.shape
    if num_rows and size:
        tensors: dict[str, torch.Tensor | None] = {"gate": gate, "up": up, "out": out}
        options = size, activation
        _launches.run(num_rows, gate.device, tensors, options, lambda: gate_launch(gate, up, out, activation))
    return out
