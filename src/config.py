"""The schema of a run: one dataclass per config group, one sentence per key.

How a step is computed stands in `src/config_compute.py`, where a run goes in `src/config_launch.py`; both
come from here too.
Nothing here imports torch, so that help, composition and every refusal stay fast (CFG-18). A key that takes
one of a closed set carries ``choices`` in its metadata (CFG-6); a duration is text such as ``90m`` (CFG-5).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from src.config_compute import (
    BackendConfig as BackendConfig,
)
from src.config_compute import (
    BalanceConfig as BalanceConfig,
)
from src.config_compute import (
    DeterminismConfig as DeterminismConfig,
)
from src.config_compute import (
    KernelsConfig as KernelsConfig,
)
from src.config_compute import (
    MeshConfig as MeshConfig,
)
from src.config_compute import (
    PipelineConfig as PipelineConfig,
)
from src.config_compute import (
    PlatformConfig as PlatformConfig,
)
from src.config_compute import (
    PrecisionConfig as PrecisionConfig,
)
from src.config_compute import (
    RecomputeConfig as RecomputeConfig,
)
from src.config_launch import (
    SCHEDULERS as SCHEDULERS,
)
from src.config_launch import (
    ContainerConfig as ContainerConfig,
)
from src.config_launch import (
    LauncherConfig as LauncherConfig,
)
from src.config_launch import (
    SweepConfig as SweepConfig,
)
from src.config_launch import (
    duration,
)
from src.models.schema import ModelConfig, choice


@dataclass
class DataPrepareConfig:
    """How a missing token artifact is built."""

    where: str = choice("submit", "job", "never")
    """Who builds: the launching process, the job, or nobody (a missing artifact is an error)."""
    timeout: str = duration("1h")
    """How long to wait for another process that builds the same artifact."""
    workers: int = 0
    """Processes that encode; 0 takes the tokenizer's own threads in this process."""


@dataclass
class DataConfig:
    """The corpus, its split and its packing."""

    kind: str = choice("stdlib", "text_files", "synthetic", "hf", "tokens", "sft_chat", "mixture")
    """Where documents come from."""
    files: list[str] = field(default_factory=list)
    """Globs of text files (text_files)."""
    unit: str = choice("file", "line")
    """What a document is: a whole file, or a line of `.jsonl`, `.jsonl.gz` or `.txt` (text_files)."""
    text_key: str = "text"
    """Key that holds the text in a line of JSON (text_files)."""
    on_bad_text: str = choice("error", "replace", "skip")
    """What to do with text that does not decode; counted in the manifest."""
    rule: str = choice("uniform", "repeat", "zipf", "copy", "rules")
    """How synthetic tokens are made (synthetic)."""
    ids: int = 64
    """Vocabulary of synthetic tokens (synthetic)."""
    documents: int = 4096
    """Number of synthetic training samples, and an eighth as many held out (synthetic)."""
    document_length: int | None = None
    """Mean tokens of a document, which then vary and are packed; null is what the rule has (synthetic)."""
    split_seed: int = 42
    """Chooses the held-out documents; apart from the training seed."""
    shuffle_seed: int | None = None
    """Chooses the sample order; null follows `seed`."""
    holdout: float = 0.05
    """Share of documents held out; 0 stores no held-out set."""
    packing: str = choice("best_fit", "contiguous", "none")
    """How documents fill samples of `sequence_length` positions."""
    epoch_tail: str = choice("carry", "drop")
    """What happens to the samples of an epoch that fill no whole batch."""
    prefetch: int = 2
    """Steps that the reader thread keeps ahead."""
    identity: str = choice("content", "stat")
    """What identifies a file: its content, or only its size and time (recorded in the manifest)."""
    allow_change: bool = False
    """Resume although the data artifact is another one."""
    prepare: DataPrepareConfig = field(default_factory=DataPrepareConfig)


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    kind: str = choice("bpe", "bytes", "hf", "none")
    """Byte-level BPE trained on the corpus, plain bytes, a Hugging Face tokenizer, or none (synthetic)."""
    vocab_size: int = 8192
    """Entries of a trained BPE, specials included."""
    seed: int = 0
    """Chooses the documents that a trained tokenizer reads."""
    sample_bytes: int = 8_000_000
    """Bytes of text that a trained tokenizer reads at most."""
    bos: bool = False
    """Put one beginning-of-sequence token before each document."""
    path: str | None = None
    """Directory or `tokenizer.json` of a Hugging Face tokenizer (hf)."""
    revision: str | None = None
    """Pinned revision of a tokenizer on the hub (hf)."""


@dataclass
class OptimizerConfig:
    """The update rule."""

    kind: str = choice("adamw", "sgd")
    """AdamW with decoupled weight decay, or SGD."""
    lr: float = 1e-2
    """Peak learning rate; the default suits the tiny default model, larger models want less."""
    max_norm: float | None = 0.3
    """Gradients are clipped to this global norm; null clips nothing."""
    weight_decay: float = 0.1
    """Decoupled weight decay; never on norms and biases."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of AdamW's moments."""
    eps: float = 1e-8
    """AdamW's term against division by zero."""
    momentum: float = 0.0
    """SGD's momentum."""


