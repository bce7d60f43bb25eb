"""The one table of environment variables that a launch sets, each with its reason (ENV)."""

from __future__ import annotations

from dataclasses import dataclass

from src.launchers.environment_rules import (
    CHECKOUT_FIRST,
    LAYERS,
    NOT_OURS,
    NUMBERED,
    THREADS,
    Rule,
    adapters,
    below_cache,
    built_in_plugin,
    by_network,
    connections,
    fixed,
    network_device,
    plugin,
    traffic_class,
    wait_policy,
    when_bitwise,
    with_experts,
)


@dataclass(frozen=True)
class Row:
    """One variable."""

    name: str
    """With `*` at its end it stands for all names that begin so."""
    rule: Rule
    kind: str
    """`int`, `bool`, `text`, `path` (mounted into a container) or `secret` (never printed or written)."""
    platforms: tuple[str, ...]
    reason: str
    where: str = "launch"
    """Who decides: `launch`, the launching process, so that it is the same on all nodes (ENV-4); each `node`;
    or each `rank`."""
    source: str = "platform"
    """`platform`, `network`, which wins over it, or `determinism`, which wins over both."""


ALL, GPU, CUDA, ROCM = ("cpu", "cuda", "rocm"), ("cuda", "rocm"), ("cuda",), ("rocm",)
TABLE = (
    Row(
        "OMP_NUM_THREADS",
        THREADS,
        "int",
        ALL,
        "cores divided by ranks; torchrun would set 1",
        "node",
    ),
    Row(
        "OMP_WAIT_POLICY",
        Rule("`PASSIVE` where the threads of all jobs reach the cores", wait_policy),
        "text",
        ("cpu",),
        "spinning threads slow each other 3 to 17 times",
        "node",
    ),
    Row(
        "GLOO_SOCKET_IFNAME",
        Rule("device of the route", network_device),
        "text",
        ALL,
        "the device of the route to the first rank",
        "node",
    ),
    Row(
        "NCCL_SOCKET_IFNAME",
        Rule("device of the route", network_device),
        "text",
        GPU,
        "as for gloo: a device name, never an address",
        "node",
    ),
    Row(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        Rule("`1`; `8` where dp·cp·ep > 1; `32` with overlapped ep", connections),
        "int",
        GPU,
        "launch order of communication and compute",
    ),
    Row("TORCH_NCCL_HIGH_PRIORITY", fixed("1"), "bool", GPU, "communication streams go first"),
    Row("TORCH_NCCL_ASYNC_ERROR_HANDLING", fixed("1"), "bool", GPU, "a dead peer ends the job"),
    Row("PYTORCH_ALLOC_CONF", fixed("expandable_segments:True"), "text", CUDA, "fragmentation by routing"),
    Row("HSA_NO_SCRATCH_RECLAIM", fixed("1"), "bool", ROCM, "crashes of MoE kernels"),
    Row("HSA_ENABLE_SDMA", fixed("1"), "bool", ROCM, "copy engines"),
    Row("GPU_MAX_HW_QUEUES", fixed("2"), "int", ROCM, "queues of communication and compute"),
    Row(
        "HSA_KERNARG_POOL_SIZE",
        with_experts("12582912"),
        "int",
        ROCM,
        "an MoE step has many kernels",
    ),
    Row(
        "NCCL_IB_HCA",
        Rule("the ports that are up (ib, roce, ainic)", adapters),
        "text",
        GPU,
        "a dead port is not tried",
        "node",
        "network",
    ),
    Row(
        "NCCL_IB_DISABLE",
        by_network({"ethernet": "1"}),
        "bool",
        GPU,
        "sockets, though there are RDMA cards",
        source="network",
    ),
    Row(
        "NCCL_IB_GID_INDEX",
        by_network({"roce": "3", "ainic": "1"}),
        "int",
        ROCM,
        "the GID of RoCE v2; NCCL finds it by itself",
        source="network",
    ),
    Row(
        "NCCL_CROSS_NIC",
        by_network(dict.fromkeys(LAYERS, "0")),
        "int",
        ROCM,
        "a ring stays on its rail",
        source="network",
    ),
    Row(
        "NCCL_PXN_DISABLE",
        by_network(dict.fromkeys(LAYERS, "1")),
        "bool",
        ROCM,
        "buffers on neighbours cost memory",
        source="network",
    ),
    Row(
        "NCCL_NET_PLUGIN",
        Rule("path of `librccl-anp.so` or `librccl-net.so` where there is one (ainic)", plugin),
        "text",
        ROCM,
        "RCCL does not know the card without its plugin",
        "node",
        "network",
    ),
    Row(
        "RCCL_AINIC_ROCE",
        Rule("`1` where there is no such file (ainic)", built_in_plugin),
        "bool",
        ROCM,
        "since ROCm 7.2.1 the plugin is a part of RCCL behind this switch",
        "node",
        "network",
    ),
    Row(
        "NCCL_IB_TC",
        Rule("4 × the DSCP that the NIC never drops, else `104` (ainic)", traffic_class),
        "int",
        ROCM,
        "data travel in the lossless class",
        "node",
        "network",
    ),
    Row(
        "NCCL_IB_FIFO_TC",
        by_network({"ainic": "192"}),
        "int",
        ROCM,
        "control messages have a class of their own",
        source="network",
    ),
    Row(
        "NCCL_IB_SL",
        by_network({"ainic": "0"}),
        "int",
        ROCM,
        "AMD's setting for the card: its one service level",
        source="network",
    ),
    Row("NCCL_IB_ROCE_VERSION_NUM", by_network({"ainic": "2"}), "int", ROCM, "RoCE v2", source="network"),
    Row(
        "NCCL_IB_QPS_PER_CONNECTION",
        by_network({"ainic": "1"}),
        "int",
        ROCM,
        "AMD's setting for the card: one queue pair each",
        source="network",
    ),
    Row(
        "NCCL_DMABUF_ENABLE",
        by_network({"ainic": "0"}),
        "bool",
        ROCM,
        "AMD's setting for the card: peer memory instead",
        source="network",
    ),
    Row(
        "NCCL_GDR_FLUSH_DISABLE",
        by_network({"ainic": "1"}),
        "bool",
        ROCM,
        "AMD's setting for the card: no flush after a receive",
        source="network",
    ),
    Row(
        "CUBLAS_WORKSPACE_CONFIG",
        when_bitwise(":4096:8"),
        "text",
        CUDA,
        "reproducible products",
        source="determinism",
    ),
    Row(
        "TORCHINDUCTOR_DETERMINISTIC",
        when_bitwise("1"),
        "bool",
        GPU,
        "no choice by timing",
        source="determinism",
    ),
    Row(
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        when_bitwise("0"),
        "bool",
        GPU,
        "no choice by timing",
        source="determinism",
    ),
    Row("NCCL_ALGO", when_bitwise("Ring"), "text", GPU, "one order of summation", source="determinism"),
    Row("ROCBLAS_DEFAULT_ATOMICS_MODE", when_bitwise("0"), "bool", ROCM, "no atomics", source="determinism"),
    Row("PYTHONHASHSEED", when_bitwise("0"), "int", ALL, "one order of sets", source="determinism"),
    Row("TRITON_CACHE_DIR", below_cache("triton"), "path", GPU, "compiled kernels, by version", "node"),
    Row(
        "TORCHINDUCTOR_CACHE_DIR",
        below_cache("inductor"),
        "path",
        ALL,
        "compiled graphs, by version",
        "node",
    ),
    Row(
        "TORCH_EXTENSIONS_DIR", below_cache("extensions"), "path", ALL, "built extensions, by version", "node"
    ),
    Row("MIOPEN_USER_DB_PATH", below_cache("miopen"), "path", ROCM, "what MIOpen found fastest", "node"),
    Row("MIOPEN_CUSTOM_CACHE_DIR", below_cache("miopen"), "path", ROCM, "kernels of MIOpen", "node"),
    Row("AMD_COMGR_CACHE_DIR", below_cache("comgr"), "path", ROCM, "code objects of the compiler", "node"),
    Row("HF_HOME", NOT_OURS, "path", ALL, "models, corpora and login of the hub stay where they are", "node"),
    Row("HF_HUB_CACHE", NOT_OURS, "path", ALL, "models of the hub", "node"),
    Row("HF_DATASETS_CACHE", NOT_OURS, "path", ALL, "corpora of the hub", "node"),
    Row("HF_TOKEN", NOT_OURS, "secret", ALL, "asked for by a gated corpus or model", "node"),
    Row("WANDB_API_KEY", NOT_OURS, "secret", ALL, "asked for by `logger=wandb`", "node"),
    Row("MLFLOW_*", NOT_OURS, "secret", ALL, "where and as whom MLflow logs", "node"),
    Row("DATABRICKS_*", NOT_OURS, "secret", ALL, "where and as whom MLflow logs to Databricks", "node"),
    Row(
        "PYTHONPATH",
        CHECKOUT_FIRST,
        "path",
        ALL,
        "ranks run this checkout, whatever is installed",
        "node",
    ),
    Row("PYTHONUNBUFFERED", fixed("1"), "bool", ALL, "a killed rank's last lines are in its log"),
    *(
        Row(name, NUMBERED, "int", ALL, "an outer launcher's number is not this launch's", "rank")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ),
    Row("MASTER_ADDR", NUMBERED, "text", ALL, "where this launch's ranks meet", "rank"),
    Row("MASTER_PORT", NUMBERED, "int", ALL, "the store binds a free port and says which", "rank"),
)
