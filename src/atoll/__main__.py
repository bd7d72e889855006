"""`python -m atoll` is the `atoll` command."""

import sys

from atoll.surfaces.cli import main

if __name__ == "__main__":
    sys.exit(main())
