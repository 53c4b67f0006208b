"""`megatron-rl run`: builds a run, executes it, evaluates its first and last weights, writes the report.

A run resumes from the newest checkpoint of its run directory. A run that has taken its last step and could not export
the weights does so now, without engines. A stop request also ends the evaluation of the first and last weights; the
next start evaluates those that have no rows.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path

from launcher.checks.check import CheckedRun
from launcher.cluster.job_folder import note_begin
from launcher.cluster.node import describe
from launcher.cluster.processes import Processes, processes
from launcher.commands.assembly import Shown, execute
from launcher.commands.build import run_places
from launcher.commands.evaluate import Weights, evaluate_directories, evaluation_of, run_settings
from launcher.commands.export import start_policy
from launcher.commands.guarding import guarded, ladder_of
from launcher.commands.resume_point import ResumePoint, resume_point
from launcher.commands.specs import trainer_spec
from launcher.commands.startup import judging_checkpoint
from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.endings.conclusion import Command
from launcher.report.write import write_report
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.exported import POLICY, exported_step, forget_policy, replace_policy
from launcher.run_dir.places import write_places
from launcher.run_dir.resume import changed_keys, changes_since_last_start, check_first_model
from launcher.run_dir.status import StatusFile
from launcher.run_dir.stop_request import StopWatch, answer_request
from megatron_rl.algorithm.guard import Action
from megatron_rl.controller.stopping import EngineFormatError, StopRequestedError
from rollout.evaluation import EvaluationRow, settings_digest
from rollout.failures import ProcessLostError, brief


def run(checked: CheckedRun, command: Command) -> None:
    """Execute the run to its last step; `launcher.run_dir.directory` lists the files that it writes.

    `command` learns what the screen of a failure tells.

    Raises:
        StopRequestedError: the run was asked to stop and has saved a checkpoint.
        RunDirectoryError: the directory belongs to another run or other first weights, or its newest checkpoint is
            gone or unreadable.
    """
    config = checked.config
    with RunDirectory(config.run_dir) as directory:
        # before `resume_point`, which moves records
        resumes = directory.latest_checkpoint() is not None
        changes = (changed_keys if resumes else changes_since_last_start)(directory.path, config)
        check_first_model(directory.path, Path(config.model), resumes=resumes)
        resume = resume_point(directory)
        directory.write_config(resolved_yaml(config))
        notes = [*resume.notes, *directory.write_environment(describe())]
        write_places(directory.path, run_places(checked.placement))
        progress = RunProgress(config.num_steps)
        if resume.first_step:
            progress.say(f"resuming {config.run_dir} after step {resume.first_step}")
        if resume.lost is not None:
            progress.say(resume.lost.line())
        for note in notes:
            progress.say(note)
        for change in changes:
            progress.say(f"changed since the last start: {change}")
        for note in checked.placement.notes:
            progress.say(note)
        status = StatusFile(
            run_dir=directory.path,
            num_steps=config.num_steps,
            step=resume.first_step,
            on_finished=command.step_finished,
        )
        with status.until_the_end():
            _run(checked, directory, Shown(progress=progress, status=status, command=command), resume)
        rows = [EvaluationRow.from_row(row) for row in directory.evaluation()]
        if rows:
            progress.table(rows)
        _write_report(directory.path, progress)


def _write_report(run_dir: Path, progress: RunProgress) -> None:
    """Write the report. The run is complete without it, so an error becomes a line."""
    try:
        report = write_report(run_dir)
    except Exception as error:  # any record may be at fault; the named command shows the whole error
        progress.say(
            f"the run is complete, but its report could not be written ({brief(error)}); "
            f"`megatron-rl report {run_dir}` writes it again"
        )
    else:
        progress.say(f"report: {report}")


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
            for note in resume.notes:
                shown.progress.say(note)
        else:
            return


def _run_engines(
    checked: CheckedRun, directory: RunDirectory, shown: Shown, resume: ResumePoint, actions: Sequence[Action]
) -> None:
    """Start processes, run the remaining steps, export and evaluate the last weights, end the processes.

    Raises:
        StopRequestedError: the run was asked to stop; its newest checkpoint is saved, and the request is answered.
    """
    config = checked.config
    last = max(config.num_steps, resume.first_step)
    shown.command.in_8_bits = config.engine.format != "bf16"
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
        try:
            if resume.first_step < last:
                forget_policy(directory.path, resume.first_step)
                execute(checked, directory, shown, running, resume, actions)
            elif exported_step(directory.path / POLICY) != last:
                _export_last(checked, directory, shown, running, resume)
            if config.evaluation.sets and config.evaluation.bf16_before_after:
                shown.status.phase("engines", "evaluate in bf16")
                _evaluate_ends(config, directory, shown.progress, running, last)
        except StopRequestedError:
            shown.progress.close()
            answer_request(directory.path)
            raise


def _export_last(
    checked: CheckedRun, directory: RunDirectory, shown: Shown, running: Processes, resume: ResumePoint
) -> None:
    """Export the policy of the newest checkpoint, which an earlier start has saved after its last step.

    The ranks end before engines evaluate, which need their devices.
    """
    shown.status.phase("trainer", "export")
    shown.progress.say(f"{POLICY}/ does not hold the weights of step {resume.first_step}: they are exported now")
    spec = trainer_spec(checked.config, checked.format, secrets.token_hex(4))
    with judging_checkpoint(resume):
        trainer = start_policy(running, spec, checked.placement.trainers, resume.trainer)
    note_begin()
    replace_policy(directory.path, resume.first_step, trainer.export)
    trainer.ranks.kill_and_wait()
    running.end_trainer(trainer)


def _evaluate_ends(
    config: RunConfig, directory: RunDirectory, progress: RunProgress, running: Processes, last: int
) -> None:
    """Evaluate the weights before the first step and those of `policy/`, of step `last`, in BF16 engines.

    A set that has rows of these weights with its k and the present settings is not evaluated again.

    Raises:
        OSError: the file of a set cannot be read.
        StopRequestedError: the run was asked to stop; rows of evaluations that have ended are written.
    """
    rows = [EvaluationRow.from_row(row) for row in directory.evaluation()]
    recorded = {
        (row.step, row.set_name, row.samples_per_prompt, row.settings, row.run_settings)
        for row in rows
        if row.format == "bf16"
    }
    of_run = run_settings(evaluation_of(config, config.model, config.engine))
    settings = {name: settings_digest(each) for name, each in config.evaluation.sets.items()}
    missing: dict[int, Weights] = {}
    for step, model in {0: config.model, last: str(directory.path / POLICY)}.items():
        sets = {
            name: each
            for name, each in config.evaluation.sets.items()
            if (step, name, each.samples_per_prompt, settings[name], of_run) not in recorded
        }
        if sets:
            missing[step] = Weights(directory=model, sets=sets)
    stop_requested = StopWatch(run_dir=directory.path)

    def check() -> None:
        if stop_requested():
            raise StopRequestedError(last)

    for evaluated in evaluate_directories(config, missing, running, progress, check):
        directory.append_evaluation([row.as_row() for row in evaluated])
