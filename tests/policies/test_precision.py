"""`auto` is decided by a CPU's instructions or by a trial; a choice made by hand counts, and a slow one is named."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hilt.core import platform as system
from hilt.core.config import build, freeze, thaw
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.policies import precision
from hilt.policies.agent.config import AgentConfig
from hilt.policies.agent.encoders import Encoder, EncoderConfig
from hilt.policies.precision import PrecisionChoice, Trial, choose, measures, slowness
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.replay.tensors import generator

NONE, AMX, AVX512 = (
    "fpu sse2 avx2 avx512f",
    "fpu sse2 avx512f avx512_bf16 amx_tile amx_bf16",
    "fpu sse2 avx512f avx512_bf16",
)
DECIDES = precision._automatic  # as it is outside tests


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes this CPU another: its machine, its instructions (None: no list of them), and
    how many times bfloat16 gains in a trial."""
    for name in precision.RESTRICTING:
        monkeypatch.delenv(name, raising=False)
    trials: list[float] = []

    def become(machine: str, instructions: str | None, gain: float | None = None) -> list[float]:
        def trial() -> Trial:
            assert gain is not None, "nothing was to be measured"
            trials.append(gain)
            return Trial(gain, 1.0)

        path = tmp_path / "cpuinfo"
        path.unlink(missing_ok=True)
        if instructions is not None:
            title = "Features" if machine == "aarch64" else "flags"
            path.write_text(f"processor\t: 0\n{title}\t\t: {instructions}\nbugs\t: none\n")
        monkeypatch.setattr(system, "CPU", path)
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(precision, "trial", trial)
        monkeypatch.setattr(precision, "_automatic", DECIDES)
        DECIDES.cache_clear()
        return trials

    yield become
    DECIDES.cache_clear()


@pytest.mark.parametrize(
    ("machine", "instructions", "chosen", "why"),
    [
        ("x86_64", NONE, "float32", "this CPU has no bfloat16 instructions"),
        ("AMD64", NONE, "float32", "this CPU has no bfloat16 instructions"),
        ("x86_64", AMX, "bfloat16", "this CPU has AMX"),
        ("aarch64", "fp asimd asimddp", "float32", "this CPU has no bfloat16 instructions"),
    ],
)
def test_conclusive_instructions_decide_without_a_trial(cpu, machine: str, instructions: str, chosen: str, why: str):
    cpu(machine, instructions)
    assert choose("auto") == PrecisionChoice(chosen, why)
    assert str(choose("auto")) == f"precision: {chosen} ({why})"


@pytest.mark.parametrize(
    ("machine", "instructions"), [("x86_64", AVX512), ("aarch64", "fp asimd bf16"), ("arm64", None), ("x86_64", None)]
)
@pytest.mark.parametrize(
    ("gain", "chosen", "why"),
    [
        (2.0, "bfloat16", "measured on this CPU: bfloat16 is 2.0 times as fast"),
        (1.05, "float32", "measured on this CPU: bfloat16 is 1.1 times as fast"),
        (0.04, "float32", "measured on this CPU: bfloat16 is 25.0 times as slow"),
    ],
)
def test_else_a_trial_decides_once_in_a_process(
    cpu, machine: str, instructions: str, gain: float, chosen: str, why: str
):
    trials = cpu(machine, instructions, gain)
    assert choose("auto") == choose("auto") == PrecisionChoice(chosen, why)
    assert len(trials) == 1


@pytest.mark.parametrize("name", precision.RESTRICTING)
def test_with_a_restricting_environment_variable_the_instructions_are_not_conclusive(
    cpu, monkeypatch: pytest.MonkeyPatch, name: str
):
    trials = cpu("x86_64", AMX, 1 / 12)
    monkeypatch.setenv(name, "AVX2")
    assert choose("auto").precision == "float32" and len(trials) == 1
    cpu("x86_64", NONE)  # what a CPU does not have, no variable gives
    assert choose("auto").precision == "float32"


