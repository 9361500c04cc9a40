"""Run a command under another host name: Open MPI's launcher calls this in place of ssh, in a UTS namespace.

`unshare --uts python -m tests.pretended_host HOST COMMAND…`: Open MPI tells nodes apart by their names, so that ranks
on two of these hosts share no memory and meet over TCP.
"""

import os
import socket
import sys

if __name__ == "__main__":
    _, host, *words = sys.argv
    socket.sethostname(host)
    os.execv("/bin/sh", ["sh", "-c", " ".join(words)])  # as ssh hands its words to the other host's shell
