"""An emulated network of a Machine: network namespaces joined by virtual wires of limited rates.

    with Fabric(emulated(machine("mesh8"), link_mbit=50)) as net:
        net.launch(fn, *args)          # fn(rank, group, *args) on gloo ranks inside it

Every namespace belongs to a shell that ends when this process does, however it ends, and the operating
system removes a namespace with its last process: nothing can be left behind. `up` gives the namespaces
names, which outlive the process; `down` removes every namespace with such a name.

Needs Linux, iproute2 and either root or user namespaces. Shapes bytes, not latency.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from subprocess import Popen
from typing import Any

from ...errors import FabricError
from ...machines.machine import Machine
from ...runtime.launch import launch
from .wiring import MTU, Wire, address, shape, wiring

PREFIX = "taspfab-"
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
# The queues are long and lose nothing: a sender need not probe for its rate, start slowly after a pause, or
# send again what only waits in a queue.
ROUTE = "initcwnd 500 initrwnd 500 rto_min 30s"
TUNING = {
    "tcp_early_retrans": "0",
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
    "tcp_rmem": "4096 16777216 33554432",
    "tcp_wmem": "4096 4194304 16777216",
}


class Fabric:
    """The machine's network, from entering to leaving the `with` block.

    Raises:
        FabricError: no rights or tools for it. TopologyError: a machine that cannot be built.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.plan = machine, wiring(machine)
        if reason := missing():
            raise FabricError(reason)
        self.spaces: dict[int | str, Namespace] = {}

    def __enter__(self) -> Fabric:
        try:
            for name in (*range(self.machine.ranks), *self.plan.hubs):
                self.spaces[name] = Namespace()
                self.spaces[name].tune()
            self._join()
            for rank in range(self.machine.ranks):
                self._configure(rank)
            for hub in self.plan.hubs:
                self._bridge(hub)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in self.spaces.values():
            space.close()
        self.spaces.clear()

    def _join(self) -> None:
        """Create every wire, with each end in its namespace."""
        lines = []
        for wire in self.plan.wires:
            (near, far), a, b = wire.names, *(self.spaces[x].shell.pid for x in (wire.a, wire.b))
            lines.append(
                f"link add {near} mtu {MTU} netns {a} type veth peer name {far} mtu {MTU} netns {b}"
            )
        self.spaces[0].run(("ip", lines))

    def _ends(self, space: int | str) -> list[tuple[str, float]]:
        """A namespace's interfaces and the rates at which they send."""
        wires: list[Wire] = [w for w in self.plan.wires if space in (w.a, w.b)]
        return [
            (w.names[0], w.out_mbit) if w.a == space else (w.names[1], w.in_mbit) for w in wires
        ]

    def _configure(self, rank: int) -> None:
        """A rank's addresses, routes and rates.

        127.0.0.1 is removed, so that gloo takes the address that others reach.
        """
        ends, own, via = self._ends(rank), address(rank), self.plan.via[rank]
        routes = [
            f"route add {address(peer)} dev {name} scope link src {own} {ROUTE}"
            for peer, name in via.items()
        ]
        setup = ["link set lo up", "addr del 127.0.0.1/8 dev lo", f"addr add {own}/32 dev lo"]
        ups = [f"link set {name} up" for name, _ in ends]
        beyond = {
            name: [peer for peer, interface in via.items() if interface == name] for name, _ in ends
        }
        shapes = [shape(name, mbit, "dst", beyond[name]) for name, mbit in ends]
        self.spaces[rank].run(("ip", [*setup, *ups, *routes]), ("tc", [*chain(*shapes)]))

    def _bridge(self, hub: str) -> None:
        """A hub's bridge, and the rates at which it sends to each rank."""
        ends, wires = self._ends(hub), [w for w in self.plan.wires if w.b == hub]
        setup = [f"link add hub mtu {MTU} type bridge", "link set hub up"]
        ups = [f"link set {name} master hub up" for name, _ in ends]
        senders = {name: [w.a for w in wires if w.names[1] != name] for name, _ in ends}
        shapes = [shape(name, mbit, "src", senders[name]) for name, mbit in ends]
        self.spaces[hub].run(("ip", [*setup, *ups]), ("tc", [*chain(*shapes)]))

    def enter(self, rank: int) -> None:
        """Move this process, which must not have threads yet, into a rank's namespace.

        From then on it is killed when its parent ends.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with open(self.spaces[rank].path) as space:
            moved = libc.setns(space.fileno(), CLONE_NEWNET)
        if moved or libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
            raise FabricError(f"rank {rank} cannot enter: {os.strerror(ctypes.get_errno())}")

    def launch(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """`tasp_core.launch` with every rank inside its namespace."""
        return launch(fn, self.machine.ranks, *args, timeout_s=timeout_s, enter=self.enter)

    def run(self, command: Sequence[str], timeout_s: float) -> list[int]:
        """Run a command on every rank, with torchrun's variables; exit codes by rank (negative: signals).

        When one fails, or at the time-out, all are ended.
        """
        shared = {
            "WORLD_SIZE": self.machine.ranks,
            "LOCAL_WORLD_SIZE": self.machine.node_size,
            "MASTER_ADDR": address(0),
            "MASTER_PORT": 29500,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": 1,
        }
        ranks = []
        for rank in range(self.machine.ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank % self.machine.node_size, **shared}
            env = os.environ | {key: str(value) for key, value in own.items()}
            ranks.append(Popen(command, env=env, preexec_fn=partial(self.enter, rank)))
        deadline = time.monotonic() + timeout_s
        try:
            while None in (codes := [p.poll() for p in ranks]) and not any(codes):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for process in ranks:
                process.kill()
        return [process.wait() for process in ranks]

    def name(self) -> list[str]:
        """Give the namespaces names under which `ip netns` finds them, until `down`.

        Raises:
            FabricError: naming needs root.
        """
        names = {
            f"{PREFIX}{x if isinstance(x, str) else f'r{x}'}": s for x, s in self.spaces.items()
        }
        try:
            for name, space in names.items():
                _ip("netns", "attach", name, str(space.shell.pid))
        except FabricError:
            down()
            raise
        return list(names)


class Namespace:
    """A network namespace without a name; the shell inside ends with this process."""

    def __init__(self) -> None:
        self.shell = Popen(
            ["unshare", "--net", "sh"],
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.path = f"/proc/{self.shell.pid}/ns/net"

    def run(self, *batches: tuple[str, list[str]]) -> None:
        """Run `ip` or `tc` inside, each once for a batch of lines: ("ip", ["link set lo up"]).

        Raises:
            FabricError: with the output of the first command that failed.
        """
        assert self.shell.stdin
        assert self.shell.stdout
        script = "".join(
            f"{tool} -batch - <<'E' &&\n" + "\n".join(x) + "\nE\n" for tool, x in batches
        )
        output = []
        try:
            self.shell.stdin.write(f"{script}true; echo =$?\n")
            while (line := self.shell.stdout.readline()) and not line.startswith("="):
                output.append(line.strip())
        except BrokenPipeError:
            line = ""
        if line != "=0\n":
            raise FabricError(
                f"the emulated network could not be built: {'; '.join(output[:2]) or 'refused'}"
            )

    def tune(self) -> None:
        """Apply TUNING inside."""
        lines = "".join(f"echo {v} >/proc/sys/net/ipv4/{k}\n" for k, v in TUNING.items())
        assert self.shell.stdin
        self.shell.stdin.write(lines)
        self.run()

    def close(self) -> None:
        """End the shell; the namespace goes with its last process."""
        self.shell.kill()
        self.shell.communicate()


def missing(*, rootless: bool = False) -> str:
    """Why no network can be built here, in one sentence; "" if one can."""
    tools = [name for name in ("ip", "tc", "unshare", "sh") if shutil.which(name) is None]
    if tools or sys.platform != "linux":
        needs = ", ".join(tools) or "network namespaces"
        return f"the emulated network needs Linux with {needs} (Debian: iproute2, util-linux)"
    user = ["--user", "--map-root-user"] if rootless else []
    attempt = subprocess.run(["unshare", *user, "--net", "true"], capture_output=True, timeout=30)
    if attempt.returncode == 0:
        return ""
    return "the emulated network needs root, or user namespaces, which this system refuses"


def enter_rootless(arguments: Sequence[str]) -> None:
    """If this process may not make namespaces, start its command again inside a user namespace that may.

    Raises:
        FabricError: user namespaces are refused, too, or tools are missing.
    """
    if not missing():
        return
    if reason := missing(rootless=True):
        raise FabricError(reason)
    inside = [sys.executable, "-m", "tasp_core", *arguments]
    os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--net", *inside])


def down() -> list[str]:
    """Remove every namespace that `up` named, and end what still runs inside; the names."""
    names = named()
    for name in names:
        for pid in _ip("netns", "pids", name).split():
            os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)
    return names


def named() -> list[str]:
    """Names of namespaces that an earlier `up` left."""
    lines = _ip("netns", "list").splitlines()
    names = (line.split()[0] for line in lines if line.strip())
    return [name for name in names if name.startswith(PREFIX)]


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise FabricError(f"ip {' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout
