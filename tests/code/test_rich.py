"""What a cell shows: values in their own forms, figures with their data, IPython's display and magics."""

from __future__ import annotations

import sys
import sysconfig
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import pytest

from atoll import Engine, Mount
from atoll.code.session import CodeSession
from tests.code.test_session import STUBS, Handler, error, printed

pytestmark = pytest.mark.runtimes("crun", "runsc")

CHART = "application/vnd.atoll.chart+json"


@pytest.fixture(scope="module")
async def bare(engine: Engine) -> AsyncIterator[CodeSession]:
    """A session in an image with nothing but Python. Its sandbox has the packages of these tests besides."""
    packages = Mount(source=sysconfig.get_paths()["platlib"], target="/opt/packages")
    async with await engine.create(mounts=[packages]) as sandbox:
        session = await CodeSession.start(sandbox, Handler(), stubs=STUBS)
        yield session
        await session.aclose()


@pytest.fixture(scope="module")
async def kernel(bare: CodeSession) -> AsyncIterator[CodeSession]:
    """A session with matplotlib and IPython."""
    session = await CodeSession.start(bare.sandbox, Handler(), stubs=STUBS, env={"PYTHONPATH": "/opt/packages"})
    own = ".".join(map(str, sys.version_info[:2]))
    assert session.version.startswith(own + "."), (
        f"the tests run with Python {own}, the host image has {session.version}"
    )
    yield session
    await session.aclose()


async def parts(session: CodeSession, code: str) -> list[dict[str, Any]]:
    """What a cell that went well shows."""
    outcome = await session.run(code, timeout_s=60)
    assert outcome.error is None, outcome.error.traceback
    assert outcome.stderr.text()[0] == ""
    return [part.data for part in outcome.parts]


async def chart(session: CodeSession, code: str) -> dict[str, Any]:
    """The data of the one figure that is left open."""
    shown = await parts(session, f"import matplotlib.pyplot as plt\n{code}\nNone")
    assert len(shown) == 1
    assert b64decode(shown[0]["image/png"]).startswith(b"\x89PNG")
    data: dict[str, Any] = shown[0][CHART]
    return data


# ---- values


async def test_a_value_is_shown_in_each_of_its_forms(bare: CodeSession) -> None:
    code = """
class Value:
    def _repr_html_(self): return "<b>é</b>"
    def _repr_markdown_(self): return "**m**"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"png"
    def _repr_jpeg_(self): return b"jpeg"
    def _repr_json_(self): return {"a": [1, float("nan")]}, {"expanded": True}
    def _repr_latex_(self): raise ValueError
    def __repr__(self): return "plain"
Value()"""
    assert await parts(bare, code) == [
        {
            "text/html": "<b>é</b>",
            "text/markdown": "**m**",
            "image/svg+xml": "<svg/>",
            "image/png": "cG5n",
            "application/json": {"a": [1, None]},
            "text/plain": "plain",
        }
    ]


async def test_a_value_may_give_all_its_forms_at_once(bare: CodeSession) -> None:
    code = """
class Value:
    def _repr_mimebundle_(self, include, exclude): return {"text/html": "b", "x/y": {"deep": 1}, "none": None}, {}
    def _repr_html_(self): raise AssertionError
Value()"""
    (data,) = await parts(bare, code)
    assert (data["text/html"], data["x/y"]) == ("b", {"deep": 1})
    assert "none" not in data


async def test_display_shows_values_in_their_order(bare: CodeSession) -> None:
    assert await parts(bare, "display(1, 'two')\ndisplay({'text/html': '<i>'}, raw=True)\n3") == [
        {"text/plain": "1"},
        {"text/plain": "'two'"},
        {"text/html": "<i>"},
        {"text/plain": "3"},
    ]


async def test_forms_that_are_too_long_deep_or_broken_are_bounded(bare: CodeSession) -> None:
    code = """
class Value:
    def _repr_html_(self): return "x" * 9_000_000
    def _repr_json_(self):
        v = []
        for _ in range(500): v = [v]
        return v
    def __repr__(self): raise ValueError
class Many:
    def _repr_mimebundle_(self, include=None, exclude=None): return {"k" * 300 + str(i): "\\ud800" for i in range(100)}
display(Value(), Many())"""
    first, second = await parts(bare, code)
    assert "text/html left out: 9000000 characters" in first["text/plain"]
    assert "its repr raised ValueError" in first["text/plain"]
    assert "text/html" not in first
    assert len(second) <= 17
    assert await printed(bare, "print('alive')") == "alive\n"


# ---- figures, which are the same in every runtime

FIGURES = pytest.mark.runtimes("crun")


