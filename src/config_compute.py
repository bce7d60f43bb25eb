"""The schema of how a step is computed: mesh, pipeline, backend, kernels, balance, precision and their like.

A part of `src/config.py`, which imports it; nothing here imports torch (CFG-18).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from src.models.schema import choice


@dataclass
class MeshConfig:
    """How the ranks are arranged; axes outer to inner: pp, rep, dp, cp, ep, tp."""

    spec: str = "single"
    """Canonical name of the mesh: the axes above one in design order, `single`, or `auto`."""
    pp: int = 1
    """Pipeline stages are spread over this many ranks."""
    rep: int = 1
    """Replicas that hold the same shards (HSDP)."""
    dp: int = 1
    """Ranks over which data and parameters are sharded (FSDP)."""
    cp: int = 1
    """Ranks that share one sequence."""
    ep: int = 1
    """Ranks over which routed experts are divided."""
    tp: int = 1
    """Tensor parallel ranks; reserved, must be 1."""

    @property
    def world(self) -> int:
        """Number of ranks: the product of the axes."""
        return self.pp * self.rep * self.dp * self.cp * self.ep * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of data coordinates (rep, dp, ep): ranks that read different samples (ORDER-3)."""
        return self.rep * self.dp * self.ep


@dataclass
class PipelineConfig:
    """Schedule of micro-batches over pipeline stages."""

    schedule: str = choice("1f1b", "gpipe", "interleaved_1f1b", "zbv", "dualpipev")
    """Order in which a rank runs the forwards and backwards of its micro-batches."""
    stages_per_rank: int = 1
    """Stages that one rank holds."""
    overlap: bool = False
    """Run one micro-batch's forward against another's backward; only dualpipev will take it."""
    program: str = choice("auto", "plain", "staged")
    """`plain` runs a stage's layers under one graph, `staged` runs communication and products apart; `auto`
    is staged with pp above 1 or with recompute."""
    reduce: str = choice("auto", "step", "micro_batch")
    """When gradients are reduced: once a step (`step`; `auto` too), or after each micro-batch for memory."""


@dataclass
class BackendConfig:
    """Who owns the model and its step."""

    name: str = choice("native", "transformers", "megatron", "automodel")
    """`native` is ours, `transformers` Hugging Face's model under the same loop; the others are reserved."""
    attn_implementation: str = choice("auto", "eager", "sdpa")
    """Attention of transformers; `auto` is sdpa (transformers)."""
    experts_implementation: str = choice("auto", "eager", "grouped_mm", "batched_mm")
    """Experts of transformers; `auto` is grouped_mm where widths allow it, else eager (transformers)."""
    compile: str = choice("auto", "none", "layers", "model")
    """What is one compiled graph; `auto`: layers on a GPU with whole parameters; `model`: of transformers."""


@dataclass
class KernelsConfig:
    """Which implementation of each operation runs."""

    name: str = choice("auto", "eager", "library", "triton")
    """`auto` takes the best available one, `eager` plain torch, `library` another's kernel, `triton` ours."""
    attention: str | None = None
    """One implementation of attention by name, whatever `name` says; so below."""
    grouped_mm: str | None = None
    """One implementation of the grouped matrix product by name."""
    grouped_mm_fp8: str | None = None
    """One implementation of the grouped matrix product in fp8 by name."""
    local_experts: str | None = None
    """One implementation of stages 2 to 5 of a layer whose experts are all here by name."""
    expert_bias: str | None = None
    """One implementation of the experts' biases by name."""
    route: str | None = None
    """One implementation of scores and choice of experts by name."""
    router_linear: str | None = None
    """One implementation of the router's logits by name."""
    sort_by_expert: str | None = None
    """One implementation of the order of rows by expert by name."""
    permute: str | None = None
    """One implementation of copies of tokens into rows by name."""
    combine: str | None = None
    """One implementation of the weighted sum of a token's rows by name."""
    swiglu: str | None = None
    """One implementation of the gated activation of experts by name."""
    rms_norm: str | None = None
    """One implementation of the norm by name."""
    rope: str | None = None
    """One implementation of the rotation alone by name."""
    rotary_heads: str | None = None
    """One implementation of norm and rotation of heads by name."""
    latent_heads: str | None = None
    """One implementation of heads of latent attention by name."""
    linear: str | None = None
    """One implementation of projections by name."""
    linear_fp8: str | None = None
    """One implementation of projections in fp8 by name."""
    quantise_weight: str | None = None
    """One implementation of weights in fp8 by name."""
    linear_cross_entropy: str | None = None
    """One implementation of head and loss by name."""
    accumulate: str | None = None
    """One implementation of sums of gradients over micro-batches by name."""
    grad_norm: str | None = None
    """One implementation of the norm of all gradients by name."""
    adamw: str | None = None
    """One implementation of the update by name."""
    autotune: str = choice("auto", "pinned")
    """How tuned Triton kernels get a config: `auto` times them, `pinned` keeps the first allowed.

    `determinism=bitwise` pins whatever is set."""
    gemm_tuning: str = "none"
    """File of tuned dense products that `scripts/tune_gemm.py` wrote for this card, or `none`."""
    quirks_disabled: list[str] = field(default_factory=list)
    """Patches of other packages' faults that are not made, by id; `kernels.json` lists the ids."""


