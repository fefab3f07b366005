"""The chain of a prompt (see `routing`) from the body of a request, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hf_paged.serving.routing import chain_of

# Bytes of text: about as much as the 16 tokens of a block of K/V.
BLOCK_BYTES = 64
# Of one prompt: requests that differ only after these are alike for the router.
MOST_BLOCKS = 512
# Ids are below 2^31 (`schema.TokenId`).
_TOKEN_BYTES = 4


def prompt_chain(body: bytes) -> tuple[str | None, tuple[int, ...]]:
    """Return the model that a request names, and the chain of its first prompt; (None, ()) for other bodies.

    Two requests have a common beginning of their chains if their messages (or prompts), their tools, model and
    `cache_salt` begin alike. Nothing is checked here: the replica refuses what is wrong.
    """
    try:
        fields = json.loads(body)
        whole = b"".join(_parts(fields))[: BLOCK_BYTES * MOST_BLOCKS] if isinstance(fields, dict) else b""
    except (ValueError, RecursionError):
        return None, ()
    if not isinstance(fields, dict):
        return None, ()
    model = fields.get("model")
    # What else keeps prefixes apart is in the chain from its first entry on.
    root = repr((model, fields.get("cache_salt"))).encode(errors="replace")
    starts = range(0, len(whole) - BLOCK_BYTES + 1, BLOCK_BYTES)
    chain = chain_of(root, (whole[start : start + BLOCK_BYTES] for start in starts))
    return model if isinstance(model, str) else None, chain


def _parts(fields: dict[str, Any]) -> Iterator[bytes]:
    """Yield the parts of the prompt as bytes, in the order in which chat templates join them."""
    if fields.get("tools"):
        yield _bytes(fields["tools"])
    for name in ("system", "instructions", "messages", "input", "prompt"):
        value = fields.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], dict):
            value = value if isinstance(value[0], int) else value[0]  # token ids, or the first of several prompts
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            yield _bytes(each)


def _bytes(value: Any) -> bytes:
    if isinstance(value, int) and 0 <= value < 2 ** (8 * _TOKEN_BYTES):  # a token id
        return value.to_bytes(_TOKEN_BYTES)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text.encode(errors="replace")
