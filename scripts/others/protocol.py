"""A library in a process of its own: one JSON line a request, one a reply.

Thread pools of two libraries in one process disturb each other, and they may need
different interpreters. Only one process works at a time.
"""

import json
import os
import subprocess
import sys
import traceback


class Unavailable(Exception):
    """A library or a way that cannot be compared here; the text says why."""


def serve(handler):
    """Answers requests until the input ends.

    A request is `{"op": name, ...}`; the method of that name gets the rest and
    returns the reply. What it raises goes back as text.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Libraries print; that must not come between the replies.
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(handler, request.pop("op"))(**request)
        except Unavailable as error:
            reply = {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"failed: {type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def limit_threads(count):
    """Lets this process run on `count` cores; libraries make as many threads."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)


class Worker:
    """The other end of `serve`."""

    def __init__(self, python, script, threads):
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [str(python), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, op, **values):
        """The reply to a request.

        Raises:
          Unavailable: with the reason that the worker gave.
        """
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"op": op, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Unavailable(f"failed: its process ended ({self._process.wait()})")
        reply = json.loads(line)
        if "error" in reply:
            raise Unavailable(reply["error"])
        return reply

    def close(self):
        """Ends the process."""
        assert self._process.stdin
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()
