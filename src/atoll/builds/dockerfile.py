"""A Dockerfile, read into a plan.

Owns which part of the language there is: FROM, RUN (both forms, and here-documents), COPY and ADD of files of the
context, WORKDIR, ENV, ARG, USER, CMD, ENTRYPOINT, SHELL; EXPOSE, LABEL, VOLUME, STOPSIGNAL and MAINTAINER say nothing
about a template and are passed over. All else is refused, with the number of its line: what is left out silently makes
another image than the author meant. Not here: the files of the context (`context.py`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from atoll.builds.plan import (
    MAX_STEPS,
    MAX_TEXT_CHARS,
    ArgStep,
    BuildPlan,
    BuildStep,
    CopyStep,
    EnvStep,
    RunStep,
    UserStep,
    WorkdirStep,
    check_variables,
    expand,
)
from atoll.contract.errors import BuildFailed

MAX_DOCKERFILE_BYTES = 1024 * 1024
_MAX_PATH_CHARS = 4096
SHELL = ("/bin/sh", "-c")
ALLOWED = "FROM, RUN, COPY, ADD, WORKDIR, ENV, ARG, USER, CMD, ENTRYPOINT, SHELL, EXPOSE, LABEL, VOLUME"
PASSED_OVER = frozenset({"EXPOSE", "LABEL", "VOLUME", "STOPSIGNAL", "MAINTAINER"})
_REASONS = {
    "ONBUILD": "instructions for other builds",
    "HEALTHCHECK": "checks of a running container; set a ready command instead (--ready)",
}
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(\S+)\s*")
_INSTRUCTION = re.compile(r"([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)")
_HEREDOC = re.compile(r"(?<!<)<<(-?)\s*(?:'([A-Za-z_]\w*)'|\"([A-Za-z_]\w*)\"|([A-Za-z_]\w*))")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)
_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=((?:\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\s\"'\\])*)(?:\s+|$)", re.DOTALL)

PackSources = Callable[[Sequence[str], Sequence[str]], tuple[str, tuple[str, ...]]]
"""Chooses files of the context by patterns, without those of a second list. Returns what the archive of them is called,
and the names in it that the patterns mean."""


class Instruction(NamedTuple):
    """One instruction: where it begins, what it is, and what follows, with lines joined."""

    line: int
    name: str
    rest: str
    heredocs: tuple[str, ...] = ()


def parse_dockerfile(
    text: str,
    *,
    arguments: Mapping[str, str] | None = None,
    pack: PackSources | None = None,
    archive: str | None = None,
) -> BuildPlan:
    """The plan of a Dockerfile. What it copies is chosen now by `pack`; or when the step runs, from all that is in
    `archive`, whatever `.dockerignore` says. With neither it may not copy files.

    Raises:
        BuildFailed: it cannot be read, or has what is not supported; the message begins with the line's number.
    """
    reader = _DockerfileReader(arguments or {}, pack, archive)
    for instruction in instructions(text):
        try:
            reader.take(instruction)
        except BuildFailed as error:
            if error.message.startswith("line "):
                raise
            raise _refused(instruction.line, error.message) from None
        except ValueError as error:  # of a model, or of shlex
            raise _refused(instruction.line, f"{instruction.name}: {_first_line(error)}") from None
    try:
        return reader.plan()
    except BuildFailed:
        raise
    except ValueError as error:  # of a model
        raise BuildFailed(f"the Dockerfile cannot be built: {_first_line(error)}") from None


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a Dockerfile, without comments, and with continued lines joined.

    Raises:
        BuildFailed: it is too long, or a line is no instruction.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_DOCKERFILE_BYTES:
        raise BuildFailed(f"the Dockerfile is larger than {MAX_DOCKERFILE_BYTES} bytes")
    if "\0" in text:
        raise BuildFailed("the Dockerfile has a NUL character")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape, at = _directives(lines)
    while at < len(lines):
        begin = at
        if not lines[at].strip() or lines[at].lstrip().startswith("#"):
            at += 1
            continue
        joined, at = _join(lines, at, escape)
        found = _INSTRUCTION.fullmatch(joined.strip())
        if found is None:
            raise _refused(begin + 1, f"{joined.strip()[:80]!r} is not an instruction; allowed are {ALLOWED}")
        name, rest = found[1].upper(), (found[2] or "").strip()
        bodies: list[str] = []
        for dash, *names in _HEREDOC.findall(rest) if name in {"RUN", "COPY", "ADD"} else ():
            end = next(filter(None, names))
            body: list[str] = []
            while at < len(lines) and (lines[at].lstrip("\t") if dash else lines[at]) != end:
                body.append(lines[at].lstrip("\t") if dash else lines[at])
                at += 1
            if at == len(lines):
                raise _refused(begin + 1, f"the here-document has no line that is {end}")
            at += 1
            bodies.append("".join(f"{line}\n" for line in body))
        yield Instruction(begin + 1, name, rest, tuple(bodies))


def unused_arguments(text: str, arguments: Iterable[str]) -> list[str]:
    """Those of the build arguments that no ARG of a Dockerfile declares."""
    said = [shlex.split(each.rest) for each in instructions(text) if each.name == "ARG"]
    declared = {word.partition("=")[0] for words in said for word in words}
    return [each for each in arguments if each not in declared]


def _directives(lines: Sequence[str]) -> tuple[str, int]:
    """The character that continues lines, and how many lines are parser directives."""
    escape = "\\"
    for at, line in enumerate(lines):
        found = _DIRECTIVE.fullmatch(line.strip())
        if found is None:
            return escape, at
        if found[1].lower() == "escape":
            if found[2] not in ("\\", "`"):
                raise _refused(at + 1, f"escape is {found[2][:8]!r}; it may be \\ or `")
            escape = found[2]
        elif found[1].lower() not in ("syntax", "check"):
            return escape, at
    return escape, len(lines)


def _join(lines: Sequence[str], at: int, escape: str) -> tuple[str, int]:
    parts: list[str] = []
    while at < len(lines):
        line = lines[at]
        at += 1
        if parts and line.lstrip().startswith("#"):
            continue  # a comment between continued lines
        stripped = line.rstrip()
        if not stripped.endswith(escape):
            if not stripped and parts:
                continue  # an empty line does not end it
            parts.append(line)
            break
        parts.append(stripped[:-1])
    return "".join(parts), at


class _DockerfileReader:
    def __init__(self, arguments: Mapping[str, str], pack: PackSources | None, archive: str | None) -> None:
        self._arguments = arguments
        self._pack = pack
        self._archive = archive
        self._known: dict[str, str] = {}
        """Variables so far, as far as they are known without the base."""
        self._known_arguments: dict[str, str] = {}
        self._global: dict[str, str] = {}
        """The arguments before FROM, which are known to it alone."""
        self._image: str | None = None
        self._steps: list[BuildStep] = []
        self._shell: tuple[str, ...] = SHELL
        self._command: tuple[str, ...] | None = None
        self._entrypoint: tuple[tuple[str, ...], bool] | None = None

    def plan(self) -> BuildPlan:
        if self._image is None:
            raise BuildFailed("the Dockerfile has no FROM: its first instruction names the base")
        start = self._command or ()
        if self._entrypoint is not None:
            words, is_exec = self._entrypoint
            start = (*words, *start) if is_exec else words
        image = None if self._image == "scratch" else self._image
        return BuildPlan(image=image, steps=tuple(self._steps), arguments=dict(self._arguments), start_command=start)

    def take(self, instruction: Instruction) -> None:
        name = instruction.name
        if name in PASSED_OVER:
            return
        handler = _HANDLERS.get(name)
        if handler is None:
            reason = f": it is for {_REASONS[name]}" if name in _REASONS else ""
            raise BuildFailed(f"{name} is not supported{reason}; allowed are {ALLOWED}")
        if self._image is None and name not in ("FROM", "ARG"):
            raise BuildFailed(f"{name} comes before FROM; only ARG may")
        if not instruction.rest:
            raise BuildFailed(f"{name} has no arguments")
        if len(instruction.rest) > MAX_TEXT_CHARS:
            raise BuildFailed(f"{name} is longer than {MAX_TEXT_CHARS} characters; copy what is long as a file")
        if name in ("WORKDIR", "USER") and len(instruction.rest) > _MAX_PATH_CHARS:
            raise BuildFailed(f"{name} is longer than {_MAX_PATH_CHARS} characters")
        if len(self._steps) >= MAX_STEPS:
            raise BuildFailed(f"the Dockerfile has more than {MAX_STEPS} steps")
        handler(self, instruction)

    def _from(self, instruction: Instruction) -> None:
        if self._image is not None:
            raise BuildFailed(
                "a second FROM: builds of several stages are not supported; build the first as a template of its own, "
                "and begin with FROM template:NAME"
            )
        flags, rest = _flags(instruction, {"platform"})
        words = rest.split()
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise BuildFailed("FROM takes one image: FROM IMAGE")
        if flags:
            raise BuildFailed("--platform is not supported: a template is for this machine")
        image = expand(words[0], self._global)
        if image == "scratch" or not image:
            raise BuildFailed("FROM scratch is not supported: a step needs programs; begin with an image")
        self._image = image

    def _run(self, instruction: Instruction) -> None:
        flags, rest = _flags(instruction, {"mount", "network", "security"})
        if flags:
            raise BuildFailed(f"RUN --{next(iter(flags))} is not supported")
        if instruction.heredocs:
            command = self._heredoc(rest, instruction.heredocs)
            self._steps.append(RunStep(command=command, shown=f"RUN {rest}"))
            return
        words = _exec_form(rest)
        command = words if words is not None else (*self._shell, rest)
        self._steps.append(RunStep(command=command, shown=f"RUN {rest}"))

    def _heredoc(self, rest: str, bodies: Sequence[str]) -> tuple[str, ...]:
        """A script alone is run by the shell, or by what its first line names; with a command before it, the command
        reads it."""
        if _HEREDOC.fullmatch(rest) is None:
            ends = ["".join(names) for _, *names in _HEREDOC.findall(rest)]
            text = rest + "\n" + "".join(f"{body}{end}\n" for body, end in zip(bodies, ends, strict=True))
            return (*self._shell, text)
        script = bodies[0]
        first = script.split("\n", 1)[0]
        if not first.startswith("#!"):
            return (*self._shell, script)
        return (
            "/bin/sh",
            "-c",
            'f=$(mktemp) && printf %s "$1" > "$f" && chmod 755 "$f" && "$f"; s=$?; rm -f "$f"; exit $s',
            "sh",
            script,
        )

    def _copy(self, instruction: Instruction) -> None:
        if instruction.heredocs:
            raise BuildFailed(
                f"{instruction.name} of a here-document is not supported; write it with RUN cat > FILE <<EOF"
            )
        flags, rest = _flags(
            instruction, {"chown", "chmod", "from", "link", "exclude", "parents", "checksum"}, {"exclude"}
        )
        for name in ("from", "parents", "checksum"):
            if name in flags:
                what = "copies from another stage or image" if name == "from" else "is not supported here"
                raise BuildFailed(f"{instruction.name} --{name} {what}, which is not supported")
        words = _exec_form(rest) or tuple(shlex.split(rest))
        if len(words) < 2:
            raise BuildFailed(f"{instruction.name} takes sources and a destination: {instruction.name} SRC DEST")
        *sources, destination = words
        for source in sources:
            if _URL.match(source):
                raise BuildFailed(
                    f"{instruction.name} of a URL is not supported; fetch it with RUN, or have it in the context"
                )
        if instruction.name == "ADD" and any(re.search(r"\.(tar|tgz|tbz2?|txz)(\.\w+)?$", each) for each in sources):
            raise BuildFailed("ADD of an archive is not supported; use COPY, and unpack it with RUN tar")
        wanted = tuple(expand(source, self._variables()) for source in sources)
        if self._pack is not None:
            archive, names = self._pack(wanted, flags.get("exclude", ()))
        elif self._archive is None:
            raise BuildFailed(f"{instruction.name} needs a directory with files, and there is none")
        elif "exclude" in flags:
            raise BuildFailed(f"{instruction.name} --exclude needs the directory; of an archive, name what is copied")
        elif "" in wanted:
            raise BuildFailed("a source of a copy is empty; is a variable not set?")
        else:
            archive, names = self._archive, tuple(each.lstrip("/") or "." for each in wanted)
        if len(names) > 1 and not destination.endswith("/"):
            raise BuildFailed(f"{len(names)} files match; the destination of several has to end with '/'")
        self._steps.append(
            CopyStep(
                archive=archive,
                sources=names,
                are_patterns=self._pack is None,
                destination=destination,
                owner=flags["chown"][-1] if "chown" in flags else None,
                mode=flags["chmod"][-1] if "chmod" in flags else None,
                shown=f"{instruction.name} {instruction.rest}",
            )
        )

    def _variables(self) -> dict[str, str]:
        return {**self._known_arguments, **self._known}

    def _workdir(self, instruction: Instruction) -> None:
        self._steps.append(WorkdirStep(path=_unquoted(instruction.rest)))

    def _user(self, instruction: Instruction) -> None:
        self._steps.append(UserStep(user=_unquoted(instruction.rest)))

    def _env(self, instruction: Instruction) -> None:
        step, before = EnvStep(variables=_pairs(instruction)), self._variables()
        self._steps.append(step)
        for name, value in step.variables.items():
            self._know(self._known, name, value, before)

    def _know(self, known: dict[str, str], name: str, value: str, before: Mapping[str, str]) -> None:
        try:
            known[name] = expand(value, before)
            check_variables(self._known, self._known_arguments)
        except BuildFailed as error:
            if "unset" not in error.details:  # the base may set it
                raise

    def _arg(self, instruction: Instruction) -> None:
        for word in shlex.split(instruction.rest):
            name, equals, value = word.partition("=")
            default = value if equals else None
            if self._image is None:
                given = self._arguments.get(name, default)
                self._global[name] = expand(given or "", self._global)
                check_variables(self._global)
                continue
            if default is None and name in self._global and name not in self._arguments:
                default = self._global[name].replace("\\", "\\\\").replace("$", "\\$")
            step = ArgStep(name=name, default=default)
            self._steps.append(step)
            if name in self._arguments:
                self._known_arguments[name] = self._arguments[name]
            elif default is not None:
                self._know(self._known_arguments, name, default, self._variables())

    def _shell_form(self, instruction: Instruction) -> None:
        words = _exec_form(instruction.rest)
        if not words:
            raise BuildFailed('SHELL is written as a list: SHELL ["/bin/bash", "-c"]')
        self._shell = words

    def _cmd(self, instruction: Instruction) -> None:
        self._command = _exec_form(instruction.rest) or (*self._shell, instruction.rest)

    def _entry(self, instruction: Instruction) -> None:
        words = _exec_form(instruction.rest)
        self._entrypoint = (words, True) if words else ((*self._shell, instruction.rest), False)


_HANDLERS: dict[str, Callable[[_DockerfileReader, Instruction], None]] = {
    "FROM": _DockerfileReader._from,  # noqa: SLF001 - its table
    "RUN": _DockerfileReader._run,  # noqa: SLF001
    "COPY": _DockerfileReader._copy,  # noqa: SLF001
    "ADD": _DockerfileReader._copy,  # noqa: SLF001
    "WORKDIR": _DockerfileReader._workdir,  # noqa: SLF001
    "USER": _DockerfileReader._user,  # noqa: SLF001
    "ENV": _DockerfileReader._env,  # noqa: SLF001
    "ARG": _DockerfileReader._arg,  # noqa: SLF001
    "SHELL": _DockerfileReader._shell_form,  # noqa: SLF001
    "CMD": _DockerfileReader._cmd,  # noqa: SLF001
    "ENTRYPOINT": _DockerfileReader._entry,  # noqa: SLF001
}


def _flags(
    instruction: Instruction,
    known: set[str],
    several: set[str] = frozenset(),  # type: ignore[assignment]
) -> tuple[dict[str, list[str]], str]:
    flags: dict[str, list[str]] = {}
    rest, at = instruction.rest, 0
    while found := _FLAG.match(rest, at):
        if found[1] not in known:
            raise BuildFailed(f"{instruction.name} --{found[1]} is not supported")
        if found[1] in flags and found[1] not in several:
            raise BuildFailed(f"{instruction.name} --{found[1]} is given twice")
        if found[1] != "link":  # says how layers are stored, which is ours to decide
            flags.setdefault(found[1], []).append(found[2] or "")
        at = found.end()
    return flags, rest[at:]


def _exec_form(rest: str) -> tuple[str, ...] | None:
    """The words of `["a", "b"]`. None: it is the shell's form."""
    if not rest.startswith("["):
        return None
    try:
        words = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    return tuple(words) if isinstance(words, list) and words and all(isinstance(each, str) for each in words) else None


