"""Weights & Biases for a run: offline by default, one wandb run per course of a run directory, no step twice.

`wandb/tracking.json` describes the last row (`Tracked`). A resumed run continues under the same id and skips logged
steps, because wandb keeps the first value of a step. So steps that are repeated from the first weights, or that learn
under another configuration, go to a new wandb run, and so does a copy of the run directory. The step is saved before it
is logged: a kill between the two loses the step in wandb and never logs it twice. `metrics.jsonl` has the step in
either case.

The evaluation after the last step has no row of its own. It joins the row of that step, because an online wandb drops
every step up to the last row of earlier starts: a run that gets more steps would lose the first of them. Charts of
evaluations do not go by rows: their axis is `FINISHED_STEPS`, which the row of each evaluation holds.

Only this file imports wandb, inside functions. In offline mode wandb asks no question and opens no connection. If an
online run cannot reach the server, the run goes on offline, and `wandb sync` uploads it later.

All files that wandb keeps lie in `wandb/` of the run directory. By itself it copies each table of samples twice to the
user's home. `wandb sync` uploads one of these copies, so they are kept.

wandb never ends a run, nor holds it for long. Metrics go to wandb's own process, which sends them when it can. A table
of samples asks the server first, so without an answer steps are logged without it for a while. The end of the run waits
for the server `FINISH_TIMEOUT_S` at most.
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Protocol, Self

from launcher.config.schema import WandbConfig
from launcher.errors import ConfigError
from launcher.run_dir.atomic_files import replace_text
from launcher.run_dir.resume import flat_keys
from rollout.failures import brief

CONNECT_TIMEOUT_S = 60.0
"""For which the start of a run waits for wandb's server."""
FINISH_TIMEOUT_S = 120.0
"""For which the end of a run waits until the server has everything."""
SLOW_S = 10.0
"""A table that takes longer has waited for a server that does not answer; wandb itself gives up after 19 s."""
TABLES_AGAIN_S = 600.0
"""For which no table is logged then."""

LEARNING_KEYS = (
    *("model", "seed", "data", "sampling", "algorithm", "reward.function", "reward.failure_score"),
    *("trainer.optimizer", "trainer.critic", "trainer.reference.refresh_every", "trainer.fp8", "trainer.dtype"),
    *("engine.format", "engine.kv_format", "planner.overlap", "publish.in_flight"),
)
"""Keys of the configuration that decide what a step learns. The others change speed, memory, places or limits."""
NOT_LEARNING_KEYS = (
    *("trainer.optimizer.states_on_host", "trainer.optimizer.distributed"),
    *("trainer.critic.optimizer.states_on_host", "trainer.critic.optimizer.distributed"),
    "algorithm.mismatch_sample_tokens",
)
"""Keys below them that do not."""

FINISHED_STEPS = "finished_steps"
"""Metric with the finished steps of the evaluation in the same row: the axis of its charts."""
EVALUATIONS = "eval/"
"""Names of an evaluation's metrics begin with it."""

SAMPLE_COLUMNS = ("step", "prompt", "response", "reward", "ground_truth", "length", "finish_reason", "versions")


class _Summary(Protocol):
    """Newest values of a wandb run, apart from its rows."""

    def update(self, values: Mapping[str, object], /) -> None: ...


class _WandbRun(Protocol):
    """What `Tracker` uses of `wandb.Run`."""

    @property
    def offline(self) -> bool: ...

    @property
    def starting_step(self) -> int:
        """Rows of earlier steps are dropped; 0 offline."""

    @property
    def summary(self) -> "_Summary": ...

    def log(self, data: Mapping[str, object], step: int, commit: bool | None = None) -> None: ...

    def define_metric(self, name: str, step_metric: str | None = None, *, hidden: bool | None = None) -> object: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """The wandb run and its last row: the content of `tracking.json`. Older files lack the last three fields."""

    run_id: str = ""
    last_step: int = -1
    last_evaluation: int = -1
    """Finished steps of the newest evaluation that was logged without the step after it."""
    settings: str = ""
    """Digest of the configuration's `LEARNING_KEYS`; empty if unknown."""
    path: str = ""
    """Of the run directory; empty if unknown."""
    inode: int = -1
    """Of the run directory."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The content of `path`; without the file, that of a run that was never logged."""
        row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return cls(**{each.name: row[each.name] for each in fields(cls) if each.name in row})

    def why_not_continued(self, now: "Tracked", first_step: int) -> str:
        """Why a start at `first_step` needs another wandb run; empty if it continues this one.

        A directory that was moved keeps its inode, and one on another mount keeps its path: neither is a copy.
        """
        if self.path and self.path != now.path and self.inode != now.inode:
            return f"the run directory is a copy of {self.path}"
        if first_step > self.last_step:
            return ""
        if first_step == 0:
            return "the run starts from its first weights again"
        if self.settings and self.settings != now.settings:
            return f"steps {first_step} to {self.last_step} are repeated, and what they learn is configured anew"
        return ""


