"""Outputs, gradients and kept bytes of each variant, on 2 and 4 gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.train

PARITY = Path(__file__).parent / "programs" / "parity.py"

# As in programs/parity.py: s, b, h, r, out.
SHAPES = {"small": (12, 3, 20, 8, 36), "wide": (64, 2, 96, 16, 40)}
BYTES = {"fp32": 4, "bf16": 2}

# Relative to the largest magnitude of the tensor. Two bf16 roundings are 2 * 2**-8 = 7.8e-3.
AGAINST_BASE = {"fp32": 1e-6, "bf16": 1.6e-2}
AGAINST_FLOAT64 = {"fp32": 1e-6, "bf16": 8e-3}

EACH_DTYPE_AND_GRAD = [
    pytest.param(shape, dtype, grad, id=f"{shape}-{dtype}-{grad}")
    for shape in SHAPES
    for dtype in BYTES
    for grad in ("main_grad", "grad")
]


@pytest.fixture(scope="module", params=[2, 4], ids=["tp2", "tp4"])
def tp(request):
    return request.param


@pytest.fixture(scope="module")
def cases(tp, run_ranks):
    return run_ranks(PARITY, tp).results()[0]


@pytest.mark.parametrize("shape, dtype, grad", EACH_DTYPE_AND_GRAD)
def test_regather_equals_base_to_the_bit(cases, shape, dtype, grad):
    found = cases[f"column sp {shape} {dtype} {grad} regather"]
    assert found["base"] == {"y": 0.0, "dx": 0.0, "da": 0.0, "db": 0.0}


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("shape, dtype, grad", EACH_DTYPE_AND_GRAD)
def test_gather_free_stays_close_to_base(cases, kind, shape, dtype, grad):
    found = cases[f"{kind} sp {shape} {dtype} {grad} gather-free"]
    assert max(found["base"].values()) < AGAINST_BASE[dtype], found


@pytest.mark.parametrize(
    "surface",
    ["column sp", "column no-sp", "row sp", "row no-sp"],
)
@pytest.mark.parametrize("shape, dtype, grad", EACH_DTYPE_AND_GRAD)
def test_every_variant_stays_close_to_one_process_in_float64(cases, surface, shape, dtype, grad):
    prefix = f"{surface} {shape} {dtype} {grad} "
    found = {name: case["float64"] for name, case in cases.items() if name.startswith(prefix)}
    found = {name: errors for name, errors in found.items() if "control" not in name}
    assert f"{prefix}base" in found
    for name, errors in found.items():
        assert max(errors.values()) < AGAINST_FLOAT64[dtype], (name, errors)


def test_bf16_input_gradient_is_closer_to_float64_without_the_gather(cases):
    """Base reduce-scatters h-wide partial sums that were rounded to bf16."""
    base = cases["column sp wide bf16 main_grad base"]["float64"]["dx"]
    gather_free = cases["column sp wide bf16 main_grad gather-free"]["float64"]["dx"]
    assert gather_free < base


def test_partial_gradient_taken_as_replicated_is_caught(cases):
    found = cases["column sp wide fp32 main_grad control partial-taken-as-replicated"]
    assert found["base"]["y"] < AGAINST_BASE["fp32"]  # forward shows nothing
    assert found["base"]["da"] > 0.5


def test_replicated_gradient_taken_as_partial_is_caught(cases, tp):
    """dA and dx come out tp times too large."""
    found = cases["column sp wide fp32 main_grad control replicated-taken-as-partial"]
    assert found["base"]["y"] < AGAINST_BASE["fp32"]
    assert found["base"]["da"] == pytest.approx(tp - 1, rel=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", BYTES)
def test_kept_bytes_follow_the_formula(cases, tp, shape, dtype):
    """One microbatch, parameters not counted; S is a whole h-wide activation."""
    s, b, h, r, out = SHAPES[shape]
    S, R, W, B = (n * BYTES[dtype] for n in (s * b * h, s * b * r, r * h, out * r))
    expected = {
        "column sp": {
            "base": S + R,
            "regather": S // tp + R,
            "gather-free": S // tp + R + W,
        },
        "row sp": {"base": S // tp + R, "gather-free": S // tp + R // tp + B},
    }
    for surface, variants in expected.items():
        for variant, expected_bytes in variants.items():
            found = cases[f"{surface} {shape} {dtype} main_grad {variant}"]
            assert found["saved_bytes"] == expected_bytes, (surface, variant)


@pytest.mark.parametrize("tp", [2, 4], ids=["tp2", "tp4"])
def test_base_equals_megatrons_own_layers_to_the_bit(run_ranks, tp):
    pytest.importorskip("megatron.core")
    nothing = {"y": 0.0, "dx": 0.0, "da": 0.0, "db": 0.0}
    for found in run_ranks(PARITY.with_name("bridge_layers.py"), tp).results():
        assert found == dict.fromkeys(
            ["column fp32", "column bf16", "row fp32", "row bf16"], nothing
        )
