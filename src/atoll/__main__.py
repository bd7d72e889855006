"""The program `atoll`, and `python -m atoll`."""

import signal
from typing import NoReturn


def program() -> NoReturn:
    """Run the command line. Until `main` can answer it, Ctrl-C just ends the process: nothing has begun."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from atoll.surfaces.cli import program

    program()


if __name__ == "__main__":
    program()
