"""`megatron-rl run`: builds a run, executes it, evaluates its first and last weights, writes the report.

A run resumes from the newest checkpoint of its run directory.
"""

from launcher.checks.check import CheckedRun
from launcher.cluster.node import describe
from launcher.cluster.processes import Processes, processes
from launcher.commands.assembly import EXPORT, build
from launcher.commands.evaluate import evaluate_directories
from launcher.commands.resume_point import resume_point
from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.report.write import write_report
from launcher.run_dir.console import RunProgress
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.resume import changed_keys
from rollout.evaluation import EvaluationRow


def run(checked: CheckedRun) -> None:
    """Execute the run to its last step; `launcher.run_dir.directory` lists the files that it writes."""
    config, slots = checked.config, checked.placement
    with RunDirectory(config.run_dir) as directory:
        resume = resume_point(directory)
        changes = changed_keys(directory.path, config) if resume.first_step else []
        directory.write_config(resolved_yaml(config))
        directory.write_environment(describe())
        progress = RunProgress(config.num_steps)
        if resume.first_step:
            progress.say(f"resuming {config.run_dir} after step {resume.first_step}")
        for change in changes:
            progress.say(f"changed since the last start: {change}")
        for note in slots.notes:
            progress.say(note)
        log_dir = directory.path / "logs"
        with processes(config.cluster, num_actors=slots.num_actors, log_dir=log_dir) as running:
            if resume.first_step < config.num_steps:
                with build(checked, directory, progress, running, resume) as controller:
                    controller.run()
            if config.evaluation.sets and config.evaluation.bf16_before_after:
                _evaluate_ends(config, directory, progress, running)
        rows = [EvaluationRow.from_row(row) for row in directory.evaluation()]
        if rows:
            progress.table(rows)
        write_report(directory.path)
        progress.say(f"report: {directory.path / 'report.html'}")


def _evaluate_ends(config: RunConfig, directory: RunDirectory, progress: RunProgress, running: Processes) -> None:
    """Evaluate the weights before the first step and after the last one in BF16 engines, once."""
    recorded = {(row["format"], row["step"]) for row in directory.evaluation()}
    models = {0: config.model, config.num_steps: str(directory.path / EXPORT)}
    missing = {step: model for step, model in models.items() if ("bf16", step) not in recorded}
    rows = evaluate_directories(config, missing, running, progress)
    directory.append_evaluation([row.as_row() for row in rows])
