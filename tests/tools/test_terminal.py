"""Growing answers on a terminal and in a pipe."""

import io

from rich.console import Console

from tools.terminal import LineStreams, LiveStreams, printable, streams_for


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=60, height=12, color_system=None)


def shown(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_control_characters_are_not_passed_on() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x00\x9b") == "a�[2Jb\tc\nd��"


def test_lines_are_printed_when_they_are_whole() -> None:
    target = console(terminal=False)
    streams = streams_for(target, ["first", "second"])
    assert isinstance(streams, LineStreams)
    with streams:
        streams.update(0, "one\ntw")
        streams.update(1, "eins")
        assert shown(target) == "[1] one\n"
        streams.update(0, "one\ntwo\n\nthree")
        streams.finish(1, "done")
        assert shown(target) == "[1] one\n[1] two\n[1] \n[2] eins\n"
        streams.finish(0, "done too")
    end = "[1] three\n\n=== 1 first (done too)\none\ntwo\n\nthree\n\n=== 2 second (done)\neins\n"
    assert shown(target).endswith(end)


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
