"""Table 8: how much context each model of a group makes use of (RECL). The metric is `analysis`'s; here are the groups and their models."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.analysis.contexts import Stretch, context_losses, make_stretch
from transformer_xl.analysis.recl import EffectiveLength, Group, effective_lengths, make_group
from transformer_xl.analysis.recl_pictures import draw_gain
from transformer_xl.checkpoint import RunFolder
from transformer_xl.console import progress
from transformer_xl.data.store import Split, Store
from transformer_xl.pictures import draw_lines
from transformer_xl.studies.intervals import BLOCKS, interval_of
from transformer_xl.studies.models import Asked, Base, Variant
from transformer_xl.studies.report import Report
from transformer_xl.studies.runs import Setting, Trained, remembered, trained, variant_model
from transformer_xl.studies.tables import NO_RECURRENCE, PER_LAYER_HALF, SHAW, XL
from transformer_xl.studies.verdicts import FEWEST_SEEDS, Told, verdict_of

RATIOS = ("0.1", "0.5", "1.0")
DRAWS = 200


@dataclass(frozen=True, kw_only=True)
class Member:
    """A model of a group."""

    name: str
    title: str
    base: Base
    variant: Variant | None
    """None: the base itself, a recurrent network."""
    paper: tuple[int, int, int]
    """For each of the ratios."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model of one seed: what it took, and its losses by context length."""

    trained: Trained
    parameters: int
    seconds: float
    losses: dict[int, Any]


def groups(setting: Setting) -> dict[str, list[Member]]:
    """The paper's two, each with its own baseline; every member of one has about as many parameters."""
    scale = setting.scale
    recurrent = (("qrnn", scale.qrnn, (500, 400, 300)), ("lstm", scale.lstm, (400, 300, 200)))
    others = [
        Member(name=name, title=name.upper(), base=base, variant=None, paper=paper)
        for name, base, paper in recurrent
        if base
    ]

    def member(variant: Variant, title: str, paper: tuple[int, int, int], *, base: Base = scale.ablation) -> Member:
        return Member(name=variant.name, title=title, base=base, variant=variant, paper=paper)

    standard = member(XL, "Transformer-XL", (900, 800, 700), base=scale.standard)
    ablation = [
        member(XL, "Transformer-XL", (700, 600, 500)),
        member(SHAW, "with Shaw's encoding", (400, 400, 300)),
        member(NO_RECURRENCE, "without recurrence", (300, 300, 300)),
        member(PER_LAYER_HALF, "Transformer", (128, 128, 128)),
    ]
    return {**({"recurrent": [standard, *others]} if others else {}), "ablation": ablation}


def run_recl(setting: Setting) -> Report:
    chosen = groups(setting)
    store = setting.store(setting.scale.ablation)
    split, step = store.split("test"), setting.scale.context_step
    lengths = list(range(step, setting.scale.longest_context + 1, step))
    stretch = make_stretch(split, lengths=lengths, tokens=None, most=setting.scale.context_tokens)
    pairs = [(member, seed) for group in chosen.values() for seed in seeds(setting) for member in group]
    every = [asked_member(member, store=store, seed=seed) for member, seed in pairs]
    members = {asked.name: asked for asked in every}
    found: dict[str, Measured] = {}
    with progress(setting.study, total=len(members), unit="models") as done:
        for name, asked in members.items():
            done(0, note=name)
            model = trained(setting, asked, store=store, seed=asked.config.training.seed)
            found[name] = measured(model, split, setting=setting, stretch=stretch)
            done(1)
    made: dict[str, list[Group]] = {name: [] for name in chosen}
    for name, seed in product(chosen, seeds(setting)):
        asked_of = {member.name: asked_member(member, store=store, seed=seed).name for member in chosen[name]}
        losses = {member: found[asked].losses for member, asked in asked_of.items()}
        made[name].append(make_group(losses, lengths=stretch.lengths))
    return report(setting, chosen, made, found, store=store, stretch=stretch)


