"""Several nodes: when one ends, the others end too, so that none waits for it.

torchrun ends the ranks of its own node only. Without this module the other nodes would wait in their next collective
until it times out, which takes ten to thirty minutes.

Nodes tell each other how they are by keys in torchrun's own store, which the launcher of node 0 has. Nothing here
listens on a port.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public

_LOOK_S = 0.5
# Counted in looks of this process: a job that the scheduler has suspended for an hour has not looked.
_GONE_LOOKS = 60  # 30 s without a beat
_START_LOOKS = 1200  # 10 minutes without a first beat: torchrun has started all nodes, but imports take their time
_NEWS_S = 2.5  # twice, after an error: for a node to say that it is the cause, or to miss some beats
_GRACE_S = 1.0  # for this node to end by itself, with its own error
_LONGEST_CLOSE_S = 60.0  # for the other nodes to hear why this one ends
_LONGEST_SAVE_S = 600.0  # for a run to finish its step and save when torchrun's store is gone
_STORE_TIMEOUT = timedelta(seconds=5)  # to connect; a launcher may end meanwhile
# A machine that is gone sends nothing: the system asks it after 10 s of silence, and gives it up 20 s later.
_KEEPALIVE_S = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_STORE_LOST = "the launcher of node 0 is gone; its own output says why."
_UNREACHABLE = "node 0 does not answer: its machine or the network has failed."


class NodeWatch:
    """Ends this process with a sentence when another node of the run ends before this one does.

    The first rank of each node beats and looks: it raises its node's counter, reads why another node has ended, and
    watches the counter of the next node. All ranks end where the store's machine can no longer be reached.

    Args:
        node, nodes: this node's number, and how many there are; the watch of one node does nothing.
        store: connects to a store that all nodes share.
        say: prints why this process ends.
        leave: ends the process, from any thread.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        *,
        store: Callable[[], Store],
        say: Callable[[str], object],
        leave: Callable[..., object],
    ) -> None:
        self._node = node
        self._others = [(node + distance) % nodes for distance in range(1, nodes)]
        self._name = f"node {node} ({socket.gethostname()})"
        self._store = store
        self._say = say
        self._leave = leave
        self._ends = threading.Event()
        self._beats = False
        self._has_lost_store = False
        self._beat_seen = 0  # the last one of the node that is watched
        self._looks_without = 0  # a change of it

    def start(self) -> None:
        """Beat and look, in a thread."""
        store = self._store()
        store.set(f"name/{self._node}", self._name)
        self._beats = True
        _in_background(self._watch, store)

    def follow(self, connection: socket.socket) -> None:
        """Notice, in a thread, that torchrun's store is gone; ``connection`` is one to it, on which nobody speaks."""
        _in_background(self._follow, connection)

    def close(self, reason: str | None) -> None:
        """Say that this node ends: None if its run is complete, else why.

        With a reason it returns when the other nodes have ended too, or are about to: the launchers end all ranks,
        before these can print a sentence, when the one that they have met at is gone.
        """
        self._ends.set()
        if self._others and not self._has_lost_store and (self._beats or reason is not None):
            _within(_LONGEST_CLOSE_S, lambda: self._tell(reason))

    def wait_for_news(self) -> None:
        """Call before an error is shown: where another node's end is its cause, the process ends with that sentence.

        Only in the main thread. A launcher whose rendezvous is gone could otherwise end the process without a word.
        """
        if self._others:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _within(2 * _NEWS_S + _LONGEST_CLOSE_S, self._ask)

    def _watch(self, store: Store) -> None:
        with suppress(dist.DistError):  # which `_follow` notices
            while not self._ends.wait(_LOOK_S) and not self._has_lost_store:
                if not (sentence := self._look(store)):
                    continue
                if not self._ends.wait(_GRACE_S):
                    self._hear(store, sentence)
                return

    def _look(self, store: Store) -> str:
        """Beat, and look once: why this node must end, or ""."""
        store.add(f"beat/{self._node}", 1)
        if reason := _reason(store):
            return reason
        watched = next((other for other in self._others if not store.add(f"over/{other}", 0)), None)
        if watched is None:
            return ""
        beat = store.add(f"beat/{watched}", 0)
        self._looks_without = self._looks_without + 1 if beat == self._beat_seen else 0
        self._beat_seen = beat
        return _is_gone(store, watched) if self._looks_without >= (_GONE_LOOKS if beat else _START_LOOKS) else ""

    def _hear(self, store: Store, sentence: str) -> None:
        """End with ``sentence`` when all nodes have printed it."""
        self._say(sentence)
        with suppress(dist.DistError):
            self._be_over(store, waits=True)
        self._leave()

    def _end(self, sentence: str) -> None:
        self._say(sentence)
        self._leave()

    def _tell(self, reason: str | None) -> None:
        with suppress(OSError, dist.DistError):
            store = self._store()
            if reason is not None:
                _tell_all(store, f"{self._name} has ended the run: {reason}")
            self._be_over(store, waits=reason is not None)

    def _be_over(self, store: Store, *, waits: bool) -> None:
        """Say that this node is over. If it ``waits``, return when all others are; some may not have started yet."""
        store.add(f"over/{self._node}", 1)
        deadline = time.monotonic() + _LONGEST_CLOSE_S
        while waits and time.monotonic() < deadline and not all(store.add(f"over/{one}", 0) for one in self._others):
            time.sleep(_LOOK_S / 2)

    def _ask(self) -> None:
        """End with the sentence of a node that has ended, or that no longer beats, if there is one."""
        try:
            store = self._store()
            if sentence := self._news(store):
                self._hear(store, sentence)
        except (OSError, dist.DistError):
            self._end(_STORE_LOST)

    def _news(self, store: Store) -> str:
        """Why another node, or a process of this one, has ended; "" if none has."""
        beats: dict[int, int] = {}
        for _ in range(2):  # a node that is being ended may beat in the first half
            beats = {other: store.add(f"beat/{other}", 0) for other in self._others}
            deadline = time.monotonic() + _NEWS_S
            while time.monotonic() < deadline:
                if self._has_lost_store:
                    raise ConnectionResetError
                if reason := _reason(store):
                    return reason
                if _lacks_a_rank():
                    return _tell_all(store, f"{self._name} has lost a process; its own output says why.")
                time.sleep(_LOOK_S)
        for other, beat in beats.items():
            if beat and beat == store.add(f"beat/{other}", 0) and not store.add(f"over/{other}", 0):
                return _is_gone(store, other)
        return _reason(store)

    def _follow(self, connection: socket.socket) -> None:
        unreachable = False
        with connection:
            try:
                connection.recv(1)
            except OSError as error:
                unreachable = not isinstance(error, ConnectionResetError)
        self._has_lost_store = True
        if unreachable:
            self._say(_UNREACHABLE)
            self._leave(with_launcher=True)
        # Where only the launcher has ended, the ranks of its node ask all others to save and to end, and this process
        # soon ends by itself. Nobody can say whether they still can.
        elif not self._ends.wait(_LONGEST_SAVE_S):
            self._end(_STORE_LOST)


