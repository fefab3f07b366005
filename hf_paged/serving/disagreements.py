"""Contradictions among the files of a checkpoint or an adapter, in words that name what the server does.

Looks at a model, a tokenizer and texts; decides nothing. `ServedModel` acts by the same functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_paged.annotations import Model, Tokenizer

_TOOL = {
    "type": "function",
    "function": {"name": "is_this_read", "description": "x", "parameters": {"type": "object", "properties": {}}},
}


def tokens_of(given: Any) -> frozenset[int]:
    """The ids of a config's field, which is an id, a list of ids, or None."""
    return frozenset(() if given is None else (given,) if isinstance(given, int) else given)


def turn_ends(model: Model, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer in a chat: of `generate`, and the tokenizer's, with which chat templates
    end a message."""
    own = getattr(tokenizer, "eos_token_id", None)
    return tokens_of(model.generation_config.eos_token_id) | tokens_of(own)


def renders_tools(tokenizer: Tokenizer, template: str | None) -> bool:
    """Return True if a chat template (None: the tokenizer's) puts a request's tools into the prompt, or fails here."""
    messages = [{"role": "user", "content": "x"}]
    try:
        text = tokenizer.apply_chat_template(messages, tools=[_TOOL], chat_template=template, tokenize=False)
    except Exception:  # there is none, or it refuses in a way of its own, as it will with requests
        return True
    return "is_this_read" in str(text)


def disagreements(model: Model, tokenizer: Tokenizer, template: str | None) -> list[str]:
    """template: of chats, in place of the tokenizer's."""
    found, ends = [], tokens_of(model.generation_config.eos_token_id)
    own, named = getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "eos_token", None)
    if own is not None and own not in ends:
        found.append(
            f"the tokenizer's EOS is {named!r} ({own}), and generation_config has {sorted(ends) or 'none'}: chats end "
            "at both; completions end as `generate` does"
        )
    others = tokens_of(getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)) - ends
    if others:
        found.append(
            f"config.json has the EOS {sorted(others)}, and generation_config has {sorted(ends) or 'none'}: as in "
            "`generate`, the latter counts; put them there if answers run on"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    # More rows than tokens are common (padding); fewer are not.
    if len(tokenizer) > rows:
        found.append(
            f"the tokenizer has {len(tokenizer)} tokens, and the model {rows}: texts with one of the others are refused"
        )
    if not renders_tools(tokenizer, template):
        found.append(
            "the chat template does not render tools: requests with tools are refused; give one that does, with "
            "--chat-template"
        )
    return found


def of_adapter(folder: str, tokenizer: Tokenizer, template: Any) -> list[str]:
    """Describe the chat template and the tokens in an adapter's folder that the server ignores. template: of chats."""
    found, path = [], Path(folder)
    own = _read(path / "chat_template.jinja")
    config = _json(path / "tokenizer_config.json")
    own = own if own is not None else config.get("chat_template")
    if own is not None and own != template:
        found.append("its chat template differs from the one in use, which renders its requests too; serve it alone")
    added = _json(path / "tokenizer.json").get("added_tokens")
    others = {each.get("content") for each in added or () if isinstance(each, dict)} - tokenizer.get_vocab().keys()
    if others:
        found.append(f"its tokenizer adds {min(map(str, others))!r}, which the tokenizer in use does not know")
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(_read(path) or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
