# SPDX-License-Identifier: Apache-2.0
"""Two machines out of one: network namespaces joined by a cable that can be pulled. Linux, as root."""

import os
import subprocess
from collections.abc import Sequence

NETWORK = "10.213.77"
"""Of the two namespaces alone: nothing else on the machine sees these addresses."""
INTERFACE = "cable"


class TwoMachines:
    """Namespaces with the addresses `addresses`, gone at the end of the `with` block.

    Raises `OSError` on entering where the system has no `ip` command or does not permit namespaces.
    """

    def __init__(self) -> None:
        self.names = [f"faults-{os.getpid()}-{number}" for number in range(2)]
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(2)]

    def __enter__(self) -> "TwoMachines":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        ends = [f"{INTERFACE}-{os.getpid() % 10_000}-{number}" for number in range(2)]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end in zip(self.names, ends, strict=True):
            _ip("link", "set", end, "netns", name, "name", INTERFACE)
        for name, address in zip((first, second), self.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
        self.plug()

    def __exit__(self, *exception: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def command(self, machine: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on machine 0 or 1."""
        return ["ip", "netns", "exec", self.names[machine], *command]

    def pull(self) -> None:
        """From now on nothing arrives, and nobody is told so."""
        # The second machine's end goes down: with it its route, and no packet passes either way.
        _ip("-n", self.names[1], "link", "set", INTERFACE, "down")

    def plug(self) -> None:
        """Join the machines (again)."""
        for name in self.names:
            _ip("-n", name, "link", "set", INTERFACE, "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
