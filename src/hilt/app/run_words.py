"""The Chinese of texts that come from the files of a run: names of metrics, how it stands, events, alarms and why it
ended. Hilt writes them in English; what is not known here is shown as it was written."""

from __future__ import annotations

import re

METRIC_WORDS = {
    "Success of the last {n} episodes": "最近 {n} 个回合的成功率",
    "Success in evaluations": "评估成功率",
    "of episodes": "占回合比例",
    "all": "全部",
    "without take-over": "无接管",
    "Intervention rate": "人操作的步数",
    "of online steps": "占在线步数比例",
    "Episode length": "回合长度",
    "steps": "步",
    "successes": "成功回合",
    "Episode duration": "回合时长",
    "seconds": "秒",
    "Episode return": "回合回报",
    "sum of rewards": "奖励之和",
    "Critic loss": "评论家损失",
    "Actor and temperature loss": "策略与温度损失",
    "actor": "策略",
    "temperature": "温度",
    "Loss (in training: mean of {n} records)": "损失（训练：{n} 条记录的均值）",
    "training": "训练",
    "held out": "留出",
    "Absolute error of imitation": "模仿的绝对误差",
    "of normalized actions": "归一化的动作",
    "KL of the style": "风格 z 的 KL",
    "Policy and value loss": "策略与评论家损失",
    "policy": "策略",
    "critic": "评论家",
    "Clip fraction": "被裁剪的比率",
    "of ratios": "占比率的比例",
    "KL to the reference": "与参考策略的距离",
    "nats": "奈特",
    "Dropped groups": "被丢弃的组",
    "all succeeded": "全部成功",
    "all failed": "全部失败",
    "Learning rate": "学习率",
    "Gradient norm": "梯度范数",
    "before clipping": "裁剪之前",
    "Q values by source": "Q 值（按数据来源）",
    "online": "在线",
    "demo": "示教",
    "human": "人",
    "TD error by source": "TD 误差（按数据来源）",
    "Critic gradient by source": "各来源对评论家梯度的贡献",
    "of its gradient": "占梯度比例",
    "Batch reward by source": "批次奖励（按数据来源）",
    "mean": "均值",
    "Expected and realized value": "预期与实际的价值",
    "expected": "预期",
    "realized": "实际",
    "Conservative term": "保守项",
    "Bounded by realized returns": "以实际回报为下界",
    "of values": "占价值比例",
    "Beside the frozen policy": "冻结策略之上",
    "pull": "拉力损失",
    "correction": "修正量",
    "Good steps": "好的步",
    "of the batch": "占批次比例",
    "Loss by condition": "按条件的损失",
    "right": "正确的条件",
    "exchanged": "对调的条件",
    "Value model": "价值模型",
    "ended as hopeless": "判为无望而结束",
    "hopeless that succeeded": "判为无望却成功",
    "Dead ReLUs": "失活的 ReLU",
    "of units": "占单元比例",
    "Effective rank of the features": "特征的有效秩",
    "singular values": "奇异值个数",
    "KL of the policy": "策略变化的 KL",
    "nats of each number": "每个数的奈特",
    "between two looks": "两次检查之间",
    "from the one that collected": "与采集时的策略",
    "Age of the weights that act": "行动所用权重的年龄",
    "s; in post-training steps": "秒；后训练为步数",
    "Policy entropy": "策略熵",
    "Temperature": "温度",
    "Throughput": "速度",
    "per second": "每秒",
    "updates": "更新",
    "online steps": "在线步数",
    "samples": "样本",
    "Control lateness": "控制延迟",
    "ms, 99th percentile": "毫秒，第 99 百分位",
    "Weight staleness": "所用权重的陈旧度",
    "Time of the learner": "学习器的时间分配",
    "of its time": "占时间比例",
    "batches": "取批次",
    "waiting for steps": "等待数据",
    "simulator": "仿真",
    "learning": "学习",
    "other": "其他",
    "Steps in the replay": "可供学习的步数",
    "minutes": "分钟",
    "who acts": "谁在操作",
    "success": "成功率",
    "validation": "验证",
    "a person makes": "人的操作",
    "asked for help": "请求帮助",
    "contact lost": "失去联系",
    "episode": "回合",
    "return": "回报",
    "losses": "损失",
    "ratios": "比率",
    "Q values": "Q 值",
    "acting weights": "所用权重",
    "steps kept": "保存的步数",
    "spool": "待发送的步",
    "control rate": "控制频率",
    "last event": "最近事件",
}
"""The Chinese of names that come with the metrics of a run: titles of charts, of their curves, and of rows"""
RUN_TEXTS = (
    (r"^stopped(?=, after )", "已停止"),
    (r"^pressed(?=, after )", "操作员按下停止"),
    (r"^goal(?=, after )", "达到目标"),
    (r"^(max_\w+)(?=, after )", r"达到 \1"),
    (r", after ([\d,]+) updates with ([\d,]+) online steps$", r"，共 \1 次更新、\2 个在线步"),
    (r", after ([\d,]+) updates$", r"，共 \1 次更新"),
    (r", after ([\d,]+) steps$", r"，共 \1 步"),
    (r"^no episode yet$", "还没有回合"),
    (r"^none yet$", "暂无"),
    (r"^(\S+) of the last (\d+) episodes", r"最近 \2 个回合中 \1"),
    (r"; (\S+) of (\d+) without take-over$", r"；无接管的 \2 个回合中 \1"),
    (r"^(\d+%) of steps$", r"\1 的步"),
    (r"^(\d+) steps$", r"\1 步"),
    (r"^(\d+) updates old$", r"落后 \1 次更新"),
    (r"^(\S+) ms late at the 99th percentile$", r"第 99 百分位延迟 \1 毫秒"),
    (r"(?<=: )silent\b", "无响应"),
    (r"(?<=: )waiting\b", "等待中"),
    (r"(?<=: )paused\b", "已暂停"),
    (r"(?<=: )contact lost\b", "失去联系"),
    (r"(?<=: )emergency stop\b", "急停"),
    (r"(?<=: )asks for help\b", "请求帮助"),
    (r"^(\d+) times, answered (\d+) times$", r"\1 次，其中 \2 次得到回应"),
    (r"(?<=: )there\b", "已连接"),
    (r"(?<=: )([\d,]+) steps\b", r"\1 步"),
    (r"^(\d+) times so far; ([\d,]+) steps of the last (\d+) episodes$", r"至今 \1 次；最近 \3 个回合中 \2 步"),
)
"""Patterns of texts in which a run says why it ended and how it stands, and their Chinese"""
RUN_NAMES = re.compile(
    r"\b(critic|actor|temperature|online|demo|human|mean)(?= -?\d)"
    r"|(?<=% )(batches|waiting for steps|simulator|policy|learning|other)\b|(?<=: )(policy|human|demo|random)\b"
)
"""Names within such texts, whose Chinese is in METRIC_WORDS"""

