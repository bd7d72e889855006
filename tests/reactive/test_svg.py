"""SVG that a sandbox made: what remains of it is harmless, whatever it was."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings, strategies as st

from atoll import InvalidRequest
from atoll.reactive.svg import MAX_SVG_BYTES, sanitised_svg

SVG = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


def inside(content: str, attributes: str = "") -> str:
    """What becomes of the content of a drawing."""
    made = sanitised_svg(f"<svg {SVG} {attributes}>{content}</svg>", prefix="p")
    return re.sub(r"^<svg[^>]*>|</svg>$", "", made)


def test_a_drawing_stays_a_drawing() -> None:
    assert inside('<g transform="scale(2)"><rect x="1" width="2" fill="#fff"/></g><text x="1">a &lt; b</text>') == (
        '<g transform="scale(2)"><rect x="1" width="2" fill="#fff"></rect></g><text x="1">a &lt; b</text>'
    )
    assert 'viewBox="0 0 9 9"' in sanitised_svg(f'<svg {SVG} viewBox="0 0 9 9"/>')


def test_styles_become_attributes() -> None:
    assert inside('<path style="fill: red; stroke:url(#g) ; behavior: url(x); fill-opacity:.5" d="M0 0"/>') == (
        '<path fill="red" stroke="url(#p-g)" fill-opacity=".5" d="M0 0"></path>'
    )


@pytest.mark.parametrize(
    "content",
    [
        "<script>alert(1)</script>",
        "<g><script>alert(1)</script></g>",
        "<style>@import 'http://evil/';</style>",
        '<foreignObject><body xmlns="http://www.w3.org/1999/xhtml"><p>x</p></body></foreignObject>',
        '<image href="http://evil/x.png"/>',
        '<image xlink:href="data:image/svg+xml,x"/>',
        '<a href="javascript:alert(1)"><text>click</text></a>',
        '<animate attributeName="href" to="javascript:alert(1)"/>',
        '<set attributeName="onload" to="alert(1)"/>',
        '<use href="http://evil/x.svg#a"/>',
        '<use xlink:href="data:image/svg+xml,x#a"/>',
        '<iframe xmlns="http://www.w3.org/1999/xhtml" src="http://evil/"/>',
        '<h:script xmlns:h="http://www.w3.org/1999/xhtml">alert(1)</h:script>',
        "<?xml-stylesheet href='http://evil/'?>",
        "<!-- --><![CDATA[<script>alert(1)</script>]]>",
    ],
)
def test_what_is_not_a_drawing_is_left_out(content: str) -> None:
    left = inside(content)
    assert re.sub(r"</?g>", "", left) == ""


@pytest.mark.parametrize(
    "attribute",
    [
        'onload="alert(1)"',
        'onclick="alert(1)"',
        'fill="url(http://evil/x#g)"',
        'fill="url(&quot;//evil/x#g&quot;)"',
        'style="fill: url(http://evil/)"',
        'style="background: url(http://evil/)"',
        'xml:base="http://evil/"',
        'filter="url(http://evil/#f)"',
        'href="javascript:alert(1)"',
        'class="big"',
        'font-family="a}b{"',
    ],
)
def test_attributes_that_are_not_known_to_be_harmless_are_left_out(attribute: str) -> None:
    assert inside(f'<rect {attribute} width="1"/>') == '<rect width="1"></rect>'


@pytest.mark.parametrize(
    "source",
    [
        '<!DOCTYPE svg [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><svg xmlns="http://www.w3.org/2000/svg">&b;</svg>',
        '<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg xmlns="http://www.w3.org/2000/svg">&x;</svg>',
        '<!DOCTYPE svg [<!ENTITY % x SYSTEM "http://evil/x.dtd"> %x;]><svg xmlns="http://www.w3.org/2000/svg"/>',
    ],
)
def test_entities_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="declares entities"):
        sanitised_svg(source)


def test_the_public_doctype_that_programs_write_is_ignored() -> None:
    doctype = '<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">'
    assert (
        sanitised_svg(f"<?xml version='1.0'?>{doctype}<svg {SVG}/>") == '<svg xmlns="http://www.w3.org/2000/svg"></svg>'
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("<svg", "not well-formed"),
        ("", "not well-formed"),
        ("<svg/>", "begins with <svg>, not with"),
        ("<html xmlns='http://www.w3.org/1999/xhtml'/>", "begins with <html>"),
        ("x" * (MAX_SVG_BYTES + 1), "it may have"),
        (f"<svg {SVG}>{'<g>' * 200}{'</g>' * 200}</svg>", "too deep"),
        (f"<svg {SVG}>{'<g/>' * 50_001}</svg>", "more than 50000 elements"),
    ],
)
def test_what_is_not_svg_is_refused(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        sanitised_svg(source)


def test_copies_are_made_of_definitions_only_and_cannot_multiply() -> None:
    assert inside('<defs><path id="m" d="M0 0"/></defs><use xlink:href="#m" x="3"/>') == (
        '<defs><path id="p-m" d="M0 0"></path></defs><use x="3" href="#p-m"></use>'
    )
    bomb = '<defs><g id="a"><rect/></g><g id="b"><use href="#a"/><use href="#a"/></g></defs><use href="#b"/>'
    assert inside(bomb).count("<use") == 1
    assert inside('<g id="a"><use href="#a"/></g>') == '<g id="p-a"></g>'


def test_ids_of_two_drawings_do_not_meet() -> None:
    source = f'<svg {SVG}><clipPath id="c"/><rect clip-path="url(#c)"/></svg>'
    one, two = sanitised_svg(source, prefix="one"), sanitised_svg(source, prefix="two")
    assert ('id="one-c"' in one, "url(#one-c)" in one, "one-" in two) == (True, True, False)


names = st.sampled_from(["svg", "g", "script", "rect", "use", "defs", "text", "style", "a", "foreignObject", "image"])
attributes = st.dictionaries(
    st.sampled_from(["id", "href", "onload", "style", "fill", "d", "class"]),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
    max_size=3,
)
trees = st.recursive(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
    lambda inner: st.tuples(names, attributes, st.lists(inner, max_size=3)),
    max_leaves=12,
)


def _build(parent: ET.Element, tree: object) -> None:
    if isinstance(tree, tuple):
        name, given_attributes, children = tree
        made = ET.SubElement(parent, f"{{http://www.w3.org/2000/svg}}{name}", given_attributes)
        for child in children:
            _build(made, child)
    else:
        parent.text = (parent.text or "") + str(tree)


@settings(max_examples=200, deadline=None)
@given(st.lists(trees, max_size=4))
def test_whatever_comes_the_result_is_well_formed_and_has_only_what_is_allowed(content: list[object]) -> None:
    root = ET.Element("{http://www.w3.org/2000/svg}svg")
    for tree in content:
        _build(root, tree)
    made = ET.fromstring(sanitised_svg(ET.tostring(root, encoding="unicode")))
    for element in made.iter():
        name = element.tag.rpartition("}")[2]
        assert name in {"svg", "g", "rect", "use", "defs", "text"}
        assert set(element.attrib) <= {"id", "href", "fill", "d"}
        assert element.attrib.get("href", "#").startswith("#")
        assert "url(" not in element.attrib.get("fill", "").replace("url(#", "")
    again = sanitised_svg(ET.tostring(made, encoding="unicode"))
    assert "<script" not in again
