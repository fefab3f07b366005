"""The versions of transformers with which hf_paged is tested, and the error of others. Standard library only."""

from __future__ import annotations

import re
import sys

from hf_paged.errors import UnsupportedVersionError

OLDEST, NEWEST = (5, 17), (5, 24)
"""Minor versions of transformers, both included. `scripts/check_versions.py` runs what they promise."""


def installed(package: str = "transformers") -> str:
    """Return the version of the package that is imported, or else of the one that would be."""
    from importlib import metadata  # which takes longer to import than hf_paged

    # What is imported counts, whatever has been installed over it since.
    module = sys.modules.get(package)
    return str(getattr(module, "__version__", None) or metadata.version(package))


def is_tested(version: str) -> bool:
    return OLDEST <= _minor(version) <= NEWEST


def is_older(version: str) -> bool:
    """Tell whether the version came before those that are tested. One without numbers is tried as a newer one is."""
    return () < _minor(version) < OLDEST


def _minor(version: str) -> tuple[int, ...]:
    """Return (major, minor). A development version counts as the release that it will become."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def tested() -> str:
    return " to ".join(".".join(map(str, each)) for each in (OLDEST, NEWEST))


def describe() -> str:
    """Return the versions in use and whether hf_paged is tested with them, for reports."""
    version = installed()
    known = "tested" if is_tested(version) else f"not tested: {tested()} are"
    return f"transformers {version} ({known}), torch {installed('torch')}"


def unsupported(reason: str) -> UnsupportedVersionError:
    """Return the error that names the versions; `reason` says what failed with this transformers."""
    supported = f"{OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    return UnsupportedVersionError(
        f"transformers {installed()} is not supported by hf_paged {installed('hf_paged')} (tested: {tested()}): "
        f"{reason}; install transformers>={supported}, or a newer hf_paged"
    )


def blamed(error: Exception) -> Exception:
    """Return the error of an import, or one that blames the version of transformers if that is not tested."""
    return error if is_tested(installed()) else unsupported(f"{type(error).__name__}: {error}")
