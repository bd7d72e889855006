"""`python -m atoll` is the `atoll` command."""

from atoll.surfaces.cli import main

if __name__ == "__main__":
    main()
