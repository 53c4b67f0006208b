"""Programs that tests of the cluster and of the sandbox need.

Installs Debian's packages as root, otherwise names what is missing:

python -m tests.support.cluster.packages
"""

import os
import shutil
import subprocess
import sys

PROGRAMS = {
    **dict.fromkeys(("slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol"), "slurm-wlm"),
    "munged": "munge",
    "ip": "iproute2",
    "bwrap": "bubblewrap",
    **dict.fromkeys(("nsenter", "unshare"), "util-linux"),
}
"""Debian's package of each program."""


def missing() -> list[str]:
    """Packages whose programs are not there."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None})


def main() -> int:
    if os.geteuid() != 0:
        print(
            "make test-cluster: namespaces of test nodes need root; run it as root"
            + (f" or first install {' '.join(found)}" if (found := missing()) else ""),
            file=sys.stderr,
        )
        return 2
    if found := missing():
        install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *found]
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(["apt-get", "update", "--quiet"], check=False).returncode:
            return 2
        return subprocess.run(install, env=quiet, check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
