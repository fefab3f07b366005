"""Random load on engines, and the expected result of each request: shared by the tests and `scripts/soak.py`."""
