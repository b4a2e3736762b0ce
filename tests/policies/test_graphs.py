"""Decisions as CUDA graphs give the answers of eager ones, whatever became of the weights meanwhile. What needs a GPU
is skipped without one."""

from __future__ import annotations

import contextlib
import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from hilt.core.errors import ConfigError, DeadlineError
from hilt.policies import graphs
from hilt.policies.graphs import Graphs, JoinedLinear, Places, bucket
from hilt.policies.vla import flow_policy, gemma, openvla
from hilt.policies.vla.gemma import GemmaStack, Rotation, StackConfig
from hilt.policies.vla.openvla import OpenVLAOptions
from hilt.policies.vla.pi0 import Pi0
from tests.policies import test_openvla, test_pi0
from tests.policies.tiny_openvla import bare

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KINDS = list(test_pi0.POLICIES)


def answers(policy: Any, rows: int, sample: bool = True) -> dict[str, np.ndarray]:
    actions, record = policy.act(test_pi0.seen(rows), sample, generator=torch.Generator().manual_seed(3))
    return {"actions": actions} | {
        name: record[name] for name in ("chain", "step", "log_prob", "value", "images") if name in record
    }


def assert_near(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], near: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape and found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name], array, rtol=near, atol=near * max(np.abs(array).max(), 1), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_filled_up_rows_and_prompts_change_no_answer(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    policy = test_pi0.made(kind)
    wanted = answers(policy, rows), answers(policy, rows, sample=False)
    shapes = captured_shapes(policy, monkeypatch)
    assert_near(answers(policy, rows), wanted[0])
    assert_near(answers(policy, rows, sample=False), wanted[1])
    lengths = (24, 48, 72, 90) if kind == "pi05" else (8, 16, 24)
    assert len(shapes) == 2 and all(shape[0] == (4 if rows == 3 else 1) and shape[1] in lengths for shape in shapes)


@pytest.mark.parametrize("kind", ["sde", "smolvla"])
def test_frames_of_another_size_are_fitted_within_the_decision(kind: str, monkeypatch: pytest.MonkeyPatch):
    policy, seen = test_pi0.made(kind), test_pi0.seen()[1:2]  # of 40 x 20 pixels, and without a wrist
    (wanted, first), shapes = policy.act(seen, False), captured_shapes(policy, monkeypatch)
    found, record = policy.act(seen, False)
    np.testing.assert_array_equal(record["images"], first["images"])
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert shapes and record["images"].shape == (1, 2, 28, 28, 3) and record["image_mask"].tolist() == [[True, False]]


def test_moved_policy_keeps_nothing_where_it_was(monkeypatch: pytest.MonkeyPatch):
    policy = test_pi0.made("sde")
    captured_shapes(policy, monkeypatch)
    wanted = answers(policy, 1)
    joined = [module.joined for module in policy.modules() if hasattr(module, "joined")]
    assert policy._graphs is not None and all(each.weight is not None for each in joined)
    policy.to(torch.float64).to(torch.float32)
    assert policy._graphs is None and all(each.weight is None for each in joined)
    assert_near(answers(policy, 1), wanted)


@pytest.mark.parametrize("kind", ["sde", "pi05"])
def test_warm_up_decides_once_for_each_length_of_a_prompt(kind: str, monkeypatch: pytest.MonkeyPatch):
    policy, told = test_pi0.made(kind), list[str]()
    policy.warm_up(True, told.append)
    assert not told  # nothing is captured on a CPU
    shapes = captured_shapes(policy, monkeypatch)
    policy.warm_up(True, told.append)
    lengths = (24, 48, 72, 90) if kind == "pi05" else (8, 16, 24)
    assert shapes == [(1, length) for length in lengths]
    assert told[0] == f"compiling decisions of one robot, prompts of up to {lengths[0]} tokens: 0 of {len(lengths)}"


def test_graphs_are_refused_where_there_is_no_cuda(tmp_path: Path):
    policy = test_pi0.made("sde")
    policy.save_pretrained(tmp_path / "policy")
    told = r"acting=captured makes CUDA graphs, and the policy is on cpu: give device=cuda, or leave acting out\."
    with pytest.raises(ConfigError, match=told):
        Pi0.from_pretrained(tmp_path / "policy", acting="captured")
    opened = Pi0.from_pretrained(tmp_path / "policy", tokenizer=policy.tokenizer, acting="eager")
    assert_near(answers(opened, 1), answers(policy, 1))


@pytest.mark.parametrize("kind", [name for name in test_openvla.KINDS if name != "ar"])
@pytest.mark.parametrize(("rows", "equal"), [(1, True), (3, False), (9, True)])
def test_openvla_oft_answers_with_filled_up_rows_and_prompts_as_without(
    kind: str, rows: int, equal: bool, monkeypatch: pytest.MonkeyPatch
):
    policy = test_openvla.policy_of(kind)
    wanted, record = test_openvla.acted(policy, rows, equal)
    asked, told, inner = list[tuple[int, ...]](), list[str](), policy._respond
    policy.warm_up(True, told.append)
    assert not told  # nothing is captured on a CPU
    monkeypatch.setattr(policy, "_captures", lambda: True)
    monkeypatch.setattr(
        policy, "_respond", lambda inputs, *more: asked.append(tuple(inputs.prompt.shape)) or inner(inputs, *more)
    )
    policy.warm_up(True, told.append)
    assert told == ["compiling decisions of one robot"] and asked.pop()[0] == 1 and not asked
    actions, other = test_openvla.acted(policy, rows, equal)
    assert_near({"actions": actions, **other}, {"actions": wanted, **record}, 1e-5)
    (shape,) = asked
    assert shape[0] == {1: 1, 3: 3, 9: 10}[rows]
    assert shape[1] == record["prompt"].shape[1] if equal else shape[1] % openvla.WORDS == 0
    assert policy._graphs is not None and copy.deepcopy(policy)._graphs is None
    assert policy.to(torch.float64)._graphs is None and policy._in_one_piece()
    monkeypatch.setattr(policy, "unshard", lambda: None, raising=False)  # as FSDP's modules have it
    assert not policy._in_one_piece()


def test_openvla_oft_by_graphs_is_refused_where_there_is_no_cuda():
    policy = test_openvla.policy_of("tokens", OpenVLAOptions(acting="captured"))
    with pytest.raises(ConfigError, match="acting=captured makes CUDA graphs, and the policy is on cpu"):
        test_openvla.acted(policy)
    with pytest.raises(ConfigError, match=r"acting='?captured'? would do nothing: it needs variant=oft"):
        bare(causal=True, options=OpenVLAOptions(acting="captured"))


@pytest.mark.parametrize(
    ("device", "kind", "checkpointing"),
    [
        pytest.param("cpu", "pi05", False, marks=pytest.mark.long),
        *(
            pytest.param("cuda:0", kind, checkpointing, marks=GPU)
            for kind in ("noise", "pi05", "smolvla")
            for checkpointing in (False, True)
        ),
    ],
)
def test_compiled_layers_have_the_gradients_of_eager_ones(
    device: str, kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
):
    policy = test_pi0.made(kind, gradient_checkpointing=checkpointing).to(device)
    record = policy.act(test_pi0.seen(), generator=torch.Generator().manual_seed(0))[1]
    if device == "cpu":  # the same tracing, without a compiler for C++
        traced = torch.compile(gemma.plain, backend="aot_eager", dynamic=False)
        monkeypatch.setattr(gemma, "compiled", lambda: traced)
        monkeypatch.setattr(flow_policy, "compiled", lambda: traced)
    policy._join_layers()  # as it is after a decision

    def gradients(how: str) -> dict[str, torch.Tensor]:
        policy.config = replace(policy.config, learning=how)
        found = policy.evaluate(record)
        loss, _ = policy.supervised_loss(
            test_pi0.seen(), np.zeros((3, 4, 2)), np.ones((3, 4), bool), torch.Generator().manual_seed(1)
        )
        (found.log_prob.sum() + found.value.sum() + loss).backward()
        given = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
        policy.zero_grad()
        return given

    wanted, found = gradients("eager"), gradients("compiled")
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=1e-5 * largest, msg=name)


