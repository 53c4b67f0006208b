"""A Ray cluster of several nodes on this machine; each node has devices of its own.

    python -m tests.support.cluster.ray_nodes NUM_NODES DEVICES_PER_NODE CPUS_PER_NODE

prints the cluster's address and ends with its standard input. Ray of a test's own process is another cluster.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ray.cluster_utils import Cluster

from tests.support.runs.background import popen


@contextmanager
def ray_nodes(num_nodes: int, *, devices: int, cpus: int) -> Iterator[str]:
    """Address of a cluster of `num_nodes` nodes of `devices` GPUs and `cpus` cores each; within the context."""
    line = [sys.executable, "-m", "tests.support.cluster.ray_nodes", *map(str, (num_nodes, devices, cpus))]
    process = popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait()


def main(num_nodes: int, devices: int, cpus: int) -> None:
    cluster = Cluster()
    for node in range(num_nodes):
        visible = ",".join(map(str, range(node * devices, (node + 1) * devices)))
        cluster.add_node(
            node_name=f"node{node + 1}",
            num_cpus=cpus,
            num_gpus=devices,
            env_vars={"CUDA_VISIBLE_DEVICES": visible},
        )
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
