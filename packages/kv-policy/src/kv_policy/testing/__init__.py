"""Conformance checks for third-party policies and codecs.

Each raises AssertionError with a sentence that names the violated law of the contract. They depend
on kv_policy alone, use fixed seeds, and run quickly.
"""

from kv_policy.testing.codecs import check_codec
from kv_policy.testing.policies import check_policy

__all__ = ["check_codec", "check_policy"]
