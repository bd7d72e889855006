"""Compiles the C programs into `src/atoll/_bin/`: guest and keeper, static, and statx.so, which needs no library.

As a build hook of hatchling it puts them into the wheel and beside an editable install. As a program
(`python build_guest.py [--werror] [NAME]…`) it is what `make build` runs; make decides when.
The compiler is `$CC`, else `cc`; `$CFLAGS` and `$LDFLAGS` come after ours. `ATOLL_BUILD_GUEST=0` makes the hook
leave them alone: an editable install may have none yet, a wheel gets those that make has built.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "atoll"
SOURCES = {
    "guest": PACKAGE / "guest",
    "keeper": PACKAGE / "drivers" / "keeper",
    "statx.so": PACKAGE / "drivers" / "statx",
}
INCLUDE = PACKAGE / "guest"
BIN = PACKAGE / "_bin"

CFLAGS = [
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-D_GNU_SOURCE=",  # empty, so that a source may say it too
    "-U_FORTIFY_SOURCE",  # some compilers come with one, and warn about a second
    "-D_FORTIFY_SOURCE=2",
    "-fstack-protector-strong",
    "-ffunction-sections",
    "-fdata-sections",
]
STATIC = ["-static", "-s", "-Wl,--gc-sections"]
SHARED = ["-shared", "-fPIC", "-nostdlib", "-s"]


def compile_program(name: str, *, werror: bool = False) -> Path:
    """Compile one program and put it in place in one step: sandboxes that run the old one keep it.

    Raises:
        SystemExit: there are no sources, no compiler, or they do not agree. The compiler has said why.
    """
    sources = sorted(SOURCES[name].glob("*.c"))
    if not sources:
        raise SystemExit(f"{name}: no C sources in {SOURCES[name]}")
    BIN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BIN, prefix=f".{name}-") as scratch:
        output = Path(scratch) / name
        command = [
            *shlex.split(os.environ.get("CC") or "cc"),
            *CFLAGS,
            *(["-Werror"] if werror else []),
            f"-I{INCLUDE}",
            *shlex.split(os.environ.get("CFLAGS", "")),
            "-o",
            str(output),
            *map(str, sources),
            *(SHARED if name.endswith(".so") else STATIC),
            *shlex.split(os.environ.get("LDFLAGS", "")),
        ]
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise SystemExit(f"{name}: there is no C compiler {command[0]!r}; install one or set CC") from None
        except subprocess.CalledProcessError:
            raise SystemExit(f"{name}: did not compile: {shlex.join(command)}") from None
        output.chmod(0o755)
        return output.rename(BIN / name)


def is_stale(name: str) -> bool:
    """Whether a source, a header or this file is newer than the binary, or there is none."""
    inputs = [Path(__file__), *SOURCES[name].glob("*.[ch]")]
    if not name.endswith(".so"):  # which includes none of ours
        inputs += INCLUDE.glob("*.h")
    try:
        built = (BIN / name).stat().st_mtime
    except FileNotFoundError:
        return True
    return any(path.stat().st_mtime > built for path in inputs)


def main() -> None:
    """Compile what the command line names, or all programs."""
    parser = argparse.ArgumentParser(description="Compile Atoll's C programs into src/atoll/_bin/.")
    parser.add_argument("programs", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)}; none: all")
    parser.add_argument("--werror", action="store_true", help="a warning is an error")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.programs if name not in SOURCES]:
        parser.error(f"no such program: {', '.join(unknown)} (there are {', '.join(SOURCES)})")
    for name in arguments.programs or SOURCES:
        path = compile_program(name, werror=arguments.werror)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} kB", file=sys.stderr)


if TYPE_CHECKING or "hatchling" in sys.modules:  # not needed to compile
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class GuestBuildHook(BuildHookInterface[Any]):
        """Compiles before hatchling collects the files of a wheel, and tags the wheel with the platform."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """`version` is `standard` for a wheel that travels, `editable` for one that points here."""
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"  # static binaries: any Python, any libc
            if os.environ.get("ATOLL_BUILD_GUEST") == "0":
                missing = [name for name in SOURCES if is_stale(name)]
                if missing and version != "editable":
                    raise SystemExit(f"not built from the current sources: {', '.join(missing)}; run 'make build'")
                return
            for name in SOURCES:
                if version != "editable" or is_stale(name):
                    compile_program(name)


if __name__ == "__main__":
    main()
