"""A command in a pseudo-terminal, as a person would start it."""

import os
import pty
import subprocess
import termios


def in_terminal(command: list[str], **environment: str) -> bytes:
    """Both streams of a command that ends well."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))  # rows and columns
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, **environment})
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux, when the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, shown
    return shown
