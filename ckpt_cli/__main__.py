import signal

from ckpt_cli import interrupt


def start() -> None:
    """Import the command line, and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the parent process ignores it
        signal.signal(signal.SIGINT, interrupt)
    from ckpt_cli.main import run  # an import: `interrupt` ends it in silence

    run()


if __name__ == "__main__":
    start()
