"""The catalog of words: every text of the app in English and in Chinese."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hilt.app.classifiers.classifier_words import CLASSIFIER_WORDS
from hilt.app.episodes.edit_words import EDIT_WORDS, edit_in_chinese
from hilt.app.error_words import ERROR_WORDS, PageError
from hilt.app.run_words import METRIC_WORDS, RUN_NAMES, RUN_TEXTS, event_in_chinese
from hilt.app.value_models.value_words import VALUE_WORDS

LANGUAGES = {"en": "English", "zh": "中文"}
"""The languages of the app, each by its own name; the order is that of the texts below"""

WORDS: dict[str, tuple[str, str]] = {
    **CLASSIFIER_WORDS,
    **EDIT_WORDS,
    **ERROR_WORDS,
    **VALUE_WORDS,
    # navigation and frame
    "nav.runs": ("Runs", "训练"),
    "nav.label": ("Main navigation", "主导航"),
    "frame.skip": ("Skip to the content", "跳到内容"),
    "frame.language": ("Language", "语言"),
    "frame.theme": ("Theme: {theme}", "主题：{theme}"),
    "frame.help": ("Keyboard help", "键盘帮助"),
    "frame.view": ("read-only", "只读"),
    "frame.close": ("Close", "关闭"),
    "frame.lost": ("hilt open does not answer.", "hilt open 没有响应。"),
    "frame.lost_hint": (
        "It was ended, or started again with another address: see the terminal in which it runs, and open the address "
        "that it prints.",
        "它已结束，或已用新的地址重新启动：请查看运行它的终端，并打开其中显示的地址。",
    ),
    "frame.no_page": ("There is no such page.", "没有此页面。"),
    "frame.no_page_hint": ("Choose one in the menu above, or go to the runs.", "请在上方菜单中选择，或转到训练列表。"),
    "token.title": ("This page needs its token", "此页面需要令牌"),
    "token.hint": (
        "Open the whole address that hilt open has printed in its terminal, with ?token=. It is another one each time "
        "that hilt open is started.",
        "请打开 hilt open 在终端中显示的完整地址（含 ?token=）。每次启动 hilt open，地址都会改变。",
    ),
    "sign_in.title": ("Sign in", "登录"),
    "sign_in.password": ("Password", "密码"),
    "sign_in.enter": ("Open", "打开"),
    "sign_in.wrong": ("This is not the password.", "密码不正确。"),
    "sign_in.wait": (
        "Too many wrong tries: wait {seconds} seconds, then try again.",
        "错误次数过多：请等待 {seconds} 秒后再试。",
    ),
    "theme.auto": ("as the system", "跟随系统"),
    "theme.light": ("light", "浅色"),
    "theme.dark": ("dark", "深色"),
    "command.copy": ("Copy this command", "复制此命令"),
    "command.run": ("Run", "运行"),
    "command.cancel": ("Cancel", "取消"),
    "command.confirm": ("Run this command?", "运行此命令？"),
    "command.ended": ("It ended with exit code {code}.", "已结束，退出码 {code}。"),
    "command.stop": ("Stop", "停止"),
    "command.resume": ("Resume", "继续"),
    "command.go_back": ("Resume from the last good checkpoint", "从警报之前的检查点继续"),
    "command.limits": ("Other limits, such as max_steps=2000", "其他上限，例如 max_steps=2000"),
    "command.evaluate": ("Evaluate, with videos", "评估并录制视频"),
    "command.plot": ("Draw the curves as files", "将曲线绘制成文件"),
    "keys.cursor": ("Move the cursor of all charts (in a chart)", "移动所有图表的光标（在图表中）"),
    "keys.zoom": ("Show the whole range again (in a chart)", "恢复完整范围（在图表中）"),
    "keys.help": ("Show or hide this help", "显示或隐藏本帮助"),
    "keys.filter": ("Go to the filter", "跳到筛选框"),
    "keys.runs": ("Go to the runs", "转到训练列表"),
    # the table of runs
    "runs.title": ("Runs", "训练"),
    "runs.empty": (
        "No run was found below {paths}. This command makes one:",
        "在 {paths} 下没有找到训练。用此命令开始一个：",
    ),
    "runs.empty_open": ("Then open the folder that it names:", "然后打开它给出的文件夹："),
    "runs.count": ("{count} runs below {paths}", "{paths} 下共 {count} 个训练"),
    "runs.filter": ("Filter by name, recipe, task or state", "按名称、配方、任务或状态筛选"),
    "runs.compare": ("Compare the selected runs", "对比所选训练"),
    "runs.compare_hint": ("Select two to eight runs to compare them.", "选择两到八个训练进行对比。"),
    "runs.none": ("No run fits the filter.", "没有符合筛选的训练。"),
    "runs.damaged": ("Folders that cannot be read", "无法读取的文件夹"),
    "runs.reading": ("Reading the runs …", "正在读取训练……"),
    "column.name": ("Run", "训练"),
    "column.recipe": ("Recipe", "配方"),
    "column.state": ("State", "状态"),
    "column.success": ("Success, 95% interval", "成功率（95% 区间）"),
    "column.steps": ("Steps", "步数"),
    "column.updates": ("Updates", "更新"),
    "column.age": ("Last record", "最近记录"),
    "column.disk": ("Disk", "磁盘"),
    "kind.hil": ("with a person", "人在回路"),
    "kind.vla": ("post-training", "后训练"),
    "kind.sft": ("fine-tuning", "微调"),
    "state.learning": ("learning", "学习中"),
    "state.waiting": ("waiting", "等待中"),
    "state.ended": ("ended", "已结束"),
    "state.failed": ("failed", "出错终止"),
    "state.died": ("died", "异常终止"),
    "state.stale": ("stale", "无响应"),
    "state.unreachable": ("does not answer", "无法连接"),
    "run.remote": (
        "This run is on another machine: open {address} for its evaluations, logs, episodes and commands.",
        "此训练在另一台机器上：评估、日志、回合和命令请打开 {address}。",
    ),
    "state.unknown": ("unknown", "未知"),
    "why.silent": ("{who} is at work, and wrote no metrics for {age}", "{who} 仍在运行，但已有 {age} 没有写入指标"),
    "why.gone": (
        "last sign of life {when}; probably killed: out of memory, kill -9 or a power cut",
        "最后活动时间 {when}；可能被强制终止：内存不足、kill -9 或断电",
    ),
    "why.no_process": ("no process is at work here, and nothing says how it ended", "没有进程在运行，也没有结束记录"),
    "why.begins": ("no step was made yet", "还没有任何步"),
    "success.evaluation": (
        "{share} [{low}, {high}] of {episodes}, {split}",
        "{share} [{low}, {high}]，{episodes} 个回合，{split}",
    ),
    "success.training": (
        "{share} [{low}, {high}] of the last {episodes}",
        "{share} [{low}, {high}]，最近 {episodes} 个回合",
    ),
    "age.seconds": ("{count} s ago", "{count} 秒前"),
    "age.minutes": ("{count} min ago", "{count} 分钟前"),
    "age.hours": ("{count} h ago", "{count} 小时前"),
    "age.days": ("{count} days ago", "{count} 天前"),
    # the page of a run
    "run.unknown": ("There is no such run any more: go back to the runs.", "该训练已不存在：请返回训练列表。"),
    "run.now": ("Now", "当前"),
    "run.at_end": ("At its end", "结束时"),
    "run.goes_on": (
        "Nothing that was acknowledged is lost: the command Resume below goes on from the last checkpoint.",
        "已确认的数据没有丢失：下方的“继续”命令会从最近的检查点接着训练。",
    ),
    "run.has_error": ("ends with an error", "以错误结束"),
    "run.commands": ("Commands", "命令"),
    "run.evaluations": ("Evaluations", "评估"),
    "run.no_evaluations": ("It was not evaluated yet. This command does so:", "尚未评估。用此命令评估："),
    "run.settings": ("Settings", "设置"),
    "run.all_settings": ("All settings", "全部设置"),
    "run.reading": ("Reading the recipe …", "正在读取配方……"),
    "run.logs": ("Log lines", "日志"),
    "run.events": ("Events", "事件"),
    "tab.label": ("Parts of this run", "该训练的各页"),
    "tab.overview": ("Overview", "概览"),
    "tab.take_over": ("Take over", "接管"),
    "evaluation.update": ("After update", "更新次数"),
    "evaluation.split": ("Split", "划分"),
    "evaluation.task": ("Task", "任务"),
    "evaluation.success": ("Success, 95% interval", "成功率（95% 区间）"),
    "evaluation.episodes": ("Episodes", "回合"),
    "evaluation.steps": ("Steps per success", "每次成功步数"),
    "settings.key": ("Setting", "设置"),
    "settings.value": ("Value", "值"),
    "settings.recipe": ("In the recipe {recipe}", "配方 {recipe} 中"),
    "settings.same": ("All settings are those of the recipe {recipe}.", "所有设置与配方 {recipe} 相同。"),
    "settings.no_recipe": (
        "Its recipe is not one that ships with Hilt, so nothing is compared.",
        "其配方不是 Hilt 自带的，因此不做比较。",
    ),
    "chart.curves": ("Curves", "曲线"),
    "chart.axis": ("Horizontal axis", "横轴"),
    "chart.step": ("Online steps", "在线步数"),
    "chart.minutes": ("Minutes", "分钟"),
    "chart.smooth": ("Mean of the last", "平滑窗口"),
    "chart.reset": ("Show the whole range", "显示完整范围"),
    "chart.hint": ("Drag in a chart to zoom.", "在图表中拖动以放大。"),
    "chart.none": ("There is nothing to draw yet: no episode has ended.", "暂无可绘制内容：还没有回合结束。"),
    # several runs beside each other
    "compare.title": ("Compare", "对比"),
    "compare.few": (
        "Select two to eight runs in the table of runs, and press Compare.",
        "请在训练列表中选择两到八个训练，然后点击对比。",
    ),
    "compare.success": ("Success", "成功率"),
    "compare.run": ("Run", "训练"),
    "compare.difference": ("Difference to {name}", "与 {name} 之差"),
    "compare.not_paired": ("no evaluation of the same states", "没有相同初始状态的评估"),
    "compare.settings": ("Settings that differ", "不同的设置"),
    "compare.same": ("No setting differs.", "没有不同的设置。"),
    # episodes: the list
    "nav.check": ("Check", "检查"),
    "check.choose": ("Choose what to check:", "选择要检查的数据："),
    "check.empty": ("No run, log or dataset was found below {paths}.", "在 {paths} 下没有找到训练、日志或数据集。"),
    "check.about": (
        "This looks for damage and suspicious episodes. Nothing is changed, and a finding opens its frame.",
        "查找损坏的数据和可疑的回合。不做任何更改，点击发现可打开对应的帧。",
    ),
    "check.start": ("Check now", "开始检查"),
    "check.running": ("Checking …", "正在检查……"),
    "check.failed": ("The check failed:", "检查失败："),
    "check.found": (
        "{error} errors, {warning} warnings, {info} notes in {episodes} episodes, {steps} steps",
        "{episodes} 个回合、{steps} 步中有 {error} 个错误、{warning} 个警告、{info} 条提示",
    ),
    "check.severity": ("Severity", "严重程度"),
    "check.name": ("Check", "检查项"),
    "check.place": ("Where", "位置"),
    "check.what": ("Finding", "发现"),
    "check.cure": ("What to do", "处理方法"),
    "severity.error": ("error", "错误"),
    "severity.warning": ("warning", "警告"),
    "severity.info": ("note", "提示"),
    "nav.episodes": ("Episodes", "回合"),
    "episodes.title": ("Episodes", "回合"),
    "episodes.empty": (
        "No run, log or dataset was found below {paths}. These commands make one and open it:",
        "在 {paths} 下没有找到训练、日志或数据集。用这些命令创建并打开一个：",
    ),
    "episodes.show_together": ("All episodes of these {count} runs and logs", "这 {count} 个训练和日志的全部回合"),
    "episodes.together": ("All runs and logs", "全部训练和日志"),
    "episodes.other": ("other data", "其他数据"),
    "episodes.opening": ("opening …", "正在打开……"),
    "episodes.count": ("{matched} of {total} episodes", "{total} 个回合中的 {matched} 个"),
    "episodes.unread": ("{unread} are still being read", "还有 {unread} 个正在读取"),
    "episodes.clear": ("Clear the filter", "清除筛选"),
    "episodes.any": ("any", "任意"),
    "episodes.filter": ("Filter", "筛选"),
    "episodes.filter_help": (
        "All conditions must hold: success, source, task, steps, return, version, date, tag, mark, instruction, end, "
        "bad, or any fact; with = != < <= > >= or ~ for text that is contained.",
        "所有条件必须同时成立：success、source、task、steps、return、version、date、tag、mark、instruction、end、bad "
        "或任意事实；可用 = != < <= > >=，或用 ~ 表示包含文字。",
    ),
    "episodes.saved": ("Saved views:", "已保存的视图："),
    "episodes.view_name": ("Name of this view", "此视图的名称"),
    "episodes.save": ("Save view", "保存视图"),
    "episodes.forget": ("Remove the view {name}", "删除视图 {name}"),
    "episodes.all_keys": ("All keys", "全部按键"),
    "episodes.export": ("Export …", "导出……"),
    "episodes.to": (
        "Commands that export what the filter shows ({matched} episodes) as",
        "将筛选出的内容（{matched} 个回合）导出的命令，格式为",
    ),
    "episodes.to_selected": (
        "Commands that export the selected episodes ({count}) as",
        "将所选的 {count} 个回合导出的命令，格式为",
    ),
    "episodes.where": (
        "The same filter in the terminal: this lists the episodes, and tags them without --dry-run.",
        "在终端中使用同一筛选：此命令列出这些回合；去掉 --dry-run 则为它们添加标签。",
    ),
    "episodes.where_selected": (
        "The selected episodes in the terminal: this lists them, and tags them without --dry-run.",
        "在终端中使用所选回合：此命令列出这些回合；去掉 --dry-run 则为它们添加标签。",
    ),
    "episodes.copy": ("Copy this command", "复制此命令"),
    "episodes.beside": ("Show two side by side", "并排显示两个"),
    "episodes.select": ("Select episode {number}", "选择回合 {number}"),
    "episodes.select_page": ("Select all on this page", "选择本页全部"),
    "episodes.selection": ("What to do with the selected episodes", "对所选回合的操作"),
    "episodes.selected": ("{count} selected", "已选 {count} 个"),
    "episodes.select_all": ("Select all {matched} that the filter shows", "选择筛选出的全部 {matched} 个"),
    "episodes.unselect": ("Select none", "取消选择"),
    "episodes.in_terminal": ("In the terminal …", "终端命令……"),
    "episodes.saved_many": ("Saved: {action} ({count} episodes)", "已保存：{action}（{count} 个回合）"),
    "episodes.undid_many": ("Undone: {action} ({count} episodes)", "已撤销：{action}（{count} 个回合）"),
    "episodes.ask_delete": ("Delete {count} episodes? Undo brings them back.", "删除 {count} 个回合？撤销可恢复。"),
    "episodes.label": ("Label episode {number}", "标注回合 {number}"),
    "episodes.none": ("No episode matches this filter.", "没有回合符合此筛选条件。"),
    "episodes.no_episode": (
        "There is no episode yet; a running task adds them here.",
        "还没有回合；运行中的任务会在这里添加。",
    ),
    "episodes.offline": (
        "The server does not answer. Start hilt open again, and reload this page.",
        "服务器没有响应。请重新运行 hilt open 并刷新此页面。",
    ),
    "episodes.frames": ("First and last frame", "首帧与末帧"),
    "episodes.number": ("Episode", "回合"),
    "episodes.task": ("Task", "任务"),
    "episodes.length": ("Steps", "步数"),
    "episodes.return": ("Return", "回报"),
    "episodes.success": ("Success", "成功"),
    "episodes.who": ("Who acted", "执行者"),
    "episodes.source": ("Who acted", "执行者"),
    "episodes.version": ("Policy version", "策略版本"),
    "episodes.started": ("(start {start})", "（第 {start} 次启动）"),
    "episodes.date": ("Date", "日期"),
    "episodes.tags": ("Tags", "标签"),
    "episodes.tag": ("Tag", "标签"),
    "episodes.group": ("Part", "部分"),
    "episodes.yes": ("success", "成功"),
    "episodes.no": ("failure", "失败"),
    "episodes.unknown": ("unknown", "未知"),
    "episodes.damaged": ("damaged", "损坏"),
    "episodes.bad": ("bad", "不良"),
    "episodes.policy": ("policy", "策略"),
    "episodes.human": ("person", "人"),
    "episodes.demo": ("demonstration", "示教"),
    "episodes.random": ("random", "随机"),
    "episodes.taken_over": ("Taken over by a person", "有人接管"),
    "episodes.pages": ("Pages of the list", "列表页"),
    "episodes.previous": ("Previous page", "上一页"),
    "episodes.next": ("Next page", "下一页"),
    "episodes.range": ("{first} to {last} of {matched}", "第 {first} 至 {last} 个，共 {matched} 个"),
    "episodes.key_move": ("Next and previous episode of the list", "列表中的下一个和上一个回合"),
    "episodes.key_open": ("Open the episode", "打开回合"),
    "episodes.key_select": ("Select the episode", "选择回合"),
    "episodes.key_range": ("Select up to here, from the one selected last", "从上次选择的回合选到此处"),
    "episodes.key_all": ("Select all that the filter shows", "选择筛选出的全部回合"),
    "episodes.key_none": ("Select none", "取消选择"),
    "episodes.key_tag": ("Tag the selected episodes", "为所选回合添加标签"),
    "episodes.key_delete": ("Delete the selected episodes", "删除所选回合"),
    "episodes.key_page": ("Next and previous page", "下一页和上一页"),
    "episodes.key_label": (
        "Label success, failure, unknown: the selected episodes, or this one, and go to the next",
        "标注成功、失败、未知：所选回合，或当前回合并转到下一个",
    ),
    # one episode
    "episode.title": ("episode {number}", "回合 {number}"),
    "episode.back": ("Back to the list", "返回列表"),
    "episode.previous": ("Previous", "上一个"),
    "episode.next": ("Next", "下一个"),
    "episode.position": ("{position} of {matched}", "第 {position} 个，共 {matched} 个"),
    "episode.no_camera": ("This episode has no images.", "此回合没有图像。"),
    "episode.transport": ("Playback", "播放控制"),
    "episode.timeline": ("Timeline", "时间轴"),
    "episode.cursor": ("Step under the cursor", "光标所在的步"),
    "episode.lane_steps": ("steps {steps}", "第 {steps} 步"),
    "episode.marks": ("marks: {marks}", "标记：{marks}"),
    "episode.first": ("To the beginning", "到开头"),
    "episode.last": ("To the end", "到结尾"),
    "episode.step_back": ("One step back", "后退一步"),
    "episode.step_on": ("One step on", "前进一步"),
    "episode.step": ("step {step} (of 0 to {last})", "第 {step} 步（0 至 {last}）"),
    "episode.at_end": ("end, after step {last}", "结尾，第 {last} 步之后"),
    "episode.speed": ("Speed", "速度"),
    "episode.loop": ("Loop", "循环"),
    "episode.range": ("steps {first} to {last}", "第 {first} 至 {last} 步"),
    "episode.row": ("Step {step} in numbers", "第 {step} 步的数值"),
    "episode.wide": ("{shape} numbers, not shown", "{shape} 个数值，未显示"),
    "episode.facts": ("Facts", "事实"),
    "episode.no_facts": ("None are recorded.", "没有记录。"),
    "episode.read_only": (
        "Datasets of other systems cannot be edited here: copy them to a log with hilt data convert.",
        "其他系统的数据集不能在此编辑：请用 hilt data convert 复制为日志。",
    ),
    "episode.labels": ("Labels and edits", "标注与编辑"),
    "episode.mark_name": ("Name of the mark", "标记名称"),
    "episode.tag_name": ("Tag", "标签"),
    "episode.author": ("Your name", "你的名字"),
    "episode.do_success": ("Success", "成功"),
    "episode.do_failure": ("Failure", "失败"),
    "episode.do_unknown": ("Unknown", "未知"),
    "episode.do_bad": ("Bad", "坏数据"),
    "episode.do_good": ("Good", "好数据"),
    "episode.do_mark": ("Mark this step", "标记此步"),
    "episode.do_tag": ("Add the tag", "添加标签"),
    "episode.do_from": ("From here", "从此处起"),
    "episode.do_up_to": ("Up to here", "到此处止"),
    "episode.do_cut": ("Trim", "裁剪"),
    "episode.whole": ("The whole episode again", "恢复整个回合"),
    "episode.cut_reward": ("Attention: a step with reward was cut away", "注意：裁掉了有奖励的步"),
    "episode.cut_end": ("Attention: the end of the episode was cut away", "注意：裁掉了回合的结尾"),
    "episode.do_trim": ("Keep only steps {first} to {last}", "只保留第 {first} 至 {last} 步"),
    "episode.do_show_all": ("Show all steps again", "恢复所有步"),
    "episode.do_delete": ("Delete", "删除"),
    "episode.do_undo": ("Undo", "撤销"),
    "episode.reward": ("Reward", "奖励"),
    "episode.instruction": ("Instruction", "指令"),
    "episode.do_unmark": ("Remove the mark", "移除标记"),
    "episode.do_split": ("Split at {name}", "在 {name} 处切分"),
    "episode.do_join": ("Join with the next", "与下一个合并"),
    "episode.ask_join": (
        "Join with episode {number} of {steps} steps, the next that was recorded?",
        "与随后录制的回合 {number}（{steps} 步）合并？",
    ),
    "episode.ask_delete": ("Delete this episode? Undo brings it back.", "删除此回合？撤销可恢复。"),
    "episode.confirm": ("Yes", "是"),
    "episode.cancel": ("No", "否"),
    "episode.undid": ("Undone: {action} (episode {number})", "已撤销：{action}（回合 {number}）"),
    "episode.nothing_to_undo": ("Nothing to undo: no edit was made in this tab.", "没有可撤销的：此标签页中没有编辑。"),
    "episode.open_undone": ("Open that episode", "打开该回合"),
    "episode.do_reward": ("Reward of step {step}", "第 {step} 步的奖励"),
    "episode.do_instruction": ("Set the instruction", "设置指令"),
    "episode.untag": ("Remove the tag {name}", "移除标签 {name}"),
    "episode.saved": ("Saved: {action}", "已保存：{action}"),
    "episode.history": ("History", "历史"),
    "episode.no_history": ("Nobody has edited this episode.", "还没有人编辑过此回合。"),
    "episode.undone": ("undone", "已撤销"),
    "episode.gone": ("This episode is deleted. Undo brings it back.", "此回合已删除。撤销可恢复。"),
    "episode.key_label": ("Label success, failure, unknown", "标注成功、失败、未知"),
    "episode.key_bad": ("Bad or good", "标为坏数据或好数据"),
    "episode.key_mark": ("Mark this step", "标记此步"),
    "episode.key_unmark": ("Remove the mark of this step", "移除此步的标记"),
    "episode.key_split": ("Split before each step with the mark in the field", "在带有该标记的每一步之前切分"),
    "episode.key_join": ("Join with the episode that was recorded next", "与随后录制的回合合并"),
    "episode.key_reward": ("Give this step a reward", "设置此步的奖励"),
    "episode.key_instruction": ("Change the instruction", "修改指令"),
    "episode.key_tag": ("Add a tag", "添加标签"),
    "episode.key_trim": ("Trim: keep only the range of I and O", "裁剪：只保留 I 与 O 之间的步"),
    "episode.key_undo": ("Undo the last edit of this tab", "撤销此标签页中的上一次编辑"),
    "episode.key_play": ("Play or pause", "播放或暂停"),
    "episode.key_step": ("One step back or on", "后退或前进一步"),
    "episode.key_ten": ("Ten steps back or on", "后退或前进十步"),
    "episode.key_ends": ("To the beginning or the end", "到开头或结尾"),
    "episode.key_shuttle": ("Play back, pause, play on; again: faster", "倒放、暂停、播放；重复按更快"),
    "episode.key_loop": ("Play from here, up to here", "从此处播放、播放到此处"),
    "episode.key_next": ("Previous and next episode of the list", "列表中的上一个和下一个回合"),
}


@dataclass(frozen=True)
class Words:
    """The texts of one language: ``words("runs.count", count=3, paths="runs")``."""

    language: str

    def __call__(self, key: str, **values: object) -> str:
        return WORDS[key][list(LANGUAGES).index(self.language)].format(**values)

    def metric(self, text: str) -> str:
        """A name that comes with the metrics of a run."""
        return METRIC_WORDS.get(text, text) if self.language == "zh" else text

    def of_run(self, text: str) -> str:
        """A text in which a run says why it ended or how it stands; one that is not known stays as it is."""
        if self.language != "zh":
            return text
        for pattern, chinese in RUN_TEXTS:
            text = re.sub(pattern, chinese, text)
        return RUN_NAMES.sub(lambda found: METRIC_WORDS[found[0]], text)

    def event(self, text: str) -> str:
        """An event, an alarm, or the error with which a run ended; one that is not known stays as it is."""
        return event_in_chinese(text) if self.language == "zh" else text

    def edit(self, action: str) -> str:
        """The name of an edit, which a log has in English; one that is not known stays as it is."""
        return edit_in_chinese(action) if self.language == "zh" else action

    def error(self, error: Exception) -> str:
        """The text of an error: of a page's own in this language, of all others as it is."""
        return self(error.key, **error.values) if isinstance(error, PageError) else str(error)

    def starting(self, prefix: str) -> dict[str, str]:
        """All texts whose keys begin so, by key, with their values not filled in: a script of the page does that."""
        at = list(LANGUAGES).index(self.language)
        return {key: texts[at] for key, texts in WORDS.items() if key.startswith(prefix)}


def language_of(chosen: str, accepted: str) -> str:
    """Returns the language to show: the one that was chosen, else the first that the browser accepts
    (its header Accept-Language) and the app has, else English."""
    if chosen in LANGUAGES:
        return chosen
    weighted = []
    for part in accepted.split(","):
        name, _, weight = part.strip().partition(";q=")
        try:
            weighted.append((-float(weight or 1), name.partition("-")[0].lower()))
        except ValueError:
            continue
    return next((name for _, name in sorted(weighted, key=lambda one: one[0]) if name in LANGUAGES), "en")
