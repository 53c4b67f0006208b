"""Loads a YAML file with dotted overrides into one frozen configuration, or lists its problems on one screen.

Types are checked strictly (text is not a number, `true` is not 1). Unknown keys are refused with the nearest known key,
and every problem is listed, not only the first. Nothing here imports torch, ray, vllm or megatron: a mistake costs a
second, not the start of a cluster. `launcher.checks.check` checks the keys that depend on the model or the data.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from history.config import Config
from launcher.config.yaml_source import Source, Value, brief, dump, parse_value, read
from launcher.errors import ConfigError
from megatron_rl.stages import Stage, known_settings

MAX_PROBLEMS = 8
"""Listed problems; more would not fit on one screen."""
MOST_BITS = 128
"""Of a whole number. No key means a larger one, and products of such numbers overflow in estimates."""

C = TypeVar("C", bound=Config)


def load(kind: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """The configuration of class `kind` in the file at `path`, with `a.b.c=value` overrides applied in order.

    Raises `ConfigError`, which names file and line (or the override), the value, the bound and the nearest known key.
    """
    source = read(Path(path))
    for override in overrides:
        _override(kind, source, override)
    if too_large := [
        f"{source.place_of(key)}: `{key}` is a whole number of more than {MOST_BITS} bits; write a smaller one"
        for key in _too_large(source.values, "")
    ]:
        raise ConfigError(listing(str(path), too_large))
    try:
        return kind.model_validate_json(json.dumps(source.values, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(listing(str(path), _problems(kind, source, error.errors()))) from None


def resolved_yaml(config: Config) -> str:
    """Every field of `config`, defaults included, as YAML that `load` reads back to an equal configuration.

    `engine.kv_cache_bytes` is left out where `engine.gpu_memory_fraction` sizes the cache: the file that is read back
    would name both keys, which a check refuses.
    """
    values = config.model_dump(mode="json")
    engine = values.get("engine")
    if isinstance(engine, dict) and engine.get("gpu_memory_fraction") is not None:
        engine.pop("kv_cache_bytes")
    return dump(values)


def listing(path: str, problems: Sequence[str]) -> str:
    """One screen: the number of problems of `path`, and the problems."""
    shown = [f"  - {problem}" for problem in problems[:MAX_PROBLEMS]]
    hidden = len(problems) - len(shown)
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return "\n".join([f"{path}: {count}", *shown, *([f"  ... and {hidden} more"] if hidden else [])])


def _override(kind: type[Config], source: Source, text: str) -> None:
    """Sets one `a.b.c=value` in place. A setting of a stage that is a bare name makes it a table."""
    dotted, equals, value = text.partition("=")
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"override `{brief(text)}` is not of the form `a.b.c=value`")
    *parents, last = dotted.split(".")
    target: Value = source.values
    for depth, name in enumerate(parents):
        is_stage = _stage(kind, parents[: depth + 1]) is not None
        if is_stage and isinstance(target, dict) and isinstance(bare := target.get(name), str):
            target[name] = {"name": bare}
        target = _child(target, name, ".".join(parents[: depth + 1]), text)
    if isinstance(target, list):
        target[_index(target, last, text)] = parse_value(value)
    elif isinstance(target, dict):
        target[last] = parse_value(value)
    else:
        raise ConfigError(f"override `{brief(text)}`: `{'.'.join(parents)}` is a single value, it has no keys")
    for stale in [place for place in source.places if place.startswith(f"{dotted}.")]:
        del source.places[stale]
    source.places[dotted] = f"override `{brief(text)}`"


def _child(target: Value, name: str, dotted: str, text: str) -> Value:
    if isinstance(target, list):
        return target[_index(target, name, text)]
    if not isinstance(target, dict):
        raise ConfigError(f"override `{brief(text)}`: `{dotted.rpartition('.')[0]}` is a single value, it has no keys")
    if target.get(name) is None:
        target[name] = {}
    return target[name]


def _index(target: list[Value], name: str, text: str) -> int:
    if not name.isdecimal() or len(name) > 9 or int(name) >= len(target):
        raise ConfigError(
            f"override `{brief(text)}`: `{brief(name)}` is not an index of a list of {len(target)} (0 is the first)"
        )
    return int(name)


def _problems(kind: type[Config], source: Source, items: Sequence[ErrorDetails]) -> list[str]:
    """One sentence per key, unknown and missing keys first; the messages of a union's members are joined."""
    first = {"extra_forbidden": 0, "missing": 1}
    by_key: dict[str, ErrorDetails] = {}
    functions: dict[str, type[BaseModel]] = {}
    for item in sorted(items, key=lambda item: first.get(item["type"], 2)):
        keys, function = _location(kind, item["loc"])
        dotted = ".".join(str(part) for part in keys)
        if function is not None:
            functions[dotted] = function
        if dotted in by_key:
            message = item["msg"].removeprefix("Input should be ")
            by_key[dotted]["msg"] += f" or {message}"
        else:
            by_key[dotted] = item
    return [_problem(kind, source, dotted, item, functions.get(dotted)) for dotted, item in by_key.items()]


