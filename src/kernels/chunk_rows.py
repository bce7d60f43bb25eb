"""Rows of the head whose logits exist at one time; no torch here, for estimates of memory read them."""

from __future__ import annotations

CHUNK_ROWS = 256
"""Rows in one buffer. A larger one goes back to the system and comes zeroed anew each time, which on CPU cost
as much again as the products (512 rows of 8,192)."""
FUSED_ROWS = 4096
"""The same on a GPU: enough for products at full rate, 1.25 GB of logits in bf16 for 152k ids."""
