"""Values as HTML, images, Markdown and charts: what `kernel.py` loads when a cell first shows more than plain data.

Owns which forms of a value are sent and how long they may be, matplotlib's figures and the data in them, what IPython's
`display` does here, and its magics where the image has IPython. Python 3.8 or later, the standard library, and nothing
else: what is not imported by the code is not needed. Used by `kernel.py`, in the sandbox.

The data of a figure has the MIME type `CHART`. With one pair of axes it is `{type, title, x_label, y_label, x_unit,
y_unit, x_scale, y_scale, x_ticks, x_tick_labels, y_ticks, y_tick_labels, elements}`; `type` is line, scatter, bar, pie,
box or other. An element is a series `{label, points: [[x, y], …]}` of a line or scatter, `{label, group, value}` of a
bar, `{label, angle, radius}` of a pie, `{label, min, first_quartile, median, third_quartile, max, outliers}` of a box.
Of several pairs it is `{type: "superchart", title, elements: [chart, …]}`. A series with more points than are sent has
every n-th of them, and their number as `total`.

Code of E2B's clients runs with E2B_SANDBOX=true in its environment, as theirs does. It is shown what their kernels show
besides: the columns of a pandas table, `{name: [value, …]}` of the MIME type `DATA`, and an image that a cell saves.
"""

import builtins
import math
import os
import re
import sys
from base64 import b64encode

kernel = None
"""Set by `kernel.py`."""

CHART = "application/vnd.atoll.chart+json"
DATA = "application/vnd.atoll.data+json"
_FORMS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)
_MAX_TEXT_CHARS = 100_000
_MAX_FORM_CHARS = 8 * 1024 * 1024
_MAX_FORMS = 16
_MAX_DEPTH = 40
_MAX_AXES = 20
_MAX_SERIES = 100
_MAX_POINTS = 10_000
_MAX_CELLS = 500_000
"""Of a table whose columns are sent."""
_FOR_E2B = os.environ.get("E2B_SANDBOX") == "true"


def bundle(value):
    """All forms of a value, by MIME type. Images are base64."""
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure):
        data = _figure(value)
        _close(value)
    else:
        data = _forms(value)
    data.setdefault("text/plain", _text(value))
    return bounded(data)


def _forms(value):
    data = {}
    whole = _form(value, "_repr_mimebundle_")
    if isinstance(whole, tuple):
        whole = whole[0]
    if isinstance(whole, dict):
        data.update((str(kind), form) for kind, form in whole.items() if form is not None)
    for method, kind in _FORMS:
        if kind not in data and not (kind == "image/jpeg" and "image/png" in data):
            form = _form(value, method)
            if form is not None:
                data[kind] = form
    if type(value).__module__.startswith("plotly.") and hasattr(value, "to_json"):
        import json

        data.setdefault("application/vnd.plotly.v1+json", json.loads(value.to_json()))
    pandas = sys.modules.get("pandas") if _FOR_E2B else None
    if pandas is not None and isinstance(value, getattr(pandas, "DataFrame", ())) and value.size <= _MAX_CELLS:
        data[DATA] = _columns(value, getattr(pandas, "NaT", None))
    return data


def _columns(table, not_a_time):
    columns = {}
    for i, name in enumerate(table.columns):
        values = table.iloc[:, i].tolist()
        columns[str(name)] = [None if each is not_a_time else _value(each) for each in values]
    return columns


def _form(value, method):
    function = getattr(type(value), method, None)
    if function is None:
        return None
    try:
        if method != "_repr_mimebundle_":
            form = function(value)
            return form[0] if isinstance(form, tuple) else form  # (data, metadata)
        return function(value, include=None, exclude=None)
    except Exception:
        return None  # the value's own code; its other forms are shown


def bounded(data):
    """Forms as the host takes them: plain JSON of bounded size. What is too long is named instead."""
    shown, left_out = {}, []
    for kind, form in list(data.items())[:_MAX_FORMS]:
        plain = _plain(form)
        size = len(plain) if isinstance(plain, str) else _size(plain)
        if size > _MAX_FORM_CHARS:
            left_out.append(f"[{kind} left out: {size} characters; a form may have {_MAX_FORM_CHARS}]")
        else:
            shown[str(kind)[:200]] = plain
    if left_out:
        shown["text/plain"] = "\n".join([str(shown.get("text/plain", "")), *left_out]).strip()
    return shown


def _size(plain):
    import json

    return len(json.dumps(plain))


