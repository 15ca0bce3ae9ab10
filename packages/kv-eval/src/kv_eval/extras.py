"""What the extras of kv-eval bring, as messages advise it: by itself it is on every registry."""

from typing import Final

LM_EVAL: Final = "lm-eval>=0.4.13"  # the extra `lm-eval`
MATPLOTLIB: Final = "matplotlib>=3.9"  # the extra `plot`
