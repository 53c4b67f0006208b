import pytest

from tests.support.trainers.pool import RankPool


@pytest.fixture(scope="package")
def ranks():
    """Closed after this package's tests: threads of idle gloo groups wake up a hundred times a second."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def single_rank(tmp_path):
    """A world of this process alone, for tests on a CUDA device."""
    import torch

    from megatron_rl.config import ParallelConfig
    from megatron_rl.model import parallel

    position = parallel.initialize(
        ParallelConfig(),
        rank=0,
        store=torch.distributed.FileStore(f"{tmp_path}/store", 1),
        timeout_s=60,
        seed=0,
    )
    yield position
    parallel.destroy()
