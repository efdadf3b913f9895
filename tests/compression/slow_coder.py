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
    def __init__(self, *, lanes: int, words: list[bytes]) -> None:
        self.words, self.lanes = words, [Lane() for _ in range(lanes)]
        self.history = HISTORY
        while self.history * lanes > HISTORY:
            self.history //= 2
        self.matched = [[Chance(ONE * (k + 4) // (k + 5), 0) for k in range(LONGEST + 1)] for _ in range(2)]
        self.refined = defaultdict[tuple[bool, int, int, int], Chance](lambda: Chance(0, 0))
        self.mixers = defaultdict[tuple[bool, str, int], Mixer](Mixer)
        self.places, self.lines, self.bytes, self.ended = {}, {}, defaultdict(int), defaultdict(bool)
        self.begin()

    def begin(self, stream: bytes = b"") -> None:
        self.low, self.high, self.stream, self.taken = 0, ALL, stream, 0
        self.code = 0
        for _ in range(8):
            self.code = self.code << 8 | self._next()

    def encode(self, frequencies_BTV, tokens_BT, length_B) -> bytes:
        out = bytearray()
        for step in range(tokens_BT.shape[1]):
            for number, length in enumerate(length_B):
                if step < length:
                    word = self.words[tokens_BT[number, step]]
                    self._code(number, frequencies_BTV[number, step].tolist(), word, out)
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

    def _refined(self, ends: bool, context: int, counted: Chance) -> Chance:
        step = clamp(quotient(counted.odds + STEPS // 2 * STEP + STEP // 2, STEP), 0, STEPS - 1)
        key = (ends, context, min(counted.count, 15), step)
        if key not in self.refined:
            self.refined[key] = Chance(PROBABILITY[MOST + (step - STEPS // 2) * STEP], 6)
        return self.refined[key]

    def _code(self, number: int, frequencies: list[int], word: bytes | None, out: bytearray) -> int:
        """The token, told as `word` or read from the stream: its bytes, and after each whether it ends there, where it could go on."""
        lane, told = self.lanes[number], b""
        given = frequencies + [0] * (len(self.words) - len(frequencies))
        left = {one: 16 * frequency + 1 for one, frequency in zip(self.words, given, strict=True)}
        while True:
            if told in left:
                ends = len(left) == 1
                if not ends:
                    wanted = None if word is None else int(word == told)
                    ends = bool(self._ends(lane, len(told), left[told], sum(left.values()), wanted, out))
                if ends:
                    self.ended[number * self.history + (lane.position - 1) % self.history] = True
                    return self.words.index(told)
                del left[told]
            value = self._byte(lane, len(told), left, word, out)
            self._follow(lane, number * self.history, value)
            told += bytes([value])
            left = {one: weight for one, weight in left.items() if one.startswith(told)}

    def _ends(self, lane: Lane, place: int, ones: int, every: int, given: int | None, out: bytearray) -> int:
        lines = [self._line(context, 256 + place) for context in self._contexts(lane)]
        before = lane.match - lane.match % self.history + (lane.match - 1) % self.history
        run = (lane.length, int(self.ended[before])) if lane.length else None
        return self._decide(True, lane, 0, [line.branches[0] for line in lines], run, ones, every, given, out)

    def _byte(self, lane: Lane, place: int, left: dict[bytes, int], word: bytes | None, out: bytearray) -> int:
        contexts = self._contexts(lane)
        expected = 256 | self.bytes[lane.match] if lane.length else 0
        byte = 1
        for bit in range(8):
            if bit % 4 == 0:
                lines = [self._line(context, byte) for context in contexts]
            branch = (byte if bit < 4 else byte & ((1 << bit - 4) - 1) | 1 << bit - 4) - 1
            alike = [
                (256 | one[place], weight) for one, weight in left.items() if (256 | one[place]) >> (8 - bit) == byte
            ]
            ones = sum(weight for value, weight in alike if value >> (7 - bit) & 1)
            run = (lane.length, expected >> (7 - bit) & 1) if expected >> (8 - bit) == byte else None
            given = None if word is None else word[place] >> (7 - bit) & 1
            counted = [line.branches[branch] for line in lines]
            every = sum(weight for _, weight in alike)
            byte = 2 * byte + self._decide(False, lane, byte, counted, run, ones, every, given, out)
        return byte & 255

    def _contexts(self, lane: Lane) -> list[int]:
        last = [hashed(((lane.last & ((1 << 8 * length) - 1)) * 8 + k + 1) & ALL) for k, length in enumerate(LENGTHS)]
        return [*last, hashed((lane.word << 32) + 77)]

    def _decide(
        self,
        ends: bool,
        lane: Lane,
        bits: int,
        counted: list[Chance],
        run: tuple[int, int] | None,
        ones: int,
        every: int,
        given: int | None,
        out: bytearray,
    ) -> int:
        known = [chance.count > 0 for chance in counted]
        refined = [self._refined(ends, k, chance) for k, chance in enumerate(counted)]
        answers = [ODDS[clamp((ones << 16) // every, 1, ONE - 1)]]
        answers += [chance.odds if seen else 0 for chance, seen in zip(refined, known, strict=True)]
        length, wanted = run or (0, 0)
        trust = self.matched[ends][length]
        answers.append((trust.odds if wanted else -trust.odds) if run else 0)
        bit = int(ones == every)
        if 0 < ones < every:
            longest = max((k + 1 for k, seen in enumerate(known) if seen), default=0)
            sort = (1 + (length >= 12) + (length >= 24)) if run else 0
            chosen = [(ends, "length", 4 * longest + sort), (False, "bits", bits), (ends, "last", lane.last & 255)]
            mixed = [(self.mixers[key], self.mixers[key].mix(answers)) for key in chosen]
            p = PROBABILITY[MOST + quotient(sum(odds for _, odds in mixed), 3)]
            bit = self._bit(p, given, out)
            for mixer, odds in mixed:
                mixer.learn(answers, odds, bit)
        for chance, better, seen in zip(counted, refined, known, strict=True):
            if seen:
                better.learn(bit)
            chance.learn(bit)
        if run:
            trust.learn(int(bit == wanted))
        return bit

    def _follow(self, lane: Lane, origin: int, value: int) -> None:
        mask = self.history - 1

        def at(base: int, position: int) -> int:
            return base // self.history * self.history + (position & mask)

        lane.last = (lane.last << 8 | value) & ALL
        letter = value > 127 or value == ord("_") or ord("a") <= value | 32 <= ord("z")
        lane.word = hashed(lane.word * 256 + value + 1) if letter else 0
        self.bytes[at(origin, lane.position)] = value
        self.ended[at(origin, lane.position)] = False
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
