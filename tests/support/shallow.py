"""The bundled model with two of its six layers: laws that hold for any weights, at a third of the
cost of a step. Four show what goes on between the first layer and the last.

Its answers are no sense. They differ from prompt to prompt and end after different numbers of
tokens, as the end of text has taken the place of a token that it draws now and then.
"""

import json
import shutil
from functools import cache
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.places import place
from tests.support.prompts import TINY

LAYERS = {2: ("0", "5"), 4: ("0", "1", "4", "5")}
END, OFTEN = 2, 82
EMBEDDING = "model.embed_tokens.weight"


@cache
def shallow(num_layers: int = 2) -> Path:
    """Its directory, for as long as this process lives."""
    layers = LAYERS[num_layers]
    directory = place("shallow")
    shutil.copytree(TINY, directory, dirs_exist_ok=True)
    config = json.loads((TINY / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    with safe_open(TINY / "model.safetensors", framework="pt") as reader:
        for name in list(reader.keys()):
            before, is_layer, after = name.partition(".layers.")
            number, _, rest = after.partition(".")
            if not is_layer:
                tensors[name] = reader.get_tensor(name)
            elif number in layers:
                new = f"{before}.layers.{layers.index(number)}.{rest}"
                tensors[new] = reader.get_tensor(name)
    tensors[EMBEDDING][[END, OFTEN]] = tensors[EMBEDDING][[OFTEN, END]]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
