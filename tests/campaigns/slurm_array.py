"""Run `--shard auto` and `ckpt commit` under a real Slurm: one machine, four nodes. A script; prints a table.

    apt-get install slurm-wlm munge
    python tests/campaigns/slurm_array.py [FOLDER]

It starts munged, slurmctld and four slurmd of its own, as root, with ports and folders of its own, and ends them. Where
it cannot run, it says why and ends with code 0.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "sample_checkpoints" / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
NODES = 4
SECONDS = 240
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sacct")


def why_not() -> str | None:
    """Why Slurm cannot be started here."""
    if missing := [name for name in DAEMONS[:-1] if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd starts jobs as root only"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Slurm:
    """Daemons of Slurm in a folder."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        command = self.folder / "bin"
        path = f"{command}:{os.environ['PATH']}:/usr/sbin:/sbin"
        return {"PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), "HOME": "/root", "LANG": "C.UTF-8"}

    def start(self) -> None:
        for name in ("bin", "state", "spool", "log"):
            (self.folder / name).mkdir()
        script = self.folder / "bin" / "ckpt"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpt_cli "$@"\n')
        script.chmod(0o755)
        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}",
            f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munged.seed",
            f"--log-file={self.folder}/log/munged",
        )  # fmt: skip
        self._wait(munge.exists, "munged")
        control, *ports = free_ports(NODES + 1)
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=100"
            for i, port in enumerate(ports)
        )
        (self.folder / "slurm.conf").write_text(
            f"""ClusterName=ckpt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld
SlurmdLogFile={self.folder}/log/%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=2
MinJobAge=3600
RequeueExit=99
{nodes}
PartitionName=all Nodes=n[0-{NODES - 1}] Default=YES State=UP
"""
        )
        self._daemon("slurmctld", "-D")
        for i in range(NODES):
            self._daemon("slurmd", "-D", "-N", f"n{i}")
        self._wait(lambda: self.ask("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(NODES)], "the nodes")

    def _daemon(self, *words: str) -> None:
        with (self.folder / "log" / "daemons").open("ab") as log:
            self.running.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            if time.monotonic() > end or any(one.poll() for one in self.running):
                logs = "".join(path.read_text(errors="replace")[-2000:] for path in (self.folder / "log").iterdir())
                raise SystemExit(f"Slurm does not start ({what}):\n{logs}")
            time.sleep(0.2)

    def ask(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def submit(self, *words: str) -> str:
        """Submit a job from the folder of the work. Returns its number."""
        return self.ask("sbatch", "--parsable", f"--chdir={self.folder}/work", *words).strip()

    def states(self, job: str) -> dict[str, str]:
        """The state of each task of a job."""
        lines = self.ask("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%i %T").splitlines()
        return dict(line.split()[:2] for line in lines if len(line.split()) == 2)

    def wait(self, job: str) -> dict[str, str]:
        """The states of all tasks of a job, when it has ended."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            states = self.states(job)
            if states and not {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"} & set(states.values()):
                return states
            time.sleep(0.3)
        raise SystemExit(f"job {job} does not end: {self.states(job)}\n{self.ask('scontrol', 'show', 'job', job)}")

    def stop(self) -> None:
        for one in reversed(self.running):
            one.send_signal(signal.SIGTERM)
        for one in self.running:
            try:
                one.wait(10)
            except subprocess.TimeoutExpired:  # noqa: PERF203 -- each has its own time
                one.kill()
                one.wait()


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A running Slurm."""
    one = Slurm(folder)
    try:
        one.start()
        yield one
    finally:
        one.stop()


def contents(target: Path) -> dict[str, bytes]:
    return {str(path.relative_to(target)): path.read_bytes() for path in sorted(target.rglob("*")) if path.is_file()}


def summary(states: dict[str, str]) -> str:
    values = list(states.values())
    return ", ".join(f"{values.count(state)} {state.lower()}" for state in sorted(set(values)))


@dataclass
class Trial:
    """What is tried under one Slurm, with a row for each."""

    slurm: Slurm
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = self.slurm.folder / "work"
        self.work.mkdir()
        self._convert(self.work / "expected")
        self.expected = contents(self.work / "expected")

    def _convert(self, target: Path) -> None:
        words = [sys.executable, "-m", "ckpt_cli", "convert", SOURCE, target, "--pack-size", "1"]
        subprocess.run(words, check=True, capture_output=True)

    def array(self, tasks: str, target: str, shard: str, before: str = "") -> str:
        command = f"{before}ckpt convert {SOURCE} {target} --pack-size 1 --shard {shard}"
        log = f"{self.slurm.folder}/log/job-%j.txt"
        return self.slurm.submit(f"--array={tasks}", "--requeue", f"--output={log}", "--wrap", command)

    def commit(self, target: str) -> dict[str, str]:
        """`ckpt commit`, as docs/scale.md submits it."""
        log = f"{self.slurm.folder}/log/commit-%j.txt"
        return self.slurm.wait(self.slurm.submit(f"--output={log}", "--wrap", f"ckpt commit {target}"))

    def add(self, what: str, states: dict[str, str], target: str) -> None:
        place = self.work / target
        result = "absent" if not place.exists() else "equal" if contents(place) == self.expected else "DIFFERENT"
        self.rows.append((what, summary(states), result))

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in (self.slurm.folder / "log").glob("*.txt"))


def try_all(trial: Trial) -> None:
    """Every row of the table."""
    slurm = trial.slurm
    trial.add("--array=0-3, --shard auto", slurm.wait(trial.array("0-3", "plain", "auto")), "plain")
    trial.add("  then ckpt commit in a job of its own", trial.commit("plain"), "plain")

    # A file that tells a task to wait: it is requeued, or killed, while it runs.
    hold = trial.work / "hold"
    waits = f'[ "$SLURM_ARRAY_TASK_ID" != 2 ] || while [ -e {hold} ]; do sleep 0.2; done; '
    for name, what in (("requeued", "a task is requeued while it runs"), ("killed", "a task is killed while it runs")):
        hold.touch()
        job = trial.array("0-3", name, "auto", waits)
        end = time.monotonic() + SECONDS
        while list(slurm.states(job).values()).count("COMPLETED") < 3 and time.monotonic() < end:
            time.sleep(0.3)
        slurm.ask("scontrol", "requeue", f"{job}_2") if name == "requeued" else slurm.ask("scancel", f"{job}_2")
        hold.unlink()
        trial.add(f"--array=0-3, {what}", slurm.wait(job), name)
        trial.add("  then ckpt commit", trial.commit(name), name)
    trial.add("  --array=2 alone, --shard auto", slurm.wait(trial.array("2", "killed", "auto")), "killed")
    trial.add("  --array=2 alone, --shard auto/4", slurm.wait(trial.array("2", "killed", "auto/4")), "killed")
    trial.add("  then ckpt commit", trial.commit("killed"), "killed")

    trial.add("--array=1,3,6, --shard auto", slurm.wait(trial.array("1,3,6", "gaps", "auto")), "gaps")
    trial.add("  --array=1,3,6, --shard auto/7", slurm.wait(trial.array("1,3,6", "gaps", "auto/7")), "gaps")
    trial.add("  --array=0,2,4-5, --shard auto/7", slurm.wait(trial.array("0,2,4-5", "gaps", "auto/7")), "gaps")
    trial.add("  then ckpt commit", trial.commit("gaps"), "gaps")
    trial.add("--array=1-7:2, --shard auto", slurm.wait(trial.array("1-7:2", "steps", "auto")), "steps")
    trial.add("  then ckpt commit", trial.commit("steps"), "steps")

    log = f"{slurm.folder}/log/srun-%j.txt"
    words = f"srun ckpt convert {SOURCE} srun --pack-size 1 --shard auto"
    job = slurm.submit("--nodes=4", "--ntasks=4", f"--output={log}", "--wrap", words)
    trial.add("srun --ntasks=4, --shard auto", slurm.wait(job), "srun")
    trial.add("  then ckpt commit", trial.commit("srun"), "srun")


def main() -> None:
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    given = Path(sys.argv[1]).absolute() if sys.argv[1:] else None
    if given is not None:
        given.mkdir(parents=True)
    folder = given or Path(tempfile.mkdtemp(prefix="ckpt-slurm-"))
    try:
        with slurm(folder) as running:
            print(running.ask("sinfo", "--version").strip(), f"with {NODES} nodes on one machine")
            trial = Trial(running)
            try:
                try_all(trial)
            finally:
                print(f"{'what':45} {'tasks':28} target")
                for what, states, result in trial.rows:
                    print(f"{what:45} {states:28} {result}")
                lines = {line for line in trial.logs().splitlines() if line.startswith(("error:", "hint:"))}
                print("messages:", *sorted(lines), sep="\n  ")
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
