"""What command lines of benchmarks are read by."""

import argparse


def count(text: str) -> int:
    """Read how often something is done, or how many there are.

    Raises:
        argparse.ArgumentTypeError: it is less than 1.
        ValueError: it is no whole number.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is nothing to measure; give 1 or more")
    return number
