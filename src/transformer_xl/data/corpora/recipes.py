"""The corpora we know: which files, where they live, how to tell the right ones, and what must come out. Data only.

Checksums and counts were measured on real copies; a store whose counts differ from these is refused.
"""

from dataclasses import dataclass, field

from transformer_xl.data.store import Unit


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    name: str
    """Its name, with or without .gz, .xz or .bz2, in a folder or an archive; `*` stands for anything."""
    bytes: int | None = None
    """Size once decompressed; None where no copy was at hand to measure."""
    md5: str | None = None
    """Checksum once decompressed; None where no copy was at hand to measure. Then only the counts can tell."""
    splits: tuple[str, ...]
    """The splits read from it."""
    at_most: int = 1 << 30
    """Bytes that none has more of, where the size itself is not known."""
    most_files: int = 1
    """How many there are of this name, where `*` stands in it."""

    @property
    def most_bytes(self) -> int:
        """What it may become: reading stops there."""
        return self.at_most if self.bytes is None else self.bytes

    @property
    def described(self) -> str:
        """For whoever must bring it, with what is known to tell it by."""
        size = f"{self.bytes:,} bytes, md5 {self.md5}" if self.md5 else "no checksum known"
        return f"{self.name} ({size})"


@dataclass(frozen=True, kw_only=True)
class Place:
    address: str
    checksum: str | None = None
    """`md5:...` or `sha256:...` of the file at that address; None where only its contents are verified."""
    at_most: int = 2 << 30
    """Bytes that the file there has no more of: a download stops there."""

    @property
    def file_name(self) -> str:
        return self.address.rsplit("/", 1)[1]


@dataclass(frozen=True, kw_only=True)
class Counts:
    tokens: dict[str, int]
    """Split -> tokens; a split that may differ from user to user is not named."""
    vocabulary: int | None
    """None where it depends on the vocabulary file brought."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    title: str
    unit: Unit
    rule: str
    """The rule in a sentence or two, copied into every store and under every figure made from it."""
    documents: str
    """What begins a document, in words."""
    files: tuple[KnownFile, ...]
    places: tuple[Place, ...]
    counts: Counts
    vocabulary_places: tuple[Place, ...] = ()
    """Where a vocabulary file of its own lives, for the one corpus that has one."""
    vocabulary_file: str | None = None
    """Name under which a vocabulary is looked for beside the text."""
    train_lines: int | None = None
    alternatives: dict[str, Counts] = field(default_factory=dict)
    """Counts under the corpus's other rules, by the name of the rule."""

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in ("train", "valid", "test") if any(split in file.splits for file in self.files))


ALL = ("train", "valid", "test")
BY_POSITION = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}

# The checksums of the three splits, as people pass them around; the whole is verified first, so these can only fail together.
SPLITS_MD5 = {
    "enwik8": {
        "train": "a23bcd55c7344e2ccb33ed04297e49d7",
        "valid": "afc1109404cf229087753a6ee1afdcf4",
        "test": "6fb37a544556262e41b8fe64c14a0457",
    },
    "text8": {
        "train": "c11c16d3c5dea4e747fdd2d4e14ae571",
        "valid": "8b4e6b95cd624ff2246d77b41af97c80",
        "test": "4aa15c339c5d1d7a85ecf52989ce1113",
    },
}

ENWIK8 = Recipe(
    name="enwik8",
    title="enwik8: the first 100 MB of a 2006 Wikipedia dump",
    unit="bits_per_character",
    rule="bytes as they are, newlines kept; 90M / 5M / 5M",
    documents="a <page> line",
    files=(KnownFile(name="enwik8", bytes=100_000_000, md5="a1fa5ffddb56f4953e226637dabbb36a", splits=ALL),),
    places=(Place(address="http://mattmahoney.net/dc/enwik8.zip", at_most=40_000_000),),
    counts=Counts(tokens=BY_POSITION, vocabulary=205),
    alternatives={
        "newlines dropped": Counts(tokens={"train": 88_982_818, "valid": 4_945_742, "test": 4_943_417}, vocabulary=204)
    },
)

TEXT8 = Recipe(
    name="text8",
    title="text8: the same Wikipedia, letters a to z and single spaces",
    unit="bits_per_character",
    rule="27 symbols, every one kept; 90M / 5M / 5M",
    documents="none are marked",
    files=(KnownFile(name="text8", bytes=100_000_000, md5="3bea1919949baf155f99411df5fada7e", splits=ALL),),
    places=(Place(address="http://mattmahoney.net/dc/text8.zip", at_most=40_000_000),),
    counts=Counts(tokens=BY_POSITION, vocabulary=27),
)

