"""Generates `docs/configuration.md` from the configuration classes and the docstrings of their fields.

    python -m launcher.config.docs            print the page
    python -m launcher.config.docs --write    write docs/configuration.md of this checkout

A test compares the page with the classes, so the two cannot drift apart.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher.config.loading import nested_class, stage_of
from launcher.config.schema import EvalConfig, RunConfig, SftConfig
from launcher.generated_page import print_or_write
from megatron_rl.stages import Choice, Stage

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
COMMANDS: tuple[type[BaseModel], ...] = (RunConfig, SftConfig, EvalConfig)
HEAD = """# Configuration

Generated from the classes by `python -m launcher.config.docs --write`; edit the docstrings there, not this page.

One YAML file per command, then dotted overrides: `megatron-rl run rl.yaml trainer.optimizer.learning_rate=1e-5`.
An override's value is YAML; `data.train.0.path=x` reaches into a list. Unknown keys, wrong types and combinations that
cannot run are refused before anything starts. Relative paths are relative to the directory in which the command starts.
Keys of a table under `NAME` are chosen by you.
"""


def generate() -> str:
    """The page."""
    parts = [HEAD]
    documented: set[type[BaseModel]] = set()
    for command in COMMANDS:
        for kind, prefix in _classes(command, ""):
            if kind not in documented:
                documented.add(kind)
                parts.append(_class(kind, prefix))
                parts += [
                    _stage(stage, f"{prefix}{name}")
                    for name, field in kind.model_fields.items()
                    if (stage := stage_of(field)) is not None
                ]
    return "\n".join(parts)


def _classes(kind: type[BaseModel], prefix: str) -> Iterator[tuple[type[BaseModel], str]]:
    """`kind` and every class in it, with the dotted prefix of its first occurrence."""
    yield kind, prefix
    for name, field in kind.model_fields.items():
        inner = nested_class(field.annotation) if stage_of(field) is None else None
        if inner is not None:
            yield from _classes(inner, f"{prefix}{name}{_item(field.annotation)}.")


def _item(annotation: object) -> str:
    """Placeholder for the index or the name of an entry."""
    if get_origin(annotation) is dict:
        return ".NAME"
    return ".N" if get_origin(annotation) is tuple else ""


def _class(kind: type[BaseModel], prefix: str) -> str:
    title = f"`{prefix.rstrip('.')}`" if prefix else f"`{kind.__name__}`"
    rows = [_row(f"{prefix}{name}", field) for name, field in kind.model_fields.items()]
    header = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return f"## {title}\n\n{' '.join((kind.__doc__ or '').split())}\n\n{header}" + "\n".join(rows) + "\n"


def _stage(stage: Stage, key: str) -> str:
    """The functions of a stage, and the settings of each."""
    parts = [f"## Functions of `{key}`\n\nA name, or a table: `{key}.name`, and the settings of that function.\n"]
    for name, choice in stage.by_name.items():
        rows = [_row(f"{key}.{own}", field) for own, field in choice.model_fields.items() if own != "name"]
        table = "\n\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) if rows else ""
        parts.append(f"**`{name}`**: {' '.join((choice.__doc__ or '').split())}{table}\n")
    return "\n".join(parts)


def _row(key: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{key}` | {_type(field)} | {_default(field)} | {meaning} |"


def _type(field: FieldInfo) -> str:
    """The type and its bounds."""
    if (stage := stage_of(field)) is not None:
        return " or ".join(f"`{name}`" for name in stage.by_name) + " or a dotted path"
    text = _type_name(field.annotation).replace("|", "\\|")
    return ", ".join([text, *_bounds(field.metadata)])


def _bounds(metadata: Iterable[object]) -> list[str]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return [
        f"{sign} {getattr(entry, name)}" for entry in metadata for name, sign in signs.items() if hasattr(entry, name)
    ]


def _type_name(annotation: object) -> str:
    inner = nested_class(annotation)
    if inner is annotation and inner is not None:
        return "table"
    if inner is not None:
        return "table of tables" if get_origin(annotation) is dict else "list of tables"
    arguments = get_args(annotation)
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Annotated:
        return ", ".join([_type_name(get_args(annotation)[0]), *_bounds(get_args(annotation)[1:])])
    if not arguments:
        return getattr(annotation, "__name__", str(annotation))
    if all(isinstance(argument, str) for argument in arguments):
        return " or ".join(f"`{argument}`" for argument in arguments if argument)
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return f"table of {_type_name(arguments[1])}"
    return " or ".join(_type_name(argument) for argument in arguments)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, Choice):
        return f"`{field.default.name}`"
    if isinstance(field.default, BaseModel):
        return ""
    if field.default == "":
        return "empty"
    if isinstance(field.default, tuple | dict) and not field.default:
        return "none"
    if field.default is None:
        return "`null`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}`"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints or writes the page."""
    return print_or_write("launcher.config.docs", PAGE, generate, argv)


if __name__ == "__main__":
    sys.exit(main())
