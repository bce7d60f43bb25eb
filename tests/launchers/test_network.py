"""Rows of the environment that depend on network, platform and node, without any device (ENV-6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.code_identity import toolkit_of
from src.config import Config, PlatformConfig
from src.errors import UserError
from src.launchers.environment import Setting, rank_environment
from src.launchers.network import Network
from src.machine import find_machine, visible
from src.models.schema import DenseConfig, Qwen3MoeConfig
from src.validate import validate

QOS = """\
NIC  : 42424650-0000
  Classification type : DSCP
    DSCP bitmap         : 67108864 ==> priority : 3
    DSCP                : 0-25, 27-63 ==> priority : 0
    DSCP                : 26 ==> priority : 3
    DSCP                : 48 ==> priority : 6
  PFC no-drop priorities : 3
"""
PORTS = {
    "mlx5_10": ("1", "4: ACTIVE", "InfiniBand"),
    "mlx5_2": ("1", "4: ACTIVE", "InfiniBand"),
    "mlx5_3": ("1", "1: DOWN", "InfiniBand"),
    "mlx5_4": ("2", "4: ACTIVE", "Ethernet"),
    "ionic_0": ("1", "4: ACTIVE", "Ethernet"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A made-up `/` of a node with five cards."""
    for device, (number, state, layer) in PORTS.items():
        port = tmp_path / "sys/class/infiniband" / device / "ports" / number
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
    return tmp_path


def network(root: Path, qos: str = "", **shell: str) -> Network:
    return Network(root, shell, {None: "lo", "n1": "eth7"}.get, lambda: qos)


def values(
    name: str, platform: str, node: Network | None, meeting: str | None = "n1", config: Config | None = None
) -> dict[str, str]:
    config = config or Config()
    config.platform = PlatformConfig(platform, name)
    return rank_environment(Setting(config, platform, 2, meeting=meeting, network=node), {}).values


@pytest.mark.parametrize(
    ("name", "platform", "expected"),
    [
        ("none", "cuda", {}),
        ("ethernet", "cuda", {"NCCL_IB_DISABLE": "1"}),
        ("ib", "cuda", {"NCCL_IB_HCA": "=mlx5_2:1,mlx5_10:1"}),
        ("roce", "cuda", {"NCCL_IB_HCA": "=ionic_0:1,mlx5_4:2"}),
        (
            "ib",
            "rocm",
            {"NCCL_IB_HCA": "=mlx5_2:1,mlx5_10:1", "NCCL_CROSS_NIC": "0", "NCCL_PXN_DISABLE": "1"},
        ),
        (
            "roce",
            "rocm",
            {
                "NCCL_IB_HCA": "=ionic_0:1,mlx5_4:2",
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_CROSS_NIC": "0",
                "NCCL_PXN_DISABLE": "1",
            },
        ),
        (
            "ainic",
            "rocm",
            {
                "NCCL_IB_HCA": "=ionic_0:1",
                "NCCL_IB_GID_INDEX": "1",
                "NCCL_CROSS_NIC": "0",
                "NCCL_PXN_DISABLE": "1",
                "RCCL_AINIC_ROCE": "1",
                "NCCL_IB_TC": "104",
                "NCCL_IB_FIFO_TC": "192",
                "NCCL_IB_SL": "0",
                "NCCL_IB_ROCE_VERSION_NUM": "2",
                "NCCL_IB_QPS_PER_CONNECTION": "1",
                "NCCL_DMABUF_ENABLE": "0",
                "NCCL_GDR_FLUSH_DISABLE": "1",
            },
        ),
        ("ib", "cpu", {}),
    ],
)
def test_rows_of_a_network(root: Path, name: str, platform: str, expected: dict[str, str]) -> None:
    """ENV: ports that are up alone, by exact name and number; what each network adds, and nothing else."""
    everywhere = {"NCCL_SOCKET_IFNAME", "NCCL_ALGO"}
    found = values(name, platform, network(root))
    ours = {k: v for k, v in found.items() if k.startswith(("NCCL_", "RCCL_")) and k not in everywhere}
    assert ours == expected
    assert found["GLOO_SOCKET_IFNAME"] == "eth7"
    assert found.get("NCCL_SOCKET_IFNAME") == (None if platform == "cpu" else "eth7")
    assert values(name, platform, network(root), meeting=None)["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_network_without_ports(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """ENV: refused (3) where nodes are to meet over it; one machine needs none; another is not asked."""
    empty = network(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match="ib, but no InfiniBand port") as refused:
        values("ib", "cuda", empty)
    assert refused.value.code == 3
    assert "NCCL_IB_HCA" not in values("ib", "cuda", empty, meeting=None)
    found = values("ainic", "rocm", None)
    assert not {"NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "RCCL_AINIC_ROCE"} & set(found)
    assert found["NCCL_IB_TC"] == "104"


def test_ainic_finds_class_and_plugin(root: Path) -> None:
    """ENV: DSCP × 4 of the lossless class, not of a bitmap or range; a plugin's file, else RCCL's own."""
    assert values("ainic", "rocm", network(root, QOS))["NCCL_IB_TC"] == str(26 * 4)
    assert values("ainic", "rocm", network(root, QOS.replace("26 ", "48 ")))["NCCL_IB_TC"] == str(48 * 4)
    assert values("ainic", "rocm", network(root, "no such tool"))["NCCL_IB_TC"] == "104"
    file = root / "opt/anp/build/librccl-net.so"
    file.parent.mkdir(parents=True)
    file.write_text("")
    found = values("ainic", "rocm", network(root, ANP_HOME_DIR="/opt/anp"))
    assert found["NCCL_NET_PLUGIN"] == "/opt/anp/build/librccl-net.so"
    assert "RCCL_AINIC_ROCE" not in found
    assert "NCCL_NET_PLUGIN" not in values("roce", "rocm", network(root, ANP_HOME_DIR="/opt/anp"))


def test_network_wins_over_platform_and_yields_to_the_user(root: Path) -> None:
    """ENV-1: shell over env.NAME over network; origins say so."""
    config = Config(platform=PlatformConfig("rocm", "roce"), env={"NCCL_CROSS_NIC": "2"})
    setting = Setting(config, "rocm", 2, meeting="n1", network=network(root))
    found = rank_environment(setting, {"NCCL_IB_HCA": "mine"})
    names = ("NCCL_IB_HCA", "NCCL_CROSS_NIC", "NCCL_PXN_DISABLE", "HSA_ENABLE_SDMA")
    assert [(found.values[n], found.origins[n]) for n in names] == [
        ("mine", "shell"),
        ("2", "env"),
        ("1", "network"),
        ("1", "platform"),
    ]


def test_ainic_is_a_card_of_amds() -> None:
    """ENV: refused beside another platform, whatever else is wrong."""
    for platform, is_wrong in (("cuda", True), ("cpu", True), ("rocm", False), ("auto", False)):
        found = [
            p.key for p in validate(Config(model=DenseConfig(), platform=PlatformConfig(platform, "ainic")))
        ]
        assert ("platform.network" in found) == is_wrong


def test_rows_of_rocm(root: Path) -> None:
    """ENV, CACHE: AMD's switches and caches; the pool of kernel arguments for a model with experts."""
    experts = values("none", "rocm", network(root), config=Config(model=Qwen3MoeConfig()))
    dense = values("none", "rocm", network(root), config=Config(model=DenseConfig()))
    assert {"HSA_NO_SCRATCH_RECLAIM", "GPU_MAX_HW_QUEUES", "AMD_COMGR_CACHE_DIR"} <= set(dense)
    assert dense["MIOPEN_USER_DB_PATH"] == dense["MIOPEN_CUSTOM_CACHE_DIR"]
    assert set(experts) - set(dense) == {"HSA_KERNARG_POOL_SIZE"}
    assert not {"PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"} & set(dense)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43483'\n", "rocm6.4"),
        ("cuda = None\nhip = None\n", "cpu"),
        ("", "cpu"),
    ],
)
def test_toolkit(text: str, found: str) -> None:
    """CACHE-2: what torch was built for, from the text of its `version.py`."""
    assert toolkit_of(text) == found


