"""The files of the live page. They are the same for everyone and need no key; the data that they ask for does."""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath

from starlette.responses import Response

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FOLDER = files("hf_paged.serving") / "page"
_INDEX = "index.html"

PAGE_FILES = {
    "/" if each.name == _INDEX else f"/page/{each.name}": each.name
    for each in _FOLDER.iterdir()
    if PurePath(each.name).suffix in _TYPES
}
"""Path -> file."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_file(path: str) -> Response:
    name = PAGE_FILES[path]
    content = (_FOLDER / name).read_bytes()
    return Response(content, media_type=_TYPES[PurePath(name).suffix], headers=_HEADERS)
