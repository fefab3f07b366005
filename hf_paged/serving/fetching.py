"""Fetches images, videos and audio for requests, from the hosts that the operator has named, with httpx.

Each address is checked after its name has been resolved, and that address is connected to: a name that is resolved
again may have another one. Redirects are followed here, each checked as the first URL was.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from hf_paged.serving.settings import Settings

try:
    import httpx
except ImportError:  # a server that fetches nothing
    httpx = None  # type: ignore[assignment]

# Few: each is a host to resolve and to check, within the time for one file.
_REDIRECTS = 3
# Less than a file may take, so that a host's next address is tried if one does not answer.
_CONNECT_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443}


class CannotFetch(Exception):
    """The message is for the client."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(message)
        self.url = url


class _Refused(Exception):
    """A file is not fetched, for the reason in the message."""


class _Allowance:
    """The bytes that a request may still fetch."""

    def __init__(self, most: int) -> None:
        self._most = self.num_bytes = most

    def check(self, count: int) -> None:
        if count > self.num_bytes:
            raise _Refused(f"the files that a request fetches may have {self._most} bytes, and these have more")


class Fetcher:
    """Used on the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._limits = settings.limits
        self._private = frozenset(settings.private_media_hosts)
        self._hosts = self._private.union(settings.media_hosts)
        if self._hosts and httpx is None:
            raise ValueError(
                "to fetch media the server needs httpx: pip install -e '.[media]' in a checkout of hf_paged"
            )
        self._at_once = asyncio.Semaphore(self._limits.fetches)
        # Threads of their own: a name server that does not answer would take those of the event loop.
        self._resolving = ThreadPoolExecutor(4, "hf-paged-dns")
        self._context: ssl.SSLContext | None = None

    def close(self) -> None:
        self._resolving.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def fetched(self, urls: Sequence[str]) -> AsyncIterator[dict[str, bytes]]:
        """The files of a request. Few requests have some at a time, so the context should end soon. Raises CannotFetch,
        also for what is larger, or takes longer, than the limits allow."""
        async with self._at_once if urls else nullcontext():
            left = _Allowance(self._limits.media_bytes)
            tasks = {url: asyncio.ensure_future(self._fetch(url, left)) for url in dict.fromkeys(urls)}
            try:
                yield {url: await task for url, task in tasks.items()}
            finally:
                for task in tasks.values():
                    task.cancel()
                await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _fetch(self, url: str, left: _Allowance) -> bytes:
        if not self._hosts:
            raise CannotFetch(
                url,
                "this server fetches nothing (--allow-media-urls names hosts for it); send the data itself: "
                "data:image/png;base64,...",
            )
        try:
            # Over all redirects: each alone could be just in time.
            async with asyncio.timeout(self._limits.media_seconds):
                return await self._followed(url, left)
        except TimeoutError:
            raise CannotFetch(url, f"it has not arrived within {self._limits.media_seconds:g} seconds") from None
        except _Refused as error:
            raise CannotFetch(url, str(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise CannotFetch(url, f"it cannot be fetched: {type(error).__name__}") from None

    async def _followed(self, url: str, left: _Allowance) -> bytes:
        for _ in range(_REDIRECTS + 1):
            body = await self._got(self._checked(url), left)
            if isinstance(body, bytes):
                return body
            url = body
        raise _Refused(f"it is redirected more than {_REDIRECTS} times")

    def _checked(self, url: str) -> Any:
        """The URL. Raises _Refused for one that is not allowed."""
        target = httpx.URL(url)
        if target.scheme not in _PORTS:
            raise _Refused(f"its scheme is {target.scheme[:20]!r}; http, https and data are read")
        if target.userinfo:
            raise _Refused("it has a user or a password; leave them out")
        if self._hosts.isdisjoint(names := _names(target)):
            raise _Refused(
                f"this server does not fetch from {names[0][:99]!r}; its operator may allow it (--allow-media-urls)"
            )
        return target

    async def _got(self, target: Any, left: _Allowance) -> bytes | str:
        """Return the file's content, or the URL to which the host redirects."""
        addresses = await self._addresses(target)
        if self._context is None:
            self._context = httpx.create_ssl_context()
        # A client for each: no cookie, and no connection, is another request's.
        async with httpx.AsyncClient(
            verify=self._context,
            trust_env=False,  # a proxy would resolve the name itself
            timeout=httpx.Timeout(self._limits.media_seconds, connect=_CONNECT_SECONDS),
        ) as client:
            for place, address in enumerate(addresses):
                request = client.build_request(
                    "GET",
                    # The address that was checked: the name could resolve to another one now.
                    target.copy_with(host=address, fragment=None),
                    headers={"host": target.netloc.decode(), "accept-encoding": "identity"},
                    extensions={"sni_hostname": target.raw_host.decode()},  # and whose certificate it has to be
                )
                try:
                    response = await client.send(request, stream=True, follow_redirects=False)
                # A name often has an address that this machine cannot reach (IPv6).
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    if place + 1 == len(addresses):
                        raise
                    continue
                try:
                    return await self._read(response, target, left)
                finally:
                    await response.aclose()
        raise AssertionError("there is an address")

    async def _read(self, response: Any, target: Any, left: _Allowance) -> bytes | str:
        if response.has_redirect_location:
            return str(target.join(response.headers.get("location", "")))
        if response.status_code != 200:
            raise _Refused(f"its host answers with status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _Refused(f"its host sends it as {response.headers['content-encoding'][:20]!r}, which is not asked")
        # The header first, so that a large file is refused before it comes.
        left.check(int(response.headers.get("content-length", "0")))
        body = bytearray()
        async for part in response.aiter_raw():
            left.check(len(part))
            left.num_bytes -= len(part)
            body += part
        return bytes(body)

    async def _addresses(self, target: Any) -> list[str]:
        """Resolve the host. Raises _Refused for an address that is not public, unless the operator allows the host."""
        host, port = target.raw_host.decode().strip("[]"), target.port or _PORTS[target.scheme]
        found = await asyncio.get_running_loop().run_in_executor(
            self._resolving, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        # Unless the operator has said that this host may be an inner one.
        if self._private.isdisjoint(_names(target)):
            check_public(host, addresses)
        return addresses


def check_public(host: str, addresses: Sequence[str]) -> None:
    """Raise _Refused unless all of them are addresses of the internet."""
    if not all(map(_is_public, addresses)):
        raise _Refused(f"{host[:100]!r} has a private address; the operator may allow it (--allow-private-media-hosts)")


def _is_public(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # with a zone: of one link
        return False
    if address.version == 6 and (address.sixtofour is not None or address.is_site_local):  # leads elsewhere, or inside
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _names(target: Any) -> list[str]:
    """Return the names by which the operator may allow the host; without a port (first) only for the scheme's own."""
    host = target.raw_host.decode().lower().rstrip(".")
    host = f"[{host}]" if ":" in host else host
    usual = _PORTS[target.scheme]
    with_port = f"{host}:{target.port or usual}"
    return [host, with_port] if target.port in (None, usual) else [with_port]
