"""Which Dockerfiles are read, as what, and what is refused with its line."""

from __future__ import annotations

import pytest

from atoll.builds.dockerfile import instructions, parse_dockerfile, unused_arguments
from atoll.builds.plan import ArgStep, CopyStep, EnvStep, RunStep, UserStep, WorkdirStep, expand
from atoll.contract.errors import BuildFailed

FULL = r"""
# syntax=docker/dockerfile:1
ARG BASE=debian
ARG TAG=12
FROM ${BASE}:${TAG} AS only
LABEL a=b
ARG WHO=world
ARG TAG
ENV A="x y" B='$not' C=a\ b
ENV OLD the old form
WORKDIR /srv
RUN echo one && \
    # a comment

    echo two
RUN ["echo", "exec form"]
RUN <<END
echo heredoc
END
COPY --chown=user:staff --chmod=755 --link a.txt b/ "a name" dest/
USER user
EXPOSE 80
SHELL ["/bin/bash", "-c"]
RUN echo bash
ENTRYPOINT ["server"]
CMD ["--port", "80"]
"""


def packed(names: object, excluded: object) -> tuple[str, tuple[str, ...]]:
    assert excluded == ()
    return "ab" * 32, tuple(names)  # type: ignore[arg-type]


def test_a_dockerfile_is_read_into_its_steps() -> None:
    plan = parse_dockerfile(FULL, pack=packed, arguments={"TAG": "13"})
    assert plan.image == "debian:13"
    assert plan.start_command == ("server", "--port", "80")
    assert plan.steps[:4] == (
        ArgStep(name="WHO", default="world"),
        ArgStep(name="TAG"),
        EnvStep(variables={"A": "x y", "B": r"\$not", "C": "a b"}),
        EnvStep(variables={"OLD": "the old form"}),
    )
    one, execs, heredoc, copy, user, bash = plan.steps[5:]
    assert isinstance(plan.steps[4], WorkdirStep)
    assert isinstance(one, RunStep)
    assert one.command[:2] == ("/bin/sh", "-c")
    assert one.command[2].split() == ["echo", "one", "&&", "echo", "two"]
    assert isinstance(execs, RunStep)
    assert execs.command == ("echo", "exec form")
    assert isinstance(heredoc, RunStep)
    assert heredoc.command == ("/bin/sh", "-c", "echo heredoc\n")
    assert isinstance(copy, CopyStep)
    assert (copy.sources, copy.destination) == (("a.txt", "b/", "a name"), "dest/")
    assert (copy.owner, copy.mode) == ("user:staff", "755")
    assert user == UserStep(user="user")
    assert isinstance(bash, RunStep)
    assert bash.command == ("/bin/bash", "-c", "echo bash")
    assert parse_dockerfile('FROM a\nENTRYPOINT serve\nCMD ["x"]').start_command == ("/bin/sh", "-c", "serve")
    assert parse_dockerfile("FROM a\nCMD serve -v").start_command == ("/bin/sh", "-c", "serve -v")


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("RUN true", 1, "before FROM"),
        ("FROM a\nFROM b", 2, "several stages"),
        ("FROM scratch", 1, "scratch"),
        ("FROM --platform=linux/arm64 a", 1, "platform"),
        ("FROM a\n\nHEALTHCHECK CMD true", 3, "HEALTHCHECK is not supported"),
        ("FROM a\nONBUILD RUN true", 2, "ONBUILD is not supported"),
        ("FROM a\nCOPY --from=b x y", 2, "another stage"),
        ("FROM a\nADD https://example.com/x /x", 2, "URL"),
        ("FROM a\nADD x.tar.gz /x", 2, "archive"),
        ("FROM a\nCOPY a b c", 2, "end with '/'"),
        ("FROM a\nCOPY a", 2, "a destination"),
        ("FROM a\nCOPY <<E /x\nhi\nE", 2, "here-document"),
        ("FROM a\nRUN --mount=type=cache x", 2, "--mount"),
        ("FROM a\nRUN <<E\nno end", 2, "no line that is E"),
        ("FROM a\nRUNN true", 2, "RUNN is not supported; allowed are FROM"),
        ("FROM a\n?? true", 2, "not an instruction"),
        ("FROM a\nENV 1=2", 2, "ENV"),
        ("FROM a\nENV A", 2, "NAME=VALUE"),
        ("FROM a\nWORKDIR", 2, "no arguments"),
        ("FROM a\nRUN " + "x" * 70_000, 2, "RUN"),
        ("# escape=%\nFROM a", 1, "escape"),
        ("FROM a\nSHELL bash", 2, "list"),
        ("FROM a\nARG 9X=1", 2, "ARG"),
        ("FROM a\n" + "RUN true\n" * 300, 258, "more than 256"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_line(text: str, line: int, why: str) -> None:
    with pytest.raises(BuildFailed) as refused:
        parse_dockerfile(text, pack=packed)
    assert refused.value.message.startswith(f"line {line}: ")
    assert why in refused.value.message


def test_a_dockerfile_without_from_too_large_or_with_a_nul_is_refused() -> None:
    for text in ("", "# nothing", "ARG A=1", "FROM a\nRUN \0", "#" * 1_100_000):
        with pytest.raises(BuildFailed):
            parse_dockerfile(text)


def test_instructions_may_be_continued_by_the_character_that_is_chosen() -> None:
    (found,) = instructions("# escape=`\nRUN a `\n  b\\\n")
    assert found.rest.split() == ["a", "b\\"]


def test_variables_are_expanded_as_docker_does() -> None:
    known = {"A": "1", "EMPTY": ""}
    for text, wanted in {
        "$A-${A}": "1-1",
        r"\$A": "$A",
        "$MISSING.": ".",
        "${MISSING:-d$A}": "d1",
        "${EMPTY:-d}": "d",
        "${EMPTY-d}": "",
        "${A:+yes}${MISSING:+no}": "yes",
        "$": "$",
        "100%": "100%",
    }.items():
        assert expand(text, known) == wanted, text
    for text in ("${A!}", "${}", "${A:0:1}", "${MISSING:?it is needed}"):
        with pytest.raises(BuildFailed):
            expand(text, known)
    with pytest.raises(BuildFailed, match="longer"):
        expand("$A" * 30_000, {"A": "x" * 1000})


def test_copies_can_be_of_an_archive_that_was_uploaded() -> None:
    text = "FROM host\nARG V=1\nENV D=dist-$V\nCOPY /a/*.txt $D ./b/\nADD --chown=1 . /c"
    first, second = (step for step in parse_dockerfile(text, archive="cd" * 32).steps if isinstance(step, CopyStep))
    assert (first.archive, first.sources, first.are_patterns) == ("cd" * 32, ("a/*.txt", "dist-1"), True)
    assert (second.sources, second.destination, second.owner) == ((".",), "/c", "1")
    with pytest.raises(BuildFailed, match="line 2: COPY --exclude needs the directory"):
        parse_dockerfile("FROM host\nCOPY --exclude=a . /b", archive="cd" * 32)


def test_a_variable_that_only_the_base_can_have_is_left_to_the_build() -> None:
    plan = parse_dockerfile("FROM host\nENV A=${HOME:?is-needed}\nENV B=$A\nCOPY x${A} /", pack=packed)
    assert plan.steps[0] == EnvStep(variables={"A": "${HOME:?is-needed}"})
    with pytest.raises(BuildFailed, match=r"line 2: '\$\{HOME/a/b\}' cannot be expanded"):
        parse_dockerfile("FROM host\nENV A=${HOME/a/b}")


def test_build_arguments_that_nothing_declares_are_named() -> None:
    text = "ARG A=1 B\nFROM host\nARG C"
    assert unused_arguments(text, ["A", "B", "C", "D"]) == ["D"]
