"""The C structs of the kernels for decoder layers, field for field as in native/layers.h; addresses are integers."""

from __future__ import annotations

import ctypes


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


def _reals(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_double) for name in names]


class Linear(ctypes.Structure):
    _fields_ = _integers(
        "x", "rows", "columns", "depth", "weight", "bias", "packed", "out", "workspace", "threads",
        "scales", "rounds",
    )  # fmt: skip


class Rotated(ctypes.Structure):
    _fields_ = _integers("x", "token", "head", "heads", "out")


class Rotate(ctypes.Structure):
    _fields_ = [("query", Rotated), ("key", Rotated), *_integers("cos", "sin", "tokens", "dim", "threads")]


class Weight(ctypes.Structure):
    _fields_ = _integers("weight", "bias", "columns", "packed", "scales", "rounds")


class LayerIn(ctypes.Structure):
    _fields_ = [
        *_integers("x", "rows", "depth", "head_dim", "norm", "query_norm", "key_norm"),
        ("query", Weight),
        ("key", Weight),
        ("value", Weight),
        *_integers("cos", "sin", "new_query", "new_key", "new_value", "workspace", "threads"),
        *_reals("norm_eps", "query_eps", "key_eps"),
    ]


class LayerOut(ctypes.Structure):
    _fields_ = [
        *_integers("x", "residual", "rows", "x_depth", "depth", "norm"),
        ("output", Weight),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        *_integers("out", "workspace", "threads"),
        *_reals("norm_eps"),
    ]


class Experts(ctypes.Structure):
    _fields_ = _integers(
        "x", "index", "weights", "tokens", "top_k", "depth", "inner", "experts", "rounds", "gate_up", "down", "packed",
        "out", "places", "rows", "both", "results", "workspace", "threads",
    )  # fmt: skip


class Head(ctypes.Structure):
    _fields_ = [*_integers("coarse", "scales", "exact", "norm"), *_reals("eps"), *_integers("vocab", "depth")]


class Draft(ctypes.Structure):
    """The struct of native/draft.c."""

    _fields_ = [
        ("head", Head),
        *_integers(
            "ins", "calls", "outs", "layers", "step", "partition", "seq_lens", "positions", "slots", "embedding",
            "cos", "sin", "hidden", "x", "angles", "rows", "head_dim", "steps", "workspace", "threads", "tokens",
            "logprobs",
        ),
        *_reals("least"),
    ]  # fmt: skip
