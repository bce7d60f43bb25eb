"""What a mesh, a batch, a pipeline and a backend must have in common, as rules that name what works (ENG-1).

No torch here: composition refuses an impossible mesh before anything is started.
"""

from __future__ import annotations

from src.config import Config
from src.errors import Problem
from src.trainer.backends import registry
from src.trainer.parallel.layout import IN_V, micro_batches, neighbours, sizes, spec, stages_per_rank


def check(config: Config, world: int | None = None) -> list[Problem]:
    """Everything about mesh, batch, pipeline and backend that cannot work, all at once (ENG-1).

    Args:
        config: the composed run, an `auto` mesh already filled.
        world: number of ranks where something else fixed it (the direct launcher), else None.
    """
    problems = _positive(config)
    if problems:
        return problems
    for rule in (
        _experts,
        _batch,
        _context,
        stages,
        _layers,
        _micro_batches,
        _shared_embedding,
        _tensor,
        _capabilities,
    ):
        problems += rule(config)
    if world is not None and world != config.mesh.world:
        message = f"{world} ranks were started, the mesh {spec(config.mesh)} has {config.mesh.world}"
        problems.append(Problem("mesh", message, f"start {config.mesh.world} ranks", rule="world"))
    return problems


def _choices(key: str, values: list[int]) -> str:
    return " or ".join(f"{key}={value}" for value in values)


def _positive(config: Config) -> list[Problem]:
    numbers = {f"mesh.{axis}": size for axis, size in sizes(config.mesh).items()}
    numbers |= {
        "micro_batch_size": config.micro_batch_size,
        "global_batch_size": config.global_batch_size,
        "sequence_length": config.sequence_length,
        "pipeline.stages_per_rank": config.pipeline.stages_per_rank,
    }
    return [
        Problem(key, f"{value} is not at least 1", f"{key}=1", rule="positive")
        for key, value in numbers.items()
        if value < 1
    ]


def _experts(config: Config) -> list[Problem]:
    experts, ep = config.model.num_experts, config.mesh.ep
    if experts == 0 and ep > 1:
        return [
            Problem(
                "mesh.ep", f"ep={ep}, but {config.model.name} has no experts", "mesh.ep=1", rule="experts"
            )
        ]
    if experts == 0 or experts % ep == 0:
        return []
    fit = neighbours(ep, lambda n: experts % n == 0, limit=experts + 1)
    message = f"ep={ep} does not divide the {experts} experts of {config.model.name} (model.num_experts)"
    return [Problem("mesh.ep", message, _choices("mesh.ep", fit), rule="experts")]


def _batch(config: Config) -> list[Problem]:
    unit = config.micro_batch_size * config.mesh.data_ranks
    if config.global_batch_size % unit == 0:
        return []
    mesh = config.mesh
    message = (
        f"{config.global_batch_size} is not a multiple of {unit} = "
        f"micro_batch_size {config.micro_batch_size} · rep {mesh.rep} · dp {mesh.dp} · ep {mesh.ep}"
    )
    fit = neighbours(config.global_batch_size, lambda n: n % unit == 0)
    return [Problem("global_batch_size", message, _choices("global_batch_size", fit), rule="batch")]


def _context(config: Config) -> list[Problem]:
    cp, length = config.mesh.cp, config.sequence_length
    if cp == 1 or length % (2 * cp) == 0:
        return []
    fit = neighbours(length, lambda n: n % (2 * cp) == 0)
    message = f"{length} is not a multiple of 2·cp = {2 * cp}"
    return [Problem("sequence_length", message, _choices("sequence_length", fit), rule="cp")]


STAGES_PER_RANK: dict[str, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, None),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
}
"""Schedule → least and greatest stages per rank."""


def stages(config: Config) -> list[Problem]:
    """Whether the schedule takes that many stages per rank."""
    least, most = STAGES_PER_RANK[config.pipeline.schedule]
    per_rank = config.pipeline.stages_per_rank
    if config.mesh.pp == 1 or (per_rank >= least and (most is None or per_rank <= most)):
        return []
    wanted = str(least) if most == least else f"at least {least}"
    message = f"{config.pipeline.schedule} takes {wanted} stages per rank, not {per_rank}"
    return [
        Problem(
            "pipeline.stages_per_rank", message, _choices("pipeline.stages_per_rank", [least]), rule="stages"
        )
    ]


def _layers(config: Config) -> list[Problem]:
    per_rank, layers, pp = stages_per_rank(config), config.model.num_layers, config.mesh.pp
    if pp * per_rank <= layers:
        return []
    message = f"pp={pp} times {per_rank} stages per rank are more than the {layers} layers (model.num_layers)"
    fit = neighbours(pp, lambda n: n * per_rank <= layers, limit=1)
    fix = " or ".join([f"mesh.pp={n}" for n in fit] + [f"model.num_layers={pp * per_rank}"])
    return [Problem("mesh.pp", message, fix, rule="stages")]


