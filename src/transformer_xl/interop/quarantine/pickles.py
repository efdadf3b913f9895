"""A pickle read without running it: bytes in, plain Python values and inert stand-ins out. Knows no file.

A pickle is a program for a small stack machine. This is that machine with everything left out that reaches outside: names become `Name`s if they
are on the list, calls become values made by us, and any other instruction ends the reading with its place.
"""

import re
from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import Any

from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.stand_ins import KEYS, build, call, resolve

MOST_INSTRUCTIONS = 50_000_000
DEEPEST = 200
"""Marks open at once, and tuples within tuples: no checkpoint goes beyond twenty."""
LONGEST_NUMBER_BYTES = 64

U32, I32, F64 = Struct("<I"), Struct("<i"), Struct(">d")
BINUNICODE, SHORT_BINUNICODE, LONG_BINGET, LONG_BINPUT, MEMOIZE = 0x58, 0x8C, 0x6A, 0x72, 0x94
BININT1, BININT2, BININT, BINGET, BINPUT, STOP = 0x4B, 0x4D, 0x4A, 0x68, 0x71, 0x2E
PUT_AND_NEXT = Struct("<BIBI")
RUNS = {
    LONG_BINGET: (re.compile(rb"(?:j.{4})+", re.DOTALL), Struct("<xI")),
    BININT: (re.compile(rb"(?:j.{4}J.{4})+", re.DOTALL), Struct("<xIxi")),
    BININT2: (re.compile(rb"(?:j.{4}M.{2})+", re.DOTALL), Struct("<xIxH")),
}
"""A list of remembered words, and tables of their numbers, taken at once; by the instruction after the first LONG_BINGET."""
Persistent = Callable[[object], object]


def read_pickle(data: bytes, start: int = 0, *, persistent: Persistent | None = None) -> tuple[Any, int]:
    """The value of the pickle that begins at `start`, and where it ends. `persistent` makes sense of references into the file."""
    machine = _Machine(data, start, persistent)
    try:
        return machine.run()
    except ImportRefused as error:
        raise ImportRefused(f"the pickle stops at byte {machine.begun:,}: {error}") from None
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, AttributeError, StructError):
        raise ImportRefused(
            f"the pickle is damaged at byte {machine.begun:,}: its instruction finds no operands"
        ) from None
    except MemoryError:
        raise ImportRefused(f"the pickle asks for more memory at byte {machine.begun:,} than its file needs") from None


