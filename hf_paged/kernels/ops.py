"""The three operations of the paper's section 5.1 (block write, block read + attention, block copy): validated,
registered with torch.library, dispatched by device.

Layouts (all sizes in elements):
  key_cache    [num_blocks, block_size, num_kv_heads, head_dim]
  value_cache  [num_blocks, block_size, num_kv_heads, v_head_dim]      head_dim and v_head_dim may differ
Implementations: "reference" (any device), "torch" (any device; the CPU path that needs no compiler), "native" (CPU,
C compiled once per machine), "triton" (GPU, or a CPU under TRITON_INTERPRET=1). `impl=None` picks the best one for
the device; an explicit `impl` never falls back: it runs or raises.
"""

from __future__ import annotations

import torch

from hf_paged.kernels import reference
from hf_paged.kernels.metadata import AttentionMetadata

IMPLS = ("reference", "torch", "native", "triton")
