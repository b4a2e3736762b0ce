"""FSDP2 on gloo: the numbers of a module in one piece, at any number of ranks, and
checkpoints that go from one number to another."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

from hilt.core.errors import ConfigError, MissingFieldError, UnknownNameError
from hilt.distributed.group import Here, Processes
from hilt.distributed.placement import Placement, Sharding
from hilt.distributed.ranks import Alone, host_meeting
from tests.distributed.toy_group import LEARNING_RATE, Net, Shards
from tests.effort import sampled
from tests.forked import with_torch

SHARDS = "tests.distributed.toy_group:Shards"
CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: what is moved from it to the CPU is not tested"
)


@pytest.fixture(scope="module")
def group():
    with with_torch():
        group = Processes(SHARDS, (), Placement(kind="processes", ranks=4, wait_seconds=60, call_seconds=200))
        group.meetings = []
        yield group
        group.close()


@pytest.fixture(scope="module")
def single():
    """The reference: one rank, in one piece: figures of nine steps, gradients and states on the way."""
    worker = Shards(ranks=Alone())
    worker.build(None)
    gradients = worker.gradients()
    figures, states = [], []
    for _ in range(3):
        figures += worker.train(3)
        states.append({part: {name: t.clone() for name, t in kept.items()} for part, kept in worker.state().items()})
    return gradients, figures, states


def enter(group, size):
    group.meetings.append(host_meeting())
    group.call("enter", group.meetings[-1][1], size)


def same(one, two, tolerance=1e-6):
    assert set(one) == set(two)
    for name in one:
        torch.testing.assert_close(
            one[name], two[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_checkpoints_go_from_two_ranks_to_one_to_four(group, single):
    gradients, figures, states = single
    state = None
    for stage, size in enumerate((2, 1, 4)):
        enter(group, size)
        group.call("build", {"units": ["Piece"]}, state)
        if stage == 0:
            for ours, theirs in zip(group.call("gradients")[0], gradients, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        trained = group.call("train", 3)[:size]
        for rank in range(size):
            torch.testing.assert_close(trained[rank], figures[3 * stage : 3 * stage + 3], rtol=1e-6, atol=1e-6)
        sizes, total = group.call("sizes")[:size], sum(p.numel() for p in Net().parameters() if p.requires_grad)
        assert sum(sizes) == total and (size == 1 or max(sizes) < total)
        full, *rest = group.call("state")[:size]
        assert all(not part for other in rest for part in other.values())
        for part in ("trained", "adam"):
            same(full[part], states[stage][part])
        answers = group.call("alone")[:size]  # rank-local: each rank asks another number of times
        assert [len(given) for given in answers] == list(range(1, size + 1)) and len(
            {given[0] for given in answers}
        ) == 1
        state = full


@pytest.mark.parametrize("value", ["none", "shared"])
def test_a_vla_in_pieces_is_the_one_in_one_piece(group, value):
    """In float64: its attention has biases whose true gradient is 0, as a softmax does not see them. In float32 that 0
    is rounding, which AdamW divides by its own size, so that they go where it leads: two runs differ there by up to a
    learning rate, and nobody can tell. Some weights have a gradient so small that even in float64 its rounding shows:
    all are within 1e-4 of the learning rate, and most within 1e-6."""
    worker = Shards(ranks=Alone())
    single = worker.train_vla(None, 3, value)
    enter(group, 2)
    found = group.call("train_vla", {"units": ["TransformerBlock"]}, 3, value)[0]
    same(found, single, 1e-4 * LEARNING_RATE)
    apart = torch.cat([(found[name] - single[name]).abs().flatten() for name in single])
    assert apart.quantile(0.9) < 1e-6 * LEARNING_RATE


@pytest.mark.parametrize("deal", sampled([(3, 3), (6, 0)], (6, 0)))
def test_a_reward_policy_in_pieces_learns_from_the_outcomes_of_both_ranks_as_one_in_one_piece_does(group, deal):
    """PRIME's update, as the worker makes it with sharding: ranks with different numbers of chunks, or with none.
    Float64, for the reason above; two updates, so that the second rewards by what the first one learned."""
    figures, actor, judge = Shards(ranks=Alone()).learn_outcomes(None, (6,), 2)
    enter(group, 2)
    answers = group.call("learn_outcomes", {"units": ["TransformerBlock"]}, deal, 2)[:2]
    for found in answers:
        assert found[0] == [pytest.approx(each, rel=1e-6, abs=1e-6) for each in figures]
    for ours, theirs in ((answers[0][1], actor), (answers[0][2], judge)):
        same(ours, theirs, 1e-4 * LEARNING_RATE)
        apart = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in theirs])
        assert apart.quantile(0.9) < 1e-6 * LEARNING_RATE
    assert figures[0]["prime_loss"] > figures[1]["prime_loss"], "it learned"
    (_, _, other) = Shards(ranks=Alone()).learn_outcomes(None, (3,), 2)
    assert max((other[name] - judge[name]).abs().max() for name in judge) > LEARNING_RATE / 2, (
        "the outcomes of one rank are not enough"
    )


@pytest.mark.parametrize("option", ["offload_gradients", "offload_optimizer", "offload_parameters"])
def test_offloading_changes_no_number(group, single, option):
    enter(group, 3)
    group.call("build", {option: True})
    torch.testing.assert_close(group.call("train", 3)[0], single[1][:3], rtol=1e-6, atol=1e-6)
    same(group.call("state")[0]["trained"], single[2][0]["trained"])


def test_bfloat16_is_near_and_is_not_float32(group, single):
    enter(group, 2)
    group.call("build", {"precision": "bfloat16", "units": ["Piece"]})
    figures = group.call("train", 3)[0]
    ours, theirs = torch.tensor(figures), torch.tensor(single[1][:3])
    assert 1e-5 < (ours - theirs).abs().max() < 3e-2
    state = group.call("state")[0]
    assert {t.dtype for t in state["trained"].values()} == {torch.float32}  # what is trained has all bits
    same(state["trained"], single[2][0]["trained"], 2e-2)
    group.call("build", {"precision": "bfloat16", "units": ["Piece"]}, None, 1.0)
    assert group.call("train", 3)[0] == figures  # computed again for the gradient: in bfloat16 too


@CUDA
@pytest.mark.parametrize(
    ("options", "weights", "given", "kept", "moments"),
    [
        ({}, "cuda", {"cuda"}, "cuda", "cuda"),
        ({"offload_gradients": True}, "cuda", set(), "cpu", "cuda"),
        ({"offload_optimizer": True}, "cuda", {"cuda"}, "cuda", "cpu"),
        ({"offload_parameters": True}, "cpu", {"cpu"}, "cpu", "cpu"),
    ],
)
def test_offloading_moves_to_the_cpu(options, weights, given, kept, moments):
    with contextlib.closing(Here(SHARDS, ("cuda",), device="cuda", joined=True)) as here:
        here.call("build", options)
        assert here.call("places") == [({weights}, given, {kept}, {moments})]


def test_only_the_warning_of_returned_views_is_ignored_and_only_in_a_pass():
    from hilt.distributed.shard import _returning_views  # seconds, for every worker that collects this file

    def warn():
        warnings.warn("FSDP2-wrapped module (Piece) returned a view tensor. An in-place op", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        _returning_views(warn)()
        assert [str(one.message) for one in heard] == ["something else"]
        assert warnings.filters == before


def test_what_cannot_be_sharded():
    from hilt.algos.config import Optimizer
    from hilt.distributed.shard import Sharded

    with pytest.raises(ConfigError, match="sharding needs ranks that have joined"):
        Sharded(Net(), Optimizer(), Alone(), Sharding(enabled=True))
    with contextlib.closing(Here(SHARDS, (), joined=True)) as here:
        with pytest.raises(
            UnknownNameError,
            match=r"no class of modules in this policy .sharding.units. named 'Peace'; did you mean 'Piece'",
        ):
            here.call("build", {"units": ["Peace"]})
        here.call("build", {})
        with pytest.raises(MissingFieldError, match=r"trained: first.bias is in the checkpoint or in the module only"):
            here.worker.optimizer.load_state_dict({"trained": {}, "adam": {}})
