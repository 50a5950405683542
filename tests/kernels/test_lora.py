"""The adapter and its wrapper as modules: names, attributes, initialisation, return values."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def group():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Base(torch.nn.Linear):
    """As Megatron's linear layers: returns (output, bias) and leaves the bias to be added."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight), self.bias

    def backward_dw(self):
        return "the base's"


def adapter(group, seed=0, **changes):
    from mtlaunch.kernels.lora import ParallelLinearAdapter

    settings = {"row_parallel": False, "alpha": 16, **changes}
    generator = torch.Generator().manual_seed(seed)
    return ParallelLinearAdapter(12, 20, 8, group=group, generator=generator, **settings)


def wrapped(group, **changes):
    from mtlaunch.kernels.lora import LoRALinear

    return LoRALinear(Base(12, 20), adapter(group, **changes))


def test_starts_as_the_base_and_adds_the_scaled_product(group):
    layer = wrapped(group)
    x = torch.randn(5, 3, 12)
    base, base_bias = layer.to_wrap(x)
    output, bias = layer(x)
    assert torch.equal(output, base)
    assert bias is base_bias
    a, b = layer.adapter.linear_in.weight, layer.adapter.linear_out.weight
    torch.nn.init.normal_(b)
    torch.testing.assert_close(layer(x)[0], base + x @ a.t() @ b.t() * (16 / 8))


def test_state_dict_keeps_the_base_keys(group):
    block = torch.nn.ModuleDict({"linear_qkv": wrapped(group)})
    assert set(block.state_dict()) == {
        "linear_qkv.weight",
        "linear_qkv.bias",
        "linear_qkv.adapter.linear_in.weight",
        "linear_qkv.adapter.linear_out.weight",
    }


def test_state_dict_comes_back(group):
    block = torch.nn.ModuleDict({"linear_qkv": wrapped(group, seed=1)})
    torch.nn.init.normal_(block["linear_qkv"].adapter.linear_out.weight)
    saved = copy.deepcopy(block.state_dict())
    other = torch.nn.ModuleDict({"linear_qkv": wrapped(group, seed=2)})
    other.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.state_dict().items())


def test_base_checkpoint_leaves_the_adapter_as_it_was(group):
    base = torch.nn.ModuleDict({"linear_qkv": Base(12, 20)})
    block = torch.nn.ModuleDict({"linear_qkv": wrapped(group)})
    before = copy.deepcopy(block["linear_qkv"].adapter.state_dict())
    block.load_state_dict(base.state_dict())
    assert torch.equal(block["linear_qkv"].weight, base["linear_qkv"].weight)
    after = block["linear_qkv"].adapter.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_half_an_adapter_in_a_checkpoint_is_an_error(group):
    block = torch.nn.ModuleDict({"linear_qkv": wrapped(group)})
    saved = block.state_dict()
    del saved["linear_qkv.adapter.linear_out.weight"]
    with pytest.raises(RuntimeError, match="linear_out"):
        block.load_state_dict(saved)


def test_other_attributes_are_the_base_layers(group):
    layer = wrapped(group)
    assert layer.weight is layer.to_wrap.weight
    assert layer.in_features == 12
    assert layer.backward_dw() == "the base's"
    assert not hasattr(layer, "no_such_thing")


@pytest.mark.parametrize("row, dim", [(False, 0), (True, 1)])
def test_parameters_carry_megatrons_attributes(group, row, dim):
    found = adapter(group, row_parallel=row)
    for weight, partition_dim in ((found.linear_in.weight, dim), (found.linear_out.weight, 0)):
        assert weight.tensor_model_parallel
        assert weight.partition_dim == partition_dim
        assert weight.partition_stride == 1
        assert weight.allreduce
        assert not hasattr(weight, "sequence_parallel")


def test_expert_weights_are_not_all_reduced(group):
    assert not adapter(group, allreduce=False).linear_in.weight.allreduce


def test_initialisation_leaves_the_scripts_random_numbers_alone(group):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    adapter(group)
    assert torch.equal(torch.rand(4), expected)


def test_lora_a_is_xavier_normal_and_lora_b_zero(group):
    from mtlaunch.kernels.lora import ParallelLinearAdapter

    found = ParallelLinearAdapter(
        4096, 16, 32, group=group, row_parallel=False, generator=torch.Generator().manual_seed(0)
    )
    std = (2 / (4096 + 32)) ** 0.5
    assert found.linear_in.weight.std().item() == pytest.approx(std, rel=0.02)
    assert found.linear_out.weight.abs().max() == 0


class FusedNorm(Base):
    """The two flags of Transformer Engine's LayerNormLinear, on one process."""

    return_layernorm_output = False
    return_layernorm_output_gathered = True

    def __init__(self, *args, returns, **kwargs):
        super().__init__(*args, **kwargs)
        self.returns = returns

    def forward(self, x):
        assert self.return_layernorm_output and not self.return_layernorm_output_gathered
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:])
        output = torch.nn.functional.linear(normed, self.weight)
        if self.returns == 3:
            return output, self.bias, normed
        return (output, normed), None


@pytest.mark.parametrize("returns", [2, 3])
def test_adapter_reads_the_normed_input_of_a_fused_layer(group, returns):
    from mtlaunch.kernels.lora import LoRALinear

    layer = LoRALinear(FusedNorm(12, 20, returns=returns), adapter(group))
    torch.nn.init.normal_(layer.adapter.linear_out.weight)
    x = torch.randn(5, 3, 12)
    normed = torch.nn.functional.layer_norm(x, (12,))
    for _ in range(2):
        output, bias = layer(x)
        expected = torch.nn.functional.linear(normed, layer.weight) + layer.adapter(normed)
        torch.testing.assert_close(output, expected)
        assert (bias is None) == (returns == 2)
        layer.to_wrap.return_layernorm_output_gathered = True  # as Bridge's export code does


def test_frozen_lora_a_gets_no_gradient_and_keeps_no_input(group):
    layer = adapter(group)
    torch.nn.init.normal_(layer.linear_out.weight)
    layer.linear_in.weight.requires_grad_(False)
    x = torch.randn(5, 3, 12, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    y.sum().backward()
    assert layer.linear_in.weight.grad is None
    assert x.grad is not None
    assert not any(tensor.data_ptr() == x.data_ptr() for tensor in kept)


def test_dropout_only_while_training(group):
    layer = adapter(group, dropout=0.5)
    torch.nn.init.normal_(layer.linear_out.weight)
    x = torch.randn(5, 3, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_main_grad_sums_every_call_and_step(group):
    """Two calls in one backward, and two backwards, as a tied layer over two microbatches."""
    layer = adapter(group)
    torch.nn.init.normal_(layer.linear_out.weight)
    weight = layer.linear_in.weight
    xs = [torch.randn(5, 3, 12) for _ in range(4)]
    expected = torch.autograd.grad(sum(layer(x).square().sum() for x in xs), weight)[0]
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    for pair in (xs[:2], xs[2:]):
        sum(layer(x).square().sum() for x in pair).backward()
    torch.testing.assert_close(weight.main_grad, expected)
    assert weight.grad_added_to_main_grad
    assert weight.grad.abs().max() == 0  # a placeholder for Megatron's hook


def test_dim_that_does_not_split_says_what_to_use():
    from types import SimpleNamespace

    with pytest.raises(ValueError, match="dim 8 does not split .* size 3; use a multiple of 3"):
        adapter(SimpleNamespace(size=lambda: 3, rank=lambda: 0))
