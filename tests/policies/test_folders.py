"""Folders of OpenVLA: written whole, read as files, and refused when they are not what was asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from hilt.core.errors import ConfigError, FormatError, MissingFieldError, SchemaError, StorageError, UnknownNameError
from hilt.policies.io import folders as checkpoints
from hilt.policies.io import lora
from hilt.policies.registry import load_policy
from hilt.policies.vla.openvla import OpenVLA, OpenVLAOFT
from tests.policies.tiny_openvla import observations, same_weights, statistics, tiny


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def contents(folder: Path) -> dict[str, Any]:
    """Of safetensors their tensors' bytes and metadata: the library writes the metadata in any order."""
    found: dict[str, Any] = files(folder)
    for name in [each for each in found if each.endswith(".safetensors")]:
        with safetensors.safe_open(folder / name, "pt") as file:
            found[name] = file.metadata(), dict(safetensors.deserialize(found[name]))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    policy, folder = tiny(), tmp_path_factory.mktemp("saved") / "tokens"
    policy.save_pretrained(folder)
    return policy, folder


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({"causal": True}, set()),
        ({"num_images": 2, "use_proprio": True, "proprio_dim": 7, "value_head": True}, {"heads.safetensors"}),
        (
            {"head": "l1", "use_proprio": True, "proprio_dim": 7},
            {"action_head--0_checkpoint.pt", "proprio_projector--0_checkpoint.pt"},
        ),
        (
            {"head": "laplace", "film": True},
            {"action_head--0_checkpoint.pt", "vision_backbone--0_checkpoint.pt", "heads.safetensors"},
        ),
    ],
)
def test_save_and_load_is_the_same_policy(tmp_path: Path, changes: dict[str, Any], apart: set[str]):
    policy = tiny(**changes)
    policy.save_pretrained(tmp_path / "a")
    found = {file.name for file in (tmp_path / "a").iterdir()}
    assert found == apart | {
        "config.json",
        "model.safetensors",
        "dataset_statistics.json",
        "preprocessor_config.json",
        "tokenizer_config.json",
    }
    again = load_policy(tmp_path / "a", unnorm_key="libero_spatial", allow_untrained=True)
    assert type(again) is type(policy) and same_weights(policy, again) and again.unnorm_key == "libero_spatial_no_noops"
    seen = observations(state=7)
    greedy = [each.act(seen, sample=False)[0] for each in (policy, again)]
    assert (greedy[0] == greedy[1]).all()
    again.save_pretrained(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b"), "saved once more, every file holds the same"


def test_the_folder_is_never_changed_and_its_code_never_runs(
    saved: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "upstream"
    shutil.copytree(saved[1], folder)
    for name in ("modeling_prismatic.py", "configuration_prismatic.py", "processing_prismatic.py", "__init__.py"):
        (folder / name).write_text("print('this ran')\nraise SystemExit\n")
    document = json.loads((folder / "config.json").read_text())
    document["auto_map"] = {
        "AutoConfig": "configuration_prismatic.OpenVLAConfig",
        "AutoModelForVision2Seq": "modeling_prismatic.X",
    }
    (folder / "config.json").write_text(json.dumps(document))
    before = files(folder)
    policy = OpenVLAOFT.from_pretrained(folder, allow_untrained=True)
    policy.act(observations(), sample=False)
    assert files(folder) == before and capsys.readouterr().out == ""
    policy.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "modeling_prismatic.py").read_bytes() == before["modeling_prismatic.py"]
    assert "auto_map" in json.loads((tmp_path / "again" / "config.json").read_text())
    with pytest.raises(StorageError, match="it exists and is not empty"):
        policy.save_pretrained(folder)
    assert files(folder) == before and capsys.readouterr().out == ""


def test_upstream_folders_need_options(saved: tuple[Any, Path], tmp_path: Path):
    """No key of ours, statistics of several datasets, no chunk, no decoding."""
    policy, folder = saved[0], tmp_path / "upstream"
    shutil.copytree(saved[1], folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in document.items() if key not in ("hilt", "unnorm_key")})
    )
    sizes = {"vit": policy.config.vit, "image_size": 28, "allow_untrained": True}
    with pytest.raises(ConfigError, match=r"its files do not determine how it decodes: give variant='oft'"):
        load_policy(folder, **sizes)
    assert load_policy(folder, variant="oft", **sizes).chunk == 8, "LIBERO's"
    assert OpenVLAOFT.from_pretrained(folder, chunk=3, **sizes).chunk == 3
    assert OpenVLA.from_pretrained(folder, **sizes).chunk == 1
    stats = {"aloha_pour": statistics(), "libero_goal": statistics(), "mystery": statistics()}
    (folder / "dataset_statistics.json").write_text(json.dumps(stats))
    aloha = OpenVLAOFT.from_pretrained(folder, unnorm_key="aloha_pour", **sizes)
    assert aloha.chunk == 25 and aloha.config.normalization == "minmax"
    with pytest.raises(ConfigError, match=r"the number of actions in a chunk is unknown\. Give chunk="):
        OpenVLAOFT.from_pretrained(folder, unnorm_key="mystery", **sizes)
    with pytest.raises(
        UnknownNameError, match=r"'libero_gaol'; did you mean 'libero_goal'\? Known: aloha_pour, libero_goal, mystery"
    ):
        OpenVLAOFT.from_pretrained(folder, unnorm_key="libero_gaol", **sizes)
    aloha.save_pretrained(tmp_path / "again")
    assert load_policy(tmp_path / "again", allow_untrained=True, dtype="bfloat16").unnorm_key == "aloha_pour", (
        "what was chosen is remembered"
    )
    with pytest.raises(
        ConfigError, match=r"no config\.json in it\. Give a checkpoint's folder, or a name that `hilt fetch` has shown"
    ):
        load_policy("openvla/openvla-7b")
    aloha.save_pretrained(tmp_path / "run" / "policy")
    with pytest.raises(
        ConfigError, match=r"run: there is no config\.json in it\. This is a run; its policy is .*run/policy, or a name"
    ):
        load_policy(tmp_path / "run")
    with pytest.raises(
        UnknownNameError, match=r"no option of an OpenVLA named 'centre_crop'; did you mean 'center_crop'\?"
    ):
        OpenVLAOFT.from_pretrained(folder, unnorm_key="libero_goal", centre_crop=False)
    with pytest.raises(UnknownNameError, match=r"did you mean 'unnorm_key'\?"):
        load_policy(folder, unorm_key="libero_goal")
    with pytest.raises(
        ConfigError, match="statistics of 3 datasets; name one as unnorm_key: aloha_pour, libero_goal, mystery"
    ):
        OpenVLAOFT.from_pretrained(folder, **sizes)
    means = json.loads((folder / "preprocessor_config.json").read_text()) | {
        "means": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(means))
    read = OpenVLAOFT.from_pretrained(folder, unnorm_key="libero_goal", dtype=torch.bfloat16, **sizes)
    assert read.pixel_mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert read.projector.fc1.weight.dtype == torch.bfloat16


