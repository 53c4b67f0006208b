"""Short names of the built-in losses and advantages.

A configuration names a built-in function by its short name (`grpo`) and a user's function by its dotted path
 (`my_package.my_module.my_function`). A dotted path to a built-in function is refused with the short name, so that
the modules of this package may move without breaking saved configurations.

Pure: names only. `megatron_rl.algorithm` holds the functions.
"""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIns:
    """The built-in functions that one configuration key can name."""

    key: str
    """Configuration key."""
    names: tuple[str, ...]
    """Short names; each is the name of a function in `module`."""
    module: str
    former_module: str
    """Module in which earlier versions held the functions; configurations saved then name it."""

    def problem(self, value: str) -> str:
        """Why `value` is invalid, with the name to use; empty if it is valid.

        Does not check whether a dotted path leads to a function.
        """
        if value in self.names:
            return ""
        module, _, name = value.rpartition(".")
        if module in (self.module, self.former_module) and name in self.names:
            return f"a built-in function is named without its module; write `{name}`"
        if module:
            return ""
        nearest = difflib.get_close_matches(value, self.names, n=1)
        hint = f"did you mean `{nearest[0]}`? " if nearest else ""
        return (
            f"no built-in function has this name; {hint}Built in: {', '.join(self.names)}. "
            "A function of your own is written package.module.function"
        )

    def path(self, value: str) -> str:
        """Dotted path of the function that `value` names; raises ValueError for a value with a `problem`."""
        if problem := self.problem(value):
            raise ValueError(f"{self.key} = {value!r}: {problem}")
        return f"{self.module}.{value}" if value in self.names else value


LOSSES = BuiltIns(
    key="algorithm.loss",
    names=("clipped_surrogate", "gspo", "cispo"),
    module="megatron_rl.algorithm.loss",
    former_module="megatron_rl.loss",
)
ADVANTAGES = BuiltIns(
    key="algorithm.advantage",
    names=("grpo", "dr_grpo", "rloo", "dapo"),
    module="megatron_rl.algorithm.advantages",
    former_module="megatron_rl.advantages",
)