class Tracker:
    """A wandb run; does nothing in mode `disabled`."""

    def __init__(
        self,
        run: _WandbRun | None,
        state_path: Path,
        state: Tracked,
        say: Callable[[str], None] = print,
    ) -> None:
        """Call `Tracker.start` instead."""
        self._run = run
        self._state_path = state_path
        self._state = state
        self._say = say
        self._no_table_until_s = 0.0
        """On the monotonic clock."""
        self._answers = True
        """Whether the last table was logged in time."""
        self._num_without_table = 0
        self._newest_row: tuple[int, frozenset[str]] | None = None
        """Step and names of the newest row of this start, to which wandb adds what has the same step."""

    @property
    def run_id(self) -> str:
        """Of the wandb run; empty when disabled."""
        return self._state.run_id

    @classmethod
    def start(
        cls,
        config: WandbConfig,
        run_dir: Path,
        settings: Mapping[str, object],
        *,
        first_step: int,
        say: Callable[[str], None] = print,
    ) -> Self:
        """Continues the wandb run of `run_dir`, or starts another one.

        Args:
            config: of wandb.
            run_dir: run directory; it is created if it is missing.
            settings: the resolved configuration.
            first_step: the next step of the run.
            say: receives a line if an earlier wandb run is not continued, if that drops steps, or if the server cannot
                be reached, now or later.

        Raises:
            ConfigError: `wandb.mode` = online without a key, or with one that the server refuses; or wandb refuses
                another setting.
        """
        state_path = run_dir / "wandb" / "tracking.json"
        if config.mode == "disabled":
            return cls(None, state_path, Tracked(), say)
        state_path.parent.mkdir(parents=True, exist_ok=True)
        before = Tracked.read(state_path)
        now = replace(before, settings=_digest(settings), path=str(run_dir.absolute()), inode=run_dir.stat().st_ino)
        why = before.why_not_continued(now, first_step)
        if why or not before.run_id:
            now = replace(now, run_id=secrets.token_hex(4), last_step=-1, last_evaluation=-1)
        tracker = cls(None, state_path, now, say)
        if now.run_id != before.run_id:  # else the file describes the last row until the next one
            tracker._save()
        if why:
            say(f"wandb: run {now.run_id} begins, and {before.run_id} is not continued: {why}")
        tracker._run = run = _start_run(config, run_dir, now.run_id, settings, say)
        if max(first_step, now.last_step + 1) < run.starting_step:
            say(
                f"wandb: run {now.run_id} has rows up to step {run.starting_step - 1} already, and takes no step up to "
                "that one any more; `metrics.jsonl` has all steps"
            )
        return tracker

    def log_step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, object]] = ()) -> bool:
        """Logs the metrics and a table of `samples` of `step`; False if wandb has a row of it or of a later step."""
        if self._run is None or step <= self._state.last_step or step < self._run.starting_step:
            return False
        self._state = replace(self._state, last_step=step)
        self._save()
        if any(name.startswith(EVALUATIONS) for name in metrics):
            metrics = {**metrics, FINISHED_STEPS: step}
        if not samples or not self._log_with_table(self._run, step, metrics, samples):
            self._log_alone(self._run, step, metrics)
        self._newest_row = step, frozenset(metrics)
        return True

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Logs the evaluation after `step` steps, the last ones; False if wandb has it.

        It joins the row of the last step. It goes to the summary of the wandb run alone, and a line says so, if an
        earlier start logged that row or if the row holds an evaluation already.
        """
        if self._run is None or step <= max(self._state.last_step, self._state.last_evaluation):
            return False
        self._state = replace(self._state, last_evaluation=step)
        self._save()
        metrics = {**metrics, FINISHED_STEPS: step}
        row = self._newest_row
        if row is not None and row[0] == step - 1 and row[1].isdisjoint(metrics):
            self._log_alone(self._run, step - 1, metrics)
        else:
            self._summarise(self._run, step, metrics)
        return True

    def _summarise(self, run: _WandbRun, step: int, metrics: Mapping[str, float]) -> None:
        """Put an evaluation into the summary."""
        try:
            if self._newest_row is not None:  # an open row would replace the values
                run.log({}, step=self._newest_row[0], commit=True)
            run.summary.update(metrics)
        except Exception as error:  # wandb's process has ended
            self._give_up(error)
            return
        self._say(
            f"wandb has the evaluation after {step} steps in the summary of run {self.run_id} only, because the row of "
            "the last step is of an earlier start or holds another evaluation; `evaluation.jsonl` has all"
        )

    def _log_with_table(
        self, run: _WandbRun, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, object]]
    ) -> bool:
        """Whether the step was logged; tables pause after one for which the server has not answered."""
        begin_s, problem = time.monotonic(), ""
        if begin_s < self._no_table_until_s:
            self._num_without_table += 1
            return False
        try:
            run.log({**metrics, "samples": _table(step, samples)}, step=step)
        except Exception as error:  # of wandb's process and of its server; their classes are not public
            problem = brief(error)
            self._num_without_table += 1
        duration_s = time.monotonic() - begin_s
        waited = duration_s > SLOW_S and not run.offline  # offline it was the disk
        why = problem or (f"for {duration_s:.0f} s" if waited else "")
        if why:
            self._no_table_until_s = time.monotonic() + TABLES_AGAIN_S
        if why and self._answers:
            self._say(
                f"wandb does not answer ({why}): the run goes on, and logs steps without their table of samples until "
                "it answers; `samples/` has all of them"
            )
        self._answers = not why
        return not problem

    def _log_alone(self, run: _WandbRun, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics without a table, which waits for no server."""
        try:
            run.log(dict(metrics), step=step)
        except Exception as error:  # wandb's process has ended
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Go on without wandb."""
        self._run = None
        self._say(
            f"wandb takes no more steps ({brief(error)}): the run goes on without it; `metrics.jsonl` has all steps"
        )

    def finish(self) -> None:
        """Ends the wandb run; its data are on disk (offline) or uploaded (online), as far as the server answers."""
        run, self._run = self._run, None
        if run is None:
            return
        if self._num_without_table:
            self._say(
                f"wandb has no table of samples for {self._num_without_table} step(s); `samples/` has all of them"
            )
        try:
            run.finish()
        except Exception as error:  # also wandb's TimeoutError; a finished run does not fail because of it
            self._say(
                f"wandb has not taken all data ({brief(error)}); upload them later by `wandb sync "
                f"{self._state_path.parent}/*run-*-{self.run_id}`"
            )

    def _save(self) -> None:
        replace_text(self._state_path, json.dumps(asdict(self._state)) + "\n")


def _digest(settings: Mapping[str, object]) -> str:
    chosen = {
        key: value
        for key, value in flat_keys(settings).items()
        if _is_below(key, LEARNING_KEYS) and not _is_below(key, NOT_LEARNING_KEYS)
    }
    return hashlib.blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=16).hexdigest()


def _is_below(key: str, tables: Sequence[str]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def _start_run(
    config: WandbConfig, run_dir: Path, run_id: str, settings: Mapping[str, object], say: Callable[[str], None]
) -> _WandbRun:
    """A wandb run; offline if the server of an online one cannot be reached."""
    import wandb

    try:
        if config.mode == "online":
            try:
                return _begin(config, run_dir, run_id, settings)
            except wandb.errors.AuthenticationError:  # a `CommError`, too
                raise
            except wandb.errors.CommError as error:
                wandb.teardown()  # its service would keep the run's id in use
                say(
                    f"wandb cannot be reached ({str(error).splitlines()[0]}): the run logs offline; upload it later by "
                    f"`wandb sync {run_dir / 'wandb'}/offline-run-*`"
                )
        return _begin(config.model_copy(update={"mode": "offline"}), run_dir, run_id, settings)
    except wandb.errors.AuthenticationError as error:
        raise ConfigError(_refusal(config.mode, error, is_of_key=True)) from error
    except wandb.errors.UsageError as error:  # also without any key, or with one that has blanks
        is_of_key = "api key" in str(error).lower().replace("_", " ")
        raise ConfigError(_refusal(config.mode, error, is_of_key=is_of_key)) from error


def _refusal(mode: str, error: Exception, *, is_of_key: bool) -> str:
    """Why wandb does not begin a run, and what to do."""
    said = f"`wandb.mode` = {mode}: {str(error).splitlines()[0]}"
    if is_of_key:
        return f"{said}; run `wandb login`, set WANDB_API_KEY, or set `wandb.mode` = offline"
    return f"{said}; change the key of `wandb` or the variable WANDB_... that it means, or set `wandb.mode` = disabled"


def _begin(config: WandbConfig, run_dir: Path, run_id: str, settings: Mapping[str, object]) -> _WandbRun:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # a wandb service inherited from a parent process outlives this one and keeps the id of a killed run in use
    os.environ.pop("WANDB_SERVICE", None)
    folder = run_dir.absolute() / "wandb"
    os.environ["WANDB_DATA_DIR"] = str(folder)  # for copies of tables; by default both lie in the user's home
    os.environ["WANDB_CACHE_DIR"] = str(folder / "cache")  # for uploaded copies and logs of wandb's process
    import wandb

    run: _WandbRun = wandb.init(
        project=config.project,
        name=config.name or run_dir.name,
        id=run_id,
        resume="allow" if config.mode == "online" else None,
        mode=config.mode,
        dir=str(run_dir),
        config=dict(settings),
        settings=wandb.Settings(
            silent=config.mode == "offline",
            init_timeout=CONNECT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        ),
    )
    run.define_metric(FINISHED_STEPS, hidden=True)
    run.define_metric(f"{EVALUATIONS}*", step_metric=FINISHED_STEPS)
    return run


def _table(step: int, samples: Sequence[Mapping[str, object]]) -> object:
    import wandb

    rows = [[step, *(_cell(sample.get(column)) for column in SAMPLE_COLUMNS[1:])] for sample in samples]
    table: object = wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)
    return table


def _cell(value: object) -> str | int | float | None:
    return value if isinstance(value, str | int | float) or value is None else json.dumps(value)
