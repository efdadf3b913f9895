"""The inert value of a pickle -> what an import needs of it, checked: settings as plain JSON, tensors by name. Knows the old formats, no torch.

Every reader looks for known names at known depths and takes exact types only; whatever else the file holds is never touched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.stand_ins import Object, TensorPlace

T = TypeVar("T")
DEEPEST_MODULE = 16
ORIGINAL_MODEL = "mem_transformer MemTransformerLM"
WRAPPED = "torch.nn.parallel.data_parallel DataParallel"
CORPORA = ("data_utils Corpus", "utils.data_utils Corpus", "__main__ Corpus")
VOCABULARIES = ("utils.vocabulary Vocab", "vocabulary Vocab", "data_utils Vocab")
SCALARS = (int, float, bool, str, type(None))
OPTIMISER_FIELDS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True, kw_only=True)
class Contents(Generic[T]):
    """What a file holds: facts by section (model, arguments, vocabulary, optimiser), and the tensors of each by name. Here a tensor is where it
    lies; in the process that asked, its numbers."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, T]] = field(default_factory=dict)


def extract(value: object) -> Contents[TensorPlace]:
    """Recognises the value by its content, not by its file's name."""
    if isinstance(value, Object):
        if value.name == WRAPPED:
            value = _modules(value).get("module", value)
        if isinstance(value, Object) and value.name == ORIGINAL_MODEL:
            return _original(value)
        if isinstance(value, Object) and value.name in (*CORPORA, *VOCABULARIES):
            return Contents(kind="vocabulary", facts={"vocabulary": vocabulary(value)})
    if isinstance(value, dict):
        if "model_state" in value and "model_config" in value:
            return _nvidia(value)
        if "param_groups" in value and "state" in value:
            facts, tensors = _optimiser(value)
            return Contents(kind="optimiser", facts={"optimiser": facts}, tensors={"optimiser": tensors})
        if "sym2idx" in value or "idx2sym" in value:
            return Contents(kind="vocabulary", facts={"vocabulary": vocabulary(value)})
        if value and _is_table_of_tensors(value):
            return Contents(kind="weights", tensors={"model": value})
        if "optimizer_state_dict" in value:
            why = "it is apex's, with weights of its own"
            return Contents(kind="optimiser", facts={"optimiser": {"left_out": why}})
    raise ImportRefused(f"it holds {_described(value)}: no Transformer-XL, vocabulary or optimiser that is known here")


def _described(value: object) -> str:
    if isinstance(value, Object):
        return f"a {value.name.replace(' ', '.')}"
    if isinstance(value, dict):
        names = ", ".join(ascii(name)[:30] for name in list(value)[:3])
        return f"a dictionary of {names}" if names else "an empty dictionary"
    return f"a {type(value).__name__}"


# --- the authors' PyTorch model


def _original(model: Object) -> Contents[TensorPlace]:
    parameters, buffers = dict(_tensors(model, "_parameters")), dict(_tensors(model, "_buffers"))
    facts = _settings(model, "the model", _MODEL_FIELDS)
    softmax, layer = _child(model, "crit"), _child(model, "layers", "0")
    attention, norm = _child(layer, "dec_attn"), _child(layer, "dec_attn", "layer_norm")
    facts |= _settings(softmax, "crit", {"div_val": int})
    facts |= _settings(attention, "layers.0.dec_attn", {"pre_lnorm": bool})
    facts["cutoffs"] = _list(int, softmax.attributes.get("cutoffs"), "crit.cutoffs")[:-1]
    facts["norm_eps"] = _settings(norm, "layer_norm", {"eps": float})["eps"]
    facts["dropout"] = _settings(_child(model, "drop"), "drop", {"p": float})["p"]
    facts["dropatt"] = _settings(_child(attention, "dropatt"), "dropatt", {"p": float})["p"]
    inner = parameters.get("layers.0.pos_ff.CoreNet.0.weight")
    facts["d_inner"] = inner.shape[0] if inner is not None and inner.shape else 0
    facts["tie_weight"] = _ties_weights(parameters)
    inputs = {place for name, place in parameters.items() if name.startswith("word_emb.emb_projs.")}
    clusters = min(len(facts["cutoffs"]) + 1, 1000)
    facts["tie_projs"] = [parameters.get(f"crit.out_projs.{i}") in inputs for i in range(clusters)]
    first = {place: name for name, place in reversed(parameters.items())}
    facts["parameter_order"] = [name for name, place in parameters.items() if first[place] == name]
    return Contents(kind="original", facts={"model": facts}, tensors={"model": {**parameters, **buffers}})


