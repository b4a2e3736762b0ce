"""Meta-World as a task, as far as it can be tested without Meta-World: with a stand-in for its library. The real one is
in tests/peers/test_metaworld.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, MissingPackageError, UnknownNameError
from hilt.envs.metaworld import sawyer_env
from hilt.envs.task import check_task, make, ready
from hilt.policies.vla.observation_adapters import hold_of, suite


class Door:
    """A world of the shape of Meta-World's, in which the first number of an action opens a door."""

    dt = 0.0125
    model = SimpleNamespace(ncam=2, camera=lambda number: SimpleNamespace(name=("corner3", "gripperPOV")[number]))

    def __init__(self) -> None:
        self.at, self.closed = 0.0, False

    def set_task(self, task: float) -> None:
        self.begin = task

    def reset(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.at = self.begin
        return self.seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += float(action[0])
        return self.seen(), 5.0, False, False, {"success": float(self.at > 4)}

    def seen(self) -> np.ndarray:
        return np.full(sawyer_env.NUMBERS, self.at)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    script = SimpleNamespace(get_action=lambda seen: np.array([2.0, 0, 0, 0]))
    library = SimpleNamespace(
        ALL_V3_ENVIRONMENTS={"door-open-v3": Door},
        MT1=lambda task, seed: SimpleNamespace(train_tasks=[seed + number / 50 for number in range(50)]),
        policies=SimpleNamespace(ENV_POLICY_MAP={"door-open-v3": lambda: script}),
    )
    monkeypatch.setattr(sawyer_env, "_library", lambda: library)
    sawyer_env.initial_states.cache_clear()
    yield
    sawyer_env.initial_states.cache_clear()


def test_metaworld_env_is_a_task(installed: None) -> None:
    env = make("metaworld/door-open", step_limit=9)
    assert check_task(env) == []
    assert env.get_wrapper_attr("instruction") == "door open" and env.get_wrapper_attr("control_hz") == 80
    observation, info = env.reset(options={"split": "test", "state": 25})
    assert observation["state"].tolist() == [1.5] * 39 and info == {"succeed": False, "split": "test", "state": 25}
    action = env.get_wrapper_attr("expert")()()
    assert action.tolist() == [1, 0, 0, 0], "the script's action is clipped"
    ends = [env.step(action)[1:] for _ in range(3)]
    assert ends[0] == (0.0, False, False, {"succeed": False, "dense_reward": 5.0})
    assert ends[-1] == (1.0, True, False, {"succeed": True, "dense_reward": 5.0})
    with pytest.raises(ConfigError, match="is over, or has not begun: call reset first"):
        env.step(action)
    env.reset()
    assert [env.step(np.zeros(4))[3] for _ in range(9)] == [False] * 8 + [True]


WEDGE = "0 0 0  .2 0 0  0 .1 0  0 0 .1"
SCENE = f"""
<mujoco>
  <asset><mesh name="wedge" vertex="{WEDGE}"/></asset>
  <worldbody>
    <geom name="cup" type="mesh" mesh="wedge" contype="0" conaffinity="0"/>
    <body name="base">
      <body name="link" pos="1 0 0">
        <joint axis="0 1 0"/>
        <geom name="link" type="mesh" mesh="wedge" pos=".5 0 0" euler="0 0 90" contype="0" conaffinity="0"/>
        <geom name="hand" type="mesh" mesh="wedge" pos=".9 0 0"/>
        <geom name="bolt" type="sphere" size=".01" contype="0" conaffinity="0"/>
      </body>
    </body>
  </worldbody>
</mujoco>"""


def test_draft_draws_an_ellipsoid_in_the_place_of_a_link_and_changes_no_motion() -> None:
    mujoco = pytest.importorskip("mujoco")
    plain, draft = (mujoco.MjModel.from_xml_string(SCENE) for _ in range(2))
    sawyer_env._draw_ellipsoids(draft)
    changed = [name for name in ("cup", "link", "hand", "bolt") if draft.geom(name).type != plain.geom(name).type]
    assert changed == ["link"] and draft.vis.quality.offsamples == 0

    placed = []
    for model in (plain, draft):
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        placed.append((data.geom("link").xpos, data.geom("link").xmat.reshape(3, 3)))
    (position, turn), (center, same_turn) = placed
    corners = position + plain.mesh_vert @ turn.T
    within = (corners - center) @ same_turn
    assert within.max(0) == pytest.approx(draft.geom("link").size, abs=1e-5), "the box around the mesh"
    assert within.min(0) == pytest.approx(-draft.geom("link").size, abs=1e-5)
    states = []
    for model in (plain, draft):
        data = mujoco.MjData(model)
        mujoco.mj_step(model, data, 50)
        states.append(np.array(data.qpos))
    assert abs(states[0]).max() > 1e-3 and (states[0] == states[1]).all()


def test_the_camera_of_the_workspace_looks_at_its_middle_and_leaves_the_others_alone() -> None:
    mujoco = pytest.importorskip("mujoco")
    from hilt.envs.tabletop.renderer import Renderer

    x, y, z = sawyer_env.WORKSPACE_VIEW["lookat"]
    ball = f'<geom type="sphere" size=".05" pos="{x} {y} {z}" rgba="1 0 0 1"/>'
    above = f'<camera name="above" pos="{x} {y + 0.2} {z + 1}"/>'
    world = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{ball}{above}</worldbody></mujoco>")
    data = mujoco.MjData(world)
    mujoco.mj_forward(world, data)
    renderer = Renderer(world, 32, 32)
    from_above, seen, again = (
        renderer.picture(data, sawyer_env._camera(world, name), 32, 32) for name in ("above", "workspace", "above")
    )
    renderer.close()
    red = [np.argwhere(image[..., 0] > 60).mean(0) for image in (from_above, seen)]
    assert red[1] == pytest.approx([15.5, 15.5], abs=1) and red[0][0] > 18, "in the middle; below it, from above"
    assert (from_above == again).all() and seen.std() > 1


def test_metaworld_env_refuses_what_cannot_work(installed: None) -> None:
    assert make("metaworld/door-open-v3").unwrapped.task == "door-open-v3"
    with pytest.raises(UnknownNameError, match="no task named 'metaworld/door-opne'; did you mean 'metaworld/door-op"):
        ready(["metaworld/door-opne"])
    with pytest.raises(UnknownNameError, match=r"quality: no quality of images named 'low'.* Known: draft, full"):
        make("metaworld/door-open", image_size=64, quality="low")
    with pytest.raises(ConfigError, match="quality=draft is about images, and image_size=0 has none"):
        make("metaworld/door-open", quality="draft")
    with pytest.raises(ConfigError, match=r"step_limit=501 cannot work: Meta-World's episodes have 1 to 500 steps"):
        make("metaworld/door-open", step_limit=501)
    with pytest.raises(UnknownNameError, match=r"no camera of Meta-World named 'front'.* Known: .*workspace"):
        make("metaworld/door-open", image_size=64, cameras=["front"])
    with pytest.raises(ConfigError, match=r"image_size=64 with cameras=\[\]: expected pixels and the names"):
        make("metaworld/door-open", image_size=64, cameras=[])
    env = make("metaworld/door-open")
    env.reset()
    with pytest.raises(ConfigError, match=r"takes actions of 4 finite numbers; given \(7,\)"):
        env.step(np.zeros(7))


def test_metaworld_env_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    sawyer_env._library.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install --no-deps metaworld"):
        make("metaworld/door-open")


def test_a_policy_sees_both_cameras_of_metaworld_and_keeps_the_grip_while_it_holds() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    raw = {"state": np.arange(4.0), "images": {"workspace": image, "gripperPOV": image + 1}}
    seen = suite("metaworld/door-open").views(raw)
    assert seen["wrist_image"][0, 0, 0] == 1 and seen["state"].tolist() == [0, 1, 2, 3]
    hold = hold_of(["metaworld/door-open"])
    assert hold is not None
    assert hold(raw, np.array([1, 1, 1, 0.6]), 4).tolist() == [0, 0, 0, np.float32(0.6)]
    assert hold(raw, None, 4).tolist() == [0, 0, 0, 0]
