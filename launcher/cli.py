"""The command line: `megatron-rl run | eval | export | sft`.

Arguments are parsed, the configuration loaded and checked, and only then is the work imported: `--help` and every
refusal cost a fraction of a second. Exit codes: 0 done, 2 the user can mend it (one screen, no traceback),
130 interrupted; any other failure keeps its traceback.
"""

import argparse
import sys
from collections.abc import Sequence

from launcher.checks import check_eval, check_run, check_sft, run_warnings
from launcher.config import EvalConfig, ExportConfig, RunConfig, SftConfig
from launcher.environment import node_resources
from launcher.errors import LaunchError
from launcher.loading import load, resolved_yaml
from launcher.placement import plan

OVERRIDES = "Overrides are dotted keys with YAML values: `trainer.optimizer.learning_rate=1e-5 seed=3`."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = _parse(list(sys.argv[1:] if argv is None else argv))
    try:
        return _dispatch(arguments)
    except LaunchError as error:
        print(f"megatron-rl {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parses `argv`; overrides may stand before or after options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or "=" not in text]
    if unknown or (rest and arguments.command == "export"):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if arguments.command != "export":
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl", description="Reinforcement learning for language models with quantised rollouts."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = _command(commands, "run", "reinforcement learning; resumes when the run directory holds a checkpoint")
    run.add_argument("--dry-run", action="store_true", help="print configuration, placement and memory; start nothing")
    _command(commands, "eval", "avg@k and pass@k of a Hugging Face directory")
    _command(commands, "sft", "supervised warm start, Hugging Face directory to Hugging Face directory")
    export = commands.add_parser("export", help="a checkpoint as a Hugging Face directory")
    export.add_argument("run_dir", help="run directory that holds the checkpoint")
    export.add_argument("output_dir", help="Hugging Face directory to write")
    export.add_argument("--step", type=int, default=-1, help="checkpoint of this step (default: the newest)")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    """A command that takes a configuration file and overrides."""
    command = commands.add_parser(name, help=text, description=f"{text}. {OVERRIDES}")
    command.add_argument("config", metavar="CONFIG", help="YAML file; keys: docs/configuration.md")
    command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="replaces keys of CONFIG")
    return command


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        return _run(arguments.config, arguments.overrides, dry_run=arguments.dry_run)
    if arguments.command == "eval":
        return _eval(arguments.config, arguments.overrides)
    if arguments.command == "sft":
        return _sft(arguments.config, arguments.overrides)
    return _export(ExportConfig(run_dir=arguments.run_dir, output_dir=arguments.output_dir, step=arguments.step))


def _run(path: str, overrides: Sequence[str], *, dry_run: bool) -> int:
    config = load(RunConfig, path, overrides)
    node = node_resources()
    memory = check_run(config, node)
    for warning in run_warnings(config, node):
        print(f"warning: {warning}", file=sys.stderr)
    placement = plan(config, node)
    if dry_run:
        print(resolved_yaml(config))
        print("\n".join(["# placement", *placement.lines(), "", "# memory (estimate)", *memory.lines()]))
        return 0
    from launcher.run import run

    run(config)
    return 0


def _eval(path: str, overrides: Sequence[str]) -> int:
    config = load(EvalConfig, path, overrides)
    check_eval(config)
    from launcher.evaluate import evaluate

    evaluate(config)
    return 0


def _sft(path: str, overrides: Sequence[str]) -> int:
    config = load(SftConfig, path, overrides)
    check_sft(config, node_resources())
    from launcher.sft import sft

    sft(config)
    return 0


def _export(config: ExportConfig) -> int:
    from launcher.export import export

    export(config)
    return 0