class _Machine:
    def __init__(self, data: bytes, start: int, persistent: Persistent | None) -> None:
        self.data = data
        self.position = start
        self.begun = start
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.depth: dict[int, tuple[int, Any]] = {}

    def run(self) -> tuple[Any, int]:
        """The few instructions that a vocabulary is made of stand here, without a call, and long runs of them are taken at once; the others below."""
        data, memo, stack, position = self.data, self.memo, self.stack, self.position
        put_and_next = PUT_AND_NEXT.unpack_from
        u32, i32, others, size = U32.unpack_from, I32.unpack_from, INSTRUCTIONS, len(self.data)
        try:
            for _ in range(MOST_INSTRUCTIONS):
                code = data[position]
                if code == BINUNICODE:
                    begin, length = position + 5, u32(data, position + 1)[0]
                    while True:  # a text is nearly always remembered, and in a list followed by the next
                        position = begin + length
                        if position >= size:
                            raise ImportRefused("a text reaches past the end of the file")
                        text = data[begin:position].decode()
                        stack.append(text)
                        if data[position] != LONG_BINPUT or position + 10 > size:
                            break
                        _, index, code, length = put_and_next(data, position)
                        memo[index] = text
                        if code != BINUNICODE:
                            position += 5
                            break
                        begin = position + 10
                elif code == SHORT_BINUNICODE:
                    begin = position + 2
                    end = begin + data[position + 1]
                    if end >= size:
                        raise ImportRefused("a text reaches past the end of the file")
                    text = data[begin:end].decode()
                    stack.append(text)
                    position = end
                    if data[end] == MEMOIZE:
                        memo[len(memo)] = text
                        position = end + 1
                elif code == LONG_BINGET:
                    following = data[position + 5]
                    if following in RUNS:
                        pattern, form = RUNS[following]
                        run = pattern.match(data, position)
                        if run is None:
                            raise IndexError
                        if following == LONG_BINGET:
                            stack += [memo[index] for (index,) in form.iter_unpack(run[0])]
                        else:
                            for index, number in form.iter_unpack(run[0]):
                                stack += (memo[index], number)
                        position = run.end()
                    else:
                        stack.append(memo[u32(data, position + 1)[0]])
                        position += 5
                elif code == BININT1:
                    stack.append(data[position + 1])
                    position += 2
                elif code == BININT2:
                    stack.append(data[position + 1] | data[position + 2] << 8)
                    position += 3
                elif code == BININT:
                    stack.append(i32(data, position + 1)[0])
                    position += 5
                elif code == BINGET:
                    stack.append(memo[data[position + 1]])
                    position += 2
                elif code == BINPUT:
                    memo[data[position + 1]] = stack[-1]
                    position += 2
                elif code == LONG_BINPUT:
                    memo[u32(data, position + 1)[0]] = stack[-1]
                    position += 5
                elif code == MEMOIZE:
                    memo[len(memo)] = stack[-1]
                    position += 1
                elif code == STOP:
                    if len(stack) != 1 or self.marks:
                        raise ImportRefused("it ends with more than one value")
                    return stack[0], position + 1
                else:
                    if code not in others:
                        raise ImportRefused(f"instruction {code:#04x} is none that a checkpoint needs")
                    self.position = position + 1
                    others[code](self)
                    position, stack = self.position, self.stack
            raise ImportRefused(f"it has more than {MOST_INSTRUCTIONS:,} instructions")
        except Exception:
            self.begun = position
            raise

    # --- operands

    def take(self, count: int) -> bytes:
        if count < 0 or self.position + count > len(self.data):
            raise ImportRefused(f"it declares {count:,} bytes where {len(self.data) - self.position:,} are left")
        self.position += count
        return self.data[self.position - count : self.position]

    def count(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.position, self.position + 4096)
        text = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return text

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise ImportRefused("it closes a mark that was never opened")
        items, self.stack = self.stack, self.marks.pop()
        return items

    # --- instructions

    def mark(self) -> None:
        if len(self.marks) >= DEEPEST:
            raise ImportRefused(f"it nests deeper than {DEEPEST}")
        self.marks.append(self.stack)
        self.stack = []

    def make_tuple(self, items: list[Any]) -> None:
        value = tuple(items)
        depth = 1 + max((self.depth.get(id(item), (0,))[0] for item in value if type(item) is tuple), default=0)
        if depth > DEEPEST:
            raise ImportRefused(f"it nests deeper than {DEEPEST}")
        if depth > 1:
            self.depth[id(value)] = (depth, value)
        self.stack.append(value)

    def make_list(self) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def make_dictionary(self) -> None:
        items = self.since_mark()
        self.stack.append({})
        self.set_items(items)

    def tuple_of(self, count: int) -> None:
        items = self.stack[-count:]
        if len(items) != count:
            raise IndexError
        del self.stack[-count:]
        self.make_tuple(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ImportRefused("it puts items into something that is no dictionary")
        if not KEYS.issuperset(map(type, items[::2])):
            raise ImportRefused("a key of a dictionary is neither text nor a number")
        target.update(zip(items[::2], items[1::2], strict=True))

    def append_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ImportRefused("it appends to something that is no list")
        target.extend(items)

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ImportRefused("it asks for a name that is no text")
        self.stack.append(resolve(module, name))

    def call(self, *, keywords: bool = False) -> None:
        """Of a function, or of a class that makes an object."""
        if keywords and self.stack.pop() != {}:
            raise ImportRefused("it makes an object by keywords")
        arguments, name = self.stack.pop(), self.stack.pop()
        self.stack.append(call(name, arguments))

    def object_since_mark(self) -> None:
        items = self.since_mark()
        self.stack.append(call(items[0], tuple(items[1:])))

    def reference(self) -> None:
        if self.persistent is None:
            raise ImportRefused("it refers to tensors, and this file has none")
        self.stack.append(self.persistent(self.stack.pop()))

    def whole_number(self, count: int) -> None:
        if count > LONGEST_NUMBER_BYTES:
            raise ImportRefused(f"it holds a number of {count:,} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def number_line(self, *, long: bool = False) -> None:
        text = self.line()
        if len(text) > 4 * LONGEST_NUMBER_BYTES:
            raise ImportRefused("it holds a number of too many digits")
        if not long and text in ("00", "01"):
            self.stack.append(text == "01")
        else:
            self.stack.append(int(text.removesuffix("L") if long else text))

    def old_text(self, count: int) -> None:
        """Python 2 had one kind of string for text and bytes; it is text where it can be."""
        value = self.take(count)
        try:
            self.stack.append(value.decode("utf-8"))
        except UnicodeDecodeError:
            self.stack.append(value)

    def protocol(self) -> None:
        if self.take(1)[0] > 5:
            raise ImportRefused(f"its protocol is {self.data[self.position - 1]}, and 5 is the newest")

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()


INSTRUCTIONS: dict[int, Callable[[_Machine], object]] = {
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop,
    ord("1"): _Machine.since_mark,
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("I"): _Machine.number_line,
    ord("L"): lambda m: m.number_line(long=True),
    ord("F"): lambda m: m.stack.append(float(m.line())),
    ord("G"): lambda m: m.stack.append(F64.unpack(m.take(8))[0]),
    0x8A: lambda m: m.whole_number(m.count(1)),
    0x8B: lambda m: m.whole_number(m.count(4)),
    ord("V"): lambda m: m.stack.append(m.line().encode("ascii").decode("raw_unicode_escape")),
    0x8D: lambda m: m.stack.append(m.take(m.count(8)).decode("utf-8", "surrogatepass")),
    ord("U"): lambda m: m.old_text(m.count(1)),
    ord("T"): lambda m: m.old_text(m.count(4)),
    ord("C"): lambda m: m.stack.append(m.take(m.count(1))),
    ord("B"): lambda m: m.stack.append(m.take(m.count(4))),
    0x8E: lambda m: m.stack.append(m.take(m.count(8))),
    ord(")"): lambda m: m.stack.append(()),
    ord("t"): lambda m: m.make_tuple(m.since_mark()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("]"): lambda m: m.stack.append([]),
    ord("l"): _Machine.make_list,
    ord("a"): lambda m: m.append_items([m.stack.pop()]),
    ord("e"): lambda m: m.append_items(m.since_mark()),
    ord("}"): lambda m: m.stack.append({}),
    ord("d"): _Machine.make_dictionary,
    ord("s"): lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    0x8F: lambda m: m.stack.append([]),  # a set, which nobody here needs to be one
    0x90: lambda m: m.append_items(m.since_mark()),
    0x91: _Machine.make_list,
    ord("c"): lambda m: m.stack.append(resolve(m.line(), m.line())),
    0x93: _Machine.stack_name,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    0x92: lambda m: m.call(keywords=True),
    ord("o"): _Machine.object_since_mark,
    ord("b"): lambda m: build(m.stack[-2], m.stack.pop()),
    ord("Q"): _Machine.reference,
    ord("p"): lambda m: m.memo.__setitem__(int(m.line()), m.stack[-1]),
    ord("g"): lambda m: m.stack.append(m.memo[int(m.line())]),
    0x80: _Machine.protocol,
    0x95: lambda m: m.take(8),  # a frame only says how many bytes to read at once
}
"""Everything a checkpoint needs. Left out: extension codes, instances by name (INST), out-of-band buffers, references by text."""
