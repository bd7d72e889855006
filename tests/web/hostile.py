"""What a sandbox may print and write to harm whoever looks at it."""

from __future__ import annotations

from typing import Any

from atoll import reactive
from atoll.reactive import NAME, UI, Cell, view

SCRIPT = "<script>window.hacked = 1</script>"
CLOSING = "</pre></textarea></title></script><script>window.hacked = 2</script>"
IMAGE = "<img src=x onerror='window.hacked = 3'>"
DRAWING = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="80" height="20" '
    'onload="window.hacked = 4"><script>window.hacked = 5</script>'
    '<a xlink:href="javascript:window.hacked = 6"><text x="2" y="12">harmless</text></a>'
    '<foreignObject><body xmlns="http://www.w3.org/1999/xhtml"><script>window.hacked = 7</script></body>'
    "</foreignObject>"
    '<animate attributeName="href" to="javascript:window.hacked = 8"/>'
    "<title>&lt;/title&gt;&lt;script&gt;window.hacked = 9&lt;/script&gt;</title>"
    '<rect width="80" height="20" fill="url(http://127.0.0.1:1/x)" style="fill: red; background: url(javascript:1)"/>'
    "</svg>"
)
TEXTS = (
    SCRIPT,
    CLOSING,
    IMAGE,
    "javascript:window.hacked = 10",
    '" onfocus="window.hacked = 11" autofocus="',
    "\ud800",
)


@reactive.pattern(text=CLOSING)
def hostile(text: Cell[str]) -> dict[str, Any]:
    """</p><script>window.hacked = 12</script>"""
    texts = list(TEXTS)
    return {
        NAME: CLOSING,
        UI: view.column(
            view.heading(SCRIPT),
            [view.text(each) for each in texts],
            [view.pre(each, error=True) for each in texts],
            view.table(texts, [texts]),
            view.svg(DRAWING),
            view.svg(SCRIPT),
            view.image(b"\x89PNG\r\n\x1a\n" + SCRIPT.encode(), alt=texts[4]),
            view.image(SCRIPT.encode(), alt=SCRIPT),
            view.chart(texts, {each: [1, 2, 3] for each in texts}, kind="bar"),
            view.loader(label=CLOSING),
            view.input(text, label=CLOSING, placeholder=texts[4]),
            view.input(text, label=SCRIPT, multiline=True),
            view.select(text, texts, label=texts[4]),
            lambda: 1 / 0 if text.get() == "fail" else view.text(text.get()),
        ),
        SCRIPT: reactive.computed(lambda: f"{text.get()}{IMAGE}", name=CLOSING),
    }
