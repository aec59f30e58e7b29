"""A throw-away real Slurm cluster on one machine, for tests and for trying a run without a site.

    cluster = DevSlurm(Path("/tmp/dev"))
    cluster.up()
    subprocess.run(["srun", "-N7", "hostname"], env={**os.environ, **cluster.env()})

Own munged, slurmctld and N virtual nodes, own ports, everything below one folder, as a plain user or as root; several
clusters run side by side. Where the kernel allows it each node is a pid, hostname and mount namespace, so that a killed
node dies with everything on it and looks up its own name; elsewhere nodes are plain `slurmd -N`, told by their
environment, and one warning says so. Jobs run as the user who called `up`, in the machine's filesystem.

Invariants: no process is signalled by its id alone (devslurm_processes); after `down` none is left; ports and size are
remembered in the folder; one caller changes a cluster at a time. Failure: SchedulerError with the end of the log that
tells why, after a failed first start nothing is left running.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.slurm.devslurm_config import (
    NUM_GPUS_PER_NODE,
    Layout,
    Shape,
    cgroup_conf,
    find_port_block,
    gres_conf,
    hosts_file,
    ports_free,
    read_shape,
    slurm_conf,
    write_shape,
)
from cluster.slurm.devslurm_processes import ClusterProcesses, tail, wait_until
from miles_core.errors import DeadlineExceeded, SchedulerError

logger = logging.getLogger(__name__)

BINARIES = ("munged", "slurmctld", "slurmd", "scontrol", "sinfo", "squeue", "scancel", "sbatch", "srun")
START_DEADLINE_S = 60.0
CANCEL_DEADLINE_S = 15.0
"""KillWait of the configuration (5 s) and some seconds for slurmctld."""
CLIENT_TIMEOUT_S = 30.0
NODE_INIT = 'hostname "$1" && mount --bind "$2" /etc/hosts || exit 1; shift 2; "$@" & wait $!'
"""First process inside a node's namespaces: arguments are name, hosts file, then slurmd's argv. It also reaps orphans."""
NAMESPACES = ("--uts", "--pid", "--fork", "--mount-proc", "--kill-child")


def slurm_available() -> str | None:
    """None if all binaries are there, else one sentence that names the missing ones and how to get them."""
    missing = [name for name in BINARIES if _binary(name) is None]
    if not missing:
        return None
    how = "apt-get install -y --no-install-recommends slurm-wlm munge"
    return f"Slurm is not installed ({', '.join(missing)} not found): {how}"


def _search_path() -> str:
    """PATH with the sbin folders, which a plain user's often lacks."""
    return os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


def _binary(name: str) -> str | None:
    return shutil.which(name, path=_search_path())


