"""``hilt serve-policy``: put a policy behind a websocket that speaks openpi's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilt.cli.eval_command import best_of_settings
from hilt.cli.show import PROGRESS, heavy_module, shell, show_next
from hilt.cli.train_options import Trust, option_values
from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError, optional_module
from hilt.core.threads import one_thread
from hilt.core.web import is_loopback

if TYPE_CHECKING:
    from hilt.hil.config import Hil
    from hilt.policies.base import Policy
    from hilt.serving.policy_server import ServerAccess
    from hilt.value.best_of import BestOf

app = typer.Typer(add_completion=False)


def _option(names: str, metavar: str, help: str, default: str | bool = True, **rest: Any) -> Any:
    return typer.Option(*names.split(), metavar=metavar, help=help, show_default=default, **rest)


@app.command()
def serve_policy(
    policy: Annotated[str, typer.Argument(metavar="FOLDER | RUN", help="A policy's folder, or a run of hilt train.")],
    checkpoint: Annotated[
        str, _option("--checkpoint", "WHICH", "Of a run: last (default), best, or its number.", False)
    ] = "",
    host: Annotated[str, _option("--host", "ADDRESS", "Beyond this machine, a key or TLS is needed.")] = "127.0.0.1",
    port: Annotated[int, _option("--port", "N", "The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    key_files: Annotated[
        list[Path] | None, _option("--key-file", "FILE", "A key that clients must send; may be given again.", False)
    ] = None,
    certificate: Annotated[Path | None, _option("--certificate", "FILE", "Of TLS (PEM).", False)] = None,
    key: Annotated[Path | None, _option("--key", "FILE", "The key of the certificate (PEM).", False)] = None,
    wire_port: Annotated[
        int | None, _option("--wire-port", "N", "Also serve on the keyed wire, here.", False, min=1, max=65534)
    ] = None,
    keys: Annotated[str, _option("--keys", "FOLDER", "The keys of the wire, by hilt keys new.", False)] = "",
    max_batch: Annotated[int, _option("--max-batch", "N", "Observations in one call.", min=1)] = 16,
    max_wait_ms: Annotated[float, _option("--max-wait-ms", "MS", "How long a request waits for others.", min=0)] = 5.0,
    max_clients: Annotated[int, _option("--max-clients", "N", "Clients at a time.", min=1)] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample actions; default: the most likely.")] = False,
    seed: Annotated[int, _option("--seed", "N", "Of the actions that are sampled.", min=0)] = 0,
    best_of: Annotated[
        int | None, _option("--best-of", "N", "The policy draws N chunks; the verifier chooses.", False, min=2)
    ] = None,
    verifier: Annotated[str, _option("--verifier", "FOLDER", "Of hilt train value DATA actions=N.", False)] = "",
    draw_temperature: Annotated[
        float | None, _option("--draw-temperature", "T", "Of the chunks to choose from.", "1", min=0)
    ] = None,
    device: Annotated[str, _option("--device", "NAME", "Such as cuda:0.", "that of the run, or cpu")] = "",
    option: Annotated[
        list[str] | None, _option("--option -o", "NAME=VALUE", "An option of a folder's policy.", False)
    ] = None,
    trusted: Trust = None,
) -> None:
    """Serve a policy to openpi's clients and to Hilt's: observations come in, chunks of actions go out. Requests of
    several robots are answered in one batch. Of a run, newer weights are taken up as they are written."""
    one_thread()
    optional_module("websockets", "hilt serve-policy", "serve")
    heavy_module("torch", "hilt serve-policy", "torch", then="hilt.serving.policy_server")
    from hilt.serving import BatcherSettings, ServerLimits
    from hilt.serving.policy_server import ServerAccess

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hilt.policies").setLevel(logging.INFO)  # tells when decisions are compiled
    access = ServerAccess(host, port, key_files or (), certificate, key)
    access.check()
    if keys and wire_port is None:
        raise ConfigError(f"--keys {keys}: they are for the wire; give --wire-port N, too, or leave them out.")
    with PROGRESS.phases() as report:
        report(f"loading the policy of {policy}")
        served = find_policy(policy, checkpoint, device, option_values(option))
        compile_aside(served.policy)
        if (chooser := best_of_settings(best_of, verifier, draw_temperature)) is not None:
            report(f"loading the verifier {verifier}")
            served = served.wrapped(chooser.wrap(served.policy))
        served.policy.warm_up(sample, report)
    settings = {"batching": BatcherSettings(max_batch, max_wait_ms / 1000, seed), "limits": ServerLimits(max_clients)}
    run_server(served, access, (wire_port, keys), sample=sample, **settings)


def compile_aside(policy: Policy) -> None:
    """Nobody waits until decisions are compiled; of a policy within another one neither."""
    for part in policy.modules():
        if hasattr(part, "compiles_aside"):
            part.compiles_aside = True


def run_server(served: ServedPolicy, access: ServerAccess, wire: tuple[int | None, str], **settings: Any) -> None:
    """Serves until Ctrl-C. `wire`: the port and the folder of keys of the wire, if it is served, too. `settings`: of
    `hilt.serving.PolicyServer`."""
    from hilt.serving import PolicyServer, PolicyWire, WeightWatcher

    server = PolicyServer(served.policy, served.version, access=access, name=served.name, **settings)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        if served.newest is not None and served.load is not None:
            stack.callback(WeightWatcher(server.batcher, served.newest, served.load).close)
        port, keys = wire
        wires = [] if port is None else [stack.enter_context(PolicyWire(server, port, keys, access.host))]

        def show() -> None:
            urls = " and ".join([server.url, *(one.url for one in wires)])
            typer.echo(f"{served.name}, version {served.version}, at {urls}")
            if access.keys and access.certificate is None and not is_loopback(access.host):
                typer.echo("The key and the pictures are not encrypted on their way: give --certificate and --key.")
            typer.echo("Ctrl-C ends it.")
            show_next(shell("hilt", "eval", "RUN", "--policy", server.url))

        asyncio.run(server.serve(show, (signal.SIGINT, signal.SIGTERM)))


@dataclass(frozen=True)
class ServedPolicy:
    """A policy with the version of its weights, and how newer ones are found; None: there will be none."""

    policy: Policy
    name: str
    version: int = 0
    newest: Callable[[], int] | None = None
    load: Callable[[int], Mapping[str, Any]] | None = None

    def wrapped(self, policy: BestOf) -> ServedPolicy:
        """The same with a policy that chooses among the chunks of this one, which newer weights are for."""
        load = self.load
        inside = None if load is None else lambda version: {f"policy.{n}": w for n, w in load(version).items()}
        name = f"{self.name}, best of {policy.count}"
        return replace(self, policy=policy, name=name, load=inside)


def find_policy(path: str, checkpoint: str, device: str, options: dict[str, Any]) -> ServedPolicy:
    """Loads the policy of a run, of a folder, or of a name that `hilt fetch` has shown."""
    from hilt.policies.registry import load_policy
    from hilt.runs.folder import CONFIG
    from hilt.vla import sft, train, trained

    run = Path(path)
    is_run = (run / CONFIG).is_file()
    if is_run and options:
        raise ConfigError(f"-o {next(iter(options))}=...: {path} is a run, which has its options. Leave -o out.")
    if train.is_run(run):
        which = checkpoint or "last"
        settings = train.KIND.frozen(run)
        policy, step = trained.policy_and_step(run, which, device or settings.device)
        if which.isdecimal():
            return ServedPolicy(policy, str(run), step)
        return ServedPolicy(
            policy,
            str(run),
            step,
            lambda: trained.newest_step(run, which),
            lambda version: trained.weights_at(run, which, version),
        )
    if is_run and not sft.KIND.is_run(run):
        return _with_a_person(run, checkpoint or "last", device)
    if checkpoint:
        raise ConfigError(f"--checkpoint {checkpoint}: {path} has one policy. Leave it out.")
    if is_run:
        if not (run / sft.RESULT).is_file():
            raise ConfigError(f"{run} has no policy yet: it is written when the run ends or is stopped.")
        config = sft.KIND.frozen(run)
        config.device = device or config.device
        return ServedPolicy(
            sft.open_policy(run, config).eval(), str(run), int(read_json(run / sft.RESULT)["best_step"])
        )
    return ServedPolicy(load_policy(path, device=device or "cpu", **options).eval(), path)


def _with_a_person(run: Path, which: str, device: str) -> ServedPolicy:
    """The policy of a run with a person in the loop whose agent is a VLA; its task is not needed."""
    from hilt.hil.evaluate import config_of, find_checkpoint
    from hilt.runs import checkpoint as saved

    config = config_of(run)
    if config.agent.kind == "frozen_vla":
        return _beside_frozen(run, config, which, device)
    if config.agent.kind != "vla":
        raise ConfigError(
            f"{run} is a run with a person in the loop, whose agent answers step by step; expected a policy that "
            "answers with chunks: a run of `hilt train` of a VLA recipe or of `hilt train sft`, or a policy's folder."
        )
    from hilt.hil.agents.vla_options import check_options, open_policy
    from hilt.hil.make_agent import condition_of

    found, options = find_checkpoint(run, which), check_options({"suite": config.task, **config.agent.options})
    trained, device = found.agent["policy"], device or config.agent.device
    policy = open_policy(options, device, config.seed, trained, condition_of(config)).eval()
    if which != "last":
        return ServedPolicy(policy, str(run), found.update)
    return ServedPolicy(
        policy,
        str(run),
        found.update,
        lambda: max(saved.numbers(run), default=found.update),
        lambda number: saved.load(run, number).agent["policy"],
    )


def _beside_frozen(run: Path, config: Hil, which: str, device: str) -> ServedPolicy:
    """The policy of a run whose agent is trained beside a frozen one."""
    from hilt.hil.evaluate import find_checkpoint
    from hilt.hil.frozen.frozen_export import policy_of_checkpoint
    from hilt.policies.frozen.frozen_policy import acting_weights
    from hilt.runs import checkpoint as saved

    config.agent.device = device or config.agent.device
    found = find_checkpoint(run, which)
    policy = policy_of_checkpoint(config, found)
    policy.eval()
    if which != "last":
        return ServedPolicy(policy, str(run), found.update)
    return ServedPolicy(
        policy,
        str(run),
        found.update,
        lambda: max(saved.numbers(run), default=found.update),
        lambda number: acting_weights(policy, saved.load(run, number).agent),
    )
