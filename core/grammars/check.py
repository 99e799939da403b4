"""The process that test-compiles grammars for an engine: `python -P -m core.grammars.check FD CPU_MS MEMORY`.

Started by core/grammars/checker.py. FD is one end of a socket pair; the engine has the other. A grammar is an untrusted
program. Most invalid ones are found here, where they delay no request: the process has low priority, and is killed if a
grammar takes more than CPU_MS milliseconds of CPU time or MEMORY bytes. It ends when the other end of its socket
closes, and when its engine dies.
"""

import contextlib
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from core import log
from core.grammars.check_messages import Check, Verdict, decode_question, encode_message
from core.grammars.compilation import compile_grammar
from core.grammars.trial_text import try_text
from core.grammars.vocabulary import Vocabulary, build_vocabulary
from ipc.errors import EngineCoreError
from ipc.machine.bounded_process import limit_memory, limited_cpu_time, open_channel
from ipc.machine.channel import Channel, ChannelEndedError
from ipc.params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_LOG_S = 0.5  # for writing the last lines to standard error
#: Stack of the thread that compiles here: half of the smallest stack in the engine (glibc's if there is no limit). So a
#: grammar that passes is not nested too deeply for the engine.
_STACK_BYTES = 1 << 20


def main(arguments: list[str]) -> int:
    """Answer the engine until it is gone, and return the exit code. arguments: see above."""
    if len(arguments) != 3 or not all(argument.isdigit() for argument in arguments):
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    fd, max_cpu_ms, max_memory_bytes = map(int, arguments)
    channel = open_channel(fd)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve_to_the_end, args=(channel, max_cpu_ms / 1000, max_memory_bytes))
    thread.start()
    thread.join()
    return 0


def _serve_to_the_end(channel: Channel, max_cpu_s: float, max_memory_bytes: int) -> None:
    with contextlib.suppress(ChannelEndedError):
        serve(channel, max_cpu_s, max_memory_bytes)


def serve(channel: Channel, max_cpu_s: float, max_memory_bytes: int) -> None:
    """Answer the engine's messages. Errors: ChannelEndedError when it is gone."""
    vocabulary = decode_question(channel.receive())
    assert isinstance(vocabulary, Vocabulary), "the first message is Vocabulary"
    tokenizer = build_vocabulary(vocabulary, in_parts=False)
    limit_memory(max_memory_bytes)
    while True:
        question = decode_question(channel.receive())
        assert isinstance(question, Check), "a vocabulary is sent once"
        with limited_cpu_time(max_cpu_s):
            verdict = Verdict(_check(tokenizer, question.params))
        channel.send(encode_message(verdict))


def _check(tokenizer: "LLTokenizer", params: StructuredOutputsParams) -> str:
    """Return why the grammar cannot be used; "" = it can."""
    try:
        matcher = compile_grammar(tokenizer, params)
        if params.kind in ("json", "json_object"):
            try_text(tokenizer, matcher)
    except EngineCoreError as error:
        return str(error)
    except MemoryError:
        return "the grammar of structured_outputs takes too much memory"
    except Exception as error:  # process entry: only this grammar fails
        log.say(traceback.format_exc())
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    code = main(sys.argv[1:])
    log.flush(_LOG_S)
    os._exit(code)  # skips interpreter teardown