class DevSlurm:
    """One throw-away cluster. Objects hold no state: any later one on the same folder continues where another left."""

    def __init__(self, folder: Path, *, num_nodes: int = 7, cpus_per_node: int = 4, unshare: str = "unshare") -> None:
        """`num_nodes` and `cpus_per_node` count at the first `up`; `unshare` is the tool that makes namespaces."""
        self._layout = Layout(folder, os.getuid())
        self._num_nodes = num_nodes
        self._cpus_per_node = cpus_per_node
        self._unshare = unshare
        self._processes = ClusterProcesses(self._layout)

    # ---- life of the cluster

    def up(self) -> None:
        """Starts what does not run and waits until it works; a healthy cluster is left as it is.

        After a crash what is left over is killed first; jobs and their ids are kept. Raises SchedulerError.
        """
        if (missing := slurm_available()) is not None:
            raise SchedulerError(missing)
        self._check_machine()
        if self._running():
            self._check_shape()
            self._ensure_all()
            return
        self._kill_everything()
        self._prepare()
        try:
            self._ensure_all()
        except SchedulerError:
            self._kill_everything()
            self._remove_outside()
            raise

    def down(self) -> None:
        """Cancels all jobs and stops everything; logs and state stay in the folder. Does nothing to a stopped cluster.

        Without a living slurmctld jobs cannot be cancelled: a later `up` finds them as after a crash.
        """
        self._check_machine()
        shape = read_shape(self._layout)
        if shape is not None:
            for name in shape.nodes:
                self._processes.continue_node(name)
            if self._controller_answers():
                self._cancel_jobs()
        self._processes.terminate("slurmctld", grace_s=10.0)
        self._kill_everything()
        self._remove_outside()

    def status(self) -> dict[str, Any]:
        """What runs: `up` = the controller answers; `nodes` by Slurm's word; `jobs` = pending and running ones."""
        shape = read_shape(self._layout)
        controller = self._processes.find("slurmctld")
        answers = self._controller_answers()
        nodes = dict.fromkeys(shape.nodes if shape is not None else (), "unknown")
        return {
            "folder": str(self._layout.folder),
            "up": answers,
            "slurmctld": controller.pid if controller is not None else None,
            "nodes": nodes | (self._node_states() if answers else {}),
            "jobs": self._num_jobs() if answers else 0,
            "slurm_conf": str(self._layout.slurm_conf),
        }

    def env(self) -> dict[str, str]:
        """What a client needs in its environment to speak to this cluster."""
        return {"SLURM_CONF": str(self._layout.slurm_conf)}

    # ---- faults

    def kill_node(self, name: str) -> None:
        """The node dies at once with everything on it; Slurm notices after about 6 s. A dead node is no error."""
        self._check_node(name)
        self._processes.kill(f"node {name}", lambda: self._processes.of_node(name))
        self._processes.forget(name)

    def start_node(self, name: str) -> None:
        """Brings a dead or hung node back and waits until Slurm can use it."""
        self._check_node(name)
        self._ensure_node(name)
        self._wait_for_nodes([name])

    def stop_node(self, name: str) -> None:
        """Freezes all processes of a node (a hung node)."""
        self._check_node(name)
        if self._processes.find(name) is None:
            raise SchedulerError(f"node {name} of {self._layout.folder} does not run, so it cannot hang; start_node first")
        self._processes.stop_node(name)

    def continue_node(self, name: str) -> None:
        """Lets a frozen node go on."""
        self._check_node(name)
        self._processes.continue_node(name)

    def kill_controller(self) -> None:
        """slurmctld dies at once; what it had not saved (about the last seconds) is lost. Jobs run on."""
        self._processes.kill("slurmctld", self._processes.of_controller)
        self._processes.forget("slurmctld")

    def start_controller(self) -> None:
        """Starts slurmctld again, with its saved state, and waits until it answers; nodes are `unknown` 5 s longer."""
        self._require_shape()
        self._ensure_controller()

    # ---- checks

    def _require_shape(self) -> Shape:
        shape = read_shape(self._layout)
        if shape is None:
            raise SchedulerError(f"no devslurm cluster in {self._layout.folder}; make one: miles devslurm up")
        return shape

    def _check_node(self, name: str) -> None:
        self._check_machine()
        shape = self._require_shape()
        if name not in shape.nodes:
            raise SchedulerError(f"devslurm {self._layout.folder} has no node {name!r}, only {', '.join(shape.nodes)}")

    def _check_machine(self) -> None:
        """Process ids mean nothing elsewhere; a node's own hostname tells a call from inside a job, too."""
        shape = read_shape(self._layout)
        if shape is not None and shape.host != _hostname() and self._processes.recorded():
            raise SchedulerError(
                f"devslurm {self._layout.folder} was started on {shape.host!r} and this is {_hostname()!r}; call it there, "
                f"or remove the folder if that machine is gone"
            )

    def _check_shape(self) -> None:
        shape = self._require_shape()
        asked = (self._num_nodes, self._cpus_per_node)
        if asked != (shape.num_nodes, shape.cpus_per_node):
            raise SchedulerError(
                f"devslurm {self._layout.folder} runs with {shape.num_nodes} nodes of {shape.cpus_per_node} CPUs, not "
                f"{asked[0]} of {asked[1]}; stop it first (miles devslurm down) or ask for the same"
            )

    def _check_socket_dir(self) -> None:
        """A folder below /tmp may have been put there by somebody else: use it only if it is ours alone."""
        found = self._layout.socket_dir.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self._layout.uid or found.st_mode & 0o077:
            raise SchedulerError(
                f"devslurm {self._layout.folder} is too deep for Unix sockets (about 100 characters), so they go to "
                f"{self._layout.socket_dir}, which is not a folder of mode 0700 of user {self._layout.uid}; remove it or "
                "choose a shorter folder"
            )

    # ---- start

    def _prepare(self) -> None:
        """Folders, key, devices and configuration. Ports are kept unless another program took them meanwhile."""
        try:
            self._layout.folder.mkdir(parents=True, exist_ok=True)
            for folder in self._layout.private_dirs():
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder == self._layout.socket_dir:
                    self._check_socket_dir()
            self._write_files(self._choose_shape())
        except OSError as error:
            raise SchedulerError(f"cannot prepare devslurm in {self._layout.folder}: {error}") from error

    def _choose_shape(self) -> Shape:
        old = read_shape(self._layout)
        num_ports = self._num_nodes + 1
        kept = old is not None and ports_free(old.base_port, num_ports)
        base_port = old.base_port if old is not None and kept else find_port_block(num_ports)
        return Shape(self._num_nodes, self._cpus_per_node, base_port, _hostname())

    def _write_files(self, shape: Shape) -> None:
        layout = self._layout
        if not layout.munge_key.exists():
            layout.munge_key.touch(mode=0o600)
            layout.munge_key.write_bytes(os.urandom(1024))
        for i in range(NUM_GPUS_PER_NODE):
            device = layout.gpu_dir / f"gpu{i}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")
        layout.slurm_conf.write_text(slurm_conf(layout, shape, _user_name()))
        layout.gres_conf.write_text(gres_conf(layout, shape))
        layout.cgroup_conf.write_text(cgroup_conf(_slurm_version()))
        layout.hosts.write_text(hosts_file(Path("/etc/hosts").read_text(), shape))
        write_shape(layout, shape)

    def _ensure_all(self) -> None:
        self._ensure_munged()
        self._ensure_controller()
        shape = self._require_shape()
        started = [name for name in shape.nodes if self._ensure_node(name)]
        if started and not self._isolation():
            logger.warning(
                "devslurm %s: no pid namespaces here, nodes share one (a process that hides its environment from its "
                "job outlives a killed node)",
                self._layout.folder,
            )
        self._wait_for_nodes(started, shape.nodes)

    def _ensure_munged(self) -> None:
        if self._processes.find("munged") is not None:
            return
        layout = self._layout
        layout.munge_socket.unlink(missing_ok=True)
        options = {
            "socket": layout.munge_socket,
            "key-file": layout.munge_key,
            "seed-file": layout.munge_dir / "seed",
            "pid-file": layout.pid_dir / "munged.pid",
            "log-file": layout.log("munged"),
        }
        # --force: a group-writable folder above, usual with a umask of 002, is a warning then and no error.
        argv = [_require("munged"), "--foreground", "--force", *(f"--{key}={value}" for key, value in options.items())]
        self._processes.start("munged", argv, self._daemon_env())
        self._wait_for_start("munged", lambda: _listens(layout.munge_socket))

    def _ensure_controller(self) -> None:
        if self._processes.find("slurmctld") is None:
            argv = [_require("slurmctld"), "-D", "-f", str(self._layout.slurm_conf)]
            self._processes.start("slurmctld", argv, self._daemon_env())
        port = self._require_shape().base_port
        self._wait_for_start("slurmctld", lambda: _listens(("127.0.0.1", port)) and self._controller_answers())

    def _ensure_node(self, name: str) -> bool:
        """Whether the node had to be started or woken. Leftovers of a dead one are killed first: a node dies as a whole."""
        if self._processes.find(name) is not None:
            hung = any(p.comm == "slurmd" and p.state in "Tt" for p in self._processes.of_node(name))
            if hung:
                self._processes.continue_node(name)
            return hung
        self._processes.kill(f"leftovers of node {name}", lambda: self._processes.of_node(name))
        slurmd = [_require("slurmd"), "-D", "-f", str(self._layout.slurm_conf), "-N", name]
        around = self._isolation()
        argv = self._node_argv(around, name, slurmd) if around else slurmd
        self._processes.start(name, argv, self._daemon_env(), namespaced=bool(around))
        return True

    def _isolation(self) -> list[str]:
        """The unshare call that gives a node its namespaces, or nothing where the kernel refuses them."""
        user = [] if self._layout.uid == 0 else ["--user", "--map-root-user"]
        around = [self._unshare, *user, *NAMESPACES]
        probe = subprocess.run(
            self._node_argv(around, "probe", ["true"]),
            env=self._daemon_env(),
            capture_output=True,
            timeout=CLIENT_TIMEOUT_S,
        )
        return around if probe.returncode == 0 else []

    def _node_argv(self, around: list[str], name: str, command: list[str]) -> list[str]:
        """A plain user is root of the node only to name it; slurmd and the jobs are the user again, without privileges."""
        uid, gid = self._layout.uid, os.getgid()
        back = [] if uid == 0 else [self._unshare, "--user", f"--map-user={uid}", f"--map-group={gid}"]
        return [*around, "bash", "-c", NODE_INIT, "node", name, str(self._layout.hosts), *back, *command]

    def _wait_for_start(self, name: str, ready: Callable[[], bool]) -> None:
        def alive_and_ready() -> bool:
            if self._processes.find(name) is None:
                raise SchedulerError(f"{name} of {self._layout.folder} ended while starting\n{self._tail(name)}")
            return ready()

        try:
            wait_until(f"{name} of {self._layout.folder} to answer", START_DEADLINE_S, alive_and_ready)
        except DeadlineExceeded as error:
            raise SchedulerError(f"{error}\n{self._tail(name)}") from error

    def _wait_for_nodes(self, started: list[str], others: tuple[str, ...] = ()) -> None:
        """Waits until nodes just started can take jobs and Slurm knows the state of the others.

        A started node that Slurm set aside for an earlier fault is resumed once; what somebody drained stays drained.
        """
        resumed: set[str] = set()
        waiting: dict[str, str] = {}

        def all_ready() -> bool:
            self._check_alive(started)
            states = {name: "absent" for name in (*started, *others)} | self._node_states()
            waiting.clear()
            waiting.update({name: states[name] for name in started if not _usable(states[name])})
            for name in sorted({name for name in waiting if _set_aside(waiting[name])} - resumed):
                self._client("scontrol", "update", f"nodename={name}", "state=resume")
                resumed.add(name)
            waiting.update({name: states[name] for name in others if states[name].startswith(("unknown", "absent"))})
            return not waiting

        try:
            wait_until(f"the nodes of {self._layout.folder}", START_DEADLINE_S, all_ready)
        except DeadlineExceeded as error:
            raise SchedulerError(f"{error}: {waiting}\n{self._tail(next(iter(waiting)))}") from error

    def _check_alive(self, names: list[str]) -> None:
        for name in names:
            if self._processes.find(name) is None:
                raise SchedulerError(f"node {name} of {self._layout.folder} ended\n{self._tail(name)}")

    # ---- end

    def _cancel_jobs(self) -> None:
        try:
            self._client("scancel", f"--user={_user_name()}")
            wait_until("cancelled jobs to end", CANCEL_DEADLINE_S, lambda: self._num_jobs() == 0)
        except (SchedulerError, DeadlineExceeded) as error:
            logger.warning("devslurm %s: %s; its nodes are killed all the same", self._layout.folder, error)

    def _kill_everything(self) -> None:
        self._processes.kill(f"all processes of devslurm {self._layout.folder}", self._processes.of_cluster)
        for name in self._processes.recorded():
            self._processes.forget(name)

    def _remove_outside(self) -> None:
        if self._layout.sockets_outside and self._layout.socket_dir.exists():
            self._check_socket_dir()
            shutil.rmtree(self._layout.socket_dir)

    # ---- questions

    def _running(self) -> bool:
        return any(self._processes.find(name) is not None for name in self._processes.recorded())

    def _controller_answers(self) -> bool:
        if self._processes.find("slurmctld") is None or self._processes.find("munged") is None:
            return False
        try:
            return "is UP" in self._client("scontrol", "ping")
        except SchedulerError:
            return False

    def _node_states(self) -> dict[str, str]:
        lines = self._client("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {name: state for name, state in (line.split() for line in lines)}

    def _num_jobs(self) -> int:
        return len(self._client("squeue", "--noheader", "--array", "--format=%i").splitlines())

    def _client(self, name: str, *arguments: str) -> str:
        """Runs a Slurm client and returns its output. Raises SchedulerError."""
        command = [_require(name), *arguments]
        try:
            done = subprocess.run(command, env=self._daemon_env(), capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise SchedulerError(f"{' '.join(command)}: no answer in {CLIENT_TIMEOUT_S:.0f} s", transient=True) from error
        if done.returncode != 0:
            raise SchedulerError(f"{' '.join(command)} failed with {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def _daemon_env(self) -> dict[str, str]:
        """The caller's environment without Slurm's settings of another cluster or of a job around us."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH_", "SQUEUE_", "SINFO_"))
        }
        return kept | {"PATH": _search_path(), "LC_ALL": "C"} | self.env()

    def _tail(self, name: str) -> str:
        return tail(self._layout.output(name))


def _usable(state: str) -> bool:
    """Whether sinfo's word means that the node answers and takes jobs; `*` marks one that does not answer."""
    return "*" not in state and re.match("idle|mixed|allocated|completing", state) is not None


def _set_aside(state: str) -> bool:
    """Whether the node answers but Slurm or somebody took it out of use."""
    return "*" not in state and re.match("down|drain|fail|inval", state) is not None


def _require(name: str) -> str:
    path = _binary(name)
    if path is None:
        raise SchedulerError(slurm_available() or f"{name} not found in {_search_path()}")
    return path


def _hostname() -> str:
    return socket.gethostname().partition(".")[0]


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise SchedulerError(f"user id {os.getuid()} has no name in the user database, which Slurm needs") from error


def _slurm_version() -> tuple[int, ...]:
    """For example (22, 5), from `slurm-wlm 22.05.8`."""
    text = subprocess.run([_require("slurmctld"), "-V"], capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S).stdout
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None:
        raise SchedulerError(f"slurmctld -V says {text!r}: no version in it")
    return int(found[1]), int(found[2])


def _listens(address: tuple[str, int] | Path) -> bool:
    """Whether something accepts connections there."""
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        return client.connect_ex(str(address) if isinstance(address, Path) else address) == 0
