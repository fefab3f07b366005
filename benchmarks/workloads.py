"""Request lengths and arrivals: those of `hf-paged bench serve`."""

from hf_paged.load.workloads import (
    LONGEST,
    WORKLOADS,
    Lengths,
    TraceRequest,
    prompts_for,
    read_trace,
    synthesise,
)

__all__ = ["LONGEST", "WORKLOADS", "Lengths", "TraceRequest", "prompts_for", "read_trace", "synthesise"]
