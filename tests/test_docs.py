"""docs/architecture.md and docs/changes.md name only what exists, and stay short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_paged"
MOST_WORDS = {"architecture": 1150, "changes": 1000}
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in MOST_WORDS}
PAGE = "\n".join(TEXTS.values())
INNER = 36  # column of the files in a folder of a room
PICTURE = re.search(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
NAMES = sorted(set(re.findall(r"`((?:[\w.]+/)*(?:\w+\.py|\w+/))`", PAGE)))


def rooms_of_picture() -> list[tuple[str, str]]:
    """(room, file or folder) for each name in the picture; the rooms stand at the margin, folders before files."""
    assert PICTURE is not None
    found, room, folder = [], "", ""
    for line in PICTURE[1].splitlines():
        if top := re.match(r" (\w+)/", line):
            room, folder = top[1], ""
            found.append((room, "."))
            line = line[top.end() :]
        elif not line.startswith("   "):
            room, folder = "", ""
        elif not line.startswith(" " * INNER):
            folder = ""
        if inner := re.match(r" +(\w+)/", line):
            folder = f"{inner[1]}/"
            found.append((room, folder))
        found += [(room, folder + name) for name in re.findall(r"\b\w+\.py\b", line)]
    return found


def test_the_picture_names_what_exists() -> None:
    assert [name for name in rooms_of_picture() if not PACKAGE.joinpath(*name).exists()] == []


def test_the_text_names_what_exists() -> None:
    """A path from hf_paged/ or from the root, or the name of a file that the picture places in a room."""
    placed = [PACKAGE / room / file for room, file in rooms_of_picture()]

    def exists(name: str) -> bool:
        return any((folder / name).exists() for folder in (PACKAGE, ROOT, *filter(Path.is_dir, placed))) or any(
            str(path).endswith(f"/{name.rstrip('/')}") for path in placed
        )

    assert [name for name in NAMES if not exists(name)] == []


def test_pages_stay_short() -> None:
    # Lines of tables are no words.
    words = {name: [word for word in text.split() if word.strip("|-")] for name, text in TEXTS.items()}
    assert all(len(words[name]) <= most for name, most in MOST_WORDS.items())
    assert len(NAMES) > 20 and len(rooms_of_picture()) > 40
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