@dataclass
class BalanceConfig:
    """How experts are kept in use."""

    kind: str = choice("sequence", "micro_batch", "global_batch_lagged", "none", "bias")
    """Unit over which the auxiliary loss measures balance; or a bias on the choice; or none."""
    coef: float = 1e-3
    """Weight of the auxiliary loss; bias has none."""
    z_loss: float = 0.0
    """Weight of the router's z-loss."""
    bias_rate: float = 1e-3
    """How far an expert's bias moves in a step, towards the mean load (bias)."""
    force: str = choice("none", "even", "uniform", "dirichlet")
    """`none` trains with the routers' choice; `even` deals experts out in turn, the others draw them."""


@dataclass
class PrecisionConfig:
    """Dtypes of compute, master weights and reductions."""

    name: str = choice("auto", "fp32", "fp64", "master", "bf16", "split")
    """`auto` is fp32 on a CPU and master (bf16 compute, fp32 masters) on a GPU."""
    first_moment: str = choice("auto", "bf16")
    """AdamW's first moment: as the masters, or in bf16, 2 bytes a parameter less (master, split)."""
    fp8: str = choice("none", "dense", "dense_experts")
    """Products in fp8: of projections, shared experts and dense FFNs; and those of routed experts."""
    fp8_recipe: str = choice("tensor", "row")
    """Scales of `dense` products: one a tensor, or one a row with weight gradients in bf16."""


@dataclass
class RecomputeConfig:
    """Which activations are computed again in the backward pass."""

    name: str = choice("none", "stage", "full")
    """`none` keeps all activations, `stage` what crosses between ranks, `full` the input of each layer."""


@dataclass
class DeterminismConfig:
    """How reproducible kernels must be."""

    name: str = choice("none", "bitwise")
    """`bitwise` makes two runs on one mesh equal bit for bit."""


@dataclass
class ThresholdsConfig:
    """What a node must have to pass `launcher.checks` and `scripts/doctor.py`."""

    disk: str = "10GiB"
    """Free space where runs, data and caches lie."""
    shm: str = "64MiB"
    """Size of `/dev/shm`, through which the ranks of a node exchange data."""
    memlock: str = "0"
    """Memory that a process may lock, which InfiniBand needs; or `unlimited`."""
    clock: str = field(default="5s", metadata={"duration": True})
    """Most that the clock may differ from that of the disk with the runs, which all nodes share."""
    probe: str = field(default="15s", metadata={"duration": True})
    """After this long a check that has not answered is a `timeout`, and a probe of a GPU is killed."""
    device_memory: str = "2GiB"
    """Most memory of a GPU that may be taken before ranks start; the probe's own context is half a GiB."""


@dataclass
class PlatformConfig:
    """The kind of device."""

    name: str = choice("auto", "cpu", "cuda", "rocm")
    """`auto` takes a GPU if there is one."""
    network: str = choice("none", "ib", "roce", "ainic", "ethernet")
    """What nodes are joined by; `none` leaves it to NCCL, `ethernet` takes sockets, `ainic` is AMD's card."""
    thresholds: ThresholdsConfig = field(default_factory=ThresholdsConfig)
