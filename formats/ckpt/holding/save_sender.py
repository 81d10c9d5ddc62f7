"""Send a published save to the hosts that hold it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckpt.holding.generation import SentGeneration
from ckpt.holding.peers import Peers
from ckpt.holding.sender import Sender
from ckpt.holding.sent_file import SentFile
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member


class SaveSender(Sender):
    """Sends the file of a rank of a published save, and rank 0's the rest of the save and a list that names it.

    Readers see a chain of one member, so they need to know nothing else. With parity, hosts hold copies of the rest,
    which is small beside the files of the ranks.
    """

    def __init__(
        self,
        peers: Peers,
        save: SentGeneration,
        folder: Path,
        rank: int,
        member: Member | None,
        say: Callable[[str, str], None],
    ) -> None:
        """Start at once.

        Args:
            save: The generation that the save is; its main files are in the folder of the member.
            folder: The save, a universal checkpoint that needs no other.
            member: The member that the save is, which rank 0 sends as the only one; None on other ranks.
            say: As of `Sender`.

        Raises `CkptError`, and `OSError` if a file of the save is gone.
        """
        main = save.main_file(rank)
        member_folder, _, own = main.partition("/")
        files = {main: _whole_file(folder / own, save.step, is_small=False)}
        files[main].start_end = files[main].nbytes
        if member is not None:
            paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
            files |= {f"{member_folder}/{path.name}": _whole_file(path, save.step, is_small=True) for path in paths}
            listed = chain_file.dump(ChainIndex((replace(member, folder=member_folder),)))
            files[chain_file.NAME] = SentFile.of_bytes(listed, folder)  # it comes last: what it names is held then
        super().__init__(peers, save, rank, files, say)


def _whole_file(path: Path, step: int, *, is_small: bool) -> SentFile:
    """A file of a save, which belongs to its step from the first byte on. Raises `OSError` if it is gone."""
    return SentFile(path, path.stat().st_size, is_small, ends=[0], steps=[step])
