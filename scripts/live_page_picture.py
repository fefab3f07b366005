"""Take docs/live-page.png, the live page of a server under load, in a browser. Run it after a change of the page.

python scripts/live_page_picture.py    # needs Debian's chromium and chromium-driver
"""

from __future__ import annotations

import io
import random
import sys
import threading
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_paged import CacheConfig, SchedulerConfig  # noqa: E402
from tests.serving import browser as browsers  # noqa: E402
from tests.serving.harness import Running, serving  # noqa: E402

PICTURE = ROOT / "docs" / "live-page.png"
TOPICS = ("str.join", "a list", "a dict", "sorted()", "the with statement", "a generator", "zip()", "a set")


def load(running: Running, ends: threading.Event, seed: int) -> None:
    """Send one request after the other, with one to four samples each, until the picture is taken."""
    chance = random.Random(seed)
    while not ends.is_set():
        content = f"You answer questions about Python in one sentence each, briefly. What is {chance.choice(TOPICS)}?"
        running.client.chat.completions.create(
            model="pydoc", messages=[{"role": "user", "content": content}], max_tokens=180, temperature=0.9,
            n=chance.choice((1, 1, 2, 4)), extra_body={"ignore_eos": True},
        )  # fmt: skip


def main() -> None:
    if browsers.missing() is not None:
        sys.exit(f"the picture {browsers.missing()}")
    ends = threading.Event()
    cache = CacheConfig(num_blocks=420, swap_memory="4MiB")
    with (
        browsers.browsing(1440, 1456) as tab,
        serving(cache_config=cache, scheduler_config=SchedulerConfig(max_num_seqs=128)) as running,
    ):
        tab.open(f"{running.url}/")
        tab.wait("return !document.getElementById('main').hidden")
        tab.type("#ask-text", "What does str.capitalize() do?\ue007")
        threads = [threading.Thread(target=load, args=(running, ends, seed)) for seed in range(34)]
        for thread in threads:
            thread.start()
        time.sleep(75)  # until the curves have a minute of load
        # A palette takes a third of the bytes.
        Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(256).save(PICTURE, optimize=True)
        ends.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
