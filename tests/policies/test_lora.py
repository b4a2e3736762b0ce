"""Adapters: only they and the heads are trained, peft reads what we save, and a merge is the same function."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hilt.core.errors import ConfigError, FormatError, UnknownNameError
from hilt.policies.io.lora import adapted, attach, load_adapter, merge, merged, save_adapter
from hilt.policies.io.tensor_files import Tensors, write_tensors
from tests.effort import need

need("peft")


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8))
        self.lm_head, self.value_head = nn.Linear(8, 4), nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        return torch.cat([self.lm_head(x), self.value_head(x)], -1)


X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def trained(net: Net) -> Net:
    """After a few steps, so that the adapters are not zero."""
    parameters = attach(net, rank=2, alpha=3, seed=4)
    for _ in range(3):
        grads = torch.autograd.grad(net(X).square().mean(), parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter -= 0.5 * grad
    return net


def test_lora_changes_nothing_before_training_and_only_adapters_and_heads_after():
    net, before = Net(), Net()
    state = torch.get_rng_state()
    attach(net, rank=2)
    assert torch.equal(net(X), before(X)) and sorted(adapted(net)) == ["trunk.0", "trunk.2"]
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"
    net = trained(Net())
    assert not torch.allclose(net(X), before(X))
    assert torch.equal(net.trunk[0].base_layer.weight, before.trunk[0].weight) and torch.equal(
        net.lm_head.weight, before.lm_head.weight
    )
    assert not torch.equal(net.value_head.weight, before.value_head.weight)
    assert torch.equal(trained(Net())(X), net(X)), "one seed, one result"
    other = Net()
    attach(other, rank=2, full=(), targets=["2"], dtype=torch.float64)
    assert {name for name, p in other.named_parameters() if p.requires_grad} == {
        f"trunk.2.lora_{s}.default.weight" for s in "AB"
    }
    assert other.trunk[2].lora_A["default"].weight.dtype == torch.float64


@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-6), (True, 0.02)])
def test_adapted_layers_compute_what_those_of_peft_do(autocast: bool, tolerance: float):
    def found(net: Net) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, autocast):
            out = net(x)
        wanted = [parameter for parameter in net.parameters() if parameter.requires_grad]
        return [out, *torch.autograd.grad(out.float().square().mean(), [x, *wanted])]

    net, other = trained(Net()), trained(Net())
    for layer in adapted(other).values():
        layer.__class__ = type(layer).__base__
        assert type(layer).__module__.startswith("peft.")
    calls: list[str] = []
    for layer in adapted(net).values():
        layer.base_layer.register_forward_hook(lambda *_: calls.append("by peft"))
    for ours, theirs in zip(found(net), found(other), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert not calls
    with torch.no_grad():  # a layer that is trained as a whole has a gradient of its weight: it goes peft's way
        net.trunk[0].base_layer.weight.requires_grad_()
        net(X)
    assert calls == ["by peft"]


def test_a_merge_is_the_same_function_with_the_names_of_the_bare_model(tmp_path: Path):
    net = trained(Net())
    wanted = net(X)
    state, value = merged(net)
    write_tensors(tmp_path, state, value=value)
    bare = Net(9)
    bare.load_state_dict(dict(Tensors(tmp_path)), strict=True)
    assert torch.allclose(bare(X), wanted, atol=1e-6)
    merge(net)
    assert list(net.state_dict()) == list(Net().state_dict()) and not adapted(net)
    assert torch.equal(net(X), bare(X))
    attach(net, rank=1)  # and once more


def test_save_and_load_and_peft_itself_reads_it(tmp_path: Path):
    import peft

    net = trained(Net())
    save_adapter(net, tmp_path / "adapter")
    again = Net()
    parameters = load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(X), net(X)) and len(parameters) == 6
    theirs = Net()
    theirs.value_head.load_state_dict(net.value_head.state_dict())
    assert torch.allclose(peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))(X), net(X), atol=1e-6)


def test_refusals(tmp_path: Path):
    with pytest.raises(ConfigError, match="rank is 0 and alpha 16"):
        attach(Net(), rank=0)
    with pytest.raises(ConfigError, match="targets is 'most'"):
        attach(Net(), targets="most")
    with pytest.raises(UnknownNameError, match="no linear layer named 'q_proj'"):
        attach(Net(), targets=["q_proj"])
    bare = Net()
    bare.config = SimpleNamespace(trained="expert")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="trained=expert would do nothing beside adapters"):
        attach(bare)
    with pytest.raises(ConfigError, match="no adapters to save"):
        save_adapter(Net(), tmp_path / "x")
    net = trained(Net())
    with pytest.raises(ConfigError, match="has adapters already"):
        attach(net)
    save_adapter(net, tmp_path / "adapter")
    bare = Net()
    bare.trunk = nn.Sequential(nn.Linear(5, 8))
    with pytest.raises(UnknownNameError, match=r"adapter_model\.safetensors has it, named 'trunk\.2'"):
        load_adapter(bare, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    whole = config.read_text()
    for old, new in (
        ('"use_dora": false', '"use_dora": true'),
        ('"alpha_pattern": {}', '"alpha_pattern": {"trunk": 3}'),
        ('"bias": "none"', '"bias": "all"'),
    ):
        config.write_text(whole.replace(old, new))
        with pytest.raises(FormatError, match="its adapter is not plain LoRA"):
            load_adapter(Net(), tmp_path / "adapter")