def _plain(form, depth=0):
    if isinstance(form, str):
        return form if form.isascii() else form.encode("utf-8", "backslashreplace").decode()
    if isinstance(form, (bytes, bytearray, memoryview)):
        return b64encode(form).decode("ascii")
    if form is None or isinstance(form, (bool, int)):
        return form
    if isinstance(form, float):
        return form if math.isfinite(form) else None
    if depth == _MAX_DEPTH:
        return "…"
    if isinstance(form, dict):
        return {_plain(str(key)): _plain(each, depth + 1) for key, each in form.items()}
    if isinstance(form, (list, tuple)):
        return [_plain(each, depth + 1) for each in form]
    return _text(form)


def _text(value):
    try:
        text = repr(value)
    except Exception as error:  # the value's own code
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    if len(text) <= _MAX_TEXT_CHARS:
        return text
    return f"{text[: _MAX_TEXT_CHARS // 2]} … {text[-_MAX_TEXT_CHARS // 2 :]}"


def show(*values, raw=False, **_):
    """`display`, as IPython has it."""
    for value in values:
        if raw and isinstance(value, dict):
            kernel.publish(bounded(value))
        else:
            kernel.display(value)


# ------------------------------------------------------------------------------------------------ modules of the image


_hooked = set()


def hooked(name, path, target):
    """How a module is imported, and prepared at once. None: as others are."""
    if name in _hooked:
        return None
    _hooked.add(name)
    found = (each.find_spec(name, path, target) for each in sys.meta_path if hasattr(each, "find_spec"))
    spec = next((each for each in found if each is not None), None)
    if spec is not None and hasattr(spec.loader, "exec_module"):
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _prepare(module)

        spec.loader.exec_module = exec_module
    return spec


def _prepare(module):
    """Make a module that the code has just imported show things here."""
    if module.__name__ == "matplotlib.pyplot":
        _prepare_pyplot(module)
    elif module.__name__ == "PIL.Image":
        _prepare_images(module)
    elif hasattr(module, "publish_display_data"):  # where IPython has `display`, by version
        handle = getattr(module, "DisplayHandle", None)

        def display(*values, display_id=None, **options):
            show(*values, **options)
            return handle(None if display_id is True else display_id) if display_id and handle else None

        def publish_display_data(data, *_, **__):
            kernel.publish(bounded(data))

        module.display, module.publish_display_data = display, publish_display_data
        if hasattr(module, "clear_output"):
            module.clear_output = lambda *_, **__: None


def _prepare_pyplot(pyplot):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    draw_boxes = Axes.bxp

    def bxp(self, bxpstats, positions=None, *args, **kwargs):
        bxpstats = list(bxpstats)
        where = range(1, len(bxpstats) + 1) if positions is None else positions
        # By position: a box that is drawn over another, with other colors for example, takes its place.
        drawn = {**getattr(self, "_atoll_boxes", {}), **dict(zip(map(float, where), bxpstats))}
        made = draw_boxes(self, bxpstats, positions, *args, **kwargs)
        self._atoll_boxes = drawn
        return made

    def show_one(self, *_, **__):
        kernel.display(self)

    Axes.bxp = bxp
    Figure.show = show_one
    pyplot.show = lambda *_, **__: show_figures()


def _prepare_images(module):
    """There is no viewer here: an image that the code shows is shown as its value would be."""
    save = module.Image.save

    def show(self, *_, **__):
        kernel.display(self)

    def save_shown(self, *args, **kwargs):
        save(self, *args, **kwargs)
        if sys._getframe(1).f_code.co_filename.startswith("<cell "):
            kernel.display(self)

    module.Image.show = show
    if _FOR_E2B:
        module.Image.save = save_shown


# ------------------------------------------------------------------------------------------------------------- figures


def show_figures():
    """Show and close every figure that is open: `plt.show()`, and the end of a cell."""
    pyplot = sys.modules["matplotlib.pyplot"]
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    for figure in figures:
        kernel.publish(bounded({**_figure(figure), "text/plain": repr(figure)}))


def _figure(figure):
    from io import BytesIO

    image = BytesIO()
    figure.savefig(image, format="png", bbox_inches="tight")
    data = {"image/png": image.getvalue()}
    try:
        chart = _chart_of(figure)
    except Exception:
        chart = None  # an artist of the code's own; the image has it
    if chart is not None:
        data[CHART] = chart
    return data


def _close(figure):
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)


def _chart_of(figure):
    axes = [each for each in figure.axes if each.get_label() != "<colorbar>" and each.has_data()][:_MAX_AXES]
    budget = _MAX_POINTS // max(1, len(axes))
    charts = [_chart(each, budget) for each in axes]
    title = getattr(getattr(figure, "_suptitle", None), "get_text", lambda: "")()
    if not charts:
        return None
    if len(charts) > 1:
        return {"type": "superchart", "title": title or None, "elements": charts}
    if title and not charts[0]["title"]:
        charts[0]["title"] = title
    return charts[0]


