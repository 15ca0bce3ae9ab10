"""A count of what a worker holds, in round numbers."""

from kv_runtime.measure import Measured

SOME = Measured(
    pages_used=3,
    pages_free=7,
    held_bytes=300,
    full_bytes=1200,
    kept=40,
    table_rows=4,
    computed=20,
    plans=1,
    seconds=0.5,
    dropped=24,
    saved=900,
    prefix_bytes=60,
    prefix_hits=3,
    prefix_tokens=90,
)
