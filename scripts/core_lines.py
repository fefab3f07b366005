"""Counts the lines of the core, which everyone who changes hf_paged reads, and of each feature beside it.

    python scripts/core_lines.py

A feature is a list of files or folders. `PROGRAMS` are clients of the engine. All other files are the core.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hf_paged"

FEATURES = {
    "rows": (
        "model/rows.py", "model/row_trial.py", "model/pieces.py", "cache/states.py", "cache/checkpoints.py",
        "generation/engine/state_memory.py", "generation/engine/state_sizes.py",
    ),
    "encoder-decoder": (
        "model/encoder_decoder.py", "model/encoder_rows.py", "model/cross_attention.py",
        "integration/encoder_decoder.py", "generation/encoder_decoder.py", "generation/engine/encoders.py",
    ),
    "media": (
        "model/media.py", "model/media_batches.py", "model/media_encoders.py", "model/media_store.py",
        "model/inner_encoders.py", "model/spans.py", "generation/media_decoder.py",
        "generation/engine/media_memory.py",
    ),
    "speculation": (
        "generation/drafts.py", "generation/drafting_decoder.py", "generation/translation.py",
        "generation/engine/draft_model.py", "generation/engine/draft_lengths.py",
        "generation/engine/speculation.py", "fused/cpu/draft.py", "model/first_layers.py",
    ),
    "grammar": (
        "generation/sampling/grammar.py", "generation/sampling/gbnf.py", "generation/sampling/schemas.py",
        "generation/sampling/constraints.py", "generation/sampling/patterns.py",
    ),
    "faster layers": ("fused",),
    "third-party code": ("model/foreign.py", "model/known_code.py", "model/stood_in_for.py", "model/guards.py"),
    "ranks": ("generation/engine/ranks.py", "generation/engine/parallel.py", "generation/engine/message.py"),
    "adapters": ("model/adapters.py",),
    "tasks": ("generation/tasks",),
    "graphs": ("model/graphs.py", "model/graph_inputs.py", "model/warmup.py"),
}  # fmt: skip
PROGRAMS = ("serving", "bridges", "load", "cli")


def part_of(file: str) -> str:
    """Return the feature of a file, given as its path within the package, or "programs", or "core"."""
    for name, places in (*FEATURES.items(), ("programs", PROGRAMS)):
        if any(file == place or file.startswith(f"{place}/") for place in places):
            return name
    return "core"


def lines() -> dict[str, int]:
    """Return the number of lines of each part: of Python, docstrings and comments included."""
    counts = dict.fromkeys(("core", *FEATURES, "programs"), 0)
    for path in sorted(PACKAGE.rglob("*.py")):
        counts[part_of(path.relative_to(PACKAGE).as_posix())] += path.read_text().count("\n")
    return counts


def main() -> None:
    counts = lines()
    for name, count in counts.items():
        print(f"{name:26}{count:>8,}")
    print(f"{'all':26}{sum(counts.values()):>8,}")


if __name__ == "__main__":
    main()
