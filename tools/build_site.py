"""Builds the documentation as a site: ``python tools/build_site.py [serve] [--out FOLDER]``.

The pages of docs/ and docs/tutorials, README.md, CHANGELOG.md and their like, and examples/README.md are copied into
build/site-source with the links between them adjusted, beside the sections of docs/site and the pages that
`tools/site_reference.py` writes from the source. Sphinx then builds them with every warning as an error. Reading the
site needs no network.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ROOT / "docs" / "site"
TUTORIALS = ROOT / "docs" / "tutorials"
STAGE = ROOT / "build" / "site-source"
OUTSIDE = {
    "README.md": "overview.md",
    "README.zh.md": "zh/overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
"""Pages outside of docs/, and their names on the site"""
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="[^"]+">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
"""A picture with a dark form, as GitHub shows it"""
MENU = re.compile(r"```\{toctree\}\n(?::\w+:.*\n)+\n((?:[^`\s]+\n)+)```")
CHINESE = "chinese.md"
IMAGE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+)\)$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the documentation as a site.")
    parser.add_argument("serve", nargs="?", choices=["serve"], help="serve it on this machine afterwards")
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    stage(STAGE)
    build(STAGE, given.out)
    print(f"{given.out}/index.html")
    if given.serve:
        serve(given.out, given.port)


def stage(folder: Path) -> None:
    """Writes the source of the site into a folder. A file that stays the same is not touched, so that Sphinx builds
    only what changed."""
    from tools import site_reference

    files = {
        name: text.encode() for name, text in (staged_pages() | site_reference.pages()).items()
    } | staged_pictures()
    files |= {site_name(path): path.read_bytes() for path in TUTORIALS.iterdir() if path.suffix in (".png", ".ipynb")}
    for name, content in files.items():
        write(folder / name, content)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()


def staged_pictures() -> dict[str, bytes]:
    """The pictures of the pages. A drawing whose colors follow the reader's system becomes a light and a dark one, and
    the theme's own switch chooses."""
    from tools.drawing import DARK, themed

    files = {path.name: path.read_bytes() for path in (ROOT / "docs").iterdir() if path.suffix in (".png", ".svg")}
    for name in [name for name in files if name.endswith(".svg") and DARK.encode() in files[name]]:
        drawn = files[name].decode()
        files |= {name: themed(drawn, dark=False).encode(), dark_name(name): themed(drawn, dark=True).encode()}
    return files


def dark_name(name: str) -> str:
    """The dark form of a picture, beside it."""
    return f"{name[:-4]}-dark{name[-4:]}"


def staged_pages() -> dict[str, str]:
    """The pages that people wrote, by their names on the site."""
    folders = (ROOT / "docs", SECTIONS, TUTORIALS, ROOT / "docs/zh")
    pages = [page for folder in folders for page in folder.glob("*.md")]
    texts = {site_name(page): relinked(page) for page in [*pages, *(ROOT / path for path in OUTSIDE)]}
    texts["examples.md"] += "".join(
        f"\n## {path.name}\n\n```yaml\n{path.read_text()}```\n" for path in sorted((ROOT / "examples").glob("*.yaml"))
    )
    return texts | chinese_menus(texts)


def chinese_menus(texts: Mapping[str, str]) -> dict[str, str]:
    """The sections of the Chinese pages with the menus of the English ones, as far as their pages are in Chinese; and
    the page above them, which lists the pages of no section last."""
    above = texts[CHINESE]
    placed, changed = {f"/{entry}" for entry in menu_of(above)}, dict[str, str]()
    for section in [entry for entry in menu_of(above) if f"{Path(entry).name}.md" in texts]:
        entries = [f"/zh/{Path(entry).name}" for entry in menu_of(texts[f"{Path(section).name}.md"])]
        menu = [entry for entry in entries if f"{entry[1:]}.md" in texts and entry not in placed]
        placed |= set(menu)
        if menu:
            changed[f"{section}.md"] = (
                f"{texts[f'{section}.md']}\n```{{toctree}}\n:hidden:\n\n" + "\n".join(menu) + "\n```\n"
            )
    others = sorted(f"/{name[:-3]}" for name in texts if name.startswith("zh/") and f"/{name[:-3]}" not in placed)
    return changed | {CHINESE: above.replace("\nzh/*\n", "\n" + "".join(f"{entry}\n" for entry in others))}


def menu_of(text: str) -> list[str]:
    """The entries of a page's menu."""
    found = MENU.search(text)
    return [entry for entry in found[1].split() if "*" not in entry] if found else []


def site_name(path: Path) -> str:
    """The place of a file on the site; that of a generated page, which no file has, is below docs/site."""
    name = path.relative_to(ROOT).as_posix()
    for folder in ("docs/site/", "docs/"):
        if name.startswith(folder):
            return name.removeprefix(folder)
    return OUTSIDE.get(name, name)


def relinked(page: Path) -> str:
    """The text of a page with its links as the site needs them."""

    def link(found: re.Match[str]) -> str:
        opening, target, anchor, closing = found.groups()
        return f"{opening}{site_target(page, target)}{anchor or ''}{closing}"

    return themed_images(page, LINK.sub(link, PICTURE.sub(r"![\1](\2)", page.read_text())))


def themed_images(page: Path, text: str) -> str:
    """A page's text in which a picture that stands alone, and has a dark form, is two: the theme shows one of them."""

    def both(found: re.Match[str]) -> str:
        text, target = found.groups()
        name = os.path.normpath(Path(site_name(page)).parent / target)
        if dark_name(name) not in pictures:
            return found[0]
        images = [(target, "light"), (dark_name(target), "dark")]
        blocks = [
            f"```{{image}} {path}\n:alt: {json.dumps(text, ensure_ascii=False)}\n:class: only-{theme}\n```"
            for path, theme in images
        ]
        kind = "drawing" if target.endswith(".svg") else "photograph"
        return "\n".join([f":::{{container}} {kind}", *blocks, ":::"])

    pictures = staged_pictures()
    return IMAGE.sub(both, text)


def site_target(page: Path, target: str) -> str:
    """Where a link of a page goes on the site."""
    if ":" in target:
        return target
    path = (page.parent / target).resolve()
    name, anchor = site_name(path), ""
    if name.startswith("examples/") and name.endswith(".yaml"):
        name, anchor = "examples.md", f"#{path.name.replace('.', '').lower()}"
    return os.path.relpath(name, Path(site_name(page)).parent) + anchor


def write(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def build(source: Path, out: Path) -> None:
    """Runs Sphinx, which fails at the first warning's end: all of them are printed."""
    trees = source.parent / "site-trees"
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", SECTIONS, "-d", trees]
    command = [sys.executable, "-m", "sphinx", *options, source, out]
    from hilt.core.progress import Progress

    with Progress().phase("building the site with Sphinx", announce=True):
        failed = subprocess.run(command, cwd=ROOT, check=False).returncode
    if failed:
        raise SystemExit("the site was not built: the warnings above are errors")
    shutil.rmtree(out / "_sources", ignore_errors=True)


def serve(folder: Path, port: int) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/   (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