@FIGURES
async def test_a_line_chart_has_its_points(kernel: CodeSession) -> None:
    code = "plt.plot([1, 2], [3, 4], label='a'); plt.plot([1, 2], [5, 6]); plt.xlabel('Time (s)'); plt.title('T')"
    data = await chart(kernel, f"{code}; plt.yscale('log')")
    assert (data["type"], data["title"], data["x_label"], data["x_unit"]) == ("line", "T", "Time (s)", "s")
    assert (data["x_scale"], data["y_scale"]) == ("linear", "log")
    assert data["elements"] == [
        {"label": "a", "points": [[1, 3], [2, 4]]},
        {"label": "series 2", "points": [[1, 5], [2, 6]]},
    ]
    data = await chart(kernel, "import datetime\nplt.plot([datetime.date(2026, 1, d) for d in (1, 2)], [1, 2])")
    assert data["x_scale"] == "datetime"
    assert data["x_ticks"][0].startswith("2026-01-01T00:00")
    assert data["elements"][0]["points"] == [["2026-01-01", 1], ["2026-01-02", 2]]
    data = await chart(kernel, "plt.plot(range(50_000))")
    assert data["elements"][0]["total"] == 50_000
    assert len(data["elements"][0]["points"]) == 10_000


@FIGURES
async def test_charts_of_other_types_have_their_data(kernel: CodeSession) -> None:
    data = await chart(kernel, "plt.scatter([1, 2], [3, 4.5], label='s')")
    assert (data["type"], data["elements"]) == ("scatter", [{"label": "s", "points": [[1, 3], [2, 4.5]]}])
    data = await chart(kernel, "plt.bar(['x', 'y'], [1, 2], label='g')")
    assert (data["type"], data["x_scale"]) == ("bar", "categorical")
    assert data["elements"] == [{"label": "x", "group": "g", "value": 1}, {"label": "y", "group": "g", "value": 2}]
    data = await chart(kernel, "plt.pie([1, 3], labels=['p', 'q'])")
    assert data["type"] == "pie"
    assert [(each["label"], round(each["angle"])) for each in data["elements"]] == [("p", 90), ("q", 270)]
    data = await chart(kernel, "plt.boxplot([[1, 2, 3, 10], [2, 3, 4]])")
    assert (data["type"], data["elements"][0]["median"], data["elements"][0]["outliers"]) == ("box", 2.5, [10])
    twice = "b = [[1, 2, 3], [2, 3, 4]]; plt.boxplot(b); plt.boxplot(b, patch_artist=True)"
    data = await chart(kernel, f"{twice}; plt.boxplot([[5]], positions=[9])")
    assert [each["median"] for each in data["elements"]] == [2.0, 3.0, 5.0]
    data = await chart(kernel, "plt.imshow([[1, 2], [3, 4]]); plt.colorbar()")
    assert (data["type"], data["elements"]) == ("other", [])
    data = await chart(
        kernel, "f, axes = plt.subplots(1, 2); axes[0].plot([1]); axes[1].barh(['k'], [5]); f.suptitle('S')"
    )
    assert (data["type"], data["title"]) == ("superchart", "S")
    assert [each["type"] for each in data["elements"]] == ["line", "bar"]
    assert data["elements"][1]["elements"] == [{"label": "k", "group": "series 1", "value": 5}]


@FIGURES
async def test_figures_are_shown_once_where_the_code_shows_them(kernel: CodeSession) -> None:
    await printed(kernel, "import matplotlib.pyplot as plt")
    shown = await parts(
        kernel, "plt.plot([1]); display('before')\nplt.show()\ndisplay('after')\nplt.plot([2])\nplt.gcf()"
    )
    assert [sorted(each) for each in shown] == [
        ["text/plain"],
        [CHART, "image/png", "text/plain"],
        ["text/plain"],
        [CHART, "image/png", "text/plain"],
    ]
    assert await parts(kernel, "plt.get_fignums()") == [{"text/plain": "[]"}]
    assert len(await parts(kernel, "figure = plt.figure(); figure.show()")) == 1
    outcome = await error(kernel, "plt.plot([3])\n1 / 0", timeout_s=60)
    assert [CHART in part.data for part in outcome.parts] == [True]


@FIGURES
async def test_images_of_pillow_are_shown(kernel: CodeSession) -> None:
    (data,) = await parts(kernel, "from PIL import Image\nImage.new('RGB', (2, 2))")
    assert b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "image/jpeg" not in data


# ---- IPython


