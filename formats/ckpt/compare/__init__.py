"""What differs between two checkpoints, whatever engines and layouts wrote them.

`choice` says what is compared, `pairs` compares it, `sums` is what is told of two
tensors and `values` of all else. `groups` adds up, `facts` says it all as plain
data; `report` prints it, `page` draws it.
"""

from ckpt.compare.pairs import Differences, Pair, Paired, compare, paired
from ckpt.compare.select import Choice, chosen
from ckpt.compare.sums import Histogram, Sums, sums_of

__all__ = ["Choice", "Differences", "Histogram", "Pair", "Paired", "Sums", "chosen", "compare", "paired", "sums_of"]