def seeds(setting: Setting) -> range:
    return range(1, setting.seeds + 1)


def asked_member(member: Member, *, store: Store, seed: int) -> Asked:
    return variant_model(member.base, member.variant or member.name, store=store, seed=seed)


def measured(model: Trained, split: Split, *, setting: Setting, stretch: Stretch) -> Measured:
    started_at = time.perf_counter()
    checkpoint = model.load(device=setting.device)
    evaluation = checkpoint.config.evaluation
    if evaluation.memory:
        # As long as the longest context: what a model makes of c tokens is then not bounded by how many it may look at.
        evaluation = replace(evaluation, memory=max(stretch.lengths), same_length=False)
    contexts = context_losses(
        checkpoint.model,
        split,
        stretch=stretch,
        evaluation=evaluation,
        training=checkpoint.config.training,
        keep=RunFolder(model.folder).made("evaluations") / "study-contexts.npz",
        made_by={"step": checkpoint.about.step},
    )
    took = {"seconds": time.perf_counter() - started_at}
    seconds = remembered(model.folder, "contexts", key=contexts.about, compute=lambda: took)["seconds"]
    parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    return Measured(trained=model, parameters=parameters, seconds=seconds, losses=contexts.losses)


def drawn_again(made: Sequence[Group], *, ratio: float) -> dict[str, NDArray[np.float64]]:
    """Each model's length in every draw: so many seeds with replacement, so many blocks of the text with replacement; the mean over the drawn seeds."""
    random = np.random.default_rng(1)
    blocks = np.array_split(np.arange(made[0].positions), min(BLOCKS, made[0].positions))
    lengths: dict[str, list[float]] = {name: [] for name in made[0].names}
    for _ in range(DRAWS):
        places = np.concatenate([blocks[block] for block in random.integers(0, len(blocks), size=len(blocks))])
        seeds = random.integers(0, len(made), size=len(made))
        by_seed = {
            seed: effective_lengths(replace(made[seed], loss_ICP=made[seed].loss_ICP[:, :, places]), ratio=ratio)
            for seed in set(seeds)
        }
        for name in lengths:
            lengths[name].append(float(np.mean([by_seed[seed][name].length for seed in seeds])))
    return {name: np.array(found) for name, found in lengths.items()}


def told(
    members: Sequence[Member], made: Sequence[Group], drawn: Mapping[str, Mapping[str, NDArray[np.float64]]]
) -> list[Told]:
    """The paper's order within a group: each member makes use of more context than the next. The effect: by how many tokens."""
    found = []
    for (longer, shorter), ratio in product(pairwise(members), RATIOS):
        means = [effective_lengths(group, ratio=float(ratio)) for group in made]
        value = float(np.mean([by_name[longer.name].length - by_name[shorter.name].length for by_name in means]))
        effect = interval_of(drawn[ratio][longer.name] - drawn[ratio][shorter.name], value=value)
        text = f"{longer.title} makes use of more context than {shorter.title} (r = {ratio})"
        found.append(Told(claim=text, effect=effect, verdict=verdict_of(effect, seeds=len(made))))
    return found


