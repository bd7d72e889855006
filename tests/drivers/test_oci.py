"""Which options the runtimes get: those that the installed version describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.drivers.machine import read_machine
from atoll.drivers.oci import RUNTIMES, OciDriver

FLAGS_2022 = """
  -overlay2 value
        wrap mounts with overlayfs. 'none' will turn overlay mode off.
  -platform string
        specifies which platform to use: ptrace (default), kvm. (default "ptrace")
"""
FLAGS_2024 = """
  -directfs
        directly access the container filesystems from the sentry. (default true)
  -overlay2 value
        wrap mounts with overlayfs. 'none' will turn overlay mode off. (default root:self)
  -platform string
        specifies which platform to use: systrap (default), ptrace, kvm. (default "systrap")
"""
CHECKPOINT_2024 = """
  -compression value
        compress checkpoint image on disk. Values: none|flate-best-speed. (default flate-best-speed)
  -exclude-committed-zero-pages
        exclude committed zero-filled pages from checkpoint
"""


def made(directory: Path, flags: str, checkpoint: str) -> OciDriver:
    """The driver for a runsc that describes these options."""
    program = directory / "runsc"
    program.write_text(
        f"#!/bin/sh\ncase $* in\nflags) echo '{flags.replace(chr(39), '')}' ;;\n*) echo '{checkpoint}' ;;\nesac\n"
    )
    program.chmod(0o755)
    (traits,) = [traits for traits in RUNTIMES if traits.name == "runsc"]
    return OciDriver(traits, str(program), directory, read_machine())


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        (FLAGS_2022, {"--overlay2=none", "--platform=ptrace"}),
        (FLAGS_2024, {"--overlay2=none", "--platform=ptrace", "--directfs=false"}),
        (FLAGS_2024.replace("ptrace, ", ""), {"--overlay2=none", "--directfs=false"}),
    ],
    ids=["2022", "2024", "one without ptrace"],
)
def test_a_version_gets_the_options_whose_names_and_values_it_knows(
    tmp_path: Path, flags: str, known: set[str]
) -> None:
    driver = made(tmp_path, flags, "")
    assert set(driver._flags) - set(driver._traits.flags) == known


@pytest.mark.parametrize("checkpoint", ["  -image-path string\n", CHECKPOINT_2024], ids=["2022", "2024"])
def test_memory_is_saved_without_compression_where_the_version_can(tmp_path: Path, checkpoint: str) -> None:
    flags = made(tmp_path, FLAGS_2024, checkpoint)._save_flags
    assert ("--compression=none" in flags) is ("compression" in checkpoint)
