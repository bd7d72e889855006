"""Shell completion: the scripts for bash, zsh and fish, and the words that they ask for.

A script starts `atoll` with `_ATOLL_COMPLETE=complete_SHELL` and the line typed so far, and is told the commands,
options, sandboxes, checkpoints, images or runtimes that may follow. Elsewhere it offers files. Imported only when
completion is asked for. People wait for it at each key, so it opens no engine (`runtime/state/known.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import state_directory
from atoll.contract.errors import CallerError
from atoll.surfaces.cli.grammar import HELP, Argument, Parameter
from atoll.surfaces.cli.options import RUNTIMES

if TYPE_CHECKING:
    from atoll.runtime.state.known import NamespaceView
    from atoll.surfaces.cli.command import AtollCommand, AtollGroup

Candidates = list[tuple[str, str]]
"""Words and their descriptions."""

VARIABLE = "_ATOLL_COMPLETE"
"""Set: what is asked for, `complete_SHELL` for words, `source_SHELL` for the script."""
LINE = "_ATOLL_COMPLETE_ARGS"
_SCRIPTS = {
    "bash": f"""\
_atoll_completion() {{
    local IFS=$'\\n'
    COMPREPLY=( $( env {LINE}="${{COMP_WORDS[*]:0:$((COMP_CWORD + 1))}}" {VARIABLE}=complete_bash $1 ) )
    [[ ${{COMPREPLY[0]-}} == *: ]] && compopt -o nospace
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


class TypedLine:
    """What has been typed so far: the words of each command on the line are taken in turn."""

    def __init__(self) -> None:
        self._positional: list[str] = []
        """The words of the last command that are not options."""
        self._values: dict[str, str] = {}
        """The values of options, by the names of their parameters."""
        self._waiting: Parameter | None = None
        """The option whose value comes next."""
        self._open = True
        """Whether an option may follow. Not behind `--`, and not among the words of a command in the sandbox."""

    def take(self, parameters: Sequence[Parameter], words: Sequence[str], *, leading: int | None) -> list[str]:
        """Take the words of a command, and return the rest, as `Parser.split` does. What is wrong is passed over."""
        options = {name: each for each in parameters for name in (*each.names, *each.negative_names)}
        self._positional = []
        rest = list(words)
        while rest:
            word = rest[0]
            if self._waiting is not None:
                self._values[self._waiting.name] = word
                self._waiting = None
            elif self._open and word == "--":
                self._open = False
            elif self._open and word.startswith("-"):
                option = options.get(word if word.startswith("--") else f"-{word[-1]}")
                self._waiting = option if option is not None and option.takes_value else None
            elif leading is not None and len(self._positional) >= leading:
                self._open = leading == 0
                break
            else:
                self._positional.append(word)
            rest.pop(0)
        return rest

    def of_group(self, group: AtollGroup, last: str) -> Candidates:
        """What may follow in a group: a command, an option or its value."""
        from atoll.surfaces.cli.usage import summary

        if self._waiting is not None or last.startswith("-"):
            return self.of_command(group, last)
        found = [(name, summary(each.description)) for name, each in group.commands().items()]
        return [each for each in found if each[0].startswith(last)]

    def of_command(self, command: AtollCommand | AtollGroup, last: str) -> Candidates:
        """What may follow in a command: an option, its value, or an argument."""
        parameters = command.shown_parameters()
        if self._waiting is not None:
            found = self._known(self._waiting, last)
        elif self._open and last.startswith("-"):
            found = [
                (name, each.help.partition("  [default")[0])
                for each in parameters
                for name in (*each.names, *each.negative_names)
            ]
            found += [(name, "Show this message and exit.") for name in HELP]
        else:
            arguments = [each for each in parameters if isinstance(each.declared, Argument)]
            position = next((at for at, each in enumerate(arguments) if each.is_list), len(arguments))
            position = min(len(self._positional), position)
            found = self._known(arguments[position], last) if position < len(arguments) else []
        return [each for each in found if each[0].startswith(last)]

    def _known(self, parameter: Parameter, last: str) -> Candidates:
        completes = parameter.declared.completes
        if completes == "runtime":
            return [(name, "") for name in RUNTIMES]
        if not completes or (completes == "place" and not last):
            return []
        if "state_dir" not in self._values and state_directory.server_url() is not None:
            return []  # a server is not asked for each key
        from atoll.runtime.state import known

        view = self._view()
        if completes == "checkpoint":
            of = self._positional[0] if self._positional else None
            return known.checkpoints(view, of)
        if completes == "volume":
            return [(name, "") for name in known.volumes(view) if name not in self._positional]
        if completes == "approval":
            return known.approvals(view)
        if completes == "trace":
            return [(name, "") for name in known.traces(view)]
        if completes == "image":
            return [(reference, "") for reference in known.images(view)]
        if completes == "namespace":
            return [(namespace, "") for namespace in known.namespaces(view.state_dir)]
        names = [name for name in known.sandboxes(view) if name not in self._positional]
        return [(f"{name}:" if completes == "place" else name, "") for name in names]

    def _view(self) -> NamespaceView:
        from atoll.runtime.state.known import NamespaceView
        from atoll.settings import Settings

        settings = Settings.from_environment()
        given = self._values.get("state_dir")
        state_dir = Settings(state_dir=Path(given)).resolve_state_dir() if given else settings.resolve_state_dir()
        return NamespaceView(state_dir, self._values.get("namespace") or settings.namespace)


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
