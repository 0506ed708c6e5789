"""IPython's kernel, which listens on Unix sockets alone.

ipykernel binds one more port than its channels, on the loopback address: what processes forked by a cell
print comes in there. Every user of the node can reach that port; here it is a socket in a private folder.
"""

import os
import sys
import tempfile
from pathlib import Path

import zmq
from ipykernel.iostream import IOPubThread
from ipykernel.kernelapp import launch_new_instance
from jupyter_core.paths import jupyter_runtime_dir
from zmq.eventloop.zmqstream import ZMQStream

__all__ = ["main"]


def _bind(self: IOPubThread) -> None:
    """In place of `IOPubThread._setup_pipe_in`."""
    runtime = Path(jupyter_runtime_dir())
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="output-", dir=runtime)  # closed to others by itself
    self._pipe_uuid = os.urandom(16)
    self._pipe_port = f"ipc://{folder}/pipe"
    assert self.socket is not None
    pipe = self.socket.context.socket(zmq.PULL)
    pipe.linger = 0
    pipe.bind(self._pipe_port)
    self._pipe_in = ZMQStream(pipe, self.io_loop)
    self._pipe_in.on_recv(self._handle_pipe_msg)


def _connect(self: IOPubThread) -> tuple[zmq.Context, zmq.Socket]:
    """In place of `IOPubThread._setup_pipe_out`, in a forked process."""
    context = zmq.Context()
    pipe = context.socket(zmq.PUSH)
    pipe.linger = 3000
    pipe.connect(self._pipe_port)
    return context, pipe


def main() -> None:
    """What `python -m ipykernel_launcher` does, with these sockets."""
    if sys.path[0] == str(Path.cwd()):
        # The user's working directory must not hide modules of the standard library.
        del sys.path[0]
    IOPubThread._setup_pipe_in = _bind
    IOPubThread._setup_pipe_out = _connect
    launch_new_instance()


if __name__ == "__main__":
    main()
