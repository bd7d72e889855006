"""The languages of cells: which program of the image runs them, what it is sent first, and how it is spoken to.

Owns the command of a kernel, and the form of messages to it. Not here: what the kernels do (`kernel/`), and the
messages themselves (`messages.py`). Used by `session.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from atoll.code.messages import encode
from atoll.contract.errors import InvalidRequest

KERNELS = Path(__file__).with_name("kernel")

KERNEL_MARK = "#atoll-kernel"
"""By which a kernel is found among the processes of a sandbox."""
LanguageName = Literal["python", "javascript", "bash"]

_PYTHON = (
    KERNEL_MARK + " python\n"
    "import sys,os\n"
    "if sys.path[0]=='':del sys.path[0]\n"
    "b=b''\n"
    "while b'\\n' not in b:\n"
    " d=os.read(3,1<<20)\n"
    " if not d:sys.exit(0)\n"
    " b+=d\n"
    "import json\n"
    "l,b=b.split(b'\\n',1)\n"
    "k=json.loads(l)\n"
    "g={'__name__':'atoll_kernel'}\n"
    "exec(compile(k['kernel'],'<atoll kernel>','exec'),g)\n"
    "sys.path.insert(0,'')\n"
    "g['main'](b,k['rich'])\n"
)
_JAVASCRIPT = (
    "//" + KERNEL_MARK + " javascript\n"
    "{const fs=require('fs');let b=Buffer.alloc(0),i;"
    "while((i=b.indexOf(10))<0){const c=Buffer.alloc(1<<17),n=fs.readSync(3,c);"
    "if(!n)process.exit(0);b=Buffer.concat([b,c.subarray(0,n)])}"
    "const k=JSON.parse(b.subarray(0,i)),load=n=>import('data:text/javascript,'+encodeURIComponent("
    "k[n]+'\\n//# sourceURL=atoll-'+n));"
    "Promise.all([load('kernel'),load('rewrite')]).then(([k,r])=>k.main(b.subarray(i+1),r,(s,o)=>import(s,o)))}"
)
_BASH = (
    ": '" + KERNEL_MARK + " bash'; "
    'eval "$1"; eval "$__atoll_restore" 2>/dev/null; unset __atoll_restore; set --; '
    "while :; do while :; do __atoll_end; __atoll_next; "
    'eval "$__atoll_code" >&248 2>&249; __atoll_status=$?; done; done'
)


@dataclass(frozen=True, slots=True)
class Language:
    """How a kernel is started and spoken to."""

    command: tuple[str, ...]
    source: bytes = b""
    """What it is sent before any message: its own text."""
    encode: Callable[[Mapping[str, Any]], bytes] = encode
    """A message to it. Empty: it has no such message."""
    cut: bytes = b"\n"
    """Ends a message that an earlier host has left half written."""
    interrupts_children: bool = False
    """Whether an interrupt is for the programs that it runs too. Those in the background ignore it."""


def language_of(name: LanguageName, interpreter: str | None = None) -> Language:
    """A language, run by another program of the image if `interpreter` names one.

    Raises:
        InvalidRequest: there is no such language.
    """
    if name == "python":
        return Language((interpreter or "python3", "-c", _PYTHON), _sources("kernel.py", "rich.py"))
    if name == "javascript":
        # Node must survive a script that is ended in the middle: see `kernel.mjs`.
        arguments = ("--no-force-async-hooks-checks", "-e", _JAVASCRIPT)
        return Language((interpreter or "node", *arguments), _sources("kernel.mjs", "rewrite.mjs"))
    if name == "bash":
        text = (KERNELS / "kernel.bash").read_text()
        options = ("--norc", "--noprofile", "-c", _BASH, "bash", text, _BASH)
        return Language((interpreter or "bash", *options), encode=_encode_bash, cut=b"\0", interrupts_children=True)
    raise InvalidRequest(f"there is no language {name!r}; choose python, javascript or bash")


@cache
def _sources(*names: str) -> bytes:
    texts = {name.partition(".")[0]: (KERNELS / name).read_text() for name in names}
    return json.dumps(texts).encode() + b"\n"


def _encode_bash(message: Mapping[str, Any]) -> bytes:
    """Bash reads no JSON: fields with spaces between them, up to a NUL byte, which no program of bash has."""
    if message["t"] == "hello":
        return f"hello {message['nonce']}\0".encode()
    if message["t"] == "run":
        marker = str(message["marker"]).rpartition("-")[2]
        code = str(message["code"]).replace("\0", "").encode("utf-8", "replace")
        return f"run {message['cell']} {marker}\n".encode() + code + b"\n.\0"
    return b""
