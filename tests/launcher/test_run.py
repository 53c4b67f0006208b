"""What `launcher.run` decides by itself; whole runs are in `tests/test_run.py`."""

import pytest

from launcher.config import RunConfig
from launcher.run import choose_transport


@pytest.mark.parametrize(
    ("asked", "one_node", "chosen"),
    [("auto", True, "shm"), ("auto", False, "gloo"), ("gloo", True, "gloo"), ("shm", False, "shm")],
)
def test_weights_travel_by_shared_memory_only_where_all_share_it(asked: str, one_node: bool, chosen: str) -> None:
    config = RunConfig.model_validate(
        {
            "model": "m",
            "run_dir": "r",
            "num_steps": 1,
            "data": {"train": [{"path": "p.jsonl"}]},
            "publish": {"transport": asked},
        }
    )
    assert choose_transport(config, one_node=one_node) == chosen
