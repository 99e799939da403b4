"""The process that compiles grammars before an engine does: `python -P -m core.grammars.check FD`.

core/grammars/checker.py starts it. FD is one end of a socket pair, whose other end is the engine's. A grammar is a
program from a stranger. Most that are wrong are found here, where they hold nobody up: the process has little priority,
and what takes it too much CPU time or memory ends it. It ends when the other end of its socket closes, and when its
engine dies.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path

from core import log
from core.grammars.check_messages import Check, Verdict, Vocabulary, decode_question, encode_message
from core.grammars.grammars import Grammars
from ipc.channel import Channel, ChannelEndedError
from ipc.errors import EngineCoreError

#: A grammar's seconds of CPU time, and its bytes of memory. The engine compiles what passes once more.
MAX_CPU_S, MAX_MEMORY_BYTES = 1.0, 1 << 30
_NICE = 10  # with 19, a grammar of a millisecond would wait a tenth of a second beside an engine that computes
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LOG_S = 0.5  # for the last lines on standard error


def main(arguments: list[str]) -> int:
    """Answer the engine until it is gone; return the exit code. arguments: FD."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the process group: the engine decides
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(ChannelEndedError):
        serve(channel)
    return 0


def serve(channel: Channel) -> None:
    """Answer the engine's messages. Errors: ChannelEndedError when it is gone."""
    vocabulary = decode_question(channel.receive())
    assert isinstance(vocabulary, Vocabulary), "the first message is Vocabulary"
    grammars = Grammars(lambda: vocabulary.files, vocabulary.vocab_size, vocabulary.eos_token_ids, is_exact=False)
    failure = ""
    try:
        grammars.load()
    except EngineCoreError as error:  # the engine meets the same
        failure = str(error)
    _limit_memory()
    while True:
        question = decode_question(channel.receive())
        assert isinstance(question, Check), "a vocabulary is sent once"
        channel.send(encode_message(Verdict(failure or _check(grammars, question))))


def _check(grammars: Grammars, question: Check) -> str:
    """Return why the grammar cannot be used; "" = it can. One that takes too much CPU time ends the process."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        grammars.check(question.params)
    except EngineCoreError as error:
        return str(error)
    except MemoryError:
        return f"the grammar of structured_outputs takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    except Exception as error:  # a process entry: only this grammar fails
        log.say(traceback.format_exc())
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    log.flush(_LOG_S)
    os._exit(code)  # skips the interpreter's teardown
