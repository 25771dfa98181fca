"""A checkpoint small enough for every test that starts from files: MINI with the miniature's tokenizer."""

import shutil
from pathlib import Path

import torch
from models import mini

from workbench.checkpoint import write_checkpoint
from workbench.config import ModelConfig
from workbench.model import CausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
DATA = Path(__file__).resolve().parent.parent / "data" / "miniature"

#: Long enough for two chunks of 64 tokens.
PROMPT = (
    "Fear no more the heat o' the sun, Nor the furious winter's rages; Thou thy worldly task hast done, "
    "Home art gone, and ta'en thy wages: Golden lads and girls all must, As chimney-sweepers, come to dust. "
    "Fear no more the frown o' the great; Thou art past the tyrant's stroke; Care no more to clothe and eat."
)


def write_small_checkpoint(
    folder: Path, decay: str = "class_default", *, tokenizer: bool = True, **changes
) -> Path:
    """Random weights in bfloat16; `class_default` decay passes the float32 limit of exp in most chunks."""
    config = ModelConfig.from_hf(mini(vocab_size=4096, eos_token_id=4064, **changes))
    with torch.no_grad():
        weights = CausalLM(config).init_weights(3, decay).state_dict()
    write_checkpoint(folder, config, dict(weights))
    if tokenizer:
        for name in TOKENIZER_FILES:
            shutil.copy(DATA / name, folder / name)
    return folder
