"""`hf-paged build`: compile the native CPU kernels now."""

from __future__ import annotations

import sys

from hf_paged.cli.common import EXIT_REFUSED, Job


def build() -> Job:
    """Build the native CPU kernels now, in the foreground."""
    return _build


def _build() -> int:
    from hf_paged.kernels.native import build as native

    try:
        native.build()
    except native.NativeBuildError as error:
        print("hf-paged:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_REFUSED
    print(native.status())
    return 0
