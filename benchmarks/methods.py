"""The later methods at their usual settings, and at a quarter of the bytes.

Each method is measured as it is by default, without a format (`NAME_usual`), and with k8v4 such
that it holds about a quarter of the bytes (`NAME_25`), beside kv-compress. A method without a
budget holds what its rule keeps: the share of heads that retrieve, and the threshold of
`simlayerkv`, are then set so that prompts of 2,000 tokens come near to a quarter.

Scores of heads are of random tokens, so no prompt was read in calibration. They are written to
`results/methods.model.statistics`, which a later run reads again.
"""

from collections.abc import Mapping
from typing import Final

from _methods import run

# FILE: the scores of heads. In k8v4, 1,080 tokens per head of 2,000 take a quarter of the bytes.
POLICIES: Final[Mapping[str, str]] = {
    "kv_compress_25": "kv-compress:budget=1080+k8v4",
    "razor_usual": "razor:file=FILE",
    "razor_25": "razor:file=FILE,share=0.41+k8v4",
    "duo_usual": "duo:file=FILE",
    "duo_25": "duo:file=FILE,share=0.43+k8v4",
    "headkv_usual": "headkv:file=FILE,budget=1024",
    "headkv_25": "headkv:file=FILE,budget=1080+k8v4",
    "simlayerkv_usual": "simlayerkv",
    "simlayerkv_25": "simlayerkv:threshold=0.8,recent=512+k8v4",
    "prefixkv_usual": "prefixkv:budget=1024",
    "prefixkv_25": "prefixkv:budget=1080+k8v4",
    "kvcrush_usual": "kvcrush:budget=1024",
    "kvcrush_25": "kvcrush:budget=1080+k8v4",
    "d2o_usual": "d2o:budget=1024",
    "d2o_25": "d2o:budget=1080+k8v4",
    "cam_usual": "cam:budget=1024",
    "cam_25": "cam:budget=1080+k8v4",
    "kvmerger_usual": "kvmerger:budget=1024",
    "kvmerger_25": "kvmerger:budget=1080+k8v4",
    "snapkv_d2o_25": "snapkv:budget=1080+d2o+k8v4",
    "snapkv_25": "snapkv:budget=1080+k8v4",
    "quest_25": "quest:budget=25%+k8v4",
    "quest_12": "quest:budget=12.5%+k8v4",
    "quest_kv_compress": "kv-compress:budget=1080+k8v4+quest:budget=25%",
}
QUICK: Final = ("kv_compress_25", "razor_25", "headkv_25", "simlayerkv_25", "quest_25")

if __name__ == "__main__":
    run("methods", __doc__, POLICIES, QUICK)
