"""Values as HTML, images, Markdown and charts: what `kernel.py` loads when a cell first shows more than plain data.

Owns which forms of a value are sent, matplotlib's figures, and IPython's magics where the image has IPython. Python 3.8
or later, the standard library, and nothing else. Used by `kernel.py`, in the sandbox.
"""

import builtins
import sys
from base64 import b64encode

kernel = None
"""Set by `kernel.py`."""

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


def bundle(value):
    """All forms of a value, by MIME type. Images are base64."""
    data = {}
    whole = _form(value, "_repr_mimebundle_")
    if isinstance(whole, tuple):
        whole = whole[0]
    if isinstance(whole, dict):
        data.update((str(kind), _plain(form)) for kind, form in whole.items())
    for method, kind in _FORMS:
        if kind not in data:
            form = _form(value, method)
            if form is not None:
                data[kind] = _plain(form)
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure) and "image/png" not in data:
        data.update(_figure(value))
        _close(value)
    if "text/plain" not in data:
        data["text/plain"] = _text(value)
    return data


def _form(value, method):
    function = getattr(type(value), method, None)
    if function is None:
        return None
    try:
        form = function(value)
    except Exception:
        return None
    return form[0] if isinstance(form, tuple) and method != "_repr_mimebundle_" else form


def _plain(form):
    if isinstance(form, (bytes, bytearray)):
        return b64encode(form).decode("ascii")
    if form is None or isinstance(form, (str, bool, int, float)):
        return form
    if isinstance(form, dict):
        return {str(key): _plain(each) for key, each in form.items()}
    if isinstance(form, (list, tuple)):
        return [_plain(each) for each in form]
    return str(form)


def _text(value):
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    if len(text) <= _MAX_TEXT_CHARS:
        return text
    return f"{text[: _MAX_TEXT_CHARS // 2]} … {text[-_MAX_TEXT_CHARS // 2 :]}"


# ------------------------------------------------------------------------------------------------------------- figures


def show_figures():
    """Show and close every figure that is open, as notebooks do at the end of a cell."""
    pyplot = sys.modules["matplotlib.pyplot"]
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        data = _figure(figure)
        data["text/plain"] = repr(figure)
        kernel.publish(data)
    pyplot.close("all")


def _figure(figure):
    from io import BytesIO

    image = BytesIO()
    figure.savefig(image, format="png", bbox_inches="tight")
    return {"image/png": b64encode(image.getvalue()).decode("ascii")}


def _close(figure):
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)


# -------------------------------------------------------------------------------------------------------------- magics


def without_magics(code):
    """The code with IPython's magics as calls. None: it has none, or the image has no IPython."""
    try:
        from IPython.core.inputtransformer2 import TransformerManager
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        return None
    shell = InteractiveShell.instance(user_ns=kernel.namespace)
    builtins.get_ipython = lambda: shell
    changed = TransformerManager().transform_cell(code)
    return changed if changed.strip() != code.strip() else None
