"""Training on all ranks: rank 0 gives commands, the others do the same at the same time.

RankedTrainer is what the loop drives. Each call is told to the other ranks, done by all of them together (DeepSpeed's
collectives need every rank in every call) and answered by each; with one rank it only passes calls on. Rows go from rank 0 to
the others as one broadcast of a shard's bytes, so only rank 0 reads the run directory; files of a checkpoint are written,
synced and digested by the rank that made them, on its node.

Failure: a call that breaks off leaves the ranks out of step, so the attempt ends (ranks.py). The one exception is a filesystem
that refuses a checkpoint's files: all ranks are through with each other by then, and the call may be repeated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch

from miles_core.errors import MilesError
from miles_core.learner.checkpoints import seal
from miles_core.learner.rank_line import Message
from miles_core.learner.ranks import ANSWER_S, LOOPBACK, Lead, Link, Place
from miles_core.records import FileDigest
from miles_core.runtime.crash import crash_point
from miles_core.store.fs import FileSystem
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import decode_shard, encode_shard

if TYPE_CHECKING:
    from miles_core.learner.trainer import Trainer

log = logging.getLogger("miles")
T = TypeVar("T")

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankedTrainer:
    """The trainer of all ranks, on rank 0. See module."""

    def __init__(self, trainer: Trainer, lead: Lead) -> None:
        self._trainer, self._lead = trainer, lead

    def train(
        self,
        trajectories: Sequence[Trajectory],
        advantages: npt.NDArray[np.floating],
        step: int,
        staleness: int = 0,
        kl_weights: npt.NDArray[np.floating] | None = None,
    ) -> dict[str, float]:
        """As Trainer.train."""
        if not self._lead.is_alone:
            rows = encode_shard(trajectories)
            exact = [float(value) for value in advantages]
            weights = None if kl_weights is None else [float(value) for value in kl_weights]
            self._lead.tell("train", num_bytes=len(rows), advantages=exact, step=step, staleness=staleness, kl_weights=weights)
            _broadcast(rows, len(rows))
        return self._done(self._trainer.train(trajectories, advantages, step, staleness, kl_weights))

    def logprobs(self, token_lists: Sequence[Sequence[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        """As Trainer.logprobs."""
        self._lead.tell("logprobs", token_lists=[list(tokens) for tokens in token_lists], temperature=temperature)
        return self._done(self._trainer.logprobs(token_lists, temperature))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """As Trainer.state_tensors."""
        self._lead.tell("state_tensors")
        return self._done(self._trainer.state_tensors())

    def save(self, folder: Path) -> tuple[FileDigest, ...]:
        """Fills `folder`; returns the files of other ranks, sealed by them. Raises OSError; then it may be called again."""
        self._lead.tell("save", folder=str(folder))
        refusal: OSError | None = None
        try:
            self._trainer.save(folder)
        except OSError as error:
            refusal = error
        answers = self._lead.answers()
        refusals = [refusal, *(OSError(*answer["refused"]) for answer in answers if "refused" in answer)]
        for refused in filter(None, refusals):
            raise refused
        return tuple(FileDigest.model_validate(file) for answer in answers for file in answer["files"])

    def load(self, folder: Path, files: Sequence[FileDigest]) -> None:
        """As Trainer.load."""
        self._lead.tell("load", folder=str(folder), files=[file.model_dump() for file in files])
        self._trainer.load(folder, files)
        self._lead.answers()

    def _done(self, result: T) -> T:
        self._lead.answers()
        return result


def start_ranks(lead: Lead, make: Callable[[str], Trainer]) -> RankedTrainer:
    """All ranks form one process group and load the base model. `make` takes the device."""
    if not lead.is_alone:
        address = lead.address
        lead.tell("start", address=address)
        port, descriptor = lead.give_store()
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, lead.place.ranks, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        _form_group(lead.place, store, address)
    trainer = make(device_of(lead.place))
    if not lead.is_alone:
        lead.answers()
    return RankedTrainer(trainer, lead)


def follow(link: Link, place: Place, attempt: int, make: Callable[[str], Trainer]) -> None:
    """The life of another rank: does what rank 0 says until it says leave."""
    follower = _Follower(link, place, make)
    while (command := link.command())["do"] != "leave":
        crash_point(f"rank{place.rank}", f"before_{command['do']}", command.get("step", 0), attempt)
        try:
            answer = follower.do(command)
        except BaseException as error:
            link.fail(error)
            raise
        link.answer(**answer)


class _Follower:
    def __init__(self, link: Link, place: Place, make: Callable[[str], Trainer]) -> None:
        self._link, self._place, self._make = link, place, make
        self._trainer: Trainer

    def do(self, command: Message) -> Message:
        """Its answer."""
        if command["do"] == "save":
            return self._save(command)
        parts = {
            "start": self._start, "train": self._train, "logprobs": self._logprobs, "state_tensors": self._state_tensors,
            "load": self._load,
        }  # fmt: skip
        parts[command["do"]](command)
        return {}

    def _start(self, command: Message) -> None:
        meeting, is_near = self._link.meeting, self._link.peer_address.startswith("127.")
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            self._link.peer_address, meeting.store_port, self._place.ranks, is_master=False, wait_for_workers=False
        )
        # On rank 0's node the address of this connection is the loopback, by which nodes farther away cannot reach it.
        _form_group(self._place, store, command["address"] if is_near else self._link.own_address)
        self._trainer = self._make(device_of(self._place))

    def _train(self, command: Message) -> None:
        rows = decode_shard(_broadcast(None, command["num_bytes"]), Path("rows of rank 0"))
        weights = None if command["kl_weights"] is None else np.array(command["kl_weights"])
        self._trainer.train(rows, np.array(command["advantages"]), command["step"], command["staleness"], weights)

    def _logprobs(self, command: Message) -> None:
        self._trainer.logprobs(command["token_lists"], command["temperature"])

    def _state_tensors(self, command: Message) -> None:
        self._trainer.state_tensors()

    def _save(self, command: Message) -> Message:
        folder = Path(command["folder"])
        try:
            names = self._trainer.save(folder)
            files = [seal(FileSystem(), folder, name) for name in names]
        except OSError as error:
            return {"refused": [error.errno, f"rank {self._place.rank}: {error.strerror}", error.filename]}
        return {"files": [file.model_dump() for file in files]}

    def _load(self, command: Message) -> None:
        files = [FileDigest.model_validate(file) for file in command["files"]]
        self._trainer.load(Path(command["folder"]), files)


def _broadcast(data: bytes | None, num_bytes: int) -> bytes:
    """Rank 0's bytes, on every rank; the others give None."""
    buffer = torch.frombuffer(bytearray(num_bytes if data is None else data), dtype=torch.uint8)
    torch.distributed.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