def watch_nodes(say: Callable[[str], object]) -> NodeWatch:
    """Begin to watch the other nodes of torchrun's launch, if there are some and all can use its store.

    When another node has ended, the process prints why by ``say``, from any thread, and ends with status 1.
    """
    node, nodes = int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("GROUP_WORLD_SIZE", 1))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        node, nodes = 0, 1
    watch = NodeWatch(node, nodes, store=cache(_torchrun_store), say=say, leave=_leave)
    if nodes > 1:
        try:
            if os.environ.get("LOCAL_RANK") == "0":
                watch.start()
            watch.follow(_connection())
        except (OSError, dist.DistError):
            watch._end(_STORE_LOST)
    return watch


def _leave(*, with_launcher: bool = False) -> None:
    """End this process, and torchrun too, which would wait for its store for minutes and not see that its ranks end."""
    if with_launcher:
        os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)  # the main thread may wait for a collective that never completes


def _torchrun_store() -> Store:
    """torchrun's store, which is there before and after the process group, with keys for this start of the ranks."""
    _connection().close()  # where nobody listens, a store would try again, and log C++ stack traces
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    store = TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)
    return PrefixStore(f"torchtune_adaptive/nodes/{start}", store)


def _connection() -> socket.socket:
    """A connection to torchrun's store that the system closes 30 s after the store's machine is gone."""
    link = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10)
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in _KEEPALIVE_S.items():
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return link


def _reason(store: Store) -> str:
    return store.get("reason").decode() if store.check(["reason"]) else ""


def _is_gone(store: Store, node: int) -> str:
    """The sentence for a node that no longer beats, which all nodes then read."""
    name = store.get(f"name/{node}").decode() if store.check([f"name/{node}"]) else f"node {node}"
    sentence = _tell_all(store, f"{name} is gone; its own output says why.")
    store.add(f"over/{node}", 1)  # so that nobody waits for it
    return sentence


def _tell_all(store: Store, sentence: str) -> str:
    """Set the reason why all nodes end, and return it: an earlier one stays."""
    return store.compare_set("reason", "", sentence).decode()


def _lacks_a_rank() -> bool:
    """Whether fewer processes run below the launcher than it has started; False where the system does not say it."""
    launcher = os.getppid()
    with suppress(OSError):
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="utf-8").split()
        return len(children) < int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return False


def _within(longest_s: float, work: Callable[[], object]) -> None:
    """Do ``work``, and return after ``longest_s`` at the latest: a store whose machine is gone never answers."""
    _in_background(work).join(longest_s)


def _in_background(work: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread
