"""The tally of one training step's collection: what was rolled out, dropped and lost, as figures and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hilt.vla.episode import LostEpisode, RolloutEpisode
from hilt.vla.tasks import Solved

REASONS = {
    "all_succeeded": "all members succeeded",
    "all_failed": "all members failed",
    "too_easy": "above accuracy_upper_bound",
    "too_hard": "below accuracy_lower_bound",
    "truncated": "a member was truncated",
    "ill_formed": "a chunk was ill-formed",
    "lost": "a member was lost with its simulator",
}
"""Why a group is dropped"""

ENOUGH = 256
"""Episodes without a failure, after which the states that are tried count as solved: a policy that succeeds in 98% of
them has as many in a row with a probability of 0.006"""


class Tally:
    """Counts what happened while a rank collected the episodes of one training step."""

    def __init__(self, carried: list[list[RolloutEpisode]], taken: int, solved: Solved | None):
        self.attempts, self.groups, self.episodes, self.successes, self.steps, self.rows = 0, 0, 0, 0, 0, 0
        self.carried, self.prefetched, self._skipped = len(carried), 0, solved.total if solved else 0
        self.carried_episodes = sum(map(len, carried)) - taken
        self.all_succeeded = self.all_failed = 0
        """Groups all of whose members did"""
        self.dropped: Counter[str] = Counter()
        self.lost: list[LostEpisode] = []
        self.fault = ""
        """The last ill-formed chunk"""

    @property
    def faulty(self) -> bool:
        """Whether every group was lost or ill-formed: nothing that a filter decides."""
        return 0 < self.groups + self.dropped["lost"] == self.dropped["lost"] + self.dropped["ill_formed"]

    def solved(self, wanted: int) -> bool:
        """Whether at least a batch was tried, `ENOUGH` episodes, and all of them succeeded:
        more attempts would hardly find others."""
        return wanted <= self.groups == self.all_succeeded and self.episodes >= ENOUGH

    def take(self, episode: RolloutEpisode, notify: Callable[[str], None]) -> None:
        self.episodes += 1
        self.successes += episode.success
        self.steps += episode.steps
        self.rows += episode.rows
        if episode.ill_formed and episode.ill_formed != self.fault:
            notify(f"an ill-formed chunk in {episode.start.task}, state {episode.start.state}: {episode.ill_formed}")
            self.fault = episode.ill_formed

    def figures(
        self, episodes: list[RolloutEpisode], surplus: list[list[RolloutEpisode]], solved: Solved | None
    ) -> dict[str, float]:
        """The same names on every rank in every step."""
        rolled = {"episodes": self.episodes, "successes": self.successes, "steps": self.steps, "rows": self.rows}
        rolled |= {
            "groups": self.groups,
            "groups_all_succeeded": self.all_succeeded,
            "groups_all_failed": self.all_failed,
        }
        groups = {episode.start.group for episode in episodes}
        used = {"used_groups": len(groups), "used_episodes": len(episodes), "surplus_groups": len(surplus)}
        more = {
            "attempts": self.attempts,
            "lost_episodes": len(self.lost),
            "carried_groups": self.carried,
            "prefetched": self.prefetched,
        }
        skipped = {"skipped_states": solved.total - self._skipped if solved else 0}
        dropped = {f"dropped_{reason}": self.dropped[reason] for reason in REASONS}
        return {name: float(value) for name, value in (rolled | used | more | skipped | dropped).items()}

    def report(self) -> str:
        whole = self.groups + self.dropped["lost"]
        parts = [f"{whole} groups in {self.attempts} attempts"] if self.attempts else ["nothing was rolled out"]
        parts += [
            f"{self.dropped[reason]} dropped ({words})" for reason, words in REASONS.items() if self.dropped[reason]
        ]
        parts += [f"{len(self.lost)} episodes lost"] if self.lost else []
        return ", ".join(parts)

    def cure(self) -> str:
        reason = max(REASONS, key=lambda reason: self.dropped[reason]) if self.dropped.total() else ""
        return {
            "all_succeeded": (
                "The policy solves these states: give others (states_per_task, skip_solved), a "
                "wider filter, or end the run."
            ),
            "all_failed": (
                "The policy solves none of them: begin with a better one (hilt train sft), or give a larger group_size."
            ),
            "truncated": (
                "Groups have members that came to the step limit: leave filter_truncated out, or "
                "raise the task's step_limit."
            ),
            "ill_formed": "The policy's chunks cannot be carried out: look at its checkpoint and its temperature.",
            "lost": "The simulator fails.",
        }.get(reason, "Give a wider filter, or more max_sampling_attempts.")


def summed(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over ranks, which all have the same ones."""
    return {name: sum(part[name] for part in figures) for name in figures[0]}
