"""`python -m launcher.report RUN_DIR`."""

import sys

from launcher.report.write import main

sys.exit(main())