@dataclass
class LrScheduleConfig:
    """Learning rate as a function of the step."""

    kind: str = choice("cosine", "wsd", "constant")
    """Shape after the warm-up: cosine to `floor`, warm-up/stable/decay, or constant."""
    warmup: int = 20
    """Steps of linear warm-up."""
    decay: int = 20
    """Steps of the final decay (wsd)."""
    horizon: int | None = None
    """Length that the schedule is laid out for; null is `max_steps`."""
    floor: float = 0.1
    """Last learning rate as a share of the peak (cosine, wsd)."""


@dataclass
class CheckpointConfig:
    """When a run is saved and what is kept."""

    every: int = 50
    """Steps between saves; 0 saves after the last step only."""
    final: bool = True
    """Save after the last step; `false` leaves a finished run without its weights, for benchmarks."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Also keep each checkpoint whose step is a multiple of this; 0 keeps none so."""
    verify: str = "64GiB"
    """Checkpoints up to this size are hashed whole on loading, larger ones by file size."""


@dataclass
class EvaluationConfig:
    """Held-out loss and text samples during training."""

    name: str = choice("heldout", "none")
    """`heldout` evaluates the held-out documents, `none` nothing."""
    every: int = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    samples: int | None = 64
    """Held-out samples of `sequence_length` positions that are evaluated; null takes all."""
    prompts: list[str] = field(default_factory=list)
    """Texts that the model continues before, during and after training."""
    sample_tokens: int = 48
    """Tokens of each continuation."""


@dataclass
class LoggerConfig:
    """Where metrics go besides `metrics.jsonl`."""

    kinds: list[str] = field(default_factory=list)
    """Trackers that are on: wandb, tensorboard."""
    every: int = 10
    """Steps between lines on the console."""
    flush_every: int = 5
    """Steps between reads of metrics from the device."""
    project: str = "manyhead"
    """Project of the tracker."""
    tags: dict[str, str] = field(default_factory=dict)
    """Free tags for the tracker; set with `+logger.tags.NAME=VALUE`."""
    copy_to: str | None = None
    """A path to which the launching process's log is copied."""


@dataclass
class ProfileConfig:
    """A window of steps that is traced."""

    steps: list[int] = field(default_factory=list)
    """First and last step of the window, as the log counts them; empty traces nothing."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that trace; empty is all of them."""
    memory: bool = False
    """Also dump the allocator's history over the window (GPU)."""

    def covers(self, step: int) -> bool:
        """Whether a step is traced, or next to one: tracing warms up before it and is written after it."""
        return bool(self.steps) and self.steps[0] - 1 <= step <= self.steps[1] + 1


@dataclass
class PathsConfig:
    """Where files go; relative paths are resolved against the directory of the command."""

    runs: str = "runs"
    """Run directories."""
    data: str = "data"
    """The store of token artifacts and tokenizers."""
    cache: str | None = None
    """Compiler caches; null takes a directory of the user on a local disk."""


@dataclass
class SpikeConfig:
    """Updates that are skipped because loss or gradient norm jumped."""

    deviations: float | None = None
    """Skip an update whose loss or norm is this many standard deviations above the mean; null skips none."""
    window: int = 64
    """Applied steps that mean and deviation are taken over; nothing is skipped before there were so many."""


@dataclass
class DebugConfig:
    """Aids for finding a fault; none changes a training bit."""

    dump_batches: bool = False
    """Write every micro-batch to `RUN/batches`."""
    poison: bool = False
    """Fill each activation with NaN once nothing may read it any more, so that a read too late shows."""


@dataclass
class Config:
    """Everything that a run is made from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    determinism: DeterminismConfig = field(default_factory=DeterminismConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks; set with `+env.NAME=VALUE`."""
    experiment: str | None = None
    """Name of the experiment file in use; set by that file."""
    seed: int = 0
    """Drives initial weights and, unless `data.shuffle_seed` is set, the sample order."""
    max_steps: int = 120
    """Optimizer steps."""
    sequence_length: int = 256
    """Positions of a sample."""
    global_batch_size: int = 16
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: int = 2
    """Samples that one rank puts through the model at a time."""
    run_name: str | None = None
    """Name of the run directory; null derives it from the config."""
    resume: str = "auto"
    """`auto` takes up the newest checkpoint, `none` refuses one, `allow_code` ignores an edit; or a path."""
    init_from: str | None = None
    """Weights to start from at step 0: a checkpoint directory or a `.safetensors` file."""
    dry_run: bool = False
    """Print the plan and stop."""
    nonfinite: str = choice("stop", "skip")
    """What a loss or gradient that is not finite does: stop the run, or skip the update."""
    max_skips: int = 3
    """Skipped updates in a row before the run stops, spikes included."""
