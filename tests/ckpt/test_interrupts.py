"""Ctrl-C while workers run: heeded where bytes are counted, and nowhere else."""

import signal

import pytest

from ckpt.pipeline.interrupts import deferred_interrupts, interruptible

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_is_heeded_when_bytes_are_counted_next(number: int) -> None:
    counted: list[int] = []
    with interruptible(counted.append) as count:
        count(5)
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            count(7)
    assert counted == [5]


def test_afterwards_signals_do_what_they_did_before() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with deferred_interrupts() as interrupted:
        assert not {signal.getsignal(number) for number in SIGNALS} & set(before)
        assert not interrupted.is_set()
    assert [signal.getsignal(number) for number in SIGNALS] == before
