"""Reads a YAML mapping and remembers on which line each key stands.

Two departures from PyYAML's defaults, both because a configuration must mean what it says: a key given
twice is refused, and `1e-4` is a number (YAML 1.2) rather than text (YAML 1.1).
"""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.errors import ConfigError

Scalar = str | int | float | bool | None | datetime.date
Value = Scalar | list["Value"] | dict[str, "Value"]


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A parsed file and where its keys stand."""

    values: dict[str, Value]
    places: dict[str, str]
    """Dotted key -> `FILE:LINE`, or the override that set it."""

    def place_of(self, dotted: str) -> str:
        """Where `dotted`, or its nearest given ancestor, stands; empty when no part of it was given."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            if (place := self.places.get(".".join(parts[:end]))) is not None:
                return place
        return ""


def parse_value(text: str) -> Value:
    """The YAML value that `text` stands for; raises `ConfigError` if it is not YAML."""
    try:
        value: Value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"`{text}` is not a YAML value: {_one_line(error)}") from error
    return value


def read(path: Path) -> Source:
    """Parses `path`; raises `ConfigError` for a missing file, bad YAML, a key given twice or no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no configuration file `{path}`: no such file (started in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file `{path}`: {error}") from error
    try:
        node = yaml.compose(text, _Loader)
        values: Value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(values).__name__}")
    places: dict[str, str] = {}
    _collect(node, path, "", places)
    return Source(values=values, places=places)


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


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())
