"""Several nodes: when one ends, the others end too, so that none waits for it.

torchrun ends the ranks of its own node only. Without this module the other nodes would wait in their next collective
until it times out, which takes ten to thirty minutes.
"""

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from torchtune_adaptive.errors import reason_of

log = logging.getLogger(__name__)

# A machine that is gone sends nothing: the system asks it after 10 s of silence, and gives it up 20 s later.
_KEEPALIVE_S = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_LONGEST_START = timedelta(minutes=10)  # from one node's start to the start of the last one
_LONGEST_JOIN_S = 60.0  # for the others to connect: torchrun has started all nodes, but imports take their time
_LONGEST_CLOSE_S = 10.0
_LONGEST_CONNECT_S = 60.0
_GRACE_S = 2.0  # for a node to end by itself, with its own error, or to learn why another one has ended


class NodeWatch:
    """Calls ``end`` with a sentence, in a thread, when another node of the run ends before this one does.

    The first rank of each node has one. Node 0 has a connection to each of the others. The system closes it when either
    process ends, for whatever reason. A node that ends by itself sends a message first, with the reason if it failed.

    Args:
        name: of this node, for sentences.
        run: the same on all nodes; connections from other runs are dropped.
        others: nodes that this one is connected to.
        end: ends the process.
    """

    def __init__(self, name: str, *, run: str, others: int, end: Callable[[str], object]) -> None:
        self._name = name
        self._run = run
        self._others = others
        self._end = end
        self._server: socket.socket | None = None
        self._links: list[socket.socket] = []
        self._silent = 0  # nodes that will send nothing more
        self._changes = threading.Condition()
        self._ends = threading.Event()
        self._has_lost = threading.Event()

    def listen(self) -> int:
        """Accept the other nodes; the port."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        _in_background(self._accept, self._server)
        return self._server.getsockname()[1]

    def join(self, find: Callable[[], tuple[str, int] | None]) -> None:
        """Connect to node 0, whose address ``find`` waits for; None: there is none to be found."""
        _in_background(self._connect, find)

    def close(self, reason: str | None) -> None:
        """Tell the other nodes that this one ends: None if its run is complete, else why.

        With a reason it returns when the others have ended too, or are about to: torchrun ends a node's ranks before
        they can print a sentence when the launcher that all nodes have met at is gone. Then it waits at most a minute
        for nodes that have not connected yet, and ten seconds for those that have.
        """
        self._ends.set()
        longest_s = _LONGEST_CLOSE_S if reason is None else _LONGEST_JOIN_S
        self._wait_for(lambda: len(self._links) >= self._others, longest_s)
        self._tell(None if reason is None else f"{self._name} has ended the run: {reason}")
        if reason is not None:
            self._wait_for(lambda: self._silent >= self._others, _LONGEST_CLOSE_S)
        if self._server is not None:
            self._server.close()

    def wait_for_news(self) -> None:
        """Call before an error is shown: where another node's end is its cause, the process ends with that sentence."""
        if self._has_lost.wait(_GRACE_S):
            threading.Event().wait(2 * _GRACE_S)

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                _in_background(self._follow, server.accept()[0])

    def _connect(self, find: Callable[[], tuple[str, int] | None]) -> None:
        try:
            address = find()
            link = None if address is None else socket.create_connection(address, timeout=_LONGEST_CONNECT_S)
        except TimeoutError as error:  # blocked between the nodes, which ends nobody
            log.warning(f"The end of another node will not be noticed: no connection to node 0: {reason_of(error)}.")
        except (OSError, dist.DistError):
            self._lose("node 0 is gone; its own output says why.")
        else:
            if link is not None:
                self._follow(link)

    def _follow(self, link: socket.socket) -> None:
        """Read what another node says, to its end."""
        _keep_alive(link)
        with link, suppress(OSError), link.makefile() as lines:
            _send(link, {"run": self._run, "name": self._name})
            hello = _message(lines.readline())
            if not isinstance(hello, dict) or hello.get("run") != self._run:
                return
            if "reason" in hello:  # of a `Reporter`
                self._lose(str(hello["reason"]), wait=True)
                lines.readline()  # until one of both processes ends
                return
            with self._changes:
                self._links.append(link)
                self._changes.notify_all()
            line = ""
            with suppress(OSError):
                line = lines.readline()
            with self._changes:
                self._silent += 1
                self._changes.notify_all()
            if not line:
                self._lose(f"{hello['name']} is gone; its own output says why.")
            elif (words := _message(line)) is not None:
                self._lose(str(words), wait=True)

    def _lose(self, sentence: str, *, wait: bool = False) -> None:
        """End, unless this node is ending, or with ``wait`` soon does by itself."""
        self._has_lost.set()
        if not self._ends.wait(_GRACE_S if wait else 0):
            self._tell(sentence)
            self._end(sentence)

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with self._changes:
            self._changes.wait_for(condition, timeout=timeout_s)

    def _tell(self, words: str | None) -> None:
        for link in self._links:
            with suppress(OSError):
                _send(link, words)


