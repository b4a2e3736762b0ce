"""What was carried out counts, and two first frames that differ have two digests."""

from __future__ import annotations

import numpy as np

from hilt.vla.episode import RolloutEpisode, Start, digest, token_mask


def test_the_mask_has_what_was_carried_out():
    record = {"log_prob": np.zeros((2, 3, 2), np.float32)}
    executed = np.array([3, 1], np.int32)
    episode = RolloutEpisode(
        Start("a/b", "train", 0, 0), record, executed, np.zeros(2, np.float32), True, 4, False, 0, b""
    )
    assert episode.rows == 2
    assert token_mask(episode, 2).tolist() == [[[True, True]] * 3, [[True, True], [False, False], [False, False]]]


def test_a_digest_is_of_every_array_name_type_and_shape():
    frame = {"images": {"front": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(3, np.float32)}
    changed = {"images": {"front": np.eye(4, dtype=np.uint8)[..., None].repeat(3, -1)}, "state": frame["state"]}
    renamed = {"images": {"wrist": frame["images"]["front"]}, "state": frame["state"]}
    again = {"state": frame["state"].copy(), "images": dict(frame["images"])}
    retyped = {"images": frame["images"], "state": np.zeros(3, np.int32)}
    assert digest(again) == digest(frame)
    assert len({digest(each) for each in (frame, changed, renamed, retyped)}) == 4
    assert digest({"a": np.array(1.0)}) != digest({"a": np.array(2.0)})


def test_members_share_their_place():
    assert Start("a", "train", 3, 7, group=1, member=0).place == Start("a", "train", 3, 7, group=1, member=5).place
