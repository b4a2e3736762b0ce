"""Document 004 (SimpleVLA-RL), `save_checkpoint(local_path, hdfs_path)` at `trainer.save_freq`: "in LoRA
mode it saves the adapter and merges it into a complete model; otherwise it exports the full state dict",
here as folders that their loader and ours open."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core import url_folder
from hilt.core.config import build
from hilt.core.errors import ConfigError, CorruptError, StorageError
from hilt.core.url_folder import MANIFEST, UrlFolder, files_of
from hilt.observe.metrics import read_metrics
from hilt.policies.io import lora
from hilt.policies.io.tensor_files import Tensors
from hilt.policies.registry import load_policy
from hilt.vla import exports
from hilt.vla.train import begin_run, resume_run, train
from tests.cli.test_train_simplevla import COMMAND, MODEL, checkpoint, folder, run  # noqa: F401  # a fixture
from tests.effort import need
from tests.policies.tiny_openvla import tiny
from tests.vla.toy_vla import config

need("fsspec")
QUIET = ("validation.before=false", "validation.period=0", "validation.after=false")
FILES = {
    "config.json",
    "model.safetensors",
    "dataset_statistics.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
}


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    """The memory file system, empty before and after."""
    import fsspec

    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in Tensors(path).items()}


def equal(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return set(first) == set(second) and all(np.array_equal(first[name], second[name]) for name in first)


# --- the folders ---


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The folder of a checkpoint, that of a run of two training steps from it, and what the command printed."""
    with pytest.MonkeyPatch.context() as patch:
        start = checkpoint(tmp_path_factory.mktemp("whole"), patch)
        place = f"trainer.default_local_dir={start.parent / 'run'}"
        said = run(*COMMAND, f"{MODEL}path={start}", "trainer.total_training_steps=2", place)
    return start, start.parent / "run", said