def test_an_l1_checkpoint_is_no_discrete_policy(tmp_path: Path, saved: tuple[Any, Path]):
    tiny(head="l1").save_pretrained(tmp_path / "l1")
    with pytest.raises(ConfigError, match="has an L1 action head, so its answers in tokens were never trained"):
        OpenVLAOFT.from_pretrained(tmp_path / "l1", head="tokens")
    assert OpenVLAOFT.from_pretrained(tmp_path / "l1").config.head == "l1"
    drawn = OpenVLAOFT.from_pretrained(tmp_path / "l1", head="laplace")
    assert drawn.scale_head.log_b_head.bias.tolist() == [-3.0] * 7, "a scale that is not there begins"
    (tmp_path / "l1" / "action_head--0_checkpoint.pt").unlink()
    with pytest.raises(ConfigError, match="head='l1' was asked for, and there is no action_head--"):
        OpenVLAOFT.from_pretrained(tmp_path / "l1")
    with pytest.raises(
        ConfigError, match=r"only 0\.\d% of the probability lies on action tokens.*allow_untrained=True"
    ):
        OpenVLAOFT.from_pretrained(tmp_path / "l1", head="tokens")
    trained = tiny()
    trained.language_model.lm_head.weight.data[: trained.token.first] = 0
    trained.language_model.lm_head.weight.data[trained.token.first :] *= 0
    trained.language_model.model.norm.weight.data.fill_(3.0)
    with torch.no_grad():
        hidden = torch.nn.functional.normalize(_slot(trained), dim=0)
        trained.language_model.lm_head.weight[trained.token.first : trained.token.last + 1] = 2 * hidden
    assert trained.action_token_mass() > checkpoints.MIN_MASS
    trained.save_pretrained(tmp_path / "tokens")
    assert OpenVLAOFT.from_pretrained(tmp_path / "tokens").config.head == "tokens"


