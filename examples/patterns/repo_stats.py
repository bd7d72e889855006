"""Facts about a repository: from an API and from its files, put together.

atoll pattern run examples/patterns/repo_stats.py --set repo_url=OWNER/NAME \
        --allow "*.github.com" --allow github.com
"""

from __future__ import annotations

import shlex

from atoll import reactive
from atoll.reactive import NAME, UI, Cell, view


@reactive.pattern(repo_url="denoland/std", api="https://api.github.com", site="https://github.com")
def repo_stats(repo_url: Cell[str], api: Cell[str], site: Cell[str]) -> dict[str, object]:
    """The name, the stars and the lines of TypeScript of a repository, given as OWNER/NAME."""
    meta = reactive.fetch_data(
        reactive.computed(lambda: f"{api.get()}/repos/{repo_url.get()}", name="address"), "json", name="meta"
    )
    stats = reactive.exec(
        reactive.computed(
            lambda: (
                f"git clone --quiet --depth 1 -- {shlex.quote(f'{site.get()}/{repo_url.get()}')} /tmp/repo && "
                "find /tmp/repo -name '*.ts' -print0 | xargs -0 cat | wc -l"
            ),
            name="clone",
        ),
        name="stats",
    )

    def lines() -> int:
        if not stats.result.ok:
            raise RuntimeError(stats.result.stderr.strip())
        return int(stats.result.stdout)

    summary = reactive.computed(
        lambda: {"name": meta.result["name"], "stars": meta.result["stargazers_count"], "ts_lines": lines()}
    )
    return {
        NAME: lambda: f"Repo: {meta.result['name']}",
        UI: view.column(
            view.input(repo_url, label="repository"),
            view.text("Stars: ", lambda: meta.result["stargazers_count"]),
            view.text("TypeScript lines: ", lines),
        ),
        "summary": summary,
    }
