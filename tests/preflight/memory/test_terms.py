"""One term of the formula at a time, with numbers worked by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtlaunch.preflight.memory import estimate, lora, loss, schedule, state, workspace
from mtlaunch.preflight.memory.sizes import Sizes, sizes_of
from mtlaunch.preflight.plan import Plan

PlanOf = Callable[..., Plan]
MIB = 2**20

# U = 2 * 1024 * 4096 = 8 MiB; 8 heads of 128
SMALL: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 1024,
    "num-attention-heads": 8,
    "seq-length": 1024,
    "micro-batch-size": 4,
    "max-position-embeddings": 1024,
    "vocab-size": 50304,
    "padded-vocab-size": 50304,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "bf16": True,
}


@pytest.fixture
def sizes(plan_of: PlanOf) -> Callable[..., Sizes]:
    def make(extra: dict[str, Any] | None = None, **job: Any) -> Sizes:
        s = sizes_of(plan_of({**SMALL, **(extra or {})}, **job))
        assert s is not None
        return s

    return make


def peak_parts(plan: Plan) -> dict[str, int]:
    result = estimate(plan)
    assert result is not None
    return dict(result.ranks[-1].components)


class TestState:
    @pytest.mark.parametrize(
        ("extra", "bytes_each"),
        [
            ({}, 18),
            ({"grad-reduce-in-bf16": True}, 20),
            ({"bf16": False, "fp16": True}, 20),
            ({"bf16": False, "fp16": True, "accumulate-allreduce-grads-in-fp32": True}, 18),
            ({"bf16": False}, 16),
            ({"optimizer": "sgd"}, 14),
            ({"use-distributed-optimizer": True}, 6 + 12 / 8),
            ({"use-distributed-optimizer": True, "grad-reduce-in-bf16": True}, 4 + 16 / 8),
            ({"use-distributed-optimizer": True, "bf16": False}, 8 + 8 / 8),
            ({"use-distributed-optimizer": True, "tensor-model-parallel-size": 2}, 6 + 12 / 4),
            ({"use-distributed-optimizer": True, "context-parallel-size": 2}, 6 + 12 / 8),
            (
                {"use-distributed-optimizer": True, "num-distributed-optimizer-instances": 2},
                6 + 12 / 4,
            ),
            (
                {
                    "use-distributed-optimizer": True,
                    "use-precision-aware-optimizer": True,
                    "exp-avg-dtype": "bf16",
                    "exp-avg-sq-dtype": "bf16",
                },
                6 + 8 / 8,
            ),
        ],
        ids=str,
    )
    def test_bytes_of_a_parameter(
        self, sizes: Callable[..., Sizes], extra: dict[str, Any], bytes_each: float
    ):
        assert state.bytes_per_parameter(sizes(extra, gpus=8)).total == bytes_each

    def test_experts_shard_over_their_own_group(self, sizes: Callable[..., Sizes]):
        extra = {"num-experts": 8, "expert-model-parallel-size": 4}
        s = sizes({**extra, "use-distributed-optimizer": True}, gpus=8)
        assert (state.shards(s), state.shards(s, expert=True)) == (8, 2)


class TestWorkspaces:
    """Totals seen: 20 and 68 MiB on A100, 96 on H100 and GB200; 84 and 224 with grouped GEMM."""

    @pytest.mark.parametrize(
        ("gpu", "deterministic", "grouped", "total"),
        [
            ("A100-80GB", False, False, 20.25),
            ("A100-80GB", True, False, 68),
            ("H100-80GB", False, False, 96),
            ("H100-80GB", True, False, 96),
            ("A100-80GB", True, True, 84),
            ("H100-80GB", True, True, 224),
            ("GB200-192GB", True, False, 96),
        ],
    )
    def test_totals(
        self,
        sizes: Callable[..., Sizes],
        gpu: str,
        deterministic: bool,
        grouped: bool,
        total: float,
    ):
        extra: dict[str, Any] = {"deterministic-mode": deterministic}
        if grouped:
            extra |= {"num-experts": 8, "moe-grouped-gemm": True}
        s = sizes(extra, gpu=gpu)
        assert (workspace.cublas(s) + workspace.te_gemm(s)) / MIB == total

    def test_blackwell_had_the_small_cublas_workspace(self, sizes: Callable[..., Sizes]):
        old = sizes(gpu="GB200", cluster={"torch": "2.11"})
        new = sizes(gpu="GB200", cluster={"torch": "2.12"})
        assert workspace.cublas(new) - workspace.cublas(old) == 47.75 * MIB

    def test_the_local_spec_has_no_transformer_engine(self, sizes: Callable[..., Sizes]):
        assert workspace.te_gemm(sizes({"transformer-impl": "local"})) == 0

    def test_the_scores_of_local_attention_share_the_gather_buffer(
        self, sizes: Callable[..., Sizes]
    ):
        s = sizes({"transformer-impl": "local"})
        assert workspace.global_memory_buffer(s, ()) == 2 * 4 * 8 * 1024 * 1024

    def test_the_user_chooses_cublas_workspaces(self, sizes: Callable[..., Sizes]):
        s = sizes(env={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
        assert workspace.cublas(s) == 2 * 16 * 8 * 1024


class TestLoss:
    @pytest.mark.parametrize(
        ("extra", "bytes_each"),
        [
            ({}, 6),
            ({"cross-entropy-loss-fusion": True}, 10),
            ({"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "te"}, 2),
            ({"bf16": False}, 4),
        ],
        ids=str,
    )
    def test_bytes_of_a_logit(
        self, sizes: Callable[..., Sizes], extra: dict[str, Any], bytes_each: int
    ):
        s = sizes(extra)
        assert loss.logits(s) + loss.cross_entropy(s) == bytes_each * 4096 * 50304

    def test_only_the_last_stage_has_it(self, plan_of: PlanOf):
        plan = plan_of({**SMALL, "pipeline-model-parallel-size": 4}, gpus=4)
        result = estimate(plan)
        assert result is not None
        assert ["logits" in rank.components for rank in result.ranks] == [False] * 3 + [True]

    def test_deferred_gradients_of_the_logits(self, sizes: Callable[..., Sizes]):
        extra = {"defer-embedding-wgrad-compute": True, "pipeline-model-parallel-size": 2}
        extra |= {"global-batch-size": 32}
        s = sizes({**extra, "wgrad-deferral-limit": 2}, gpus=2)
        assert loss.deferred_gradients(s) == 2 * loss.logits(s)
        assert loss.deferred_gradients(sizes(extra, gpus=2)) == 8 * loss.logits(s)


class TestSchedule:
    def held(self, *args: Any) -> list[tuple[int, ...]]:
        return [moment.held for moment in schedule.moments(*args)]

    def test_without_interleaving(self):
        for rank in range(4):
            assert self.held(4, rank, 1, 4, 16) == [(4 - rank,)]
        assert self.held(4, 0, 1, 4, 2) == [(2,)]
        assert self.held(1, 0, 1, 1, 16) == [(1,)]

    def test_interleaved_counts(self):
        """W + 1 with W = 2(p-r-1) + (v-1)G, published as 23 and 43 chunks for v = 5 and 10."""
        for virtual, chunks in ((5, 23), (10, 43)):
            assert {sum(held) for held in self.held(4, 0, virtual, 4, 64)} == {chunks}

    def test_the_last_stage_when_the_loss_is_computed(self):
        """(v-1)G chunks of the first v-1 virtual stages, and the last one."""
        [moment, *_] = schedule.moments(4, 3, 8, 4, 128)
        assert moment.held == (4,) * 7 + (1,) and moment.forwarded == 7
        [moment, *_] = schedule.moments(4, 3, 3, 5, 10)
        assert moment.held == (5, 5, 1)

    def test_few_microbatches_are_all_held(self):
        assert self.held(4, 0, 2, 4, 4) == [(4, 4)]

    def test_overlap_of_expert_communication_adds_one(self):
        assert schedule.warmup_forwards(4, 1, 2, 4, 64, True) == 2 * 2 + 4 + 1

    def test_by_replaying_the_whole_schedule(self):
        """Against a replay of get_schedule_table from first to last microbatch."""
        layouts = [(2, 3, 2, 8), (4, 2, 4, 12), (3, 2, 4, 12), (4, 3, 6, 14)]
        for pp, virtual, group, count in layouts:
            for rank in range(pp):
                order = [
                    stage
                    for first in range(0, count, group)
                    for stage in range(virtual)
                    for _ in range(min(group, count - first))
                ]
                warmup = schedule.warmup_forwards(pp, rank, virtual, group, count)
                held, seen = [0] * virtual, set()
                for position, stage in enumerate(order):
                    held[stage] += 1
                    if position >= warmup:
                        seen.add((tuple(held), stage))
                        held[virtual - 1 - order[position - warmup]] -= 1
                found = schedule.moments(pp, rank, virtual, group, count)
                assert {(one.held, one.forwarded) for one in found} <= seen
                assert max(sum(one.held) for one in found) == max(sum(one) for one, _ in seen)


class TestActivations:
    def test_a_layer_in_units_of_the_hidden_state(self, plan_of: PlanOf):
        """16 U for GPT without dropout: 2 + 3 + 1 and 2 + 4 + 4; statistics 4*T*n = 128 KiB."""
        parts = peak_parts(plan_of(SMALL, gpu="H100-80GB"))
        unit = 8 * MIB
        assert parts["attention_activations"] == 4 * (6 * unit + 4 * 4096 * 8)
        assert parts["mlp_activations"] == 4 * 10 * unit

    def test_dropout_masks_are_one_byte(self, plan_of: PlanOf):
        parts = peak_parts(plan_of({**SMALL, "hidden-dropout": 0.1}))
        base = peak_parts(plan_of(SMALL))
        assert parts["embedding_dropout_mask"] == 4 * MIB
        assert parts["mlp_activations"] - base["mlp_activations"] == 4 * 4 * MIB

    def test_gqa_keeps_fewer_keys(self, plan_of: PlanOf):
        extra = {"group-query-attention": True, "num-query-groups": 2}
        saved = peak_parts(plan_of(SMALL))["attention_activations"]
        saved -= peak_parts(plan_of({**SMALL, **extra}))["attention_activations"]
        assert saved == 4 * 2 * 2 * 4096 * (8 - 2) * 128

    def test_flash_attention_copies_its_output_on_an_a100(self, plan_of: PlanOf):
        def attention(gpu: str, **extra: Any) -> int:
            return peak_parts(plan_of({**SMALL, **extra}, gpu=gpu))["attention_activations"]

        copies = 4 * 8 * MIB
        assert attention("A100-80GB") - attention("H100-80GB") == copies
        one = {"micro-batch-size": 1}
        assert attention("A100-80GB", **one) == attention("H100-80GB", **one)
        assert attention("A100-80GB", **{"attention-backend": "fused"}) == attention("H100-80GB")

    @pytest.mark.parametrize(
        ("extra", "job"),
        [
            ({"transformer-impl": "local"}, {}),
            ({"attention-backend": "unfused"}, {}),
            ({"bf16": False, "fp16": True}, {"gpu": "V100-32GB"}),
            ({"deterministic-mode": True}, {"cluster": {"transformer_engine": "1.2"}}),
        ],
        ids=str,
    )
    def test_unfused_attention_keeps_the_scores(
        self, plan_of: PlanOf, extra: dict[str, Any], job: dict[str, Any]
    ):
        """P = 4 * 8 * 1024 * 1024 = 32 Mi elements; 2 bytes, and 3 more with dropout."""
        parts = peak_parts(plan_of({**SMALL, **extra}, **job))
        assert parts["attention_scores"] == 4 * 2 * 32 * MIB
        parts = peak_parts(plan_of({**SMALL, "attention-dropout": 0.1, **extra}, **job))
        assert parts["attention_scores"] == 4 * 5 * 32 * MIB

    def test_recomputing_core_attention_drops_the_scores(self, plan_of: PlanOf):
        extra = {"attention-backend": "unfused", "recompute-granularity": "selective"}
        assert "attention_scores" not in peak_parts(plan_of({**SMALL, **extra}))

    def test_full_recompute_keeps_one_hidden_state_a_layer(self, plan_of: PlanOf):
        extra = {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
        parts = peak_parts(plan_of({**SMALL, **extra}))
        assert parts["recompute_inputs"] == 4 * 8 * MIB
        assert "mlp_activations" not in parts
        # the loss needs more than one layer does: one of the two counts
        assert "logits" in parts and "recomputed_layers" not in parts

    def test_full_recompute_by_block_leaves_the_other_layers(self, plan_of: PlanOf):
        extra = {
            "recompute-granularity": "full",
            "recompute-method": "block",
            "recompute-num-layers": 1,
        }
        parts = peak_parts(plan_of({**SMALL, **extra}))
        assert parts["recompute_inputs"] == 8 * MIB
        assert parts["mlp_activations"] == 3 * 10 * 8 * MIB

    def test_recomputing_the_mlp_takes_its_norm_with_it(self, plan_of: PlanOf):
        extra = {"recompute-granularity": "selective", "recompute-modules": ["mlp"]}
        parts = peak_parts(plan_of({**SMALL, **extra}))
        assert parts["mlp_activations"] == 4 * 8 * MIB

    def test_sequence_parallelism_divides_the_hidden_states(self, plan_of: PlanOf):
        extra = {"tensor-model-parallel-size": 2}
        whole = peak_parts(plan_of({**SMALL, **extra}, gpus=2))
        shard = peak_parts(plan_of({**SMALL, **extra, "sequence-parallel": True}, gpus=2))
        assert whole["mlp_activations"] - shard["mlp_activations"] == 4 * 2 * 4 * MIB


QWEN3_8B: dict[str, Any] = {
    "tensor-model-parallel-size": 2,
    "sequence-parallel": True,
    "seq-length": 8192,
    "micro-batch-size": 1,
    "bf16": True,
}


class TestLora:
    def plan(self, plan_of: PlanOf, variant: str, **extra: Any) -> Plan:
        return plan_of(
            {**QWEN3_8B, **extra}, gpus=2, model="qwen3-8b", lora={"sequence_parallel": variant}
        )

    def peak(self, plan: Plan) -> int:
        result = estimate(plan)
        assert result is not None
        return result.ranks[0].peak_bytes

    def test_the_published_saving_of_regather(self, plan_of: PlanOf):
        """Qwen3-8B, TP2, sequence 8192 on H100: 4.731 GB; S = 67.1 MB, S(72 - 1 - 1/2)."""
        base, regather = (self.plan(plan_of, one) for one in ("base", "regather"))
        saved = self.peak(base) - self.peak(regather)
        assert round(saved / 1e9, 3) == 4.731
        result = estimate(regather)
        assert result is not None and result.lora_saving_bytes == saved

    def test_gather_free_saves_a_little_more(self, plan_of: PlanOf):
        """72 S, less 72 gathered weights of 32 * 4096."""
        base, free = (self.plan(plan_of, one) for one in ("base", "gather-free"))
        saved = self.peak(base) - self.peak(free)
        assert saved == 72 * (2 * 8192 * 4096 - 2 * 32 * 4096)
        result = estimate(free)
        assert result is not None and result.lora_saving_bytes == saved

    @pytest.mark.parametrize("tp", [2, 4])
    def test_without_transformer_engine_the_local_input_takes_the_gathered_ones_place(
        self, plan_of: PlanOf, tp: int
    ):
        """N * S * (1 - 1/t): checked byte by byte on megatron-core's local layers."""
        extra = {"transformer-impl": "local", "tensor-model-parallel-size": tp}
        s = sizes_of(self.plan(plan_of, "regather", **extra))
        assert s is not None
        assert lora.saving(s, 36) == 72 * 2 * 8192 * 4096 * (tp - 1) // tp

    def test_the_frozen_base_costs_two_bytes(self, plan_of: PlanOf):
        """Adapters: 36 * 32 * (in + out)/2 of h 4096, q,k,v 6144, gate and up 24576, f 12288."""
        result = estimate(self.plan(plan_of, "base"))
        assert result is not None
        parts, trained = result.ranks[0].components, 36 * 32 * 63488 // 2
        assert parts["frozen_weights"] == 2 * (result.ranks[0].parameters - trained)
        assert parts["weights"] + parts["gradients"] + parts["optimizer_state"] == 18 * trained
        assert "dummy_weight_gradients" not in parts

    def test_nothing_is_gathered_without_sequence_parallelism(self, plan_of: PlanOf):
        plans = [
            self.plan(plan_of, one, **{"sequence-parallel": False})
            for one in ("base", "regather", "gather-free")
        ]
        assert len({self.peak(plan) for plan in plans}) == 1

    def test_assumptions_are_said(self, plan_of: PlanOf):
        result = estimate(self.plan(plan_of, "base"))
        assert result is not None
        assert any("frozen" in one for one in result.assumptions)
