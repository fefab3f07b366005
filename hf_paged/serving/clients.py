"""Has the client gone? Work for one that has is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_Result = TypeVar("_Result")


async def unless_gone(work: Coroutine[Any, Any, _Result], receive: Receive) -> _Result | None:
    """The result of the work; None if the client has gone before. The work is then cancelled."""
    gone, working = asyncio.ensure_future(until_gone(receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
