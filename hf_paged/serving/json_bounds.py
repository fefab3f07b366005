"""Bounds of JSON that hold before it is parsed, or used: parsing millions of small values takes seconds."""

from __future__ import annotations

import re
from typing import Any

from hf_paged.serving.problems import Problem

MAX_CONTAINERS = 2**16
MAX_DEPTH = 128

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_containers(data: bytes, what: str, param: str | None = None) -> None:
    """Raises Problem (400) for JSON with too many lists and objects, or in another encoding than UTF-8.

    These are what costs: each is an object of Python's that its garbage collector visits.
    """
    if b"\0" in data:  # as all other encodings of JSON have
        raise Problem(400, f"{what} is not JSON in UTF-8", param=param)
    if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS:
        return
    bare = _STRING.sub(b"", data)
    count = bare.count(b"[") + bare.count(b"{")
    if count > MAX_CONTAINERS:
        raise Problem(400, f"{what} has {count} lists and objects; at most {MAX_CONTAINERS} are read", param=param)


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raises ValueError for lists and objects that are nested too deeply for programs that follow them."""
    if not isinstance(value, dict | list):
        return
    if not left:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    for each in value.values() if isinstance(value, dict) else value:
        check_depth(each, left - 1)
