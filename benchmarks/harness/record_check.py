"""Lists the rows of committed records whose measured code has changed since.

The list tells how far a record's figures apply to today's code. A listed row need not be wrong: after a renaming every
module differs, though its speed is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.record_code import Modules, Sources
from benchmarks.harness.record_file import RESULTS, ROOT, Provenance, Record, read_all

NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Rows of a record that were measured at the same commit."""

    record: str
    rows: int
    code: Provenance
    measured: int
    """Number of modules that the benchmark imports at that commit; 0 if unknown."""
    changed: tuple[str, ...]
    """Modules that differ now, each with its first changed statement."""
    unknown: str
    """Why the modules are unknown; empty if they are known."""

    @property
    def is_current(self) -> bool:
        """Whether today's code is the measured code, as far as the record states it."""
        return not self.unknown and not self.changed and self.code.dirty is False

    def __str__(self) -> str:
        tree = {True: "dirty", False: "clean", None: "tree ?"}[self.code.dirty]
        where = f"{self.record:18} {self.rows:4} rows  {self.code.commit[:8] or 'no commit':9}  {tree:6}"
        if self.unknown:
            return f"{where}  {self.unknown}"
        more = len(self.changed) - NUM_SHOWN
        names = ", ".join(self.changed[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return f"{where}  {len(self.changed):3} of {self.measured:3} modules changed{': ' if names else ''}{names}"


def run(*, strict: bool = False) -> int:
    """Print the rows with changed code. Returns 1 if there are any and `strict` is set, else 0."""
    records = read_all(RESULTS)
    old = [finding for finding in findings(records, Sources(root=ROOT)) if not finding.is_current]
    num_rows = sum(len(record.rows) for record in records)
    print(f"{num_rows} rows in {len(records)} records. Rows whose measured code differs from today's:")
    print("\n".join(str(finding) for finding in old) if old else "none")
    return 1 if strict and old else 0


def findings(records: Sequence[Record], sources: Sources) -> Iterator[Finding]:
    """One finding for each record and commit, in the order of the records and rows."""
    now = sources.now()
    trees: dict[str, Modules | None] = {}
    for record in records:
        for code, rows in record.commits.items():
            if code.commit not in trees:
                trees[code.commit] = sources.at(code.commit)
            then = trees[code.commit]
            reached = then.reached(record.module) if then is not None else set()
            unknown = "" if reached else f"{record.module} does not exist at that commit"
            changed = sorted(_changed(then, reached, now)) if then is not None else []
            yield Finding(
                record=record.name,
                rows=rows,
                code=code,
                measured=len(reached),
                changed=tuple(changed),
                unknown="commit not in this clone's history" if then is None else unknown,
            )


def _changed(then: Modules, reached: set[str], now: Modules) -> Iterator[str]:
    """Modules with a statement that no module has now, and the name of the first such statement."""
    for path in reached:
        blob = then.blobs[path]
        if now.blobs.get(path) == blob:
            continue
        statements = then.sources.module(blob).statements
        names = [name for digest, name in statements.items() if digest not in now.statements]
        if names:
            yield f"{path} ({names[0]}{', ..' if len(names) > 1 else ''})"
