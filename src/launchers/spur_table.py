"""What Spur's commands take, by version: read in its source at the tags 0.5.0 to 0.8.0 (SPUR-1).

A word is a long flag, `/X` its letter, `=` at the end a value. 0.8.0 takes what 0.7.0 takes.
"""

from __future__ import annotations

SBATCH = (
    "account/A= array/a= bb= begin= chdir/D= comment= constraint/C= container-entrypoint= container-env= "
    "container-image= container-mount-home container-mounts= container-name= container-readonly "
    "container-remap-root container-workdir= controller= cpus-per-task/c= deadline= dependency/d= "
    "distribution/m= error/e= exclude/x= exclusive export= gpus-per-node= gpus/G= gres= het-group= hold/H "
    "job-name/J= licenses/L= mail-type= mail-user= mem-per-cpu= mem= mpi= nodelist/w= nodes/N= "
    "ntasks-per-node= ntasks/n= open-mode= output/o= parsable partition/p= qos/q= requeue reservation= "
    "spread-job time-min= time/t= topology= wrap="
)
"""Of 0.5."""
SRUN = (
    "account/A= chdir/D= constraint/C= container-env= container-image= container-mount-home "
    "container-mounts= container-remap-root container-workdir= controller= cpu-bind= cpus-per-task/c= "
    "epilog= error/e= exclude/x= gpu-bind= gpus/G= gres= input/i= job-name/J= label/l licenses/L= mem= mpi= "
    "nodelist/w= nodes/N= ntasks/n= output/o= partition/p= prolog= reservation= time/t="
)
"""Of 0.5."""
ADDED: dict[str, dict[str, str]] = {
    "0.5.0": {"sbatch": SBATCH, "srun": SRUN},
    "0.6.0": {
        "sbatch": "gpus-per-task= nodefile/F=",
        "srun": "exclusive gpus-per-node= gpus-per-task= jobid= nodefile/F= overlap pty qos/q=",
    },
    "0.7.0": {"sbatch": "", "srun": "ntasks-per-node="},
    "0.8.0": {"sbatch": "", "srun": ""},
}
"""What each version added."""
NEWEST = "0.8.0"
STEPS_ON_ALL_NODES = (0, 6)
"""Before, srun ran its command once, on the first node, whatever was asked of it."""
INJECTED = ("WORLD_SIZE", "RANK", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE")
"""Variables that Spur gives to a batch script as if each node were one rank, beside MASTER_*."""
THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Variables that Spur sets to the cores of a node, over what the user had set."""
ALTERNATIVES = {
    "cpus-per-gpu": "launcher.cpus_per_task",
    "exact": "leave it out",
    "gpus-per-socket": "launcher.gpus_per_node",
    "hint": "leave it out",
    "kill-on-bad-exit": "leave it out: launcher.watchdog ends the other nodes",
    "mem-per-gpu": "+launcher.extra.mem=64G, of a node",
    "nice": "+launcher.extra.qos=NAME",
    "no-requeue": "launcher.max_requeues=0",
    "signal": "launcher.grace says how long before the time limit the run saves",
    "test-only": "dry_run=true",
    "unbuffered": "leave it out: the ranks' logs are in RUN/ranks as they are written",
    "wait": "launcher.wait",
}
"""Flags of Slurm that Spur lacks, and what to type instead."""
DROPPED = {"wckey": "Spur has none", "export": "ALL is what Spur does anyway"}
"""Flags that go without an error: nothing is lost."""
