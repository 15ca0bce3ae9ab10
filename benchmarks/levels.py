"""Formats of 3 and 4 bits: plain, rotated, and with levels or outliers of their own.

Levels are those of a normal distribution after a Hadamard rotation, or of block floating point;
outliers are numbers of each vector that are kept apart. Formats of equal bits hold equal bytes but
for outliers.
"""

from collections.abc import Mapping
from typing import Final

from _methods import run

POLICIES: Final[Mapping[str, str]] = {
    "k4v4": "k4v4",
    "k4v3": "k4v3",
    "k3v3": "k3v3",
    "hadamard_k4v4": "hadamard+k4v4",
    "hadamard_k4v3": "hadamard+k4v3",
    "hadamard_k3v3": "hadamard+k3v3",
    "normal_k4v4": "hadamard+k4v4:levels=normal",
    "normal_k4v3": "hadamard+k4v3:levels=normal",
    "normal_k3v3": "hadamard+k3v3:levels=normal",
    "bfp_k4v4": "k4v4:levels=bfp,group=16",
    "outliers_k4v4": "k4v4:outliers=1",
    "outliers_k3v3": "k3v3:outliers=1",
    "outliers_hadamard_k3v3": "hadamard+k3v3:outliers=1",
}
QUICK: Final = ("k4v4", "normal_k3v3", "outliers_k3v3")

if __name__ == "__main__":
    run("levels", __doc__, POLICIES, QUICK)
