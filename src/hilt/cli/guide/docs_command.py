"""``hilt docs [TOPIC]``: the documentation that is installed with Hilt, in the terminal or the browser, without a
network."""

from __future__ import annotations

import html
import re
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilt import __version__
from hilt.cli.guide.installed_pages import (
    cache_folder,
    installed_pages,
    line_with,
    pages_folder,
    part_of_page,
    plain_title,
    search_pages,
    sections,
    title_of,
)
from hilt.cli.show import table
from hilt.core.errors import UnknownNameError
from hilt.core.files import DISK

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

app = typer.Typer(add_completion=False)
TOPIC = "A page, such as training, and words of a heading of it; or words to search for in all pages."
STYLE = """
body { font: 16px/1.6 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
pre { background: #f3f5f6; padding: .8rem; overflow-x: auto; font-size: 85%; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 90%; }
td, th { border: 1px solid #d5dadd; padding: .3rem .6rem; text-align: left; vertical-align: top; }
a { color: #0b6e6e; } img { max-width: 100%; }
@media (prefers-color-scheme: dark) {
  body { background: #14181a; color: #dfe4e6; } pre { background: #1f2528; } td, th { border-color: #394246; }
  a { color: #5cc8c2; }
}
"""


@app.command("docs")
def show_docs(
    topic: Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]...", help=TOPIC, show_default=False)] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open the pages in the browser.")] = False,
    path: Annotated[bool, typer.Option("--path", help="Print where the pages are installed.")] = False,
) -> None:
    """Read the documentation that is installed with Hilt: a page, a part of it, or
    what a search finds. Needs no network."""
    words = topic or []
    pages = installed_pages()
    page = words[0].removesuffix(".md").removeprefix("docs/") if words else ""
    if path:
        typer.echo(pages_folder() / f"{page}.md" if page in pages else pages_folder())
    elif browser:
        if words and page not in pages:
            raise UnknownNameError("page", page, pages)
        made = as_html(pages, cache_folder() / f"docs-{__version__}") / f"{page or 'index'}.html"
        typer.echo(made)
        webbrowser.open(made.as_uri())
    elif not words:
        _list(pages)
    elif page in pages:
        _print(part_of_page(pages[page], words[1:]) or _no_heading(page, words[1:]))
    else:
        _search(words)


def _list(pages: dict[str, Path]) -> None:
    from rich.console import Console

    rows = [[f"hilt docs {name}", title_of(path)] for name, path in pages.items()]
    Console().print(table("", "", rows=rows))
    typer.echo("\nhilt docs WORDS searches all pages; hilt docs --browser opens them in the browser")


def _search(words: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    found = search_pages(words)
    if not found:
        raise UnknownNameError("page, and no text,", " ".join(words), installed_pages())
    console = Console()
    for section in found:
        title = plain_title(section.title)
        console.print(Text(f"hilt docs {section.page}", "bold"), Text(f"  {title}"), soft_wrap=True)
        console.print(Text(f"    {line_with(section, words)}"), no_wrap=True, overflow="ellipsis")


def _no_heading(page: str, words: list[str]) -> str:
    headings = [plain_title(section.title) for section in sections(installed_pages()[page])]
    raise UnknownNameError(f"heading of {page}", " ".join(words), headings)


def _print(text: str) -> None:
    """Prints a page: in a terminal with its headings and tables, screen by screen; in a pipe as it is."""
    if not sys.stdout.isatty():
        typer.echo(text.rstrip())
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(_plain_pictures(text)))


def _plain_pictures(text: str) -> str:
    """A page whose pictures with a light and a dark form, which are HTML, are written in Markdown: the light one."""
    return re.sub(r'<picture>.*?<img alt="([^"]*)" src="([^"]+)">.*?</picture>', r"![\1](\2)", text, flags=re.DOTALL)


def as_html(pages: dict[str, Path], folder: Path) -> Path:
    """Writes all pages as HTML, with an index; their links go from one to the other."""
    folder.mkdir(parents=True, exist_ok=True)
    markdown = _markdown()
    for name, path in pages.items():
        _write(folder / f"{name}.html", title_of(path), markdown.render(_relinked(path)))
    rows = "".join(f"<li><a href='{name}.html'>{html.escape(title_of(path))}</a></li>" for name, path in pages.items())
    _write(folder / "index.html", f"Hilt {__version__}", f"<h1>Hilt {__version__}</h1><ul>{rows}</ul>")
    return folder


def _markdown() -> MarkdownIt:
    from markdown_it import MarkdownIt

    def render_heading(self: object, tokens: list, at: int, options: object, env: object) -> str:  # type: ignore[type-arg]
        slug = re.sub(r"[^\w\- ]", "", tokens[at + 1].content.lower()).replace(" ", "-")
        return f'<{tokens[at].tag} id="{slug}">'

    made = MarkdownIt("commonmark").enable("table")
    made.add_render_rule("heading_open", render_heading)
    return made


def _relinked(path: Path) -> str:
    """The text of a page whose links go to pages in HTML, and to pictures that are there."""

    def picture(found: re.Match[str]) -> str:
        there = path.with_name(found[2])
        return f"![{found[1]}]({there.as_uri()})" if there.is_file() else f"*[picture: {found[1]}]*"

    text = re.sub(r"!\[(.*?)\]\(([^)]+)\)", picture, _plain_pictures(path.read_text("utf-8")))
    return re.sub(r"\]\((?!\w+:)([\w/.-]*?)([\w-]+)\.md", r"](\2.html", text)


def _write(path: Path, title: str, body: str) -> None:
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{html.escape(title)}</title>"
    )
    page = f"<!doctype html>{head}<style>{STYLE}</style><p><a href='index.html'>All pages</a></p>{body}"
    DISK.replace(path, page, durable=False)
