"""Made-up attention for the tests of the fidelity microscope."""

import torch
from locks_sglang.fidelity.capture import Capture

HEADS, GROUP, DIM, TOKENS = 2, 3, 64, 333


def made_up() -> Capture:
    """One layer; keys of a page lie near a line, so that low ranks tell much of them."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pages = -(-TOKENS // 16)
    keys = noise(1, HEADS, pages, 1, DIM) + noise(1, HEADS, pages, 16, 1) * noise(1, HEADS, pages, 1, DIM)
    keys = keys.flatten(2, 3)[:, :, :TOKENS] + 0.3 * noise(1, HEADS, TOKENS, DIM)
    positions = torch.tensor([255, 256, 300, 319, 320, 332])
    angles = torch.arange(TOKENS)[:, None] / 100 ** (torch.arange(DIM // 2) / 32)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    queries = 2 * noise(1, HEADS * GROUP, len(positions), DIM)
    values = noise(1, HEADS, TOKENS, DIM)
    return Capture(queries, keys, values, positions, cos, sin, DIM**-0.5)
