"""Random load on engines, and what each request must yield: shared by the tests and `scripts/soak.py`."""