def amd(root: Path, gpus: int, shown: int) -> None:
    """A topology of one processor and some GPUs, a few of whose render devices are here."""
    for node in range(gpus + 1):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        minor = 127 + node if node else 0
        (folder / "properties").write_text(f"cpu_cores_count 8\ndrm_render_minor {minor}\n")
    (root / "dev/dri").mkdir(parents=True)
    for node in range(1, shown + 1):
        (root / f"dev/dri/renderD{127 + node}").touch()


def test_gpus_of_amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENV-2: GPUs by the driver's topology, within what a container and the user show."""
    amd(tmp_path, gpus=4, shown=3)
    assert visible("rocm", tmp_path, {}) == ("HIP_VISIBLE_DEVICES", ["0", "1", "2"])
    assert visible("rocm", tmp_path, {"ROCR_VISIBLE_DEVICES": "2,1"}) == ("ROCR_VISIBLE_DEVICES", ["2", "1"])
    both = {"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "1"}
    assert visible("rocm", tmp_path, both) == ("HIP_VISIBLE_DEVICES", ["1"])
    rocm = Config(platform=PlatformConfig("rocm"))
    assert (find_machine(rocm, tmp_path, {}).platform, find_machine(rocm, tmp_path, {}).devices) == (
        "rocm",
        3,
    )
    for built, platform in (("rocm6.4", "rocm"), ("cpu", "cpu")):
        monkeypatch.setattr("src.machine.toolkit", lambda built=built: built)
        assert find_machine(Config(), tmp_path, {}).platform == platform


def test_gpus_of_nvidia(tmp_path: Path) -> None:
    """ENV-2: what is hidden stays so, and AMD's variables hide nothing of NVIDIA's."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert visible("cuda", tmp_path, {}) == ("CUDA_VISIBLE_DEVICES", ["0", "1"])
    assert visible("cuda", tmp_path, {"CUDA_VISIBLE_DEVICES": "GPU-7f, -1"})[1] == ["GPU-7f"]
    assert find_machine(Config(), tmp_path, {"HIP_VISIBLE_DEVICES": ""}).devices == 2
    assert find_machine(Config(), tmp_path, {"CUDA_VISIBLE_DEVICES": ""}).platform == "cpu"
