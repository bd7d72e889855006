"""Start-up time of `import atoll`, of an engine and of the command line, beside Docker's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.baselines import Baselines
from bench.lab import Lab
from bench.results import Section, Spread, Target, Value, ratio, times
from bench.sampling import Contender, in_turns, program

HOW = """\
Whole programs from start to end, interleaved, with the interpreter and the bytecode that the tests use. The names of
the package are loaded when first used; the engine is opened and closed on an existing state directory, and the line
above it is the same without Atoll: an event loop that does nothing. `atoll exec` and `docker exec` run `true` in what
runs already, `atoll run` and `docker run` in a new sandbox or container without network, which they remove again. The
Docker engine is the benchmark's own, with nothing else in it."""

BARE = "python -c pass"
LOOP = "python, anyio.run of nothing"
OPEN = "python, atoll.open and close"
HELP, VERSION = "atoll --help", "atoll --version"
COMPLETION, NAMES = "atoll, completion of an option", "atoll, completion of a sandbox"
EXEC, RUN = "atoll exec NAME -- true", "atoll run -- true"
DOCKER_EXEC, DOCKER_RUN = "docker exec NAME true", "docker run --rm --network=none true"

_TARGETS = (
    (EXEC, DOCKER_EXEC, 0.6),
    (RUN, DOCKER_RUN, 0.35),
    (OPEN, BARE, 7.0),
    (HELP, BARE, 5.0),
    (VERSION, BARE, 5.0),
    (COMPLETION, BARE, 5.0),
    (NAMES, BARE, 5.0),
)
_NOTHING = "import anyio\nasync def main(): pass\nanyio.run(main)"
_ENGINE = "import anyio, atoll\nasync def main():\n    async with atoll.open(): pass\nanyio.run(main)"


async def measure(lab: Lab) -> Section:
    python = sys.executable
    atoll = str(Path(python).parent / "atoll")
    here = {"PATH": os.environ.get("PATH", os.defpath), "ATOLL_STATE_DIR": str(lab.engine.state_dir)}
    asking = {**here, "_ATOLL_COMPLETE": "complete_bash"}
    with Baselines(lab.scratch / "startup") as baselines:
        async with lab.sandbox() as box:
            contenders = [
                Contender(BARE, program([python, "-c", "pass"], **here)),
                Contender("python -c 'import atoll'", program([python, "-c", "import atoll"], **here)),
                Contender(LOOP, program([python, "-c", _NOTHING], **here)),
                Contender(OPEN, program([python, "-c", _ENGINE], **here)),
                Contender(HELP, program([atoll, "--help"], **here)),
                Contender(VERSION, program([atoll, "--version"], **here)),
                Contender(COMPLETION, program([atoll], **asking, _ATOLL_COMPLETE_ARGS="atoll exec --")),
                Contender(NAMES, program([atoll], **asking, _ATOLL_COMPLETE_ARGS="atoll exec ")),
                Contender(EXEC, program([atoll, "exec", box.name, "--", "true"], **here)),
                Contender(RUN, program([atoll, "run", "--", "true"], **here)),
            ]
            if baselines.docker is not None:
                contenders += [
                    Contender(DOCKER_EXEC, program(baselines.docker.exec_command, **here)),
                    Contender(DOCKER_RUN, program(baselines.docker.run_command, **here)),
                ]
            rounds = lab.amount(30, 5)
            with lab.progress("starting programs, interleaved", rounds) as advance:
                samples = await in_turns(contenders, rounds, advance)
        absent = "; ".join(f"{each.label}: {each.reason}" for each in baselines.absent if "docker" in each.label)
    return Section(
        subject="startup",
        title="Import and command line",
        how=HOW,
        tables=(times("Start to end", samples, against=BARE, note=absent or None),),
        targets=tuple(_targets(samples)),
    )


def _targets(samples: Mapping[str, Sequence[float]]) -> list[Target]:
    medians = {label: Spread.of(taken).median for label, taken in samples.items()}
    return [
        Target(
            what=f"`{label}`, median against `{against}`",
            bound=Value(number=bound, unit="×"),
            at_most=True,
            measured=ratio(medians[label], medians[against]),
        )
        for label, against, bound in _TARGETS
        if against in medians
    ]