def test_a_choice_by_hand_counts_and_nothing_is_measured(cpu):
    cpu("x86_64", NONE)
    assert choose("bfloat16") == PrecisionChoice("bfloat16", "as set") and choose("float32") == PrecisionChoice(
        "float32", "as set"
    )
    with pytest.raises(UnknownNameError, match=r"no precision named 'bf16'"):
        choose("bf16")


def test_a_choice_by_hand_that_is_far_slower_is_named(cpu):
    cpu("aarch64", "fp asimd", 0.04)
    words = (
        "precision: bfloat16 is at least 25 times slower than float32 on this CPU: a run with "
        "compute=float32 would be faster"
    )
    assert slowness("bfloat16", "cpu", "compute") == words and slowness("float16") == ""
    cpu("x86_64", AVX512, 4.0)
    words = (
        "precision: float32 is at least 4 times slower than bfloat16 on this CPU: a run with "
        "precision=bfloat16 would be faster"
    )
    assert slowness("float32") == words
    assert slowness("bfloat16") == ""
    cpu("x86_64", AVX512, 0.4)
    assert slowness("bfloat16") == slowness("float32") == ""


def test_precision_is_not_measured_where_instructions_decide_or_on_a_gpu(cpu):
    cpu("x86_64", NONE)
    assert slowness("float32") == slowness("auto") == slowness("bfloat16", "cuda:0") == ""
    assert (
        not measures("float32") and not measures("auto") and not measures("bfloat16", "cuda:0") and measures("bfloat16")
    )
    cpu("x86_64", AMX)
    assert slowness("bfloat16") == ""
    cpu("x86_64", AVX512)
    assert measures("auto") and measures("float32") and measures("bfloat16")


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_auto_is_float32_on_a_gpu_whatever_the_cpu_can_do(cpu, device: str):
    cpu("x86_64", AMX)
    assert choose("auto", device) == PrecisionChoice(
        "float32", "networks of this size are no faster in bfloat16 on a GPU"
    )


# The trial itself


def test_the_trial_stops_where_bfloat16_is_emulated(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def measured(images: int, pixels: int) -> Trial:
        asked.append((images, pixels))
        return Trial(1.0, 50.0)

    monkeypatch.setattr(precision, "_measured", measured)
    assert precision.trial.__wrapped__().gain == 1 / 50
    assert asked == [(1, 32)]


def test_the_trial_goes_on_where_it_is_not(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def measured(images: int, pixels: int) -> Trial:
        asked.append((images, pixels))
        return Trial(1.0, 2.0 if images == 1 else 0.5)  # a small image waits for other things than multiplications

    monkeypatch.setattr(precision, "_measured", measured)
    assert precision.trial.__wrapped__().gain == 2.0
    assert asked == [(1, 32), (8, 64), (64, 64)]


def test_the_trial_takes_the_best_round_of_each_and_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    """On a clock of its own: passes of float32 take 1 ms, those of bfloat16 2 ms,
    and now and then somebody else is busy."""
    now, passes = [0.0], {torch.float32: 0, torch.bfloat16: 0}
    long = {torch.float32: 1e-3, torch.bfloat16: 2e-3}

    def step(images: int, pixels: int, dtype: torch.dtype):
        def run() -> None:
            passes[dtype] += 1
            now[0] += long[dtype] * (100 if passes[dtype] == 3 else 1)

        return run

    monkeypatch.setattr(precision, "_step", step)
    monkeypatch.setattr(precision.time, "perf_counter", lambda: now[0])
    assert precision._measured(1, 32).gain == pytest.approx(0.5)
    long[torch.bfloat16] = 10.0  # seconds: after the first round, which it needs to know, there is no other
    passes.update({torch.float32: 10, torch.bfloat16: 10})
    precision._measured(1, 32)
    assert passes == {torch.float32: 12, torch.bfloat16: 12}


def test_the_trial_leaves_torch_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.no_grad():
        measured = precision.trial.__wrapped__()
        assert not torch.is_grad_enabled()
    assert measured.float32_s > 0 and measured.bfloat16_s > 0
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def chosen_by_a_process(**environment: str) -> str:
    code = "from hilt.policies.precision import choose; print(choose('auto').precision)"
    kept = {name: value for name, value in os.environ.items() if name not in precision.RESTRICTING}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="oneDNN's limit is one of x86's instructions"
)
def test_a_process_whose_onednn_is_restricted_to_avx2_computes_in_float32():
    assert chosen_by_a_process(ONEDNN_MAX_CPU_ISA="AVX2") == "float32"


@pytest.mark.skipif(
    precision._by_instructions() != "float32", reason="this CPU has bfloat16 instructions, or lists none"
)
def test_a_process_on_this_cpu_computes_in_float32():
    assert chosen_by_a_process() == "float32"


# Modules and settings


def test_an_encoder_computes_as_it_is_set_and_as_auto_decides(monkeypatch: pytest.MonkeyPatch):
    seen = {"images/front": torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=generator(0))}

    def features(setting: str) -> torch.Tensor:
        return Encoder({"images/front": (32, 32, 3)}, EncoderConfig(precision=setting), generator(1))(seen)

    exact, rough = features("float32"), features("bfloat16")
    assert 0 < (exact - rough).abs().max() < 0.05
    assert torch.equal(features("auto"), exact)
    monkeypatch.setattr(precision, "_automatic", lambda device: PrecisionChoice("bfloat16", "a trial"))
    assert torch.equal(features("auto"), rough)
    with pytest.raises(UnknownNameError, match="no encoder precision named 'half'"):
        features("half")


