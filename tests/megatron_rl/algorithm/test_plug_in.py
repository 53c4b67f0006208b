"""What a function of a stage says of itself by its annotations, and what is refused."""

from pathlib import Path
from typing import get_type_hints

import pytest

from history.config import load_function
from megatron_rl.algorithm.plug_in import load_stage, needed_columns
from megatron_rl.algorithm_settings import ADVANTAGES, FILTERS, LOSSES, STAGES, AdvantageChoice
from megatron_rl.config import AlgorithmConfig
from megatron_rl.stages import PlugIn

OWN = "tests.megatron_rl.algorithm.own_functions"


def test_every_built_in_function_is_annotated_with_its_own_settings_and_runs_where_they_say():
    for stage in STAGES:
        for choice in stage.choices:
            function = load_function(choice.path, field=stage.key)
            assert get_type_hints(function)["settings"] is choice
            loaded = load_stage(stage, choice())
            if issubclass(choice, AdvantageChoice):
                assert (loaded.inputs.__name__ == "TokenOutcome") is choice.on_trainer


@pytest.mark.parametrize(
    ("stage", "name", "said"),
    [
        (ADVANTAGES, "one_parameter", "algorithm.advantage: .*one_parameter has the parameters \\(outcome\\)"),
        (ADVANTAGES, "mean", "annotated with .*LossInputs.*; this stage takes GroupOutcome or BatchOutcome or"),
        (FILTERS, "declared", "this stage takes GroupOutcome or GroupSignal"),
        (LOSSES, "not_there", "has no 'not_there'"),
    ],
)
def test_a_function_of_another_form_is_refused(stage, name, said):
    with pytest.raises(ValueError, match=said):
        load_stage(stage, PlugIn(name=f"{OWN}.{name}"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share": "much"}, r"`algorithm\.advantage\.share`: input should be a valid number"),
        ({"sahre": 0.1}, r"unknown key `algorithm\.advantage\.sahre`; did you mean `share`\? its settings: share"),
    ],
)
def test_wrong_settings_of_a_users_function_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        load_stage(ADVANTAGES, PlugIn(name=f"{OWN}.above_quantile", **given))


def test_columns_are_needed_by_functions_that_declare_them_and_by_the_divergence():
    assert needed_columns(AlgorithmConfig()) == set()
    assert needed_columns(AlgorithmConfig(loss=f"{OWN}.declared")) == {"ref"}
    assert needed_columns(AlgorithmConfig(advantage="gae", kl={"place": "loss"})) == {"ref", "values"}


def test_the_page_of_algorithms_names_every_built_in_function():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    names = [name for stage in STAGES for name in stage.by_name if name != "none"]
    assert [name for name in names if f"`{name}`" not in page] == []
