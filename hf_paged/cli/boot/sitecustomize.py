"""Imported by Python's start-up in programs that `hf-paged run` starts, and in their children.

Installs hf_paged, then runs the sitecustomize that Python would have imported without this one. Any Python may import
this file, also one without hf_paged: it is kept in the syntax of old versions.
"""

import os
import sys


def _install(wanted):
    is_first = os.environ.get("HF_PAGED_RUN_PID") == str(os.getpid())
    try:
        import hf_paged
    except ImportError as error:
        sys.stderr.write(f"hf-paged run: no hf_paged in {sys.executable}: {error}\n")
        if is_first:
            os._exit(1)  # an exception here would be reported and ignored
        return
    hf_paged.install(default="default" in wanted)
    if "serving" in wanted:
        hf_paged.install_serving()


def _chain():
    """Import the sitecustomize that comes next on the path, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if os.environ.get("HF_PAGED_RUN"):
    _install(os.environ["HF_PAGED_RUN"].split(","))
_chain()
