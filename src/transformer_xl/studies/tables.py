"""The rows of the paper's Tables 6 and 7 and of Appendix A, and what the paper claims of them. Data only."""

from dataclasses import dataclass
from typing import Literal

from transformer_xl.studies.models import Variant
from transformer_xl.studies.verdicts import Claim

BaseName = Literal["ablation", "sentences", "standard"]


@dataclass(frozen=True, kw_only=True)
class Row:
    variant: Variant
    title: str = ""
    paper_init: float | None = None
    paper_best: float | None = None
    """None: a row that the paper does not have."""
    paper_attention: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ablation:
    title: str
    base: BaseName
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()
    lengthened: "Lengthened | None" = None


@dataclass(frozen=True, kw_only=True)
class Lengthened:
    """One model at several attention lengths: the third block of Table 6."""

    base: BaseName
    paper_init: float
    paper: dict[float, tuple[float, int]]
    """By attention length, over that of training: perplexity, and the length."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        shares = sorted(self.paper)
        pairs = [*zip(shares[1:], shares, strict=False), (shares[-1], shares[0])]
        return tuple(
            Claim(
                text=f"the standard model is better at {longer:.2g} times its trained attention than at {shorter:.2g} times",
                better=(LENGTHENED, column_at(longer)),
                worse=(LENGTHENED, column_at(shorter)),
            )
            for longer, shorter in dict.fromkeys(pairs)
        )


LENGTHENED = "standard"
"""As if it were the name of a row."""


def column_at(share: float) -> str:
    return f"at {share:.4g}"


XL = Variant(name="transformer-xl")
SHAW = Variant(name="shaw", encoding="shaw")
XL_HALF = Variant(name="transformer-xl-half", half_loss=True)
NO_RECURRENCE = Variant(name="no-recurrence", recurrence=False)
NO_RECURRENCE_HALF = Variant(name="no-recurrence-half", recurrence=False, half_loss=True)
SHAW_NO_RECURRENCE = Variant(name="shaw-no-recurrence", recurrence=False, encoding="shaw")
SHAW_NO_RECURRENCE_HALF = Variant(name="shaw-no-recurrence-half", recurrence=False, encoding="shaw", half_loss=True)
ABSOLUTE_HALF = Variant(name="absolute-half", recurrence=False, encoding="absolute", half_loss=True)
PER_LAYER_HALF = Variant(name="per-layer-half", recurrence=False, encoding="per_layer", half_loss=True)
XL_HALF_TWICE = Variant(name="transformer-xl-half-twice", half_loss=True, steps=2)
NO_RECURRENCE_HALF_TWICE = Variant(name="no-recurrence-half-twice", recurrence=False, half_loss=True, steps=2)
SHAW_HALF_TWICE = Variant(
    name="shaw-no-recurrence-half-twice", recurrence=False, encoding="shaw", half_loss=True, steps=2
)
LONGER = Variant(name="no-recurrence-176", recurrence=False, length=176 / 128)
LONGER_HALF = Variant(name="no-recurrence-half-172", recurrence=False, half_loss=True, length=172 / 128)


def _better(text: str, better: Variant, worse: Variant) -> Claim:
    return Claim(text=text, better=(better.name, "best"), worse=(worse.name, "best"))


def _longer(text: str, variant: Variant) -> Claim:
    return Claim(text=text, better=(variant.name, "longer"), worse=(variant.name, "level"))


def _not_longer(text: str, variant: Variant) -> Claim:
    return Claim(text=text, better=(variant.name, "longer"), worse=(variant.name, "level"), denied=True)


ENCODING = Ablation(
    title="Recurrence, encoding and loss (the paper's Table 6)",
    base="ablation",
    rows=(
        Row(variant=XL, title="Transformer-XL", paper_init=27.02, paper_best=26.77, paper_attention=500),
        Row(variant=SHAW, paper_init=27.94, paper_best=27.94, paper_attention=256),
        Row(variant=XL_HALF, paper_init=28.69, paper_best=28.33, paper_attention=460),
        Row(variant=NO_RECURRENCE, paper_init=29.59, paper_best=29.02, paper_attention=260),
        Row(variant=NO_RECURRENCE_HALF, paper_init=30.10, paper_best=30.10, paper_attention=120),
        Row(variant=SHAW_NO_RECURRENCE, paper_init=29.75, paper_best=29.75, paper_attention=120),
        Row(variant=SHAW_NO_RECURRENCE_HALF, paper_init=30.50, paper_best=30.50, paper_attention=120),
        Row(variant=ABSOLUTE_HALF, paper_init=30.97, paper_best=30.97, paper_attention=120),
        Row(variant=PER_LAYER_HALF, title="Transformer", paper_init=31.16, paper_best=31.16, paper_attention=120),
        # Half loss scores half of what is fed, and so moves through half as much text: for as much, twice the steps.
        Row(variant=XL_HALF_TWICE, title="twice the steps"),
        Row(variant=NO_RECURRENCE_HALF_TWICE, title="twice the steps"),
        Row(variant=SHAW_HALF_TWICE, title="twice the steps"),
    ),
    claims=(
        _better("recurrence is better than none (ours, full loss)", XL, NO_RECURRENCE),
        _better("recurrence is better than none (ours, half loss)", XL_HALF, NO_RECURRENCE_HALF),
        _better("recurrence is better than none (Shaw, full loss)", SHAW, SHAW_NO_RECURRENCE),
        _better("our encoding is better than Shaw's (recurrence, full loss)", XL, SHAW),
        _better("our encoding is better than Shaw's (no recurrence, full loss)", NO_RECURRENCE, SHAW_NO_RECURRENCE),
        _better(
            "our encoding is better than Shaw's (no recurrence, half loss)", NO_RECURRENCE_HALF, SHAW_NO_RECURRENCE_HALF
        ),
        _better(
            "relative encodings are better than absolute ones (Shaw, Vaswani)", SHAW_NO_RECURRENCE_HALF, ABSOLUTE_HALF
        ),
        _better("Vaswani's encoding is better than Al-Rfou's", ABSOLUTE_HALF, PER_LAYER_HALF),
        _better("full loss is better than half at equal steps (ours, recurrence)", XL, XL_HALF),
        _better(
            "full loss is better than half at equal steps (ours, no recurrence)", NO_RECURRENCE, NO_RECURRENCE_HALF
        ),
        _better(
            "full loss is better than half at equal steps (Shaw, no recurrence)",
            SHAW_NO_RECURRENCE,
            SHAW_NO_RECURRENCE_HALF,
        ),
        _better("full loss is better than half at as many scored tokens (ours, recurrence)", XL, XL_HALF_TWICE),
        _better(
            "full loss is better than half at as many scored tokens (ours, no recurrence)",
            NO_RECURRENCE,
            NO_RECURRENCE_HALF_TWICE,
        ),
        _better(
            "full loss is better than half at as many scored tokens (Shaw, no recurrence)",
            SHAW_NO_RECURRENCE,
            SHAW_HALF_TWICE,
        ),
        _longer("Transformer-XL gains by a longer attention than it was trained with", XL),
        _longer("so does our encoding with half loss", XL_HALF),
        _longer("so does our encoding without recurrence", NO_RECURRENCE),
        _not_longer("Shaw's encoding does not", SHAW),
        _not_longer("Shaw's encoding without recurrence does not", SHAW_NO_RECURRENCE),
        _not_longer("Vaswani's encoding does not", ABSOLUTE_HALF),
    ),
    lengthened=Lengthened(
        base="standard",
        paper_init=23.43,
        paper={1.0: (23.35, 300), 450 / 300: (23.16, 450), 640 / 300: (23.09, 640)},
    ),
)
FRAGMENTATION = Ablation(
    title="Context fragmentation: sentences without order (the paper's Table 7)",
    base="sentences",
    rows=(
        Row(variant=XL, title="Ours", paper_best=25.2),
        Row(variant=SHAW, title="With Shaw's encoding", paper_best=25.7),
        Row(variant=NO_RECURRENCE, title="Without recurrence", paper_best=27.1),
    ),
    claims=(
        _better("recurrence is better than none where nothing depends on earlier sentences", XL, NO_RECURRENCE),
        _better("our encoding is better than Shaw's", XL, SHAW),
    ),
    notes=("the paper gives one figure for each row, and not its attention length: it stands beside our best",),
)
MEMORY_MATCHED = Ablation(
    title="Equal memory: a longer segment in place of recurrence (the paper's Appendix A)",
    base="ablation",
    rows=(
        Row(variant=XL, paper_init=27.02, paper_best=26.77, paper_attention=500),
        Row(variant=XL_HALF, paper_init=28.69, paper_best=28.33, paper_attention=460),
        Row(variant=LONGER, paper_init=28.43, paper_best=27.98, paper_attention=400),
        Row(variant=LONGER_HALF, paper_init=28.83, paper_best=28.83, paper_attention=120),
    ),
    claims=(
        _better("recurrence is better than a longer segment (full loss)", XL, LONGER),
        _better("recurrence is better than a longer segment (half loss)", XL_HALF, LONGER_HALF),
    ),
    notes=(
        "rows without recurrence are fed 176/128 and 172/128 times as many tokens at once, the paper's own lengths over its 128; lanes and steps are the"
        " same, so these rows read more text, which favours them",
    ),
)
