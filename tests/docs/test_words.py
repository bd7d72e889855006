"""One vocabulary: the field's words in code, comments, messages and documentation, and no private ones beside them.

`docs/design/0014-vocabulary.md` has the reasons, `docs/architecture.md` the glossary.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PRIVATE_WORDS = {
    r"shelf|shelves": "warm pool",
    r"sitters?|sitting|seats?": "supervisor, slot, job",
    r"outlets?": "egress server, writer",
    r"whoever|somebody|nobody|anybody": "the noun that is meant: process, caller, client, user",
    r"means_one|put_up|take_up|hand_over|_stand|taken off": "name_taken, mark_ready, reconcile, bind, resolve",
    r"those that wait|what leaves|who comes next": "warm sandboxes, egress, the next process",
    r"until_it_answers|loses_waiting|make_boundable": "wait_ready, saves_epoll_waiters",
    r"(?<!_)as_owner|(?<!_)end_to_end": "owner_command, end-to-end headers",
    r"strangers?": "foreign children, an untrusted author",
    r"under-way|transient/|together/|kept/|shelves/": "in-progress/, uncommitted/, groups/, leases/, warm-pools/",
}
UNIX_ACCOUNT = re.compile(r"`nobody`|nobody:x:\d+:\d+:nobody:")
"""The one thing that `nobody` may mean: the user of that name, in backticks or as a line of /etc/passwd."""
EXCEPTIONS = {
    "CHANGELOG.md",  # says once what the old names were
    "docs/design/0014-vocabulary.md",  # says why
}


def texts() -> list[Path]:
    patterns = ("src/atoll/**/*.py", "src/atoll/**/*.[ch]", "src/atoll/**/*.md", "docs/**/*.md", "*.md")
    found = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return [path for path in found if str(path.relative_to(ROOT)) not in EXCEPTIONS]


def test_private_words_are_used_nowhere() -> None:
    """Nor as a part of an identifier, or in backticks."""
    found = []
    for path in texts():
        for number, line in enumerate(UNIX_ACCOUNT.sub("", path.read_text()).splitlines(), 1):
            for words, instead in PRIVATE_WORDS.items():
                found += [
                    f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: say {instead}"
                    for match in re.finditer(rf"(?<![^\W_])(?:{words})(?![^\W_])", line, re.IGNORECASE)
                ]
    assert not found, "\n".join(found)


def test_nothing_tells_people_to_install_a_name_from_an_index_that_is_not_ours() -> None:
    """Atoll is on no public index: what has its name there is another's. A clone, a path and a wheel are right."""
    bare_name = re.compile(r"(?:pipx?|pip3|uvx?)(?: \w+)* +(?:-\S+ +)*['\"]?atoll(?:\[[^\]]*\])?(?=[\s'\"`.,;)]|$)")
    assert bare_name.search("pip install -U 'atoll[mcp]'")
    assert bare_name.search("uv tool install atoll")
    assert not bare_name.search("pip install './atoll[mcp]' or pip install atoll-0.1.0-py3-none-linux_x86_64.whl")
    more = [ROOT / "Makefile", *ROOT.glob("scripts/*"), *ROOT.glob("examples/*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*texts(), *(path for path in more if path.is_file()))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare_name.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_map_names_only_what_exists() -> None:
    """Every path in `docs/architecture.md` and `CONTRIBUTING.md` that looks like one of the repository is there."""
    looks_like_a_path = re.compile(r"`((?:[\w.-]+/)+[\w.*-]*|[\w-]+\.(?:py|md|c|h|toml))`")
    missing = [
        f"{page}: {path}"
        for page in ("docs/architecture.md", "CONTRIBUTING.md")
        for path in sorted(set(looks_like_a_path.findall((ROOT / page).read_text())))
        if not any((base / path).exists() for base in (ROOT, ROOT / "src/atoll", ROOT / "docs"))
    ]
    assert not missing, "\n".join(missing)
