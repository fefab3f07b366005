"""The C structs of the kernels, field for field as in partition.h and kernels.h, and the signatures of their functions.

Addresses are integers.
"""

from __future__ import annotations

import ctypes

import torch

_INTEGER, _POINTER, _REAL, _INT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double, ctypes.c_int


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, _INTEGER) for name in names]


class Bounds(ctypes.Structure):
    """Bounds on how far back a query sees (`kernels.bounds`). 0: that bound does not apply."""

    _fields_ = _integers("sliding_window", "chunk_size")


class Step(ctypes.Structure):
    """The arguments of `hfp_partition` and `hfp_check`."""

    _fields_ = [
        *_integers("tables", "seq_lens", "starts", "seqs", "table_stride", "num_seqs", "block_size"),
        ("bounds", Bounds),
        *_integers("max_count", "share", "reach"),
    ]


class WriteStrides(ctypes.Structure):
    """The strides of a write of K/V, in bytes."""

    _fields_ = _integers(
        "k_token", "k_head", "k_size", "v_token", "v_head", "v_size",
        "kc_block", "kc_slot", "kc_head", "vc_block", "vc_slot", "vc_head",
    )  # fmt: skip


class Store(ctypes.Structure):
    """Storage of K or V: the kind of its elements (see `STORED`), and the scales, with their strides in elements."""

    _fields_ = _integers("kind", "scales", "block", "slot", "head")


STORED = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""`Store.kind` of a dtype of eight bits. 0: the dtype of the query, without scales."""


class Span(ctypes.Structure):
    """A run of bytes that `hfp_copy_blocks` copies in every block."""

    _fields_ = _integers("source", "source_block", "target", "target_block", "size")


class Call(ctypes.Structure):
    """The arguments of `hfp_attention` and `hfp_prefill`."""

    _fields_ = [
        *_integers(
            "query", "key", "value", "out", "lse", "sinks", "slopes", "tables", "partition", "workspace",
            "q_token", "q_head", "k_block", "k_token", "k_head", "v_block", "v_token", "v_head", "o_token", "o_head",
            "table_stride", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "block_size",
        ),
        ("bounds", Bounds),
        *_integers("threads", "new_key", "new_value", "slots", "num_tokens"),
        ("strides", WriteStrides),
        ("key_store", Store),
        ("value_store", Store),
        ("scale", _REAL),
        ("softcap", _REAL),
    ]  # fmt: skip
    held: object = None
    """Tensors that must live as long as the call, which has only their addresses."""


class Prompts(ctypes.Structure):
    """The sequences that `hfp_prefill` computes."""

    _fields_ = _integers("seq_lens", "starts", "seqs", "num_seqs", "reach")


_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "hfp_check": ([_POINTER, *[_INTEGER] * 4], _INTEGER),
    "hfp_partition_bytes": ([_POINTER], _INTEGER),
    "hfp_partition": ([_POINTER, _POINTER], None),
    "hfp_partition_counts": ([_POINTER, _POINTER], None),
    "hfp_workspace_bytes": ([_POINTER, *[_INTEGER] * 5], _INTEGER),
    "hfp_attention": ([_POINTER, _INT], _INT),
    "hfp_prefill_bytes": ([_INTEGER] * 3, _INTEGER),
    "hfp_prefill": ([_POINTER, _INT, _POINTER], _INT),
    "hfp_has_f16": ([], _INT),
    "hfp_use_openmp": ([_POINTER, _POINTER], None),
    "hfp_hold_threads": ([_INT], _INT),
    "hfp_target": ([], ctypes.c_char_p),
    "hfp_write_kv": ([*[_POINTER] * 5, *[_INTEGER] * 3, *[_POINTER] * 3, _INT, _INTEGER], _INT),
    "hfp_copy_blocks": ([_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER], None),
    "hfp_greedy": ([_POINTER, _INT, *[_INTEGER] * 3, _POINTER, _POINTER, _INTEGER], _INT),
    "hfp_draw": ([_POINTER, *[_INTEGER] * 3, _POINTER, _INT, _POINTER, _INTEGER], None),
    "hfp_generator_bytes": ([], _INTEGER),
    "hfp_draw_top_p": ([_POINTER, *[_INTEGER] * 3, *[_POINTER] * 4, _INT, _POINTER, _INTEGER], None),
    "hfp_keep_largest_scratch": ([_INTEGER], _INTEGER),
    "hfp_keep_largest": ([_POINTER, *[_INTEGER] * 3, _POINTER, _POINTER, _INTEGER], _INTEGER),
    "hfp_packs": ([], _INT),
    "hfp_in_one_order": ([_INT], _INT),
}
# Of decoder layers, for each dtype: its name is appended to those for other dtypes than bf16. The structs are in
# fused/cpu/structs.py.
_LAYER_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "hfp_linear_workspace": ([_INTEGER] * 3, _INTEGER),
    "hfp_linear": ([_POINTER], None),
    "hfp_rms_norm": ([*[_POINTER] * 3, _INTEGER, _INTEGER, _REAL, _INTEGER], None),
    "hfp_rotate": ([_POINTER], None),
    "hfp_layer_in_workspace": ([_INTEGER] * 3, _INTEGER),
    "hfp_layer_in": ([_POINTER], None),
    "hfp_layer_out_workspace": ([_INTEGER] * 5, _INTEGER),
    "hfp_layer_out": ([_POINTER], None),
    "hfp_decode_layers": ([*[_POINTER] * 3, _INTEGER], None),
}
# Only if `hfp_packs`, in bf16.
_PACKING_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "hfp_packed_bytes": ([_INTEGER] * 3, _INTEGER),
    "hfp_pack_linear": ([_POINTER, *[_INTEGER] * 3, _POINTER, _INTEGER], None),
    "hfp_experts": ([_POINTER], _INTEGER),
    "hfp_draft_workspace": ([_INTEGER] * 3, _INTEGER),
    "hfp_draft": ([_POINTER], _INTEGER),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the argument and result types of the library's functions."""
    signatures = _SIGNATURES | (_PACKING_SIGNATURES if library.hfp_packs() else {})
    for ending in ("", "_f32", *(["_f16"] if library.hfp_has_f16() else [])):
        signatures |= {name + ending: types for name, types in _LAYER_SIGNATURES.items()}
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
