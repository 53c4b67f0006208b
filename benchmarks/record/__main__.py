"""The command line of `benchmarks.harness.record`."""

import sys

from benchmarks.harness.record import main

if __name__ == "__main__":
    sys.exit(main())