def report(
    setting: Setting,
    chosen: dict[str, list[Member]],
    made: dict[str, list[Group]],
    found: dict[str, Measured],
    *,
    store: Store,
    stretch: Stretch,
) -> Report:
    rows, verdicts, commands, values = [], [], [], []
    for name, members in chosen.items():
        lengths = {ratio: [effective_lengths(group, ratio=float(ratio)) for group in made[name]] for ratio in RATIOS}
        again = {ratio: drawn_again(made[name], ratio=float(ratio)) for ratio in RATIOS}
        verdicts += told(members, made[name], again)
        for member in members:
            ours = [found[asked_member(member, store=store, seed=seed).name] for seed in seeds(setting)]
            effective = {ratio: [by_name[member.name] for by_name in lengths[ratio]] for ratio in RATIOS}
            by_ratio = {f"r = {ratio}": shown(effective[ratio], again[ratio][member.name]) for ratio in RATIOS}
            theirs = {f"paper: r = {ratio}": f"{length}" for ratio, length in zip(RATIOS, member.paper, strict=True)}
            about = {"group": name, "model": member.title, "parameters": f"{ours[0].parameters:,}"}
            rows.append({**about, **by_ratio, **theirs})
            asked = ours[0].trained
            command = asked.asked.command(data=store.folder, run=asked.folder, device=setting.device)
            commands.append((f"{member.title} ({name} group)", [command]))
            values.append(
                {
                    "group": name,
                    "model": member.name,
                    "parameters": ours[0].parameters,
                    "recl": {ratio: [vars(length) for length in effective[ratio]] for ratio in RATIOS},
                    "paper": dict(zip(RATIOS, member.paper, strict=True)),
                    "perplexity_by_context": [perplexities(group, member) for group in made[name]],
                }
            )
    manifest, lengths_read = store.manifest, stretch.lengths
    return Report(
        title="Relative effective context length (the paper's Table 8)",
        corpus=f"Corpus: {manifest.name} ({manifest.rule}); {stretch.tokens:,} tokens of its test split. The paper's lengths are words of WikiText-103.",
        rows=rows,
        claims=verdicts,
        digits=0,
        notes=[
            f"contexts of {lengths_read[0]} to {lengths_read[-1]} tokens by {setting.scale.context_step}; the paper's table is in steps of 100 words",
            "RECL: the first context from which one step more lowers the perplexity of the hardest share r of tokens by less than a hundredth, against"
            " the best of the group; >=: every step up to the longest context was worth it",
            "every token is predicted from exactly c tokens before it; models with the paper's or Shaw's encoding keep a memory of the longest context,"
            " also where they were trained without; Transformer reads windows no longer than those it was trained on",
            f"in brackets, of a mean over {setting.seeds} seeds: what 95 of 100 draws of seeds and of places in the text lie within; the effect of a claim is in tokens",
            "a claim appears where its interval lies above zero, does not where it lies below (the order is then the other way round), and cannot be told otherwise"
            f" or with fewer than {FEWEST_SEEDS} seeds",
        ],
        commands=commands,
        pictures=drawn(setting, made),
        seconds=sum(one.seconds + one.trained.seconds for one in found.values()),
        values={"unit": manifest.unit, "rows": values},
    )


def perplexities(group: Group, member: Member) -> dict[str, float]:
    perplexity_C = group.perplexities()[group.names.index(member.name)]
    return dict(zip(map(str, group.lengths), perplexity_C, strict=True))


def shown(lengths: Sequence[EffectiveLength], again: NDArray[np.float64]) -> str:
    """Of several seeds: each length once, the shortest first; in brackets the interval of their mean."""
    each = sorted(set(lengths), key=lambda found: (found.length, found.at_least))
    found = interval_of(again, value=0.0)
    return f"{', '.join(map(str, each))} [{found.low:.0f}, {found.high:.0f}]"


def drawn(setting: Setting, made: dict[str, list[Group]]) -> list[Path]:
    """Perplexity against context length, and what a step more of it gains, as in the paper's appendix: of the first seed of each group."""
    paths: list[Path] = []
    for name, (group, *_) in made.items():
        rows = zip(group.names, group.perplexities(), strict=True)
        lines = {member: (group.lengths, perplexity_C, "o-") for member, perplexity_C in rows}
        title = f"Perplexity against context length, {name} group"
        paths += draw_lines(setting.place(f"-{name}.png"), lines, title=title, x="context length", y="perplexity")
        paths += draw_gain(group, setting.place(f"-{name}-gain.png"), ratio=RATIOS[0])
    return paths
