"""The names of edits: in English as `hilt.replay.Edits` writes them into a log, and in Chinese."""

from __future__ import annotations

import re

EDIT_WORDS: dict[str, tuple[str, str]] = {
    "edit.undo": ("undo: {action}", "撤销：{action}"),
    "edit.success": ("label success", "标注为成功"),
    "edit.failure": ("label failure", "标注为失败"),
    "edit.unknown": ("label unknown", "标注为未知"),
    "edit.success_reward": ("label success, reward {value}", "标注为成功，奖励 {value}"),
    "edit.failure_reward": ("label failure, reward {value}", "标注为失败，奖励 {value}"),
    "edit.unknown_reward": ("label unknown, reward {value}", "标注为未知，奖励 {value}"),
    "edit.bad": ("mark as bad", "标为坏数据"),
    "edit.good": ("mark as good", "标为好数据"),
    "edit.tag": ("tag {name}", "添加标签 {name}"),
    "edit.untag": ("untag {name}", "移除标签 {name}"),
    "edit.instruction": ("instruction {text}", "指令 {text}"),
    "edit.fact": ("fact {facts}", "事实 {facts}"),
    "edit.frame_success": ("frame label success at step {step}", "第 {step} 步的帧标注为成功"),
    "edit.frame_failure": ("frame label failure at step {step}", "第 {step} 步的帧标注为失败"),
    "edit.frame_unknown": ("frame label unknown at step {step}", "第 {step} 步的帧标注为未知"),
    "edit.value": ("value model {model}", "价值模型 {model}"),
    "edit.mark": ("mark {name} at step {step}", "在第 {step} 步标记 {name}"),
    "edit.unmark": ("unmark {name} at step {step}", "移除第 {step} 步的标记 {name}"),
    "edit.reward": ("reward {value} at step {step}", "第 {step} 步的奖励为 {value}"),
    "edit.values": ("{column} from step {step} on", "从第 {step} 步起的 {column}"),
    "edit.trim_tail": ("trim the beginning to {last}", "裁剪：保留开头至第 {last} 步"),
    "edit.trim_head": ("trim {first} to the end", "裁剪：保留第 {first} 步至结尾"),
    "edit.trim": ("trim {first} to {last}", "裁剪：保留第 {first} 至 {last} 步"),
    "edit.show_all": ("show all steps", "恢复所有步"),
    "edit.delete": ("delete", "删除"),
    "edit.split": ("split at {at}", "在 {at} 处切分"),
    "edit.join": ("join {episodes}", "合并回合 {episodes}"),
}
"""The first that fits is taken."""
_FIELDS = {"step": r"-?\d+", "first": r"-?\d+", "last": r"-?\d+", "value": r"\S+"}


def _pattern(english: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", english)
    named = [f"(?P<{one}>{_FIELDS.get(one, '.*')})" if place % 2 else re.escape(one) for place, one in enumerate(parts)]
    return re.compile("".join(named), re.DOTALL)


_PATTERNS = [(_pattern(english), chinese) for english, chinese in EDIT_WORDS.values()]


def edit_in_chinese(action: str) -> str:
    """The name of an edit in Chinese; one that is not known stays as it is."""
    for pattern, chinese in _PATTERNS:
        if match := pattern.fullmatch(action):
            values = match.groupdict()
            if "action" in values:
                values["action"] = edit_in_chinese(values["action"])
            return chinese.format(**values)
    return action
