"""Writes the generated sources of the TypeScript client, from the OpenAPI document of this version of Atoll.

    python scripts/typescript_client.py            write them
    python scripts/typescript_client.py --check    fail if they are not current

`clients/typescript/generate.mjs` does it, with packages that `scripts/bootstrap test` installs. Where they are not
installed nothing is done: `tests/clients/test_typescript.py` holds the sources to the document. `make format` runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from atoll.surfaces.serve.app import openapi

CLIENT = Path(__file__).resolve().parent.parent / "clients" / "typescript"


def main(arguments: list[str]) -> int:
    if not (CLIENT / "node_modules").exists():
        return 0
    document = json.dumps(openapi(), sort_keys=True)
    return subprocess.run(
        ["node", CLIENT / "generate.mjs", *arguments], input=document, text=True, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
