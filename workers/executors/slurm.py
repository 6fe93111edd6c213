"""Runs launches as batch jobs of Slurm (22.05 or newer), by its own commands.

A launch is one batch job, whose name is the handle: Slurm finds it by that name, so that nothing that the
controller answers has to be stored. Slurm never requeues it: if Slurm takes its devices away, the trainer
writes a checkpoint, and Accrue's queue submits the job again.
"""

import os
import shlex
from pathlib import Path

from app import PACKAGES_FOLDER
from app.planning.devices import Device
from workers.executors.commands import call, node_command, passed_on
from workers.executors.process import read_log
from workers.executors.protocol import Launch, LaunchStatus, Refused, Unreachable
from workers.executors.shared_files import LOG

_WAITING = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_EVICTED = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED", "TIMEOUT", "DEADLINE"}
"""States of squeue(1), section *job state codes*."""

_NOT_NOW = (
    "Unable to contact slurm controller", "Socket timed out", "Connection refused", "Connection timed out",
    "Communication connection failure", "slurm_load_jobs error", "temporarily unable", "Zero Bytes were",
    "Message send failure", "Transport endpoint", "MaxSubmit", "try again",
)  # fmt: skip
"""What sbatch says if the controller cannot be reached, or if the user has too many jobs now."""


class SlurmExecutor:
    """Calls sbatch, squeue and scancel.

    Args:
        devices: what jobs may use at a time. Slurm decides when they get it.
        options: options for every batch job, such as --partition=gpu --account=lab.
    """

    name = "slurm"

    def __init__(self, devices: list[Device], options: str = "") -> None:
        self._devices, self._options = devices, shlex.split(options)

    def devices(self) -> list[Device]:
        self._call(["sinfo", "--noheader", "--format=%T"])
        return self._devices

    def render(self, launch: Launch) -> str:
        options = [
            f"--job-name={launch.handle}",
            f"--output={launch.folder / LOG}",
            "--open-mode=append",
            f"--chdir={PACKAGES_FOLDER}",
            f"--ntasks={launch.nodes}",
            "--no-requeue",
            # Before a time limit ends the job: the time for a checkpoint, and 30 s to notice the signal.
            f"--signal=TERM@{min(65535, int(launch.grace_seconds) + 30)}",
            *([f"--gpus-per-task={launch.devices_per_node}"] if launch.on_gpus else []),
            *self._options,
        ]
        return "\n".join(
            [
                "#!/bin/sh",
                *(f"#SBATCH {shlex.quote(option)}" for option in options),
                'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                "export MASTER_ADDR",
                # srun does not take this over from sbatch (srun(1)).
                'if [ "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi',
                f"exec srun --kill-on-bad-exit=0 --wait=0 {shlex.join(node_command(launch))}",
                "",
            ]
        )

    def submit(self, launch: Launch) -> None:
        if self.poll(launch.handle).state in ("waiting", "running"):
            return
        self._call(["sbatch", "--parsable"], self.render(launch))

    def poll(self, handle: str) -> LaunchStatus:
        listed = self._call(
            ["squeue", "--noheader", "--me", f"--name={handle}", "--states=all", "--format=%T|%r"]
        )
        found = [_found(*line.split("|", 1)) for line in listed.splitlines() if "|" in line]
        order = ("running", "waiting", "ended")
        return min(found, key=lambda each: order.index(each.state), default=LaunchStatus("unknown"))

    def cancel(self, handle: str) -> None:
        self._call(["scancel", "--quiet", "--me", f"--name={handle}"])

    def logs(self, handle: str, folder: Path, cursor: int) -> tuple[str, int]:
        return read_log(folder, cursor)

    def _call(self, command: list[str], content: str | None = None) -> str:
        """Calls a command of Slurm. Returns what it prints.

        Raises:
            Unreachable: the controller does not answer.
            Refused: Slurm refuses the call.
        """
        done = call(command, content, _environment())
        if done.returncode == 0:
            return done.stdout
        message = next(iter(done.stderr.strip().splitlines()), f"{command[0]} failed")
        if command[0] != "sbatch" or any(sign in done.stderr for sign in _NOT_NOW):
            raise Unreachable(message)
        raise Refused(f"Slurm refuses the job: {message.removeprefix('sbatch: error: ')}")


def _environment() -> dict[str, str]:
    """What sbatch passes on to the nodes, and Slurm's own variables."""
    own = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_CONF", "SBATCH_"))}
    return passed_on() | own


def _found(state: str, reason: str) -> LaunchStatus:
    why = "" if reason in ("None", "") else reason
    if state in _WAITING:
        return LaunchStatus("waiting", why)
    if state in _RUNNING:
        return LaunchStatus("running", why)
    return LaunchStatus("ended", state if not why else f"{state}, {why}", was_evicted=state in _EVICTED)
