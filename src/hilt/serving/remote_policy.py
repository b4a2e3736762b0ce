"""A policy that runs elsewhere: behind `hilt serve-policy`, or behind openpi's own server.

    policy = RemotePolicy("ws://127.0.0.1:8000")
    actions, _ = policy.act([observation], sample=False)

It acts, and nothing else: what it would need to learn stays with the server.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hilt.core.errors import ConfigError, DeadlineError, FormatError, RefusedError, RequestError
from hilt.policies.base import (
    Evaluation,
    Observation,
    ObservedFields,
    Policy,
    Prefix,
    Record,
    check_prefix,
    check_temperature,
)
from hilt.robot.request_auth import read_tokens
from hilt.serving.observation_names import PROTOCOL, is_protocol, openpi_name
from hilt.serving.policy_links import RETRY_S, WEBSOCKETS, WIRE, BrokenLinkError, ServerAbsentError, open_link


def is_address(policy: str) -> bool:
    """Whether a text is the address of a policy server."""
    return policy.startswith(tuple(f"{scheme}://" for scheme in (*WEBSOCKETS, WIRE)))


def server_key(address: str, path: str | os.PathLike[str] | None) -> str:
    """The key in a file; for the wire the folder of keys itself; empty where none is given."""
    if not path:
        return ""
    return os.fspath(path) if address.startswith(f"{WIRE}://") else next(iter(read_tokens([path]).values()))


class RemotePolicy(Policy):
    """Asks a server for actions, one observation at a time; safe to use from any thread.

    `chunk` and `action_dim` are those that the server announces. openpi's server announces none: there they are 0 until
    the first answer. `version` is that of the weights which answered last.
    """

    def __init__(self, url: str, *, key: str = "", timeout_s: float = 60.0):
        """`url`: ws://HOST:PORT, wss://HOST:PORT, or hilt://HOST:PORT for the keyed wire. `key`: one of the server's
        keys; of the wire the folder of keys. `timeout_s`: for a connection, and for each observation with all that is
        tried anew for it. A certificate of one's own is trusted by the environment variable SSL_CERT_FILE."""
        super().__init__()
        if not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s={timeout_s}: expected a number of seconds above 0.")
        self._link = open_link(url, key, timeout_s)
        self._connected = False
        self._lock = threading.Lock()
        self.url, self.version = url, 0
        self.metadata: dict[str, Any] = {}
        self.chunk, self.action_dim = 0, 0
        self._connect(time.monotonic() + timeout_s)

    @property
    def is_hilt(self) -> bool:
        """Whether the server is Hilt's, which lets each request choose how actions are drawn; openpi's does not."""
        return "protocol" in self.metadata

    @property
    def takes_prefix(self) -> bool:
        return bool(self.metadata.get("takes_prefix", False))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def observed_fields(self) -> ObservedFields | None:
        if "cameras" not in self.metadata:
            return None
        found = self.metadata
        return ObservedFields(tuple(found["cameras"]), int(found.get("state_dim", 0)), bool(found.get("all_cameras")))

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        """Actions in the units of the server's robot, and an empty record. What is random is drawn by the server:
        `generator` is not used, and openpi's server decides about `sample` and `temperature` itself."""
        check_temperature(temperature, sample)
        checked = check_prefix(self, prefix, len(observations), sample)
        if not observations:
            raise FormatError("act() was given no observation; give it at least one.")
        with self._lock:
            extras = {"protocol": PROTOCOL, "sample": sample, **({"temperature": float(temperature)} if sample else {})}
            answers = []
            for row, seen in enumerate(observations):
                if checked is not None:
                    extras |= {"prefix": checked.actions[row], "frozen": int(checked.frozen[row])}
                answers.append(self._ask(self._message(seen, extras)))
        return np.stack(answers), {}

    def is_alive(self, within_s: float) -> bool:
        """Whether the server has given a sign of life within this time. Returns at once, also while another thread
        waits for an answer. openpi's own server gives none while it computes: there it is whether it is connected."""
        return self._link.is_alive(within_s if self.is_hilt else float("inf"))

    def close(self) -> None:
        """Closes the connection; the next `act` opens another one."""
        with self._lock:
            self._connected = False
            self._link.end()

    def evaluate(self, record: Record) -> Evaluation:
        raise self._only_acts("evaluate()")

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        raise self._only_acts("supervised_loss()")

    def _only_acts(self, call: str) -> ConfigError:
        return ConfigError(
            f"{call}: the policy at {self.url} acts and does not learn here. Train where its weights are."
        )

    # --- the conversation ---

    def _message(self, observation: Observation, extras: Mapping[str, Any]) -> dict[str, Any]:
        seen = {name: value for name, value in observation.items() if value is not None}
        if not self.is_hilt:
            return {openpi_name(name): value for name, value in seen.items()}
        return {**seen, **extras}

    def _ask(self, message: Mapping[str, Any]) -> np.ndarray:
        """Sends one observation until it is answered: a connection that breaks is opened anew, up to the timeout.
        Acting changes nothing at the server, so that asking twice does no harm."""
        deadline = time.monotonic() + self._link.timeout_s
        while True:
            if not self._connected:
                self._reconnect(deadline)
            self._connected = False  # unless it is answered, or refused in words
            try:
                answer = self._link.ask(message, deadline)
                self._connected = True
                return self._actions(answer)
            except BrokenLinkError as error:
                if time.monotonic() + RETRY_S > deadline:
                    raise DeadlineError(
                        f"{self.url} closed the connection without an answer, for {self._link.timeout_s:g} s ({error})."
                    ) from None
                time.sleep(RETRY_S)
            except RequestError:
                self._connected = True
                raise

    def _actions(self, answer: Any) -> np.ndarray:
        actions = answer.get("actions") if isinstance(answer, Mapping) else None
        if not isinstance(actions, np.ndarray) or actions.ndim != 2 or actions.dtype.kind != "f" or not actions.size:
            given = f"{actions.dtype} {list(actions.shape)}" if isinstance(actions, np.ndarray) else "none"
            raise RequestError(f"{self.url} answered with the actions {given}; expected floating [chunk, action_dim].")
        if not self.chunk:
            self.chunk, self.action_dim = map(int, actions.shape)
        if actions.shape != (self.chunk, self.action_dim):
            raise RequestError(
                f"{self.url} answered with {list(actions.shape)} numbers; expected [{self.chunk}, {self.action_dim}], "
                "as it did before or has announced."
            )
        if not np.isfinite(actions).all():
            raise RequestError(f"{self.url} answered with numbers that are not finite; expected finite actions.")
        if type(version := answer.get("version", 0)) is int:
            self.version = version
        result: np.ndarray = actions.astype(np.float32)
        return result

    # --- the connection ---

    def _reconnect(self, deadline: float) -> None:
        while True:
            try:
                return self._connect(deadline)
            except ServerAbsentError:
                if time.monotonic() + RETRY_S > deadline:
                    raise
            time.sleep(RETRY_S)

    def _connect(self, deadline: float) -> None:
        try:
            self._meet(self._link.connect(deadline))
        except RefusedError:
            self._link.close()
            raise
        self._connected = True

    def _meet(self, found: Any) -> None:
        """Checks the metadata, which a server sends first."""
        if not isinstance(found, dict):
            raise RefusedError(f"{self.url} sent no metadata first; expected openpi's protocol, as hilt serve-policy.")
        if not is_protocol(protocol := found.get("protocol", PROTOCOL)):
            raise RefusedError(
                f"{self.url} speaks protocol {protocol!r:.40}; this client speaks {PROTOCOL}. Install the same version "
                "of Hilt on both sides.",
            )
        sizes = found.get("chunk", self.chunk), found.get("action_dim", self.action_dim)
        if "protocol" in found and not all(type(size) is int and size > 0 for size in sizes):
            raise RefusedError(f"{self.url} announces chunks of {sizes[0]!r} actions of {sizes[1]!r} numbers.")
        cameras = found.get("cameras", [])
        if not isinstance(cameras, list) or not all(isinstance(name, str) for name in cameras):
            raise RefusedError(f"{self.url} announces the cameras {cameras!r:.60}; expected a list of names.")
        if self.chunk and sizes != (self.chunk, self.action_dim):
            raise RefusedError(
                f"{self.url} now serves chunks of {sizes[0]} actions of {sizes[1]} numbers, and before it was "
                f"{self.chunk} of {self.action_dim}: it is another policy. Make a new RemotePolicy.",
            )
        if "protocol" in found:
            self.chunk, self.action_dim = sizes
            self.version = found["version"] if type(found.get("version")) is int else 0
            self.max_delay = found["max_delay"] if type(found.get("max_delay")) is int else 0
        self.metadata = found
