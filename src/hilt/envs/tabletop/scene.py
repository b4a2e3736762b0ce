"""The tabletop scene as MJCF text: table, arms, cameras, and the springs and dampers that the arms hang on.

The arm has the published lengths of Franka's Panda and links of primitive shapes, of which only
the hand and the fingers touch things. Its links are light: with HIL-SERL's stiffness and
damping it then moves as a critically damped one does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TIMESTEP = 0.004  # seconds
FINGER_TRAVEL = 0.04  # meters, of each finger


def mjcf(objects: str, assets: str, extra: str, prefixes: tuple[str, ...]) -> str:
    """The whole scene: a task's parts, and one arm for each prefix."""
    offsets, view = ((0.0,), 38) if len(prefixes) == 1 else ((0.3, -0.3), 50)
    arms = "".join(_arm(prefix, y) for prefix, y in zip(prefixes, offsets, strict=True))
    # Euler, and not one of the implicit integrators: those slow the damped arm after the contacts were solved, and a
    # held object, which is not damped, slips out of the fingers by that difference.
    return f"""<mujoco model="tabletop">
<compiler angle="radian" autolimits="true"/>
<option timestep="{TIMESTEP}" integrator="Euler" cone="elliptic" impratio="10" noslip_iterations="2"/>
<visual>
  <quality shadowsize="0" offsamples="0" numslices="12" numstacks="4" numquads="1"/>
  <headlight ambient=".4 .4 .4" diffuse=".25 .25 .25" specular="0 0 0"/>
  <map znear="0.01" zfar="10"/>
</visual>
<default>
  <default class="link"><geom contype="0" conaffinity="0" rgba=".92 .92 .94 1"/>
    <joint damping=".3" armature=".03"/></default>
  <default class="dark"><geom contype="0" conaffinity="0" rgba=".25 .27 .3 1"/></default>
  <default class="wrist"><joint damping=".3" armature=".08"/></default>
  <default class="finger">
    <geom type="box" contype="0" conaffinity="0" rgba=".12 .12 .14 1"/>
    <joint type="slide" range="0 {FINGER_TRAVEL}" damping="2" armature=".1"/>
    <default class="pad"><geom contype="1" conaffinity="1" friction="1.5 .02 .0005" condim="4"
      solref=".008 1" priority="1"/></default>
  </default>
</default>
<asset>
  <texture name="table" type="2d" builtin="checker" rgb1=".80 .79 .76" rgb2=".76 .75 .72" width="64" height="64"/>
  <material name="table" texture="table" texrepeat="5 6"/>
  {assets}
</asset>
<worldbody>
  <light directional="true" pos="0 0 2" dir="-.4 .3 -1" diffuse=".4 .4 .4" specular=".1 .1 .1" castshadow="false"/>
  <geom name="floor" type="plane" size="9 9 9" pos="0 0 -.75" rgba=".3 .34 .4 1" contype="0" conaffinity="0"/>
  <geom name="table" type="box" size=".5 .6 .02" pos=".4 0 -.02" material="table"/>
  <camera name="front" {_look((1.15, 0, 0.72), (0.43, 0, 0.1), (0, 0, 1))} fovy="{view}"/>
  {arms}
  {objects}
</worldbody>
{"".join(_control(prefix) for prefix in prefixes)}
{extra}
</mujoco>"""


