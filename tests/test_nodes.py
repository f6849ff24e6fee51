"""When a node ends for whatever reason, the other nodes end with a message of one sentence, and none hangs."""

import json
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from torchtune_adaptive import nodes
from torchtune_adaptive.nodes import NodeWatch, NoWatch, watch_nodes

LONGEST_WAIT_S = 60.0


class Node:
    """A watch, and the sentence with which it ends its node."""

    def __init__(self, name: str, *, others: int = 1, run: str = "run") -> None:
        self.ended = threading.Event()
        self.sentence = ""
        self.watch = NodeWatch(name, run=run, others=others, end=self._end)

    def _end(self, sentence: str) -> None:
        self.sentence = sentence
        self.ended.set()

    def said(self) -> str:
        assert self.ended.wait(LONGEST_WAIT_S)
        return self.sentence


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_GRACE_S", 0.05)


def connected(number: int) -> list[Node]:
    """That many nodes, node 0 first."""
    first = Node("node 0", others=number - 1)
    port = first.watch.listen()
    rest = [Node(f"node {one}") for one in range(1, number)]
    for one in rest:
        one.watch.join(lambda: ("127.0.0.1", port))
    return [first, *rest]


class BareNode:
    """A process that is connected to node 0, and does only what the test asks for."""

    def __init__(self, port: int, *, run: str = "run") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._lines = self._socket.makefile()
        self.hello = json.loads(self._lines.readline())
        self._socket.sendall(json.dumps({"run": run, "name": "node 1 (host)"}).encode() + b"\n")

    def read(self) -> str:
        return self._lines.readline()

    def vanish(self) -> None:
        self._lines.close()
        self._socket.close()


def test_a_node_that_fails_is_quoted_by_all_others() -> None:
    first, second, third = connected(3)
    second.watch.close("`margin` is wrong.")
    words = "node 1 has ended the run: `margin` is wrong."
    assert (first.said(), third.said()) == (words, words)  # node 2 heard it from node 0
    assert second.sentence == ""


def test_when_node_zero_fails_the_others_end() -> None:
    first, second = connected(2)
    first.watch.close("a full disk.")
    assert second.said() == "node 0 has ended the run: a full disk."


def test_a_node_that_is_killed_is_noticed_at_once() -> None:
    first = Node("node 0")
    BareNode(first.watch.listen()).vanish()
    assert first.said() == "node 1 (host) is gone; its own output says why."


def test_after_a_complete_run_no_node_is_reported_as_gone() -> None:
    first, second = connected(2)
    second.watch.close(None)
    first.watch.close(None)
    assert (first.sentence, second.sentence) == ("", "")


def test_nodes_that_refuse_the_same_value_each_say_it_themselves() -> None:
    first, second = connected(2)
    closing = threading.Thread(target=first.watch.close, args=("`margin` is wrong.",))
    closing.start()
    second.watch.close("`margin` is wrong.")
    closing.join(LONGEST_WAIT_S)
    assert not closing.is_alive()
    assert (first.sentence, second.sentence) == ("", "")


def test_a_node_that_fails_stays_until_the_others_have_heard_it() -> None:
    first = Node("node 0")
    other = BareNode(first.watch.listen())
    closing = threading.Thread(target=first.watch.close, args=("a full disk.",))
    closing.start()
    assert json.loads(other.read()) == "node 0 has ended the run: a full disk."
    closing.join(0.1)
    assert closing.is_alive()
    other.vanish()
    closing.join(LONGEST_WAIT_S)
    assert not closing.is_alive()


def test_a_connection_of_another_run_is_dropped() -> None:
    first = Node("node 0")
    port = first.watch.listen()
    stranger = BareNode(port, run="another run")
    assert stranger.read() == ""
    stranger.vanish()
    BareNode(port).vanish()
    assert first.said() == "node 1 (host) is gone; its own output says why."


def test_before_an_error_is_shown_a_node_waits_for_news_that_another_node_is_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "_GRACE_S", 1.5)
    first = Node("node 0")
    second = BareNode(first.watch.listen())
    threading.Timer(0.1, second.vanish).start()
    first.watch.wait_for_news()
    assert first.ended.is_set()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the environment variables that torchrun gives to a rank, with a store for the test."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def give(**changes: str) -> None:
        given = {"GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "7"}
        for name, value in (given | changes).items():
            monkeypatch.setenv(name, value)

    return give


def test_nodes_find_each_other_by_torchruns_store(environment: Callable[..., None]) -> None:
    ended: dict[str, str] = {}
    told = threading.Event()

    def end(node: str) -> Callable[[str], Any]:
        def note(sentence: str) -> None:
            ended[node] = sentence
            told.set()

        return note

    environment(GROUP_RANK="1")
    second = watch_nodes(end("1"))
    environment(GROUP_RANK="0")
    first = watch_nodes(end("0"))
    second.close("a bug.")
    assert told.wait(LONGEST_WAIT_S)
    assert ended == {"0": f"node 1 ({socket.gethostname()}) has ended the run: a bug."}
    first.close(None)


def test_an_error_that_another_rank_of_a_node_reports_ends_all_nodes(
    environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_LONGEST_CLOSE_S", 0.0)
    ended: dict[str, str] = {}
    told = threading.Event()
    environment(GROUP_RANK="0")
    first = watch_nodes(lambda sentence: (ended.setdefault("0", sentence), told.set()))
    environment(GROUP_RANK="1", LOCAL_RANK="1")
    reporter = watch_nodes(lambda sentence: None)
    assert isinstance(reporter, nodes.Reporter)
    reporter.close(None)
    threading.Thread(target=reporter.close, args=("a bug.",), daemon=True).start()  # until node 0's process ends
    assert told.wait(LONGEST_WAIT_S)
    assert ended == {"0": f"node 1 ({socket.gethostname()}) has ended the run: a bug."}
    first.close(None)


def test_a_node_ends_when_the_node_with_torchruns_store_is_gone(environment: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ended: list[str] = []
    told = threading.Event()
    environment(GROUP_RANK="1", MASTER_PORT=str(port))
    watch_nodes(lambda sentence: (ended.append(sentence), told.set()))
    assert told.wait(LONGEST_WAIT_S)
    assert ended == ["node 0 is gone; its own output says why."]


def test_a_connection_that_the_network_blocks_ends_no_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def blocked(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    ended: list[str] = []
    monkeypatch.setattr(nodes, "_in_background", lambda work, *arguments: work(*arguments))
    monkeypatch.setattr(socket, "create_connection", blocked)
    NodeWatch("node 1", run="run", others=1, end=ended.append).join(lambda: ("127.0.0.1", 1))
    assert ended == []
    assert "The end of another node will not be noticed" in caplog.text


@pytest.mark.parametrize("changes", [{"GROUP_WORLD_SIZE": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}])
def test_one_node_watches_nothing(environment: Callable[..., None], changes: dict[str, str]) -> None:
    environment(GROUP_RANK="0", **changes)
    threads = threading.active_count()
    assert isinstance(watch_nodes(lambda sentence: None), NoWatch)
    assert threading.active_count() == threads


def test_the_system_closes_the_connection_to_a_silent_machine_within_30_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        nodes._keep_alive(link)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert timedelta(seconds=sum_of_keepalive(link)) <= timedelta(seconds=30)


def sum_of_keepalive(link: socket.socket) -> int:
    idle, interval, count = (
        link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    )
    return idle + interval * count
