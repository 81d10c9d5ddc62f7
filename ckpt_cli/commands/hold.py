"""`ckpt hold`: pieces of runs in the memory of this host, for when another one is lost."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command
from ckpt_cli.options.shadow import hold_options

if TYPE_CHECKING:
    from ckpt_cli.options.shadow import HoldOptions


@command("hold")
@hold_options
def hold(options: "HoldOptions", as_json: bool) -> None:
    from ckpt_cli.views import hold

    if options.status is not None:
        hold.show_status(options.status, as_json)
    elif options.free is not None:
        hold.free(options.free, as_json)
    else:
        hold.hold(options, as_json)
