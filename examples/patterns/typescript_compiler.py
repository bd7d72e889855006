"""Compiles TypeScript: a sequence of commands, and files that come back.

atoll pattern run examples/patterns/typescript_compiler.py --allow registries --json
"""

from __future__ import annotations

from atoll import reactive
from atoll.reactive import NAME, UI, Cell, view

EXAMPLE = "export const double = (n: number): number => n * 2;\n"


@reactive.pattern(source_code=EXAMPLE, registry="")
def typescript_compiler(source_code: Cell[str], registry: Cell[str]) -> dict[str, object]:
    """The JavaScript and the declarations of a TypeScript source.

    `registry` empty: the one that npm is set up for.
    """
    build = reactive.exec(
        [
            "npm init -y > /dev/null",
            "npm install --no-audit --no-fund ${REGISTRY:+--registry=$REGISTRY} typescript",
            reactive.computed(lambda: f"cat > index.ts <<'END-OF-SOURCE'\n{source_code.get()}\nEND-OF-SOURCE"),
            "npx tsc --target es2022 --module es2022 --declaration --outDir dist index.ts",
        ],
        files=["dist/index.js", "dist/index.d.ts"],
        env={"REGISTRY": registry},
        name="build",
    )
    js = reactive.computed(lambda: build.result.files.get("dist/index.js", ""))
    dts = reactive.computed(lambda: build.result.files.get("dist/index.d.ts", ""))
    return {
        NAME: "TypeScript Compiler",
        UI: view.column(
            view.input(source_code, label="source", multiline=True),
            view.loader(build, label="compiling"),
            view.heading("Compiled JS", level=3),
            view.pre(js),
            view.heading("Declarations", level=3),
            view.pre(dts),
            lambda: view.pre(build.result.stdout, build.result.stderr, error=True) if not build.result.ok else None,
        ),
        "js": js,
        "dts": dts,
    }
