"""Tables 6 and 7 and Appendix A: models that differ in recurrence, encoding, loss and length, evaluated at many attention lengths.

Every choice is made on valid: the attention length that is best, and the best of those longer than a model was trained with. Test is read at the
chosen lengths alone.
"""

from dataclasses import dataclass
from typing import Any

from transformer_xl.console import progress
from transformer_xl.data.store import Split, Store
from transformer_xl.model import TransformerXL
from transformer_xl.studies import lengths as attention
from transformer_xl.studies.ablation_report import make_report
from transformer_xl.studies.lengths import Point
from transformer_xl.studies.models import Asked, Base, transformer
from transformer_xl.studies.report import Report
from transformer_xl.studies.runs import Setting, Trained, remembered, trained, variant_model
from transformer_xl.studies.sentences import in_sentences
from transformer_xl.studies.tables import LENGTHENED, XL, Ablation, BaseName


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model of one seed."""

    trained: Trained
    init: Point
    """On valid, as trained."""
    points: tuple[Point, ...]
    """On valid, length by length."""
    best: Point
    told: dict[str, Point]
    """On test: as trained (init), at the best length (best), at the trained length by the sweep's own rule (level), at the best of the longer ones (longer)."""
    windows: dict[str, Point]
    """Of models without memory, on the beginning of test: a window for each token (sliding), and the same tokens as trained (level)."""

    @property
    def seconds(self) -> float:
        every = (self.init, *self.points, *self.told.values(), *self.windows.values())
        return self.trained.seconds + sum(point.seconds for point in every)


@dataclass(frozen=True, kw_only=True)
class Texts:
    valid: Split
    test: Split
    beginning: Split
    """Of test."""
    unit: str


def run_ablation(study: Ablation, setting: Setting) -> Report:
    store = prepared(setting, study.base)
    base = base_of(setting, study.base)
    valid, test = setting.valid(store), setting.test(store)
    few = setting.scale.window_tokens
    texts = Texts(valid=valid, test=test, beginning=test if few is None else test.first(few), unit=store.manifest.unit)
    results: dict[str, list[Result]] = {row.variant.name: [] for row in study.rows}
    if study.lengthened:
        results[LENGTHENED] = []
    with progress(setting.study, total=len(results) * setting.seeds, unit="models") as done:
        # Seed by seed: who stops halfway has whole tables of fewer seeds, not half a table.
        for seed in range(1, setting.seeds + 1):
            segment = variant_model(base, XL, store=store, seed=seed).config.training.segment
            for row in study.rows:
                done(0, note=f"{row.variant.name}, seed {seed}")
                asked = variant_model(base, row.variant, store=store, seed=seed)
                lengths = attention.sweep_lengths(asked.config, segment=segment)
                results[row.variant.name].append(measured(setting, asked, store, texts, seed=seed, lengths=lengths))
                done(1)
            if study.lengthened:
                done(0, note=f"{LENGTHENED}, seed {seed}")
                standard = base_of(setting, study.lengthened.base)
                asked = variant_model(standard, XL, store=store, seed=seed)
                shares = {
                    share: round(share * attention.trained_attention(asked.config)) for share in study.lengthened.paper
                }
                lengths = sorted(shares.values())
                results[LENGTHENED].append(
                    measured(setting, asked, store, texts, seed=seed, lengths=lengths, told=shares)
                )
                done(1)
    return make_report(study, setting, results, store=store, texts=texts)


def base_of(setting: Setting, name: BaseName) -> Base:
    base: Base = getattr(setting.scale, name)
    return base


def prepared(setting: Setting, name: BaseName) -> Store:
    store = setting.store(base_of(setting, name))
    return in_sentences(store, out=setting.out) if name == "sentences" else store


