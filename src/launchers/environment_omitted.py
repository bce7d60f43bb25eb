"""What Primus sets for its ranks and this project does not, each with the reason: `docs/environment.md`.

Read in its launcher scripts at fd1eeab (August 2026).
"""

from __future__ import annotations

OMITTED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("NCCL_CHECKS_DISABLE",), "NCCL has deprecated it for `NCCL_CHECK_POINTERS`, whose default is off."),
    (("NCCL_DEBUG",), "Empty is its default; set it by `env` when you look for something."),
    (
        (
            "NCCL_P2P_NET_CHUNKSIZE",
            "NCCL_MAX_P2P_CHANNELS",
            "NCCL_IGNORE_CPU_AFFINITY",
            "NCCL_IB_USE_INLINE",
            "NET_OPTIONAL_RECV_COMPLETION",
            "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING",
        ),
        "Tuning for certain clusters that we have not measured; the library's own default stands.",
    ),
    (
        ("NCCL_CUMEM_ENABLE", "NCCL_CTA_POLICY", "NCCL_LOCAL_REGISTER", "LD_PRELOAD"),
        "Belong to its all-gather by copy engines, which we do not have.",
    ),
    (
        (
            "RCCL_MSCCL_ENABLE",
            "RCCL_MSCCLPP_ENABLE",
            "RCCL_MSCCLPP_FORCE_ENABLE",
            "RCCL_MSCCLPP_THRESHOLD",
            "MSCCLPP_DISABLE_CHANNEL_CACHE",
            "RCCL_WARP_SPEED_AUTO",
        ),
        "Switch paths of RCCL off that its own defaults choose by version and card.",
    ),
    (("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",), "Off is torch's default."),
    (("AOTRITON_CACHE_DIR",), "AOTriton does not read it: its kernels come compiled."),
    (("AMD_COMGR_CACHE", "MIOPEN_DISABLE_CACHE"), "Say that the caches are on, as they are."),
    (
        ("MIOPEN_FIND_MODE", "PYTORCH_KERNEL_CACHE_PATH"),
        "Of convolutions and of torch's own run-time compiler; no model here uses them.",
    ),
    (
        ("HIPBLASLT_TUNING_FILE", "TE_HIPBLASLT_TUNING_RUN_COUNT", "TE_HIPBLASLT_TUNING_ALGO_COUNT"),
        "A file that a run writes and the next one reads would make it depend on history.",
    ),
    (
        ("HIP_VISIBLE_DEVICES",),
        "Is yours or the scheduler's; we divide what is visible and never set it for a single run.",
    ),
    (
        ("IP_INTERFACE", "USING_AINIC", "ENABLE_NUMA_BINDING", "DATA_PATH", "PRIMUS_"),
        "Read by its own scripts.",
    ),
    (("UCCL_",), "Of a library for dispatch that we do not call."),
    (
        ("ANP_HOME_DIR", "RCCL_HOME_DIR", "MPI_HOME_DIR", "LD_LIBRARY_PATH"),
        "Of its container image; we read the first and the last where you set them, to find AINIC's plugin.",
    ),
    (("NVTE_", "PATCH_TE_FLASH_ATTN"), "Of Transformer Engine, which we do not use."),
    (
        ("TORCH_COMPILE_DISABLE",),
        "There part of determinism; here the compiler stays on and chooses nothing by timing.",
    ),
    (("AITER_LOG_LEVEL",), "Of a library of kernels that we do not call."),
)
"""Variables → why not. A name with `_` at its end stands for all that begin so."""
