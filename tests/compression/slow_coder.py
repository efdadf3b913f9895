"""What `native/coding.cpp` computes, in plain Python: slowly, and with tables as dictionaries. One bit after the other, as docs/compressing.md tells it."""

from collections import defaultdict

ONE, UNIT, MOST = 1 << 16, 1024, 12 * 1024 - 1
STEP, STEPS, FULL, LONGEST = 512, 33, 255, 32
HISTORY, PLACE_BITS, LINE_BITS = 1 << 22, 18, 20
LENGTHS = (1, 2, 3, 4, 6)
ALL = (1 << 64) - 1


def quotient(a: int, b: int) -> int:
    """Towards zero, as processors divide."""
    return a // b if a >= 0 else -(-a // b)


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def hashed(value: int) -> int:
    return ((value * 0x9E3779B97F4A7C15) & ALL) >> 32


def make_tables() -> tuple[list[int], list[int]]:
    probability, falling = [0] * (2 * MOST + 1), 1 << 62
    for k in range(MOST + 1):
        likely = min((1 << 48) // ((1 << 32) + (falling >> 30)), ONE - 1)
        probability[MOST + k], probability[MOST - k] = likely, ONE - likely
        falling = (falling >> 32) * 4290775039 + (((falling & 0xFFFFFFFF) * 4290775039) >> 32)
    odds: list[int] = []
    for k in range(-MOST, MOST + 1):
        odds += [k] * (probability[MOST + k] + 1 - len(odds))
    return probability, odds


PROBABILITY, ODDS = make_tables()


class Chance:
    def __init__(self, probability: int, count: int) -> None:
        self.p, self.count = probability << 6, count

    @property
    def odds(self) -> int:
        return ODDS[self.p >> 6]

    def learn(self, bit: int) -> None:
        rate = 2 * ONE // (2 * self.count + 3)
        self.p += quotient(((bit and (1 << 22) - 1) - self.p) * rate, ONE)
        self.count = min(self.count + 1, FULL)


class Mixer:
    def __init__(self) -> None:
        self.weights, self.count = [ONE] + [6000] * 7, 0

    def mix(self, answers: list[int]) -> int:
        total = sum(weight * answer for weight, answer in zip(self.weights, answers, strict=True))
        return clamp(quotient(total, ONE), -MOST, MOST)

    def learn(self, answers: list[int], odds: int, bit: int) -> None:
        rate = 4 + 64 * 256 // (self.count + 256)
        self.count = min(self.count + 1, 1 << 20)
        error = ((bit and ONE - 1) - PROBABILITY[MOST + odds]) * rate
        self.weights = [
            clamp(weight + quotient(answer * error, 1 << 20), -8 * ONE, 8 * ONE)
            for weight, answer in zip(self.weights, answers, strict=True)
        ]


class Line:
    def __init__(self, check: int) -> None:
        self.check, self.branches = check, [Chance(ONE // 2, 0) for _ in range(15)]


class Lane:
    def __init__(self) -> None:
        self.last = self.position = self.match = self.length = self.word = 0


class SlowCoder:
    def __init__(self, *, lanes: int, values: bytes) -> None:
        self.values, self.lanes = values, [Lane() for _ in range(lanes)]
        self.history = HISTORY
        while self.history * lanes > HISTORY:
            self.history //= 2
        self.matched = [Chance(ONE * (k + 4) // (k + 5), 0) for k in range(LONGEST + 1)]
        self.refined = defaultdict[tuple[int, int, int], Chance](lambda: Chance(0, 0))
        self.mixers = defaultdict[tuple[str, int], Mixer](Mixer)
        self.places, self.lines, self.bytes = {}, {}, defaultdict(int)
        self.begin()

    def begin(self, stream: bytes = b"") -> None:
        self.low, self.high, self.stream, self.taken = 0, ALL, stream, 0
        self.code = 0
        for _ in range(8):
            self.code = self.code << 8 | self._next()

    def encode(self, frequencies_BTV, bytes_BT, length_B) -> bytes:
        out = bytearray()
        for step in range(bytes_BT.shape[1]):
            for number, length in enumerate(length_B):
                if step < length:
                    bits = [int(bytes_BT[number, step]) >> place & 1 for place in range(7, -1, -1)]
                    self._code(number, frequencies_BTV[number, step].tolist(), bits, out)
        return bytes(out)

    def finish(self) -> bytes:
        return b"" if self.low == 0 else bytes([self.high >> 56])

    def decode(self, frequencies_BV, has_B) -> list[int]:
        return [
            self._code(number, frequencies_BV[number].tolist(), None, bytearray()) if has else 0
            for number, has in enumerate(has_B)
        ]

    def _next(self) -> int:
        self.taken += 1
        return self.stream[self.taken - 1] if self.taken <= len(self.stream) else 0

    def _bit(self, p: int, given: int | None, out: bytearray) -> int:
        span = self.high - self.low
        middle = self.low + (span >> 16) * p + (((span & 0xFFFF) * p) >> 16)
        bit = int(self.code <= middle) if given is None else given
        if bit:
            self.high = middle
        else:
            self.low = middle + 1
        while self.low >> 56 == self.high >> 56:
            out.append(self.high >> 56)
            self.low, self.high = self.low << 8 & ALL, (self.high << 8 | 255) & ALL
            self.code = (self.code << 8 | self._next()) & ALL
        return bit

    def _line(self, context: int, bits: int) -> Line:
        check = hashed((context << 32 | bits) + 1) | 1
        at = hashed(check ^ 0x5BD1E995) >> (32 - LINE_BITS)
        pair = [self.lines.get(place) for place in (at, at ^ 1)]
        for line in pair:
            if line is not None and line.check == check:
                return line
        counts = [line.branches[0].count if line is not None else 0 for line in pair]
        line = self.lines[at if counts[0] <= counts[1] else at ^ 1] = Line(check)
        return line

    def _refined(self, context: int, counted: Chance) -> Chance:
        step = clamp(quotient(counted.odds + STEPS // 2 * STEP + STEP // 2, STEP), 0, STEPS - 1)
        key = (context, min(counted.count, 15), step)
        if key not in self.refined:
            self.refined[key] = Chance(PROBABILITY[MOST + (step - STEPS // 2) * STEP], 6)
        return self.refined[key]

    def _code(self, number: int, frequencies: list[int], bits: list[int] | None, out: bytearray) -> int:
        lane = self.lanes[number]
        weight = [1] * 512
        for value, frequency in zip(self.values, frequencies, strict=True):
            weight[256 + value] += frequency << 4
        for k in range(255, 0, -1):
            weight[k] = weight[2 * k] + weight[2 * k + 1]
        contexts = [
            hashed(((lane.last & ((1 << 8 * length) - 1)) * 8 + k + 1) & ALL) for k, length in enumerate(LENGTHS)
        ]
        contexts.append(hashed((lane.word << 32) + 77))
        expected = 256 | self.bytes[lane.match] if lane.length else 0
        byte = 1
        for place in range(8):
            if place % 4 == 0:
                lines = [self._line(context, byte) for context in contexts]
            branch = (byte if place < 4 else byte & ((1 << place - 4) - 1) | 1 << place - 4) - 1
            counted = [line.branches[branch] for line in lines]
            known = [chance.count > 0 for chance in counted]
            refined = [self._refined(k, chance) for k, chance in enumerate(counted)]
            answers = [ODDS[clamp((weight[2 * byte + 1] << 16) // weight[byte], 1, ONE - 1)]]
            answers += [chance.odds if seen else 0 for chance, seen in zip(refined, known, strict=True)]
            matches, wanted = expected >> (8 - place) == byte, expected >> (7 - place) & 1
            trust = self.matched[lane.length]
            answers.append((trust.odds if wanted else -trust.odds) if matches else 0)
            longest = max((k + 1 for k, seen in enumerate(known) if seen), default=0)
            run = (1 + (lane.length >= 12) + (lane.length >= 24)) if matches else 0
            chosen = [("length", 4 * longest + run), ("bits", byte), ("last", lane.last & 255)]
            mixed = [(self.mixers[key], self.mixers[key].mix(answers)) for key in chosen]
            p = PROBABILITY[MOST + quotient(sum(odds for _, odds in mixed), 3)]
            bit = self._bit(p, None if bits is None else bits[place], out)
            for mixer, odds in mixed:
                mixer.learn(answers, odds, bit)
            for chance, better, seen in zip(counted, refined, known, strict=True):
                if seen:
                    better.learn(bit)
                chance.learn(bit)
            if matches:
                trust.learn(int(bit == wanted))
            byte = 2 * byte + bit
        self._follow(lane, number * self.history, byte & 255)
        return byte & 255

    def _follow(self, lane: Lane, origin: int, value: int) -> None:
        mask = self.history - 1

        def at(base: int, position: int) -> int:
            return base // self.history * self.history + (position & mask)

        lane.last = (lane.last << 8 | value) & ALL
        letter = value > 127 or value == ord("_") or ord("a") <= value | 32 <= ord("z")
        lane.word = hashed(lane.word * 256 + value + 1) if letter else 0
        self.bytes[at(origin, lane.position)] = value
        lane.position += 1
        if lane.length and self.bytes[lane.match] == value:
            lane.length, lane.match = min(lane.length + 1, LONGEST), at(lane.match, lane.match + 1)
        else:
            lane.length = 0
        key = hashed((lane.last & (1 << 48) - 1) + 3) >> (32 - PLACE_BITS)
        place = self.places.get(key, 0)
        if not lane.length and place:
            length = 0
            while (
                length < min(LONGEST, lane.position)
                and self.bytes[at(place, place - 1 - length)] == self.bytes[at(origin, lane.position - 1 - length)]
            ):
                length += 1
            if length >= 6:
                lane.match, lane.length = place, length
        self.places[key] = origin | (lane.position & mask)