def micro_batch_fault(schedule: str, ranks: int, micro_batches: int) -> tuple[str, list[int]] | None:
    """Why a schedule cannot run that many micro-batches on pipeline ranks, and the nearest counts it can."""
    n = micro_batches
    if schedule == "dualpipev" and n < 2 * ranks:
        return f"dualpipev wants at least 2·pp = {2 * ranks} micro-batches, there are {n}", [2 * ranks]
    if schedule == "interleaved_1f1b" and n % max(1, n // ranks):
        rounds = n // ranks
        message = f"interleaved_1f1b wants micro-batches divisible into rounds of {rounds}, there are {n}"
        return message, neighbours(n, lambda m: m % max(1, m // ranks) == 0)
    return None


def _micro_batches(config: Config) -> list[Problem]:
    if config.mesh.pp == 1 or _batch(config):
        return []
    fault = micro_batch_fault(config.pipeline.schedule, config.mesh.pp, micro_batches(config))
    if fault is None:
        return []
    unit = config.micro_batch_size * config.mesh.data_ranks
    fix = _choices("global_batch_size", [n * unit for n in fault[1]])
    return [Problem("global_batch_size", fault[0], fix, rule="micro-batches")]


def notices(config: Config) -> list[str]:
    """What works but is slower than it need be, for the plan."""
    n, pp = micro_batches(config), config.mesh.pp
    if pp == 1 or config.pipeline.schedule != "zbv" or n >= 2 * pp - 1:
        return []
    least = (2 * pp - 1) * config.micro_batch_size * config.mesh.data_ranks
    words = f"zbv fills its pipeline from 2·pp-1 = {2 * pp - 1} micro-batches on, there are {n}"
    return [f"{words}: ranks will idle; global_batch_size={least} would do"]


def _shared_embedding(config: Config) -> list[Problem]:
    schedule, pp = config.pipeline.schedule, config.mesh.pp
    if not config.model.tie_embeddings or pp == 1 or schedule in IN_V:
        return []
    message = f"pp={pp} with {schedule}: a tied head needs both ends on one rank"
    fix = " or ".join(["mesh.pp=1", *(f"pipeline={name}" for name in IN_V)])
    return [Problem("mesh.pp", message, fix, rule="shared embedding")]


def _tensor(config: Config) -> list[Problem]:
    if config.mesh.tp == 1:
        return []
    return [
        Problem("mesh.tp", f"tp={config.mesh.tp}; tensor parallelism is reserved", "mesh.tp=1", rule="tp")
    ]


def _capabilities(config: Config) -> list[Problem]:
    refused = registry.problem(config.backend.name)
    if refused is not None:
        return [refused]
    able = registry.BACKENDS[config.backend.name]
    wide = [
        axis
        for axis, size in sizes(config.mesh).items()
        if size > 1 and axis not in able.axes and axis != "tp"
    ]
    problems = [_unable(config, f"mesh.{axis}", sizes(config.mesh)[axis], ["1"]) for axis in wide]
    choices = [
        ("recompute", config.recompute.name, able.recompute),
        ("precision", config.precision.name, able.precision),
        ("balance", config.balance.kind, able.balance),
        ("balance.force", config.balance.force, able.force),
    ]
    if config.mesh.pp > 1:
        choices.append(("pipeline.schedule", config.pipeline.schedule, able.schedules))
    problems += [
        _unable(config, key, value, list(able_)) for key, value, able_ in choices if value not in able_
    ]
    problems += _compile(config) + _program(config)
    if config.pipeline.overlap and not able.overlap:
        problems.append(_unable(config, "pipeline.overlap", "true", ["false"]))
    if config.pipeline.reduce == "micro_batch" and config.mesh.pp > 1:
        message = f"micro_batch reduces after each micro-batch, which pp={config.mesh.pp} does not take"
        problems.append(Problem("pipeline.reduce", message, "pipeline.reduce=step", rule="reduce"))
    return problems


def _compile(config: Config) -> list[Problem]:
    """What `backend.compile` cannot go with; `auto` is off there."""
    mesh, balance, wanted = config.mesh, config.balance, config.backend.compile
    if wanted in ("auto", "none"):
        return []
    if wanted == "model" and config.backend.name == "native":
        message = "model, but the native backend compiles layer by layer: one graph serves them all"
        return [Problem("backend.compile", message, "backend.compile=layers", rule="backend")]
    shared = [f"{axis}={sizes(mesh)[axis]}" for axis in ("rep", "dp", "cp", "ep") if sizes(mesh)[axis] > 1]
    if shared:
        message = f"{wanted}, but with {', '.join(shared)} parameters are gathered inside the layers"
        return [Problem("backend.compile", message, "backend.compile=none", rule="backend")]
    if config.backend.name == "transformers" and (balance.kind != "none" or balance.z_loss):
        message = f"{wanted}, but balance={balance.kind} watches transformers' routers by hooks"
        return [Problem("backend.compile", message, "balance=none or backend.compile=none", rule="backend")]
    return []


def _program(config: Config) -> list[Problem]:
    """What cannot be run as `pipeline.program` says."""
    program, recompute = config.pipeline.program, config.recompute.name
    if program == "plain" and recompute != "none":
        message = f"plain keeps all activations, recompute={recompute} does not"
        return [
            Problem("pipeline.program", message, "pipeline.program=auto or recompute=none", rule="program")
        ]
    if program == "staged" and config.backend.name != "native":
        message = f"staged, but the layers of backend={config.backend.name} are not cut in stages"
        return [Problem("pipeline.program", message, "pipeline.program=auto", rule="backend")]
    return []


def _unable(config: Config, key: str, value: object, able: list[str]) -> Problem:
    why = registry.BACKENDS[config.backend.name].reasons.get(key)
    message = f"backend {config.backend.name} does not take {key}={value}" + (f": {why}" if why else " yet")
    return Problem(key, message, " or ".join(f"{key}={name}" for name in able), rule="backend")
