"""``python -m pillarbox`` is the command line."""

import sys

from pillarbox.cli import main

sys.exit(main())
