"""A gateway that only listens: it answers every connection with its process's number.

`--http-port 0` cannot be: the port is chosen by whoever starts it. `--access-log` makes it refuse.
"""

from __future__ import annotations

import os
import socket
import sys

PROGRAM = (sys.executable, "-S", __file__)


def main() -> None:
    if "--access-log" in sys.argv:
        sys.exit("I do not like this flag")
    port = int(sys.argv[sys.argv.index("--http-port") + 1])
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.sendall(f"{os.getpid()}\n".encode())
                except OSError:
                    continue


if __name__ == "__main__":
    main()
