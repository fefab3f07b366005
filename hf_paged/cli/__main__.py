"""`python -m hf_paged.cli`."""

import sys

from hf_paged.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
