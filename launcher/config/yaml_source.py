"""Reads a YAML mapping with the line of each key, and writes one that reads back to the same values.

Four differences from PyYAML's defaults prevent silent mistakes. Keys are texts, also `on` and 2026-11-30. A key given
twice is refused. `1e-4` is a number (YAML 1.2) rather than text (YAML 1.1), so the text `1e-4` is written in quotes. A
number with a leading zero is refused, because YAML 1.1 reads 010 as 8 (octal).
"""

import datetime
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.errors import ConfigError

Scalar = str | int | float | bool | None | datetime.date
Value = Scalar | list["Value"] | dict[str, "Value"]


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats and texts as keys. It names the place of a scalar that cannot be read."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """The value of a node.

        Raises:
            yaml.YAMLError: the text looks like a date or a number and is none, as 2026-02-30.
        """
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError) as error:  # of PyYAML's conversion of one scalar
            kind = node.tag.rpartition(":")[2]
            problem = f"{brief(str(node.value))} is no {kind} ({error}); write it in quotes if it is a text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """A table whose keys are texts as they are written: YAML has the key 2026-11-30 as a date, and `on` as true."""
        if isinstance(node, yaml.MappingNode):  # else the parent refuses it: `!!map [1, 2]`
            self.flatten_mapping(node)
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes a text if `_Loader` would read it as a number."""


_FLOATS = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(*_FLOATS)
_Dumper.add_implicit_resolver(*_FLOATS)
_ENDLESS = ": lists or tables are too deep, or an alias (*name) is inside its own anchor (&name); remove it"
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]*[0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The values of a parsed file and the places of its keys."""

    values: dict[str, Value]
    places: dict[str, str]
    """Dotted key -> `FILE:LINE`, or the override that set it."""

    def place_of(self, dotted: str) -> str:
        """Place of `dotted`, or of its nearest ancestor that was given; empty if none was given."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            if (place := self.places.get(".".join(parts[:end]))) is not None:
                return place
        return ""


def parse_value(text: str) -> Value:
    """The YAML value of `text`; raises `ConfigError` if it is not YAML, or holds a number with a leading zero."""
    try:
        node = yaml.compose(text, _Loader)
        value: Value = yaml.load(text, _Loader)
        for number in _with_leading_zero(node):
            raise ConfigError(_octal(number))
        return _unshared(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"`{brief(text)}` is not a YAML value: {_one_line(error)}") from error
    except RecursionError:
        raise ConfigError(f"`{brief(text)}`{_ENDLESS}") from None


def brief(text: str) -> str:
    """At most 60 characters of a text, for an error."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def dump(values: Mapping[str, object]) -> str:
    """The YAML text of `values`, in their order, that `read` reads back to equal values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)
    return text


def read(path: Path) -> Source:
    """Parses `path`; raises `ConfigError` for a missing file, bad YAML, a duplicate key, or content without keys.

    A number with a leading zero is refused, too.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no configuration file `{path}`: no such file (started in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"`{path}` is a directory; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}; save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file `{path}`: {error.strerror}") from error
    try:
        node = yaml.compose(text, _Loader)
        values: Value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_one_line(error)}") from error
    except RecursionError:
        raise ConfigError(f"{path}{_ENDLESS}") from None
    if values is None:
        raise ConfigError(f"{path} is empty; it needs at least the keys that have no default (docs/configuration.md)")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(values).__name__}")
    places: dict[str, str] = {}
    try:
        _collect(node, path, "", places)
        for number in _with_leading_zero(node):
            raise ConfigError(f"{path}:{number.start_mark.line + 1}: {_octal(number)}")
    except RecursionError:
        raise ConfigError(f"{path}{_ENDLESS}") from None
    return Source(values={key: _unshared(value) for key, value in values.items()}, places=places)


def _unshared(value: Value) -> Value:
    """A copy in which no table or list is in two places, as an alias (`*name`) puts it: a change of one stays there."""
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unshared(inner) for inner in value]
    return value


def _collect(node: yaml.Node | None, path: Path, prefix: str, places: dict[str, str]) -> None:
    """Adds the place of every key below `node`; list items are counted from 0, as the loader names them."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            place = f"{path}:{key.start_mark.line + 1}"
            if dotted in places:
                raise ConfigError(f"{place}: key `{dotted}` is given twice (first at {places[dotted]})")
            places[dotted] = place
            _collect(value, path, f"{dotted}.", places)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            places[f"{prefix}{index}"] = f"{path}:{value.start_mark.line + 1}"
            _collect(value, path, f"{prefix}{index}.", places)


def _with_leading_zero(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Numbers below `node` that are written with a leading zero, as 010; not texts in quotes."""
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for each in pair:
                yield from _with_leading_zero(each)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _with_leading_zero(each)
    elif isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":str") and _LEADING_ZERO.fullmatch(node.value):
        yield node


def _octal(number: yaml.ScalarNode) -> str:
    given = number.value
    meant = ("-" if given[0] == "-" else "") + (given.lstrip("+-0_") or "0")
    return (
        f"{given} begins with a zero, so YAML may read another number (010 is 8); write {meant}, or '{given}' in "
        "quotes if it is a text"
    )


def _one_line(error: yaml.YAMLError) -> str:
    """The error, its line and column, and the fix of usual mistakes."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark, start = error.problem_mark, error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    if "'\\t'" in str(error.problem):
        return f"{where}: a tab; indent with spaces"
    block = f" (in the block from line {start.line + 1})" if start is not None and start.line != mark.line else ""
    hint = "; keys of one block need the same column" if "block" in str(error.context) else ""
    return f"{where}: {error.problem}{block}{hint}"
