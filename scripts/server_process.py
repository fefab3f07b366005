"""`hf-paged serve` in a process of its own, for scripts that check it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "examples" / "pydoc-lm-qa"
_SECONDS = 60  # in which it has to end


@dataclass
class Server:
    """url: its address. pid: of its process. lines: its log; complete, as is `status`, when `serving` has ended."""

    url: str = ""
    pid: int = 0
    lines: list[str] = field(default_factory=list)
    status: int | None = None


@contextmanager
def serving(*options: str, checkpoint: Path = CHECKPOINT) -> Iterator[Server]:
    """options: of `hf-paged serve`. Raises SystemExit if the server does not start, subprocess.TimeoutExpired if it
    does not end within a minute; it is killed then."""
    arguments = ["serve", str(checkpoint), "--port", "0", *options]
    code = f"import sys; from hf_paged.cli.main import main; sys.exit(main({arguments!r}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = Server()
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        server.pid = process.pid
        try:
            while not server.url:
                line = process.stderr.readline()
                if not line:
                    raise SystemExit(f"the server has not started:\n{''.join(server.lines)}")
                server.lines.append(line)
                if found := re.search(r"running on (http://\S+)", line):
                    server.url = found[1]
            reader = threading.Thread(target=server.lines.extend, args=(process.stderr,), daemon=True)
            reader.start()
            yield server
            process.terminate()
            server.status = process.wait(_SECONDS)
            reader.join(_SECONDS)
        finally:
            process.kill()  # nothing, if it has ended
