"""Start-up time of `import atoll` and of the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.lab import Lab
from bench.results import Section, times
from bench.sampling import Contender, in_turns, program

HOW = """\
Whole programs from start to end, interleaved, with the interpreter and the bytecode that the tests use. The names of
the package are loaded when first used; the third line is what a program that creates sandboxes loads. `atoll exec`
runs `true` in an existing sandbox."""

BARE = "python -c pass"


async def measure(lab: Lab) -> Section:
    python = sys.executable
    atoll = str(Path(python).parent / "atoll")
    here = {"PATH": os.environ.get("PATH", os.defpath), "ATOLL_STATE_DIR": str(lab.engine.state_dir)}
    async with lab.sandbox() as box:
        contenders = [
            Contender(BARE, program([python, "-c", "pass"], **here)),
            Contender("python -c 'import atoll'", program([python, "-c", "import atoll"], **here)),
            Contender(
                "python -c 'import atoll; atoll.open'", program([python, "-c", "import atoll; atoll.open"], **here)
            ),
            Contender("atoll --help", program([atoll, "--help"], **here)),
            Contender("atoll exec NAME true", program([atoll, "exec", box.name, "true"], **here)),
        ]
        rounds = lab.amount(30, 5)
        with lab.progress("starting programs, interleaved", rounds) as advance:
            samples = await in_turns(contenders, rounds, advance)
    return Section(
        subject="startup",
        title="Import and command line",
        how=HOW,
        tables=(times("Start to end", samples, against=BARE),),
    )
