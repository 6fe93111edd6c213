"""A Slurm cluster of one node on this machine, from Debian's packages slurmctld, slurmd and slurm-client."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.runs import until
from tests.harness.service import free_port

IS_HERE = all(shutil.which(program) for program in ("slurmctld", "slurmd", "sbatch")) and os.getuid() == 0
"""Whether such a cluster can be started: its daemon starts jobs as their users, and so needs root."""

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldTimeout=10
MessageTimeout=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
KillWait=5
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_interval=2,preempt_youngest_first
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=localhost Default=YES PriorityTier=1 State=UP PreemptMode=CANCEL GraceTime=60
PartitionName=high Nodes=localhost PriorityTier=10 State=UP PreemptMode=OFF
"""


class Slurm:
    """The cluster; `configuration` is what SLURM_CONF names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        for inner in ("state", "spool"):
            (folder / inner).mkdir(parents=True)
        self.configuration.write_text(
            _CONFIGURATION.format(
                folder=folder,
                controller_port=free_port(),
                node_port=free_port(),
                cpus=os.cpu_count(),
            )
        )
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.configuration)}

    def start(self, daemon: str) -> None:
        """Starts slurmctld or slurmd."""
        name = ["-N", "localhost"] if daemon == "slurmd" else []
        with (self.folder / f"{daemon}.log").open("ab") as output:
            self._processes[daemon] = subprocess.Popen(
                [daemon, "-D", "-f", str(self.configuration), *name],
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def stop(self, daemon: str) -> None:
        process = self._processes.pop(daemon)
        process.kill()
        process.wait()

    def call(self, *command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        return done.stdout

    def sbatch(self, option: str, command: str, partition: str) -> None:
        """Submits a batch job that is not Accrue's."""
        self.call("sbatch", option, f"--partition={partition}", "--output=/dev/null", f"--wrap={command}")

    def is_idle(self) -> bool:
        return "idle" in self.call("sinfo", "--noheader", "--format=%T")

    def end(self) -> None:
        self.call("scancel", "--signal=KILL", "--full", "--state=RUNNING", f"--user={os.getuid()}")
        for daemon in list(self._processes):
            self.stop(daemon)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Runs a cluster until the end of the block."""
    cluster = Slurm(folder)
    try:
        cluster.start("slurmctld")
        cluster.start("slurmd")
        until(cluster.is_idle, 60)
        yield cluster
    finally:
        cluster.end()
