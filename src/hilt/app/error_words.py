"""The errors that the pages themselves make, in English and in Chinese. Those of other parts are shown as they are."""

from __future__ import annotations

from hilt.core.errors import ConfigError

ERROR_WORDS: dict[str, tuple[str, str]] = {
    "error.view_only": (
        "hilt open --view only shows: nothing can be changed or started.",
        "hilt open --view 只能查看：不能更改或启动任何内容。",
    ),
    "error.no_data": (
        "There is no such run, log or dataset any more below the folders of hilt open: choose another one.",
        "hilt open 的文件夹下已没有此训练、日志或数据集：请选择其他数据。",
    ),
    "error.no_episode": (
        "There is no episode {number} any more: go back to the list.",
        "回合 {number} 已不存在：请返回列表。",
    ),
    "error.no_view": ("There is no view {name} any more: reload the page.", "视图 {name} 已不存在：请刷新此页面。"),
    "error.view_name": (
        "name of a view {name}: expected 1 to {most} characters.",
        "视图名称 {name}：应为 1 至 {most} 个字符。",
    ),
    "error.view_count": (
        "{path}: {most} views are saved; remove one first.",
        "{path}：已保存 {most} 个视图；请先删除一个。",
    ),
    "error.export_changed": (
        "{command}: the episodes to export have changed. Open the export once more.",
        "{command}：要导出的回合已改变。请重新打开导出。",
    ),
    "error.export_numbers": (
        "{count} episodes are too many single numbers for one command: narrow the filter or select fewer, or tag them "
        "and export the tag.",
        "{count} 个回合的编号太多，一条命令放不下：请缩小筛选范围或少选一些，或为它们添加标签并导出该标签。",
    ),
    "error.edit_numbers": (
        "{count} episodes are too many single numbers for one command: select all that a filter shows, or tag them and "
        "use the tag: --where tag=NAME.",
        "{count} 个回合的编号太多，一条命令放不下：请选择筛选出的全部回合，或为它们添加标签并使用该标签："
        "--where tag=NAME。",
    ),
    "error.not_edited": (
        "{path} is a dataset of the format {format}, which is not edited. Copy it to a log first: hilt data convert "
        "{path} {path}-log",
        "{path} 是 {format} 格式的数据集，不能编辑。请先复制为日志：hilt data convert {path} {path}-log",
    ),
    "error.copying": (
        "{path}: another split or join takes more than {seconds} s; try again.",
        "{path}：另一个切分或合并已超过 {seconds} 秒；请重试。",
    ),
    "error.log_in_use": (
        "splitting and joining add episodes to the log, and a run or recording is writing to it: stop it first. "
        "({why})",
        "切分和合并会向日志添加回合，而训练或录制正在写入此日志：请先停止它。（{why}）",
    ),
    "error.reward": (
        "reward {value}: expected a number, such as 0.5.",
        "奖励 {value}：应为一个数，例如 0.5。",
    ),
    "error.limit": (
        "{given}: expected a limit and a number, of {known}.",
        "{given}：应为一个上限及其数值，可用：{known}。",
    ),
    "error.not_at_work": ("{run}: that process is not at work any more.", "{run}：该进程已不在运行。"),
    "error.still_running": (
        "{command} is still running: wait until it has ended.",
        "{command} 仍在运行：请等待它结束。",
    ),
    "error.not_scored": ("no frames were scored yet.", "还没有评分的帧。"),
    "error.no_classifier": ("there is no classifier yet.", "还没有分类器。"),
    "error.classifier_gone": (
        "There is no such classifier any more: choose another one.",
        "此分类器已不存在：请选择其他分类器。",
    ),
    "error.not_from_here": (
        "{command}: this is not started from here; type it in a terminal.",
        "{command}：不能从此处启动；请在终端中输入。",
    ),
    "error.setting": (
        "{given}: expected a setting of hilt train classifier and its value, such as steps=150.",
        "{given}：应为 hilt train classifier 的一个设置及其值，例如 steps=150。",
    ),
    "error.threshold": (
        "threshold={threshold}: expected a probability between 0 and 1.",
        "threshold={threshold}：应为 0 与 1 之间的概率。",
    ),
}


class PageError(ConfigError):
    """Raised when a page cannot do what it is asked for. Its text is that of the catalog, in English; `Words.error` has
    it in the language of the page."""

    def __init__(self, key: str, **values: object):
        super().__init__(ERROR_WORDS[key][0].format(**values))
        self.key, self.values = key, values
