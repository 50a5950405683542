"""What megatron-core needs changed to run on a CPU with gloo.

Megatron names the GPU in places where nothing depends on it: buffers, scalars, random states.
`install()` makes those places use the CPU and leaves all arithmetic alone. Where there is a GPU it
does nothing. Line numbers are those of megatron-core 0.16.1.

Call it before the model is built; importing megatron before or after it makes no difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def install() -> None:
    if torch.cuda.is_available() or getattr(install, "done", False):
        return
    install.done = True  # type: ignore[attr-defined]
    _current_device()
    _synchronize()
    _literal_cuda_devices()
    _random_states()
    _norm_under_sequence_parallelism()
    _gradient_clipping()


def _current_device() -> None:
    """Buffers are allocated on torch.cuda.current_device().

    core/tensor_parallel/mappings.py:91,141,148,181,442, layers.py:261,597, utils.py:70,
    core/utils.py:631 (GlobalMemoryBuffer), core/distributed/param_and_grad_buffer.py:800,806,
    core/models/common/embeddings/rotary_pos_embedding.py:162.
    """
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]


def _synchronize() -> None:
    """Checkpoints wait for copies off the GPU; on a CPU there are none.

    core/dist_checkpointing/strategies/filesystem_async.py:230,
    core/distributed/distributed_data_parallel.py:588,611. With 0.19.2 gradients also wait on the
    stream of a CUDA graph's replay, core/distributed/param_and_grad_buffer.py:632; there is none.
    """
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]


class _TorchOnCPU:
    """torch, except that the functions below put on the CPU what is asked to be on a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)

    def ones(self, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.ones(*args, **kwargs)

    def tensor(self, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)


def _literal_cuda_devices() -> None:
    """Modules that write device="cuda" see a torch that ignores it.

    core/pipeline_parallel/schedules.py:596,983,2138 (the token counter),
    core/optimizer/optimizer.py:473-485,907 (loss scale), core/optimizer/clip_grads.py:90-207,
    core/utils.py:1207 (L2 norm without Apex), core/transformer/utils.py:35 (causal mask).
    """
    import megatron.core.optimizer.clip_grads
    import megatron.core.optimizer.optimizer
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.transformer.utils
    import megatron.core.utils

    for module in (
        megatron.core.optimizer.clip_grads,
        megatron.core.optimizer.optimizer,
        megatron.core.pipeline_parallel.schedules,
        megatron.core.transformer.utils,
        megatron.core.utils,
    ):
        module.torch = _TorchOnCPU()  # type: ignore[attr-defined]


def _random_states() -> None:
    """Tracked random states are those of the CPU generator instead of the GPU's.

    core/tensor_parallel/random.py:55 and :84 read and set the GPU generator, :217 `add` seeds it,
    :243 `fork` warns when the CPU generator has moved inside it, which here it must.
    """
    from megatron.core.tensor_parallel import random

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_:
                raise ValueError(f"seed {seed} already exists")
            if name in self.states_:
                raise ValueError(f"rng state {name} already exists")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    random.CudaRNGStatesTracker = CpuRNGStatesTracker


def _norm_under_sequence_parallelism() -> None:
    """torch's norms, marked for the gradient sum over the tensor-parallel group.

    core/transformer/torch_norm.py:32 refuses sequence parallelism, because it does not set the
    mark that core/fusions/fused_layer_norm.py (Apex, GPU only) sets and that
    core/distributed/finalize_model_grads.py:354 looks for.
    """
    from megatron.core.transformer import torch_norm

    def new(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> torch.nn.Module:
        norm_class = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm: torch.nn.Module = norm_class[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new  # type: ignore[method-assign,assignment]


def _gradient_clipping() -> None:
    """core/optimizer/clip_grads.py:167 asserts that a gradient is a torch.cuda.FloatTensor."""
    from megatron.core.optimizer import optimizer

    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
    ) -> None:
        coefficient = max_norm / (total_norm + 1.0e-6)
        if coefficient < 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(coefficient)

    optimizer.clip_grad_by_total_norm_fp32 = clip_grad_by_total_norm_fp32
