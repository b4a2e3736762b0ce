"""Recording: a person or a script controls a task, and a log keeps the episodes, with videos of them.

`hilt.recording.record.record` records; `hilt.recording.before_after.before_after`
makes a video of a policy before and after learning.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.recording.buffered_device import BufferedDevice
    from hilt.recording.record import RecordingSummary, Settings
    from hilt.recording.recording_folder import open_recording, replay_open_loop
    from hilt.recording.script import record_with_script

__all__ = [
    "BufferedDevice",
    "RecordingSummary",
    "Settings",
    "open_recording",
    "record_with_script",
    "replay_open_loop",
]
__getattr__ = lazy_exports(__name__, __file__)
