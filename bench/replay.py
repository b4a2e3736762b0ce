"""The experience store beside its peers: inserting and sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import Group, Lab, disk_usage, files_of, remove
from bench.limits import PlainAppend, PlainFrames, RamGather, drop_page_cache, memcpy, resident_share, touch_memory
from bench.peers import Cpprb, Peer, TorchRLMemmap, installed
from bench.replay_faces import FACE_GROUPS
from bench.replay_scale import SCALE_GROUPS
from bench.report import Row, at_least, at_most
from bench.timing import Rates, in_turns, seconds_each, seconds_of
from bench.workloads import BATCH, W1, W2, W3, as_trajectory, for_peers, own_memory, steps_of
from hilt.replay import Log, Schema

WARMED = "the page cache's pages were touched before, for ours and peers alike"


def w1(lab: Lab) -> list[Row]:
    """Robot transitions: one by one in, batches out, warm and cold."""
    work = W1(transitions=lab.pick(20_000, 300))
    size = lab.size(work.transitions, W1().transitions, "transitions")
    path = lab.new("w1")
    lab.limits["memcpy"] = f"{memcpy(min(0.2, lab.seconds), lab.pick(3, 1)).median * (64 << 20) / 1e9:.1f} GB/s"

    touch_memory(lab.folder, 200_000 * work.transitions)
    inserted, used = fill_w1(path, work)
    log = Log.open(path, "r")
    sampler = log.all().sampler(seed=0)
    work.check(sampler.sample(64))
    frames = {c: np.concatenate([work.frames(e)[c] for e in range(work.episodes)]) for c in work.cameras}
    gather = RamGather(frames, BATCH, ahead=(0, 1))
    lab.progress("w1: sampling beside each peer")
    contenders = {"ours": lambda: sampler.sample(BATCH), "limit": gather}
    found, absent = installed()
    peers = {p.name: _measure_peer(lab, p, work, contenders) for p in found}
    if not peers:
        alone = in_turns(contenders, lab.rounds, lab.seconds)
    best = max(peers, key=lambda p: peers[p]["sample"].median, default=None)
    rates = peers[best] if best else {"sample": alone["ours"], **alone}
    lab.limits["gather of 49,152-byte rows"] = f"{rates['limit'].median * gather.nbytes / 1e9:.1f} GB/s"
    log.close()
    del gather

    rows = [
        Row(
            name="w1_insert_one",
            ours=inserted.median,
            spread=inserted.spread,
            unit="transitions/s",
            what="W1 inserted one by one with Episode.append, process-safe, on disk",
            targets=[at_least(8_000)],
            peers={p: r["add"].median for p, r in peers.items()},
            absent=absent,
            size=size,
            note=f"peers are not process-safe (RAM, or a memory map); {WARMED}",
        ),
        Row(
            name="w1_bytes",
            ours=used / work.transitions,
            unit="bytes/transition",
            what="bytes on disk per W1 transition, from du of the folder",
            targets=[at_most(100_000)],
            size=size,
        ),
        Row(
            name="w1_sample_warm",
            ours=rates["ours"].median,
            spread=rates["ours"].spread,
            unit="batches/s",
            what="batches of 256 with contiguous observations and next observations (50.4 MB), "
            "from disk, page cache warm",
            targets=[at_least(1.5, "peer"), at_least(0.75, "limit")],
            peers={p: r["sample"].median for p, r in peers.items()},
            absent=absent,
            limit=rates["limit"].median,
            limit_name="numpy take(out=) of the same rows in RAM",
            size=size,
            note="ours, the limit and the best peer took turns; the other peers' turns were their own",
        ),
    ]
    rows.append(_w1_cold(lab, path, frames, size))
    remove(path)
    return rows


def fill_w1(path: Path, work: W1, durability: str = "never") -> tuple[Rates, int]:
    """(transitions per second, once per ten episodes; bytes on disk) of a new log filled one by one."""
    rates = []
    with Log.create(path, Schema.of(steps_of(work.columns(0))[0]), durability=durability) as log:
        for first in range(0, work.episodes, 10):
            episodes = [steps_of(work.columns(e)) for e in range(first, min(first + 10, work.episodes))]
            seconds = seconds_of(_append, log, episodes)
            rates.append(sum(map(len, episodes)) / seconds)
    return Rates(rates), disk_usage(path)


def _append(log: Log, episodes: list[list[dict[str, Any]]]) -> None:
    for steps in episodes:
        with log.episode() as episode:
            for step in steps:
                episode.append(step)


def _measure_peer(
    lab: Lab, kind: type[Peer], work: W1, contenders: dict[str, Callable[[], object]]
) -> dict[str, Rates]:
    """Fills a peer, timing single inserts first, then samples from it in turns with ours and the limit."""
    lab.progress(f"w1: {kind.title()}")
    folder = lab.new("peer")
    touch_memory(lab.folder, 200_000 * work.transitions)
    peer = kind(work.transitions, for_peers(work.columns(0)), BATCH, folder)
    added = []
    singles = lab.pick(20, 5)
    for e in range(work.episodes):
        columns = for_peers(work.columns(e))
        if e < singles:
            steps = peer.steps(columns)
            added.append(len(steps) / seconds_each(peer.add_one, steps))
        else:
            peer.add_block(peer.block(columns))
    rates = in_turns({**contenders, "sample": peer.sample}, lab.rounds, lab.seconds)
    del peer
    remove(folder)
    return {"add": Rates(added[1:]), **rates}


def _w1_cold(lab: Lab, path: Path, frames: dict[str, np.ndarray], size: str) -> Row:
    """Ours and the limit in turns, each with its files out of the page cache before every turn."""
    lab.progress("w1: cold")
    limit = PlainFrames(lab.new("plain"), frames, BATCH, ahead=(0, 1))
    log_files, batches = files_of(path), 3
    ours, theirs, resident = [], [], []
    for round_number in range(lab.rounds):
        drop_page_cache(log_files)
        resident.append(resident_share(log_files))
        with Log.open(path, "r") as log:
            sampler = log.all().sampler(seed=round_number)
            ours.append(batches / seconds_each(sampler.sample, [BATCH] * batches))
        drop_page_cache(limit.paths)
        theirs.append(batches / seconds_each(lambda _: limit(), range(batches)))
    limit.close()
    remove(limit.paths[0].parent)
    lab.limits["cold pread gather"] = f"{np.median(theirs) * 0.0503:.2f} GB/s"
    return Row(
        name="w1_sample_cold",
        ours=float(np.median(ours)),
        spread=(min(ours), max(ours)),
        unit="batches/s",
        what="the same after the files were put out of the page cache (posix_fadvise), 3 batches at a time",
        targets=[at_least(0.8, "limit")],
        limit=float(np.median(theirs)),
        limit_name="ordered pread of the same number of frames from plain files, one thread, "
        "page cache dropped likewise",
        size=size,
        note=f"{max(resident):.1%} of the log was resident at the start of a turn at most",
    )


def w1_durable(lab: Lab) -> list[Row]:
    """Whole episodes, each power-safe when `Log.add` returns."""
    work = W1(transitions=lab.pick(4_000, 200))
    # Observations and next observations in memory of their own, as they come from
    # most rollouts: equality must be found out.
    trajectories = [as_trajectory(own_memory(work.columns(e))) for e in range(work.episodes)]
    touch_memory(lab.folder, 200_000 * work.transitions)
    log = Log.create(lab.new("durable"), Schema.of(trajectories[0], leading=2), durability="every episode")
    row_bytes = log.schema.layout.row.itemsize * work.episode
    sizes = [(work.episode + 1) * 49152] * len(work.cameras) + [row_bytes]
    limit = PlainAppend(lab.new("append"), sizes)
    ours, theirs = [], []
    for i, trajectory in enumerate(trajectories):
        if i % 2:  # whoever comes second may find the disk still busy
            theirs.append(limit.nbytes / 1e6 / seconds_of(limit))
        ours.append(limit.nbytes / 1e6 / seconds_of(log.add, trajectory))
        if not i % 2:
            theirs.append(limit.nbytes / 1e6 / seconds_of(limit))
    log.close()
    limit.close()
    remove(log.path)
    remove(lab.folder / "append")
    lab.limits["disk write + fsync"] = f"{np.median(theirs[1:]) / 1e3:.2f} GB/s"
    return [
        Row(
            name="w1_insert_power_safe",
            ours=float(np.median(ours[1:])),
            spread=(min(ours[1:]), max(ours[1:])),
            unit="MB/s",
            what="W1 in trajectories of 100 with Log.add, each power-safe (fsync returned) when the call returns",
            targets=[at_least(0.6, "limit")],
            limit=float(np.median(theirs[1:])),
            limit_name="the same bytes in as many writes to one plain file, then one fsync",
            size="" if not lab.quick else f"{work.episodes} trajectories instead of 40",
            note=f"{np.median(ours[1:]) / limit.nbytes * 1e6 * work.episode:,.0f} transitions/s; ours syncs "
            "three files per trajectory",
        )
    ]


def w2(lab: Lab) -> list[Row]:
    """Chunks of VLA trajectories."""
    work = W2(trajectories=lab.pick(50, 2))
    size = lab.size(work.trajectories, W2().trajectories, "trajectories")
    touch_memory(lab.folder, work.chunks * 152_000)
    lab.progress("w2: filling")
    log = Log.create(lab.new("w2"), Schema.of(work.columns(0), leading=2), durability="never")
    for i in range(work.trajectories):
        log.add(work.columns(i))
    sampler = log.all().sampler(seed=0)
    keys = ["observations", "tokens", "log_probs"]
    contenders: dict[str, Callable[[], object]] = {"ours": lambda: sampler.sample(BATCH, keys=keys)}
    found, absent = installed((TorchRLMemmap,))
    for kind in found:
        lab.progress(f"w2: {kind.title()}")
        touch_memory(lab.folder, work.chunks * 152_000)
        peer = kind(work.chunks, _flat_chunks(work.columns(0)), BATCH, lab.new("peer"))
        for i in range(work.trajectories):
            peer.add_block(peer.block(_flat_chunks(work.columns(i))))
        contenders[kind.name] = peer.sample
    rates = in_turns(contenders, lab.rounds, lab.seconds)
    log.close()
    remove(log.path)
    remove(lab.folder / "peer")
    return [
        Row(
            name="w2_sample_warm",
            ours=rates["ours"].median,
            spread=rates["ours"].spread,
            unit="batches/s",
            what="256 chunks of W2 (38.7 MB), from disk, page cache warm",
            targets=[at_least(3, "peer")],
            peers={k.name: rates[k.name].median for k in found},
            absent=absent,
            size=size,
        )
    ]


def _flat_chunks(columns: dict[str, Any]) -> dict[str, Any]:
    flat = {"image": columns["observations"]["image"], "tokens": columns["tokens"], "log_probs": columns["log_probs"]}
    return {k: v.reshape(-1, *v.shape[2:]) for k, v in flat.items()}


def w3(lab: Lab) -> list[Row]:
    """Small steps, where every microsecond of Python shows."""
    work = W3(transitions=lab.pick(1_000_000, 10_000))
    size = lab.size(work.transitions, W3().transitions, "transitions")
    touch_memory(lab.folder, 300 * work.transitions)
    log = Log.create(lab.new("w3"), Schema.of(steps_of(work.columns(0))[0]), durability="never")
    blocks = [as_trajectory(work.columns(b)) for b in range(work.blocks)]
    block_rates = [work.block / seconds_of(log.add, block) for block in blocks]
    found, absent = installed()
    peers: dict[str, Peer] = {}
    peer_blocks: dict[str, Rates] = {}
    for kind in found:
        lab.progress(f"w3: {kind.title()}")
        peer = peers[kind.name] = kind(
            work.transitions, for_peers(work.columns(0)), BATCH, lab.new(f"peer-{len(peers)}")
        )
        ready = [peer.block(for_peers(work.columns(b))) for b in range(work.blocks)]
        peer_blocks[kind.name] = Rates([work.block / seconds_of(peer.add_block, block) for block in ready])
    lab.progress("w3: sampling")
    sampler, keys = log.all().sampler(seed=0), list(work.columns_asked)
    contenders = {"ours": lambda: sampler.sample(BATCH, keys=keys), **{name: p.sample for name, p in peers.items()}}
    sampled = in_turns(contenders, lab.rounds, lab.seconds)
    everything = in_turns({"ours": lambda: sampler.sample(BATCH)}, 3, lab.seconds)["ours"]
    lab.progress("w3: one by one")
    inserted, peer_inserted = _w3_one_by_one(lab, work, log, peers)
    log.close()
    rows = [
        Row(
            name="w3_sample",
            ours=sampled["ours"].median,
            spread=sampled["ours"].spread,
            unit="batches/s",
            what="256 transitions of W3 with the six columns that peers hold, from disk",
            targets=[at_least(1.5, "peer")],
            peers={n: sampled[n].median for n in peers},
            best=Cpprb.name if Cpprb.name in peers else None,
            absent={k: v for k, v in absent.items() if k == Cpprb.name},
            size=size,
            note=f"with our own columns too (who acted, policy version): {everything.median:,.0f} "
            "batches/s; the target names cpprb",
        ),
        Row(
            name="w3_insert_one",
            ours=inserted.median,
            spread=inserted.spread,
            unit="transitions/s",
            what="W3 inserted one by one with Episode.append, process-safe, on disk",
            targets=[at_least(60_000)],
            peers={n: r.median for n, r in peer_inserted.items()},
            absent=absent,
            size=size,
            note="peers are not process-safe (RAM, or a memory map)",
        ),
        Row(
            name="w3_insert_blocks",
            ours=float(np.median(block_rates)),
            spread=(min(block_rates), max(block_rates)),
            unit="transitions/s",
            what="W3 inserted with Log.add in blocks of 10,000, process-safe, on disk",
            targets=[at_least(2_000_000)],
            peers={n: r.median for n, r in peer_blocks.items()},
            absent=absent,
            size=size,
            note="peers copy into memory, without checksums and without a file that survives the process",
        ),
    ]
    del peers, contenders
    for path in lab.folder.glob("peer-*"):
        remove(path)
    remove(log.path)
    return rows


def _w3_one_by_one(lab: Lab, work: W3, log: Log, peers: dict[str, Peer]) -> tuple[Rates, dict[str, Rates]]:
    """Ours and peers in turns, 1,000 steps (an episode) at a time; slower peers fewer."""
    columns = {k: v[:1000] for k, v in work.columns(0).items()}
    steps, peer_columns = steps_of(columns), for_peers(columns)
    ready = {name: peer.steps(peer_columns) for name, peer in peers.items()}
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(lab.pick(60, 4)):
        ours.append(len(steps) / seconds_of(_append, log, [steps]))
        for name, peer in peers.items():
            some = ready[name][:200]
            theirs[name].append(len(some) / seconds_each(peer.add_one, some))
    return Rates(ours[1:]), {name: Rates(found[1:]) for name, found in theirs.items()}


GROUPS = {
    "w1": Group(("w1_insert_one", "w1_bytes", "w1_sample_warm", "w1_sample_cold"), w1),
    "w1_durable": Group(("w1_insert_power_safe",), w1_durable),
    "w2": Group(("w2_sample_warm",), w2),
    "w3": Group(("w3_sample", "w3_insert_one", "w3_insert_blocks"), w3),
    **SCALE_GROUPS,
    **FACE_GROUPS,
}