def _form_group(place: Place, store: Any, address: str) -> None:
    """Joins the process group, over the interface that has `address` unless the environment names one."""
    interface = interface_of(address)
    for variable in INTERFACE_VARIABLES:
        os.environ.setdefault(variable, interface)
    device = device_of(place)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = device.partition(":")[2] or str(place.local_rank)
    log.info("rank %d of %d: device %s, interface %s", place.rank, place.ranks, device, os.environ[INTERFACE_VARIABLES[0]])
    torch.distributed.init_process_group(
        # CPU tensors (the rows) go over gloo in any case.
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        store=store, rank=place.rank, world_size=place.ranks, timeout=timedelta(seconds=ANSWER_S),
    )  # fmt: skip


def interface_of(address: str) -> str:
    """Name of the network interface that has this IPv4 address. Raises MilesError."""
    interfaces = psutil.net_if_addrs()
    if address.startswith("127."):
        address = LOOPBACK
    for name, addresses in interfaces.items():
        if any(each.address == address for each in addresses):
            return str(name)
    raise MilesError(
        f"no interface of this node has the address {address}, by which rank 0 and this rank see each other (there are "
        f"{', '.join(interfaces)}); name one in slurm.setup: export {INTERFACE_VARIABLES[0]}=..."
    )


def device_of(place: Place) -> str:
    """The GPU of this rank, by its number on the node; `cpu` where there is none. Untested: there was no machine with GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "cpu"
    # A site may show each rank its own GPU alone.
    index = 0 if count == 1 else place.local_rank
    if index >= count:
        raise MilesError(f"local rank {index} finds {count} GPUs on its node; set resources.learner.tasks to gpus")
    return f"cuda:{index}"
