"""Two machines with a cable between them, on one that runs Linux.

A machine is a network of its own, with a host name of its own: processes in it reach the other machine by the cable
alone. Files are shared. Namespaces of Linux do this. They end with the process that holds them, which ends with this
one: nothing remains after a test, not even after one that was killed. Only root may make them.
"""

import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NAMES = ("node0", "node1")
_ADDRESSES = ("10.111.0.1", "10.111.0.2")
_TUN = Path("/dev/net/tun")
_TUNSETIFF, _TUNSETCARRIER = 0x400454CA, 0x400454E2  # linux/if_tun.h
_TAP_WITHOUT_HEADER = 0x1002
_LARGEST_FRAME_BYTES = 65536
# Runs in the machine until its standard input is closed.
_HOLD = 'hostname "$1" && printf "%s\\n" "$2" > "$3" && mount --bind "$3" /etc/hosts && echo ready && exec cat'


def missing() -> str:
    """What this machine lacks to be divided in two; "" if nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may make network namespaces"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    try:
        done = subprocess.run(
            ["unshare", "--net", "--uts", "--mount", "ip", "link"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    return done.stderr


class Cable:
    """The cable between two machines.

    Attributes:
        enter: for each machine, the words before a command that run it there.
        is_cut: whether nothing arrives. Neither machine is told, as where a switch between them fails.
        delay_s: from one end to the other.
        loss: the share of frames that do not arrive.
    """

    def __init__(self, enter: list[list[str]], ends: list[int]) -> None:
        self.enter = enter
        self.is_cut = False
        self.delay_s = 0.0
        self.loss = 0.0
        self._ends = ends
        self._chance = random.Random(0)

    def unplug(self, is_out: bool = True) -> None:
        """Pull the plug out of both machines, which then know that their link is down, or put it in again."""
        self.is_cut = is_out
        for end in self._ends:
            fcntl.ioctl(end, _TUNSETCARRIER, struct.pack("i", not is_out))

    def carry(self, stop: int) -> None:
        """Carry frames from each end to the other until the file ``stop`` can be read."""
        first, second = self._ends
        other = {first: second, second: first}
        under_way: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([*self._ends, stop], [], [], wait_s)
            if stop in ready:
                return
            for end in ready:
                try:
                    frame = os.read(end, _LARGEST_FRAME_BYTES)
                except OSError:
                    continue
                if not self.is_cut and self._chance.random() >= self.loss:
                    under_way.append((time.monotonic() + self.delay_s, other[end], frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, frame = under_way.popleft()
                with suppress(OSError):  # the plug was pulled meanwhile
                    os.write(end, frame)


@contextmanager
def two_machines(directory: Path) -> Iterator[Cable]:
    """Two machines named ``NAMES``, joined by a cable; ``directory`` is for their files."""
    with ExitStack() as stack:
        hosts = "\n".join(["127.0.0.1 localhost", *map(" ".join, zip(_ADDRESSES, NAMES, strict=True))])
        enter, ends = [], []
        for name, address in zip(NAMES, _ADDRESSES, strict=True):
            command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _HOLD, "sh", name, hosts]
            holder = stack.enter_context(
                subprocess.Popen(
                    [*command, str(directory / f"hosts_{name}")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            enter.append(["nsenter", "--target", str(holder.pid), "--net", "--uts", "--mount"])
            end, device = _tap()
            stack.callback(os.close, end)
            ends.append(end)
            subprocess.run(["ip", "link", "set", device, "netns", str(holder.pid)], check=True)
            for words in ("link set lo up", f"link set {device} mtu 9000 up", f"addr add {address}/24 dev {device}"):
                subprocess.run([*enter[-1], "ip", *words.split()], check=True)
        cable = Cable(enter, ends)
        stop, stopped = socket.socketpair()
        carrying = threading.Thread(target=cable.carry, args=(stopped.fileno(),), daemon=True)
        carrying.start()
        try:
            yield cable
        finally:
            stop.close()
            carrying.join()
            stopped.close()


def _tap() -> tuple[int, str]:
    """A new network device, whose frames are read from and written to a file, and its name."""
    file = os.open(_TUN, os.O_RDWR)
    answer = fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"cable%d", _TAP_WITHOUT_HEADER))
    return file, answer[:16].rstrip(b"\0").decode()
