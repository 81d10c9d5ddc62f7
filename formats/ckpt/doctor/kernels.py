"""Whether the compiled kernels can be loaded, and at which level of the CPU's instructions."""

from dataclasses import dataclass

_NAMES = {1: "any 64-bit ARM", 2: "x86-64-v2", 3: "x86-64-v3"}


@dataclass(frozen=True)
class LoadedKernels:
    """The library of C kernels, as it is loaded here."""

    level: int | None
    """The level that is bound."""
    levels: tuple[int, ...]
    """The levels that this CPU can run."""
    problem: str | None
    """Why they cannot be used; None if they can."""

    @property
    def instructions(self) -> str | None:
        """The name of the bound level."""
        return None if self.level is None else _NAMES.get(self.level, f"level {self.level}")


def try_kernels() -> LoadedKernels:
    """Load the library, if it can be loaded."""
    try:
        from ckpt_codecs.native import library
    except Exception as error:  # NumPy is missing or broken
        return LoadedKernels(None, (), f"the compiled kernels cannot be loaded: {_first_line(error)}")
    try:
        levels = library.levels()
        try:
            return LoadedKernels(library.level(), levels, None)
        except library.LibraryError:  # its message quotes the variable
            return LoadedKernels(None, levels, "CKPT_CPU_LEVEL names no level that this CPU runs")
    except (ImportError, OSError, AttributeError) as error:
        return LoadedKernels(None, (), _first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
