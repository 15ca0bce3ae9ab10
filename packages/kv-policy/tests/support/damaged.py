"""Files as damaged or changed by disks, editors, merges and other people."""

import random


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change, remove, repeat or truncate some bytes."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at, end = sorted(chance.choices(range(len(made) + 1), k=2))
        kind = chance.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = chance.choice(b"0123456789")  # often still JSON
        elif kind == 2:
            del made[at:end]
        elif kind == 3:
            made[at:at] = made[at:end]
        elif kind == 4:
            made[at:end] = bytes(chance.randrange(256) for _ in range(min(9, end - at)))
        else:
            del made[at:]
    return bytes(made)
