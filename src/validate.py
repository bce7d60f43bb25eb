"""What no single key shows: ranges, and everything that crosses config groups (CFG-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from src import durations, reserved
from src.config import Config
from src.errors import Problem, UserError
from src.kernels.quirks import check_disabled
from src.models.schema import (
    DeepseekV2Config,
    DenseConfig,
    GptOssConfig,
    ModelConfig,
    Qwen3MoeConfig,
)
from src.naming import MAX_BYTES
from src.trainer.checkpoint.directory import size_in_bytes
from src.trainer.data import keys
from src.trainer.parallel import rules
from src.validate_backend import backend_problems, force_problems
from src.validate_container import container_problems
from src.validate_fp8 import fp8_problems

TRACKERS = ("wandb", "tensorboard")
MAX_BETA = 0.99
"""Up to here a bf16 first moment has no bias to speak of (2e-4); with 0.999 it stays 15 % short."""
MOST_TRACED = 10
"""Steps of a trace at most: one of a large model has some ten thousand events."""


def validate(config: Config) -> list[Problem]:
    """Every cross-group problem of a resolved config: key, both values, rule and what to type."""
    problems = reserved.check(config)
    for part in _PARTS:
        problems += part(config)
    problems += rules.check(config) + keys.check(config)
    return list(dict.fromkeys(problems))


def _at_least(lowest: float) -> Callable[[float], bool]:
    return lambda value: value >= lowest


def _above(lowest: float) -> Callable[[float], bool]:
    return lambda value: value > lowest


_RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("max_steps", "at least 1", _at_least(1)),
    ("sequence_length", "at least 2", _at_least(2)),
    ("max_skips", "at least 0", _at_least(0)),
    ("seed", "at least 0", _at_least(0)),
    ("optimizer.lr", "above 0", _above(0)),
    ("optimizer.max_norm", "above 0, or null", _above(0)),
    ("optimizer.weight_decay", "at least 0", _at_least(0)),
    ("optimizer.eps", "above 0", _above(0)),
    ("optimizer.momentum", "at least 0", _at_least(0)),
    ("lr_schedule.warmup", "at least 0", _at_least(0)),
    ("lr_schedule.decay", "at least 0", _at_least(0)),
    ("lr_schedule.horizon", "at least 1, or null", _at_least(1)),
    ("lr_schedule.floor", "from 0 to 1", lambda value: 0 <= value <= 1),
    ("balance.coef", "at least 0", _at_least(0)),
    ("balance.z_loss", "at least 0", _at_least(0)),
    ("balance.bias_rate", "at least 0", _at_least(0)),
    ("spike.window", "at least 2", _at_least(2)),
    ("spike.deviations", "above 0, or null", _above(0)),
    ("launcher.slots", "at least 1, or null", _at_least(1)),
    ("launcher.nodes", "at least 1, or null", _at_least(1)),
    ("launcher.gpus_per_node", "at least 1, or null", _at_least(1)),
    ("launcher.cpus_per_task", "at least 1, or null", _at_least(1)),
    ("launcher.max_requeues", "at least 0", _at_least(0)),
    ("checkpoint.every", "at least 0", _at_least(0)),
    ("checkpoint.keep_last", "at least 1", _at_least(1)),
    ("checkpoint.keep_every", "at least 0", _at_least(0)),
    ("evaluation.every", "at least 0", _at_least(0)),
    ("evaluation.samples", "at least 1, or null", _at_least(1)),
    ("evaluation.sample_tokens", "at least 1", _at_least(1)),
    ("logger.every", "at least 1", _at_least(1)),
    ("logger.flush_every", "at least 1", _at_least(1)),
    ("sweep.prepare_parallel", "at least 1", _at_least(1)),
)


def _ranges(config: Config) -> Iterator[Problem]:
    for key, words, is_right in _RANGES:
        value = _get(config, key)
        if value is not None and not is_right(value):
            yield Problem(key, f"must be {words}, not {value}", rule="range")
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        fix = "type 'optimizer.betas=[0.9,0.95]'"
        yield Problem(
            "optimizer.betas",
            f"must be two numbers from 0 to below 1, not {config.optimizer.betas}",
            fix,
            "range",
        )


def _get(config: Config, key: str) -> float | None:
    node: object = config
    for name in key.split("."):
        node = getattr(node, name)
    assert node is None or isinstance(node, int | float), key
    return node


def _durations(config: Config) -> Iterator[Problem]:
    """A wait of no length would fail every start (LEASE-5)."""
    for key, text in (
        ("launcher.timeout", config.launcher.timeout),
        ("launcher.collective_timeout", config.launcher.collective_timeout),
        ("data.prepare.timeout", config.data.prepare.timeout),
        ("platform.thresholds.probe", config.platform.thresholds.probe),
    ):
        if durations.seconds(text) == 0:
            yield Problem(key, f"{text} is no time at all", f"type {key}=5m", "CFG-5")


def _names(config: Config) -> Iterator[Problem]:
    """Names become directories that paste unquoted into a shell and an override (RUN-4)."""
    for key, name in (("run_name", config.run_name), ("sweep.name", config.sweep.name)):
        if name is None:
            continue
        parts = name.split("/")
        if not all(_is_plain(part) for part in parts):
            words = f"use letters, digits, . _ - and / between folders, at most {MAX_BYTES} characters each"
            yield Problem(key, f"{name!r} is no directory name", words, "RUN-4")


def _sweep(config: Config) -> Iterator[Problem]:
    """Keys that the launcher writes into a job's config: typed, they would name another's directory."""
    for name in ("job", "index", "keys"):
        if getattr(config.sweep, name) not in (None, []):
            fix = "leave it out; sweep.name=NAME names the sweep"
            yield Problem(f"sweep.{name}", "is set by the launcher", fix, "SWEEP-9")


def _is_plain(part: str) -> bool:
    allowed = all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in part)
    return allowed and 0 < len(part) <= MAX_BYTES and part not in (".", "..") and not part.startswith("-")


def _kernels(config: Config) -> Iterator[Problem]:
    yield from check_disabled(config.kernels.quirks_disabled)
    mesh = config.mesh
    if config.launcher.share_device and (mesh.pp > 1 or mesh.cp > 1):
        message = f"true, with pp {mesh.pp} and cp {mesh.cp}: gloo sends nothing of a GPU from rank to rank"
        yield Problem("launcher.share_device", message, "a mesh of rep, dp and ep", "share")


def _schedule(config: Config) -> Iterator[Problem]:
    schedule = config.lr_schedule
    horizon = config.max_steps if schedule.horizon is None else schedule.horizon
    if schedule.kind == "wsd" and schedule.warmup + schedule.decay > horizon:
        message = f"warmup={schedule.warmup} and decay={schedule.decay} do not fit into {horizon} steps"
        fix = f"type lr_schedule.decay={max(0, horizon - schedule.warmup)}, or more max_steps"
        yield Problem("lr_schedule", message, fix, "CFG-19")


def _pipeline(config: Config) -> Iterator[Problem]:
    if config.pipeline.overlap and config.pipeline.schedule != "dualpipev":
        message = f"{config.pipeline.schedule} cannot overlap two micro-batches; only dualpipev will"
        yield Problem("pipeline.overlap", message, "type pipeline.overlap=false", "ENG-17")


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if config.sequence_length > model.context:
        message = f"sequence_length={config.sequence_length} is longer than model.context={model.context}"
        yield Problem("sequence_length", message, f"type sequence_length={model.context}", "TRAP-9")
    for is_wrong, key, message, fix, rule in _sizes(model):
        if is_wrong:
            yield Problem(key, message, fix, rule)


Rows = list[tuple[bool, str, str, str, str]]
"""Whether something is wrong; then key, message, what to type, rule."""


def _sizes(model: ModelConfig) -> Rows:
    if isinstance(model, DeepseekV2Config):
        return _deepseek(model)
    if isinstance(model, GptOssConfig):
        return _gpt_oss(model)
    if isinstance(model, DenseConfig):
        return _dense(model)
    return _qwen3_moe(model) if isinstance(model, Qwen3MoeConfig) else []


def _grouped_heads(m: Qwen3MoeConfig | GptOssConfig | DenseConfig) -> Rows:
    """Heads of grouped-query attention that contradict each other (ATT-2, ATT-4)."""
    heads, kv = m.num_heads, m.num_kv_heads
    return [
        (
            *(not 1 <= kv <= heads or heads % kv != 0, "model.num_kv_heads"),
            *(f"{kv} heads of keys and values do not divide {heads} query heads", "a divisor", "ATT-4"),
        ),
        (
            *(m.head_dim < 2 or m.head_dim % 2 != 0, "model.head_dim"),
            *(f"{m.head_dim} is no even width; positions rotate pairs", "an even width", "ATT-2"),
        ),
    ]


def _gpt_oss(m: GptOssConfig) -> Rows:
    """Sizes that contradict each other; ROUTE-4, ATT-6, FFN-1 and those of the heads are the rules."""
    window, limit, dense = m.sliding_window, m.swiglu_limit, m.intermediate_size
    return [
        *_grouped_heads(m),
        (
            *(not 1 <= m.top_k <= m.num_experts, "model.top_k"),
            *(f"top_k={m.top_k} of {m.num_experts} experts", f"1 to {m.num_experts}", "ROUTE-4"),
        ),
        (
            *(window < 1, "model.sliding_window"),
            *(f"a window of {window} keys leaves out the query's own", "1 or more", "ATT-6"),
        ),
        (
            *(limit <= 0, "model.swiglu_limit"),
            *(f"nothing passes within ±{limit}", "a limit above 0, such as 7.0", "FFN-1"),
        ),
        (
            *(dense != 0, "model.intermediate_size"),
            *(f"{dense}, but every layer of this family has experts", "0; model.expert_size is", "TRAP-6"),
        ),
    ]


def _dense(m: DenseConfig) -> Rows:
    return [
        *_grouped_heads(m),
        (
            *(m.intermediate_size < 1, "model.intermediate_size"),
            *(f"{m.intermediate_size} is no width of an FFN", "at least 1", "DENSE-1"),
        ),
    ]


def _qwen3_moe(m: Qwen3MoeConfig) -> Rows:
    """Sizes that contradict each other; ROUTE-3 and those of the heads are the rules."""
    step, last = m.decoder_sparse_step, m.num_layers - 1
    outside = [index for index in m.mlp_only_layers if not 0 <= index <= last]
    return [
        *_grouped_heads(m),
        (
            *(bool(outside), "model.mlp_only_layers"),
            *(f"{outside} are none of the {m.num_layers} layers", f"layers 0 to {last}", "ROUTE-3"),
        ),
        (
            *(step < 1, "model.decoder_sparse_step"),
            *(f"every {step}-th layer is no choice of layers", "1, for experts in all", "ROUTE-3"),
        ),
        (
            *(not 1 <= m.top_k <= m.num_experts, "model.top_k"),
            *(f"top_k={m.top_k} of {m.num_experts} experts", f"1 to {m.num_experts}", "ROUTE-3"),
        ),
    ]


def _deepseek(m: DeepseekV2Config) -> Rows:
    """Sizes that contradict each other; ROUTE-1 and ATT-2 are the rules."""
    grouped = m.routing == "group_limited_greedy"
    whole = m.num_groups > 0 and m.num_experts % m.num_groups == 0
    reach = m.groups_kept * m.num_experts // max(1, m.num_groups) if grouped else m.num_experts
    return [
        (
            *(not 0 <= m.first_dense <= m.num_layers, "model.first_dense"),
            *(f"{m.first_dense} of {m.num_layers} layers cannot be dense", f"0 to {m.num_layers}", "MOD-1"),
        ),
        (
            *(grouped and not whole, "model.num_groups"),
            *(f"{m.num_groups} groups do not divide {m.num_experts} experts", "a divisor", "ROUTE-1"),
        ),
        (
            *(grouped and not 1 <= m.groups_kept <= m.num_groups, "model.groups_kept"),
            *(f"{m.groups_kept} of {m.num_groups} groups cannot be kept", f"1 to {m.num_groups}", "ROUTE-1"),
        ),
        (
            *(not 1 <= m.top_k <= reach, "model.top_k"),
            *(f"top_k={m.top_k}, but a token may choose from {reach} experts", f"1 to {reach}", "ROUTE-1"),
        ),
        (
            *(m.qk_rope_head_dim % 2 != 0, "model.qk_rope_head_dim"),
            *(f"{m.qk_rope_head_dim} is odd; positions rotate pairs", "an even width", "ATT-2"),
        ),
    ]


def _precision(config: Config) -> Iterator[Problem]:
    """Only AdamW has a first moment, and only beside fp32 masters one of fewer bits is of use (OP-4)."""
    if config.precision.first_moment == "auto":
        return
    name, kind, key = config.precision.name, config.optimizer.kind, "precision.first_moment"
    if name not in ("master", "split"):
        fix = f"precision=master or precision=split, or {key}=auto"
        yield Problem(key, f"bf16 goes with fp32 masters, not with precision={name}", fix, "OP-4")
    if kind != "adamw":
        fix = f"optimizer=adamw or {key}=auto"
        yield Problem(key, f"bf16, but optimizer={kind} keeps no first moment of AdamW", fix, "OP-4")
    if config.optimizer.betas and config.optimizer.betas[0] > MAX_BETA:
        message = (
            f"bf16, but with betas[0]={config.optimizer.betas[0]} a step's share of it is lost in rounding"
        )
        yield Problem(key, message, f"optimizer.betas[0] up to {MAX_BETA}, or {key}=auto", "OP-4")


def _sizes_of_bytes(config: Config) -> Iterator[Problem]:
    limits = config.platform.thresholds
    memlock = "0" if limits.memlock == "unlimited" else limits.memlock
    sizes = {
        "disk": limits.disk,
        "shm": limits.shm,
        "device_memory": limits.device_memory,
        "memlock": memlock,
    }
    named = {f"platform.thresholds.{name}": text for name, text in sizes.items()}
    if config.launcher.gpu_memory is not None:
        named["launcher.gpu_memory"] = config.launcher.gpu_memory
    for key, text in {"checkpoint.verify": config.checkpoint.verify, **named}.items():
        try:
            size_in_bytes(text)
        except UserError as error:
            yield from (replace(problem, key=key, fix=f"type {key}=64GiB") for problem in error.problems)


def _resume(config: Config) -> Iterator[Problem]:
    if config.resume not in ("auto", "none", "allow_code") and "/" not in config.resume:
        fix = "type resume=auto, resume=none, resume=allow_code, or a path with a /"
        yield Problem("resume", f"{config.resume!r} is neither a mode nor a path", fix, "CKPT-5")


def _logger(config: Config) -> Iterator[Problem]:
    for kind in config.logger.kinds:
        if kind not in TRACKERS and kind not in reserved.RESERVED["logger"]:
            yield Problem(
                "logger.kinds", f"{kind!r} is no tracker", f"what exists: {', '.join(TRACKERS)}", "LOG-5"
            )
    parallel = config.launcher.parallel
    if parallel != "auto" and not (parallel.isdigit() and int(parallel) > 0):
        yield Problem(
            "launcher.parallel",
            f"{parallel!r} is no number of jobs",
            "type launcher.parallel=auto or 2",
            "LOCAL-3",
        )


def _network(config: Config) -> Iterator[Problem]:
    platform = config.platform
    if platform.network == "ainic" and platform.name in ("cpu", "cuda"):
        message = f"ainic is a card of AMD's that RCCL drives, but platform={platform.name}"
        yield Problem("platform.network", message, "type platform=rocm, or another network", "ENV")


def _profile(config: Config) -> Iterator[Problem]:
    steps, ranks = config.profile.steps, config.profile.ranks
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        yield Problem("profile.steps", f"{steps} is no window", "type 'profile.steps=[10,12]'", "PROF-1")
    elif steps and steps[1] - steps[0] >= MOST_TRACED:
        message = f"{steps[1] - steps[0] + 1} steps make a trace that no viewer opens; at most {MOST_TRACED}"
        fix = f"type 'profile.steps=[{steps[0]},{steps[0] + MOST_TRACED - 1}]'"
        yield Problem("profile.steps", message, fix, "PROF-1")
    elif steps and steps[1] > config.max_steps:
        message = f"{steps}, but the run ends with step {config.max_steps}"
        yield Problem("profile.steps", message, f"type max_steps={steps[1]}", "PROF-1")
    outside = [rank for rank in ranks if not 0 <= rank < config.mesh.world]
    if outside:
        message = f"{outside} are none of the {config.mesh.world} ranks"
        yield Problem("profile.ranks", message, "type 'profile.ranks=[0]', or [] for all", "PROF-1")
    if config.profile.memory and not steps:
        message = "true, but no step is traced"
        yield Problem("profile.memory", message, "type 'profile.steps=[10,12]' too", "BENCH-4")
    if config.profile.memory and config.platform.name == "cpu":
        message = "true, but the allocator of platform=cpu keeps no history"
        yield Problem("profile.memory", message, "type profile.memory=false", "BENCH-4")


_PARTS = (
    *(_ranges, _durations, _names, _sweep, _kernels, _schedule, _pipeline, _network),
    *(_model, backend_problems, force_problems, container_problems, fp8_problems),
    *(_precision, _sizes_of_bytes, _resume, _logger, _profile),
)
