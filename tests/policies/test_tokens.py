from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, FormatError
from hilt.policies.vla.tokens import (
    EMPTY,
    ActionTokenizer,
    ByteTokenizer,
    load_tokenizer,
    openvla_ids,
    openvla_prompt,
    padded,
    save_tokenizer,
)


def test_openvlas_bins():
    """What SimpleVLA-RL's tokenizer gives: 256 edges, 255 middles, the two smallest ids the same number."""
    token = ActionTokenizer()
    assert (token.first, token.last, len(token.centers)) == (31744, 31999, 255)
    assert token.encode(np.array([-1.0, 0.0, 1.0, -7.0, 7.0])).tolist() == [31999, 31872, 31744, 31999, 31744]
    assert token.decode(np.array([31999, 31745, 31744])).tolist() == [-254 / 255, 254 / 255, 254 / 255]
    assert token.decode(np.array([0, 32063])).tolist() == [254 / 255, -254 / 255]


@given(st.integers(2, 300), st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=20))
def test_action_tokens_round_trip(bins: int, numbers: list[float]):
    """What is decoded is within half a bin, is encoded as itself again, and tensors have the same ids."""
    token, x = ActionTokenizer(bins, 1000), np.array(numbers)
    ids = token.encode(x)
    back = token.decode(ids)
    assert np.all(np.abs(back - x.clip(-1, 1)) <= 1 / (bins - 1) + 1e-12)
    assert np.array_equal(token.decode(token.encode(back)), back)
    assert ids.min() >= token.first and ids.max() <= token.last
    assert np.array_equal(token.encode(torch.from_numpy(x)).numpy(), ids)
    assert np.array_equal(token.decode(torch.from_numpy(ids)).numpy(), back)


def test_action_tokens_with_too_few_bins():
    with pytest.raises(ConfigError, match="1 bins in a vocabulary of 10 was asked for; give 2 to 10 bins"):
        ActionTokenizer(1, 10)


@given(st.text(max_size=30))
def test_bytes(text: str):
    ids = ByteTokenizer().encode(text)
    assert ids[0] == ByteTokenizer.begin and ByteTokenizer.pad not in ids and max(ids) < ByteTokenizer.size
    assert ByteTokenizer().decode(ids) == text


def test_the_prompt_ends_with_the_lone_space():
    assert openvla_prompt("Pick UP") == "In: What action should the robot take to pick up?\nOut:"
    ids = openvla_ids(ByteTokenizer(), "Pick UP")
    assert ids == [*ByteTokenizer().encode(openvla_prompt("pick up")), EMPTY]

    class Already(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [*super().encode(text), EMPTY]

    assert openvla_ids(Already(), "Pick UP") == ids


def test_rows_are_padded_at_the_right():
    ids, lengths = padded([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]] and lengths.tolist() == [3, 1]
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer as a checkpoint has it: Llama's way of putting <s> in front, with
    a </s> that no prompt may end with."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<unk>": 4}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    return tmp_path


def test_a_tokenizer_of_a_folder(folder: Path):
    assert load_tokenizer(folder).encode("a b a") == [0, 2, 3, 2]
    assert load_tokenizer(folder).decode([2, 3]) == "a b"


def test_tokenizer_adds_the_first_token_if_configured(folder: Path):
    document = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**document, "post_processor": None}))
    assert load_tokenizer(folder).encode("a") == [2]
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    assert load_tokenizer(folder).encode("a") == [0, 2]


def test_a_folder_without_one_or_with_a_broken_one(folder: Path, tmp_path_factory: Any):
    with pytest.raises(FormatError, match=r"a checkpoint's tokenizer is its tokenizer.json, and there is none here"):
        load_tokenizer(tmp_path_factory.mktemp("empty"))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer.json: this is no tokenizer that can be opened"):
        load_tokenizer(folder)


def test_a_tokenizer_goes_with_the_policy(folder: Path, tmp_path_factory: Any):
    there = tmp_path_factory.mktemp("there")
    save_tokenizer(load_tokenizer(folder), there)
    assert load_tokenizer(there).encode("a b a") == [0, 2, 3, 2]
    save_tokenizer(ByteTokenizer(), there)
    assert isinstance(load_tokenizer(there), ByteTokenizer)
    (there / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer_config.json: no settings of a tokenizer can be read"):
        load_tokenizer(there)
