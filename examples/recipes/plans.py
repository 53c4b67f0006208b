"""The plan of every recipe: `plans.json`, and the table of README.md.

    python -m examples.recipes.plans --write

The folder `models` has the `config.json` of each model, which is enough to plan. Without `--write` the command prints
the table.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.commands.plan import PlanOptions, add_plan_options, gpu_kind, plan_options, planned
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.run_dir.atomic_files import replace_text

FOLDER = Path(__file__).parent
RECIPES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
PLANS, PAGE = FOLDER / "plans.json", FOLDER / "README.md"
MODELS = FOLDER / "models"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
_GIB = 1 << 30

Plan = dict[str, str | int | float | dict[str, float]]


def load_recipe(name: str, *overrides: str) -> RunConfig:
    """The configuration of a recipe with its model in `MODELS`, and `KEY=VALUE` overrides."""
    path = FOLDER / f"{name}.yaml"
    model = Path(load(RunConfig, str(path)).model).name
    return load(RunConfig, str(path), [f"model={MODELS / model}", *overrides])


def options() -> PlanOptions:
    """Options of `megatron-rl plan` for a recipe, which names its nodes and GPUs itself."""
    parser = argparse.ArgumentParser()
    add_plan_options(parser)
    return plan_options(parser.parse_args([]))


def recipe_plan(name: str) -> Plan:
    """Memory of every kind of device and node, and an estimate of the step, without drafts.

    Raises:
        ValueError: the recipe does not fit; names the problems.
    """
    config, given = load_recipe(name), options()
    report, estimate, _ = planned(config, given)
    if report.problems or report.fitted is None or estimate is None:
        raise ValueError(f"{name}: {'; '.join(report.problems)}")
    return {
        "gpus": f"{len(report.nodes)} x {len(report.nodes[0].gpu_bytes)} {gpu_kind(config, given).upper()}",
        "mode": config.placement.mode,
        "format": config.engine.format,
        "transport": str(report.fitted.placement.transport),
        "gib": {table.title: round(table.needed_bytes / _GIB, 1) for table in report.fitted.memory.tables},
        "rollout_s": round(estimate.rollout_s),
        "train_s": round(estimate.train.seconds),
        "step_s": round(estimate.step_s),
    }


def plans() -> dict[str, Plan]:
    """The plan of each recipe by name."""
    return {name: recipe_plan(name) for name in RECIPES}


def page_table(of_recipes: Mapping[str, Plan]) -> str:
    """The Markdown table of README.md."""
    rows = [
        "| recipe | GPUs | mode | rollouts | GiB of the fullest GPU | step, estimated: rollout + train |",
        "|---|---|---|---|---|---|",
    ]
    for name, plan in of_recipes.items():
        gib = plan["gib"]
        assert isinstance(gib, dict)
        fullest = max(value for title, value in gib.items() if title.startswith("device"))
        rows.append(
            f"| [{name}]({name}.yaml) | {plan['gpus']} | {plan['mode']} | {plan['format']} | {fullest} | "
            f"{plan['step_s']} s: {plan['rollout_s']} s, {plan['train_s']} s |"
        )
    return "\n".join(rows)


def with_table(page: str, table: str) -> str:
    """The page with its table replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write both files."""
    parser = argparse.ArgumentParser(prog="python -m examples.recipes.plans", description="Plan of every recipe.")
    parser.add_argument("--write", action="store_true", help="write plans.json and the table of README.md")
    arguments = parser.parse_args(argv)
    of_recipes = plans()
    if arguments.write:
        replace_text(PLANS, json.dumps(of_recipes, indent=1) + "\n")
        replace_text(PAGE, with_table(PAGE.read_text(encoding="utf-8"), page_table(of_recipes)))
    else:
        print(page_table(of_recipes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
