"""The bundled models, which add, subtract, sort, reverse and compare.

``abacus`` is a Llama of 3.8M parameters, ``abacus-moe`` a Mixtral of 5.0M with 8 experts a layer,
of which a token has 2.  Two models draft for ``abacus``: ``abacus-draft``, a Llama of 0.33M
parameters, and ``abacus-eagle3``, an EAGLE-3 head of 0.47M.  All folders are ordinary ones of
Hugging Face, written by tools/train_abacus.py and tools/train_abacus_head.py.  ``problems`` makes
the questions that they were trained on, and the held-out ones that measure them.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BUNDLED = {
    "abacus": FOLDER,
    "abacus-moe": FOLDER / "moe",
    "abacus-draft": FOLDER / "draft",
    "abacus-eagle3": FOLDER / "eagle3",
}
