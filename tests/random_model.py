"""A small decoder that looks tokens up, for tensor parallelism: the demo model's 3 KV heads do not divide.

Weights drawn at random alone make near ties of logits and of pages, which sums over ranks turn in bf16.
Here random codes stand for tokens, and attention finds them. In layer 0 the current token asks for its
successor, each layer asks for the successor of what the one before it found, and the next token is what the
last layer found (:func:`chain`). An answer lies in four places of a prompt: every KV head finds its own and
brings a quarter of it, so that each head of each layer has to attend the one page that it asks for. Weights
drawn at random lie over all that, so that the other pages and logits are nobody's plan.
"""

import json
import random
from functools import cache
from pathlib import Path

import torch

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 8, 4, 64, 1024
TOKENS = range(3, VOCABULARY)
CODE = HEAD_DIM
# Parts of the hidden state, each CODE wide: whom a KV head finds at a token (a part for each), what the
# token says to the output, what it makes the next layer ask, what each layer asks, and what the output
# reads. The last part is random and nobody's.
FOUND, SAYS, NEXT, ASKS = 0, KV_HEADS, KV_HEADS + 1, KV_HEADS + 2
READ = ASKS + LAYERS
HIDDEN = (READ + 2) * CODE
BASE = 6
"""A token says its number to the output, in digits of this base: one digit through each KV head."""
SHARP = 2.0
"""Of queries and keys each: a match has a logit of about ``SHARP**2 * CODE**0.5`` before the norm's factor,
all others have an eighth of that (standard deviation)."""
LOUD = 8.0
"""Logits in units of a digit's: as large as those of models in use."""
NOISE = 0.1
"""Standard deviation of what the weights drawn at random make of an input of variance 1."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 1e20,  # what is asked for may be anywhere: most of the head dimension does not turn
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


@cache
def successors() -> list[int]:
    """Of every token: one cycle through all of `TOKENS`."""
    order = random.Random("successors").sample(TOKENS, len(TOKENS))
    after = list(range(VOCABULARY))
    for token, following in zip(order, order[1:] + order[:1], strict=True):
        after[token] = following
    return after


@cache
def found_at() -> list[list[int]]:
    """``[KV head][token]``: whom that KV head finds where the token stands."""
    heads = []
    for head in range(KV_HEADS):
        others = random.Random(f"KV head {head}").sample(TOKENS, len(TOKENS))
        heads.append([*range(TOKENS.start), *others])
    return heads


def chain(last: int, count: int) -> list[int]:
    """The `count` tokens after a prompt that ends with `last`, where attention finds what it asks for."""
    return asked(last, count)[LAYERS - 1 :: LAYERS]


def asked(last: int, count: int) -> list[int]:
    """Whom the layers ask for, one after the other, until `count` tokens are there."""
    after, tokens = successors(), []
    for _ in range(LAYERS * count):
        last = after[last]
        tokens.append(last)
    return tokens


def places(who: int) -> list[int]:
    """For each KV head, the token at which it finds the one that is asked for."""
    return [found.index(who) for found in found_at()]


def wanted_pages(tokens: list[int], new: int, page: int) -> dict[tuple[int, int], list[set[int]]]:
    """For each KV head, the pages of a :func:`prompt` one of which it has to attend.

    By (tokens present, layer), for the decode steps that give `new` tokens; prefill gives the first.
    """
    wanted = {}
    for number, who in enumerate(asked(tokens[-1], new)):
        step, layer = divmod(number, LAYERS)
        wanted[len(tokens) + step, layer] = [
            {at // page for at, token in enumerate(tokens) if token == place} for place in places(who)
        ]
    return {row: pages for row, pages in wanted.items() if row[0] > len(tokens)}


def prompt(seed: int, length: int, new: int) -> list[int]:
    """In no order, the places of all that `new` tokens ask for; then tokens of no use up to `length`."""
    shuffled = random.Random(seed)
    last = shuffled.choice(TOKENS)
    needed = sorted({token for who in asked(last, new) for token in places(who)})
    others = sorted(set(TOKENS) - set(needed))
    body = needed + shuffled.choices(others, k=length - 1 - len(needed))
    shuffled.shuffle(body)
    return [*body, last]


def make(folder: Path, seed: int = 0) -> Path:
    """Write configuration and weights (bf16, always the same for a seed) to ``folder`` and return it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def noise(rows: int, columns: int, spread: float = NOISE) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * spread / columns**0.5

    says = digit_codes(generator)
    weights = {
        "model.embed_tokens.weight": embedding(says, generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": noise(VOCABULARY, HIDDEN),
    }
    spelt = torch.cat([says[head, digits(head)] for head in range(KV_HEADS)], 1)
    weights["lm_head.weight"][:, part(READ)] += LOUD / CODE**0.5 * spelt
    for layer in range(LAYERS):
        last = layer == LAYERS - 1
        q, o = noise(HEADS * HEAD_DIM, HIDDEN), noise(HIDDEN, HEADS * HEAD_DIM)
        k, v = noise(KV_HEADS * HEAD_DIM, HIDDEN), noise(KV_HEADS * HEAD_DIM, HIDDEN)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            if head % (HEADS // KV_HEADS) == 0:
                rows = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
                match, mix = rotation(CODE, generator), rotation(CODE, generator)
                k[rows, part(FOUND + kv_head)] += SHARP * match
                v[rows, part(SAYS if last else NEXT)] += mix
            q[mine, part(ASKS + layer)] += SHARP * match
            share = CODE // HEADS
            brought = slice(head * share, (head + 1) * share)
            o[part(READ if last else ASKS + layer + 1), mine][brought] += mix.T[brought]
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.self_attn.o_proj.weight": o,
            f"{prefix}.mlp.gate_proj.weight": noise(2 * HIDDEN, HIDDEN, 1.0),
            f"{prefix}.mlp.up_proj.weight": noise(2 * HIDDEN, HIDDEN, 1.0),
            f"{prefix}.mlp.down_proj.weight": noise(HIDDEN, 2 * HIDDEN),
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def embedding(says: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``[VOCABULARY, HIDDEN]``, each part of variance 1 or 0."""
    codes = torch.randn(VOCABULARY, CODE, generator=generator)
    codes *= CODE**0.5 / codes.norm(dim=1, keepdim=True)
    after, quarter = torch.tensor(successors()), CODE // KV_HEADS
    made = torch.zeros(VOCABULARY, HIDDEN)
    for head, found in enumerate(map(torch.tensor, found_at())):
        brings = slice(head * quarter, (head + 1) * quarter)
        made[:, part(FOUND + head)] = codes[found]
        made[:, part(SAYS)][:, brings] = says[head, digits(head)[found]]
        made[:, part(NEXT)][:, brings] = codes[after[found]][:, brings]
    made[:, part(ASKS)] = codes[after]
    made[:, part(READ + 1)] = torch.randn(VOCABULARY, CODE, generator=generator)
    return made


def part(number: int) -> slice:
    return slice(number * CODE, (number + 1) * CODE)


def digits(place: int) -> torch.Tensor:
    """Of all tokens, the digit at a place."""
    return torch.arange(VOCABULARY) // BASE**place % BASE


def digit_codes(generator: torch.Generator) -> torch.Tensor:
    """``[KV_HEADS, BASE, n]``, at right angles to each other, of variance 1."""
    wide = CODE // KV_HEADS
    return torch.stack([wide**0.5 * rotation(wide, generator)[:BASE] for _ in range(KV_HEADS)])


def rotation(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
