"""A command that is asked to end, by Ctrl-C, by the system or by a terminal that is closed."""

import os
import signal
import time

import pytest
import typer

from forwardtune.cli.options import interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_says_that_it_resumes_and_exits_as_is_usual(number, capsys):
    before = signal.getsignal(number)

    def command():
        with interruptible():
            os.kill(os.getpid(), number)
            time.sleep(10)

    with pytest.raises(typer.Exit) as end:
        command()
    assert end.value.exit_code == 128 + number
    assert capsys.readouterr().err == "stopped; the same command resumes where it left off\n"
    assert signal.getsignal(number) == before


def test_under_nohup_a_closed_terminal_does_not_end_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
