"""Shell completion: the scripts for bash, zsh and fish, and the words that they ask for.

A script starts `atoll` with `_ATOLL_COMPLETE=complete_SHELL` and the line typed so far, and is told the commands or
options that may follow. Elsewhere it offers files. Imported only when completion is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from atoll.contract.errors import CallerError

VARIABLE = "_ATOLL_COMPLETE"
"""Set: what is asked for, `complete_SHELL` for words, `source_SHELL` for the script."""
LINE = "_ATOLL_COMPLETE_ARGS"
_SCRIPTS = {
    "bash": f"""\
_atoll_completion() {{
    local IFS=$'\\n'
    COMPREPLY=( $( env {LINE}="${{COMP_WORDS[*]:0:$((COMP_CWORD + 1))}}" {VARIABLE}=complete_bash $1 ) )
    return 0
}}

complete -o default -F _atoll_completion atoll
""",
    "zsh": f"""\
#compdef atoll

_atoll_completion() {{
  eval $(env {LINE}="${{words[1,$CURRENT]}}" {VARIABLE}=complete_zsh atoll)
}}

compdef _atoll_completion atoll
""",
    "fish": f"""\
complete --command atoll --arguments "(env {VARIABLE}=complete_fish {LINE}=(commandline -cp) atoll)"
""",
}


def typed_words() -> tuple[list[str], str]:
    """The complete words behind `atoll` on the line that is typed, and the beginning of the next."""
    *words, last = os.environ.get(LINE, "").replace("\n", " ").split(" ")  # bash separates them by newlines
    return [word for word in words[1:] if word], last


def answer(shell: str, found: Iterable[tuple[str, str]]) -> str:
    """The words and their descriptions, as the script of `shell` reads them."""
    rows = list(found)
    if shell == "zsh":
        if not rows:
            return "_files"
        listed = "\n".join(f'"{_quoted(word)}":"{_quoted(text)}"' for word, text in rows)
        return f"_arguments '*: :(({listed}))'"
    return "\n".join(f"{word}\t{text}" if shell == "fish" else word for word, text in rows)


def _quoted(text: str) -> str:
    """For a double-quoted word of zsh, inside a single-quoted one, where a colon separates."""
    for letter, written in (("\\", "\\\\"), ('"', '\\"'), ("'", "''"), ("$", "\\$"), ("`", "\\`"), (":", "\\\\:")):
        text = text.replace(letter, written)
    return text


def script(shell: str) -> str:
    """
    Raises:
        CallerError: there is no script for this shell.
    """
    if shell not in _SCRIPTS:
        raise CallerError(f"there is no completion for the shell {shell!r}; there is for {', '.join(_SCRIPTS)}")
    return _SCRIPTS[shell]


def current_shell() -> str:
    """The shell that started us or, if another program did, the user's."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        parent = ""
    return parent if parent in _SCRIPTS else os.path.basename(os.environ.get("SHELL", "")) or parent


def install(shell: str) -> Path:
    """Write the script where the shell reads it, and return where.

    Raises:
        CallerError: there is no script for this shell.
        OSError: a file cannot be written.
    """
    text, place = script(shell), _places()[shell]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    if shell == "bash":
        _append(Path.home() / ".bashrc", _bash_line(place))
    elif shell == "zsh":
        _append(Path.home() / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    return place


def remove() -> list[Path]:
    """Remove what `install` has written, and return it. The line in .zshrc stays: it is not for `atoll` alone."""
    places = _places()
    removed = [place for place in places.values() if place.exists()]
    for place in removed:
        place.unlink()
    settings = Path.home() / ".bashrc"
    if places["bash"] in removed and settings.exists():
        lines = settings.read_text().splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if line.strip() != _bash_line(places["bash"])))
    return removed


def _places() -> dict[str, Path]:
    home = Path.home()
    return {
        "bash": home / ".bash_completions" / "atoll.sh",
        "zsh": home / ".zfunc" / "_atoll",
        "fish": home / ".config" / "fish" / "completions" / "atoll.fish",
    }


def _bash_line(place: Path) -> str:
    return f"source '{place}'"


def _append(file: Path, line: str) -> None:
    content = file.read_text() if file.exists() else ""
    if line not in content.splitlines():
        file.write_text(f"{content.rstrip()}\n\n{line}\n".lstrip())
