"""Replace torch's operations within a forward, so that a row's bits do not depend on how many rows there are.

For `SchedulerConfig.batch_invariant`: what no override computes is left to torch. Its matrix products and convolutions
choose the order of sums by the number of rows. Its functions of single numbers take whole vectors one way and the rest,
at the end of what a thread computes, another way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.errors import UnsupportedModelError
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels import buffers

# Sums whose order may depend on the number of rows, and the argument whose last dimension is summed over.
_SUMS = {
    "mm": 0, "addmm": 1, "_grouped_mm": 0, "bmm": 0, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0, "linear": 0,
    "mkldnn_linear": 0, "_linear_pointwise": 0, "convolution": 0, "_int_mm": 0, "_weight_int8pack_mm": 0,
    "_weight_int4pack_mm_for_cpu": 0, "_scaled_mm": 0, "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_attention_math": 0, "scaled_dot_product_attention": 0,
}  # fmt: skip

# Functions of single numbers that differ in the last bit between whole vectors and the rest. (Also in place: `silu_`.)
_ROUNDED = {"silu", "sigmoid", "gelu", "softplus", "mish", "elu", "celu", "selu", "log_sigmoid_forward", "tanh", "exp",
            "expm1", "erf", "erfc", "log", "log1p", "rsqrt", "sqrt", "cos", "sin", "hardswish"}  # fmt: skip
_VECTORS = 64
"""Numbers that such a function takes at once, or a multiple of it."""
_GRAIN = 1 << 15
"""Numbers that torch gives a thread at least; of gelu, those up to which there is one thread."""
# torch divides gelu among all threads beyond this number.
_GELU_GRAIN = 1 << 14


class OneOrder(TorchDispatchMode):
    """Within the `with` block, computes torch's products of rows with a weight by `fused_ops.linear`, and its functions
    of single numbers in whole vectors, in this thread. Native linear layers sum in one order there.

    by_token: the rows of a forward are sequences, with one token each, and what is computed for a row has one shape.
    left: the names of the operators with sums that were left to torch. A product over one element has no sum.
    is_strict: raise UnsupportedModelError instead of leaving one to torch.
    """

    def __init__(self, *, by_token: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_strict = False
        self._by_token = by_token
        self.left: dict[str, None] = {}
        self._before: list[bool] = []  # of `in_one_order`, when the blocks began

    def __enter__(self) -> OneOrder:
        self._before.append(fused_ops.in_one_order(True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        fused_ops.in_one_order(self._before.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        # In inference mode these arrive whole; their parts are what may depend on the rows.
        if name in ("matmul", "einsum"):
            with self:
                return func.decompose(*args, **kwargs)
        if name.removesuffix("_") in _ROUNDED:
            return _in_whole_vectors(func, args[0], args[1:], kwargs, in_place=name.endswith("_"))
        place = _SUMS.get(name)
        if place is None or args[place].shape[-1] == 1:
            return func(*args, **kwargs)
        product = _replaced(name, args, kwargs, by_token=self._by_token)
        if product is not None:
            return product
        if self.is_strict:
            raise UnsupportedModelError(f"batch_invariant=True: the model has called {name} of torch; leave it out")
        self.left[name] = None
        return func(*args, **kwargs)


def _replaced(name: str, args: Any, kwargs: dict[str, Any], *, by_token: bool) -> torch.Tensor | None:
    if name == "linear":
        rows, weight, bias = (*args, None)[:3]
        product = _product(rows.reshape(-1, rows.shape[-1]), weight.t(), bias)
        return None if product is None else product.view(*rows.shape[:-1], len(weight))
    if name == "mm":
        return _product(*args)
    if name == "addmm" and not kwargs:
        bias, rows, weight = args
        return _product(rows, weight, bias)
    if name == "bmm" and not kwargs:
        return _products(*args, by_token=by_token)
    if name == "convolution" and by_token:
        return _depthwise(*args)
    if name == "_grouped_mm" and not kwargs.get("out_dtype"):
        return _grouped(*args, **kwargs)
    return None


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """rows [num_rows, depth] times weight [depth, columns]; None if these are no rows and weight on a CPU. A weight
    that is not the transpose of a contiguous one is copied."""
    depth, columns = weight.shape
    is_known = rows.dtype == weight.dtype in (torch.float32, torch.bfloat16, torch.float16) and rows.is_cpu
    if not is_known or (bias is not None and (bias.shape != (columns,) or bias.dtype != rows.dtype)):
        return None
    # The kernels read biases and weights by address.
    bias = None if bias is None else bias.contiguous()
    layer = fused_ops.LinearWeight(weight.t().contiguous(), bias, columns, depth, is_packed=False)
    return fused_ops.linear(layer, rows)


def _grouped(
    rows: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """rows [num_rows, depth]; the first offs[0] belong to weights[0] of [groups, depth, columns], and so on."""
    if rows.ndim != 2 or weights.ndim != 3 or offs is None or bias is not None:
        return None
    out = buffers.empty((len(rows), weights.shape[2]), rows.dtype).zero_()
    start = 0
    for weight, end in zip(weights, offs.tolist()):
        if end > start:
            product = _product(rows[start:end], weight)
            if product is None:
                return None
            out[start:end] = product
        start = end
    return out


def _products(left: torch.Tensor, right: torch.Tensor, *, by_token: bool) -> torch.Tensor | None:
    """left [batch, rows, depth] times right [batch, depth, columns], each pair by itself."""
    if not (left.is_cpu and left.dtype == right.dtype and left.is_floating_point()):
        return None
    # A state times a vector: there are many small ones, so they are products and sums of their own.
    if by_token and right.shape[2] == 1:
        return (left.float() * right.mT.float()).contiguous().sum(-1, keepdim=True).to(left.dtype)
    out = buffers.empty((len(left), left.shape[1], right.shape[2]), left.dtype)
    for pair, place in zip(zip(left, right), out):
        product = _product(*pair)
        if product is None:
            return None
        place.copy_(product)
    return out


def _depthwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> torch.Tensor | None:
    """x [rows, channels, length], weight [channels, 1, taps]: a convolution of each channel by itself, of stride 1. The
    taps are added in their order, in fp32."""
    (stride, padding, dilation), transposed, _, groups = geometry[:3], *geometry[3:]
    is_known = x.is_cpu and x.ndim == 3 and groups == x.shape[1] == len(weight) and not transposed
    if not is_known or list(stride) != [1] or list(dilation) != [1]:
        return None
    x, taps = torch.nn.functional.pad(x.float(), (padding[0], padding[0])), weight.shape[2]
    length = x.shape[2] - taps + 1
    total = x[:, :, :length] * weight[:, :, 0].float()
    for tap in range(1, taps):
        total = total + x[:, :, tap : tap + length] * weight[:, :, tap].float()
    return (total if bias is None else total + bias.float()[:, None]).to(weight.dtype)


def _in_whole_vectors(func: Any, x: torch.Tensor, rest: Any, kwargs: dict[str, Any], *, in_place: bool) -> Any:
    count, threads = x.numel(), torch.get_num_threads()
    # torch divides the numbers among its threads, so each thread's share must be whole vectors.
    if not (func.overloadpacket.__name__.startswith("gelu") and count > _GELU_GRAIN):  # which all threads then share
        threads = max(1, min(threads, -(-count // _GRAIN)))
    if not x.is_cpu or (count % (_VECTORS * threads) == 0 and x.is_contiguous()):
        return func(x, *rest, **kwargs)
    # With ones, at which all of these functions have a value.
    padded = buffers.empty((-(-count // (_VECTORS * threads)) * _VECTORS * threads,), x.dtype).fill_(1)
    padded[:count] = x.reshape(-1)
    result = func(padded, *rest, **kwargs)[:count].view(x.shape)
    return x.copy_(result) if in_place else result
