import pytest

from tests.megatron_rl.pool import RankPool


@pytest.fixture(scope="package")
def ranks():
    """Ends with this package's tests: the threads of gloo groups wake up a hundred times a second, used or not."""
    pool = RankPool()
    yield pool
    pool.close()
