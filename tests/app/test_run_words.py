"""The Chinese of what a run writes in English: names of metrics, how it stands, events, alarms, and why it ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hilt.app.run_words import ALARM_CURES, EVENT_TEXTS, METRIC_WORDS
from hilt.app.words import Words
from hilt.observe.alarms import TABLE, Alarms
from hilt.observe.metrics import GOES_ON, RESUMED
from hilt.observe.plots import PANELS
from tests.observe.test_alarms import WRONG, WRONG_CLASSIFIER, WRONG_HIL, WRONG_SFT, WRONG_VALUE

SOURCE = Path(__file__).parents[2] / "src/hilt"
ENGLISH = re.compile(r"\b(the|is|are|of|and|was|were|with|to|there)\b")


def test_run_words_of_metrics_are_there_for_every_chart():
    needed = {text for panel in PANELS for text in (panel.title, panel.unit, *panel.curves) if text}
    assert needed - {"torch"} <= {*METRIC_WORDS}
    assert Words("zh").metric("Temperature") == "温度" and Words("en").metric("Temperature") == "Temperature"
    assert Words("zh").metric("a name of somebody's") == "a name of somebody's"


def test_run_words_in_which_a_run_says_how_it_stands_are_translated():
    chinese = Words("zh").of_run
    for text, shown in (
        ("stopped, after 37 updates with 1,400 online steps", "已停止，共 37 次更新、1,400 个在线步"),
        ("goal, after 590 updates", "达到目标，共 590 次更新"),
        ("70% of the last 20 episodes; – of 0 without take-over", "最近 20 个回合中 70%；无接管的 0 个回合中 –"),
        ("critic 0.0167   actor -1.2", "评论家 0.0167   策略 -1.2"),
        ("290 (7/s)   50% torch   20% waiting for steps", "290 (7/s)   50% torch   20% 等待数据"),
        ("actor-1: policy, actor-2: silent", "actor-1: 策略, actor-2: 无响应"),
        ("actor-1: emergency stop, actor-2: paused", "actor-1: 急停, actor-2: 已暂停"),
        ("2 times so far; 1,200 steps of the last 9 episodes", "至今 2 次；最近 9 个回合中 1,200 步"),
        ("a text of somebody's", "a text of somebody's"),
    ):
        assert chinese(text) == shown and Words("en").of_run(text) == text


JOBS = {"vla": WRONG, "hil": WRONG_HIL, "sft": WRONG_SFT, "classifier": WRONG_CLASSIFIER, "value": WRONG_VALUE}


@pytest.mark.parametrize("name", [f"{job} {name}" for job, wrong in JOBS.items() for name in wrong])
def test_run_words_of_every_alarm_are_translated_whole(name: str):
    job, _, alarm = name.partition(" ")
    facts, records = JOBS[job][alarm]
    alarms = Alarms(facts)
    [text] = [change.text for record in records for change in alarms.take(record) if change.raised]
    for given, begins in ((text, f"警报 {alarm}："), (text.removeprefix("alarm "), f"{alarm}：")):
        shown = Words("zh").event(given)
        assert shown.startswith(begins) and not ENGLISH.search(shown), shown
        assert [*re.findall(r"\d[\d.,]*%?", text.split(". ")[0])] and Words("en").event(given) == given
    assert Words("zh").event(f"alarm {alarm} is over") == f"警报 {alarm} 已解除"
    assert {*ALARM_CURES} == {one.name for one in TABLE}


def test_run_words_of_a_model_that_predicts_a_constant():
    [change] = Alarms(WRONG_VALUE["ranking"][0]).take(WRONG_VALUE["ranking"][1][0] | {"held_out_highest": 0.1})
    assert (
        Words("zh").event(change.text).startswith("警报 ranking：在留出数据上它的预测是常数，成功概率从 0.100 到 0.100")
    )


def test_run_words_of_a_held_out_loss_that_is_not_finite():
    [change] = Alarms(WRONG_SFT["not_finite"][0]).take({"validation_loss": float("nan")})
    assert Words("zh").event(change.text).startswith("警报 not_finite：留出数据上的损失不是有限值")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (RESUMED, "从检查点继续"),
        (GOES_ON, "由另一个进程继续"),
        (
            "waits: learning starts with 100 online steps, and there are 7",
            "等待：有 100 个在线步后开始学习，目前有 7 个",
        ),
        ("waits: an error of somebody's", "等待：an error of somebody's"),
        (
            "press: 8 episodes were valued, of which 3 failed; 40% of 1,200 steps of the policy have an advantage "
            "above -0.0312 and are good, and so are 31 steps of a person",
            "press：已评价 8 个回合，其中 3 个失败；策略的 1,200 步中有 40% 的优势高于 -0.0312，算作好，人的 31 步也是",
        ),
        (
            "imitates the demonstrations first: 1,200 of 2,000 updates, loss 0.123, about 20 s left",
            "先模仿示教：2,000 次更新中的 1,200 次，损失 0.123，约剩 20 s",
        ),
        (
            "evaluation of update 1,200: success in 18 of 20 evaluation states, 70% to 97%; the goal is 95%",
            "第 1,200 次更新的评估：20 个初始状态中 18 个成功，70% 至 97%；目标为 95%",
        ),
        ("ends: goal, after 1200 updates with 340 online steps", "结束：达到目标，共 1200 次更新、340 个在线步"),
        ("update 1,201 is left out: a loss is nan.", "跳过第 1,201 次更新：a loss is nan."),
        (
            "started again: rank 1 of 2 is gone: its process was killed by SIGKILL; the system does that when memory "
            "runs out.",
            "已重新启动：rank 1（共 2 个）已消失：其进程被 SIGKILL 终止；内存不足时系统会这样做。",
        ),
        ("20 updates in a row were not finite", "连续 20 次更新不是有限值"),
        ("max_steps is reached", "达到 max_steps"),
        ("https://a:1 does not answer (timed out).", "https://a:1 没有响应（timed out）。"),
        ("learner: RuntimeError: the policy is gone", "learner: RuntimeError: the policy is gone"),
    ],
)
def test_run_words_of_events_are_translated_and_others_stay(text: str, shown: str):
    assert Words("zh").event(text) == shown and Words("en").event(text) == text


def test_run_words_of_events_are_those_that_the_source_writes():
    """The end of the longest stretch without a number stands in the source: none is about a text that was changed."""
    parts = ("hil", "vla", "observe", "distributed", "runs")
    code = "".join(path.read_text() for part in parts for path in (SOURCE / part).rglob("*.py"))
    code += (SOURCE / "app/remote_runs.py").read_text()
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # texts over several lines
    for pattern, _ in EVENT_TEXTS:
        plain = re.sub(r"\\([().])", r"\1", re.sub(r"\(\?:(.*?)\)", r"\1", pattern))
        longest = max(re.split(r"\([^() ]*[\\\[.][^() ]*\)", plain), key=len)
        assert " ".join(longest.strip(" :;,.").split(" ")[-3:]) in code, pattern
