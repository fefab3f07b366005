"""Media that the server fetches: from which hosts, to which addresses, within which limits. The hosts are here."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from hf_paged.cli import serve_values as command
from hf_paged.cli.common import UsageError
from hf_paged.serving import fetching
from hf_paged.serving.fetching import CannotFetch, Fetcher, check_public
from hf_paged.serving.settings import Limits, Settings
from tests.serving.harness import NAME, Running, serving
from tests.serving.seeing import expected, messages, model, picture, processor, tokenizer, url
from tests.waiting import must

PICTURE = picture(21)
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


def reply(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def moved(where: str) -> bytes:
    return reply(b"", "302 Found", f"Location: {where}")


class Host:
    """A host of media on 127.0.0.1, which knows what it was asked."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.port = 0
        self.forever = asyncio.Event()

    async def answer(self, reader: Reader, writer: Writer) -> None:
        if (head := await reader.read(1)) == b"\x16":  # TLS, which is not spoken here
            return writer.close()
        head += await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        path = head.split()[1].decode()
        try:
            await self.send(path, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def send(self, path: str, writer: Writer) -> None:
        own = f"http://127.0.0.1:{self.port}"
        known = {
            "/a.png": reply(PICTURE), "/once": moved("/a.png"), "/thrice": moved("/twice"),
            "/twice": moved(f"{own}/once"), "/loop": moved("/loop"), "/to-private": moved("http://10.0.0.1/a.png"),
            "/to-metadata": moved("http://169.254.169.254/latest/meta-data/"),
            "/to-other-port": moved("http://127.0.0.1:1/a.png"), "/to-file": moved("file:///etc/passwd"),
            "/to-name": moved(f"http://localhost:{self.port}/a.png"),
            "/to-nothing": reply(b"", "302 Found", "Location: http://"), "/to-nowhere": reply(b"", "302 Found"),
            "/not-modified": reply(b"", "304 Not Modified"), "/missing": reply(b"no", "404 Not Found"),
            "/empty": reply(b""), "/page": reply(b"<html>", "200 OK", "Content-Type: image/png"),
            "/zipped": reply(b"\x1f\x8b\x08" + bytes(40), "200 OK", "Content-Encoding: gzip"),
            "/claims": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
            "/garbage": b"\x00\x01\x02 this is no HTTP\r\n\r\n",
            "/cut-off": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + bytes(10),
            "/cookie": reply(PICTURE, "200 OK", "Set-Cookie: a=b"),
            "/head": b"HTTP/1.1 200 OK\r\n" + b"X-Fill: " + b"x" * 2**21 + b"\r\n\r\n",
        }  # fmt: skip
        if path in known:
            writer.write(known[path])
            return
        if path == "/silent":
            await self.forever.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:  # "/endless", and "/drip", which is slow
            writer.write(b"10000\r\n" + bytes(2**16) + b"\r\n" if path == "/endless" else b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0 if path == "/endless" else 0.02)


@contextmanager
def hosting(context: ssl.SSLContext | None = None) -> Iterator[Host]:
    host, ready, loop = Host(), threading.Event(), asyncio.new_event_loop()

    async def run() -> None:
        server = await asyncio.start_server(host.answer, "127.0.0.1", 0, ssl=context)
        host.port = server.sockets[0].getsockname()[1]
        ready.set()
        await host.forever.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    must(ready.wait(60), "the host has not started")
    try:
        yield host
    finally:
        loop.call_soon_threadsafe(host.forever.set)
        thread.join(60)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosting() as made:
        yield made


@pytest.fixture(scope="module")
def server(host: Host) -> Iterator[Running]:
    with serving(
        model=model(),
        made_tokenizer=tokenizer(),
        processor=processor(),
        limits=Limits(media_bytes=2**20),
        private_media_hosts=(f"127.0.0.1:{host.port}",),
        media_hosts=("localhost",),
    ) as running:
        yield running


def ask(server: Running, *urls: str) -> Any:
    return server.client.chat.completions.create(model=NAME, temperature=0, max_tokens=12, messages=messages(*urls))


def at(host: Host, path: str) -> str:
    return f"http://127.0.0.1:{host.port}{path}"


def test_an_image_is_fetched(host: Host, server: Running) -> None:
    for path in ("/a.png", "/once", "/thrice", "/cookie", "/a.png#part"):
        answer = ask(server, at(host, path))
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected(PICTURE), path
        head = host.heads[-1].lower()
        assert f"\r\nhost: 127.0.0.1:{host.port}\r\n".encode() in head
        assert b"\r\ncookie:" not in head and b"authorization" not in head


def test_a_request_fetches_a_url_once(host: Host, server: Running) -> None:
    before = len(host.heads)
    other = picture(4)
    text = ask(server, at(host, "/a.png"), url(other), at(host, "/a.png")).choices[0].message.content
    assert text == expected(PICTURE, other, PICTURE)[0] and len(host.heads) == before + 1


REFUSED = {
    "/loop": "redirected more than 3 times", "/to-private": "does not fetch from '10.0.0.1'",
    "/to-metadata": "does not fetch from '169.254.169.254'", "/to-other-port": "does not fetch from '127.0.0.1:1'",
    "/to-file": "its scheme is 'file'", "/to-name": "does not fetch from 'localhost:", "/to-nothing": "messages",
    "/to-nowhere": "its host answers with status 302", "/not-modified": "its host answers with status 304",
    "/missing": "its host answers with status 404", "/empty": "is no image", "/page": "is no image",
    "/zipped": "sends it as 'gzip'", "/claims": "may have 1048576 bytes", "/endless": "may have 1048576 bytes",
    "/garbage": "cannot be fetched", "/cut-off": "cannot be fetched", "/head": "cannot be fetched",
}  # fmt: skip


def test_what_a_host_does_is_refused(host: Host, server: Running) -> None:
    asked = {path: server.beside(ask, server, at(host, path)) for path in REFUSED}
    assert ask(server, url(PICTURE)).choices[0].message.content == expected(PICTURE)[0]
    for path, why in REFUSED.items():
        error = asked[path].exception(120)
        assert isinstance(error, openai.BadRequestError), path
        assert re.search(why, str(error)) and "messages[0]" in str(error), path
    server.assert_idle()


def test_a_host_that_is_slow(host: Host) -> None:
    limits = Limits(media_bytes=2**20, media_seconds=0.1)
    settings = Settings(names=("a",), limits=limits, private_media_hosts=(f"127.0.0.1:{host.port}",))
    for path in ("/silent", "/drip"):
        with pytest.raises(CannotFetch, match=r"not arrived within 0\.1 seconds"):
            fetched(settings, at(host, path))


def other_urls(port: int) -> dict[str, str]:
    return {
        f"http://localhost:{port}/a.png": "does not fetch from 'localhost:",
        "http://localhost/a.png": "'localhost' has a private address",
        "https://localhost/a.png": "'localhost' has a private address",
        f"http://user@127.0.0.1:{port}/a.png": "user or a password",
        f"https://127.0.0.1:{port}/a.png": "cannot be fetched",  # no TLS there
        f"http://127.1:{port}/a.png": "does not fetch from",
        f"http://2130706433:{port}/a.png": "does not fetch from",
        f"http://[::ffff:127.0.0.1]:{port}/a.png": "does not fetch from",
        f"http://127.0.0.1:{port}@example.org/a.png": "user or a password",
        "http://example.org/a.png": "does not fetch from 'example.org'",
        "http://xn--/a.png": "messages",
        "http://:80/": "messages",
        "http://127.0.0.1:99999999/": "messages",
        "http://\u2488.example/": "messages",
        "http:///a.png": "messages",
        "https://" + "a" * 70_000 + ".org/": "messages",
        "gopher://localhost/": "write data:image",
    }


def test_other_hosts_and_addresses(host: Host, server: Running) -> None:
    before = len(host.heads)
    for each, why in other_urls(host.port).items():
        with pytest.raises(openai.BadRequestError, match=why):
            ask(server, each)
    assert len(host.heads) == before


PRIVATE = (
    "10.0.0.1 127.0.0.1 169.254.169.254 192.168.1.1 172.16.0.1 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 240.0.0.1 "
    "::1 :: fe80::1%eth0 fe80::1 fc00::1 ff02::1 ::ffff:8.8.8.8 64:ff9b::a00:1 2002:a00:1:: 2001:db8::1 198.51.100.1 "
    "fec0::1"
)


def test_private_addresses() -> None:
    for address in PRIVATE.split():
        with pytest.raises(Exception, match="private address"):
            check_public("example.org", ["93.184.215.14", address])
    check_public("example.org", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])


