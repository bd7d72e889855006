"""The suites of other projects' frameworks: each is collected by the Python of its own virtual environment alone.

`scripts/foreign NAME` makes that environment, `.foreign/NAME`, from `tests/foreign/NAME/requirements.txt`. Any other
Python lacks what the suite imports.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

collect_ignore = [each.name for each in HERE.iterdir() if Path(sys.prefix) != HERE.parents[1] / ".foreign" / each.name]