ALARM_TEXTS = (
    (
        r"the policy moves (\S+) nats from the one that collected \(ppo_kl, mean of 3 updates; limit (\S+)\)",
        r"策略与采集数据时的策略相距 \1 奈特（ppo_kl，3 次更新的均值；上限 \2）",
    ),
    (
        r"(\S+) of the ratios are clipped \(mean of 5 updates; limit (\S+)\)",
        r"\1 的比率被裁剪（5 次更新的均值；上限 \2）",
    ),
    (r"the entropy is (\S+) nats, and its target (\S+) \(limit (\S+)\)", r"熵为 \1 奈特，目标为 \2（下限 \3）"),
    (
        r"the entropy of each number fell from (\S+) to (\S+) nats \(limit: a tenth of it, or (\S+) nats less\)",
        r"每个数的熵从 \1 降到 \2 奈特（下限：十分之一，或减少 \3 奈特）",
    ),
    (
        r"the critic explains (\S+) of the variance of returns \(mean of 10 updates; a constant explains 0\)",
        r"评论家解释了回报方差的 \1（10 次更新的均值；常数解释 0）",
    ),
    (
        r"in (\S+) of the groups all members end alike, and most of these succeed \(5 steps; limit (\S+)\)",
        r"\1 的组内结果全部相同，多数为成功（5 步；上限 \2）",
    ),
    (
        r"in (\S+) of the groups all members end alike, and most of these fail \(5 steps; limit (\S+)\)",
        r"\1 的组内结果全部相同，多数为失败（5 步；上限 \2）",
    ),
    (
        r"Q is from (\S+) to (\S+), and rewards and discount allow (\S+) to (\S+) \(5 records\)",
        r"Q 在 \1 至 \2 之间，而奖励与折扣只允许 \3 至 \4（5 条记录）",
    ),
    (
        r"Q is (\S+) on the average, and the last episodes realized (\S+) \(limit (\S+)\)",
        r"Q 平均为 \1，而最近的回合实际得到 \2（上限 \3）",
    ),
    (
        r"validation succeeds in (\S+), and did in (\S+): (\S+) standard errors less(?:, state by state)? "
        r"\(limit (\S+)\)",
        r"验证成功率为 \1，曾为 \2：低 \3 个标准误（上限 \4）",
    ),
    (
        r"the loss is (\S+), and (\S+) with good and bad exchanged, which should be higher \(3 looks\)",
        r"损失为 \1，把好与坏对调之后为 \2，后者应当更高（3 次检查）",
    ),
    (
        r"the held-out loss is (\S+), and was (\S+) \(limit (\S+)\)",
        r"留出数据上的损失为 \1，曾为 \2（上限 \3）",
    ),
    (
        r"the held-out loss is (\S+), and was (\S+) \(limit (\S+), means of 3 looks\); in training it is (\S+)",
        r"留出数据上的损失为 \1，曾为 \2（上限 \3，3 次检查的均值）；训练损失为 \4",
    ),
    (
        r"on held-out data it predicts a constant, a probability of success from (\S+) to (\S+)",
        r"在留出数据上它的预测是常数，成功概率从 \1 到 \2",
    ),
    (
        r"it calls (\S+) of the held-out successes a success, and (\S+) of the failures",
        r"它把留出成功中的 \1 判为成功，也把留出失败中的 \2 判为成功",
    ),
    (
        r"half-way through held-out episodes it ranks no better than chance: AUC (\S+) \(95% interval from (\S+); "
        r"limit (\S+)\)",
        r"在留出回合的一半处，其排序不比随机好：AUC \1（95% 区间下限 \2；界限 \3）",
    ),
    (
        r"(\S+) updates were made for (\S+) online steps, (\S+) for each \(limit (\S+)\)",
        r"\2 个在线步做了 \1 次更新，每步 \3 次（上限 \4）",
    ),
    (
        r"the critic expects (\S+) on the average, and the episodes realized (\S+) \(mean of 5 updates; limit (\S+)\)",
        r"评论家平均预期 \1，而回合实际得到 \2（5 次更新的均值；上限 \3）",
    ),
    (
        r"each number is (\S+) nats from the reference \(kl, mean of 3 updates; limit (\S+)\)",
        r"每个数离参考策略 \1 奈特（kl，3 次更新的均值；上限 \2）",
    ),
    (
        r"each number of the policy moves (\S+) nats between two looks \(policy_kl, 3 looks; limit (\S+)\)",
        r"两次检查之间策略的每个数变化 \1 奈特（policy_kl，3 次检查；上限 \2）",
    ),
    (
        r"(\S+) of the ReLUs are 0 for a whole batch \(3 looks; limit (\S+)\)",
        r"\1 的 ReLU 对整个批次都为 0（3 次检查；上限 \2）",
    ),
    (
        r"the effective rank of the features fell from (\S+) to (\S+) \(3 looks; limit (\S+)\)",
        r"特征的有效秩从 \1 降到 \2（3 次检查；下限 \3）",
    ),
    (
        r"the episodes are by weights of (\S+) training steps before \(mean of 3 updates; limit (\S+)\)",
        r"回合由 \1 个训练步之前的权重采集（3 次更新的均值；上限 \2）",
    ),
    (
        r"an actor acts with weights that were replaced (\S+) s ago \(limit (\S+) s\)",
        r"有 actor 仍用 \1 秒前已被替换的权重行动（上限 \2 秒）",
    ),
    (
        r"the value model ends (\S+) of the last episodes as hopeless \(limit (\S+)\)",
        r"价值模型把最近 \1 的回合判为无望而结束（上限 \2）",
    ),
    (
        r"the value model expects success with (\S+), and the last episodes succeeded in (\S+) \(limit: (\S+) points "
        r"apart\)",
        r"价值模型预期成功率为 \1，而最近的回合成功率为 \2（上限：相差 \3 个百分点）",
    ),
    (
        r"(\S+) steps of the optimizer were left out: a loss or a gradient was not finite",
        r"跳过了 \1 次优化器更新：损失或梯度不是有限值",
    ),
    (r"the held-out loss is not a finite number", r"留出数据上的损失不是有限值"),
)
"""What alarms find, and its Chinese"""
ALARM_CURES = {
    "ppo_kl": "请降低 optimizer.learning_rate 或 algorithm.epochs，或设置 algorithm.target_kl；"
    "有人参与时降低 agent.options.learning_rate 或 mixed.max_age。",
    "clip_fraction": "请降低 optimizer.learning_rate 或 algorithm.epochs，或增大每步数据"
    "（algorithm.batch.trajectories_per_step）；有人参与时降低 agent.options.learning_rate 或 mixed.max_age。",
    "entropy": "它不再探索：请设置 algorithm.entropy、algorithm.kl 或更低的学习率；"
    "有人参与时设置 agent.rlpd.target_entropy，algorithm=mixed 时降低 mixed.weight。",
    "explained_variance": "评论家有害：请提高其学习率（critic）、设置 critic.warmup_steps，"
    "或使用没有评论家的估计器（grpo）。",
    "no_signal": "若都失败，请从更好的策略或更容易的状态开始；若都成功，请结束训练，或使用更难的状态。",
    "q_bound": "评论家发散：请降低 agent.rlpd.learning_rate 或 tau，增加评论家，或设置 agent.rlpd.target_range。",
    "overestimation": "评论家高估：请降低 update_to_data，增加评论家并设置 agent.rlpd.subset=2，或 actor_q=min；"
    "后训练时提高评论家的学习率，或设置预热（critic.warmup_steps）。",
    "reference_kl": "它在遗忘原有的能力：请提高 algorithm.kl.coefficient，或降低 optimizer.learning_rate。",
    "policy_kl": "策略突变：请降低学习率（agent.rlpd.learning_rate；agent.kind=vla 时 agent.options.learning_rate；"
    "微调时 learning_rate，或设置 warmup_steps），或增加评论家。",
    "dead_relus": "处处为 0 的单元学不到东西：请降低学习率；有评论家时设置 agent.activation=tanh 或 "
    "agent.critic.reset_period；否则从更早的策略重新开始。",
    "plasticity": "特征塌缩，几乎学不到新东西：请降低学习率或 update_to_data；有评论家时设置 "
    "agent.critic.reset_period 或 agent.critic.weight_decay。",
    "stale_weights": "采集所用的不是正在学习的策略：请检查 actor 与 learner 之间的网络和 actor 的日志；"
    "后训练时降低 collect.oversample_factor。",
    "value_model": "它见过的是另外的回合：请用本次训练的回合重新训练（hilt train value RUN），"
    "或降低 value.stop_below 和 value.reward。",
    "condition": "策略没有用到条件，或者标注是噪声：请看价值模型对留出回合的排序（AUC），"
    "设置 recap.condition=embedding、更低的 recap.dropout 或更多步数，或另一个 recap.threshold。",
    "validation": "结果变差：RUN/best 或更早的检查点更好。请用更低的学习率继续，或结束训练；"
    "分类器或价值模型需要更多回合、更高的 dropout 或更少的步数。",
    "ranking": "请勿使用：请检查是否有错误的标注，并提供更多成功与失败的回合；分类器请看 mistakes.png，"
    "预测为常数时请降低学习率。",
    "update_to_data": "学习器在重复已有数据：请设置 update_to_data=4，或检查为什么没有新的步。",
    "not_finite": "请降低学习率；检查奖励和观测中是否有非有限值。",
}
"""The Chinese of what to do about each alarm"""
ALARM = re.compile(r"(alarm )?(" + "|".join(ALARM_CURES) + r"): (.*?)\. (.*)", re.DOTALL)
REASONS = {
    "stopped": "已停止",
    "pressed": "操作员按下停止",
    "goal": "达到目标",
    "alarm": "警报",
    "max_steps": "达到 max_steps",
    "max_env_steps": "达到 max_env_steps",
    "max_seconds": "达到 max_seconds",
}
EVENT_TEXTS = (
    (r"resumed", "从检查点继续"),
    (r"another process goes on", "由另一个进程继续"),
    (r"opens the logs", "打开日志"),
    (r"opens the logs, and imports into them what the run begins with", "打开日志，并导入训练开始所用的数据"),
    (r"(\d+) steps imported from (.*)", r"从 \2 导入了 \1 步"),
    (r"(\d+) episodes of before were valued by (.*)", r"之前的 \1 个回合已由 \2 评价"),
    (
        r"(.*): (\d+) episodes were valued, of which (\d+) failed; (\S+) of ([\d,]+) steps of the policy have an "
        r"advantage above (\S+) and are good, and so are ([\d,]+) steps of a person",
        r"\1：已评价 \2 个回合，其中 \3 个失败；策略的 \5 步中有 \4 的优势高于 \6，算作好，人的 \7 步也是",
    ),
    (r"goes on after a pause", "暂停后继续"),
    (
        r"contact to the operator is lost: the run's clock and learning are paused",
        "与操作员失去联系：训练计时和学习已暂停",
    ),
    (r"contact to the operator is lost at (.*)", r"与操作员失去联系：\1"),
    (r"there are no demonstrations and no take-overs to imitate yet", "还没有可模仿的示教和接管"),
    (
        r"there are no demonstrations and no take-overs yet: batches are all online",
        "还没有示教和接管：批次全部来自在线数据",
    ),
    (
        r"learning starts with (\d+) online steps, and there are (\d+)",
        r"有 \1 个在线步后开始学习，目前有 \2 个",
    ),
    (r"there is no online step yet", "还没有在线步"),
    (
        r"update_to_data=(\S+): (\d+) updates for (\d+) online steps, more are to come",
        r"update_to_data=\1：\3 个在线步已做 \2 次更新，等待更多数据",
    ),
    (
        r"(\d+) of (\d+) steps are collected, with the pretrained policy and the operator",
        r"由预训练策略和操作员采集了 \2 步中的 \1 步",
    ),
    (
        r"(\d+) of (\d+) groups of (\d+) episodes are complete, from simulations \(hilt actor --simulation\)",
        r"\2 个组（每组 \3 个回合）中 \1 个已完成，来自仿真（hilt actor --simulation）",
    ),
    (
        r"collected (\d+) successful episodes, of (\d+) steps: pretraining is repeated with these",
        r"采集了 \1 个成功回合，共 \2 步：用它们重新预训练",
    ),
    (
        r"the features of (\d+) steps are made, which takes a while",
        r"正在计算 \1 步的特征，需要一些时间",
    ),
    (
        r"evaluation of update ([\d,]+): success in (\d+) of (\d+) evaluation states, (\S+) to (\S+); "
        r"which reaches the goal",
        r"第 \1 次更新的评估：\3 个初始状态中 \2 个成功，\4 至 \5；达到目标",
    ),
    (
        r"evaluation of update ([\d,]+): success in (\d+) of (\d+) evaluation states, (\S+) to (\S+); "
        r"the goal is (\S+)",
        r"第 \1 次更新的评估：\3 个初始状态中 \2 个成功，\4 至 \5；目标为 \6",
    ),
    (
        r"the policy that reached the goal is the last checkpoint, of update ([\d,]+)",
        r"达到目标的策略是最后一个检查点，第 \1 次更新",
    ),
    (r"alarm (\w+) is over", r"警报 \1 已解除"),
    (
        r"goes back to update (\S+): alarm (\w+) was raised at update (\S+)",
        r"回到第 \1 次更新：警报 \2 在第 \3 次更新时触发",
    ),
    (r"(\d+) updates in a row were not finite", r"连续 \1 次更新不是有限值"),
    (r"the last (\d+) gradients were not finite", r"最近 \1 个梯度不是有限值"),
    (r"the held-out loss was never a finite number", r"留出数据上的损失从来不是有限值"),
    (r"the last (\d+) steps were not finite", r"最近 \1 步不是有限值"),
    (r"max_steps is reached", "达到 max_steps"),
    (r"max_seconds are over", "达到 max_seconds"),
    (r"it was stopped", "已停止"),
    (r"the goal is reached", "达到目标"),
    (
        r"(\d+) steps in a row found too few groups to learn from \(collect: filters, group_size, tasks\)",
        r"连续 \1 步可学习的组太少（collect：filters、group_size、tasks）",
    ),
    (
        r"solved: all members of all groups succeeded in (\d+) training steps in a row",
        r"已解决：连续 \1 个训练步中所有组全部成功",
    ),
    (r"(\S+) does not answer \((.*)\)\.", r"\1 没有响应（\2）。"),
    (
        r"(\S+): this is no page of hilt open, or one of another version \((.*)\)\.",
        r"\1：这不是 hilt open 的页面，或版本不同（\2）。",
    ),
    (
        r"(\S+): the token or password is wrong, or the page was started anew \(status (\d+)\)\.",
        r"\1：令牌或密码不正确，或该页面已重新启动（状态码 \2）。",
    ),
    (
        r"(\S+): it answered with status (\d+); expected a page of hilt open\.",
        r"\1：返回了状态码 \2；应为 hilt open 的页面。",
    ),
    (
        r"rank (\d+) of (\d+) is gone: its process was killed by (\w+); the system does that when memory runs out\.",
        r"rank \1（共 \2 个）已消失：其进程被 \3 终止；内存不足时系统会这样做。",
    ),
    (
        r"rank (\d+) of (\d+) is gone: its process was killed by (\w+)\.",
        r"rank \1（共 \2 个）已消失：其进程被 \3 终止。",
    ),
    (
        r"rank (\d+) of (\d+) is gone: its process ended with exit status (\d+)\.",
        r"rank \1（共 \2 个）已消失：其进程以退出码 \3 结束。",
    ),
    (
        r"(\S+) was killed (\d+) times within a minute, last by (\w+)\. Find out by whom; --resume goes on\.",
        r"\1 在一分钟内被终止 \2 次，最后一次由 \3。请查明原因；--resume 可继续。",
    ),
)
"""Whole texts of events and ends, and their Chinese"""
EVENT_BEGINNINGS = (
    ("waits: ", "等待："),
    ("started again: ", "已重新启动："),
    ("evaluation: ", "评估："),
    ("the checkpoint before was not written, and learning goes on: ", "上一个检查点未能写入，学习继续："),
)
"""Beginnings of events, whose rest is another text, or an error as it is"""
EVENT_PARTS = (
    (r"^update ([\d,]+) is left out: ", r"跳过第 \1 次更新："),
    (r"^checkpoint (\d+) is skipped, and the one before it is used: ", r"跳过检查点 \1，使用前一个："),
    (
        r"^after step (\d+): the copy was not made, training goes on, and the next checkpoint tries again: ",
        r"第 \1 步之后：未能复制，训练继续，下一个检查点会重试：",
    ),
    (r"^imitates the demonstrations first\b", "先模仿示教"),
    (r"^imitates demonstrations and take-overs, from scratch\b", "从头模仿示教和接管"),
)
"""Beginnings with a number, and of phases, whose counts follow"""
PHASE_PARTS = (
    (r": ([\d,]+) of ([\d,]+) updates\b", r"：\2 次更新中的 \1 次"),
    (r", loss (\S+?)(?=,|$)", r"，损失 \1"),
    (r", about (.+?) left$", r"，约剩 \1"),
    (r", (.+?) so far$", r"，已用 \1"),
)