_MODEL_FIELDS: dict[str, type] = {
    **dict.fromkeys(("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "ext_len"), int),
    **dict.fromkeys(("mem_len", "attn_type", "clamp_len"), int),
    "same_length": bool,
}


def _ties_weights(parameters: Mapping[str, TensorPlace]) -> bool:
    tied = {
        parameters.get(f"word_emb.emb_layers.{name.split('.')[2]}.weight") == place
        for name, place in parameters.items()
        if name.startswith("crit.out_layers.") and name.endswith(".weight")
    }
    if len(tied) > 1:
        raise ImportRefused("some of its softmax tables are its embeddings and some not, which no model here can be")
    return tied == {True}


def _tensors(module: Object, kind: str, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, TensorPlace]]:
    """In the order in which torch lists them: a module's own, then its children's."""
    if depth > DEEPEST_MODULE:
        raise ImportRefused(f"its modules are nested deeper than {DEEPEST_MODULE}")
    own = module.attributes.get(kind)
    for name, value in own.items() if isinstance(own, dict) else ():
        if isinstance(value, TensorPlace) and type(name) is str:
            yield f"{prefix}{name}", value
    for name, child in _modules(module).items():
        yield from _tensors(child, kind, f"{prefix}{name}.", depth + 1)


def _modules(module: Object) -> dict[str, Object]:
    children = module.attributes.get("_modules")
    if not isinstance(children, dict):
        return {}
    return {name: child for name, child in children.items() if type(name) is str and isinstance(child, Object)}


def _child(module: Object, *path: str) -> Object:
    for number, name in enumerate(path):
        children = _modules(module)
        if name not in children:
            raise ImportRefused(f"its {'.'.join(path[: number + 1])} is missing; it is no whole Transformer-XL")
        module = children[name]
    return module


# --- NVIDIA's checkpoint


def _nvidia(value: dict[Any, Any]) -> Contents[TensorPlace]:
    state, config = value["model_state"], value["model_config"]
    if not isinstance(config, dict):
        raise ImportRefused("its model_config is no table")
    if not _is_table_of_tensors(state):
        raise ImportRefused("its model_state is no table of tensors")
    weights: dict[str, TensorPlace] = state
    settings = {str(name): item for name, item in config.items() if type(item) in SCALARS}
    settings["cutoffs"] = _list(int, config.get("cutoffs"), "model_config.cutoffs")
    settings["tie_projs"] = _list(bool, config.get("tie_projs"), "model_config.tie_projs")
    no_parameters = ("crit.shared_out_projs.", "pos_emb.")
    settings["parameter_order"] = [name for name in weights if not name.startswith(no_parameters)]
    settings["step"] = value["train_step"] if type(value.get("train_step")) is int else 0
    found = Contents(kind="nvidia", facts={"model": settings}, tensors={"model": weights})
    arguments = value.get("args")
    if isinstance(arguments, Object):
        given = arguments.attributes.items()
        found.facts["arguments"] = {str(name): item for name, item in given if type(item) in SCALARS}
    if value.get("vocab") is not None:
        dataset = found.facts.get("arguments", {}).get("dataset")
        named = {"dataset": dataset if type(dataset) is str else None}
        found.facts["vocabulary"] = vocabulary(value["vocab"]) | named
    if isinstance(value.get("optimizer_state"), dict):
        found.facts["optimiser"], found.tensors["optimiser"] = _optimiser(value["optimizer_state"])
    return found


def _is_table_of_tensors(value: object) -> bool:
    return isinstance(value, dict) and all(type(k) is str and isinstance(v, TensorPlace) for k, v in value.items())


# --- vocabularies


def vocabulary(value: object) -> dict[str, Any]:
    """A Vocab, a Corpus that has one, or the attributes of a tokenizer as a dictionary."""
    dataset = None
    if isinstance(value, Object) and value.name in CORPORA:
        dataset = value.attributes.get("dataset")
        value = value.attributes.get("vocab")
    table = value.attributes if isinstance(value, Object) else value
    if not isinstance(table, dict):
        raise ImportRefused("it holds no vocabulary")
    special = table.get("special")
    return {
        "symbols": _symbols(table.get("idx2sym"), table.get("sym2idx")),
        "lower_case": table.get("lower_case") is True,
        "special": [item for item in special if type(item) is str] if isinstance(special, list) else [],
        "dataset": dataset if type(dataset) is str else None,
    }


def _symbols(listed: object, numbered: object) -> list[str]:
    """Each symbol once, at its number; where both tables exist they must say the same."""
    if isinstance(listed, list):
        symbols = listed
    elif isinstance(numbered, dict):
        places = {number: symbol for symbol, number in numbered.items() if type(number) is int}
        if len(places) != len(numbered) or any(number not in places for number in range(len(places))):
            raise ImportRefused("the vocabulary's numbers are not 0, 1, 2, ..., each once")
        symbols = [places[number] for number in range(len(places))]
    else:
        raise ImportRefused("it holds no vocabulary: neither idx2sym nor sym2idx")
    if set(map(type, symbols)) != {str}:
        raise ImportRefused("a symbol of the vocabulary is no text")
    places_of = dict(zip(symbols, range(len(symbols)), strict=True))
    if len(places_of) != len(symbols):
        raise ImportRefused("a symbol is in the vocabulary twice")
    if isinstance(numbered, dict) and numbered and numbered != places_of:
        raise ImportRefused("the vocabulary's two tables, idx2sym and sym2idx, contradict each other")
    return symbols


# --- optimisers


def _optimiser(value: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """The state of each parameter by its place in the list of parameters; the list itself names them by numbers of its own."""
    groups, state = value.get("param_groups"), value.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise ImportRefused("the optimiser's state is damaged: it has no groups of parameters")
    keys: list[Any] = []
    settings: list[dict[str, Any]] = []
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ImportRefused("the optimiser's state is damaged: a group has no parameters")
        keys += group["params"]
        plain = {str(name): item for name, item in group.items() if type(item) in SCALARS}
        betas = group.get("betas")
        if isinstance(betas, (list, tuple)) and all(type(beta) is float for beta in betas):
            plain["betas"] = list(betas)
        settings.append(plain)
    if any(type(key) is not int for key in keys) or len(set(keys)) != len(keys):
        raise ImportRefused("the optimiser's state is damaged: a parameter is listed twice or without a number")
    tensors: dict[str, TensorPlace] = {}
    steps: dict[str, int | float] = {}
    others: set[str] = set()
    for number, key in enumerate(keys):
        for name, item in state[key].items() if isinstance(state.get(key), dict) else ():
            if name not in OPTIMISER_FIELDS:
                others.add(str(name)[:40])
            elif isinstance(item, TensorPlace):
                tensors[f"{number}.{name}"] = item
            elif type(item) in (int, float) and name == "step":
                steps[str(number)] = item
    return {"groups": settings, "parameters": len(keys), "steps": steps, "others": sorted(others)}, tensors


# --- exact types


def _settings(owner: Object, where: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """Attributes that must be there, each of exactly its type; a rate of 0 may have been written as a whole number."""
    found = {}
    for name, kind in fields.items():
        value = owner.attributes.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ImportRefused(f"{name} of {where} is missing or no {kind.__name__}")
        found[name] = value
    return found


def _list(kind: type[T], value: object, name: str) -> list[T]:
    if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value) or len(value) > 1000:
        raise ImportRefused(f"{name} is no list of {'numbers' if kind is int else 'true and false'}")
    return list(value)
