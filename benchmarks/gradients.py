"""Codecs of gradients on those of a small model: bytes a parameter, and million parameters a second of one core.

    .venv/bin/python benchmarks/gradients.py [--steps 20] [--rounds 25]

The model is a transformer that learns a made-up language. Gradients are those of its last step: as they are; rounded to
bfloat16 and clipped, as a backward pass in bfloat16 leaves them; and the largest hundredth of each chunk alone. Sizes
are of all chunks of 2^18 values, speeds of the first whole one: medians of processor seconds of the thread.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from ckpt_codecs import Planes
from ckpt_codecs.base import Array, encode_bound
from ckpt_codecs.gradients import GRADIENT_CODECS, gradient_codec

CHUNK = 1 << 18
WORDS, WIDTH, LENGTH = 2048, 256, 64


class Model(torch.nn.Module):
    """A decoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0, "gelu", batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        result: torch.Tensor = self.head(self.layers(self.embedding(tokens), mask, is_causal=True))
        return result


def gradients_of(steps: int) -> Array:
    """Of all parameters, flat float32, at the last of so many steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    followers = torch.randint(0, WORDS, (WORDS, 4))
    frequencies = 1 / torch.arange(1, WORDS + 1)
    for _ in range(steps):
        tokens = torch.multinomial(frequencies, 8, replacement=True)[:, None]
        for _ in range(LENGTH):
            chosen = followers[tokens[:, -1], torch.randint(0, 4, (8,))]
            tokens = torch.cat([tokens, chosen[:, None]], 1)
        optimizer.zero_grad()
        guesses = model(tokens[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(guesses, tokens[:, 1:].flatten()).backward()
        optimizer.step()
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
    return np.ascontiguousarray(flat.numpy())


def rounded(values: Array) -> Array:
    return torch.from_numpy(values).bfloat16().float().numpy()


def largest(values: Array, share: float) -> Array:
    """Each chunk with all but so many of its largest magnitudes set to zero."""
    parts = []
    for begin in range(0, values.size, CHUNK):
        part = values[begin : begin + CHUNK]
        parts.append(np.where(np.abs(part) >= max(np.quantile(np.abs(part), 1 - share), 1e-30), part, np.float32(0)))
    return np.concatenate(parts)


def seconds(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    values = gradients_of(arguments.steps)
    clipped = (rounded(values) * np.float32(0.0371)).astype(np.float32)
    sets = {
        "float32": values,
        "bfloat16": rounded(values),
        "bfloat16, clipped": clipped,
        "largest 1 %": largest(values, 0.01),
        "largest 1 %, bfloat16, clipped": largest(clipped, 0.01),
    }
    print(f"{values.size:,} parameters, {np.count_nonzero(values) / values.size:.1%} of the gradients not zero\n")
    print("| gradients | codec | bytes a parameter | encode, M/s | decode, M/s |\n|---|---|---|---|---|")
    for name, given in sets.items():
        for codec in (Planes(), *(gradient_codec(name) for name in GRADIENT_CODECS)):
            size = sum(len(codec.encode(given[at : at + CHUNK], None)) for at in range(0, given.size, CHUNK))
            begin = next(
                at for at in range(2 * CHUNK, given.size, CHUNK) if np.count_nonzero(given[at : at + CHUNK]) > 100
            )
            chunk = given[begin : begin + CHUNK]
            out, back = np.empty(encode_bound(chunk.nbytes), np.uint8), np.empty_like(chunk)
            data = bytes(codec.encode_into(chunk, None, out))
            encode = seconds(lambda: codec.encode_into(chunk, None, out), arguments.rounds)  # noqa: B023
            decode = seconds(lambda: codec.decode_into(data, back, None), arguments.rounds)  # noqa: B023
            speeds = " | ".join(f"{chunk.size / each / 1e6:,.0f}" for each in (encode, decode))
            print(f"| {name} | {codec.name} | {size / given.size:.4f} | {speeds} |")


if __name__ == "__main__":
    main()
