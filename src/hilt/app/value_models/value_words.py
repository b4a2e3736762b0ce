"""The words of the page of value models, in English and in Chinese; a part of the catalog `hilt.app.words`."""

from __future__ import annotations

VALUE_WORDS: dict[str, tuple[str, str]] = {
    "nav.value": ("Value model", "价值模型"),
    "value_model.empty": (
        "No value model was found below {paths}. These commands train one and open it:",
        "在 {paths} 下没有找到价值模型。用这些命令训练并打开：",
    ),
    "value_model.gone": ("There is no such model any more: choose another one.", "该模型已不存在：请选择另一个。"),
    "value_model.facts": (
        "Trained on {trained} episodes ({successes} successes). Judged on {held} others ({held_successes} successes) "
        "from {states} initial states, by which nothing was chosen.",
        "用 {trained} 个回合训练（{successes} 个成功）。用另外 {held} 个回合评判（{held_successes} 个成功），"
        "来自 {states} 个初始状态，未用它们做任何选择。",
    ),
    "value_model.by_episode": (
        "Too few initial states are known: episodes on both sides may have begun alike.",
        "已知的初始状态太少：两侧的回合可能以相同状态开始。",
    ),
    "value_model.ranking": ("Does it rank?", "能否排序？"),
    "value_model.ranking_about": (
        "AUC: how probable it is that, after this share of an episode, a success has a higher value than a failure. "
        "0.5 is chance.",
        "AUC：在回合进行到该比例时，成功的价值高于失败的概率。0.5 为随机。",
    ),
    "value_model.after": ("after {share}", "{share} 之后"),
    "value_model.interval": ("95% interval", "95% 区间"),
    "value_model.within": ("within tasks", "任务之内"),
    "value_model.error": ("Calibration error", "校准误差"),
    "value_model.reliability": ("Do its probabilities come true?", "概率是否属实？"),
    "value_model.reliability_about": (
        "Calibration error {error} of all three shares together. Near the dashed line is good. Large circles are many "
        "predictions.",
        "三个比例合计的校准误差为 {error}；越接近虚线越好，圆越大预测越多。",
    ),
    "value_model.predicted": ("predicted probability of success", "预测的成功概率"),
    "value_model.observed": ("share that succeeded", "实际成功的比例"),
    "value_model.group": (
        "predicted {predicted}: {observed} of {count} succeeded",
        "预测 {predicted}：{count} 个中 {observed} 成功",
    ),
    "value_model.tasks": ("By task", "按任务"),
    "value_model.task": ("Task", "任务"),
    "value_model.unnamed": ("unnamed", "未命名"),
    "value_model.episodes": ("Episodes", "回合"),
    "value_model.successes": ("Successes", "成功"),
    "value_model.worst": ("Held-out episodes that it judges worst", "评判最差的留出回合"),
    "value_model.worst_about": (
        "Those whose outcome it expects least half-way come first; the curve is the probability of success. Each leads "
        "to its episode, where value, advantage and progress are below the video.",
        "在一半处最出乎其预料的回合排在最前；曲线为成功概率。点击可打开该回合，视频下方有价值、优势和进度曲线。",
    ),
    "value_model.episode": ("episode {number}", "回合 {number}"),
    "value_model.success": ("succeeded", "成功"),
    "value_model.failure": ("failed", "失败"),
    "value_model.wrong": ("misjudged", "误判"),
    "value_model.at": ("p(success) {first}, {half}, {last}", "成功概率 {first}、{half}、{last}"),
    "value_model.use": ("Use it", "使用"),
    "value_model.no_use": (
        "It ranks no better than chance: no command is suggested.",
        "其排序不比随机好：不建议任何命令。",
    ),
}
