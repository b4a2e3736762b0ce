"""Sides of the robot's benchmark: our tabletop, gym-hil as PyPI has it, and a bare
web application; each a process of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")

import mujoco
import numpy as np

from bench.sides import serve
from bench.timing import rate_of

SIZE = 64
"""Pixels of a picture's side"""
HZ = 10
"""Control steps in a simulated second"""


def one_core() -> None:
    """All threads of a contender, the renderer's too, share one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


class Simulation:
    """Contenders by name; each call of one is one control step, or one picture."""

    def __init__(self) -> None:
        one_core()
        self.contenders: dict[str, Callable[[], object]] = {}

    def rate(self, name: str, seconds: float) -> tuple[float, float]:
        """Calls in a second, and in a second of a processor: on a machine that others use too they differ."""
        calls, spent = [0], time.process_time()

        def call() -> None:
            self.contenders[name]()
            calls[0] += 1

        rate = rate_of(call, seconds)
        return rate, calls[0] / (time.process_time() - spent)


class Tabletop(Simulation):
    """Episodes of pick, as its expert demonstrates them; the actions are known before a clock starts."""

    def start(self, states: int) -> dict[str, Any]:
        from hilt.envs.tabletop.suite_env import TabletopEnv

        env, blind = (
            TabletopEnv("pick", image_size=SIZE, control_hz=HZ),
            TabletopEnv("pick", image_size=None, control_hz=HZ),
        )
        plans = [self._demonstrate(blind, state) for state in range(states)]
        self.contenders |= {"steps": self._episodes(env, plans), "physics": self._episodes(blind, plans)}
        cameras, turn = env.world.cameras, [0]

        def picture() -> None:
            turn[0] += 1
            env.world.render(cameras[turn[0] % 2], SIZE, SIZE)

        model, data = blind.world.model, blind.world.data
        substeps = round(1 / HZ / model.opt.timestep)

        def bare() -> None:
            mujoco.mj_step(model, data, substeps)

        def bare_with_pictures() -> None:
            mujoco.mj_step(model, data, substeps)
            for camera in cameras:
                env.world.render(camera, SIZE, SIZE)

        stock = mujoco.Renderer(env.world.model, SIZE, SIZE)

        def stock_picture() -> None:
            turn[0] += 1
            stock.update_scene(env.world.data, cameras[turn[0] % 2])
            stock.render()

        self.contenders |= {
            "render": picture,
            "bare": bare,
            "bare with pictures": bare_with_pictures,
            "stock render": stock_picture,
        }
        return {
            "steps": sum(map(len, plans)),
            "substeps": substeps,
            "succeeded": all(len(plan) < env.step_limit for plan in plans),
        }

    def _demonstrate(self, env: Any, state: int) -> list[Any]:
        env.reset(options={"split": "train", "state": state})
        expert, plan, over = env.expert(), [], False
        while not over:
            plan.append(np.array(expert(), np.float32))
            _, _, terminated, truncated, _ = env.step(plan[-1])
            over = terminated or truncated
        return plan

    def _episodes(self, env: Any, plans: list[list[Any]]) -> Callable[[], object]:
        """A step at each call; resets are part of the next one."""

        def run() -> Iterator[None]:
            while True:
                for state, plan in enumerate(plans):
                    env.reset(options={"split": "train", "state": state})
                    for action in plan:
                        env.step(action)
                        yield

        running = run()
        return lambda: next(running)


class GymHil(Simulation):
    """PandaPickCubeBase-v0 at the same rate and with two pictures of the same size."""

    def start(self) -> str:
        from importlib.metadata import version

        import gym_hil
        import gymnasium

        spec = gym_hil.GymRenderingSpec(height=SIZE, width=SIZE)
        seeing = gymnasium.make("gym_hil/PandaPickCubeBase-v0", image_obs=True, render_spec=spec, control_dt=1 / HZ)
        blind = gymnasium.make("gym_hil/PandaPickCubeBase-v0", control_dt=1 / HZ)
        scene = seeing.unwrapped._viewer.scene
        self.contenders = {
            "as shipped": self._steps(seeing, lambda: self._shadows(scene, True)),
            "shadows off": self._steps(seeing, lambda: self._shadows(scene, False)),
            "without cameras": self._steps(blind, lambda: None),
        }
        return version("gym-hil")

    def _shadows(self, scene: Any, on: bool) -> None:
        scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = on

    def _steps(self, env: Any, prepare: Callable[[], None]) -> Callable[[], object]:
        rng, over = np.random.default_rng(0), [True]

        def step() -> None:
            prepare()
            if over[0]:
                env.reset()
            # its actions are meters
            _, _, terminated, truncated, _ = env.step(rng.uniform(-0.01, 0.01, 7).astype(np.float32))
            over[0] = terminated or truncated

        return step


class Bare:
    """The least that answers the same requests: Starlette's routes with fixed values, on uvicorn."""

    def start(self) -> str:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, PlainTextResponse
        from starlette.routing import Route

        pose = [0.5, 0.0, 0.2, 1.0, 0.0, 0.0, 0.0]
        state = {
            "pose": pose,
            "vel": [0.1] * 6,
            "force": [0.1] * 3,
            "torque": [0.1] * 3,
            "q": [0.1] * 7,
            "dq": [0.1] * 7,
        }
        state |= {"jacobian": [[0.1] * 7] * 6, "gripper_pos": 1.0}

        async def getstate(request: Any) -> Any:
            return JSONResponse(state)

        async def getpos(request: Any) -> Any:
            return JSONResponse({"pose": pose})

        async def move(request: Any) -> Any:
            await request.body()
            return PlainTextResponse("Moved")

        async def status(request: Any) -> Any:
            return JSONResponse({"period": {"nominal": 1.0, "p99": 1.0}})

        routes = {"/getstate": getstate, "/getpos": getpos, "/pose": move, "/status": status}
        app = Starlette(routes=[Route(path, answer, methods=["POST"]) for path, answer in routes.items()])
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", access_log=False))
        threading.Thread(target=self.server.run, daemon=True).start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            if time.monotonic() > deadline:
                raise TimeoutError("the bare server did not start in 30 s")
            time.sleep(0.01)
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    def close(self) -> None:
        self.server.should_exit = True


if __name__ == "__main__":
    serve({"tabletop": Tabletop, "gym-hil": GymHil, "bare": Bare})
