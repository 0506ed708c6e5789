"""Lines with their rank in front."""

from hypothesis import given
from hypothesis import strategies as st

from carme_runtime.launcher.output import LONGEST_LINE, Lines, Tail


def test_lines_are_put_together() -> None:
    lines = Lines(3, colour=False)
    assert lines.feed("a") == ""
    assert lines.feed("b\nc\r") == "[rank 3] ab\n"
    assert lines.feed("\n\nd") == "[rank 3] c\n[rank 3] \n"
    assert lines.finish() == "[rank 3] d\n"
    assert lines.finish() == ""


def test_progress_bars_redraw_their_own_line() -> None:
    lines = Lines(0, colour=False)
    assert lines.feed("\r 10%") == ""
    assert lines.feed("\r 20%") == "[rank 0]  10%\r"
    assert lines.feed("\n") == "[rank 0]  20%\n"


def test_colour_is_in_the_prefix_only() -> None:
    assert Lines(1, colour=True).feed("x\n") == "\033[2m[rank 1] \033[0mx\n"


@given(st.lists(st.text("ab\r\n", max_size=8)))
def test_the_cuts_of_the_stream_do_not_matter(pieces: list[str]) -> None:
    whole, cut = Lines(0, colour=False), Lines(0, colour=False)
    expected = whole.feed("".join(pieces)) + whole.finish()
    assert "".join(map(cut.feed, pieces)) + cut.finish() == expected


def test_a_line_without_end_is_shown_in_pieces() -> None:
    lines = Lines(0, colour=False)
    out = "".join(lines.feed("x" * 1000) for _ in range(200)) + lines.finish()
    assert out.count("x") == 200_000
    assert max(map(len, out.splitlines())) <= LONGEST_LINE + len("[rank 0] ")


def test_the_report_begins_with_the_traceback() -> None:
    tail = Tail()
    for number in range(10_000):
        tail.feed(f"warning {number}\n")
    assert len(tail.report().splitlines()) == 40
    tail.feed("Traceback (most recent call last):\n  here\nValueError: x\n")
    assert tail.report() == "Traceback (most recent call last):\n  here\nValueError: x"


def test_the_report_takes_labels_of_torch_from_the_front_of_lines_alone() -> None:
    tail = Tail()
    tail.feed("[rank3]: x [rank4]: y\n[rank3]:\nz [rank3]: x\n[rank 3]: x\n")
    assert tail.report() == "x [rank4]: y\n\nz [rank3]: x\n[rank 3]: x"
