"""Tests of chat templates. The command line uses them without the packages of the server."""

from __future__ import annotations

from hf_paged.annotations import Tokenizer


def reads_parts(tokenizer: Tokenizer, template: str | None) -> bool:
    """Return True if a chat template (None: the tokenizer's) shows messages as lists of parts only. Templates of some
    processors drop or refuse plain text."""
    text = "Is this read?"
    shown = []
    for content in (text, [{"type": "text", "text": text}]):
        messages = [{"role": "user", "content": content}]
        try:
            shown.append(text in str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)))
        except Exception:  # there is none, or it refuses in a way of its own
            shown.append(False)
    return shown == [False, True]
