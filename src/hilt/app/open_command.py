"""``hilt open``: runs, episodes and datasets in the browser."""

from __future__ import annotations

import gc
import socket
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from hilt.app.remote_runs import RemoteRuns, check_address, is_address
from hilt.app.sign_in import read_password, read_secret
from hilt.core.errors import ConfigError
from hilt.core.platform import give_memory_back
from hilt.core.web import listen

GARBAGE_THRESHOLDS = 5_000, 5, 2
"""Python's garbage collector looks through everything after 50,000 new objects, which about 50 pages leave that were
closed: libraries and the app itself are frozen, so that there is little else to look through"""

app = typer.Typer(add_completion=False)
PORT = 8642
"""The port that is taken if it is free and no other is given"""


CertificateOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The certificate of TLS (PEM).", show_default=False)
]
KeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The key of the certificate (PEM).", show_default=False)
]
ProxyOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The name of a reverse proxy that serves this page with TLS.", show_default=False
    ),
]
PasswordOption = Annotated[
    str,
    typer.Option(metavar="FILE", help="Sign in with the password in this file; - asks for it.", show_default=False),
]
RemoteKeyOption = Annotated[
    str, typer.Option(metavar="FILE", help="The token or password of ADDRESS.", show_default="asks")
]


@app.command("open")
def open_app(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | LOG | DATASET | FOLDER | ADDRESS]...",
            help="What to show: of a folder, all below it; of a hilt open elsewhere, its runs.",
            show_default="runs, or this folder",
        ),
    ] = None,
    view: Annotated[bool, typer.Option("--view", help="Only show: nothing can be changed or started.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, and open no browser.")] = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to serve; beyond this machine only with TLS.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The port; 0 takes a free one.", show_default=f"{PORT}, or a free one", min=0, max=65535
        ),
    ] = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    proxy: ProxyOption = "",
    password_file: PasswordOption = "",
    remote_key: RemoteKeyOption = "-",
) -> None:
    """Open runs, logs and datasets in the browser: a page that this command serves, on this machine unless told
    otherwise. It ends with Ctrl-C. A token in the address, or a password, keeps others
    out."""
    remotes = _remotes([path for path in paths or () if is_address(path)], remote_key)
    shown = [Path(path) for path in paths or () if not is_address(path)]
    if not shown and not remotes:
        shown = [Path("runs") if Path("runs").is_dir() else Path()]
    for path in shown:
        if not path.exists():
            what = "Name a run, a log, a dataset or a folder of them."
            raise ConfigError(f"{path}: there is no such file or folder. {what}")
    from hilt.app.open_app import OpenApp, first_page, serve, served

    give_memory_back()
    gc.set_threshold(*GARBAGE_THRESHOLDS)

    where = served(host, certificate, key, proxy, password=bool(password_file))
    password = read_password(password_file) if password_file else ""
    with _listener(host, port) as listener:
        address = where.address(listener, "" if remotes else first_page(shown))
        typer.echo(f"open {address}")
        typer.echo("Ctrl-C ends it.")
        # in a thread: it may take seconds, and some browsers return only when they are closed
        browser = threading.Thread(target=_open_browser, args=("" if no_browser else address,), daemon=True)
        browser.start()
        serve(OpenApp(shown, view, remotes), where, listener, password)
        browser.join(1.0)


def _remotes(addresses: list[str], key: str) -> list[RemoteRuns]:
    """What is followed of other machines; all of them have the same token or password."""
    checked = [check_address(address) for address in addresses]
    if not checked:
        return []
    secret = read_secret(key, "--remote-key", f"Token or password of {', '.join(checked)}: ")
    return [RemoteRuns(address, secret) for address in checked]


def _listener(host: str, port: int | None) -> socket.socket:
    """A socket that listens on this port; without one on the usual port, or where that is taken on a free one."""
    try:
        return listen(host, PORT if port is None else port)
    except ConfigError:
        if port is not None:
            raise
        return listen(host, 0)


def _open_browser(address: str) -> None:
    if not address:
        return
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:  # else it would take this terminal
        browser.open(address)
