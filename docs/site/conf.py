"""Sphinx's settings of the site. `tools/build_site.py` gathers the pages and runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from docutils import nodes  # noqa: E402
from docutils.utils.math import latex2mathml  # noqa: E402
from tools.site_reference import rst  # noqa: E402

from hilt import __version__  # noqa: E402

project = "Hilt"
author = "the authors of Hilt"
copyright = "the authors of Hilt, Apache-2.0"
version = release = __version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"
pygments_style, pygments_dark_style = "tango", "github-dark"

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Gymnasium and torch are written for another theme
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "Hilt"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#0b6e6e", "color-brand-content": "#0b6e6e"},
    "dark_css_variables": {"color-brand-primary": "#5cc8c2", "color-brand-content": "#5cc8c2"},
}


def plain_docstring(app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    lines[:] = rst("\n".join(lines)).splitlines()


def visit_math(writer: Any, node: nodes.Element) -> None:
    """Formulas as MathML, which browsers draw themselves: no script is loaded."""
    writer.body.append(latex2mathml.tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def visit_displaymath(writer: Any, node: nodes.Element) -> None:
    writer.body.append(f'<div class="math">{latex2mathml.tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displaymath, None))
