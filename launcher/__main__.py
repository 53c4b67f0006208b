"""`python -m launcher` is `megatron-rl`."""

import sys

from launcher.cli import main

sys.exit(main())
