"""Damage for tests: one change to the bytes of a file, or to one field of a table, by chance."""

import random


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One of: bytes changed, a stretch cut out, a stretch repeated, the end cut off, a number made huge."""
    changed = bytearray(data)
    place = chance.randrange(len(changed))
    match chance.randrange(6):
        case 0 | 1:
            for _ in range(chance.choice((1, 1, 3, 20))):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        case 2:
            del changed[place : place + chance.choice((1, 4, 100))]
        case 3:
            changed[place:place] = changed[place : place + chance.choice((1, 8, 200))]
        case 4:
            del changed[place:]
        case 5:
            changed[place : place + 4] = chance.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0"))
    return bytes(changed)


STRANGE = (
    *(0, 1, -1, 2, 3, 7, 64, 10**6, 10**9, 2**31, 2**63, 10**30, -(10**30)),
    *(0.5, -0.5, 1e308, float("nan"), float("inf"), True, False, None),
    *("", "relative", "x" * 5000, [], [1], [3, 2, 1], [[]], [10**30], {}, {"a": 1}, [0] * 5000, list(range(1, 5000))),
)


def mutated_table(table: dict[str, object], chance: random.Random) -> tuple[str, dict[str, object]]:
    """A copy with one field, at any depth, given a strange value, renamed or left out; and the field's name."""
    changed = dict(table)
    key = chance.choice(sorted(changed))
    inner = changed[key]
    if isinstance(inner, dict) and inner and chance.random() < 0.9:
        name, changed[key] = mutated_table(inner, chance)
        return name, changed
    match chance.randrange(8):
        case 0:
            del changed[key]
        case 1:
            changed[f"{key}x"] = changed.pop(key)
        case _:
            changed[key] = chance.choice(STRANGE)
    return key, changed
