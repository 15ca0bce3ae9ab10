"""Requirements of kv-eval's extras, by name: kv-eval itself may not be on the index."""

from typing import Final

LM_EVAL: Final = "lm-eval>=0.4.13"  # the extra `lm-eval`
MATPLOTLIB: Final = "matplotlib>=3.9"  # the extra `plot`
