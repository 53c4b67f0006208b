"""Files of a test cluster's SLURM. Pure."""

from pathlib import Path

SUBNET = "10.78.0"
LOGIN = "login"
URGENT = "urgent"
"""Partition whose jobs preempt those of the default one."""
CPUS = 8
"""Of each node, on paper: the machine may have fewer."""


def node_names(num_nodes: int) -> list[str]:
    """`node1`, `node2`, ..."""
    return [f"node{number}" for number in range(1, num_nodes + 1)]


def addresses(num_nodes: int) -> dict[str, str]:
    """IPv4 address of the login node and of every other node."""
    numbered = {name: f"{SUBNET}.{number}" for number, name in enumerate(node_names(num_nodes), start=1)}
    return {LOGIN: f"{SUBNET}.100", **numbered}


def hosts(num_nodes: int) -> str:
    """`/etc/hosts` of every node."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses(num_nodes).items())]
    return "\n".join(lines) + "\n"


def slurm_conf(root: Path, num_nodes: int) -> str:
    """`slurm.conf`. A dead node is noticed after 15 s; a job that a node failure ended is requeued at once."""
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{LOGIN}({SUBNET}.100)",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root}/munge/socket",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": f"{root}/state",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": f"{root}/state/slurmctld.pid",
        "SlurmdPidFile": f"{root}/spool/%n.pid",
        "SlurmctldLogFile": f"{root}/log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "ReturnToService": "2",
        "SlurmdParameters": "config_overrides",
        "KillWait": "30",
        "SlurmctldTimeout": "30",
        "SlurmdTimeout": "15",
        "MessageTimeout": "60",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SlurmctldParameters": "preempt_send_user_signal",
    }
    nodes = [
        f"NodeName={name} NodeAddr={address} NodeHostname={name} CPUs={CPUS} RealMemory=8000 State=UNKNOWN"
        for name, address in addresses(num_nodes).items()
        if name != LOGIN
    ]
    partition = "Nodes=ALL MaxTime=INFINITE State=UP"
    partitions = [
        f"PartitionName=main Default=YES PriorityTier=1 GraceTime=600 {partition}",
        f"PartitionName={URGENT} PriorityTier=2 {partition}",
    ]
    return "\n".join([*(f"{key}={value}" for key, value in settings.items()), *nodes, *partitions]) + "\n"
