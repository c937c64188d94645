"""HTML by hand: escaping, tables, figures and the page around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from edgefl.experiment.report.units import NONE


class Markup(str):
    """Text that is markup already; everything else is escaped when it enters the page."""


def text(value: object) -> str:
    """`value` as markup: escaped, unless it is Markup. None reads as a dash.

    >>> text("<b>"), text(Markup("<b>")), text(None)
    ('&lt;b&gt;', '<b>', '—')
    """
    if isinstance(value, Markup):
        return value
    return escape(NONE if value is None else str(value))


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(text(part) for part in parts))


def element(name: str, content: object, css: str = "") -> Markup:
    """<name class="css">content</name>."""
    attribute = f' class="{escape(css)}"' if css else ""
    return Markup(f"<{name}{attribute}>{text(content)}</{name}>")


def paragraph(content: object, css: str = "") -> Markup:
    return element("p", content, css)


def table(headers: Sequence[object], rows: Iterable[Sequence[object]], words: int = 1) -> Markup:
    """A table whose first `words` columns hold words and whose other columns hold figures."""

    def cells(tag: str, row: Sequence[object]) -> str:
        marked = [element(tag, cell, "" if i < words else "n") for i, cell in enumerate(row)]
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(cells("td", row) for row in rows)
    return Markup(
        f'<div class="scroll"><table><thead>{cells("th", headers)}</thead><tbody>{body}</tbody></table></div>'
    )


def figure(chart: Markup, title: object, caption: object = "") -> Markup:
    """A chart with its title above and its explanation below."""
    below = element("figcaption", caption) if caption else ""
    return Markup(f'<figure><h3>{text(title)}</h3><div class="scroll">{chart}</div>{below}</figure>')


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Colour swatches with their words; entries: (CSS colour, word)."""
    marks = (
        f'<span><i style="background:{escape(colour)}"></i>{escape(word)}</span>' for colour, word in entries
    )
    return Markup(f'<div class="legend">{"".join(marks)}</div>')


def cards(entries: Iterable[tuple[object, object, object]]) -> Markup:
    """Key figures; entries: (what, figure, remark)."""
    return join(
        (
            Markup('<div class="cards">'),
            *(
                element("div", join((element("span", a), element("b", b), element("small", c))), "card")
                for a, b, c in entries
            ),
            Markup("</div>"),
        )
    )


def folded(summary: object, content: Markup) -> Markup:
    return Markup(f"<details><summary>{text(summary)}</summary>{content}</details>")


def section(anchor: str, title: str, *content: Markup) -> Markup:
    return Markup(f'<section id="{escape(anchor)}"><h2>{text(title)}</h2>{"".join(content)}</section>')


def page(title: str, header: Markup, sections: Sequence[tuple[str, str, Markup]]) -> str:
    """A whole page that fetches nothing: `sections` are (anchor, title, content), empty ones left out."""
    shown = [(anchor, name, content) for anchor, name, content in sections if content]
    links = "".join(f'<a href="#{escape(anchor)}">{escape(name)}</a>' for anchor, name, _ in shown)
    body = "".join(section(anchor, name, content) for anchor, name, content in shown)
    style = files("edgefl.experiment.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f'<body><header>{header}</header><nav aria-label="Sections">{links}</nav><main>{body}</main>'
        "<footer>Made by edgefl from the files of the run folder.</footer></body></html>\n"
    )
