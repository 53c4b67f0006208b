"""How a configuration names the function of a stage, with the settings of that function.

A stage is a table with `name` and the settings of the named function: `{name: clipped_surrogate, clip_high: 0.28}`. A
bare name stands for its default settings. A table without a name sets the default function. A function of one's own is
named by its dotted path (`my_package.my_module.my_function`), and its settings are checked when it is loaded
(`megatron_rl.algorithm.plug_in`). A dotted path to a built-in function is refused with the short name, so that modules
of this package may move without breaking saved configurations.

Pure: names and settings only. `megatron_rl.algorithm` holds the functions.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from history.config import Config

Column = Literal["ref", "values"]
"""A column of tokens that costs forwards of a further model: the reference policy, the critic."""

PLUG_IN = "plug-in"
"""Tag of a function of one's own in a stage's schema."""
OWN = "megatron_rl."
"""Dotted paths of built-in functions begin with it."""


class Choice(Config):
    """The function of a stage, and its settings."""

    path: ClassVar[str] = ""
    """Dotted path of a built-in function."""
    needs: ClassVar[frozenset[Column]] = frozenset()
    """Columns of tokens that a built-in function reads beside those that every step has."""

    name: str
    """Name of a built-in function, or the dotted path of one's own."""


class PlugIn(Choice):
    """A function of one's own; its settings are checked when it is loaded."""

    model_config = ConfigDict(extra="allow")

    @property
    def given(self) -> Mapping[str, object]:
        """The settings as the configuration gives them."""
        return self.model_extra or {}


@dataclass(frozen=True, slots=True)
class Stage:
    """The built-in functions that one key can name. It annotates the field: `Annotated[Choice, STAGE]`."""

    key: str
    """Configuration key."""
    choices: tuple[type[Choice], ...]
    """One class of settings for each built-in function; the first is the default."""
    former: Mapping[str, str] = field(default_factory=dict)
    """What to write instead of a name of earlier versions."""

    @property
    def by_name(self) -> dict[str, type[Choice]]:
        """Settings by the name of the function."""
        return {choice.model_fields["name"].default: choice for choice in self.choices}

    def tag(self, value: object) -> str:
        """Which schema a stage's table has: the name of a built-in function, or `PLUG_IN`."""
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        return name if isinstance(name, str) and name in self.by_name else PLUG_IN

    def settings_of(self, tag: str) -> type[Choice]:
        """The settings that a tag stands for."""
        return self.by_name.get(tag, PlugIn)

    def problem(self, name: str) -> str:
        """Why nothing can have this name, with the name to use; empty if something can.

        Does not check whether a dotted path leads to a function.
        """
        names = tuple(self.by_name)
        module, _, last = name.rpartition(".")
        if name in names:
            return ""
        if last in self.former and (not module or module.startswith(OWN)):
            return f"the name of an earlier version; {self.former[last]}"
        if module.startswith(OWN) and last in names:
            return f"a built-in function is named without its module; write `{last}`"
        if module:
            return ""
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{nearest[0]}`? " if nearest else ""
        return (
            f"no built-in function has this name; {hint}Built in: {', '.join(names)}. "
            "A function of your own is written package.module.function"
        )

    def table(self, value: object) -> object:
        """A stage's table, from a bare name, or from a table without a name.

        Raises:
            PydanticCustomError: nothing can have the name.
        """
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, Mapping):
            value = {"name": next(iter(self.by_name)), **value}
            if isinstance(value["name"], str) and (problem := self.problem(value["name"])):
                raise PydanticCustomError("function_name", "{problem}", {"problem": problem})
        return value

    def __get_pydantic_core_schema__(self, source: type[Choice], handler: GetCoreSchemaHandler) -> CoreSchema:
        """One schema for each function; the table's name chooses among them."""
        schemas = {tag: handler.generate_schema(kind) for tag, kind in {**self.by_name, PLUG_IN: PlugIn}.items()}
        return core_schema.no_info_before_validator_function(
            self.table, core_schema.tagged_union_schema(schemas, discriminator=self.tag)
        )


def known_settings(key: str, known: Iterable[str]) -> str:
    """The nearest setting and all settings, to be written behind an unknown one."""
    names = [name for name in known if name != "name"]
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else ";"
    return f"{hint} its settings: {', '.join(names) or 'none'}"
