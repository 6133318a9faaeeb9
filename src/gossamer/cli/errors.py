"""From an exception to the one line that tells the user what to do."""

from __future__ import annotations

import errno

import torch
import typer

from gossamer.errors import GossamerError

# What bad input, a bad environment or a full disk raises. Anything else is a fault of the program
# and keeps its traceback.
EXPECTED = (GossamerError, OSError, ValueError, typer.TyperException, torch.OutOfMemoryError)

_DISK_ADVICE = {
    errno.ENOSPC: "free some space or choose another --out; finished runs are kept",
    errno.EDQUOT: "free some space or choose another --out; finished runs are kept",
    errno.EACCES: "choose a path that you may write",
    errno.EPERM: "choose a path that you may write",
    errno.EROFS: "choose a path that you may write",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a file is in the way of the folder",
    errno.EISDIR: "name a file, not a folder",
}


class UsageError(GossamerError):
    """Arguments that contradict each other or name what is not there."""


class Interrupted(GossamerError):
    """Ctrl-C in a command that can resume; the message says how."""


def describe(error: BaseException) -> str:
    """Return one line: what is wrong, and the fix where one is known."""
    if isinstance(error, typer.TyperException):
        text = f"{error.format_message()} (see --help)"
    elif isinstance(error, torch.OutOfMemoryError):
        text = "the device is out of memory: choose a smaller --height, --width or --num-frames"
    elif isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        advice = _DISK_ADVICE.get(error.errno or 0)
        text = place + error.strerror.lower() + (f"; {advice}" if advice else "")
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())
