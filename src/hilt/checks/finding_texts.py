"""The texts of findings in English and Chinese: what was found, and what to do, with values to fill in.

    >>> render("black-frames.black", {"count": 3, "total": 60}, "en")[0]
    '3 of 60 frames are black.'

A value that is a list is written as its first ones and how many more there are. ``{count:step|steps}`` is the number
with the word for one or for several.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, NamedTuple

LANGUAGES = ("en", "zh")
MAX_LISTED = 5
MORE = {"en": "{listed} and {more:,} more", "zh": "{listed} 以及另外 {more:,} 个"}
BETWEEN = {"en": ", ", "zh": "、"}


class FindingText(NamedTuple):
    """One kind of finding in both languages."""

    en: str
    en_cure: str
    zh: str
    zh_cure: str


_LOOK = "Look at the episode: it may be of another task, cut off, or two in one. Leave it out if so."
_LOOK_ZH = "请查看该回合：它可能属于别的任务、被截断，或由两个回合合成。若是如此，请去掉它。"
_LEARNING = "In the log of a run that learns this is well; in demonstrations, look at the longest and the shortest."
_LEARNING_ZH = "在训练产生的日志中这是正常的；在示教数据中，请查看最长和最短的回合。"
_SHIFT = (
    "Shift its frames by as much, or record each with the state of the same moment; a latency that is the same when "
    "the "
    "policy acts does no harm."
)
_SHIFT_ZH = "把图像移动同样的步数，或与同一时刻的状态一起记录；如果策略执行时延迟相同，则没有影响。"
_LOST = "Frames were lost or recorded twice: leave the episode out (in a log: hilt data label --bad)."
_LOST_ZH = "有图像丢失或被重复记录：请去掉该回合（日志中：hilt data label --bad）。"
_WAIT = "Cut them off (in a log: hilt data trim): a policy that imitates them learns to wait."
_WAIT_ZH = "请剪掉这些步（日志中：hilt data trim）：模仿它们的策略会学会等待。"
_UNIT = "Convert these episodes to the unit of the others."
_UNIT_ZH = "请将这些回合换算为与其他回合相同的单位。"
_COUNT = (
    "Files may be missing: fetch the dataset again. If it is as it should be, correct its metadata, or write them anew "
    "with: hilt data convert."
)
_COUNT_ZH = "可能缺少文件：请重新获取数据集。如果数据集没有问题，请更正元数据，或用 hilt data convert 重新写入。"


def _mixed(units: str, units_zh: str) -> FindingText:
    return FindingText(
        f"Dimension {{dimensions}} mixes {units}: {{odd:,}} of {{episodes:,}} episodes differ from the others by their "
        "factor, the first of them {names}.",
        _UNIT,
        f"第 {{dimensions}} 维混用了{units_zh}：{{episodes:,}} 个回合中有 {{odd:,}} 个与其他回合相差该倍数，"
        "最先出现的是 {names}。",
        _UNIT_ZH,
    )


def _outlier(name: str, name_zh: str) -> FindingText:
    return FindingText(
        f"The {name} is {{value:.4g}}; the median of the {{episodes:,}} episodes of the task is {{median:.4g}}.",
        _LOOK,
        f"{name_zh}为 {{value:.4g}}；该任务 {{episodes:,}} 个回合的中位数为 {{median:.4g}}。",
        _LOOK_ZH,
    )


def _spread(name: str, name_zh: str) -> FindingText:
    return FindingText(
        f"The {name} varies: {{count:,}} of the {{episodes:,}} episodes of the task are far from the median of "
        "{median:.4g}, up to {value:.4g}.",
        _LEARNING,
        f"{name_zh}差异较大：该任务 {{episodes:,}} 个回合中有 {{count:,}} 个远离中位数 {{median:.4g}}，最远为 "
        f"{{value:.4g}}。",
        _LEARNING_ZH,
    )


TEXTS: dict[str, FindingText] = {
    "files.log": FindingText("{damage}.", "{cure}.", "{damage}。", "{cure}。"),
    "files.dataset": FindingText(
        "{error}",
        "Restore the file from a copy; until then, the rest of the dataset cannot be used.",
        "{error}",
        "请从备份恢复该文件；在此之前，数据集的其余部分无法使用。",
    ),
    "files.episode": FindingText(
        "{error}",
        "Restore the file from a copy; until then, the episode cannot be used.",
        "{error}",
        "请从备份恢复该文件；在此之前，该回合无法使用。",
    ),
    "counts.unlisted": FindingText(
        "{sentence}",
        "The rest is not read: correct the metadata, or fetch them again.",
        "{sentence}",
        "其余部分不会被读取：请更正元数据，或重新获取。",
    ),
    "counts.episodes": FindingText(
        "The metadata state {stated:,} episodes, and {found:,} were read.",
        _COUNT,
        "元数据中有 {stated:,} 个回合，实际读取了 {found:,} 个。",
        _COUNT_ZH,
    ),
    "counts.steps": FindingText(
        "The metadata state {stated:,} steps, and {found:,} were read.",
        _COUNT,
        "元数据中有 {stated:,} 步，实际读取了 {found:,} 步。",
        _COUNT_ZH,
    ),
    "values.not_finite": FindingText(
        "{count:,} of {total:,} steps have a value that is not a number or infinite.",
        "Leave out the column (hilt data convert --drop) or the episode; one such value makes a network's weights "
        "useless.",
        "{total:,} 步中有 {count:,} 步含有非数（NaN）或无穷大的值。",
        "请去掉该列（hilt data convert --drop）或该回合；一个这样的值就会毁掉网络的权重。",
    ),
    "ends.none": FindingText(
        "The episode has no end: its last step is neither terminated nor truncated.",
        "If its recording was stopped, mark the last step as truncated (in a log: hilt data label LOG NUMBER "
        "truncated=true --first {last}); else steps are missing.",
        "该回合没有结束：最后一步既不是 terminated 也不是 truncated。",
        "如果是录制被中止，请将最后一步标为 truncated（日志中：hilt data label LOG NUMBER truncated=true --first "
        "{last}）；否则说明缺少步。",
    ),
    "ends.newest": FindingText(
        "The newest episode has no end: the run or recording was stopped in it.",
        "Nothing is wrong with the others. To count it as cut short: hilt data label LOG NUMBER truncated=true --first "
        "{last}.",
        "最新的回合没有结束：训练或录制在其中被停止。",
        "其他回合没有问题。若要将它视为被截断：hilt data label LOG NUMBER truncated=true --first {last}。",
    ),
    "ends.early": FindingText(
        "The episode goes on after {count:,} of its steps that are marked as an end.",
        "Several episodes are stored as one, or the mark stands for success: cut the episode there, or remove the "
        "marks "
        "before its last step.",
        "有 {count:,} 步被标为结束，但该回合在其后仍在继续。",
        "多个回合被存成了一个，或该标记表示成功：请在那里切开该回合，或去掉最后一步之前的标记。",
    ),
    "language.steps": FindingText(
        "{count:,} of {total:,} steps have no instruction.",
        "Give these steps the instruction of the others, or cut them off.",
        "{total:,} 步中有 {count:,} 步没有指令。",
        "请为这些步补上与其他步相同的指令，或剪掉它们。",
    ),
    "language.none": FindingText(
        "No episode has an instruction.",
        "A vision-language-action policy needs one: add it in a log with: hilt data label LOG NUMBERS --instruction "
        "TEXT.",
        "没有任何回合带有指令。",
        "视觉-语言-动作策略需要指令：可在日志中添加：hilt data label LOG NUMBERS --instruction TEXT。",
    ),
    "language.episode": FindingText(
        "The episode has no instruction, and {others:,} others have one.",
        "Add it (in a log: hilt data label LOG NUMBER --instruction TEXT), or leave the episode out.",
        "该回合没有指令，而其他 {others:,} 个回合有。",
        "请添加指令（日志中：hilt data label LOG NUMBER --instruction TEXT），或去掉该回合。",
    ),
    "duplicates.same": FindingText(
        "The episode has the same observations and actions in every step as {other}.",
        "Remove one of them (in a log: hilt data delete): it counts twice in training, and a copy in a validation "
        "split "
        "hides overfitting.",
        "该回合每一步的观测和动作都与 {other} 相同。",
        "请删除其中一个（日志中：hilt data delete）：它在训练中会被计算两次，验证集中的副本会掩盖过拟合。",
    ),
    "timestamps.back": FindingText(
        "The clock does not rise after {count:,} of {total:,} steps.",
        "Sort the steps by their time, or leave the episode out: what was seen and done is out of order.",
        "在 {total:,} 步中有 {count:,} 步之后时钟没有前进。",
        "请按时间对步排序，或去掉该回合：观测和动作的顺序已乱。",
    ),
    "timestamps.uneven": FindingText(
        "The clock is uneven: one of ten intervals is longer than {long:.4g}, the usual one is {usual:.4g}.",
        "Record at a fixed rate, if the robot is to act at one.",
        "时钟不均匀：十分之一的间隔长于 {long:.4g}，通常为 {usual:.4g}。",
        "如果机器人应以固定频率动作，请以固定频率录制。",
    ),
    "timestamps.unpaced": FindingText(
        "The steps have no fixed rate: in {count:,} of {episodes:,} episodes, intervals differ within the episode or "
        "from those of the others ({low:.4g} to {high:.4g} in the usual ones).",
        "In a simulation that waits for no clock this is well, and lost steps cannot be told; on a robot, record at a "
        "fixed rate.",
        "步没有固定频率：{episodes:,} 个回合中有 {count:,} 个，其间隔在回合内或回合之间不同（通常为 {low:.4g} 至 "
        "{high:.4g}）。",
        "在不按时钟运行的仿真中这是正常的，且无法判断是否丢步；在机器人上，请以固定频率录制。",
    ),
    "timestamps.gap": FindingText(
        "{count:interval is|intervals are} too long: up to {longest:.4g} instead of {usual:.4g}.",
        "Steps are missing: cut the episode there, or leave it out (in a log: hilt data trim, or label --bad).",
        "有 {count:,} 个间隔过长：最长为 {longest:.4g}，而通常为 {usual:.4g}。",
        "缺少步：请在那里切开该回合，或去掉它（日志中：hilt data trim 或 label --bad）。",
    ),
    "timestamps.rate": FindingText(
        "The clock has {rate:.4g} steps per second, and the metadata state {stated:g}.",
        "Correct the rate (fps) in the metadata: videos and action chunks are timed by it.",
        "时钟为每秒 {rate:.4g} 步，而元数据中为 {stated:g}。",
        "请更正元数据中的频率（fps）：视频和动作块的时间由它决定。",
    ),
    "jerk.jump": FindingText(
        "The state jumps in dimension {dimensions}, by far more than it moves in any other step.",
        "A reset or a lost stretch lies within the episode: cut it there (in a log: hilt data trim).",
        "状态的第 {dimensions} 维发生跳变，远大于其他任何一步的变化。",
        "回合中含有一次复位或丢失的一段：请在那里切开（日志中：hilt data trim）。",
    ),
    "jerk.tremble": FindingText(
        "The motion trembles: its jerk is {factor:.1f} times that of the other episodes.",
        "Look at the episode: the operator's device, the control or the sensor was disturbed. Smooth it, or leave it "
        "out.",
        "运动抖动：其急动度是其他回合的 {factor:.1f} 倍。",
        "请查看该回合：操作设备、控制或传感器受到了干扰。请平滑它，或去掉它。",
    ),
    "idle.all": FindingText(
        "Nothing moves in the {count:,} steps of the episode.",
        "Leave the episode out, unless standing still is the task.",
        "该回合的 {count:,} 步中没有任何运动。",
        "请去掉该回合，除非任务就是保持不动。",
    ),
    **{
        f"idle.{where}": FindingText(
            f"The robot {where} with {{count:,}} of {{total:,}} steps in which nothing moves.",
            _WAIT,
            f"机器人在{where_zh}有 {{count:,}} 步没有任何运动（共 {{total:,}} 步）。",
            _WAIT_ZH,
        )
        for where, where_zh in (("begins", "开头"), ("ends", "结尾"), ("stops", "中途"))
    },
    "black-frames.black": FindingText(
        "{count:,} of {total:,} frames are black.",
        "The camera was covered, or delivered nothing: cut these steps off (in a log: hilt data trim), or leave the "
        "camera out (hilt data convert --drop).",
        "{total:,} 帧中有 {count:,} 帧是黑的。",
        "相机被遮挡或没有输出：请剪掉这些步（日志中：hilt data trim），或去掉该相机（hilt data convert --drop）。",
    ),
    "frozen-frames.stretches": FindingText(
        "The camera repeats a frame in {count:stretch|stretches} of up to {longest:step|steps} while the robot moves.",
        "The camera stood still or its frames were lost: cut these steps off, or leave the episode out (in a log: hilt "
        "data trim, or label --bad).",
        "机器人运动时，相机有 {count:,} 段重复同一帧，最长 {longest:,} 步。",
        "相机卡住或图像丢失：请剪掉这些步，或去掉该回合（日志中：hilt data trim 或 label --bad）。",
    ),
    "frozen-frames.slow": FindingText(
        "{percent:.0f}% of the frames repeat the one before while the robot moves: the camera has about {frames:.1f} "
        "frames per step.",
        "Record at the rate of the camera or below; a policy sees no motion in such frames.",
        "机器人运动时，{percent:.0f}% 的帧与前一帧相同：相机每步约 {frames:.1f} 帧。",
        "请以相机的频率或更低的频率录制；策略在这样的帧中看不到运动。",
    ),
    "camera-sync.behind": FindingText(
        "The camera is {lag:step|steps} behind the states in all episodes together.",
        _SHIFT,
        "总体上，相机比状态落后 {lag} 步。",
        _SHIFT_ZH,
    ),
    "camera-sync.ahead": FindingText(
        "The camera is {lag:step|steps} ahead of the states in all episodes together.",
        _SHIFT,
        "总体上，相机比状态超前 {lag} 步。",
        _SHIFT_ZH,
    ),
    "camera-sync.one_behind": FindingText(
        "The camera is {lag:step|steps} behind the states, unlike in the other episodes.",
        _LOST,
        "与其他回合不同，相机比状态落后 {lag} 步。",
        _LOST_ZH,
    ),
    "camera-sync.one_ahead": FindingText(
        "The camera is {lag:step|steps} ahead of the states, unlike in the other episodes.",
        _LOST,
        "与其他回合不同，相机比状态超前 {lag} 步。",
        _LOST_ZH,
    ),
    "constant-actions.episode": FindingText(
        "All {count:,} actions are the same, and the robot moves.",
        "The actions were not recorded: leave the episode out (in a log: hilt data label --bad).",
        "全部 {count:,} 个动作都相同，而机器人在运动。",
        "动作没有被记录：请去掉该回合（日志中：hilt data label --bad）。",
    ),
    "constant-actions.all": FindingText(
        "No action of any episode differs from the others.",
        "The actions were not recorded.",
        "所有回合的动作都相同。",
        "动作没有被记录。",
    ),
    "constant-actions.dimension": FindingText(
        "Dimension {dimensions} of {width} has one value in all episodes.",
        "If it is not used, that is well; normalization must not divide by its standard deviation, which is 0.",
        "{width} 维中的第 {dimensions} 维在所有回合中只有一个值。",
        "如果没有使用它，则没有问题；归一化时不能除以它的标准差，因为它是 0。",
    ),
    "saturated-actions.limit": FindingText(
        "Dimension {dimension} is at its limit of {low:g} or {high:g} in {percent:.0f}% of the steps; first in "
        "{place}.",
        "Actions were clipped: the robot did something else than was commanded, or could not follow. Record the "
        "actions "
        "that were executed, or widen their limits.",
        "第 {dimension} 维在 {percent:.0f}% 的步中处于极限 {low:g} 或 {high:g}；最先出现于 {place}。",
        "动作被截断：机器人执行的与命令不同，或无法跟随。请记录实际执行的动作，或放宽其范围。",
    ),
    "shifted-actions.past": FindingText(
        "Actions belong to the motion of {lag:step|steps} before: the correlation of dimension {action} of the actions "
        "and {state} of {column} is {strength:.2f} there.",
        "A policy would learn to repeat what has happened. Store each action with the state in which it was chosen: "
        "shift the actions by {lag:step|steps} toward the beginning.",
        "动作对应的是 {lag} 步之前的运动：动作第 {action} 维与 {column} 第 {state} 维在那里的相关系数为 "
        "{strength:.2f}。",
        "策略会学会重复已经发生的动作。请将每个动作与选择它时的状态一起保存：把动作向开头移动 {lag} 步。",
    ),
    "shifted-actions.late": FindingText(
        "Actions show in the states {lag:step|steps} later than in the next state: the correlation of dimension "
        "{action} "
        "of the actions and {state} of {column} is {strength:.2f} there.",
        "This is the latency of the robot, or the actions are stored too early. If it is the latency, nothing is "
        "wrong.",
        "动作在状态中的体现比下一状态晚 {lag} 步：动作第 {action} 维与 {column} 第 {state} 维在那里的相关系数为 "
        "{strength:.2f}。",
        "这是机器人的延迟，或动作保存得过早。如果是延迟，则没有问题。",
    ),
    "outliers.length": _outlier("length", "长度"),
    "outliers.return": _outlier("return", "回报"),
    "outliers.actions": _outlier("size of the actions", "动作幅度"),
    "outliers.many_length": _spread("length", "长度"),
    "outliers.many_return": _spread("return", "回报"),
    "outliers.many_actions": _spread("size of the actions", "动作幅度"),
    "units.degrees": _mixed("degrees and radians", "度和弧度"),
    "units.millimeters": _mixed("millimeters and meters", "毫米和米"),
    "units.centimeters": _mixed("centimeters and meters", "厘米和米"),
    "rotations.flip": FindingText(
        "A quaternion changes its sign {count:time|times}; both signs are the same rotation.",
        "Keep the sign for which the product with the quaternion of the step before is positive.",
        "四元数改变了 {count:,} 次符号；两种符号表示同一旋转。",
        "请保留与前一步四元数的乘积为正的符号。",
    ),
    "rotations.wrap": FindingText(
        "Dimension {dimension} is an angle that wraps {count:time|times}: it jumps by a whole turn.",
        "Unwrap it, or store its sine and cosine: a mean of both ends points the other way.",
        "第 {dimension} 维是角度，回绕了 {count:,} 次：它跳变了一整圈。",
        "请展开它，或保存其正弦和余弦：两端的平均值指向相反的方向。",
    ),
    "rotations.length": FindingText(
        "Dimensions {first} to {last} are a quaternion in {episodes:,} episodes, and not of length 1 in {others:,}, "
        "the "
        "first of them {example}.",
        "Store rotations in one form, and normalize quaternions.",
        "第 {first} 至 {last} 维在 {episodes:,} 个回合中是四元数，在 {others:,} 个回合中长度不为 1，最先出现的是 "
        "{example}。",
        "请以同一形式保存旋转，并对四元数归一化。",
    ),
    "rotations.order": FindingText(
        "Dimensions {first} to {last} are a quaternion in another order of its components than in most episodes.",
        "Store quaternions in one order, x y z w or w x y z.",
        "第 {first} 至 {last} 维是四元数，但分量顺序与多数回合不同。",
        "请以同一顺序保存四元数：x y z w 或 w x y z。",
    ),
    "statistics.differ": FindingText(
        "The stored statistics do not fit the data: {wrong}.",
        "Compute them again, or write them anew with hilt data convert: with wrong ones, a policy sees and does "
        "something "
        "else than was recorded.",
        "保存的统计量与数据不符：{wrong}。",
        "请重新计算，或用 hilt data convert 重新写入：统计量有误时，策略看到和执行的与记录的不同。",
    ),
    "statistics.size": FindingText(
        "{name} has {given} numbers for {width} dimensions", "", "{name} 有 {given} 个数，而维数为 {width}", ""
    ),
    "statistics.value": FindingText(
        "{name} of dimension {dimension} is {value:.4g}, stored is {stored:.4g}",
        "",
        "第 {dimension} 维的 {name} 为 {value:.4g}，保存的为 {stored:.4g}",
        "",
    ),
}
"""By check and kind. Names of commands, columns and files, and errors of readers, are the same in both languages."""
PLACES = {
    "en": {"episode": "episode {0}", "trajectory": "trajectory {0}", "step": "step {0}", "steps": "steps {0}-{1}"},
    "zh": {"episode": "回合 {0}", "trajectory": "轨迹 {0}", "step": "第 {0} 步", "steps": "第 {0}-{1} 步"},
}
DATASET = {"en": "dataset", "zh": "数据集"}


def render(text: str, values: Mapping[str, object], language: str = "en") -> tuple[str, str]:
    """What was found and what to do, in a language."""
    chosen, formatter = TEXTS[text], _Formatter(language)
    what, cure = (chosen.en, chosen.en_cure) if language == "en" else (chosen.zh, chosen.zh_cure)
    return formatter.vformat(what, (), values), formatter.vformat(cure, (), values)


def render_place(label: str, first: int | None, last: int | None, column: str, language: str = "en") -> str:
    """A place in a dataset: ``episode 3, steps 10-14, observations/front``."""
    parts = [render_label(label, language), column]
    if first is not None:
        one = last is None or last == first
        parts.insert(1, PLACES[language]["step" if one else "steps"].format(first, last))
    return BETWEEN[language].join(part for part in parts if part) or DATASET[language]


def render_label(label: str, language: str) -> str:
    """The name of an episode in the terms of its format, such as ``trajectory 7``."""
    kind, _, number = label.partition(" ")
    return PLACES[language][kind].format(number) if number.isdecimal() and kind in PLACES[language] else label


class _Formatter(string.Formatter):
    """Fills values into a text. Nothing but names and formats may stand in it."""

    def __init__(self, language: str):
        self._language = language

    def get_field(self, field_name: str, args: object, kwargs: Mapping[str, object]) -> tuple[object, str]:
        return kwargs[field_name], field_name

    def format_field(self, value: object, format_spec: str) -> str:
        if isinstance(value, list):
            items = [self._item(item) for item in value[:MAX_LISTED]]
            listed, more = BETWEEN[self._language].join(items), len(value) - len(items)
            return MORE[self._language].format(listed=listed, more=more) if more else listed
        if isinstance(value, str):
            return render_label(value, self._language)
        if value is None:  # what is not finite
            return "nan"
        if "|" in format_spec:
            one, several = format_spec.split("|")
            return f"{value:,} {one if value == 1 else several}"
        return str(super().format_field(value, format_spec))

    def _item(self, item: Any) -> str:
        """A value of a list, which may be a text with values of its own."""
        if isinstance(item, dict):
            return render(item["text"], item, self._language)[0]
        return render_label(str(item), self._language)
