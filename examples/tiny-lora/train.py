"""Trains a small GPT on bytes of text with megatron-core, on CPUs with gloo or on GPUs with NCCL.

The flags are Megatron-LM's. Start one process per rank:

    torchrun --nproc-per-node 2 train.py --tensor-model-parallel-size 2 --sequence-parallel
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cpu_megatron
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=2)
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--ffn-hidden-size", type=int)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--group-query-attention", action="store_true")
    model.add_argument("--num-query-groups", type=int, default=1)
    model.add_argument("--max-position-embeddings", type=int, default=128)
    model.add_argument("--vocab-size", type=int, default=256, help="one token per byte value: 256")
    model.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    model.add_argument("--swiglu", action="store_true")
    model.add_argument("--disable-bias-linear", action="store_true")
    model.add_argument("--attention-dropout", type=float, default=0.0)
    model.add_argument("--hidden-dropout", type=float, default=0.0)
    model.add_argument("--init-method-std", type=float, default=0.1)
    training = parser.add_argument_group("training")
    training.add_argument("--data-path", type=Path, default=Path(__file__).with_name("text.txt"))
    training.add_argument("--seq-length", type=int, default=128)
    training.add_argument("--micro-batch-size", type=int, default=4)
    training.add_argument("--global-batch-size", type=int, default=8)
    training.add_argument("--train-iters", type=int, default=40)
    training.add_argument("--lr", type=float, default=5e-3)
    training.add_argument("--min-lr", type=float, default=0.0)
    training.add_argument("--lr-warmup-iters", type=int, default=0)
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--clip-grad", type=float, default=1.0)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--log-interval", type=int, default=5)
    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parallel.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parallel.add_argument("--sequence-parallel", action="store_true")
    parallel.add_argument("--overlap-grad-reduce", action="store_true")
    parallel.add_argument("--distributed-timeout-minutes", type=int, default=10)
    memory = parser.add_argument_group("memory")
    memory.add_argument("--recompute-granularity", choices=["full", "selective"])
    memory.add_argument("--recompute-method", choices=["uniform", "block"])
    memory.add_argument("--recompute-num-layers", type=int)
    memory.add_argument("--recompute-modules", nargs="*")
    args = parser.parse_args()
    if args.pipeline_model_parallel_size != 1:
        parser.error("--pipeline-model-parallel-size: this script trains with 1 only")
    if args.vocab_size < 256:
        parser.error(f"--vocab-size {args.vocab_size}: the bytes of a text need 256")
    return args


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def initialize(args: argparse.Namespace) -> None:
    if device().type == "cuda":
        torch.cuda.set_device(device())
        backend = "nccl"
    else:
        torch.set_num_threads(1)  # the ranks share the machine's cores
        backend = "gloo"
    torch.distributed.init_process_group(backend)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def build_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not args.disable_bias_linear,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        recompute_modules=args.recompute_modules,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=device().type == "cpu",
        # Fused operations are compiled, which takes longer than this whole run.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig) -> DistributedDataParallel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device())
    return DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=args.overlap_grad_reduce),
        module=model,
    )


def batches(args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches of random windows of the text; the same on all ranks of a model replica."""
    text = torch.frombuffer(bytearray(args.data_path.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(args.seed + parallel_state.get_data_parallel_rank())
    mask = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool).triu(1)[None, None]
    position_ids = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
    while True:
        starts = torch.randint(
            len(text) - args.seq_length, (args.micro_batch_size,), generator=generator
        )
        windows = torch.stack([text[start : start + args.seq_length + 1] for start in starts])
        batch = {
            "tokens": windows[:, :-1],
            "labels": windows[:, 1:],
            "position_ids": position_ids,
            "attention_mask": mask,  # True: may not be looked at
        }
        yield {name: tensor.contiguous().to(device()) for name, tensor in batch.items()}


def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """losses: [b, s], fp32. Sum and number of tokens, as Megatron's schedules expect them."""
    total = losses.float().sum()
    num_tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, num_tokens, {"lm loss": (total / num_tokens).detach()}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module):
    batch = next(data)
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return losses, loss_func


def main() -> None:
    args = parse_args()
    cpu_megatron.install()
    initialize(args)
    data_parallel_size = parallel_state.get_data_parallel_world_size()
    num_microbatches, rest = divmod(
        args.global_batch_size, args.micro_batch_size * data_parallel_size
    )
    if rest:
        sys.exit(
            f"--global-batch-size {args.global_batch_size} does not split into micro-batches of "
            f"{args.micro_batch_size} over {data_parallel_size} data-parallel ranks"
        )

    config = build_config(args)
    model = build_model(args, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            use_distributed_optimizer=False,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync

    train_step = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=batches(args),
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    model.train()
    if torch.distributed.get_rank() == 0:
        num_parameters = sum(p.numel() for p in model.parameters())
        print(f" number of parameters on rank 0: {num_parameters}", flush=True)

    interval_losses: list[float] = []
    interval_start = time.perf_counter()
    for iteration in range(1, args.train_iters + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = train_step()
        update_successful, grad_norm, _ = optimizer.step()
        learning_rate = optimizer.param_groups[0]["lr"]
        scheduler.step(increment=args.global_batch_size)

        loss = torch.stack([microbatch["lm loss"] for microbatch in losses]).mean()
        torch.distributed.all_reduce(
            loss,
            op=torch.distributed.ReduceOp.AVG,
            group=parallel_state.get_data_parallel_group(),
        )
        interval_losses.append(loss.item())
        if not update_successful or loss.isnan():
            sys.exit(f"iteration {iteration}: loss {loss.item()}, gradient norm {grad_norm}")
        if iteration % args.log_interval == 0 or iteration == 1:
            elapsed_ms = (time.perf_counter() - interval_start) * 1e3 / len(interval_losses)
            if torch.distributed.get_rank() == 0:
                print(
                    f" iteration {iteration:8d}/{args.train_iters:8d} |"
                    f" consumed samples: {iteration * args.global_batch_size:12d} |"
                    f" elapsed time per iteration (ms): {elapsed_ms:.1f} |"
                    f" learning rate: {learning_rate:.6E} |"
                    f" global batch size: {args.global_batch_size:5d} |"
                    f" lm loss: {sum(interval_losses) / len(interval_losses):.6E} |"
                    f" grad norm: {grad_norm:.3f} |",
                    flush=True,
                )
            interval_losses.clear()
            interval_start = time.perf_counter()

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
