"""How long campaigns of chance are: a sample in the check, as often as CKPT_CAMPAIGN says by hand (`make campaign`)."""

import os

TIMES = int(os.environ.get("CKPT_CAMPAIGN") or 1)
