"""The figures at the end of `hf-paged generate`: speed of all calls, memory of the call that used the most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_paged import CallRecord


def figures_of(records: list[CallRecord], generated: int, prompt_tokens: int, seconds: float) -> dict[str, Any]:
    """The figures for JSON. Counts are in tokens and blocks, sizes in bytes, `seconds` in seconds."""
    # Memory is a peak: that of the calls together is that of the largest one.
    largest = max(records, key=lambda record: record.kv_bytes_used)
    reasons = sorted({record.reason for record in records if record.reason is not None})
    return {
        "prompt_tokens": prompt_tokens,
        "generated_tokens": generated,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(generated / seconds, 2) if seconds else 0.0,
        "route": largest.route,
        "reasons": reasons,
        "block_size": largest.block_size,
        "peak_blocks_used": largest.peak_blocks_used,
        "peak_blocks_shared": largest.peak_blocks_shared,
        "cow_copies": sum(record.cow_copies for record in records),
        "kv_bytes_reserved": largest.kv_bytes_reserved,
        "kv_bytes_used": largest.kv_bytes_used,
        "kv_bytes_filled": largest.kv_bytes_filled,
        "kv_bytes_contiguous": largest.kv_bytes_contiguous,
    }


def render(figures: dict[str, Any]) -> str:
    """The figures as text, each with its meaning."""
    # A call without K/V, such as one of a model with states only, has 0 of each.
    used, filled, contiguous = (figures[f"kv_bytes_{name}"] for name in ("used", "filled", "contiguous"))
    share = f" ({filled / used:.0%})" if used else ""
    factor = f", {contiguous / used:.1f} x what was used" if used else ""
    rows = {
        "generated": f"{figures['generated_tokens']} tokens in {figures['seconds']:.2f} s "
        f"({figures['tokens_per_second']:.0f} tokens/s) after {figures['prompt_tokens']} tokens of prompts",
        "route": "packed rows"
        if figures["route"] == "packed"
        else "transformers' loop: " + "; ".join(figures["reasons"]),
        "blocks": f"{figures['peak_blocks_used']} used at the peak ({figures['block_size']} tokens each), "
        f"{figures['peak_blocks_shared']} shared; {figures['cow_copies']} copied on write",
        "KV memory": f"{_bytes(used)} used at the peak, {_bytes(filled)} of it filled with tokens{share}",
        "contiguous": f"{_bytes(contiguous)}: what tensors of the same rows take, padded to one length{factor}",
        "pool": f"{_bytes(figures['kv_bytes_reserved'])} reserved: it starts with 16 blocks, grows by half, and is "
        "kept for the next call",
    }
    if (plain := figures.get("plain")) is not None:
        equal, texts = plain["equal"], plain["texts"]
        verdict = "equal, token for token" if equal == texts else f"DIFFERENT in {texts - equal} of {texts} texts"
        speed = plain["seconds"] / figures["seconds"] if figures["seconds"] else 0.0
        rows = {
            "compared": f"{verdict}: paged generate and plain generate",
            "time": f"paged {figures['seconds']:.2f} s, plain {plain['seconds']:.2f} s ({speed:.1f} x)",
            "memory": f"paged {_bytes(used)} of K/V at the peak, plain {_bytes(contiguous)} in padded tensors",
            **rows,
        }
    return "\n".join(["-" * 40, *(f"{name:<11} {text}" for name, text in rows.items())])


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
