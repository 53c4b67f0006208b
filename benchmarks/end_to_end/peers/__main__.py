"""`python -m benchmarks.end_to_end.peers`."""

import sys

from benchmarks.end_to_end.peers.setup import main

sys.exit(main())
