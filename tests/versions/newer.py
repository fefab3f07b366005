"""Renames the caches of the installed transformers as a later one might, by changing its sources on import."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

VERSION = "5.99.0"
_RENAMED = frozenset(
    f"transformers.{name}"
    for name in ("generation.utils", "masking_utils", "modeling_outputs", "models.llama.modeling_llama")
)
_get_code = SourceFileLoader.get_code


def pretend(*, renames: bool = True) -> None:
    """Change the sources of transformers as they are imported; call this first. renames: not the version alone."""
    SourceFileLoader.get_code = (  # type: ignore[method-assign]
        lambda loader, fullname: _changed(loader, fullname, renames)  # type: ignore[assignment, misc]
    )


def _changed(loader: SourceFileLoader, fullname: str, renames: bool) -> CodeType | None:
    if fullname != "transformers" and not (renames and fullname in _RENAMED):
        return _get_code(loader, fullname)
    source = loader.get_data(loader.path).decode()
    if fullname == "transformers":
        source = re.sub(r'^__version__ = ".*"', f'__version__ = "{VERSION}"', source, flags=re.MULTILINE)
    else:
        # Where the name is "cache", the former one still stands in decorators.
        llama = Path(loader.path.partition("transformers/")[0], "transformers/models/llama/modeling_llama.py")
        name = "cache" if "    cache: Cache" in llama.read_text() else "past_key_values"
        source = re.sub(rf"(?<![\w./]){name}\b|(?<=outputs\.){name}\b", "kv_store", source)
    return compile(source, loader.path, "exec", dont_inherit=True)