def _chart(axes, budget):
    titles = [axes.get_title(loc=place) for place in ("center", "left", "right")]
    chart = {"type": "other", "title": next(filter(None, titles), None)}
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        label = axis.get_label_text()
        unit = re.search(r"\(([^()]+)\)|\[([^\[\]]+)\]", label)
        ticks, labels = _ticks(axis)
        chart[f"{name}_label"] = label or None
        chart[f"{name}_unit"] = (unit.group(1) or unit.group(2)) if unit else None
        chart[f"{name}_scale"] = _scale(axis, ticks, labels)
        chart[f"{name}_ticks"], chart[f"{name}_tick_labels"] = ticks, labels
    chart["type"], chart["elements"] = _elements(axes, chart, budget)
    for name in ("x", "y"):
        if chart[f"{name}_scale"] == "datetime":
            chart[f"{name}_ticks"] = [_at(chart, name, each) for each in chart[f"{name}_ticks"]]
    return chart


def _elements(axes, chart, budget):
    from matplotlib.container import BarContainer
    from matplotlib.patches import Wedge

    wedges = [each for each in axes.patches if isinstance(each, Wedge)]
    if wedges:
        return "pie", [_slice(each, i) for i, each in enumerate(wedges[:_MAX_SERIES])]
    if getattr(axes, "_atoll_boxes", None):
        boxes = [each for _, each in sorted(axes._atoll_boxes.items())][:_MAX_SERIES]
        return "box", [_box(each, i, chart) for i, each in enumerate(boxes)]
    bars = [each for each in axes.containers if isinstance(each, BarContainer)]
    if bars:
        return "bar", [one for i, each in enumerate(bars[:_MAX_SERIES]) for one in _bars(each, i, chart, budget)][
            :budget
        ]
    lines = [each for each in axes.lines if len(each.get_xdata(orig=False))]
    points = [each for each in axes.collections if type(each).__name__ == "PathCollection"]
    series = [(each.get_label(), each.get_xdata(), each.get_ydata()) for each in lines]
    series += [(each.get_label(), *_offsets(each, chart)) for each in points]
    budget = max(2, budget // max(1, len(series)))
    elements = [_series(label, i, xs, ys, budget) for i, (label, xs, ys) in enumerate(series[:_MAX_SERIES])]
    if any(each.get_linestyle() not in ("None", "none", "", " ") for each in lines):
        return "line", elements
    return ("scatter" if elements else "other"), elements


def _series(label, index, xs, ys, budget):
    total = min(len(xs), len(ys))
    step = max(1, -(-total // budget))
    element = {"label": _name(label, index), "points": [[_value(xs[i]), _value(ys[i])] for i in range(0, total, step)]}
    if step > 1:
        element["total"] = total
    return element


def _offsets(collection, chart):
    offsets = collection.get_offsets()
    return tuple([_at(chart, name, float(each[column])) for each in offsets] for column, name in enumerate("xy"))


def _at(chart, name, number):
    """A position on an axis, in the words of its scale."""
    if chart[f"{name}_scale"] == "datetime":
        from matplotlib.dates import num2date

        return num2date(number).isoformat()
    if chart[f"{name}_scale"] == "categorical" and number in chart[f"{name}_ticks"]:
        return chart[f"{name}_tick_labels"][chart[f"{name}_ticks"].index(number)]
    return number


def _bars(container, index, chart, budget):
    flat = getattr(container, "orientation", None) == "horizontal"
    group = _name(container.get_label(), index)
    for bar in list(container.patches)[:budget]:
        start, extent = (bar.get_y(), bar.get_height()) if flat else (bar.get_x(), bar.get_width())
        label = _at(chart, "y" if flat else "x", round(float(start + extent / 2), 9))
        value = _value(bar.get_width() if flat else bar.get_height())
        yield {"label": label if isinstance(label, str) else f"{label:g}", "group": group, "value": value}


def _slice(wedge, index):
    angle = abs(float(wedge.theta2) - float(wedge.theta1))
    return {"label": _name(wedge.get_label(), index), "angle": angle, "radius": float(wedge.r)}


def _box(stats, index, chart):
    labels = chart["x_tick_labels"]
    label = stats.get("label") or (labels[index] if index < len(labels) else "")
    keys = (("whislo", "min"), ("q1", "first_quartile"), ("med", "median"), ("q3", "third_quartile"), ("whishi", "max"))
    box = {"label": _name(str(label), index), **{name: float(stats.get(key, math.nan)) for key, name in keys}}
    box["outliers"] = [float(each) for each in list(stats.get("fliers", ()))[:_MAX_SERIES]]
    return box


def _ticks(axis):
    labels = [label.get_text() for label in axis.get_ticklabels()][:_MAX_SERIES]
    positions = [round(float(each), 9) for each in axis.get_ticklocs()][:_MAX_SERIES]
    return positions, labels


def _scale(axis, ticks, labels):
    converter = axis.get_converter() if hasattr(axis, "get_converter") else getattr(axis, "converter", None)
    kind = type(converter).__name__
    if "Date" in kind:
        return "datetime"
    if "Category" in kind:
        return "categorical"
    scale = axis.get_scale()
    named = [label for label in labels if label]
    if scale == "linear" and named and len(ticks) == len(labels) and not any(map(_is_number, named)):
        return "categorical"  # numbers with names: `plt.bar(range(3), …)` and `plt.xticks(range(3), names)`
    return scale


def _is_number(text):
    return bool(re.match(r"[-+\u2212$]*[\d.]", text))


def _name(label, index):
    return str(label) if label and not str(label).startswith("_") else f"series {index + 1}"


def _value(value):
    """A number, a date or a category of a figure as JSON."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "datetime64":
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


# -------------------------------------------------------------------------------------------------------------- magics

_MAGIC = re.compile(r"\s*(%%?[A-Za-z]|![^=\s]|.*=\s*[!%]\s*[A-Za-z]|\?{1,2}[A-Za-z]|[\w.]+\?{1,2}\s*$)")
_MATPLOTLIB = re.compile(r"^[ \t]*%matplotlib\b.*$", re.MULTILINE)
_COMMAND = re.compile(r"^([ \t]*)(!|%pip\b)[ \t]*(.*\S)[ \t]*$", re.MULTILINE)
_shell = None


def _as_subprocess(found):
    """A line that is a command, as Python. It has no value, and its failure is no error, as in IPython."""
    indent, kind, command = found.groups()
    if kind == "%pip":
        command = f"{sys.executable} -m pip {command}"
    return f"{indent}__import__('subprocess').run({command!r}, shell=True) and None"


def without_indent(code):
    """The code without the indent of its first line, as IPython takes it: code is often pasted from within a function,
    or written in one as a text of several lines."""
    first = next((line for line in code.splitlines() if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    return "".join(line.removeprefix(indent) for line in code.splitlines(True))


def without_magics(code, error):
    """The code with IPython's magics as calls. None: it has none, and `error` is what is wrong with it.

    Raises:
        SyntaxError: it has some that are not a line with a command, and the image has no IPython.
    """
    changed = _MATPLOTLIB.sub("pass", code)  # figures are shown without it
    if changed != code and _compiles(changed):
        return changed
    line = (error.text or "").rstrip("\n")
    if not code.lstrip().startswith("%%") and not _MAGIC.match(line):
        return changed if changed != code else None
    try:
        shell = _need_shell()
    except ImportError:
        plain = _COMMAND.sub(_as_subprocess, changed)
        if plain != changed and _compiles(plain):
            return plain
        what = "a command, write subprocess.run(..., shell=True), or run a cell of bash"
        if line.lstrip().startswith("%"):
            what = f"a magic, write plain Python (for {line.split()[0]}: a module or function that does the same)"
        error.msg = f"magics (%, !, ?) need IPython, which the image does not have. Instead of {what}"
        error.args = (error.msg, *error.args[1:])
        raise error from None
    return shell.input_transformer_manager.transform_cell(changed)


def _compiles(code):
    try:
        compile(code, "<cell>", "exec", 0x2000, True)
    except SyntaxError:
        return False
    return True


def _need_shell():
    """IPython's shell, in the namespace of the cells. It executes magics; cells are executed by the kernel."""
    global _shell
    if _shell is None:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "NoColor"
        config.InteractiveShell.xmode = "Plain"
        _shell = InteractiveShell.instance(config=config, user_module=sys.modules["__main__"])
        _shell.display_pub.publish = lambda data, *_, **__: kernel.publish(bounded(data))
        _shell.set_hook("show_in_pager", lambda _, data, *__, **___: print(_page(data)))
        _shell.system = _shell.system_raw  # without a terminal, as other children of the cell
        builtins.get_ipython = lambda: _shell
        kernel.namespace["get_ipython"] = builtins.get_ipython
        builtins.display = show
    return _shell


def _page(data):
    return data.get("text/plain", "") if isinstance(data, dict) else data
