"""Every variant of ops.lora_column and ops.lora_row against base and against a float64 reference.

Run as one process per rank. Prints, as JSON, for each case the largest difference over the ranks,
relative to the largest magnitude of the tensor it concerns:

    {"column fp32 main_grad gather-free": {"base": {"y": ..., "dx": ..., "da": ..., "db": ...},
                                           "float64": {...}, "saved_bytes": ...}}
"""

from __future__ import annotations

import itertools
import json

import torch
import torch.distributed as dist
from torch import Tensor

from mtlaunch.kernels import ops

# s, b, h, r, out; all but b split over 4 ranks, and none is a power of two beyond that.
SHAPES = {"small": (12, 3, 20, 8, 36), "wide": (64, 2, 96, 16, 40)}
MICROBATCHES = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def full_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    """x [s, b, h], dy [s, b, out] for every microbatch, and A [r, h], B [out, r]."""
    s, b, h, r, out = shape
    generator = torch.Generator().manual_seed(20)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    xs = [draw(s, b, h) for _ in range(MICROBATCHES)]
    dys = [draw(s, b, out) for _ in range(MICROBATCHES)]
    return xs, dys, [draw(r, h), draw(out, r)]


def reference(xs: list[Tensor], dys: list[Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    """One process, float64, no sharding."""
    a, b = (w.double().requires_grad_() for w in weights)
    ys, dxs = [], []
    for x, dy in zip(xs, dys, strict=True):
        x = x.double().requires_grad_()
        y = (x @ a.t()) @ b.t()
        y.backward(dy.double())
        ys.append(y.detach())
        dxs.append(x.grad)
    return {"y": torch.stack(ys), "dx": torch.stack(dxs), "da": a.grad, "db": b.grad}


def own(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The rank's part, in a storage of its own, whose bytes are counted below."""
    return full.chunk(group.size(), dim=dim)[group.rank()].clone().contiguous()


# --- the wrong ways, which the comparison must catch ---------------------------------------------


def _gather_sequence_and_cut(z: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s/t, b, r] -> [s, b, r], with the own rows of the gradient as its gradient."""
    return ops.gather_last(z.movedim(0, -1).contiguous(), group).movedim(-1, 0)


def partial_taken_as_replicated(
    x: Tensor, a: Tensor, b: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """The rank's partial dZ is cut to its rows instead of being reduce-scattered."""
    z = ops.gathered_weight_linear(x, a, group)
    return ops.column_linear(_gather_sequence_and_cut(z, group), b, group)


def replicated_taken_as_partial(
    x: Tensor, a: Tensor, b: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """dZ is all-reduced, and then reduce-scattered as well: t times too large."""
    z = ops.gathered_weight_linear(x, a, group)
    same = torch.eye(z.shape[-1], dtype=z.dtype)
    z = ops.column_linear(z, same, group, sequence_parallel=True)
    return ops.column_linear(z, b, group, allreduce_dgrad=True)


CONTROLS = {
    "control partial-taken-as-replicated": partial_taken_as_replicated,
    "control replicated-taken-as-partial": replicated_taken_as_partial,
}


# --- one case ------------------------------------------------------------------------------------


def run(
    kind: str, variant: str, sp: bool, fused: bool, shape: str, dtype: str, group: dist.ProcessGroup
) -> tuple[dict[str, Tensor], int]:
    """This rank's parts of y, dx, dA, dB, and the bytes kept for backward by one microbatch."""
    xs, dys, (a, b) = full_tensors(SHAPES[shape], DTYPES[dtype])
    column = kind == "column"
    a = own(a, 0 if column else 1, group).requires_grad_()
    b = own(b, 0, group).requires_grad_()
    if fused:
        for weight in (a, b):
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
            weight.grad_added_to_main_grad = False

    ys, dxs, saved = [], [], {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in (a.data_ptr(), b.data_ptr()):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    for x, dy in zip(xs, dys, strict=True):
        if column:
            x = own(x, 0, group) if sp else x.clone()
            dy = own(dy, -1, group)
        else:
            x = own(x, -1, group)
            dy = own(dy, 0, group) if sp else dy
        x.requires_grad_()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if variant in CONTROLS:
                y = CONTROLS[variant](x, a, b, group)
            else:
                lora = ops.lora_column if column else ops.lora_row
                y = lora(x, a, b, group, variant=variant, sequence_parallel=sp)
        saved_bytes = sum(saved.values())
        y.backward(dy)
        ys.append(y.detach())
        dxs.append(x.grad)
    if fused:
        assert a.grad_added_to_main_grad and b.grad_added_to_main_grad
        da, db = a.main_grad, b.main_grad
    else:
        da, db = a.grad, b.grad
    parts = {"y": torch.stack(ys), "dx": torch.stack(dxs), "da": da, "db": db}
    return parts, saved_bytes


def expected_parts(kind: str, sp: bool, shape: str, dtype: str, group: dist.ProcessGroup):
    """The float64 reference, cut as run() cuts its results; y and dx are stacked."""
    whole = reference(*full_tensors(SHAPES[shape], DTYPES[dtype]))
    if kind == "column":
        dims = {"y": -1, "dx": 1 if sp else None, "da": 0, "db": 0}
    else:
        dims = {"y": 1 if sp else None, "dx": -1, "da": 1, "db": 0}
    return {
        name: tensor if dims[name] is None else own(tensor, dims[name], group)
        for name, tensor in whole.items()
    }


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over all ranks, relative to the largest magnitude over all ranks."""
    out = {}
    for name, tensor in got.items():
        gap = (tensor.double() - want[name].double()).abs().max()
        pair = torch.stack([gap, want[name].double().abs().max()])
        dist.all_reduce(pair, op=dist.ReduceOp.MAX)
        out[name] = float(pair[0] / pair[1])
    return out


def cases():
    grads = {"main_grad": True, "grad": False}
    for shape, dtype, (grad, fused) in itertools.product(SHAPES, DTYPES, grads.items()):
        variants = ["base", "regather", "gather-free", *CONTROLS]
        for kind, sp, names in (
            ("column", True, variants),
            ("column", False, ["base"]),
            ("row", True, ["base", "gather-free"]),
            ("row", False, ["base"]),
        ):
            for variant in names:
                name = f"{kind} {'sp' if sp else 'no-sp'} {shape} {dtype} {grad} {variant}"
                yield name, (kind, variant, sp, fused, shape, dtype)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    results = {}
    for name, (kind, variant, sp, fused, shape, dtype) in cases():
        parts, saved_bytes = run(kind, variant, sp, fused, shape, dtype, group)
        if variant == "base":
            base = parts
        results[name] = {
            "base": difference(parts, base),
            "float64": difference(parts, expected_parts(kind, sp, shape, dtype, group)),
            "saved_bytes": saved_bytes,
        }
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