@FIGURES
async def test_ipythons_display_comes_through_the_channel(kernel: CodeSession) -> None:
    code = (
        "from IPython.display import HTML, Image, Markdown, display\ndisplay(HTML('<b>'), Markdown('# h'))\nHTML('<i>')"
    )
    shown = await parts(kernel, code)
    assert [each.get("text/html") or each.get("text/markdown") for each in shown] == ["<b>", "# h", "<i>"]
    code = "from IPython.core.display_functions import publish_display_data\npublish_display_data({'text/html': 'p'})"
    assert await parts(kernel, code) == [{"text/html": "p"}]
    code = "handle = display(HTML('1'), display_id=True)\nhandle.update(HTML('2'))"
    assert [each["text/html"] for each in await parts(kernel, code)] == ["1", "2"]


@FIGURES
async def test_magics_are_executed_where_the_image_has_ipython(kernel: CodeSession) -> None:
    assert await printed(kernel, "!echo shell") == "shell\n"
    assert await printed(kernel, "lines = !echo a; echo b\nprint(list(lines), await echo(1))") == "['a', 'b'] 1\n"
    assert await printed(kernel, '%%bash\necho "$0"; pwd') == "bash\n/home/user\n"
    assert "per loop" in await printed(kernel, "value = 5\n%timeit -n 1 -r 1 value")
    assert "String form: 5" in await printed(kernel, "value?")
    assert await parts(kernel, "%matplotlib inline\n1 + 1") == [{"text/plain": "2"}]
    failed = (await error(kernel, "x = 1\n%nothing_of_that_name")).error
    assert failed is not None
    assert "not found" in failed.message
    failed = (await error(kernel, "x = 5 % = 3\n!ls")).error
    assert failed is not None
    assert (failed.type, failed.line) == ("SyntaxError", 1)


async def test_without_ipython_magics_say_what_to_write_instead(bare: CodeSession) -> None:
    cases = {
        "files = !ls": "cell of bash",
        "%timeit x": "for %timeit",
        "%%bash\nls": "for %%bash",
        "x?": "need IPython",
    }
    for code, text in cases.items():
        failed = (await error(bare, code)).error
        assert failed is not None
        assert failed.type == "SyntaxError"
        assert "IPython, which the image does not have" in failed.message
        assert text in failed.message
        assert failed.line == 1
    assert await parts(bare, "x = 1\nif x:\n    !test -d /etc; false\nx") == [{"text/plain": "1"}]
    assert await parts(bare, "!true") == []
    assert await parts(bare, "%matplotlib inline\n5") == [{"text/plain": "5"}]
    failed = (await error(bare, "print('50%'\nx = 1 % 2")).error
    assert failed is not None
    assert "IPython" not in failed.message


IMAGE = "from PIL import Image\nimage = Image.new('RGB', (4, 4), 'red')\n"


async def test_an_image_that_the_code_shows_is_shown_and_one_that_it_saves_is_not(kernel: CodeSession) -> None:
    (image,) = await parts(kernel, f"{IMAGE}image.show()")
    assert b64decode(image["image/png"]).startswith(b"\x89PNG")
    assert await parts(kernel, f"{IMAGE}image.save('/tmp/saved.png')") == []


async def test_code_of_e2b_clients_is_shown_tables_and_images_that_it_saves(kernel: CodeSession) -> None:
    env = {"PYTHONPATH": "/opt/packages", "E2B_SANDBOX": "true"}
    session = await CodeSession.start(kernel.sandbox, Handler(), stubs=STUBS, env=env)
    (image,) = await parts(session, f"{IMAGE}image.save('/tmp/saved.png')")
    assert b64decode(image["image/png"]).startswith(b"\x89PNG")
    (figure,) = await parts(
        session, "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.savefig('/tmp/figure.png')\nNone"
    )
    assert figure[CHART]["type"] == "line"
    # In place of pandas, which these tests do not have: what is used of it.
    table = """
import sys, types, datetime
class NotATime:
    isoformat = lambda self: "NaT"
pandas = sys.modules["pandas"] = types.SimpleNamespace(NaT=NotATime())
class Column(list):
    tolist = lambda self: list(self)
class DataFrame:
    columns, rows = ["a", 2], [(1, datetime.date(2026, 1, 2)), (float("nan"), None), (2, pandas.NaT)]
    size = 6
    iloc = property(lambda self: self)
    def __getitem__(self, key): return Column(row[key[1]] for row in self.rows)
    def __repr__(self): return "a table"
pandas.DataFrame = DataFrame
DataFrame()
"""
    (shown,) = await parts(session, table)
    data = {"a": [1, None, 2], "2": ["2026-01-02", None, None]}
    assert shown == {"application/vnd.atoll.data+json": data, "text/plain": "a table"}
    (large,) = await parts(session, "DataFrame.size = 10**9\nDataFrame()")
    assert large == {"text/plain": "a table"}
    await session.aclose()