def _slot(policy: Any) -> torch.Tensor:
    """A hidden state at an action slot, on the picture that the check takes."""
    found: list[torch.Tensor] = []
    hook = policy.language_model.lm_head.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    policy.action_token_mass()
    hook.remove()
    return found[0].flatten(0, -2).mean(0)


def test_damage_and_mistakes_are_named(saved: tuple[Any, Path], tmp_path: Path):
    policy, folder = saved[0], tmp_path / "a"
    shutil.copytree(saved[1], folder)
    document = json.loads((folder / "config.json").read_text())
    wider = document | {"text_config": {**document["text_config"], "intermediate_size": 50}}
    (folder / "config.json").write_text(json.dumps(wider))
    with pytest.raises(
        SchemaError,
        match=r"model\.safetensors: the tensor language_model\.model\.layers\.0\.mlp\.\w+_proj\.weight has the shape",
    ):
        OpenVLAOFT.from_pretrained(folder)
    deeper = document | {"text_config": {**document["text_config"], "num_hidden_layers": 3}}
    (folder / "config.json").write_text(json.dumps(deeper))
    with pytest.raises(MissingFieldError, match=r"9 missing \(language_model\.model\.layers\.2\."):
        OpenVLAOFT.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(document | {"model_type": "llava"}))
    with pytest.raises(UnknownNameError, match=r"no policy, as .*config\.json has it in model_type, named 'llava'"):
        load_policy(folder)
    (folder / "config.json").write_text(json.dumps(document))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        OpenVLAOFT.from_pretrained(folder)
    (folder / "model.safetensors").write_bytes(whole)
    for step in ("1", "2"):
        torch.save({}, folder / f"action_head--{step}_checkpoint.pt")
    with pytest.raises(
        FormatError, match=r"2 files of the action_head \(action_head--1_checkpoint\.pt, action_head--2"
    ):
        OpenVLAOFT.from_pretrained(folder)
    assert policy.source is None


def test_policy_too_large_is_refused_before_it_is_read(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.policies.io.memory.free_bytes", lambda device: 1_000_000)
    with pytest.raises(
        ConfigError,
        match=r"loading needs .* MB: weights .* MB on cpu, which has 1\.0 MB free\. Try dtype=torch\.bfloat16",
    ):
        OpenVLAOFT.from_pretrained(saved[1], allow_untrained=True)


def test_adapters_are_merged_into_the_folder(saved: tuple[Any, Path], tmp_path: Path):
    policy = tiny()
    parameters = lora.attach(policy, rank=2)
    assert all("lm_head" not in name for name in lora.adapted(policy)) and any(
        "vision_backbone" in name for name in lora.adapted(policy)
    )
    with torch.no_grad():
        for place, parameter in enumerate(parameters):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place))
    _, record = policy.act(observations(), generator=torch.Generator().manual_seed(1))
    policy.save_pretrained(tmp_path / "merged")
    again = OpenVLAOFT.from_pretrained(tmp_path / "merged", allow_untrained=True)
    with torch.no_grad():
        assert torch.allclose(again.evaluate(record).log_prob, policy.evaluate(record).log_prob, atol=1e-5)
    assert list(again.state_dict()) == list(tiny().state_dict()) and lora.adapted(policy)


def test_adapters_that_openvla_oft_leaves_in_its_vision_are_merged(tmp_path: Path):
    policy = tiny(film=True, head="l1")
    policy.save_pretrained(tmp_path / "a")
    with pytest.raises(MissingFieldError, match=r"\d+ unknown \(vision_backbone\.vision_backbone\.featurizer"):
        OpenVLAOFT.from_pretrained(tmp_path / "a", film=False)
    file = tmp_path / "a" / "vision_backbone--0_checkpoint.pt"
    state = torch.load(file, weights_only=True)
    name = "vision_backbone.featurizer.blocks.0.block.attn.qkv"
    weight = state.pop(f"{name}.weight")
    a, b = torch.randn(32, weight.shape[1]), torch.randn(weight.shape[0], 32)
    state |= {
        f"{name}.base_layer.weight": weight,
        f"{name}.lora_A.default.weight": a,
        f"{name}.lora_B.default.weight": b,
    }
    torch.save({f"module.{key}": value for key, value in state.items()}, file)
    again = OpenVLAOFT.from_pretrained(tmp_path / "a")
    assert torch.allclose(again.state_dict()[f"vision_backbone.{name}.weight"], weight + 0.5 * b @ a, atol=1e-4)