def captured_shapes(policy: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """From now on the policy decides as on a GPU, but for the graphs; the shapes of the prompts are noted."""
    shapes, inner = [], policy._decide

    def decide(asked: Any, *run: Any) -> Any:
        shapes.append(tuple(asked["prompt"].shape))
        return inner(asked)

    monkeypatch.setattr(policy, "_captures", lambda: True)
    monkeypatch.setattr(policy, "_decide", decide)
    return shapes


def test_bucket_is_the_least_size_with_room():
    assert [bucket(count, (1, 2, 4)) for count in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 12]


def test_joined_layers_are_parts_of_one_weight():
    layers = nn.Linear(4, 3), nn.Linear(4, 2)
    joined, x = JoinedLinear(), torch.randn(5, 4)
    wanted = [layer(x) for layer in layers]
    joined.join(*layers)
    assert all(torch.equal(one, two) for one, two in zip(joined(x, *layers), wanted, strict=True))
    with torch.no_grad():
        layers[1].weight.mul_(2)
    assert joined.weight is not None and torch.equal(joined.weight, torch.cat([layer.weight for layer in layers]))
    one = torch.compile(lambda x: joined(x, *layers), backend="eager")(x)
    for found, layer in zip(one, layers, strict=True):
        torch.testing.assert_close(found, layer(x))
    assert copy.deepcopy(joined).weight is None
    places, other = [layer.weight.data_ptr() for layer in layers], JoinedLinear()
    other.join(*layers)  # of a policy that shares the layers
    assert [layer.weight.data_ptr() for layer in layers] == places
    assert other.weight is not None and torch.equal(other.weight, joined.weight)
    assert other.bias is not None and torch.equal(other.bias, torch.cat([layer.bias for layer in layers]))
    joined.join(layers[0], nn.Sequential(nn.Linear(4, 2)))
    assert joined.weight is None


def test_places_notice_what_was_moved_or_replaced():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    places = Places(module)
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert places.unchanged()
    module[0].weight.data = module[0].weight.data.clone()
    assert not places.unchanged() and Places(module).unchanged()
    places = Places(module)
    module[1] = nn.Linear(3, 2)
    assert not places.unchanged()


def test_copy_of_a_policy_has_no_graphs_of_the_other():
    policy = test_pi0.made("sde")
    policy._graphs = Graphs(policy._captured_decision, policy, policy.device)
    assert copy.deepcopy(policy)._graphs is None


class SlowCapture:
    """In place of a CUDA graph: made when the test lets it be."""

    begun, may_end = threading.Event(), threading.Event()
    error = ""

    def __init__(self, function: Any, inputs: Any, *_: Any):
        self.begun.set()
        assert self.may_end.wait(60)
        if self.error:
            raise ValueError(self.error)  # a compiler may raise anything
        self._function = function

    def start(self, inputs: Any) -> None:
        self._inputs = inputs

    def fetch(self) -> Any:
        return self._function(self._inputs) | {"by": torch.tensor(1)}


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Graphs with `aside`, of a function that doubles, whose captures are slow."""
    monkeypatch.setattr(graphs, "_Graph", SlowCapture)
    for name in ("begun", "may_end"):
        monkeypatch.setattr(SlowCapture, name, threading.Event())
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    made = Graphs(lambda asked: {"x": 2 * asked["x"]}, nn.Linear(2, 2), torch.device("cuda"))
    made.aside, made._without_graph = True, lambda function, inputs, options: function(inputs, **options)
    return made


def test_with_aside_calls_are_answered_without_a_graph_until_a_thread_has_captured_it(beside: Graphs):
    small, large = ({"x": torch.ones(rows)} for rows in (1, 3))
    assert [len(beside(asked)) for asked in (small, large, small, large)] == 4 * [1] and not len(beside)
    SlowCapture.may_end.set()
    beside.settle()
    assert len(beside) == 2 and all(beside(asked)["by"] == 1 for asked in (small, large))
    assert beside(large)["x"].tolist() == [2, 2, 2]
    SlowCapture.may_end.clear()
    assert len(beside({"x": torch.ones(5)})) == 1 and len(beside(small)) == 2  # the first graph answers meanwhile
    beside.aside = False  # whoever waits has the graph
    threading.Timer(0.2, SlowCapture.may_end.set).start()
    assert beside({"x": torch.ones(5)})["by"] == 1 and len(beside) == 3


def test_weights_that_are_moved_during_a_capture_lead_to_a_new_one(beside: Graphs):
    asked = {"x": torch.ones(1)}
    beside(asked)
    assert SlowCapture.begun.wait(60)
    beside._module.weight.data = beside._module.weight.data.clone()
    SlowCapture.may_end.set()
    beside.settle()
    assert len(beside) == 1 and len(beside(asked)) == 1, "the graph reads the weights where they were"
    beside.settle()
    assert len(beside) == 1 and beside(asked)["by"] == 1


def test_whoever_waits_for_a_capture_that_does_not_end_is_told(beside: Graphs, monkeypatch: pytest.MonkeyPatch):
    assert len(beside({"x": torch.ones(1)})) == 1
    monkeypatch.setattr(graphs, "CAPTURE_S", 0.1)
    with pytest.raises(DeadlineError, match=r"not compiled after 0\.1 s: give policy_options\.acting=eager"):
        beside.settle()
    SlowCapture.may_end.set()
    monkeypatch.setattr(graphs, "CAPTURE_S", 60)
    beside.settle()
    assert len(beside) == 1


def test_a_capture_aside_that_fails_is_told_once_and_answers_go_on(
    beside: Graphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(SlowCapture, "error", "out of shared memory\nand more")
    for rows in (1, 2):
        assert len(beside({"x": torch.ones(rows)})["x"]) == rows
    SlowCapture.may_end.set()
    for rows in (1, 2, 1):
        beside.settle()
        assert len(beside({"x": torch.ones(rows)})["x"]) == rows
    wanted = "decisions of a size stay without a CUDA graph, and are slower: ValueError: out of shared memory"
    assert caplog.messages == 2 * [wanted]


@GPU
@pytest.mark.parametrize("kind", ["sde", "pi05"])
def test_decisions_that_are_compiled_aside_are_those_of_eager_layers(kind: str):
    policy = test_pi0.made(kind).to("cuda:0")
    policy.config = replace(policy.config, acting="eager")
    wanted = {rows: answers(policy, rows) for rows in (1, 3)}
    policy.config = replace(policy.config, acting="fused")
    policy.compiles_aside = True
    policy.warm_up(True, lambda text: None)
    for _ in range(2):
        for rows in (1, 3, 3, 1):
            assert_near(answers(policy, rows), wanted[rows], 1e-3)
        policy._graphs.settle()
    assert len(policy._graphs) >= 3


@GPU
@pytest.mark.parametrize("acting", ["captured", "compiled", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_decisions_are_those_of_eager_layers(kind: str, acting: str):
    policy = test_pi0.made(kind).to("cuda:0")
    for rows, sample in ((3, True), (3, False), (1, True)):
        policy.config = replace(policy.config, acting="eager")
        wanted = answers(policy, rows, sample)
        policy.config = replace(policy.config, acting=acting)
        assert_near(answers(policy, rows, sample), wanted, 1e-3)
    assert len(policy._graphs) == 3


@GPU
def test_captured_decisions_follow_the_weights():
    policy, other = (test_pi0.made("noise", seed).to("cuda:0") for seed in (1, 2))
    for each in (policy, other):
        each.config = replace(each.config, acting="captured")
    wanted = answers(other, 3)
    first = answers(policy, 3)
    assert np.abs(first["actions"] - wanted["actions"]).max() > 0.01
    with torch.no_grad():
        for own, their in zip(policy.parameters(), other.parameters(), strict=True):
            own.copy_(their)
    assert_near(answers(policy, 3), wanted)  # the same graphs
    policy.to("cpu").to("cuda:0")
    assert_near(answers(policy, 3), wanted)  # new ones
    policy.action_out_proj = nn.Linear(12, 5).to("cuda:0")
    assert np.abs(answers(policy, 3)["actions"] - wanted["actions"]).max() > 0.01


@GPU
@pytest.mark.parametrize("alone", [0, 1, 51])
@pytest.mark.parametrize(("rows", "groups", "kind"), [(1, 1, ""), (1, 1, "adaptive"), (1, 4, "crosses"), (3, 2, "")])
def test_fused_layers_are_the_eager_ones(rows: int, groups: int, kind: str, alone: int):
    from hilt.policies import fused_layer

    torch.manual_seed(0)
    width, tokens, before, adaptive = 256, 51, 203, kind == "adaptive"
    config = StackConfig(width, 2, 512, 8, groups, 128, condition=width if adaptive else 0)
    stack = GemmaStack(config, key_width=lambda layer: 128 * groups if kind == "crosses" and layer else 0).cuda()
    for weight in stack.parameters():
        nn.init.normal_(weight, 0, 0.05)
    x = torch.randn(rows, tokens, width, device="cuda")
    cache = [tuple(torch.randn(rows, groups, before, 128, device="cuda") for _ in range(2)) for _ in stack.layers]
    valid = torch.rand(rows, before, device="cuda") > 0.3
    rotation = Rotation(torch.arange(tokens, device="cuda").expand(rows, -1) + before, 128)
    own = gemma.looking_at(valid, tokens, alone, rotation)
    sights = own, gemma.Sight(rotation, valid[:, None, None].expand(-1, -1, tokens, -1), valid)
    with torch.no_grad():
        conditions = stack.modulations(torch.randn(1, width, device="cuda")) if adaptive else None
        exact = stack.through(x, sights, cache, gemma.plain, conditions)
        stack.bfloat16()
        for module in stack.modules():
            if isinstance(module, gemma.RMSNorm):
                module.float()
            elif isinstance(module, gemma.MLP):
                module.joined.join(module.gate_proj, module.up_proj)
            elif isinstance(module, gemma.GemmaAttention) and not module.crosses:
                module.joined.join(module.q_proj, module.k_proj, module.v_proj)
        few, kept = x.bfloat16(), [tuple(each.bfloat16() for each in both) for both in cache]
        assert fused_layer.fits(stack, few, own, conditions or [None])
        eager, found = (stack.through(few, sights, kept, run, conditions) for run in (gemma.plain, gemma.quick))
        with mock.patch.object(fused_layer, "MOST_ROWS", 0), mock.patch.object(fused_layer, "FEW", 0):
            many = stack.through(few, sights, kept, gemma.quick, conditions)
    off = float((eager - exact).abs().max())
    assert float((found - exact).abs().max()) < 2 * off and float((many - exact).abs().max()) < 2 * off


@GPU
@pytest.mark.parametrize("silu", [False, True])
def test_fused_linear_has_the_precision_of_float32(silu: bool):
    torch.manual_seed(0)
    layer, x = nn.Linear(1024, 96).cuda(), torch.randn(2, 51, 1024, device="cuda")
    with torch.no_grad():
        exact = gemma.projected(layer.double(), x.double(), silu)
        found = gemma.quick(gemma.projected, layer.float(), x, silu)
    assert float((found - exact).abs().max()) < 1e-5
