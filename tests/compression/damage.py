"""Archives as a disk, a network or an enemy would change them."""

import random
import zlib

from transformer_xl.compression.archive import Block, Head, checksum_of, read_blocks, read_head

HEAD = 14


class Bytes:
    """A source that counts what was asked of it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def read(self, size: int) -> bytes:
        some = self.data[self.place : self.place + size]
        self.place += len(some)
        return some


def parts(archive: bytes) -> tuple[Head, list[tuple[Block, bytes]]]:
    """The head, and each block with what is stored in it."""
    source = Bytes(archive)
    head = read_head(source, name="it")
    return head, [
        (block, source.read(block.size) if block.stream is None else b"")
        for block in read_blocks(source, head, name="it")
    ]


def joined(head: Head, blocks: list[tuple[Block, bytes]]) -> bytes:
    """With a CRC that is right, whatever it is the CRC of."""
    out, before = head.to_bytes(), checksum_of(head.to_bytes())
    for block, stored in blocks:
        out += block.head(before) + (stored if block.stream is None else block.stream)
        before = block.checksum
    return out


def damaged(archive: bytes, number: int) -> bytes:
    """Each number is another damage; none is none."""
    chance = random.Random(number)
    kinds = [flip, overwrite, cut, lose, repeat, append, zero, exchange, forge]
    while (result := kinds[number % len(kinds)](archive, chance)) == archive:
        pass
    return result


def flip(archive: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(archive))
    return archive[:place] + bytes([archive[place] ^ 1 << chance.randrange(8)]) + archive[place + 1 :]


def overwrite(archive: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(archive))
    new = chance.randbytes(chance.randrange(1, 20))
    return archive[:place] + new + archive[place + len(new) :]


def cut(archive: bytes, chance: random.Random) -> bytes:
    return archive[: chance.randrange(len(archive))]


def lose(archive: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(archive))
    return archive[:place] + archive[place + chance.randrange(1, 40) :]


def repeat(archive: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(archive))
    end = chance.randrange(start + 1, len(archive) + 1)
    return archive[:end] + archive[start:]


def append(archive: bytes, chance: random.Random) -> bytes:
    return archive + chance.randbytes(chance.randrange(1, 50))


def zero(archive: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(archive))
    count = min(chance.randrange(1, 60), len(archive) - start)
    return archive[:start] + bytes(count) + archive[start + count :]


def exchange(archive: bytes, chance: random.Random) -> bytes:
    """Blocks lost, exchanged or repeated, with right CRCs."""
    head, blocks = parts(archive)
    order = [chance.randrange(len(blocks)) for _ in range(chance.randrange(1, len(blocks) + 2))]
    chosen = [blocks[number] for number in order]
    last = [(_with(block, last=place == len(chosen) - 1), stored) for place, (block, stored) in enumerate(chosen)]
    return joined(head, last)


def forge(archive: bytes, chance: random.Random) -> bytes:
    """One field changed, with right CRCs: only the content tells."""
    head, blocks = parts(archive)
    place = chance.randrange(len(blocks))
    block, stored = blocks[place]
    what = chance.choice(["lanes", "fingerprint", "size", "content", "checksum"])
    if what == "lanes":
        head = Head(fingerprint=head.fingerprint, lanes=chance.randrange(1, 65))
    elif what == "fingerprint":
        head = Head(fingerprint=chance.randbytes(8), lanes=head.lanes)
    elif what == "size":
        block = _with(block, size=max(0, block.size + chance.choice([-1, 1, 100, -block.size])))
    elif what == "content" and block.stream is not None:
        block = _with(block, stream=flip(block.stream, chance))
    elif what == "content" and stored:
        stored = flip(stored, chance)
    else:
        block = _with(block, checksum=chance.randbytes(8))
    blocks[place] = (block, stored)
    return joined(head, blocks)


def _with(block: Block, **changes: object) -> Block:
    fields = {"size": block.size, "stream": block.stream, "checksum": block.checksum, "last": block.last}
    return Block(**fields | changes)


def crc_of(*parts: bytes) -> bytes:
    return zlib.crc32(b"".join(parts)).to_bytes(4, "little")