def test_save_freq_writes_an_adapter_and_the_merged_model(whole_run: tuple[Path, Path, str]):
    start, trained, said = whole_run
    assert (
        "checkpoint folders: one every 1 training steps, 2 in all, of which all of them stay: 2 x " in said
        and "are free" in said
    )
    assert sorted(path.name for path in (trained / "actor").iterdir()) == [f"global_step_{n}" for n in (1, 2)]
    last = trained / "actor/global_step_2"
    assert {path.name for path in last.iterdir()} >= {*FILES, "lora_adapter"}
    assert {path.name for path in (last / "lora_adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = load_policy(start, allow_untrained=True)
    lora.load_adapter(base, last / "lora_adapter")
    merged, value = lora.merged(base)
    ours = load_policy(last, allow_untrained=True).state_dict()
    assert all(torch.equal(value(name), ours[name]) for name in merged), "the merged model is the base and its adapter"
    assert not equal(last, trained / "actor/global_step_1") and (trained / "checkpoints/2").is_dir()


def test_without_adapters_the_full_state_and_the_newest_ones_stay_by_the_rule(folder: Path, tmp_path: Path):  # noqa: F811
    words = [word for word in COMMAND if "lora_rank" not in word and "target_modules" not in word]
    run(
        *words,
        f"{MODEL}path={folder}",
        "trainer.total_training_steps=2",
        "hilt.export_keep=1",
        "--run",
        tmp_path / "run",
    )
    (last,) = (tmp_path / "run/actor").iterdir()
    assert (
        last.name == "global_step_2"
        and {path.name for path in last.iterdir()} >= FILES
        and not (last / "lora_adapter").exists()
    )
    before, after = weights(folder), weights(last)
    assert (
        set(before) == set(after)
        and sum(not np.array_equal(before[name], after[name]) for name in before) > len(before) / 2
    )


def test_their_loader_opens_the_folder(tmp_path: Path):
    """`from_pretrained` of transformers with a model class registered for "openvla", as upstream registers its own."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "pick": 3}, unk_token="<unk>")
    )
    sft = tmp_path / "sft"
    tiny().save_pretrained(sft)
    (sft / "tokenizer_config.json").unlink()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(sft)
    policy = load_policy(sft, allow_untrained=True)
    lora.attach(policy, rank=2, targets=["q_proj"])
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    exports.save_checkpoint(policy, tmp_path / "actor/global_step_25")

    class OpenVLAConfig(transformers.PretrainedConfig):
        model_type = "openvla"

    class Model(transformers.PreTrainedModel):
        config_class = OpenVLAConfig

        def __init__(self, config: Any):
            super().__init__(config)
            shell = tiny(seed=7)
            self.vision_backbone, self.projector, self.language_model = (
                shell.vision_backbone,
                shell.projector,
                shell.language_model,
            )
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            pass

    made, told = Model.from_pretrained(tmp_path / "actor/global_step_25", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    _, merged = lora.merged(policy)
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(made.state_dict()[name], merged(name)) and not torch.equal(merged(name), Tensors(sft)[name])
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "actor/global_step_25")
    assert again("pick")["input_ids"] == fast("pick")["input_ids"] == [3]
    statistics = json.loads((tmp_path / "actor/global_step_25/dataset_statistics.json").read_text())
    assert "action" in statistics["libero_spatial_no_noops"]


def test_save_checkpoint_with_an_hdfs_path_copies_and_replaces_no_folder_of_other_files(tmp_path: Path):
    policy = tiny()
    exports.save_checkpoint(policy, tmp_path / "local", hdfs_path="memory://bucket/actor")
    UrlFolder("memory://bucket/actor").download("", tmp_path / "back")
    assert files_of(tmp_path / "back").keys() == files_of(tmp_path / "local").keys() and equal(
        tmp_path / "back", tmp_path / "local"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(
        ConfigError, match=r"mine has files, and is no checkpoint that could be replaced: give the path of a new folder"
    ):
        exports.save_checkpoint(policy, tmp_path / "mine")
    assert (tmp_path / "mine/thesis.txt").exists()


# --- trainer.default_hdfs_dir: a copy that is checked, and resumed from ---


def test_a_run_is_copied_and_resumed_from_its_copy_on_another_machine(tmp_path: Path):
    changes = ("export_period=1", "checkpoint_period=1", *QUIET)
    settings = config(*changes, "copy_to=memory://there/run", "max_steps=2")
    begin_run(tmp_path / "first", "toy", settings)
    train(settings, tmp_path / "first")
    place = UrlFolder("memory://there/run")
    assert place.folders("actor") == ["global_step_1", "global_step_2"] and place.folders("resume") == ["000002-step_2"]
    place.download("policy", tmp_path / "policy")
    assert equal(tmp_path / "policy", tmp_path / "first/policy")
    shutil.rmtree(tmp_path / "first")  # the machine is gone
    exports.fetch_run("memory://there/run", tmp_path / "second")
    train(resume_run(tmp_path / "second", "", ["max_steps=3"]), tmp_path / "second")
    whole = config(*changes, "max_steps=3")
    begin_run(tmp_path / "whole", "toy", whole)
    train(whole, tmp_path / "whole")
    assert equal(tmp_path / "second/policy", tmp_path / "whole/policy"), "it goes on bit for bit"
    assert place.folders("actor") == ["global_step_1", "global_step_2", "global_step_3"], "those of before stay"
    place.download("actor/global_step_3", tmp_path / "three")
    assert equal(tmp_path / "three", tmp_path / "whole/actor/global_step_3")


def test_the_command_line_of_simplevla_resumes_from_default_hdfs_dir(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    whole_run: tuple[Path, Path, str],
):
    url = (tmp_path / "elsewhere").as_uri()
    words = [*COMMAND, f"{MODEL}path={folder}", f"trainer.default_hdfs_dir={url}"]
    run(*words, "trainer.total_training_steps=1", "--run", tmp_path / "a")
    said = run(*words, "trainer.total_training_steps=2", "--run", tmp_path / "b", "--resume")
    assert f"goes on from {url}/resume/000001-step_1" in " ".join(said.split())
    assert equal(tmp_path / "b/policy", whole_run[1] / "policy")
    assert (tmp_path / "elsewhere/actor/global_step_2/lora_adapter/adapter_model.safetensors").is_file()
    said = run(*words, "--run", tmp_path / "c", code=1)
    assert "has the copy of another run" in " ".join(said.split())


def test_an_unreachable_url_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    for url, expected in (
        (
            "nowhere://bucket/run",
            r"nowhere://bucket/run cannot be written to: .*Protocol not known.*available_protocols",
        ),
        (f"file://{tmp_path}/file/run", r"cannot be written to: .*Check the address, the permissions and the network"),
        (
            "hdfs://127.0.0.1:1/run",
            r"cannot be written to: .*It needs `pip install pyarrow`, Hadoop's libhdfs, and HADOOP_HOME",
        ),
    ):
        with pytest.raises(ConfigError, match=expected):
            begin_run(tmp_path / "run", "toy", config(f"copy_to={url}"))
        assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:  # every file system has errors of its own

        def refuse(self: UrlFolder) -> Any:
            raise type("ClientError", (Exception,), {})("no such bucket")

        patch.setattr(UrlFolder, "_files", refuse)
        with pytest.raises(ConfigError, match=r"s3://bucket/run cannot be written to: .*no such bucket"):
            config("copy_to=s3://bucket/run").check()
    monkeypatch.setattr(url_folder, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(UrlFolder, "_probe", lambda self, failed: time.sleep(1))
    with pytest.raises(
        ConfigError, match=r"there was no answer within 0.05 s. It needs `pip install s3fs`, and credentials in AWS"
    ):
        config("copy_to=s3://bucket/run").check()


def test_a_copy_that_breaks_off_is_said_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real, calls, said = UrlFolder.upload, list[str](), list[str]()

    def breaks_once(self: UrlFolder, folder: str, *given: Any) -> None:  # noqa: F811
        calls.append(folder)
        if len(calls) == 1:
            raise StorageError("the network is down")
        real(self, folder, *given)

    monkeypatch.setattr(UrlFolder, "upload", breaks_once)
    settings = config("checkpoint_period=1", "max_steps=2", "copy_to=memory://there/run", *QUIET)
    begin_run(tmp_path / "run", "toy", settings)
    assert train(settings, tmp_path / "run", notify=said.append).step == 2
    (line,) = [line for line in said if "the network is down" in line]
    assert line.startswith("after step 1: the copy was not made, training goes on")
    assert any("the network is down" in record.get("event", "") for record in read_metrics(tmp_path / "run", ["event"]))
    assert UrlFolder("memory://there/run").folders("resume") == ["000001-step_2"]


def test_sizes_and_checksums_are_compared_after_the_copy(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "weights").write_bytes(bytes(range(200)))
    place, real = UrlFolder("memory://there"), type(memory).open

    def spoils(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        file = real(self, path, mode, **options)
        if mode == "wb" and path.endswith("weights"):
            write = file.write
            file.write = lambda data: write(bytes([data[0] ^ 1]) + data[1:])
        return file

    monkeypatch.setattr(type(memory), "open", spoils)
    with pytest.raises(
        CorruptError, match=r"weights was copied to /there/a/weights, which has 200 bytes with the SHA-256"
    ):
        place.upload("a", {"weights": tmp_path / "weights"})
    assert place.folders("") == [], "without a manifest it is not complete"
    monkeypatch.undo()
    place.upload("a", {"weights": tmp_path / "weights"})
    memory.store["/there/a/weights"].seek(3)
    memory.store["/there/a/weights"].write(b"\xff")
    with pytest.raises(CorruptError, match="a/weights: its bytes do not have their checksum; use another copy"):
        place.download("a", tmp_path / "back")
    manifest = json.loads(memory.cat_file(f"/there/a/{MANIFEST}"))
    manifest["files"]["../../outside"] = manifest["files"]["weights"]
    memory.pipe_file(f"/there/a/{MANIFEST}", json.dumps(manifest).encode())
    with pytest.raises(ValueError, match=r"lists a file '../../outside', which would be written outside of its folder"):
        place.download("a", tmp_path / "back")


def test_a_damaged_state_is_passed_over_and_none_is_an_error(tmp_path: Path, memory: Any):
    settings = config("checkpoint_period=1", "checkpoint_keep=2", "max_steps=2", "copy_to=memory://there/run", *QUIET)
    begin_run(tmp_path / "run", "toy", settings)
    train(settings, tmp_path / "run")
    assert UrlFolder("memory://there/run").folders("resume") == ["000001-step_1", "000002-step_2"]
    memory.store["/there/run/resume/000002-step_2/checkpoints/2/agent.pt"].write(b"\xff\xff")
    said: list[str] = []
    exports.fetch_run("memory://there/run", tmp_path / "back", said.append)
    assert "000002-step_2 is passed over" in said[0] and said[1].endswith(
        "goes on from memory://there/run/resume/000001-step_1"
    )
    assert train(resume_run(tmp_path / "back", "", []), tmp_path / "back").step == 2
    assert equal(tmp_path / "back/policy", tmp_path / "run/policy")
    with pytest.raises(ConfigError, match="has no complete state to resume from: leave out --resume to begin a run"):
        exports.fetch_run("memory://nothing", tmp_path / "none")
    with pytest.raises(ConfigError, match="is not empty, and has no run to resume"):
        exports.fetch_run("memory://there/run", tmp_path)


def test_folders_of_steps_that_are_made_again_are_written_again(tmp_path: Path):
    settings = config("export_period=1", "checkpoint_period=3", "max_steps=3", *QUIET)
    begin_run(tmp_path / "run", "toy", settings)
    train(settings, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/3")  # as if it had been killed before its first checkpoint
    train(resume_run(tmp_path / "run", "", ["optimizer.learning_rate=0.02", "max_steps=2"]), tmp_path / "run")
    assert exports.steps_of(tmp_path / "run") == [1, 2]
    other = build(settings, "optimizer.learning_rate=0.02", "max_steps=2")
    begin_run(tmp_path / "other", "toy", other)
    train(other, tmp_path / "other")
    assert equal(exports.folder_of(tmp_path / "run", 2), exports.folder_of(tmp_path / "other", 2))


def test_what_would_do_nothing_is_refused_and_save_freq_is_both_periods(folder: Path):  # noqa: F811
    with pytest.raises(ConfigError, match="export_keep=2 would do nothing: it needs export_period=N"):
        config("export_keep=2").check()
    said = run(*COMMAND, f"{MODEL}path={folder}", "trainer.total_training_steps=4", "trainer.save_freq=2", "--dry-run")
    assert (
        "export_period: 2" in said
        and "checkpoint_period: 2" in said
        and "2 in all, of which all of them stay: 2 x " in said
    )
    said = run(*COMMAND, f"{MODEL}path={folder}", "trainer.total_training_steps=4", "trainer.save_freq=-1", "--dry-run")
    assert "export_period: 0" in said and "checkpoint folders" not in said
