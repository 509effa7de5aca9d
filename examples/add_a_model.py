"""Teach fusewright an architecture: how its config reads, and what its tensors are called.

The stand-in is the bundled model under foreign names, as if another lab had published it.  In the
package the same takes two files and a line: see ARCHITECTURES in model_executor/models.

python examples/add_a_model.py
"""

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from fusewright import LLM, SamplingParams
from fusewright.model_executor.abacus import FOLDER
from fusewright.model_executor.hf_json import HfConfig
from fusewright.model_executor.models import ARCHITECTURES, Architecture
from fusewright.model_executor.models.families import llama
from fusewright.model_executor.models.weight_names import DENSE_DECODER
from fusewright.model_executor.spec import ModelSpec


def counter_spec(config: HfConfig, architecture: str) -> ModelSpec:
    """Its config says `width` where a Llama says `hidden_size`; the rest is a Llama."""
    values = {**config.values, "hidden_size": config.integer("width")}
    return llama(HfConfig(config.path, values), architecture)


# Checkpoint names -> modules of the shared decoder block.
COUNTER_WEIGHTS = {
    name.replace("model.", "counter.", 1).replace("self_attn", "mixer"): target
    for name, target in DENSE_DECODER.items()
}


def publish(folder: Path) -> None:
    """Writes the foreign checkpoint."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder)
    config = json.loads((FOLDER / "config.json").read_text())
    config.update(architectures=["CounterForCausalLM"], width=config.pop("hidden_size"))
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(FOLDER / "model.safetensors")
    rename = {k: k.replace("model.", "counter.", 1).replace("self_attn", "mixer") for k in weights}
    save_file({rename[k]: w for k, w in weights.items()}, folder / "model.safetensors")


if __name__ == "__main__":
    ARCHITECTURES["CounterForCausalLM"] = Architecture(counter_spec, COUNTER_WEIGHTS)
    with tempfile.TemporaryDirectory() as name:
        publish(Path(name))
        params = SamplingParams(temperature=0.0, max_tokens=16)
        answers = [LLM(model=m).generate(["37+58="], params) for m in (name, "abacus")]
    theirs, ours = (answer[0].outputs[0].text for answer in answers)
    print(f"37+58={theirs}: the new model {'agrees' if theirs == ours else f'differs: {ours}'}")
