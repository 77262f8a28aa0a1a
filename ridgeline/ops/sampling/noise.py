"""Noise of the exponential race that samples a token: E(id) depends on the seed, the output index and the id alone.

    words = philox4x32-10(counter = (id // 4, output index, 0, 0), key = (seed % 2^32, seed // 2^32))
    E(id) = -log(1 - v(id)),  v(id) = (words[id % 4] + 1/2) / 2^32

It never depends on other rows, on filtered ids or on earlier tokens. The last two counter words are free for other uses of the
same seed. sample_kernels.py computes the same words on the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

LOW_WORD = 0xFFFFFFFF


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, key0: Any, key1: Any) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32 on numpy uint64 arrays, int64 tensors or ints below 2^32; shapes broadcast.

    The upper half of a word is undefined: it is cleared only where the word is about to be multiplied, and at the end.
    That also makes the sign-extending shift of int64 harmless.
    """
    for _ in range(10):
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product2 >> 32) ^ (c1 ^ key0)) & LOW_WORD, product2
        c2, c3 = ((product0 >> 32) ^ (c3 ^ key1)) & LOW_WORD, product0
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return c0, c1 & LOW_WORD, c2, c3 & LOW_WORD


def noise_words(how: np.ndarray, counter: Tensor) -> list[Tensor]:
    """The four words of every counter (int64 [n, C], or [1, C] for all rows), each int64 [n, C] below 2^32."""
    columns = [how["index"].astype(np.uint64), how["seed"] & np.uint64(LOW_WORD), how["seed"] >> np.uint64(32)]
    if counter.is_cpu:               # numpy's integer loops take half of torch's time
        index, key0, key1 = (column[:, None] for column in columns)
        words = philox4x32(counter.numpy().view(np.uint64), index, 0, 0, key0, key1)
        return [torch.from_numpy(word.view(np.int64)) for word in words]
    index, key0, key1 = (to_device(column.view(np.int64), counter.device)[:, None] for column in columns)
    return list(philox4x32(counter, index, 0, 0, key0, key1))


def exponential_noise(how: np.ndarray, ids: Tensor) -> Tensor:
    """E(id) for ids [n, K]: float64 [n, K], between 1e-10 and 23."""
    words = torch.stack(noise_words(how, ids >> 2), dim=-1)
    return exponential(words.gather(2, (ids & 3)[:, :, None])[:, :, 0])


def exponential_noise_all(how: np.ndarray, width: int, device: torch.device) -> Tensor:
    """E(id) for the ids 0 … width - 1, width a multiple of 4; a quarter of the work per id."""
    words = noise_words(how, torch.arange(width // 4, device=device)[None])
    return exponential(torch.stack(words, dim=-1).view(len(how), width))


def exponential(words: Tensor) -> Tensor:
    return words.double().add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)             # from any other memory the host waits for it
