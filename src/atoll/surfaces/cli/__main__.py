"""`python -m atoll.surfaces.cli`: the command line without an installed script."""

import sys

from atoll.surfaces.cli import main

sys.exit(main())