def fetched(settings: Settings, url: str) -> bytes:
    async def run() -> bytes:
        fetcher = Fetcher(settings)
        async with fetcher.fetched([url]) as found:
            fetcher.close()
            return found[url]

    return asyncio.run(run())


def test_the_checked_address_is_connected_to(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name gets no other address after its check; one with a private address beside a public one is refused."""
    asked: list[str] = []
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    own = socket.getaddrinfo

    def resolve(name: Any, *args: Any, **options: Any) -> Any:
        if name != "media.example":
            return own(name, *args, **options)
        asked.append(name)
        found = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, args[0])) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    key = f"media.example:{host.port}"
    settings = Settings(names=("a",), private_media_hosts=(key,))
    assert fetched(settings, f"http://{key}/a.png") == PICTURE and asked == ["media.example"]
    assert f"\r\nhost: {key}\r\n".encode() in host.heads[-1].lower()
    asked.clear()
    answers[0] = ["93.184.215.14", "127.0.0.1"]
    with pytest.raises(CannotFetch, match="private address"):
        fetched(Settings(names=("a",), media_hosts=(key,)), f"http://{key}/a.png")


def test_an_address_that_is_not_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: both)
    key = f"media.example:{host.port}"
    assert fetched(Settings(names=("a",), private_media_hosts=(key,)), f"http://{key}/a.png") == PICTURE


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_certificate_has_to_be_that_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though an address is connected to."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=media.example"]
    command += ["-addext", "subjectAltName=DNS:media.example", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(fetching.httpx, "create_ssl_context", lambda: trusting)
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: here)
    with hosting(own) as host:
        names = [f"{name}.example:{host.port}" for name in ("media", "other")]
        settings = Settings(names=("a",), private_media_hosts=tuple(names))
        assert fetched(settings, f"https://{names[0]}/a.png") == PICTURE
        with pytest.raises(CannotFetch, match="cannot be fetched: ConnectError"):
            fetched(settings, f"https://{names[1]}/a.png")


def test_nothing_is_fetched_by_default() -> None:
    running = serving(model=model(), made_tokenizer=tokenizer(), processor=processor())
    with running as server, pytest.raises(openai.BadRequestError, match="this server fetches nothing"):
        ask(server, "https://example.org/a.png")


def test_names_of_hosts() -> None:
    """With the scheme's own port or without it; another scheme's is another port."""
    fetcher = Fetcher(Settings(names=("a",), media_hosts=("example.org:443", "other.org", "[2001:db8::1]:80")))
    for allowed in ("https://example.org/a", "https://example.org:443/", "http://other.org:80/", "https://other.org/"):
        fetcher._checked(allowed)
    fetcher._checked("http://[2001:db8::1]/a")
    for refused in ("http://example.org/a", "http://other.org:443/", "https://[2001:db8::1]/"):
        with pytest.raises(Exception, match="does not fetch from"):
            fetcher._checked(refused)
    fetcher.close()


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"allow_media_urls": ["Example.org, cdn.example.org:8443", "other.org"]}
    assert command._hosts("allow_media_urls", given) == ("example.org", "cdn.example.org:8443", "other.org")
    assert command._media_limits('{"image": 3, "audio": 0}') == {"images": 3, "recordings": 0}
    for wrong in ('{"text": 1}', "[]", "{"):
        with pytest.raises(UsageError, match="--limit-mm-per-prompt"):
            command._media_limits(wrong)
    with pytest.raises(ValueError, match="is no host for media"):
        Settings(names=("a",), media_hosts=("https://example.org/",))
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs httpx"):
        command._hosts("allow_media_urls", given)
