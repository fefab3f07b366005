"""PagedAttention as a plugin backend for transformers."""

__version__ = "0.1.0"
