"""When a node ends for whatever reason, the other nodes end with a message of one sentence, and none hangs."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchtune_adaptive.training import nodes
from torchtune_adaptive.training.nodes import NodeWatch, watch_nodes

LONGEST_WAIT_S = 60.0
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short intervals, but enough looks that a stalled thread is not gone; the handler of SIGTERM is restored."""
    for name in ("_LOOK_S", "_GRACE_S", "_NEWS_S"):
        monkeypatch.setattr(nodes, name, 0.01)
    for name in ("_GONE_LOOKS", "_START_LOOKS"):
        monkeypatch.setattr(nodes, name, 6000)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is gone after three looks without a beat, or six without its first. For looks of the test alone."""
    monkeypatch.setattr(nodes, "_GONE_LOOKS", 3)
    monkeypatch.setattr(nodes, "_START_LOOKS", 6)


class Node:
    """The watch of one node, and the sentence with which it ends the node."""

    def __init__(self, store: Store, node: int, *, of: int = 2) -> None:
        self.store = store
        self.ended = threading.Event()
        self.sentence = ""
        self.launcher_ended = False
        self.watch = NodeWatch(node, of, store=lambda: store, say=self._say, leave=self._leave)

    def _say(self, sentence: str) -> None:
        self.sentence = sentence

    def _leave(self, *, with_launcher: bool = False) -> None:
        self.launcher_ended = with_launcher
        self.ended.set()

    def said(self) -> str:
        assert self.ended.wait(LONGEST_WAIT_S)
        return self.sentence

    def look(self) -> str:
        return self.watch._look(self.store)


def several(number: int) -> list[Node]:
    """That many nodes with one store."""
    store = HashStore()
    return [Node(store, node, of=number) for node in range(number)]


def test_a_node_that_fails_is_quoted_by_all_others() -> None:
    first, second, third = several(3)
    for node in (first, second, third):
        node.watch.start()
    second.watch.close("`margin` is wrong.")
    words = f"node 1 ({HOST}) has ended the run: `margin` is wrong."
    assert (first.said(), third.said()) == (words, words)
    assert second.sentence == ""


GONE = "node 1 is gone; its own output says why."


@pytest.mark.parametrize(
    ("beats", "said"),
    [([0], ["", "", "", GONE]), ([], ["", "", "", "", "", GONE]), ([0, 3, 6, 9], [""] * 12)],
    ids=["no longer", "never: it may take longer to start", "slowly"],
)
def test_a_node_that_does_not_beat_is_gone(beats: list[int], said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_soon(monkeypatch)
    first, second = several(2)
    for look, sentence in enumerate(said):
        if look in beats:
            second.look()
        assert first.look() == sentence


def test_each_node_watches_the_next_one_that_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = several(3)
    third.look()
    second.watch.start()
    second.watch.close(None)
    give_up_soon(monkeypatch)
    first.store.set("name/2", "node 2 (there)")
    assert [first.look() for _ in range(4)][-1] == "node 2 (there) is gone; its own output says why."


def test_of_several_reasons_the_first_is_told() -> None:
    """The others are its consequences."""
    first, second = several(2)
    store = first.store
    assert nodes._tell_all(store, "a full disk.") == "a full disk."
    assert nodes._is_gone(store, 1) == "a full disk."
    assert (first.look(), second.look()) == ("a full disk.", "a full disk.")


def test_after_a_complete_run_no_node_is_reported_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = several(2)
    second.watch.start()
    second.watch.close(None)
    give_up_soon(monkeypatch)
    assert [first.look() for _ in range(10)] == [""] * 10


def test_nodes_that_refuse_the_same_value_each_say_it_themselves() -> None:
    first, second = several(2)
    refusing = threading.Thread(target=first.watch.close, args=("`margin` is wrong.",))
    refusing.start()
    second.watch.close("`margin` is wrong.")
    refusing.join(LONGEST_WAIT_S)
    assert not refusing.is_alive()
    assert (first.sentence, second.sentence) == ("", "")


def test_a_node_that_fails_stays_until_the_others_have_heard_it() -> None:
    first, second = several(2)
    failing = threading.Thread(target=first.watch.close, args=("a full disk.",))
    failing.start()
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not first.store.add("over/0", 0):  # it has not told its reason yet; `wait` would miss it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    failing.join(0.1)
    assert failing.is_alive()
    second.watch.start()
    failing.join(LONGEST_WAIT_S)
    assert not failing.is_alive()
    assert second.said() == f"node 0 ({HOST}) has ended the run: a full disk."


def test_an_error_that_another_rank_of_a_node_reports_ends_all_nodes() -> None:
    store = HashStore()
    first, second = Node(store, 0), Node(store, 1)
    first.watch.start()
    second.watch.start()
    other_rank = Node(store, 1)
    other_rank.watch.close(None)  # says nothing for its node
    assert first.store.add("over/1", 0) == 0
    other_rank.watch.close("a bug.")
    assert first.said() == second.said() == f"node 1 ({HOST}) has ended the run: a bug."


def test_before_an_error_is_shown_the_node_that_is_its_cause_is_named() -> None:
    first, second = several(2)
    second.look()
    first.watch.wait_for_news()
    assert first.sentence == "node 1 is gone; its own output says why."
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_node_that_has_lost_one_of_its_ranks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than the error of the collective that the rank has left."""
    first, second = several(2)
    monkeypatch.setattr(nodes, "_lacks_a_rank", lambda: True)
    monkeypatch.setattr(nodes, "_LONGEST_CLOSE_S", 0.5)  # node 0 looks later
    second.watch.wait_for_news()
    assert first.look() == second.sentence == f"node 1 ({HOST}) has lost a process; its own output says why."


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_are_counted_below_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        running = len(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(running))
        assert not nodes._lacks_a_rank()
        child.kill()
        child.wait()
        assert nodes._lacks_a_rank()


