"""How many layers are computed twice: by the numbers of the estimate, with the same gradients, frozen with the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hilt import cli
from hilt.algos.config import Batching
from hilt.core.checksums import read_json
from hilt.core.config import build
from hilt.core.errors import ConfigError
from hilt.policies.io import memory
from hilt.policies.io.memory import Estimate
from hilt.policies.registry import load_policy
from hilt.policies.vla.gemma import StackConfig, VisionConfig
from hilt.policies.vla.pi0 import Pi0, Pi0Config
from hilt.policies.vla.tokens import ByteTokenizer
from hilt.recipes import vla_recipe
from hilt.vla.config import Vla
from hilt.vla.footprint import blank_record, needs
from hilt.vla.plan import recomputation
from hilt.vla.plan.recomputation import STEPS, USABLE, on_device, settle
from hilt.vla.train import begin_run
from tests.cli.test_train_simplevla import folder  # noqa: F401  # a fixture
from tests.policies.tiny_openvla import TEXT, tiny
from tests.policies.tiny_pi0 import SIZES
from tests.recipes.test_published import OWN, SMALL
from tests.vla.toy_vla import config as toy

DEEP = {
    "vision": VisionConfig(16, 8, 2, 24, 14, 28),
    "vlm": StackConfig(16, 8, 24, 4, 2, 4),
    "expert": StackConfig(12, 8, 16, 4, 2, 4),
}
"""Eight layers in each stack"""


def pi0(**changes: Any) -> Pi0:
    return Pi0(Pi0Config(**{**SIZES, "vision": VisionConfig(16, 2, 2, 24, 14, 28), **changes}), ByteTokenizer(), {})


def of(policy: Any, place: Path, option: str, **options: Any) -> Vla:
    policy.save_pretrained(place)
    config = Vla(policy=str(place), policy_options={option: "auto", **options}, tasks=["libero_spatial/0"])
    return replace(config, algorithm=replace(config.algorithm, batch=Batching(chunks_per_pass=16)))


def oft() -> Any:
    """With few words, so that logits are not what takes most of the memory."""
    return tiny(text_config={**TEXT, "vocab_size": 640, "pad_token_id": 0})


CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (pi0, "gradient_checkpointing", {}),
    (oft, "checkpointed", {"allow_untrained": True, "unnorm_key": "libero_spatial"}),
]


@pytest.mark.parametrize(("make", "option", "options"), CASES, ids=["pi0", "oft"])
def test_the_least_share_that_fits_by_the_estimate_is_taken(
    make: Any, option: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = of(make(), tmp_path / "policy", option, **options)
    estimates: dict[tuple[int, int], Any] = {}

    def once(asked: Vla, sizes: dict[str, Any]) -> Any:  # of stacks of two or three layers; it takes seconds
        share = asked.policy_options[option]
        layers = (round(2 * share), round(3 * share))
        return estimates[layers] if layers in estimates else estimates.setdefault(layers, needs(asked, sizes))

    monkeypatch.setattr(recomputation, "needs", once)

    def limited(nbytes: float) -> Vla:
        return replace(config, memory_limit_gb=nbytes / USABLE / 1e9)

    sizes = []
    for step in range(STEPS + 1):
        share = replace(config, policy_options={option: step / STEPS, **options})
        sizes.append(on_device(config, once(share, {})))
    assert sizes == sorted(sizes, reverse=True) and len({*sizes}) > 2, "layers that are computed twice save memory"
    for size in {*sizes}:
        settled, choice = settle(limited(size + 1))
        assert choice is not None and choice.share == settled.policy_options[option] == sizes.index(size) / STEPS
        assert f"policy_options.{option}={choice.share:g} (auto: a training step needs" in str(choice)
        assert ("would need" in str(choice)) == (choice.share > 0)
    with pytest.raises(ConfigError, match=r"with all layers computed twice a training step needs .* fewer algorithm"):
        settle(limited(sizes[STEPS] - 100))
    chosen = recomputation.with_all(config)
    assert chosen.policy_options[option] == 1.0 and settle(chosen) == (chosen, None), "a number is left as it is"


@pytest.mark.parametrize(("make", "option", "options"), CASES, ids=["pi0", "oft"])
def test_gradients_are_the_same_with_any_share(make: Any, option: str, options: dict[str, Any], tmp_path: Path):
    make().save_pretrained(tmp_path / "policy")
    found: dict[float, dict[str, torch.Tensor]] = {}
    for share in (0.0, 0.5, 1.0):
        policy = load_policy(tmp_path / "policy", **{option: share, **options})
        policy.evaluate(blank_record(policy, 3)).log_prob.sum().backward()
        found[share] = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    for share in (0.5, 1.0):
        assert found[share].keys() == found[0.0].keys() and len(found[share]) > 40
        for name, gradient in found[share].items():
            torch.testing.assert_close(gradient, found[0.0][name], msg=name)


def test_share_is_of_each_stack(tmp_path: Path):
    pi0(**DEEP).save_pretrained(tmp_path / "policy")
    policy: Any = load_policy(tmp_path / "policy", gradient_checkpointing=0.25)
    calls: dict[str, int] = {}
    parts = {
        "tower": policy.paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder["layers"],
        "language": policy.paligemma_with_expert.paligemma.model.language_model.layers,
        "expert": policy.paligemma_with_expert.gemma_expert.model.layers,
    }

    def count(name: str) -> Any:
        def called(*_: Any) -> None:
            calls[name] = calls.get(name, 0) + 1

        return called

    for part, layers in parts.items():
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(count(f"{part} {place}"))
    policy.evaluate(blank_record(policy, 2)).log_prob.sum().backward()
    twice = {name for name, times in calls.items() if times > calls[f"{name.split()[0]} 5"]}
    assert twice == {f"{part} {place}" for part in parts for place in (0, 1)}


def test_a_reference_on_the_host_counts_only_in_its_passes():
    training = Estimate(weights=100, gradients=100, optimizer=200, activations=50, largest=1, rows=1, training=True)
    looked = Estimate(weights=100, gradients=0, optimizer=0, activations=10, largest=1, rows=1, training=False)
    held = toy("algorithm.kl.where=reward")
    assert on_device(held, {"policy, in training": training, "reference": looked}) == 560
    away = toy("algorithm.kl.where=reward", "reference.offload=true")
    assert on_device(away, {"policy, in training": training, "reference, on the host": looked}) == 450
    large = replace(looked, weights=500)
    assert on_device(away, {"policy, in training": training, "reference, on the host": large}) == 300 + 510
    parts = toy("sharding.enabled=true", "placement.kind=processes", "placement.ranks=2")
    assert on_device(parts, {"policy, in training": training}) == 250, "each rank has half of all but activations"


def test_run_decides_when_it_begins_and_shows_it(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def made_up(asked: Vla, sizes: dict[str, Any]) -> dict[str, Estimate]:
        kept = int((1 - asked.policy_options["checkpointed"]) * 10**9)
        return {"policy, in training": Estimate(10**8, 0, 0, kept, 1, rows=8, training=True)}

    monkeypatch.setattr(recomputation, "needs", made_up)
    words = [f"policy={folder}", *SMALL, *OWN["oft"], "lora.rank=2", "policy_options.checkpointed=auto"]
    config = build(vla_recipe("oft_grpo"), *words)
    run = tmp_path / "run"
    settled = begin_run(run, "oft_grpo", build(config, "memory_limit_gb=1"))
    assert settled.policy_options["checkpointed"] == read_json(run / "run.json")["recomputation"] == 0.25
    (line,) = recomputation.lines(run)
    assert line == (
        "recomputation: policy_options.checkpointed=0.25 (auto: a training step needs 850.0 MB, and 900.0 MB may be "
        "used (90% of memory_limit_gb); 0.125 would need 975.0 MB)"
    )
    assert "checkpointed: 0.25" in (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"policy_options.checkpointed=auto: with all layers"):
        begin_run(tmp_path / "small", "oft_grpo", build(config, "memory_limit_gb=0.001"))
    fixed = build(config, "memory_limit_gb=0.001", "policy_options.checkpointed=0.5")
    with pytest.raises(ConfigError, match=r"memory_limit_gb=0.001: a training step needs 600.0 MB. Give policy_opt"):
        begin_run(tmp_path / "small", "oft_grpo", fixed)
    assert not (tmp_path / "small").exists()
    shown = CliRunner().invoke(
        cli.app, ["train", "oft_grpo", *words, "memory_limit_gb=0.001", "--dry-run"], env={"COLUMNS": "200"}
    )
    assert "memory that a rank may use on cpu (memory_limit_gb): 0.0 GB" in shown.output
    assert "this machine lacks, for a start:" in shown.output and "with all layers computed twice" in shown.output


def test_limit_is_that_of_the_allocator_on_cuda(monkeypatch: pytest.MonkeyPatch):
    limits: list[tuple[float, object]] = []
    monkeypatch.setattr(memory, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=150 * 10**9))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append((share, device))
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    memory.limit_memory("cuda:1", 24)
    memory.limit_memory("cuda", 24)  # torch refuses a device without a number here
    memory.limit_memory("cuda:0", 0)
    memory.limit_memory("cpu", 24)
    assert limits == [(pytest.approx(0.16), 1), (pytest.approx(0.16), 3)]


def test_peak_of_memory_is_that_of_the_rank_with_the_most_and_begins_anew(monkeypatch: pytest.MonkeyPatch):
    cleared: list[torch.device] = []
    monkeypatch.setattr(memory, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda place: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", cleared.append)
    assert memory.peak_memory("cuda", lambda bytes_here: max(bytes_here, 5 * 10**9)) == {"gpu_memory_gb": 5.0}
    assert memory.peak_memory("cpu", lambda bytes_here: 10**9) == {}, "a figure of a GPU alone"
    assert cleared == [torch.device("cuda")]


def test_limit_of_a_policy_that_is_not_estimated(monkeypatch: pytest.MonkeyPatch):
    stranger = type("Stranger", (), {"__module__": "elsewhere"})
    monkeypatch.setattr(recomputation, "policy_class", lambda policy: stranger)
    recomputation.check_limit(toy())
    with pytest.raises(ConfigError, match="memory_limit_gb=2: the memory of Stranger, a policy of another package"):
        recomputation.check_limit(toy("memory_limit_gb=2"))
    recomputation.check_limit(toy("memory_limit_gb=2", "device=cuda"))
