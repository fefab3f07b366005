"""The native CPU implementation: not built yet."""

from __future__ import annotations


def is_available() -> bool:
    return False