def test_a_small_vla_leaves_its_precision_out_of_its_folder(tmp_path: Path):
    SmallVLA(SmallVLAConfig(precision="float32")).save_pretrained(tmp_path / "policy")
    assert SmallVLA.from_pretrained(tmp_path / "policy").config.precision == "auto"
    assert SmallVLA.from_pretrained(tmp_path / "policy", precision="bfloat16").config.precision == "bfloat16"
    assert SmallVLA.from_pretrained(tmp_path / "policy", bfloat16=True).config.precision == "bfloat16"
    with pytest.raises(UnknownNameError, match="no precision named 'double'"):
        SmallVLA.from_pretrained(tmp_path / "policy", precision="double")


def test_precision_of_folders_of_earlier_versions_is_read(tmp_path: Path):
    SmallVLA(SmallVLAConfig()).save_pretrained(tmp_path / "policy")
    document = tmp_path / "policy" / "config.json"
    document.write_text(document.read_text().replace('"state_dim"', '"bfloat16": true, "state_dim"'))
    assert SmallVLA.from_pretrained(tmp_path / "policy").config.precision == "bfloat16"
    assert SmallVLA.from_pretrained(tmp_path / "policy", precision="float32").config.precision == "float32"


@pytest.mark.parametrize(("given", "meant"), [("true", "bfloat16"), ("false", "float32")])
def test_the_former_name_of_the_setting_goes_on_working(tmp_path: Path, given: str, meant: str):
    assert build(AgentConfig(), f"encoder.bfloat16={given}").encoder.precision == meant
    freeze(AgentConfig(), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("precision: auto", f"bfloat16: {given}"))
    assert thaw(AgentConfig, tmp_path / "config.yaml").encoder.precision == meant


def test_the_former_name_with_another_value_names_the_new_one():
    with pytest.raises(
        ConfigError, match=r"bfloat16=auto: this setting is now precision, which is auto, float32 or bfloat16"
    ):
        build(AgentConfig(), "encoder.bfloat16=auto")
    with pytest.raises(ConfigError, match=r"bfloat16=True beside precision=auto: this setting is now precision"):
        SmallVLAConfig.from_json({"bfloat16": True, "precision": "auto"})
