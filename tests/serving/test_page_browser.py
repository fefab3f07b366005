"""The live page in a real browser: a conversation, a load, the API key, and the keyboard."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import hf_paged
from hf_paged.generation.engine.snapshots import INTERVAL
from tests.serving import browser as browsers
from tests.serving import seeing
from tests.serving.harness import KEY, serving
from tests.waiting import Gate

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browsers.missing() is not None, reason=browsers.missing() or "")]
QUESTION = "What does str.capitalize() do?"


@pytest.fixture(scope="module")
def tab() -> Iterator[browsers.Browser]:
    with browsers.browsing() as browser:
        yield browser


def problems(tab: browsers.Browser, url: str) -> list[str]:
    """Of this server; the page of the one before may still ask for it."""
    return [line for line in tab.log() if url in line]


def tile(tab: browsers.Browser, index: int) -> str:
    return str(tab.run("return document.querySelectorAll('#tiles .big')[arguments[0]].textContent", index))


def step_until(tab: browsers.Browser, gate: Gate, script: str) -> None:
    """Lets steps follow each other so slowly that each leaves a snapshot, and that the page can ask for it."""
    for _ in range(20):
        gate.wait()
        time.sleep(INTERVAL)
        gate.pass_on(1)
        gate.wait()
        with contextlib.suppress(AssertionError):
            tab.wait(script, seconds=3)
            return
    raise AssertionError(f"20 steps have not brought the page to: {script}")


def test_a_conversation(tab: browsers.Browser) -> None:
    """With a key: the page asks for it, refuses a wrong one, and shows an answer and the blocks that it took."""
    with serving(api_keys=(KEY,)) as running:
        tab.open(running.url + "/")
        tab.wait("return document.activeElement.id === 'key'")
        assert tab.run("return document.getElementById('main').hidden")
        tab.type("#key", "wrong\ue007")
        tab.wait("return document.getElementById('key-note').textContent.includes('does not know')")
        tab.type("#key", KEY + "\ue007")
        tab.wait("return document.getElementById('state').textContent === 'idle'")
        tab.type("#ask-text", QUESTION + "\ue007")
        foot = tab.wait("const f = document.querySelector('#talk .foot'); return f && f.textContent")
        assert "prompt tokens" in foot
        own = running.client.chat.completions.create(
            model="pydoc", messages=[{"role": "user", "content": QUESTION}], max_tokens=96
        )
        tab.wait("return document.querySelectorAll('#table td.block').length")  # of the request, though it was short
        shown = tab.run("return document.querySelector('#talk .answer .turn').textContent")
        assert shown == (own.choices[0].message.content or "").strip()
        gate = Gate(running.engine, 1)
        tab.type("#ask-text", "And str.title()?\ue007")
        step_until(tab, gate, "return document.querySelectorAll('#table td.text').length")
        gate.open()
        tab.wait(
            "return document.querySelectorAll('#talk .foot').length === 2 && "
            "document.querySelectorAll('#talk .foot')[1].textContent"
        )
        # Each block has its text, which arrives after the block, and here after the request's end.
        tab.wait("return [...document.querySelectorAll('#table td.text')].every((each) => each.textContent)")
        again = tab.run("return document.querySelectorAll('#talk .foot')[1].textContent")
        assert " 0 of them" not in again  # the second turn begins with blocks of the first
        assert tab.run("return sessionStorage.getItem('hf-paged-key')") == KEY
        assert [
            line for line in problems(tab, running.url) if "401" not in line
        ] == []  # no script, style or connection was refused


GIVE = """
const bytes = Uint8Array.from(atob(arguments[1]), (each) => each.charCodeAt(0)), data = new DataTransfer();
data.items.add(new File([bytes], arguments[2], { type: arguments[3] }));
const options = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data }, kind = arguments[0];
const area = document.getElementById("ask-text"), files = document.getElementById("ask-files");
if (kind === "change") { files.files = data.files; files.dispatchEvent(new Event(kind)); }
else area.dispatchEvent(kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options));
"""


def test_pictures(tab: browsers.Browser) -> None:
    """Chosen, dropped, pasted; shown before and after sending; removed; others than pictures are refused."""
    pictures = [seeing.picture(shade) for shade in (5, 60, 99)]
    model, processor = seeing.model(), seeing.processor()
    with serving(model=model, made_tokenizer=seeing.tokenizer(), processor=processor) as running:
        tab.open(running.url + "/")
        tab.wait("return document.getElementById('state').textContent === 'idle'")
        assert not tab.run("return document.getElementById('ask-attach').hidden")
        for count, (kind, data) in enumerate(zip(("change", "drop", "paste"), pictures), 1):
            tab.run(GIVE, kind, base64.b64encode(data).decode(), f"{kind}.png", "image/png")
            tab.wait("return document.querySelectorAll('#ask-images img').length === arguments[0]", count)
        tab.click("#ask-images button:nth-child(2)")
        tab.run(GIVE, "drop", base64.b64encode(b"<svg/>").decode(), "x.svg", "image/svg+xml")
        tab.wait("return document.querySelector('#talk .error').textContent.includes('x.svg is image/svg+xml')")
        tab.run("document.getElementById('ask-tokens').value = 12")
        tab.type("#ask-text", seeing.QUESTION + "\ue007")
        tab.wait("const f = document.querySelector('#talk .foot'); return f && f.textContent")
        shown = tab.run("return document.querySelector('#talk .answer .turn').textContent")
        own = running.client.chat.completions.create(
            model="pydoc", messages=seeing.messages(*map(seeing.url, pictures[::2])), max_tokens=12
        )
        assert shown == (own.choices[0].message.content or "").strip()
        assert tab.run("return [...document.querySelectorAll('#talk .user img')].map((each) => each.naturalWidth)") == [
            40,
            40,
        ]
        assert tab.run("return document.getElementById('ask-images').hidden")
        assert problems(tab, running.url) == []
        tab.run(GIVE, "drop", base64.b64encode(b"no image").decode(), "x.png", "image/png")
        tab.wait("return document.querySelectorAll('#ask-images img').length === 1")
        tab.type("#ask-text", "And this?\ue007")
        tab.wait("return document.querySelectorAll('#talk .error').length === 2")
        tab.wait("return document.getElementById('ask-text').value === 'And this?'")  # can be sent again


def load(url: str, **more: Any) -> httpx.Response:
    prompts = [f"The built-in function number {index} returns" for index in range(24)]
    body = {"prompt": prompts, "n": 2, "temperature": 1, "max_tokens": 64, "ignore_eos": True, "seed": 3, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=240)


def test_it_shows_a_load(tab: browsers.Browser) -> None:
    small = hf_paged.CacheConfig(num_blocks=96, block_size=16)
    with serving(cache_config=small, scheduler_config=hf_paged.SchedulerConfig(preemption="swap")) as running:
        tab.open(running.url + "/")
        tab.wait("return document.getElementById('state').textContent === 'idle'")
        tab.run(
            "window.seen = {rows: 0, shared: 0};"
            "new MutationObserver(() => {"
            " seen.rows = Math.max(seen.rows, document.querySelectorAll('.request').length);"
            " seen.shared = Math.max(seen.shared, document.querySelectorAll('#table td.block').length);"
            "}).observe(document.body, {subtree: true, childList: true});"
        )
        gate = Gate(running.engine, 1)
        loading = running.beside(load, running.url)
        step_until(tab, gate, "return seen.rows > 1 && seen.shared > 1")  # before the load can end
        gate.open()
        assert loading.result(240).status_code == 200
        tab.open(running.url + "/")  # a page that is opened now has the curves of the load, and invites
        tab.wait("return document.querySelector('#curves canvas') && !document.getElementById('invite').hidden")
        tab.wait("return document.getElementById('state').textContent === 'idle'")
        stats = running.engine.stats()
        assert tile(tab, 5) == str(stats.preemptions_swap + stats.preemptions_recompute)
        assert tile(tab, 6) == f"{stats.cow_copies:,}"
        tab.wait("return document.querySelectorAll('#tiles .big')[1].textContent === '0'")
        assert problems(tab, running.url) == []


def test_the_map_by_keyboard(tab: browsers.Browser) -> None:
    with serving(cache_config=hf_paged.CacheConfig(num_blocks=20_000, block_size=16)) as running:
        load(running.url, max_tokens=2)
        tab.open(running.url + "/")
        tab.wait("return document.getElementById('map').getAttribute('aria-label').includes('20000')")
        tab.run("document.getElementById('map').focus()")
        tab.press("\ue014", "\ue014")  # right, twice
        described = tab.run("return document.getElementById('map-status').textContent")
        assert described.startswith("Blocks ") and not tab.run("return document.getElementById('tip').hidden")
        assert tab.run("return document.getElementById('map').clientHeight") <= 440
        tab.run("document.getElementById('help-button').click()")
        assert tab.run("return document.getElementById('help-button').getAttribute('aria-expanded')") == "true"
        for _ in range(2):
            tab.click("#theme")
        assert tab.run("return document.documentElement.dataset.theme") == "dark"
        assert problems(tab, running.url) == []