def _problem(
    kind: type[Config], source: Source, dotted: str, item: ErrorDetails, function: type[BaseModel] | None
) -> str:
    """Place, key, value and bound of one problem; `function` has the settings of a stage in which it is."""
    place = source.place_of(dotted)
    where = f"{place}: " if place else ""
    if item["type"] == "extra_forbidden":
        return (
            f"{where}unknown key `{dotted}`{_nearest(kind, dotted) if function is None else _setting(function, dotted)}"
        )
    if item["type"] == "missing":
        return f"{where}key `{dotted}` is missing{_meaning(kind, dotted)}"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{where}`{dotted}` = {_shown(item['input'])}: {message}{_meaning(kind, dotted, function)}"


def _location(kind: type[Config], location: tuple[int | str, ...]) -> tuple[list[int | str], type[BaseModel] | None]:
    """The keys of a pydantic location, and the settings of the stage's function that it leads into.

    Names of functions, which tagged unions put behind the key of a stage, and type names, which members of a union
    append, are left out.
    """
    keys: list[int | str] = []
    function: type[BaseModel] | None = None
    for part in location:
        stage = _stage(kind, [str(key) for key in keys]) if keys and function is None else None
        if stage is not None:
            function = stage.settings_of(str(part))
            continue
        if keys and part in ("str", "int", "float", "bool") and _class_at(kind, [str(key) for key in keys]) is None:
            break
        keys.append(part)
    return keys, function


def _shown(value: object) -> str:
    return brief(json.dumps(value, default=str))


def _too_large(value: Value, dotted: str) -> Iterator[str]:
    """Keys at and below `dotted` with whole numbers of more than `MOST_BITS` bits."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        yield dotted
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _too_large(inner, f"{dotted}.{name}" if dotted else str(name))


def _nearest(kind: type[Config], dotted: str) -> str:
    """`; did you mean ...?`, by spelling in the same class first, then by the same name elsewhere."""
    *parents, last = dotted.split(".")
    here = _class_at(kind, parents)
    if here is not None and issubclass(here, Config) and last in here.moved:
        return f"; it is now {here.moved[last]}"
    prefix = "".join(f"{parent}." for parent in parents)
    known = list(here.model_fields) if here is not None else []
    if close := difflib.get_close_matches(last, known, n=1, cutoff=0.6):
        return f"; did you mean `{prefix}{close[0]}`?"
    everywhere = list(dotted_keys(kind))
    if same := [key for key in everywhere if key.rpartition(".")[2] == last]:
        return f"; did you mean `{same[0]}`?"
    if close := difflib.get_close_matches(dotted, everywhere, n=1, cutoff=0.6):
        return f"; did you mean `{close[0]}`?"
    return f"; known here: {', '.join(known)}" if known else ""


def _setting(function: type[BaseModel], dotted: str) -> str:
    """The function that has no such setting, the nearest one and all that it has."""
    name = function.model_fields["name"].default
    return f" of `{name}`{known_settings(dotted.rpartition('.')[2], function.model_fields)}"


def _meaning(kind: type[Config], dotted: str, function: type[BaseModel] | None = None) -> str:
    *parents, last = dotted.split(".")
    here = function or _class_at(kind, parents)
    field = here.model_fields.get(last) if here is not None else None
    return f" ({field.description.split('. ')[0].rstrip('.')})" if field is not None and field.description else ""


def dotted_keys(kind: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Every key of `kind` that a file or an override can name, nested classes included."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}"
        if (stage := stage_of(field)) is not None:
            settings = (key for choice in stage.choices for key in dotted_keys(choice, f"{prefix}{name}."))
            yield from dict.fromkeys(settings)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from dotted_keys(field.annotation, f"{prefix}{name}.")


def stage_of(field: FieldInfo) -> Stage | None:
    """The functions that a field can name; None if it names no function of a stage."""
    return next((entry for entry in field.metadata if isinstance(entry, Stage)), None)


def _stage(kind: type[BaseModel], path: Sequence[str]) -> Stage | None:
    """The stage whose key is `path`."""
    *parents, last = path
    here = _class_at(kind, parents)
    field = here.model_fields.get(last) if here is not None else None
    return stage_of(field) if field is not None else None


def nested_class(annotation: object) -> type[BaseModel] | None:
    """The configuration class in `annotation`: the annotation itself, a tuple's items or a dict's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner_classes = (nested_class(argument) for argument in get_args(annotation))
    return next((inner for inner in inner_classes if inner is not None), None)


def _class_at(kind: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The class whose keys are under `path`; names of dict entries and list indices are skipped."""
    here: type[BaseModel] | None = kind
    skip = False
    for name in path:
        if skip:
            skip = False
            continue
        field = here.model_fields.get(name) if here is not None else None
        if field is None:
            return None
        here = nested_class(field.annotation)
        skip = here is not None and here is not field.annotation
    return None if skip else here