def event_in_chinese(text: str) -> str:
    """An event, an alarm or the reason for an end, in Chinese as far as it is known."""
    for beginning, chinese in EVENT_BEGINNINGS:
        if text.startswith(beginning):
            return chinese + event_in_chinese(text.removeprefix(beginning))
    if match := ALARM.fullmatch(text):
        return f"{'警报 ' if match[1] else ''}{match[2]}：{_whole(match[3], ALARM_TEXTS)}。{ALARM_CURES[match[2]]}"
    if match := re.fullmatch(r"ends: (\w+), after (\d+) updates with (\d+) online steps", text):
        return f"结束：{REASONS.get(match[1], match[1])}，共 {match[2]} 次更新、{match[3]} 个在线步"
    for pattern, chinese in EVENT_PARTS:
        if re.match(pattern, text):
            text = re.sub(pattern, chinese, text)
            if chinese.endswith("："):
                return text
            for part, shown in PHASE_PARTS:
                text = re.sub(part, shown, text)
            return text
    return _whole(text, EVENT_TEXTS)


def _whole(text: str, known: tuple[tuple[str, str], ...]) -> str:
    """The Chinese of a text that one of these patterns is; else the text."""
    for pattern, chinese in known:
        if match := re.fullmatch(pattern, text, re.DOTALL):
            return match.expand(chinese)
    return text
