"""A tokenizer with as many words as a model has tokens, for models with dummy weights.

Such a model generates tokens from its whole vocabulary, often beyond what a tokenizer that happens to lie
beside it knows; those would come out as empty text, which SGLang's benchmark does not count as an answer.
Here token n is the word ``tn``: every token is text, and a text has exactly as many tokens as words.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write(model: Path, folder: Path) -> Path:
    """Write the tokenizer for the model in `model` (its ``config.json`` is enough) into `folder`."""
    config = json.loads((model / "config.json").read_text())
    size = config.get("vocab_size") or config["padded_vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
