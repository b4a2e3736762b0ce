"""The page of ``hilt open``: runs, episodes and datasets in the browser, on this machine.

A part of it is a module with a function ``add_pages(app)``, which is listed in `hilt.app.open_app.PARTS`. It adds an
entry to the navigation, pages and routes:

    def add_pages(app: OpenApp) -> None:
        app.add_section(Section("episodes", "/episodes", "movie"))     # its name is the word "nav.episodes"
        app.page("/episodes", "episodes", show_list)                   # show_list(page: PageContext)
        app.route("/api/frame", frame)                                 # frame(request), a handler of starlette

Texts come from the catalog, ``page.word("runs.title")``, in English and in Chinese (`hilt.app.words`).
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.app.open_app import OpenApp, PageContext, Section
    from hilt.app.run_library import RunLibrary, RunSummary

__all__ = ["OpenApp", "PageContext", "RunLibrary", "RunSummary", "Section"]
__getattr__ = lazy_exports(__name__, __file__)
