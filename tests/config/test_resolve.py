"""Claims about ``resolve()``: levels, flags that win over them, refusals word for word."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import pytest

from fusewright.config import (
    LEVELS,
    PASSES,
    CudagraphMode,
    EngineOptions,
    Hardware,
    ModelLimits,
    ResolvedConfig,
    UserError,
    option_specs,
    resolve,
)

CPU = Hardware(device="cpu", name="a CPU")
GPU = Hardware("cuda", "a GPU", sm=90, num_sms=132, graphs="cuda")
NUMBERS = ("int", "int | None", "float", "float | None")
LIMITS = ModelLimits(max_position_embeddings=4096, dtype="bfloat16")


def resolved(hardware: Hardware = GPU, **options: Any) -> ResolvedConfig:
    return resolve(EngineOptions(**options), hardware, LIMITS)


# Levels


@pytest.mark.parametrize("number", LEVELS)
def test_a_level_alone_turns_on_exactly_its_row(number: int) -> None:
    level = LEVELS[number]
    config = resolved(optimization_level=number)
    assert config.compile.level == number
    assert config.compile.trace == level.trace
    assert config.compile.passes == level.passes
    assert config.compile.hand_kernels == level.hand_kernels
    assert config.compile.tune == level.tune
    assert config.capture.mode is level.cudagraph_mode


def test_levels_are_the_table_of_the_design() -> None:
    assert [LEVELS[n].cudagraph_mode.value for n in range(4)] == [
        "NONE",
        "PIECEWISE",
        "FULL_AND_PIECEWISE",
        "FULL_AND_PIECEWISE",
    ]
    assert [LEVELS[n].trace for n in range(4)] == [False, True, True, True]
    assert [LEVELS[n].passes for n in range(4)] == [(), ("cleanup",), PASSES, PASSES]


def test_the_default_level_is_2() -> None:
    assert resolved().compile.level == 2


def test_enforce_eager_is_level_0_whatever_the_level() -> None:
    eager = resolved(enforce_eager=True, optimization_level=3)
    assert (eager.compile, eager.capture) == (
        resolved(optimization_level=0).compile,
        resolved(optimization_level=0).capture,
    )


# Explicit flags win over their level


def test_passes_win_over_the_level_and_keep_the_pipeline_order() -> None:
    assert resolved(passes=("fuse_act", "cleanup")).compile.passes == ("cleanup", "fuse_act")
    assert resolved(optimization_level=1, passes=PASSES).compile.passes == PASSES
    assert resolved(passes=()).compile.passes == ()


def test_disable_passes_wins_over_the_level() -> None:
    config = resolved(disable_passes=("fuse_add_norm",))
    proven = LEVELS[2].passes
    assert config.compile.passes == tuple(p for p in proven if p != "fuse_add_norm")


@pytest.mark.parametrize("mode", list(CudagraphMode))
@pytest.mark.parametrize("number", [1, 2, 3])
def test_cudagraph_mode_wins_over_the_level(number: int, mode: CudagraphMode) -> None:
    config = resolved(optimization_level=number, cudagraph_mode=mode.value)
    assert config.capture.mode is mode
    assert bool(config.capture.sizes) == (mode is not CudagraphMode.NONE)


def test_capture_sizes_win_and_are_sorted_without_repeats() -> None:
    assert resolved(cudagraph_capture_sizes=(8, 2, 8)).capture.sizes == (2, 8)


def test_forced_kernels_arrive_as_pairs() -> None:
    config = resolved(kernels=("rms_norm=triton", "linear=native"))
    assert config.compile.kernels == (("rms_norm", "triton"), ("linear", "native"))


def test_model_facts_fill_what_is_not_given() -> None:
    config = resolved(model="/m")
    assert (config.precision.dtype, config.model.max_model_len) == ("bfloat16", 4096)
    given_too = resolved(model="/m", dtype="float32", max_model_len=100)
    assert (given_too.precision.dtype, given_too.model.max_model_len) == ("float32", 100)


# Hardware


def test_no_graphs_without_a_gpu_at_any_level() -> None:
    for number in LEVELS:
        config = resolved(CPU, optimization_level=number)
        assert (config.capture.mode, config.capture.sizes) == (CudagraphMode.NONE, ())


def test_recorded_graphs_stand_in_for_a_gpu() -> None:
    recording = Hardware(device="cpu", name="a CPU", graphs="recording")
    assert resolved(recording).capture.mode is CudagraphMode.FULL_AND_PIECEWISE


def test_tokens_a_step_follow_the_device_and_cover_one_token_a_request() -> None:
    assert resolved(GPU).scheduler.max_num_batched_tokens == 8192
    assert resolved(CPU).scheduler.max_num_batched_tokens == 2048
    assert resolved(CPU, max_num_seqs=5000).scheduler.max_num_batched_tokens == 5000


@pytest.mark.parametrize(
    ("gigabytes", "options", "expected"),
    [
        (141, {}, 512),
        (80, {}, 512),
        (48, {}, 256),
        (0, {}, 256),
        (141, {"max_num_seqs": 7}, 7),
        (141, {"max_num_batched_tokens": 100}, 100),
    ],
)
def test_requests_a_step_follow_the_memory(
    gigabytes: int, options: dict[str, Any], expected: int
) -> None:
    found = resolved(replace(GPU, memory_bytes=gigabytes * 10**9), **options)
    assert found.scheduler.max_num_seqs == expected
    assert expected in found.capture.sizes


def test_tokens_a_step_cover_the_longest_prompt_without_chunked_prefill() -> None:
    assert resolved(CPU, enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 4096


def test_steps_with_decodes_are_limited_in_a_server_that_may_split_prompts() -> None:
    assert EngineOptions().for_server().max_num_mixed_tokens == 256
    for same in ({"max_num_mixed_tokens": 0}, {"enable_chunked_prefill": False}, {}):
        assert resolved(GPU, **same).scheduler.max_num_mixed_tokens == 0
        assert not same or EngineOptions(**same).for_server() == EngineOptions(**same)


# Refusals, word for word

REFUSALS: list[tuple[Hardware, dict[str, Any], str]] = [
    (GPU, {"optimization_level": 4}, "optimization_level=4: expected 0, 1, 2 or 3"),
    (GPU, {"block_size": 12}, "block_size=12: expected a power of two in 8..256"),
    (GPU, {"block_size": 4}, "block_size=4: expected a power of two in 8..256"),
    (GPU, {"block_size": 512}, "block_size=512: expected a power of two in 8..256"),
    (
        GPU,
        {"gpu_memory_utilization": 0.0},
        "gpu_memory_utilization=0.0: expected a number in (0, 1]",
    ),
    (
        GPU,
        {"gpu_memory_utilization": 1.5},
        "gpu_memory_utilization=1.5: expected a number in (0, 1]",
    ),
    (GPU, {"max_num_seqs": 0}, "max_num_seqs=0: expected at least 1"),
    (GPU, {"max_model_len": 0}, "max_model_len=0: expected at least 1"),
    (GPU, {"scheduling_policy": "sjf"}, "scheduling_policy='sjf': expected fcfs or priority"),
    *[
        (GPU, {name: -1}, f"{name}=-1: expected 0 (no limit) or a number of tokens")
        for name in ("long_prefill_token_threshold", "max_num_mixed_tokens")
    ],
    *[
        (
            GPU,
            {name: 8, "enable_chunked_prefill": False},
            (
                f"{name}=8 splits prompts, which enable_chunked_prefill=False forbids; drop one of "
                "them"
            ),
        )
        for name in ("long_prefill_token_threshold", "max_num_mixed_tokens")
    ],
    (GPU, {"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: expected at least 1"),
    (GPU, {"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0: expected at least 1"),
    (GPU, {"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0: expected more than 0"),
    *[
        (
            GPU,
            {"compile_cache_limit_gb": value},
            f"compile_cache_limit_gb={value}: expected a {end}",
        )
        for value, end in [
            (0.0, "number of more than 0"),
            (-5.0, "number of more than 0"),
            (float("nan"), "number of more than 0"),
            (float("-inf"), "number of more than 0"),
            (float("inf"), "number up to 1000000000"),
            (1e300, "number up to 1000000000"),
        ]
    ],
    (GPU, {"dtype": "int8"}, "dtype='int8': expected auto or bfloat16 or float16 or float32"),
    (GPU, {"load_format": "pt"}, "load_format='pt': expected auto or safetensors or dummy"),
    (GPU, {"device": "tpu"}, "device='tpu': expected auto or cpu or cuda"),
    (
        GPU,
        {"cudagraph_mode": "SOME"},
        (
            "cudagraph_mode='SOME': expected NONE or PIECEWISE or FULL or FULL_DECODE_ONLY "
            "or FULL_AND_PIECEWISE"
        ),
    ),
    (
        GPU,
        {"num_gpu_blocks_override": 10, "kv_cache_memory_bytes": 10},
        "num_gpu_blocks_override and kv_cache_memory_bytes both size the KV cache: give one",
    ),
    (
        GPU,
        {"max_model_len": 4097},
        "max_model_len=4097: the model was made for 4096 positions; give 4096 or less",
    ),
    (
        GPU,
        {"passes": ("fuse_all",)},
        f"unknown pass 'fuse_all'; known: {', '.join(PASSES)}",
    ),
    (
        GPU,
        {"disable_passes": ("fuse_all",)},
        f"unknown pass 'fuse_all'; known: {', '.join(PASSES)}",
    ),
    (
        GPU,
        {"optimization_level": 0, "passes": ("cleanup", "fuse_act")},
        "passes=cleanup,fuse_act: -O0 does not trace; use -O1 or higher",
    ),
    (
        GPU,
        {"optimization_level": 0, "verify": True},
        "verify: -O0 rewrites nothing; use -O1 or higher",
    ),
    (
        GPU,
        {"kernels": ("triton",)},
        "kernels='triton': expected op=implementation, such as rms_norm=triton",
    ),
    (
        GPU,
        {"optimization_level": 0, "cudagraph_mode": "FULL"},
        "cudagraph_mode=FULL: -O0 captures nothing; use -O1 or higher",
    ),
    (
        GPU,
        {"enforce_eager": True, "cudagraph_mode": "PIECEWISE"},
        "cudagraph_mode=PIECEWISE: -O0 captures nothing; drop --enforce-eager",
    ),
    (
        CPU,
        {"cudagraph_mode": "FULL"},
        "cudagraph_mode=FULL: CUDA graphs need a GPU, the device is cpu; use cudagraph_mode=NONE",
    ),
    (
        GPU,
        {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": (1, 2)},
        "cudagraph_capture_sizes with cudagraph_mode=NONE: nothing is captured; drop it",
    ),
    (
        GPU,
        {"cudagraph_capture_sizes": (0, 2)},
        "cudagraph_capture_sizes=(0, 2): expected token counts of at least 1",
    ),
    (
        GPU,
        {"cudagraph_capture_sizes": ()},
        "cudagraph_capture_sizes=(): expected token counts of at least 1",
    ),
    (
        GPU,
        {"max_num_batched_tokens": 16, "max_num_seqs": 17},
        (
            "max_num_batched_tokens=16 < max_num_seqs=17: every running request needs one token a "
            "step; raise the former or lower the latter"
        ),
    ),
    (
        GPU,
        {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False},
        (
            "max_num_batched_tokens=1024 < max_model_len=4096 without chunked prefill: a long "
            "prompt could never run; raise it or enable chunked prefill"
        ),
    ),
]


@pytest.mark.parametrize(
    ("hardware", "options", "message"), REFUSALS, ids=[message[:50] for _, _, message in REFUSALS]
)
def test_refusal(hardware: Hardware, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        resolved(hardware, **options)
    assert str(refused.value) == message


# Frozen; options are described once


def _parts(value: object) -> list[object]:
    nested = [getattr(value, f.name) for f in fields(value)]  # type: ignore[arg-type]
    return [value, *(part for n in nested if is_dataclass(n) for part in _parts(n))]


def test_nothing_of_a_resolved_config_can_be_changed() -> None:
    parts = _parts(resolved())
    assert len(parts) == 10, "ResolvedConfig and its nine parts"
    for part in (*parts, EngineOptions(), *LEVELS.values()):
        for field in fields(part):  # type: ignore[arg-type]
            with pytest.raises(FrozenInstanceError):
                setattr(part, field.name, None)


def test_a_resolved_config_is_hashable_all_the_way_down() -> None:
    assert hash(resolved()) == hash(resolved())


def test_every_option_is_described_and_its_default_is_allowed() -> None:
    specs = option_specs()
    assert [s.name for s in specs] == [f.name for f in fields(EngineOptions)]
    for spec in specs:
        assert spec.help
        assert spec.group
        # Its negation is --no-cache.
        own = "--cache" if spec.name == "compile_cache" else ""
        assert spec.flag == (own or "--" + spec.name.replace("_", "-"))
        assert not spec.choices or spec.default is None or spec.default in spec.choices


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), 1e300, 2**70, -(2**70)]
)
@pytest.mark.parametrize("name", [s.name for s in option_specs() if s.type in NUMBERS])
def test_no_option_takes_a_number_that_is_none_or_beyond_all_use(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^{name}="):
        resolved(**{name: value})
