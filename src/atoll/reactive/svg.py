"""SVG from a sandbox, made harmless: only what an allow list names is kept.

Owns which elements, attributes and styles a drawing may have. Used by `rendering.py`, for what is put into pages.

It is parsed by expat with everything refused that a document type declaration can do (entities, external subsets), and
written anew from the parsed names and values, all escaped: nothing of the original text is passed on. There is no
script, no event handler, no style sheet, no foreign content and no reference to anything outside of the drawing. Inline
styles become attributes, because pages forbid them. `use` may refer only to a definition, and a definition has no
`use`: so a drawing is never larger than what was parsed.
"""

from __future__ import annotations

import re
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from atoll.contract.errors import InvalidRequest

MAX_SVG_BYTES = 4 * 1024 * 1024
MAX_SVG_ELEMENTS = 50_000
_MAX_DEPTH = 100
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_SEPARATOR = " "

_ELEMENTS = frozenset(
    "svg g defs symbol title desc path rect circle ellipse line polyline polygon text tspan use clipPath "
    "linearGradient radialGradient stop marker".split()
)
_PRESENTATION = frozenset(
    "fill fill-opacity fill-rule stroke stroke-width stroke-opacity stroke-linecap stroke-linejoin stroke-miterlimit "
    "stroke-dasharray stroke-dashoffset opacity color display visibility font-family font-size font-style font-weight "
    "text-anchor text-decoration dominant-baseline alignment-baseline letter-spacing clip-path clip-rule stop-color "
    "stop-opacity marker-start marker-mid marker-end vector-effect".split()
)
_ATTRIBUTES = _PRESENTATION | frozenset(
    "id d x y x1 y1 x2 y2 dx dy cx cy r rx ry fx fy width height points transform viewBox preserveAspectRatio offset "
    "gradientUnits gradientTransform spreadMethod clipPathUnits markerWidth markerHeight markerUnits orient refX refY "
    "rotate textLength lengthAdjust pathLength version".split()
)
_DEFINITIONS = frozenset({"defs", "symbol"})
_REFERENCE = re.compile(r"\s*url\(\s*['\"]?#([\w.:-]+)['\"]?\s*\)\s*")
_HREF = re.compile(r"#([\w.:-]+)")
_UNSAFE = re.compile(r"url\s*\(|expression|javascript:|@import|[<>{}\\]|/\*", re.IGNORECASE)


def sanitised_svg(source: str, *, prefix: str = "svg") -> str:
    """A drawing with only what is known to be harmless. Its ids begin with `prefix`, so that two can be on one page.

    Raises:
        InvalidRequest: it is not well-formed XML, declares entities, is not SVG, or is too large.
    """
    if len(source) > MAX_SVG_BYTES:
        raise InvalidRequest(f"the SVG has {len(source)} characters; it may have {MAX_SVG_BYTES}")
    return _Sanitiser(prefix).run(source)


class _Sanitiser:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._written: list[str] = []
        self._open: list[str | None] = []
        """The elements that are open, outermost first. None: one that is left out, with all that is in it."""
        self._skipped = 0
        self._count = 0
        self._defined: set[str] = set()
        self._used: list[tuple[int, str, str]] = []
        """Where a `use` is in what is written, what it refers to, and how it is written then."""

    def run(self, source: str) -> str:
        parser = expat.ParserCreate(namespace_separator=_SEPARATOR)
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._doctype
        parser.EntityDeclHandler = parser.UnparsedEntityDeclHandler = self._refuse
        parser.ExternalEntityRefHandler = self._refuse
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        try:
            parser.Parse(source.encode("utf-8", "surrogatepass"), True)
        except expat.ExpatError as error:
            raise InvalidRequest(f"the SVG is not well-formed XML: {error}") from None
        for position, target, written in self._used:
            if target in self._defined:
                self._written[position] = written
        return "".join(self._written)

    def _doctype(self, _name: str, _system: str | None, _public: str | None, has_subset: int) -> None:
        if has_subset:
            self._refuse()

    def _refuse(self, *_: object) -> int:
        raise InvalidRequest("the SVG declares entities, which are refused")

    def _start(self, qualified: str, attributes: dict[str, str]) -> None:
        namespace, _, name = qualified.rpartition(_SEPARATOR)
        if not self._open and (namespace, name) != (_SVG, "svg"):
            raise InvalidRequest(f"the drawing begins with <{name[:40]}>, not with <svg xmlns={_SVG!r}>")
        self._count += 1
        if self._count > MAX_SVG_ELEMENTS or len(self._open) > _MAX_DEPTH:
            raise InvalidRequest(f"the SVG has more than {MAX_SVG_ELEMENTS} elements, or is too deep")
        inside_definition = any(each in _DEFINITIONS for each in self._open)
        if self._skipped or namespace != _SVG or name not in _ELEMENTS or (name == "use" and inside_definition):
            self._open.append(None)
            self._skipped += 1
            return
        kept = self._attributes(attributes)
        target = _HREF.fullmatch(attributes.get(f"{_XLINK}{_SEPARATOR}href", attributes.get("href", "")))
        self._open.append(name)
        if inside_definition and "id" in kept:
            self._defined.add(kept["id"])
        if len(self._open) == 1:
            kept = {"xmlns": _SVG, **kept}
        elif name == "use":
            if target is None:
                self._written.append("")
                self._open[-1] = None
                self._skipped += 1
                return
            kept["href"] = f"#{self._id(target[1])}"
        elif name.endswith("Gradient") and target is not None:
            kept["href"] = f"#{self._id(target[1])}"
        written = f"<{name}{''.join(f' {key}={quoteattr(value)}' for key, value in kept.items())}>"
        if name == "use":
            self._used.append((len(self._written), kept["href"][1:], written + "</use>"))
            self._written.append("")  # until it is known that it refers to a definition
            self._open[-1] = None
            self._skipped += 1
            return
        self._written.append(written)

    def _end(self, _qualified: str) -> None:
        name = self._open.pop()
        if name is None:
            self._skipped -= 1
        else:
            self._written.append(f"</{name}>")

    def _text(self, data: str) -> None:
        if not self._skipped and self._open and self._open[-1] in ("text", "tspan", "title", "desc"):
            self._written.append(escape(data))

    def _attributes(self, given: dict[str, str]) -> dict[str, str]:
        kept: dict[str, str] = {}
        for declaration in given.get("style", "").split(";"):
            name, _, value = declaration.partition(":")
            if name.strip() in _PRESENTATION and (safe := self._value(value.replace("!important", ""))) is not None:
                kept[name.strip()] = safe
        for name, value in given.items():
            if name in _ATTRIBUTES and name not in kept:
                safe = self._id(value) if name == "id" else self._value(value)
                if safe is not None:
                    kept[name] = safe
        return kept

    def _value(self, value: str) -> str | None:
        if reference := _REFERENCE.fullmatch(value):
            return f"url(#{self._id(reference[1])})"
        return None if _UNSAFE.search(value) else value.strip()

    def _id(self, given: str) -> str:
        return f"{self._prefix}-{re.sub(r'[^A-Za-z0-9_.-]', '_', given)}"