PTB = Recipe(
    name="ptb",
    title="Penn Treebank, words, as Mikolov prepared it",
    unit="perplexity_per_word",
    rule="words between white space, <eos> after every line; vocabulary of all three splits in order of first appearance",
    documents="none are marked",
    files=(
        KnownFile(name="ptb.train.txt", bytes=5_101_618, md5="f26c4b92c5fdc7b3f8c7cdcb991d8420", splits=("train",)),
        KnownFile(name="ptb.valid.txt", bytes=399_782, md5="aa0affc06ff7c36e977d7cd49e3839bf", splits=("valid",)),
        KnownFile(name="ptb.test.txt", bytes=449_945, md5="8b80168b89c18661a38ef683c0dc3721", splits=("test",)),
    ),
    places=(Place(address="http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz", at_most=40_000_000),),
    counts=Counts(tokens={"train": 929_589, "valid": 73_760, "test": 82_430}, vocabulary=10_000),
)

WIKITEXT_2 = Recipe(
    name="wikitext-2",
    title="WikiText-2: a small stand-in for WikiText-103",
    unit="perplexity_per_word",
    rule="words between white space, case kept, <eos> after every line; vocabulary of all three splits by falling frequency, <eos> first",
    documents="an article's heading",
    files=(
        KnownFile(
            name="wiki.train.tokens", bytes=10_797_148, md5="34a77ebe59551b3a3b3d8c0a2797c976", splits=("train",)
        ),
        KnownFile(name="wiki.valid.tokens", bytes=1_121_681, md5="d756d22ab2310e7e60c094bea5c5a8eb", splits=("valid",)),
        KnownFile(name="wiki.test.tokens", bytes=1_256_449, md5="781c9418ab9414bd09e4aad825aae752", splits=("test",)),
    ),
    places=(
        Place(
            address="https://wikitext.smerity.com/wikitext-2-v1.zip",
            checksum="md5:542ccefacc6c27f945fb54453812b3cd",
            at_most=10_000_000,
        ),
    ),
    counts=Counts(tokens={"train": 2_088_628, "valid": 217_646, "test": 245_569}, vocabulary=33_278),
)

WIKITEXT_103 = Recipe(
    name="wikitext-103",
    title="WikiText-103: 28,475 good articles",
    unit="perplexity_per_word",
    rule="words between white space, case kept, <eos> after every line; vocabulary of train by falling frequency, <eos> first",
    documents="an article's heading",
    files=(
        KnownFile(name="wiki.train.tokens", splits=("train",)),
        KnownFile(name="wiki.valid.tokens", bytes=1_142_309, md5="b465742f79b17b85bad5699479b13301", splits=("valid",)),
        KnownFile(name="wiki.test.tokens", bytes=1_281_077, md5="f202e4c8148839782adc13e7d1ca58e0", splits=("test",)),
    ),
    places=(
        Place(
            address="https://wikitext.smerity.com/wikitext-103-v1.zip",
            checksum="md5:9ddaacaf6af0710eda8c456decff7832",
            at_most=250_000_000,
        ),
    ),
    counts=Counts(tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569}, vocabulary=267_735),
    vocabulary_file="vocab_counts.txt",
    train_lines=1_801_350,
)

LM1B = Recipe(
    name="lm1b",
    title="One Billion Word: shuffled sentences of news",
    unit="perplexity_per_word",
    rule="<S> words <S> for every sentence, words outside the vocabulary are <UNK>; the pair <S> -> <S> is not a target unless asked",
    documents="none: memory runs on over sentences",
    files=(
        KnownFile(name="news.en-*-of-00100", at_most=100_000_000, most_files=99, splits=("train",)),
        KnownFile(
            name="news.en.heldout-00000-of-00050",
            bytes=829_492,
            md5="ce1e84fb6d856ced56ba2c551104f6ac",
            splits=("valid", "test"),
        ),
    ),
    places=(
        Place(
            address="http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
            checksum="sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
            at_most=2_000_000_000,
        ),
    ),
    # One <S> before each of the 6,075 sentences and one behind: 153,583 words + 2 x 6,075.
    counts=Counts(tokens={"valid": 165_733, "test": 165_733}, vocabulary=None),
    vocabulary_places=(
        Place(address="https://github.com/rafaljozefowicz/lm/raw/master/1b_word_vocab.txt", at_most=50_000_000),
    ),
    vocabulary_file="1b_word_vocab.txt",
)

RECIPES = {recipe.name: recipe for recipe in (ENWIK8, TEXT8, PTB, WIKITEXT_2, WIKITEXT_103, LM1B)}

PYTHON = "python"
NAMES = (*RECIPES, PYTHON)


def corpora_table() -> str:
    titles = {name: recipe.title for name, recipe in RECIPES.items()}
    titles[PYTHON] = "the source of this Python's standard library, without tests"
    return "\n".join(f"  {name:<13} {title}" for name, title in titles.items())


def places_table() -> str:
    """Every known place, for people whose machine has no network or whose link died."""
    lines = []
    for recipe in RECIPES.values():
        for place in (*recipe.places, *recipe.vocabulary_places):
            lines.append(f"  {recipe.name:<13} {place.address}")
            if place.checksum:
                lines.append(f"  {'':<13}   {place.checksum}")
    return "\n".join(lines)
