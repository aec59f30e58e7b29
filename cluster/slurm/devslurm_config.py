"""Where a throw-away Slurm cluster keeps its files, and the text of its configuration.

Invariants: everything lies below one folder, except the sockets of a folder too deep for them (SocketDir); one Shape
gives one configuration text. Pure but for `find_port_block`. Failure: SchedulerError that names the folder or ports.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.errors import SchedulerError

NUM_GPUS_PER_NODE = 4
MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes with the closing zero."""
LONGEST_STEP_SOCKET = "/n999_4294967295.4294967295.4294967295"
"""slurmstepd listens on SPOOL/NODE_JOB.STEP[.COMPONENT]; the batch step is number 4294967291."""
PORT_RANGE = (10_000, 32_000)
"""Below the ports that the kernel gives to outgoing connections: a dead node's port stays free until its return."""

SLURM_CONF = """\
ClusterName=devslurm
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# The lifetime of a credential is also the wait before a requeued job may start.
AuthInfo=socket={munge_socket},cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny

StateSaveLocation={state_dir}
SlurmdSpoolDir={spool_dir}/%n
SlurmctldPidFile={pid_dir}/slurmctld.pid
SlurmdPidFile={pid_dir}/slurmd-%n.pid
SlurmctldLogFile={log_dir}/slurmctld.log
SlurmdLogFile={log_dir}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true

# A dead node is noticed after about 6 s. An answer of a node that was called dead by mistake brings it back.
SlurmdTimeout=2
MessageTimeout=2
TCPTimeout=1
ReturnToService=1
KillWait=5
# Ended jobs stay visible to squeue for a day: there is no accounting.
MinJobAge=86400
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
DefMemPerCPU=1000

# The nodes are virtual: their sum may exceed the machine.
SlurmdParameters=config_overrides
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP
PartitionName=rollout Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=learner PriorityTier=10 PreemptMode=OFF
PartitionName=grader PriorityTier=10 PreemptMode=OFF
PartitionName=orchestrator PriorityTier=10 PreemptMode=OFF
PartitionName=spot PriorityTier=1 PreemptMode=REQUEUE GraceTime={spot_grace_s}
"""
NODE_LINE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=256000"
    " Gres=gpu:{gpus} State=UNKNOWN"
)
SPOT_GRACE_S = 10


@dataclass(frozen=True)
class Shape:
    """Size and ports of a cluster, remembered in its folder. `host` is the machine whose process ids are recorded."""

    num_nodes: int
    cpus_per_node: int
    base_port: int
    """slurmctld listens here, node i (from 1) on base_port + i."""
    host: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names: n1, n2, ..."""
        return tuple(f"n{i}" for i in range(1, self.num_nodes + 1))


class Layout:
    """Every path of one cluster. Raises SchedulerError for a folder name that Slurm's configuration cannot hold."""

    def __init__(self, folder: Path, uid: int) -> None:
        self.folder = folder.absolute()
        if not re.fullmatch(r"[A-Za-z0-9_./+@-]+", str(self.folder)):
            raise SchedulerError(
                f"devslurm folder {str(self.folder)!r}: a Slurm configuration holds only letters, digits and _ . / + @ - "
                "in a path; choose another folder"
            )
        self.uid = uid
        self.slurm_conf = self.folder / "slurm.conf"
        self.gres_conf = self.folder / "gres.conf"
        self.cgroup_conf = self.folder / "cgroup.conf"
        self.shape = self.folder / "cluster.json"
        self.hosts = self.folder / "hosts"
        self.log_dir = self.folder / "log"
        self.state_dir = self.folder / "state"
        self.pid_dir = self.folder / "pid"
        self.process_dir = self.folder / "processes"
        self.gpu_dir = self.folder / "gpu"
        self.munge_dir = self.folder / "munge"
        self.munge_key = self.munge_dir / "key"
        self.socket_dir = self._socket_dir()
        self.munge_socket = self.socket_dir / "munge.sock"
        self.spool_dir = self.socket_dir / "spool"

    def _socket_dir(self) -> Path:
        """FOLDER/run, or a short folder below /tmp where a socket's path would not fit."""
        inside = self.folder / "run"
        if len(str(inside)) + len("/spool/n999") + len(LONGEST_STEP_SOCKET) <= MAX_SOCKET_PATH_BYTES:
            return inside
        digest = hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]
        return Path("/tmp") / f"miles-devslurm-{self.uid}-{digest}"

    @property
    def sockets_outside(self) -> bool:
        """Whether the sockets lie outside the folder because its path is too long."""
        return self.folder not in self.socket_dir.parents

    def log(self, name: str) -> Path:
        """The log of `munged`, `slurmctld` or of a node."""
        return self.log_dir / (f"slurmd-{name}.log" if re.fullmatch(r"n\d+", name) else f"{name}.log")

    def output(self, name: str) -> Path:
        """What the process wrote to stdout and stderr, above all when it did not get as far as its log."""
        return self.log_dir / f"{name}.out"

    def private_dirs(self) -> tuple[Path, ...]:
        """All folders that must exist, mode 0700, before a daemon starts."""
        inside = (self.log_dir, self.state_dir, self.pid_dir, self.process_dir, self.gpu_dir, self.munge_dir)
        return (*inside, self.socket_dir, self.spool_dir)