class Reporter:
    """Reports why this rank ends to node 0, from a rank that is not its node's first.

    Otherwise torchrun would end the first one before it can pass the reason on.

    Args:
        name: of this node, for sentences.
        run: as in ``NodeWatch``.
        find: waits for node 0's address; None: there is none to be found.
    """

    def __init__(self, name: str, *, run: str, find: Callable[[], tuple[str, int] | None]) -> None:
        self._name = name
        self._run = run
        self._find = find

    def close(self, reason: str | None) -> None:
        """Report ``reason`` unless it is None, and return when node 0 has ended, or after a minute."""
        if reason is None:
            return
        with suppress(OSError, dist.DistError):
            if (address := self._find()) is None:
                return
            with socket.create_connection(address, timeout=_LONGEST_JOIN_S) as link, link.makefile() as lines:
                _send(link, {"run": self._run, "reason": f"{self._name} has ended the run: {reason}"})
                while lines.readline():
                    pass

    def wait_for_news(self) -> None:
        """Call before an error is shown. The launcher ends this process if its node's first rank prints the cause."""
        threading.Event().wait(3 * _GRACE_S)


class NoWatch:
    """In place of the others where there is only one node."""

    def close(self, reason: str | None) -> None: ...

    def wait_for_news(self) -> None: ...


def watch_nodes(end: Callable[[str], object]) -> NodeWatch | Reporter | NoWatch:
    """Begin to watch the other nodes of torchrun's launch, if there are some.

    Only the first rank of a node watches. The others report their own end to node 0.
    """
    node, nodes = int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("GROUP_WORLD_SIZE", 1))
    if nodes == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return NoWatch()
    key = f"torchtune_adaptive/nodes/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    name = f"node {node} ({socket.gethostname()})"
    run = f"{key} {os.environ.get('TORCHELASTIC_RUN_ID')}"
    host = os.environ["MASTER_ADDR"]

    def find_node_zero() -> tuple[str, int] | None:
        with _launch_store() as store:
            try:
                store.wait([key])
            except dist.DistStoreError:  # out of time: node 0 does not watch
                return None
            return host, int(store.get(key))

    if os.environ.get("LOCAL_RANK") != "0":
        return Reporter(name, run=run, find=find_node_zero)
    watch = NodeWatch(name, run=run, others=1 if node else nodes - 1, end=end)
    if node:
        watch.join(find_node_zero)
    else:
        with suppress(OSError, dist.DistError), _launch_store() as store:
            store.set(key, str(watch.listen()))
    return watch


@contextmanager
def _launch_store() -> Iterator[Any]:
    """torchrun's own store, which is there before and after the process group."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Where nobody listens, as when the launcher was killed, a store would try again until its time is over.
    socket.create_connection((host, port), timeout=10).close()
    yield TCPStore(host, port, is_master=False, timeout=_LONGEST_START)


def _in_background(work: Callable[..., object], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _keep_alive(link: socket.socket) -> None:
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in _KEEPALIVE_S.items():
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _send(link: socket.socket, message: object) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def _message(line: str) -> Any:
    with suppress(ValueError):
        return json.loads(line)
    return None
