"""`megatron-rl run`: builds a run, executes it, evaluates its first and last weights, writes the report.

A run resumes from the newest checkpoint of its run directory.
"""

from collections.abc import Sequence

from launcher.checks.check import CheckedRun
from launcher.cluster.node import describe
from launcher.cluster.processes import Processes, processes
from launcher.commands.assembly import EXPORT, Shown, execute
from launcher.commands.build import run_places
from launcher.commands.evaluate import evaluate_directories
from launcher.commands.guarding import guarded, ladder_of
from launcher.commands.resume_point import ResumePoint, resume_point
from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.report.write import write_report
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.places import write_places
from launcher.run_dir.resume import changed_keys
from launcher.run_dir.status import StatusFile
from launcher.run_dir.stop_request import answer_request
from megatron_rl.algorithm.guard import Action
from megatron_rl.controller.stopping import EngineFormatError, StopRequestedError
from rollout.evaluation import EvaluationRow
from rollout.failures import ProcessLostError


def run(checked: CheckedRun) -> None:
    """Execute the run to its last step; `launcher.run_dir.directory` lists the files that it writes.

    Raises:
        StopRequestedError: the run was asked to stop and has saved a checkpoint.
    """
    config = checked.config
    with RunDirectory(config.run_dir) as directory:
        resume = resume_point(directory)
        changes = changed_keys(directory.path, config) if resume.first_step else []
        directory.write_config(resolved_yaml(config))
        directory.write_environment(describe())
        write_places(directory.path, run_places(checked.placement))
        progress = RunProgress(config.num_steps)
        if resume.first_step:
            progress.say(f"resuming {config.run_dir} after step {resume.first_step}")
        if resume.lost is not None:
            progress.say(resume.lost.line())
        for change in changes:
            progress.say(f"changed since the last start: {change}")
        for note in checked.placement.notes:
            progress.say(note)
        status = StatusFile(run_dir=directory.path, num_steps=config.num_steps, step=resume.first_step)
        with status.until_the_end():
            _run(checked, directory, Shown(progress=progress, status=status), resume)
        rows = [EvaluationRow.from_row(row) for row in directory.evaluation()]
        if rows:
            progress.table(rows)
        write_report(directory.path)
        progress.say(f"report: {directory.path / 'report.html'}")


def _run(checked: CheckedRun, directory: RunDirectory, shown: Shown, resume: ResumePoint) -> None:
    """Run the remaining steps, and evaluate both ends. Where the guard changes weight formats, start all anew.

    Raises:
        ProcessLostError: the guard changes weight formats, and the run has lost a node.
    """
    actions = ladder_of(checked, shown.progress.say)
    while True:
        try:
            _run_engines(guarded(checked, actions, resume.guard), directory, shown, resume, actions)
        except EngineFormatError as change:
            if change.num_lost_nodes:
                raise ProcessLostError(
                    f"{change}, and {change.num_lost_nodes} of the run's nodes are lost; its next start continues there"
                ) from change
            shown.progress.say(f"engines and trainer start again after step {change.step}, with other weight formats")
            resume = resume_point(directory)
        else:
            return


def _run_engines(
    checked: CheckedRun, directory: RunDirectory, shown: Shown, resume: ResumePoint, actions: Sequence[Action]
) -> None:
    """Start processes, run the remaining steps, evaluate both ends, end the processes."""
    config = checked.config
    shown.status.step = resume.first_step
    shown.status.phase("controller", "start Ray")
    log_dir = directory.path / "logs"
    placement = checked.placement
    with processes(
        config.cluster,
        num_actors=placement.num_actors,
        log_dir=log_dir,
        nodes=checked.nodes,
        placed=placement.num_actors_on,
        history=placement.history,
    ) as running:
        if resume.first_step < config.num_steps:
            try:
                execute(checked, directory, shown, running, resume, actions)
            except StopRequestedError:
                answer_request(directory.path)
                raise
        if config.evaluation.sets and config.evaluation.bf16_before_after:
            shown.status.phase("engines", "evaluate in bf16")
            _evaluate_ends(config, directory, shown.progress, running)


def _evaluate_ends(config: RunConfig, directory: RunDirectory, progress: RunProgress, running: Processes) -> None:
    """Evaluate the weights before the first step and after the last one in BF16 engines, once."""
    recorded = {(row["format"], row["step"]) for row in directory.evaluation()}
    models = {0: config.model, config.num_steps: str(directory.path / EXPORT)}
    missing = {step: model for step, model in models.items() if ("bf16", step) not in recorded}
    rows = evaluate_directories(config, missing, running, progress)
    directory.append_evaluation([row.as_row() for row in rows])
