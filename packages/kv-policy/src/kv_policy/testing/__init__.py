"""Conformance checks that anybody runs on a policy or codec of their own.

Each raises AssertionError with a sentence that says which law of the contract does not hold. They
need nothing beyond kv_policy, use seeds, and take a moment.
"""

from kv_policy.testing.codecs import check_codec
from kv_policy.testing.policies import check_policy

__all__ = ["check_codec", "check_policy"]