def test_an_error_of_its_own_has_no_other_cause() -> None:
    first, second = several(2)
    first.watch.wait_for_news()  # node 1 has not started
    second.watch.start()
    second.watch.close(None)
    first.watch.wait_for_news()
    assert first.sentence == ""


def test_an_error_after_the_loss_of_the_store_is_explained_by_it() -> None:
    def connect() -> Store:
        raise ConnectionRefusedError

    ended: list[str] = []
    NodeWatch(1, 2, store=connect, say=ended.append, leave=lambda: None).wait_for_news()
    assert ended == ["the launcher of node 0 is gone; its own output says why."]


def test_a_store_that_never_answers_delays_an_ending_node_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_LONGEST_CLOSE_S", 0.0)
    never = threading.Event()

    def connect() -> Store:
        never.wait()
        raise ConnectionRefusedError

    watch = NodeWatch(1, 2, store=connect, say=lambda sentence: None, leave=lambda: None)
    watch.wait_for_news()
    watch.close("a bug.")
    never.set()


def test_after_the_loss_of_the_store_a_run_has_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks save and end, if only the launcher was killed."""
    saves, (launcher, connection) = several(2)[0], socket.socketpair()
    saves.watch.follow(connection)
    launcher.close()
    saves.watch.close(None)
    monkeypatch.setattr(nodes, "_LONGEST_SAVE_S", 0.01)
    hangs, (launcher, connection) = several(2)[0], socket.socketpair()
    hangs.watch.follow(connection)
    launcher.close()
    assert hangs.said() == "the launcher of node 0 is gone; its own output says why."
    assert not hangs.launcher_ended  # it ends by itself
    assert saves.sentence == ""


def test_a_machine_that_cannot_be_reached_ends_the_others_and_their_launchers_at_once() -> None:
    """A launcher would wait for its store, without a timeout."""

    class Silent(socket.socket):
        def recv(self, size: int) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise TimeoutError  # as the system does, seen in a network without its link

    first = several(2)[0]
    first.watch.follow(Silent())
    assert first.said() == "node 0 does not answer: its machine or the network has failed."
    assert first.launcher_ended


# ---- torchrun's store


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the environment variables that torchrun gives to a rank, with a store for the test; no process ends."""
    monkeypatch.setattr(nodes, "_leave", lambda: None)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def give(**changes: str) -> None:
        given = {"GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "7"}
        for name, value in (given | changes).items():
            monkeypatch.setenv(name, value)

    return give


def test_nodes_find_each_other_by_torchruns_store(torchrun: Callable[..., None]) -> None:
    said: list[str] = []
    told = threading.Event()
    torchrun(GROUP_RANK="1")
    second = watch_nodes(said.append)
    torchrun(GROUP_RANK="0")
    first = watch_nodes(lambda sentence: (said.append(sentence), told.set()))
    second.close("a bug.")
    assert told.wait(LONGEST_WAIT_S)
    assert said == [f"node 1 ({HOST}) has ended the run: a bug."]
    first.close(None)


def test_a_restart_does_not_read_why_the_last_one_ended(torchrun: Callable[..., None]) -> None:
    torchrun(GROUP_RANK="1")
    nodes._torchrun_store().set("reason", "a bug.")
    assert nodes._reason(nodes._torchrun_store()) == "a bug."
    torchrun(GROUP_RANK="1", TORCHELASTIC_RESTART_COUNT="1")
    assert nodes._reason(nodes._torchrun_store()) == ""


def test_a_node_ends_when_the_node_with_torchruns_store_is_gone(torchrun: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended: list[str] = []
    torchrun(GROUP_RANK="1", MASTER_PORT=str(port))
    watch_nodes(ended.append)
    assert ended == ["the launcher of node 0 is gone; its own output says why."]


@pytest.mark.parametrize(
    ("changes", "started"),
    [({"GROUP_WORLD_SIZE": "1"}, 0), ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, 0), ({"LOCAL_RANK": "1"}, 1), ({}, 2)],
)
def test_the_first_rank_of_a_node_watches_others_and_all_ranks_the_store(
    torchrun: Callable[..., None], monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], started: int
) -> None:
    names: list[str] = []

    def in_background(function: Callable[..., None], connection: Any) -> None:
        names.append(function.__name__)
        if isinstance(connection, socket.socket):
            connection.close()

    monkeypatch.setattr(nodes, "_in_background", in_background)
    torchrun(**({"GROUP_RANK": "1"} | changes))
    watch_nodes(lambda sentence: None)
    assert names == ["_watch", "_follow"][2 - started :]


def test_the_system_closes_the_connection_to_a_silent_machine_within_30_seconds(torchrun: Callable[..., None]) -> None:
    torchrun(GROUP_RANK="1")
    with closing(nodes._connection()) as link:
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
    assert idle + interval * count <= 30