def _arm(p: str, y: float) -> str:
    """One arm: its links, and the two bodies that stand for its command."""
    eye = _look((-0.065, 0, 0.05), (0.005, 0, 0.145), (1, 0, 0))
    return f"""
<body name="{p}target_position" mocap="true"><site name="{p}target_position" group="5"/></body>
<body name="{p}target_rotation" mocap="true"><site name="{p}target_rotation" group="5"/></body>
<body name="{p}mount" pos="0 {y} 0" childclass="link">
 <geom type="cylinder" fromto="0 0 0 0 0 .14" size=".075"/>
 <geom class="dark" type="cylinder" fromto="0 0 .14 0 0 .3" size=".06"/>
 <body name="{p}link1" pos="0 0 .333" gravcomp="1">
  <joint name="{p}joint1" axis="0 0 1" range="-2.9 2.9"/>
  <geom type="cylinder" fromto="0 -.07 0 0 .07 0" size=".065" mass=".6"/>
  <body name="{p}link2" quat="1 -1 0 0" gravcomp="1">
   <joint name="{p}joint2" axis="0 0 1" range="-1.76 1.76"/>
   <geom type="capsule" fromto="0 -.05 0 0 -.24 0" size=".06" mass=".6"/>
   <body name="{p}link3" pos="0 -.316 0" quat="1 1 0 0" gravcomp="1">
    <!-- of the postures with the same tcp, the one with the elbow up: every pose has one
         with this joint at 0, so its spring bends none -->
    <joint name="{p}joint3" axis="0 0 1" range="-2.9 2.9" stiffness="10" springref="0"/>
    <geom class="dark" type="capsule" fromto="0 0 -.06 .0825 0 0" size=".055" mass=".45"/>
    <body name="{p}link4" pos=".0825 0 0" quat="1 1 0 0" gravcomp="1">
     <joint name="{p}joint4" axis="0 0 1" range="-3.07 -.07"/>
     <geom type="cylinder" fromto="0 0 -.065 0 0 .065" size=".055" mass=".3"/>
     <geom type="capsule" fromto="0 0 0 -.0825 .1 0" size=".05" mass=".15"/>
     <body name="{p}link5" pos="-.0825 .384 0" quat="1 -1 0 0" gravcomp="1">
      <joint name="{p}joint5" class="wrist" axis="0 0 1" range="-2.9 2.9"/>
      <geom type="capsule" fromto="0 0 -.26 0 .03 -.06" size=".048" mass=".3"/>
      <body name="{p}link6" quat="1 1 0 0" gravcomp="1">
       <joint name="{p}joint6" class="wrist" axis="0 0 1" range="-.02 3.75"/>
       <geom class="dark" type="cylinder" fromto="0 0 -.06 0 0 .06" size=".048" mass=".15"/>
       <geom type="capsule" fromto="0 0 0 .088 0 0" size=".04" mass=".15"/>
       <body name="{p}link7" pos=".088 0 0" quat="1 1 0 0" gravcomp="1">
        <joint name="{p}joint7" class="wrist" axis="0 0 1" range="-2.9 2.9"/>
        <geom type="cylinder" fromto="0 0 -.03 0 0 .1" size=".042" mass=".12"/>
        <body name="{p}hand" pos="0 0 .107" quat=".9238795 0 0 -.3826834" gravcomp="1">
         <geom class="dark" type="box" size=".03 .1 .022" pos="0 0 .03" mass=".3" contype="1" conaffinity="1"/>
         <camera name="{p}wrist" {eye} fovy="75"/>
         <site name="{p}tcp" pos="0 0 .1034" group="5"/>
         <!-- turned as a body: MuJoCo 3.8 multiplies a turned site's rotation in the wrong order
              when an actuator has a refsite -->
         <body name="{p}tcp_down" pos="0 0 .1034" quat="0 1 0 0"><site name="{p}tcp_down" group="5"/></body>
         {"".join(_finger(f"{p}finger{i}", side) for i, side in ((1, 1), (2, -1)))}
        </body></body></body></body></body></body></body></body></body>"""


def _finger(name: str, side: int) -> str:
    return f"""
         <body name="{name}" pos="0 0 .0584" gravcomp="1" childclass="finger">
          <joint name="{name}" axis="0 {side} 0"/>
          <geom size=".009 .006 .02" pos="0 {side * 0.012} .006" mass=".03"/>
          <geom size=".009 .004 .018" pos="0 {side * 0.004} .037" mass=".02" class="pad"/>
         </body>"""


def _control(p: str) -> str:
    """The actuators of one arm: a spring and a damper for each direction, set by
    ``World.set_parameters``, and the gripper."""
    text = ""
    for i in range(6):
        gear = " ".join("1" if i == k else "0" for k in range(6))
        target = f"{p}target_position" if i < 3 else f"{p}target_rotation"
        at = f'site="{p}tcp_down" refsite="{target}" gear="{gear}"'
        text += f'<general name="{p}spring{i}" {at} gainprm="0" biastype="affine" biasprm="0 -1 0" forcerange="-1 1"/>'
        text += f'<general name="{p}damper{i}" {at} gainprm="1" biastype="affine" biasprm="0 0 -1"/>'
    grip = f'gainprm="2000" biastype="affine" biasprm="0 -2000 -80" forcerange="-40 40" ctrlrange="0 {FINGER_TRAVEL}"'
    return f"""
<tendon><fixed name="{p}fingers">
  <joint joint="{p}finger1" coef=".5"/><joint joint="{p}finger2" coef=".5"/></fixed></tendon>
<equality><joint joint1="{p}finger1" joint2="{p}finger2" solref=".005 1"/></equality>
<actuator>{text}<general name="{p}gripper" tendon="{p}fingers" {grip}/></actuator>"""


def _look(eye: Any, at: Any, up: Any) -> str:
    """A camera's place and axes: at ``eye``, with ``at`` in the middle of its picture."""
    back = np.subtract(eye, at)
    right = np.cross(up, back)
    axes = " ".join(f"{value:.6g}" for value in (*right, *np.cross(back, right)))
    return f'pos="{eye[0]} {eye[1]} {eye[2]}" xyaxes="{axes}"'
