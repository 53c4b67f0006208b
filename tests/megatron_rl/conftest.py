import pytest

from tests.megatron_rl.pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool()
    yield pool
    pool.close()
