"""Bytes of a publish that cross between nodes, measured at the interfaces of the nodes.

`python -m benchmarks.publish.over_nodes --json OUT [--nodes 2 4] [--quick]`, as root. Nodes are network namespaces of
this machine (`benchmarks.publish.node_network`). Trainer and engine ranks are processes with the product's transports;
their buckets hold random bytes. Nothing is quantised or loaded.

Rows: one per mode and number of nodes, two ranks on each node. Colocated: a trainer TP2 with a replica on each node,
and an engine of one rank on each trainer rank's device, so a node passes buckets on inside. Disaggregated: a trainer
TP2 on the first node, two engines of one rank on each other node, in a chain. `crossing_bytes` is what all interfaces
sent, headers included. `ratio` divides it by the number of nodes with takers and by the bytes of a shard.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.publish.node_network import address, inside, network, sent_bytes
from benchmarks.publish.node_process import Layout
from benchmarks.publish.parts import write_model

RANKS_A_NODE = 2
SLACK = 1.05
"""Allowed bytes over the fewest that must cross: headers and small messages."""
NOT_MEASURED = ("a real network: all interfaces are of one machine", "NCCL", "time: all processes share the cores")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case and write the record."""
    parser = arguments("Bytes of a publish that cross between nodes.")
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--work", type=Path, default=Path("runs/bench/over_nodes"))
    options = parser.parse_args(argv)
    model = write_model(options.work / "model", quick=options.quick)
    rows = [
        measure(layout(mode, num_nodes, model), num_nodes)
        for num_nodes in options.nodes
        for mode in ("colocated", "disaggregated")
    ]
    write(options.json, rows=rows, goals=goals(rows), not_measured=NOT_MEASURED)
    return 0


def layout(mode: str, num_nodes: int, model: Path) -> Layout:
    """Ranks and nodes of one case."""
    every = tuple(node for node in range(num_nodes) for _ in range(RANKS_A_NODE))
    apart = mode == "disaggregated"
    return Layout(
        model=str(model),
        tensor=RANKS_A_NODE,
        data=1 if apart else num_nodes,
        trainer_nodes=every[:RANKS_A_NODE] if apart else every,
        engine_nodes=every[RANKS_A_NODE:] if apart else (),
        host=address(0),
    )


def measure(case: Layout, num_nodes: int) -> Row:
    """The row of one case."""
    shard_bytes = sum(bucket.num_bytes for bucket in case.plan().buckets)
    takers = set(case.engine_nodes or case.trainer_nodes)
    with network(num_nodes), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "layout.json"
        file.write_text(json.dumps(asdict(case)), encoding="utf-8")
        crossing = _publish(case, file, num_nodes)
    return {
        "mode": "disaggregated" if case.engine_nodes else "colocated",
        "nodes": num_nodes,
        "nodes_with_takers": len(takers),
        "engines": len(case.engine_nodes or case.trainer_nodes),
        "shard_bytes": shard_bytes,
        "crossing_bytes": crossing,
        "ratio": crossing / (len(takers) * shard_bytes),
    }


def _publish(case: Layout, file: Path, num_nodes: int) -> int:
    """Bytes that the interfaces send during one publish."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*inside(node), sys.executable, "-m", "benchmarks.publish.node_process", str(file), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number, node in enumerate((*case.trainer_nodes, *case.engine_nodes))
    ]
    try:
        stores, *_ = [_read(rank) for rank in ranks]
        _tell(ranks, stores, answer="ready")
        before = sent_bytes(num_nodes)
        _tell(ranks, "go", answer="done")
        crossing = sent_bytes(num_nodes) - before
        _tell(ranks, "end", answer="")
        return crossing
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _tell(ranks: Sequence[subprocess.Popen[str]], line: str, *, answer: str) -> None:
    """Send a line to every rank and wait for their answers; an empty answer is the end of a rank."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{line}\n")
        rank.stdin.flush()
    received = [_read(rank) for rank in ranks]
    assert set(received) == {answer}, f"ranks answered {received} to {line!r}"


def _read(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def fewest(row: Row) -> float:
    """Least `ratio` of a row: one copy of each bucket must cross to every node with takers that does not hold it.

    Colocated, every node has takers, and a bucket's source is on one of them.
    """
    return 1 - 1 / int(row["nodes"]) if row["mode"] == "colocated" else 1.0


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Goal: hardly more bytes than the fewest that must cross."""
    return [
        Goal(
            name=f"{row['mode']}, {row['nodes']} nodes, bytes between nodes",
            value=float(row["ratio"]),
            bound=round(SLACK * fewest(row), 6),
            direction="at most",
            unit="x nodes with takers x shard",
        )
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
