"""Growing answers on a terminal and in a pipe."""

import io

from rich.console import Console

from tools.terminal.streams import LiveStreams, PlainStreams, printable, streams_for


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=60, height=12, color_system=None)


def shown(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_control_characters_are_not_passed_on() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x00\x9b") == "a�[2Jb\tc\nd��"


def test_a_single_answer_is_written_once_as_it_grows() -> None:
    target = console(terminal=False)
    streams = streams_for(target, ["first"])
    assert isinstance(streams, PlainStreams)
    with streams:
        streams.update(0, "one\ntw")
        assert shown(target) == "one\ntw"
        streams.update(0, "one\ntwo\n\nthree\x1b")
        streams.finish(0, "done")
    assert shown(target) == "one\ntwo\n\nthree\ufffd\n"


def test_several_answers_are_written_once_and_in_order() -> None:
    target = console(terminal=True)
    streams = streams_for(target, ["first", "second", "third"], is_plain=True)
    assert isinstance(streams, PlainStreams)
    with streams:
        streams.update(1, "eins")
        streams.finish(1, "done")
        streams.update(0, "one\ntwo")
        assert shown(target) == ""
        streams.finish(0, "done too")
        assert shown(target) == "=== 1 first (done too)\none\ntwo\n\n=== 2 second (done)\neins\n"
        streams.update(2, "un")
    assert shown(target).endswith("\neins\n\n=== 3 third\nun\n")


def test_panels_show_the_last_lines_and_in_the_end_all() -> None:
    target = console(terminal=True)
    streams = streams_for(target, ["a [bold]title[/bold]", "other"])
    assert isinstance(streams, LiveStreams)
    text = "\n".join(f"line {number}" for number in range(20))
    with streams:
        streams.update(0, text)
        streams._live.refresh()
        growing = shown(target)
        assert "line 19" in growing
        assert "line 0" not in growing, "12 lines of terminal have room for 4 lines of each answer"
        streams.finish(0, "20 lines")
    final = shown(target)[len(growing) :]
    assert all(f"line {number} " in final for number in range(20))
    assert "20 lines" in final
    assert "1 a [bold]title[/bold]" in final, "a title is text, not markup"


def test_a_wide_line_is_wrapped_and_kept() -> None:
    target = console(terminal=True)
    with streams_for(target, ["t"]) as streams:
        streams.update(0, "word " * 30)
    assert shown(target).count("word") >= 30
