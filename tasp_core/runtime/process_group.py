"""One process in a torch process group: its backends, what is remembered of the group, its errors.

`GroupRank` is this process as a rank of a group; it turns a failure of gloo or NCCL into a
`TransportError` that says who waited for whom. Ranks in its texts are those of the process group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import PlanError, TransportError

REPORT_S = 2.0  # after a failure, how long ranks wait for each other's report of where they are


@dataclass
class GroupState:
    """What this process remembers of a process group, for as long as the group lives.

    Attributes:
        backends: backend by device type; asking torch takes as long as a message.
        control: the gloo group that handshakes use, see `control_group`.
        calls: how many calls (attention, gather, roll, ...) have begun.
        agreed: digests of signatures on which all ranks have agreed, the oldest first.
        later_passes: those of them that are of backward passes; two at most.
        failed_prefixes: tag prefixes of handshakes that failed.
        has_communicator: whether NCCL has made the group's communicator.
        refused_messages: handles and rows of messages that a refused call has posted.
        failures: how many collectives have failed.
    """

    backends: dict[str, str] | None = None
    control: Any = None
    calls: int = 0
    agreed: dict[bytes, None] = field(default_factory=dict)
    later_passes: set[bytes] = field(default_factory=set)
    failed_prefixes: set[int] = field(default_factory=set)
    has_communicator: bool = False
    refused_messages: deque[Any] = field(default_factory=lambda: deque(maxlen=16))
    failures: int = 0


_STATES: WeakKeyDictionary[Any, GroupState] = WeakKeyDictionary()


def state_of(group: Any) -> GroupState:
    """The state of a process group; a new one the first time."""
    if (state := _STATES.get(group)) is None:
        state = _STATES[group] = GroupState()
    return state


def read_backends(config: str) -> dict[str, str]:
    """Each device type's backend, from torch's text of a group's backends.

    >>> read_backends("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return dict(part.split(":", 1) for part in config.lower().split(",") if ":" in part)


def backend_of(group: Any, device_type: str) -> str | None:
    """The backend that carries tensors of a device type in this group, e.g. "nccl"; None: none does.

    A group may have several backends ("cpu:gloo,cuda:nccl"; so has one made without a name), so its
    own name does not tell.
    """
    state = state_of(group)
    if state.backends is None:
        state.backends = read_backends(dist.get_backend_config(group))
    return state.backends.get(device_type)


def over_nccl(group: Any, device_type: str) -> bool:
    """Whether NCCL (or RCCL) carries tensors of this device type in the group."""
    return backend_of(group, device_type) == "nccl"


def carriage_error(group: Any, device: torch.device) -> str:
    """Why tensors of this device cannot travel in the group, or ""."""
    backend = backend_of(group, device.type)
    if backend == {"cpu": "gloo", "cuda": "nccl"}.get(device.type, backend) and backend:
        return ""
    wanted = {"cpu": "'gloo'", "cuda": "'nccl'"}.get(device.type, "its own backend")
    carrier = (
        f"carries {device.type} tensors by {backend}" if backend else "has no backend for them"
    )
    return (
        f"tensors are on {device}, and the process group {carrier}; make the group with backend "
        f"{wanted} or 'cpu:gloo,cuda:nccl'"
    )


def store_of(group: Any) -> Any:
    """The group's own key-value store."""
    get_store = getattr(group, "get_group_store", None)
    return get_store() if get_store else dist.distributed_c10d._get_process_group_store(group)


def control_group(group: Any) -> Any:
    """A gloo group of the same ranks that nobody else uses: handshakes meet handshakes only.

    On the group itself they would meet collectives that its user has under way, which each rank may
    post at another time. Made at the first handshake, with the group's time-out, by its ranks alone.
    """
    state = state_of(group)
    if state.control is None:
        timeout = dist.default_pg_timeout
        for device_type in ("cpu", "cuda"):
            if backend_of(group, device_type) in ("gloo", "nccl"):
                timeout = group._get_backend(torch.device(device_type)).options._timeout
                break
        store = dist.PrefixStore("tasp_handshake", store_of(group))
        state.control = dist.ProcessGroupGloo(
            store, dist.get_rank(group), dist.get_world_size(group), timeout
        )
    return state.control


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> ranks_text([3]), ranks_text([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


class GroupRank:
    """This process as one rank of a process group.

    Args:
        group: a torch.distributed process group; None: the default group.

    Attributes:
        group, rank, size: the group, this process's rank in it, the number of its ranks.
        doing: what this rank is in, e.g. "the forward pass of call 3"; told to ranks that wait for it.

    Raises:
        PlanError: this process is not in the group.
    """

    def __init__(self, group: Any) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise PlanError("this process is not in the group it passed to attention")
        self.doing = "its first exchange"

    @property
    def state(self) -> GroupState:
        return state_of(self.group)

    def failure(
        self, what: str, error: RuntimeError, peers: Sequence[int] = (), *, collective: bool = False
    ) -> TransportError:
        """A failure of gloo or NCCL as an error that says who waited for what.

        A collective's own error names no rank, so the ranks that have failed tell each other.

        Args:
            peers: ranks of the group that were waited for.
        """
        where = ""
        if collective:
            where, peers = self._whereabouts()
        return self.error(
            f"rank {self.rank}, {what} failed; {where}look for that rank's own error first. ",
            error,
            peers,
        )

    def error(self, text: str, error: RuntimeError, peers: Sequence[int]) -> TransportError:
        """A TransportError of `text` and the first line of the backend's own error."""
        return TransportError(
            f"{text}({str(error).splitlines()[0]})",
            peers=[dist.get_global_rank(self.group, r) for r in peers],
        )

    @contextmanager
    def naming(self, t: int, what: str) -> Iterator[None]:
        """A failure of the collective inside is raised as one of step t."""
        try:
            yield
        except RuntimeError as error:
            raise self.failure(f"step {t}: {what}", error, collective=True) from error

    def _whereabouts(self) -> tuple[str, list[int]]:
        """After a failed collective: where ranks say that they are, and the ranks that say nothing."""
        self.state.failures += 1
        turn = self.state.failures
        reports: dict[int, str] = {}
        with suppress(Exception):  # the store may be gone with the rank that held it
            store = store_of(self.group)

            def key(rank: int) -> str:
                return f"tasp_failure/{turn}/{rank}"

            store.set(key(self.rank), self.doing)
            end = time.monotonic() + REPORT_S
            while len(reports) < self.size and time.monotonic() < end:
                for r in range(self.size):
                    if r not in reports and store.check([key(r)]):
                        reports[r] = store.get(key(r)).decode()
                time.sleep(0.05)
        silent = [r for r in range(self.size) if r not in reports]
        places: dict[str, list[int]] = {}
        for r, text in sorted(reports.items()):
            places.setdefault(text, []).append(r)
        parts = [f"{ranks_text(ranks)} in {text}" for text, ranks in places.items()]
        if silent:
            parts.append(f"{ranks_text(silent)} did not take part and reported no failure")
        return f"{'; '.join(parts)}; ", silent
