"""What every kind of run has in common: its folder, its checkpoints, its precision,
and the evaluation of what it learned.

The kinds are ``hil`` (a person and an agent that learns from replay), ``sft`` (a policy that imitates) and ``vla`` (a
policy that learns from its own rollouts). They are built on this package and do not import each other.
"""

from hilt.runs.folder import CONFIG, RUN_FILE, RunKind, check_new, note_end

__all__ = ["CONFIG", "RUN_FILE", "RunKind", "check_new", "note_end"]
