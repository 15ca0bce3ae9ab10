"""What is lost when decode steps read some pages, by the share that is read.

All policies store tokens in `k8v4` and keep every one, but those with kv-compress, which keep half
of them. Pages are ranked by bounds of their keys, or by codes of 2 bits per dimension of each key;
bytes have these, which the first decode step computes. Prompts are read whole, so the needle's
question is asked after the prompt alone.
"""

from collections.abc import Mapping
from typing import Final

from _methods import run

POLICIES: Final[Mapping[str, str]] = {
    "k8v4": "k8v4",
    "quest_50": "k8v4+quest:budget=50%",
    "quest_35": "k8v4+quest:budget=35%",
    "quest_25": "k8v4+quest:budget=25%",
    "quest_12": "k8v4+quest:budget=12.5%",
    "codes_25": "k8v4+quest:budget=25%,by=codes",
    "codes_12": "k8v4+quest:budget=12.5%,by=codes",
    "codes_6": "k8v4+quest:budget=6.25%,by=codes",
    "kv_compress": "kv-compress:budget=1080+k8v4",
    "kv_compress_quest_50": "kv-compress:budget=1080+k8v4+quest:budget=50%",
    "kv_compress_quest_25": "kv-compress:budget=1080+k8v4+quest:budget=25%",
    "kv_compress_codes_25": "kv-compress:budget=1080+k8v4+quest:budget=25%,by=codes",
}
QUICK: Final = ("k8v4", "quest_25", "codes_25", "kv_compress_codes_25")

if __name__ == "__main__":
    run("quest_quality", __doc__, POLICIES, QUICK, settings=("agnostic",))