def slurm_conf(layout: Layout, shape: Shape, user: str) -> str:
    """The text of slurm.conf."""
    nodes = (
        NODE_LINE.format(name=name, host=shape.host, port=shape.base_port + i, cpus=shape.cpus_per_node, gpus=NUM_GPUS_PER_NODE)
        for i, name in enumerate(shape.nodes, start=1)
    )
    return SLURM_CONF.format(
        host=shape.host,
        controller_port=shape.base_port,
        user=user,
        munge_socket=layout.munge_socket,
        state_dir=layout.state_dir,
        spool_dir=layout.spool_dir,
        pid_dir=layout.pid_dir,
        log_dir=layout.log_dir,
        nodes="\n".join(nodes),
        spot_grace_s=SPOT_GRACE_S,
    )


def gres_conf(layout: Layout, shape: Shape) -> str:
    """The text of gres.conf. slurmd wants a device per GPU and no device twice, which symlinks to /dev/null satisfy."""
    return f"AutoDetect=off\nNodeName=n[1-{shape.num_nodes}] Name=gpu File={layout.gpu_dir}/gpu[0-{NUM_GPUS_PER_NODE - 1}]\n"


def cgroup_conf(slurm_version: tuple[int, ...]) -> str:
    """The text of cgroup.conf. Nothing here uses cgroups, but a slurmd that detects them by itself may refuse to start
    ("Hybrid mode is not supported"); the v1 plugin does not look, and newer versions have a switch."""
    return "CgroupPlugin=disabled\n" if slurm_version >= (24, 5) else "CgroupPlugin=cgroup/v1\n"


def hosts_file(machine_hosts: str, shape: Shape) -> str:
    """/etc/hosts inside the nodes: the machine's own with the node names added, as jobs look up their own hostname."""
    return f"{machine_hosts.rstrip()}\n127.0.0.1 {' '.join(shape.nodes)}\n"


def read_shape(layout: Layout) -> Shape | None:
    """The remembered shape, or None where no cluster was made yet. Raises SchedulerError for an unreadable one."""
    if not layout.shape.exists():
        return None
    try:
        return Shape(**json.loads(layout.shape.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise SchedulerError(f"{layout.shape} is not a devslurm shape ({error}); remove the folder {layout.folder}") from error


def write_shape(layout: Layout, shape: Shape) -> None:
    """Remembers the shape in the folder."""
    layout.shape.write_text(json.dumps(asdict(shape)) + "\n")


def ports_free(base_port: int, num_ports: int) -> bool:
    """Whether all ports from base_port on can be listened on now."""
    listeners = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(num_ports)]
    try:
        for i, listener in enumerate(listeners):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("0.0.0.0", base_port + i))
            listener.listen(1)
    except OSError:
        return False
    finally:
        for listener in listeners:
            listener.close()
    return True


def find_port_block(num_ports: int) -> int:
    """The first of num_ports neighbouring free ports, at a random place so that clusters started at once rarely meet."""
    for _ in range(100):
        base_port = random.randrange(PORT_RANGE[0], PORT_RANGE[1] - num_ports)
        if ports_free(base_port, num_ports):
            return base_port
    raise SchedulerError(
        f"no {num_ports} neighbouring free TCP ports found between {PORT_RANGE[0]} and {PORT_RANGE[1]} in 100 tries; "
        "stop other clusters (miles devslurm down) or ask for fewer nodes"
    )
