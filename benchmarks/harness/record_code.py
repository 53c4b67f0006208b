"""The code that a benchmark measures: the modules that it imports, at a commit and in the work tree.

Imports are followed from the benchmark's module. Imports inside functions and modules named in strings count too
(`"benchmarks.rollout.server"` of a command line, `"rollout.worker.worker.Worker"` of a configuration). Modules
are compared by their statements without imports, docstrings and comments. A statement counts as unchanged if any module
of the work tree has it, so a moved, merged or split module is no change.
"""

import ast
import hashlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGES = ("history", "rollout", "megatron_rl", "launcher", "benchmarks", "examples")
_MODULE = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)*")
_RECORDS = re.compile(r"benchmarks\.(?:\w+\.)*record(?:_\w+)?")
"""Modules that write records; they are not part of the measured code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Imports and statements of a source file."""

    names: frozenset[str]
    """Dotted names that the file imports or mentions; some are attributes of modules."""
    statements: Mapping[bytes, str]
    """Name of each top-level statement, by the statement's digest."""

    @classmethod
    def of(cls, source: str) -> "Module":
        """From the text of a source file."""
        tree = ast.parse(source)
        names = frozenset(_names(tree))
        _strip(tree)
        return cls(names=names, statements={_digest(statement): _name(statement) for statement in tree.body})


@dataclass(kw_only=True)
class Modules:
    """The modules of one version of the tree; files are read on first use."""

    sources: "Sources"
    blobs: Mapping[str, str]
    """Git's digest of each path."""

    def reached(self, start: str) -> set[str]:
        """Paths of the modules that `start` imports, directly or not, and of itself; empty if it is no module here."""
        file = start.replace(".", "/")
        if f"{file}.py" not in self.blobs and f"{file}/__main__.py" not in self.blobs:
            return set()
        reached: set[str] = set()
        waiting = list(self._paths(start, runs=True))
        while waiting:
            path = waiting.pop()
            if path not in reached:
                reached.add(path)
                names = self.sources.module(self.blobs[path]).names
                waiting += [near for name in names for near in self._paths(name, runs="." not in name)]
        return reached

    @cached_property
    def statements(self) -> frozenset[bytes]:
        """Digests of the statements of all modules."""
        return frozenset().union(*(self.sources.module(blob).statements for blob in self.blobs.values()))

    def _paths(self, name: str, *, runs: bool) -> Iterator[str]:
        """Files of a module and of its parent packages; `runs` adds the `__main__` of a package."""
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            if _RECORDS.fullmatch(".".join(parts[:length])):
                return
            prefix = "/".join(parts[:length])
            endings = [".py", "/__init__.py"]
            if runs and length == len(parts):
                endings.append("/__main__.py")
            yield from (path for ending in endings if (path := prefix + ending) in self.blobs)


@dataclass(kw_only=True)
class Sources:
    """Files of a checkout at any commit, each parsed once."""

    root: Path
    _texts: dict[str, str] = field(default_factory=dict)
    _modules: dict[str, Module] = field(default_factory=dict)

    def module(self, blob: str) -> Module:
        """The module with this digest."""
        if blob not in self._modules:
            text = self._texts.get(blob)
            if text is None:
                text = self._git("cat-file", "blob", blob) or ""
            self._modules[blob] = Module.of(text)
        return self._modules[blob]

    def at(self, commit: str) -> Modules | None:
        """The tree of a commit; None if this clone lacks it."""
        listed = self._git("ls-tree", "-r", commit, "--", *PACKAGES) if commit else None
        if listed is None:
            return None
        entries = (line.split(None, 3) for line in listed.splitlines())
        blobs = {path: blob for _, _, blob, path in entries if path.endswith(".py")}
        self._read([blob for blob in blobs.values() if blob not in self._texts])
        return Modules(sources=self, blobs=blobs)

    def now(self) -> Modules:
        """The modules of the work tree."""
        blobs = {}
        for path in (path for package in PACKAGES for path in sorted((self.root / package).rglob("*.py"))):
            content = path.read_bytes()
            # the same digest as git's, so an unchanged file is parsed once
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            self._texts[blob] = content.decode("utf-8")
            blobs[path.relative_to(self.root).as_posix()] = blob
        return Modules(sources=self, blobs=blobs)

    def _read(self, blobs: list[str]) -> None:
        """Read all files in one call of git."""
        output = self._run("cat-file", "--batch", given="".join(f"{blob}\n" for blob in blobs).encode())
        if output is None:
            return
        place = 0
        for blob in blobs:
            end_of_header = output.index(b"\n", place)
            size = int(output[place:end_of_header].split()[2])
            self._texts[blob] = output[end_of_header + 1 : end_of_header + 1 + size].decode("utf-8")
            place = end_of_header + size + 2

    def _git(self, *arguments: str) -> str | None:
        output = self._run(*arguments)
        return None if output is None else output.decode("utf-8")

    def _run(self, *arguments: str, given: bytes = b"") -> bytes | None:
        """Output of a git command; None if it fails or git is not installed."""
        try:
            done = subprocess.run(["git", "-C", self.root, *arguments], input=given, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield node.value


def _strip(node: ast.AST) -> None:
    """Remove imports and docstrings at every depth, docstrings of attributes included."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            compared = [statement for statement in statements if not _is_import_or_text(statement)]
            setattr(node, name, compared)
            for statement in compared:
                _strip(statement)


def _is_import_or_text(statement: ast.AST) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return isinstance(statement, ast.Import | ast.ImportFrom)


def _name(statement: ast.stmt) -> str:
    """The name that a statement defines; its first line if it defines none."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    return ast.unparse(target if target is not None else statement).partition("\n")[0]


def _digest(statement: ast.AST) -> bytes:
    return hashlib.blake2b(ast.dump(statement).encode(), digest_size=16).digest()