def measured(
    setting: Setting,
    asked: Asked,
    store: Store,
    texts: Texts,
    *,
    seed: int,
    lengths: list[int],
    told: dict[float, int] | None = None,
) -> Result:
    """`told`: the lengths that test is read at by name, in place of the chosen ones."""
    model = trained(setting, asked, store=store, seed=seed)
    key = {
        "valid": len(texts.valid),
        "test": len(texts.test),
        "beginning": len(texts.beginning),
        "lengths": lengths,
        "unit": texts.unit,
        "told": None if told is None else {f"{share:.4g}": length for share, length in told.items()},
    }
    name = "attention" if told is None else "lengthened"
    found = remembered(
        model.folder,
        name,
        key=key,
        compute=lambda: Measuring(setting, model, texts).found(lengths, told),
    )

    def points(by_name: dict[str, Any]) -> dict[str, Point]:
        return {each: Point(**point) for each, point in by_name.items()}

    return Result(
        trained=model,
        init=Point(**found["init"]),
        points=tuple(Point(**point) for point in found["points"]),
        best=Point(**found["best"]),
        told=points(found["told"]),
        windows=points(found["windows"]),
    )


class Measuring:
    """One model's figures, each length of each text once."""

    def __init__(self, setting: Setting, model: Trained, texts: Texts) -> None:
        weights = model.load(device=setting.device).model
        assert isinstance(weights, TransformerXL), "every row is a variant of it"
        self.weights, self.model, self.texts, self.config = weights, model, texts, model.asked.config

    def found(self, lengths: list[int], told: dict[float, int] | None) -> dict[str, Any]:
        trained_at = attention.trained_attention(self.config)
        clamped = lengths if told is None and transformer(self.config).encoding == "relative" else []
        asked = [(length, 0) for length in lengths] + [
            (length, trained_at) for length in clamped if length > trained_at
        ]
        valid, test = self.texts.valid, self.texts.test
        most = (len(asked) + 1) * (len(valid) - 1) + 4 * (len(test) - 1)
        with progress(f"evaluating {self.model.asked.name}", total=most) as self.advance:
            init = self.as_trained(valid)
            points = [self.at(valid, length, clamp) for length, clamp in asked]
            best = attention.best_point((init, *points), unit=self.texts.unit)
            if told is None:
                figures = self.at_chosen(points, best, init, trained_at)
                windows = self.windows() if not self.config.model.memory else {}
            else:
                windows = {}
                figures = {"init": self.as_trained(test)}
                figures |= {f"at {share:.4g}": self.at(test, length) for share, length in told.items()}
        return {
            "init": init.as_json(),
            "points": [point.as_json() for point in points],
            "best": best.as_json(),
            "told": {name: point.as_json() for name, point in figures.items()},
            "windows": {name: point.as_json() for name, point in windows.items()},
        }

    def at_chosen(self, points: list[Point], best: Point, init: Point, trained_at: int) -> dict[str, Point]:
        longer = [point for point in points if point.attention > trained_at]
        at: dict[tuple[int, int], Point] = {}

        def told(point: Point) -> Point:
            place = (point.attention, point.clamp)
            if place not in at:
                at[place] = self.at(self.texts.test, *place)
            return at[place]

        as_trained = self.as_trained(self.texts.test)
        level = next(point for point in points if (point.attention, point.clamp) == (trained_at, 0))
        found = {"init": as_trained, "best": as_trained if best == init else told(best), "level": told(level)}
        if longer:
            found["longer"] = told(attention.best_point(longer, unit=self.texts.unit))
        return found

    def windows(self) -> dict[str, Point]:
        fed, text, unit = attention.fed_at_once(self.config), self.texts.beginning, self.texts.unit
        sliding = attention.in_windows(self.weights, text, attention=fed, unit=unit, advance=self.advance)
        return {"sliding": sliding, "level": self.as_trained(text)}

    def as_trained(self, text: Split) -> Point:
        unit = self.texts.unit
        return attention.as_trained(self.weights, text, config=self.config, unit=unit, advance=self.advance)

    def at(self, text: Split, length: int, clamp: int = 0) -> Point:
        unit = self.texts.unit
        return attention.at_attention(
            self.weights, text, attention=length, clamp=clamp, unit=unit, advance=self.advance
        )