def _pairs(instruction: Instruction) -> dict[str, str]:
    """`K=V K2="V 2"`, or the old form `K V`."""
    rest, pairs, at = instruction.rest, {}, 0
    while at < len(rest):
        found = _PAIR.match(rest, at)
        if found is None:
            if at:
                raise BuildFailed(f"ENV: {rest[at : at + 80]!r} is not NAME=VALUE")
            name, _, value = rest.partition(" ")
            if not value:
                raise BuildFailed("ENV takes NAME=VALUE")
            return {name: value.strip()}
        pairs[found[1]] = _unquoted(found[2])
        at = found.end()
    return pairs


def _unquoted(text: str) -> str:
    """Without quotes, and with what single quotes hold kept from being expanded. Other backslashes are left to
    `expand`."""
    parts = re.split(r"('[^']*'|\"(?:\\.|[^\"\\])*\")", text.strip())
    said = []
    for part in parts:
        if part.startswith("'") and part.endswith("'") and len(part) > 1:
            said.append(part[1:-1].replace("\\", "\\\\").replace("$", "\\$"))
        elif part.startswith('"') and part.endswith('"') and len(part) > 1:
            said.append(part[1:-1])
        else:
            said.append(re.sub(r"\\([^$\\\"'])", r"\1", part))
    return "".join(said)


def _first_line(error: ValueError) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]
    return str(error)[:300]


def _refused(line: int, message: str) -> BuildFailed:
    return BuildFailed(f"line {line}: {message}", line=line)
