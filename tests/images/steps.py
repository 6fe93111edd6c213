"""`make test-images`: runs the Dockerfiles' steps in a plain Debian, without a container engine.

Needs root, debootstrap, and a network for Debian's packages and for Python's. For each image: a fresh root;
its RUN, COPY, ENV, WORKDIR and USER lines as they stand; then its command is started as its user. It must
become healthy by its own HEALTHCHECK, and must be able to write nowhere but in its data folder.
"""

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
HEALTHY_WITHIN = 90.0
WRITABLE = {"/data", "/home/accrue", "/tmp", "/var/tmp", "/run/lock", "/dev/shm", "/dev/mqueue"}
"""The data folder, and the folders that anyone may write to on any Linux; the compose file makes the latter
read-only or empties them."""

PACKAGES_OF_THIS_MACHINE = ("/opt/pypi", "/opt/pypi-more", "/opt/wheels")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
COPY_OF_CERTIFICATES = "/opt/this-machine.crt"
PIP_OPTIONS = ("extra-index-url", "find-links")
"""How the network is reached from here; no part of the image."""


@dataclass
class Image:
    """A root directory, and what the steps so far have set."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def run(self, command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self._within(command), env=self._env(), text=True, check=check)

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._within(self.command), env=self._env(), start_new_session=True)

    def is_healthy(self) -> bool:
        done = subprocess.run(self._within(self.health), env=self._env(), capture_output=True)
        return done.returncode == 0

    def writable(self) -> set[str]:
        """The topmost folders that the image's user may write to."""
        command = self._within(["find", "/", "-xdev", "-type", "d", "-writable", "-prune"])
        found = subprocess.run(command, env=self._env(), capture_output=True, text=True)
        return set(found.stdout.split())

    def _within(self, command: list[str]) -> list[str]:
        inside = 'cd "$0" && exec "$@"'
        user = f"--userspec={self.user}:{self.user}"
        return ["chroot", user, str(self.root), "/bin/sh", "-c", inside, self.folder, *command]

    def _env(self) -> dict[str, str]:
        own = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        if self.user != "0":
            own["HOME"] = "/home/accrue"
        return {**the_way_out(), **own, **self.env}


@cache
def the_way_out() -> dict[str, str]:
    """Variables by which pip finds its packages as it does on this machine."""
    found = {}
    for option in PIP_OPTIONS:
        requested = subprocess.run(
            ["pip", "config", "get", f"global.{option}"], capture_output=True, text=True
        )
        if requested.returncode == 0:
            found[f"PIP_{option.upper().replace('-', '_')}"] = requested.stdout.strip()
    if Path(CERTIFICATES).exists():
        found |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), COPY_OF_CERTIFICATES)
    return found


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Each instruction's name and the rest of its line, continuation lines joined."""
    text = "".join(
        line for line in dockerfile.read_text().splitlines(keepends=True) if not line.startswith("#")
    )
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


def carry_out(image: Image, name: str, rest: str) -> None:
    """Carries out one instruction.

    Raises:
        ValueError: the instruction is unknown.
    """
    if name == "RUN":
        print(f"RUN {rest[:100]}", flush=True)
        image.run([*image.shell, rest])
    elif name == "ENV":
        for variable, value in re.findall(r"(\w+)=(\S+)", rest):
            path = image._env()["PATH"]
            image.env[variable] = value.replace("$PATH", path)
    elif name == "COPY":
        copy(image, rest.split())
    elif name == "SHELL":
        image.shell = json.loads(rest)
    elif name == "WORKDIR":
        image.folder = rest
        (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif name == "USER":
        image.user = rest
    elif name == "CMD":
        image.command = json.loads(rest)
    elif name == "HEALTHCHECK":
        image.health = json.loads(rest[rest.index("CMD") + 3 :])
    elif name not in ("FROM", "VOLUME", "EXPOSE"):
        raise ValueError(f"{name} is not known here")


def copy(image: Image, words: list[str]) -> None:
    *sources, target = words
    to = image.root / image.folder.lstrip("/") / target
    for source in sources:
        path = HERE / source
        if path.is_dir():
            shutil.copytree(path, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, to)


@contextmanager
def plain_debian(root: Path) -> Iterator[None]:
    """A fresh root with its own /proc, and with this machine's package folders, which cannot be changed."""
    command = ["debootstrap", "--variant=minbase", "bookworm", str(root), MIRROR]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for path, there in (("/etc/resolv.conf", "/etc/resolv.conf"), (CERTIFICATES, COPY_OF_CERTIFICATES)):
        if Path(path).exists():
            shutil.copy(path, root / there.lstrip("/"))
    mounted = []
    try:
        mount("-t", "proc", "proc", str(root / "proc"))
        mounted.append(root / "proc")
        for packages in filter(Path.exists, map(Path, PACKAGES_OF_THIS_MACHINE)):
            target = root / packages.relative_to("/")
            target.mkdir(parents=True, exist_ok=True)
            mount("--bind", str(packages), str(target))
            mounted.append(target)
            mount("-o", "remount,bind,ro", str(target))
        yield
    finally:
        for path in reversed(mounted):
            subprocess.run(["umount", str(path)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def look_at(dockerfile: Path) -> None:
    """Everything about one image.

    Raises:
        AssertionError, subprocess.CalledProcessError: it is not as it should be.
    """
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="accrue-image-"))
    image = Image(folder / "root")
    try:
        with plain_debian(image.root):
            for name, rest in instructions(dockerfile):
                carry_out(image, name, rest)
            built = time.monotonic() - began
            process = image.start()
            try:
                wait_until_healthy(image, process)
            finally:
                process.terminate()
                process.wait(60)
            found = image.writable()
            assert found <= WRITABLE, f"{dockerfile.name}: may write in {sorted(found - WRITABLE)}"
            size = subprocess.run(
                ["du", "-sxm", *(f"--exclude=*{each}" for each in PACKAGES_OF_THIS_MACHINE), str(image.root)],
                capture_output=True,
                text=True,
            ).stdout.split()[0]
            print(
                f"{dockerfile.name}: built in {built:.0f} s, {size} MiB, healthy, writes in {sorted(found)}"
            )
    finally:
        assert str(folder) not in Path("/proc/self/mounts").read_text(), f"{folder} still has mounts"
        shutil.rmtree(folder)


def wait_until_healthy(image: Image, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + HEALTHY_WITHIN
    while not image.is_healthy():
        assert process.poll() is None, f"it ended with status {process.returncode}"
        assert time.monotonic() < until, f"it was not healthy within {HEALTHY_WITHIN:.0f} s"
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", nargs="*", default=["service", "worker"])
    for name in parser.parse_args().image:
        look_at(HERE / "docker" / f"{name}.Dockerfile")


if __name__ == "__main__":
    main()
