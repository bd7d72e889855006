"""Each fuzz target, for a bounded number of runs. `make fuzz` runs them for longer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from atoll.testing.plugin import STRICT

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "atoll"


@pytest.mark.parametrize("target", sorted(path.stem for path in HERE.glob("*.c")))
def test_no_input_makes_it_misbehave(target: str, tmp_path: Path) -> None:
    if shutil.which("clang") is None and not STRICT:
        pytest.skip("clang is not installed")
    program = tmp_path / target
    subprocess.run(
        [
            *("clang", "-std=gnu11", "-g", "-O1", "-D_GNU_SOURCE=", "-DATOLL_FUZZ"),
            *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"),
            *(f"-I{SOURCES / 'guest'}", f"-I{SOURCES / 'drivers' / 'keeper'}", f"-I{HERE}"),
            *("-o", program, HERE / f"{target}.c"),
        ],
        check=True,
        timeout=100,
    )
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    seeds = [HERE / target] if (HERE / target).is_dir() else []
    done = subprocess.run(
        [program, "-runs=60000", "-max_total_time=4", "-max_len=4096", "-timeout=5", corpus, *seeds],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
