"""Marks of tests that need more than the oldest transformers has, each with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version

from hf_paged.integration.names import EDITS_ARE_KNOWN, ENCODES_MEDIA

needs_media = pytest.mark.skipif(not ENCODES_MEDIA, reason="this transformers encodes media in each forward")
needs_edits = pytest.mark.skipif(not EDITS_ARE_KNOWN, reason="the processors of this transformers compute otherwise")


def since(version: str, reason: str) -> Any:
    """Skip the test on an older transformers."""
    return pytest.mark.skipif(Version(transformers.__version__) < Version(version), reason=reason)
